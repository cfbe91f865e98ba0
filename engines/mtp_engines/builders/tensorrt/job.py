"""What the builder asks of a worker process, and what that reports."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from mtp_engines.contracts.engines import TensorSpec

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, typical and greatest shape of an input."""
_STRICT = ConfigDict(extra="forbid")


@validated(frozen=True, config=_STRICT)
class Job:
    """One engine to build; paths are absolute."""

    module: str
    """`tensorrt_rtx` or `tensorrt`."""
    graph: str
    plan: str
    result: str
    """Where the report goes."""
    capability: tuple[int, int]
    elsewhere: bool
    """The library is told the capability, since the device may be that of another machine."""
    profiles: tuple[dict[str, Range], ...]
    plugins: str | None = None
    """`package.module:function`, called before the graph is parsed with the capability as in 89 for 8.9."""
    aliased_io: bool = False
    """Plugins of the graph write into their inputs."""
    timing_cache: str | None = None
    """File of measured kernels that is read, if it exists, and written."""


@dataclass(frozen=True)
class Report:
    """What came of a job; `error` is None if the plan was written."""

    version: str
    error: str | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    layers: int = 0
    seconds: float = 0.0
    plan_bytes: int = 0


JOB = TypeAdapter(Job)
REPORT = TypeAdapter(Report)
