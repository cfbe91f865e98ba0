"""Triton kernels as PTX, without a GPU: what TensorRT is given, checked for what TensorRT relies on.

The kernels' own launches and this file compile with the same options, so both give the same bits.
"""

# triton has no types, and a default installation does not have it; it is imported where a kernel is compiled.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_plugins.triton_kernels import cache, entry
from mtp_plugins.triton_kernels.entry import PtxError

CAPABILITIES = (80, 86, 89, 90, 100, 120)
PTX_VERSION = 87
"""PTX ISA 8.7, the first that knows sm_120a: drivers from CUDA 12.8 on take it. Named, because without it the
version is that of whichever ptxas is found."""


@dataclass(frozen=True)
class Ptx:
    """One kernel at fixed sizes. `entry` takes the parameters of its signature in order and nothing else."""

    entry: str
    text: str
    shared: int
    """Bytes of dynamic shared memory of a launch."""
    version: str
    target: str


def compile_ptx(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, int | float],
    capability: int,
    num_warps: int,
    *,
    num_stages: int,
    directory: Path | None = None,
) -> Ptx:
    """Compile a kernel, or take it from `directory`, if that is given and holds it.

    Args:
        kernel: a function decorated with `triton.jit` in a process that does not interpret kernels.
        signature: parameter name to "*fp32", "*bf16", "*i32", "i32"...; pointers must be aligned to 16 bytes.
        constexprs: the remaining parameters.
        capability: major * 10 + minor of the GPU.
        num_warps, num_stages: those of the `Launch`.

    Raises:
        PtxError: the kernel is interpreted, a parameter is missing, or the result is not what was asked for.
    """
    import triton

    if not isinstance(kernel, triton.JITFunction):
        raise PtxError(
            f"{getattr(kernel, '__name__', kernel)} is a {type(kernel).__name__}, which cannot be compiled. Import the "
            "kernel in a process where TRITON_INTERPRET is not set."
        )
    missing = [name for name in kernel.arg_names if name not in signature and name not in constexprs]
    if missing or len(kernel.arg_names) != len(signature) + len(constexprs):
        raise PtxError(
            f"{kernel.__name__} takes {', '.join(kernel.arg_names)}; {', '.join(missing) or 'other names'} would have "
            "no value. Name every parameter once, in the signature or in the constants."
        )
    ordered = {name: signature[name] for name in kernel.arg_names if name in signature}
    key = digest(kernel, ordered, constexprs, capability, num_warps, num_stages)
    path = None if directory is None else directory / f"{kernel.__name__}.sm_{capability}.{key[:32]}.json"
    if path is not None and (found := cache.load(path, key)) is not None:
        return Ptx(**found)
    ptx = _compile(kernel, ordered, constexprs, capability, num_warps, num_stages)
    if path is not None:
        cache.store(path, key, asdict(ptx))
    return ptx


def digest(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, int | float],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> str:
    """SHA-256 over everything that the PTX depends on; `cache_key` covers the source and all that it calls."""
    import triton

    parts = [kernel.cache_key, list(signature.items()), sorted(constexprs.items()), capability, num_warps, num_stages]
    text = json.dumps([*parts, PTX_VERSION, triton.__version__])
    return hashlib.sha256(text.encode()).hexdigest()


def source(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, int | float]) -> Any:
    """What `triton.compile` takes: the kernel at these sizes, every pointer aligned to 16 bytes."""
    from triton.compiler import ASTSource

    pointers = {(kernel.arg_names.index(name),) for name, dtype in signature.items() if dtype.startswith("*")}
    # A constant keeps its place in the signature.
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, types, dict(constexprs), {place: [["tt.divisibility", 16]] for place in pointers})


def _compile(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, int | float],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> Ptx:
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False, "ptx_version": PTX_VERSION}
    with triton.knobs.compilation.scope():
        # Line information names the folder of this installation, which would make equal kernels differ.
        triton.knobs.compilation.disable_line_info = True
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source(kernel, signature, constexprs), target=target, options=options)
    text = entry.without_scratch(compiled.asm["ptx"], kernel.__name__)
    entry.check(text, kernel.__name__, list(signature.values()), capability, num_warps, PTX_VERSION)
    version, target_name = (entry.directive(text, name) for name in ("version", "target"))
    return Ptx(kernel.__name__, text, compiled.metadata.shared, version, target_name)
