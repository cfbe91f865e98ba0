"""A stand-in for the module `tensorrt`, which cannot be installed everywhere: it notes what a worker asks of it.

Only what the worker and Polygraphy use is here, in the shape that the bindings of TensorRT 11 give it. What the
stand-in does is chosen by the name of the graph's file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "11.4.0"
REFUSAL = "In node 7 with name: layers.3 and operator: Paged (parseNode): UNSUPPORTED_NODE"
CALLS: list[tuple[Any, ...]] = []
DataType = Enum("DataType", ["BF16", "FLOAT", "HALF", "INT32", "INT64", "INT8", "BOOL"])
float32, float16, int32, int8 = DataType.FLOAT, DataType.HALF, DataType.INT32, DataType.INT8
bfloat16, int64, bool = DataType.BF16, DataType.INT64, DataType.BOOL
NetworkDefinitionCreationFlag = SimpleNamespace(__members__={})
BuilderFlag = SimpleNamespace(TF32="tf32", __members__={})
PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased", __members__={})
ProfilingVerbosity = SimpleNamespace(LAYER_NAMES_ONLY="names")
LayerType = SimpleNamespace(ATTENTION_INPUT="attention", KV_CACHE_UPDATE="update")
DeviceType = SimpleNamespace(DLA="dla")


def register_plugins(capability: int) -> None:
    """The hook that a job may name."""
    CALLS.append(("register", capability))


def init_libnvinfer_plugins(logger: Any, namespace: str) -> None:
    """Polygraphy asks for the plugins of the library itself."""


class ILogger:
    """Severities and the base class of loggers."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = "internal", "error", "warning", "info", "verbose"


Logger = ILogger


class Network:
    """Two layers, one input, one output."""

    def __init__(self) -> None:
        self.num_layers, self.num_inputs, self.num_outputs = 2, 1, 1

    def get_input(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="x", dtype=bfloat16, shape=(-1, 4), is_shape_tensor=False)

    def get_output(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="y", dtype=float32, shape=(-1, 2))

    def get_layer(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"layer {index}", type="other", precision_is_set=False)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return map(self.get_layer, range(self.num_layers))


class TimingCache:
    """Measured kernels as bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> contextlib.AbstractContextManager[bytes]:
        return contextlib.nullcontext(self.content + b"+")

    def combine(self, other: TimingCache, ignore_mismatch: bool) -> bool:
        return True


class Config:
    """Notes what is set."""

    def __init__(self) -> None:
        self.cache: TimingCache | None = None
        self.DLA_core, self.default_device_type, self.num_optimization_profiles = -1, None, 1

    def get_flag(self, flag: str) -> bool:
        return False

    def clear_flag(self, flag: str) -> None:
        CALLS.append(("clear", flag))

    def set_preview_feature(self, feature: str, on: bool) -> None:
        CALLS.append(("preview", feature, on))

    def create_timing_cache(self, content: bytes) -> TimingCache:
        return TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> TimingCache | None:
        return self.cache

    def add_optimization_profile(self, profile: Profile) -> int:
        CALLS.append(("profile", dict(profile.shapes)))
        return 0


class Profile:
    """Shapes of the inputs."""

    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes[name] = shapes


class Builder:
    """Makes what the others are; a graph called `unbuildable` has no plan."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        CALLS.append(("network", flags))
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        if OnnxParser.parsed == "unbuildable":
            self.logger.log(ILogger.WARNING, "a warning is no reason")
            self.logger.log(ILogger.ERROR, "no kernel\n  for this layer")
            self.logger.log(ILogger.ERROR, "a second error")
            return None
        return b"plan of " + OnnxParser.parsed.encode()


class OnnxParser:
    """Takes any file; `unknown` has a node that it refuses, `fatal` ends the process."""

    parsed = ""

    def __init__(self, network: Network, logger: Any) -> None:
        self.num_errors = 0

    def parse_from_file(self, path: str) -> bool:
        CALLS.append(("parse",))
        OnnxParser.parsed = Path(path).stem
        if self.parsed == "fatal":
            os.write(2, b"assertion failed: creator\n")
            os.abort()
        self.num_errors = int(self.parsed == "unknown")
        return not self.num_errors

    def get_error(self, index: int) -> str:
        """As a parser's error is printed."""
        return f"{REFUSAL}: not found"
