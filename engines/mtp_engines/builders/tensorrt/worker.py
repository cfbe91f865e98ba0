"""Builds one engine: `python -m mtp_engines.builders.tensorrt.worker JOB.json`.

A process of its own, since both libraries end the process at a node that they cannot take.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtp_engines.builders.tensorrt.job import JOB, REPORT, Job, Report
from mtp_engines.contracts.engines import TensorSpec

_SET_PARENT_DEATH_SIGNAL = 1
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}


class _RefusedError(Exception):
    """The library said no; the text is what it said."""


def main(path: Path) -> None:
    """Do the job in a file and write the report where it says."""
    # Nobody would use the engine of a build that was killed.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    job: Job = JOB.validate_json(path.read_bytes())
    trt: Any = importlib.import_module(job.module)
    try:
        report = _build(trt, job)
    except _RefusedError as error:
        report = Report(str(trt.__version__), error=str(error))
    _write_whole(Path(job.result), REPORT.dump_json(report))


def _build(trt: Any, job: Job) -> Report:
    started = time.monotonic()
    logger = _logger(trt)
    if job.plugins is not None:
        module, _, function = job.plugins.partition(":")
        major, minor = job.capability
        getattr(importlib.import_module(module), function)(10 * major + minor)
    builder = trt.Builder(logger)
    if not builder:
        raise _RefusedError(_first(logger.errors, "the builder could not be made"))
    network = _parse(trt, builder, logger, Path(job.graph))
    config = _configure(trt, builder, network, job)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _RefusedError(_first(logger.errors, "no reason was given"))
    _write_whole(Path(job.plan), plan)
    if job.timing_cache is not None:
        _write_whole(Path(job.timing_cache), config.get_timing_cache().serialize())
    return Report(
        version=str(trt.__version__),
        inputs=tuple(_spec(network.get_input(i)) for i in range(network.num_inputs)),
        outputs=tuple(_spec(network.get_output(i)) for i in range(network.num_outputs)),
        layers=network.num_layers,
        seconds=round(time.monotonic() - started, 3),
        plan_bytes=Path(job.plan).stat().st_size,
    )


def _logger(trt: Any) -> Any:
    """A logger that keeps errors in order and drops the rest."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message)

    return Logger()


def _parse(trt: Any, builder: Any, logger: Any, graph: Path) -> Any:
    # TensorRT 11 knows no other networks and drops the flag.
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        said = [f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors]
        raise _RefusedError(_first([*said, *logger.errors], "the graph could not be parsed"))
    return network


def _configure(trt: Any, builder: Any, network: Any, job: Job) -> Any:
    config = builder.create_builder_config()
    # TF32 keeps 10 bits of a float32 product, which is less than the recurrent states need.
    config.clear_flag(trt.BuilderFlag.TF32)
    if job.elsewhere:
        config.num_compute_capabilities = 1
        major, minor = job.capability
        if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), 0):
            raise _RefusedError(f"the compute capability {major}.{minor} was not taken")
    if job.aliased_io:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if job.timing_cache is not None:
        known = Path(job.timing_cache)
        content = known.read_bytes() if known.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(content), False):
            # Damaged, or of another device: it is measured again.
            config.set_timing_cache(config.create_timing_cache(b""), False)
    names = [network.get_input(i).name for i in range(network.num_inputs)]
    for shapes in job.profiles:
        profile = builder.create_optimization_profile()
        for name in names:
            if name not in shapes:
                raise _RefusedError(f"the graph has an input {name} that no profile gives a shape")
            profile.set_shape(name, *shapes[name])
        if config.add_optimization_profile(profile) < 0:
            raise _RefusedError(f"the shapes {shapes} were not taken")
    return config


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tensor.name, _DTYPES.get(tensor.dtype.name, tensor.dtype.name), tuple(tensor.shape))


def _first(errors: Iterable[str], otherwise: str) -> str:
    return " ".join(next(iter(errors), otherwise).split())


def _write_whole(path: Path, content: Any) -> None:
    """Under another name first, so that a file with this one is complete."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with aside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(aside, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
