"""The last step of a build: whatever the chosen backend needs beside the graphs, and what it promises here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

from mtp_engines.backends import EngineOptions, open_engine
from mtp_engines.backends.gpu.widths import engine_widths
from mtp_engines.builders.tensorrt.build import build_engines
from mtp_engines.builders.tensorrt.graphs import graph_names
from mtp_engines.builders.tensorrt.target import local_capability, resolve_target
from mtp_engines.bundle import Bundle
from mtp_engines.contracts.manifest import BackendBuild, Manifest
from mtp_engines.engine import Ids
from mtp_engines.errors import BuildError
from mtp_engines.lowering.precision import Precision
from mtp_engines.promise import measure_promise

Backend = Literal["onnxruntime", "torch", "tensorrt", "tensorrt-rtx"]
BACKENDS: tuple[Backend, ...] = ("onnxruntime", "torch", "tensorrt", "tensorrt-rtx")
PRECISIONS = ("fp32", "bf16", "fp16")
_USUAL: dict[str, Precision] = {"onnxruntime-cpu": "fp32", "onnxruntime-cuda": "fp16", "torch-cpu": "fp32"}
"""Precision where none was chosen; bf16 elsewhere."""


@dataclass(frozen=True)
class BackendOptions:
    """What a user may choose about the backend.

    Attributes:
        backend: one of `BACKENDS`.
        device: None takes what is usual: a CPU for onnxruntime, a CUDA device for the others.
        precision: of weights and caches on a GPU backend.
        products: see `BackendBuild`.
        compute_capability: of the GPU that engines are built for, such as 8.9; None takes that of this machine.
    """

    backend: Backend = "onnxruntime"
    device: Literal["cpu", "cuda"] | None = None
    precision: Precision | None = None
    products: Literal["library", "skinny"] = "library"
    compute_capability: str | None = None

    @property
    def where(self) -> Literal["cpu", "cuda"]:
        """The device, chosen or usual."""
        return self.device or ("cpu" if self.backend == "onnxruntime" else "cuda")

    @property
    def name(self) -> str:
        """Key of `Manifest.backends`."""
        return f"{self.backend}-{self.where}"


def check_backend(options: BackendOptions) -> None:
    """Refuse before any work what cannot be built here.

    Raises:
        BuildError: options exclude each other, or a package is missing.
    """
    if options.backend.startswith("tensorrt"):
        if options.where == "cpu":
            raise BuildError(f"--backend {options.backend} builds engines for a GPU; leave --device out.")
        resolve_target(options.backend, _capability(options))
    elif options.compute_capability is not None:
        raise BuildError(
            f"--compute-capability is for engines, and --backend {options.backend} builds none. Leave it out."
        )
    if (options.backend == "torch" or options.name == "onnxruntime-cuda") and find_spec("torch") is None:
        raise BuildError(
            f"--backend {options.backend} on {options.where} needs the package torch. Install it with "
            "`pip install 'mtp-export[torch]'`."
        )
    if options.name == "onnxruntime-cpu" and options.precision not in (None, "fp32"):
        raise BuildError(
            f"--precision {options.precision} has no kernels in ONNX Runtime on a CPU that pay; leave it out, or use "
            "--device cuda."
        )
    if options.products == "skinny" and options.backend not in ("torch", "tensorrt"):
        raise BuildError(f"--products skinny is for the backends torch and tensorrt, found {options.backend}.")


def with_backend(
    bundle: Bundle,
    options: BackendOptions,
    ids: Ids,
    phase: Callable[[str, int, str], None],
    note: Callable[[str], None],
) -> Manifest:
    """Build what the backend needs in the bundle, and say in the manifest what it promises.

    Args:
        ids: int64[rows], a text for the test of the promise.

    Raises:
        BuildError, BundleError: the backend refuses the model.
    """
    manifest = bundle.manifest
    if options.backend != "tensorrt-rtx":  # Which `mtp-run` does not run.
        manifest = replace(manifest, backend=options.backend, device=options.where)
    if options.name == "onnxruntime-cpu":
        return manifest
    build = BackendBuild(options.precision or _USUAL.get(options.name, "bf16"), options.products)
    if options.backend.startswith("tensorrt"):
        _build_engines(bundle, options, build, phase, note)
    if options.backend == "tensorrt-rtx" or (options.where == "cuda" and not _cuda_here()):
        note(f"nothing was run: what {options.name} promises needs a GPU and was not tested")
        return _recorded(manifest, options, build)
    phase(f"rows on {options.name}", 1, " test")
    opened = Bundle(bundle.directory, _recorded(manifest, options, build))
    engine = open_engine(opened, EngineOptions())
    promise = measure_promise(engine, ids)
    if promise.first_difference:
        note(
            f"on {options.name} rows depend on their number (first at {promise.first_difference}); greedy output may "
            f"differ from plain decoding at near ties{_remedy(options)}"
        )
    return _recorded(manifest, options, replace(build, numerics=promise, tested_on=engine.runs_on))


def _remedy(options: BackendOptions) -> str:
    """What a user could try; our products are only kernels of their own on a CUDA device."""
    return ". Try --products skinny" if options.where == "cuda" and options.products == "library" else ""


def _recorded(manifest: Manifest, options: BackendOptions, build: BackendBuild) -> Manifest:
    return replace(manifest, backends={**manifest.backends, options.name: build})


def _build_engines(
    bundle: Bundle,
    options: BackendOptions,
    build: BackendBuild,
    phase: Callable[[str, int, str], None],
    note: Callable[[str], None],
) -> None:
    widths, skinny = engine_widths(bundle.manifest.limits), build.products == "skinny"
    phase("engines", len(graph_names(bundle.manifest.model)), " engines")
    build_engines(
        bundle,
        options.backend,
        _capability(options),
        build.precision,
        widths,
        report=note,
        skinny=skinny,
    )


def _capability(options: BackendOptions) -> str:
    if options.compute_capability is not None:
        return options.compute_capability
    found = local_capability()
    if found is None and options.backend == "tensorrt":
        raise BuildError(
            "--backend tensorrt builds for the GPU of the machine that it runs on, and there is none here. Build on a "
            "machine with one; --backend tensorrt-rtx builds anywhere."
        )
    if found is None:
        raise BuildError(
            f"--backend {options.backend} builds for one kind of GPU, and there is none here. Name its compute "
            "capability, as in --compute-capability 8.9."
        )
    return "{}.{}".format(*found)


def _cuda_here() -> bool:
    if find_spec("torch") is None:
        return False
    return bool(import_module("torch").cuda.is_available())
