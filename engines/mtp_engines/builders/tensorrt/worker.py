"""Builds one engine: `python -m mtp_engines.builders.tensorrt.worker JOB.json`.

A process of its own, since both libraries end the process at a node that they cannot take, and since Polygraphy
settles which of the two it drives when it is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mtp_engines.builders.tensorrt.attention import heed_lengths
from mtp_engines.builders.tensorrt.job import JOB, REPORT, Job, Report
from mtp_engines.contracts.engines import TensorSpec
from mtp_engines.errors import BuildError

_SET_PARENT_DEATH_SIGNAL = 1


def main(path: Path) -> None:
    """Do the job in a file and write the report where it says."""
    # Nobody would use the engine of a build that was killed.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    job: Job = JOB.validate_json(path.read_bytes())
    trt: Any = importlib.import_module(job.module)
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(job.elsewhere))
    polygraphy: Any = importlib.import_module("polygraphy.backend.trt")
    errors = _errors()
    try:
        report = _build(trt, polygraphy, job)
    except (BuildError, importlib.import_module("polygraphy.exception").PolygraphyException) as error:
        report = Report(str(trt.__version__), error=" ".join([*errors.texts, str(error)][0].split()))
    _write_whole(Path(job.result), REPORT.dump_json(report))


def _build(trt: Any, polygraphy: Any, job: Job) -> Report:
    started = time.monotonic()
    if job.plugins is not None:
        module, _, function = job.plugins.partition(":")
        major, minor = job.capability
        getattr(importlib.import_module(module), function)(10 * major + minor)
    # TensorRT 11 knows no other networks and drops the flag.
    typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    parsed = polygraphy.network_from_onnx_path(job.graph, strongly_typed=typed)
    network = parsed[1]
    heed_lengths(trt, network)
    inputs = tuple(_spec(network.get_input(i)) for i in range(network.num_inputs))
    outputs = tuple(_spec(network.get_output(i)) for i in range(network.num_outputs))
    config = _config(trt, polygraphy, job, [spec.name for spec in inputs])
    plan = polygraphy.engine_bytes_from_network(parsed, config=config, save_timing_cache=job.timing_cache)
    _write_whole(Path(job.plan), plan)
    return Report(
        version=str(trt.__version__),
        inputs=inputs,
        outputs=outputs,
        layers=network.num_layers,
        seconds=round(time.monotonic() - started, 3),
        plan_bytes=Path(job.plan).stat().st_size,
    )


def _config(trt: Any, polygraphy: Any, job: Job, names: list[str]) -> Any:
    profiles = []
    for shapes in job.profiles:
        profile = polygraphy.Profile()
        for name in names:
            # Polygraphy would make up a shape.
            if name not in shapes:
                raise BuildError(f"the graph has an input {name} that no profile gives a shape")
            profile.add(name, *shapes[name])
        profiles.append(profile)
    common = {"profiles": profiles, "profiling_verbosity": trt.ProfilingVerbosity.LAYER_NAMES_ONLY}
    if job.elsewhere:
        module: Any = importlib.import_module("polygraphy.backend.tensorrt_rtx")
        config = module.CreateConfigRTX(compute_capabilities=[job.capability], **common)
    else:
        config = polygraphy.CreateConfig(load_timing_cache=job.timing_cache, **common)

    def finish(builder: Any, network: Any, config: Any) -> None:
        # TF32 keeps 10 bits of a float32 product, which is less than the recurrent states need.
        config.clear_flag(trt.BuilderFlag.TF32)
        if job.aliased_io:
            # Polygraphy's own argument turns every other feature off.
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    return polygraphy.PostprocessConfig(config, finish)


class _Errors(logging.Handler):
    """Keeps what Polygraphy says of errors, its own and the library's, in order."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage().removeprefix("[E] ").removeprefix("[!] "))


def _errors() -> _Errors:
    logger: Any = importlib.import_module("polygraphy.logger").G_LOGGER
    logger.use_python_logging_system = True
    handler = _Errors()
    logger.python_logger.handlers = [handler]
    logger.python_logger.propagate = False
    return handler


def _spec(tensor: Any) -> TensorSpec:
    dtype: Any = importlib.import_module("polygraphy.datatype").DataType.from_dtype(tensor.dtype)
    return TensorSpec(tensor.name, str(dtype.name), tuple(tensor.shape))


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
