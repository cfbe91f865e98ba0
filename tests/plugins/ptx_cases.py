"""Every kernel with the sizes of a real model, and its compilation in a worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_plugins import accept, deferred_conv, deferred_delta, paged_attention, paged_kv_append, skinny_product
from mtp_plugins.accept import launch as accept_launch
from mtp_plugins.deferred_conv import launch as conv_launch
from mtp_plugins.deferred_delta import launch as delta_launch
from mtp_plugins.paged_attention import launch as attention_launch
from mtp_plugins.paged_kv_append import launch as append_launch
from mtp_plugins.skinny_product import launch as product_launch
from mtp_plugins.triton_kernels.launch import Launch
from mtp_plugins.triton_kernels.ptx import Ptx
from tests.plugins.workers import Worker

PARTIALS = ("partial_max", "partial_sum", "partial_output")
ITEM_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Case:
    """A kernel `name` of the operator's folder `folder`, at some sizes."""

    folder: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launch: Launch
    signature: Mapping[str, str]

    def parameters(self) -> list[str]:
        """Names of all parameters in order, constants excepted."""
        inputs, outputs = ([f"{name}_ptr" for name in names] for names in (self.inputs, self.outputs))
        return [*inputs, *self.launch.scalars, *outputs]


def delta(rows: int = 5, element: str = "bf16") -> Case:
    """DeferredDelta of a model with 16 key heads and 32 value heads."""
    heads = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    launch, operator = delta_launch.launch(batch=1, rows=rows, staged_rows=16, **heads), deferred_delta.OPERATOR
    names = operator.inputs, operator.outputs
    return Case("deferred_delta", "deferred_delta", *names, launch, delta_launch.signature(element))


def conv(rows: int = 5, element: str = "bf16") -> Case:
    """DeferredConv of the same model."""
    launch = conv_launch.launch(batch=1, rows=rows, staged_rows=16, channels=8192, taps=4)
    names = deferred_conv.OPERATOR.inputs, deferred_conv.OPERATOR.outputs
    return Case("deferred_conv", "deferred_conv", *names, launch, conv_launch.signature(element))


def accepting(rows: int = 5, element: str = "bf16") -> Case:
    """Accept of a verify of so many rows."""
    launch = accept_launch.launch(batch=1, draft_tokens=rows - 1)
    names = accept.OPERATOR.inputs, accept.OPERATOR.outputs
    return Case("accept", "accept", *names, launch, accept_launch.signature())


def append(rows: int = 5, element: str = "bf16") -> Case:
    """PagedKvAppend of the same model."""
    launch = append_launch.launch(batch=1, rows=rows, max_pages=64, page_size=16, kv_heads=4, head_dim=256)
    names = paged_kv_append.OPERATOR.inputs, paged_kv_append.OPERATOR.outputs
    return Case("paged_kv_append", "paged_kv_append", *names, launch, append_launch.signature(element))


def attention_sizes(rows: int, element: str) -> attention_launch.Sizes:
    """PagedAttention of the same model."""
    heads = {"heads": 24, "kv_heads": 4, "head_dim": 512 // ITEM_BYTES[element]}
    pages = {"page_size": 16, "max_pages": 64, "item_bytes": ITEM_BYTES[element]}
    return attention_launch.Sizes(batch=1, rows=rows, **heads, **pages)


def partial(rows: int = 5, element: str = "bf16") -> Case:
    """The first kernel of PagedAttention."""
    launch = attention_launch.launch_partial(attention_sizes(rows, element))
    names = paged_attention.OPERATOR.inputs, PARTIALS
    return Case(
        "paged_attention", "paged_attention_partial", *names, launch, attention_launch.signature_partial(element)
    )


def combine(rows: int = 5, element: str = "bf16") -> Case:
    """The second kernel of PagedAttention."""
    launch = attention_launch.launch_combine(attention_sizes(rows, element))
    names = (*PARTIALS, "lengths"), paged_attention.OPERATOR.outputs
    return Case(
        "paged_attention", "paged_attention_combine", *names, launch, attention_launch.signature_combine(element)
    )


def product(rows: int = 5, element: str = "bf16") -> Case:
    """SkinnyProduct of the same model."""
    sizes = {"width_in": 2048, "width_out": 4096, "item_bytes": ITEM_BYTES[element]}
    launch = product_launch.launch(batch=1, rows=rows, **sizes)
    names = skinny_product.OPERATOR.inputs, skinny_product.OPERATOR.outputs
    signature = product_launch.signature(element, element)
    return Case("skinny_product", "skinny_product", *names, launch, signature)


CASES: dict[str, Callable[..., Case]] = {
    case().name: case for case in (delta, conv, accepting, append, partial, combine, product)
}


def compiled(worker: Worker, case: Case, capability: int = 90, folder: Path | None = None) -> Ptx:
    """The PTX of a case."""
    result = worker.call(compile_in_worker, case, capability, folder)
    assert isinstance(result, Ptx)
    return result


def kernel(case: Case) -> Any:
    """The kernel of a case; in a worker."""
    return getattr(importlib.import_module(f"mtp_plugins.{case.folder}.kernel"), case.name)


def compile_in_worker(case: Case, capability: int, folder: Path | None) -> Ptx:
    """`compile_ptx`; in a worker."""
    from mtp_plugins.triton_kernels.ptx import compile_ptx

    launch = case.launch
    options = {"num_stages": launch.num_stages, "directory": folder}
    return compile_ptx(kernel(case), case.signature, launch.constexprs, capability, launch.num_warps, **options)


def specialised_in_worker(case: Case) -> dict[str, bool]:
    """Whether Triton compiles again for some values of a parameter, for each but the constants; in a worker."""
    parameters = kernel(case).params
    return {p.name: not p.do_not_specialize for p in parameters if not p.is_constexpr}


def names_in_worker(case: Case) -> list[str]:
    """Names of a kernel's parameters; in a worker."""
    return list(kernel(case).arg_names)


def intermediate_in_worker(case: Case) -> str:
    """Triton's GPU representation of a kernel, which names layouts; in a worker."""
    import triton
    from triton.backends.compiler import GPUTarget

    from mtp_plugins.triton_kernels.ptx import source

    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source(kernel(case), case.signature, case.launch.constexprs), target=target).asm["ttgir"])


def digest_in_worker(case: Case, capability: int) -> str:
    """The key of a case; in a worker."""
    from mtp_plugins.triton_kernels.ptx import digest

    function, launch = kernel(case), case.launch
    ordered = {parameter: case.signature[parameter] for parameter in function.arg_names if parameter in case.signature}
    return digest(function, ordered, launch.constexprs, capability, launch.num_warps, launch.num_stages)


def changed_source_in_worker(case: Case, capability: int) -> str:
    """The key of a case whose kernel differs in one constant of its text; in a worker."""
    from mtp_plugins.triton_kernels.ptx import digest

    function, launch = kernel(case), case.launch
    changed = type(function)(function.fn)
    changed._unsafe_update_src(function.src.replace("other=0)", "other=1)"))
    ordered = {parameter: case.signature[parameter] for parameter in function.arg_names if parameter in case.signature}
    return digest(changed, ordered, launch.constexprs, capability, launch.num_warps, launch.num_stages)
