"""The custom operators' Triton kernels on tensors of a CUDA device.

On a CPU there are none, and the operators run by their bodies. Triton is imported with the first kernel, since a CPU
installation does not have it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from mtp_engines.backends.torch.call import Call, Operator, Tensor, Values
from mtp_plugins.accept import launch as accept_launch
from mtp_plugins.deferred_conv import launch as conv_launch
from mtp_plugins.deferred_delta import launch as delta_launch
from mtp_plugins.paged_attention import launch as attention_launch
from mtp_plugins.paged_kv_append import launch as append_launch
from mtp_plugins.skinny_product import launch as product_launch

_ATTENTION_ROWS = 16


def kernels_for(device: torch.device) -> Mapping[str, Operator]:
    """The kernel of every custom operator that has one for this device."""
    return _KERNELS if device.type == "cuda" or _interpreted() else {}


def _interpreted() -> bool:
    """Whether this process runs Triton's kernels in its interpreter, on a CPU, where tests look at them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _out(call: Call, place: int, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The buffer of an output: the one it belongs to, or a new one."""
    if place in call.into:
        return call.into[place]
    return torch.empty(like.shape if shape is None else shape, dtype=like.dtype, device=like.device)


def _inputs(call: Call) -> list[Tensor]:
    return [call[place].contiguous() for place in range(len(call.inputs))]


def _deferred_delta(call: Call) -> Values:
    from mtp_plugins.deferred_delta.kernel import deferred_delta

    inputs = _inputs(call)
    query, value, state, staged_key, staged_value = (inputs[place] for place in (0, 2, 5, 6, 7))
    batch, heads, key_dim, value_dim = state.shape
    launch = delta_launch.launch(
        batch=batch,
        rows=query.shape[1],
        staged_rows=staged_key.shape[1],
        key_heads=query.shape[2] // key_dim,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    staged = (staged_key, staged_value, *inputs[8:10])
    outputs = [_out(call, 0, value), _out(call, 1, state), *(_out(call, 2 + i, x) for i, x in enumerate(staged))]
    launch.run(deferred_delta, inputs, outputs)
    return outputs


def _deferred_conv(call: Call) -> Values:
    from mtp_plugins.deferred_conv.kernel import deferred_conv

    inputs = _inputs(call)
    x, weight, state, staged = inputs[:4]
    launch = conv_launch.launch(
        batch=x.shape[0], rows=x.shape[1], staged_rows=staged.shape[1], channels=x.shape[2], taps=weight.shape[-1]
    )
    outputs = [_out(call, 0, x), _out(call, 1, state), _out(call, 2, staged)]
    launch.run(deferred_conv, inputs, outputs)
    return outputs


def _paged_kv_append(call: Call) -> Values:
    from mtp_plugins.paged_kv_append.kernel import paged_kv_append

    inputs = _inputs(call)
    key, key_pages, value_pages, table = (inputs[place] for place in (0, 2, 3, 4))
    _, page_size, kv_heads, head_dim = key_pages.shape
    launch = append_launch.launch(
        batch=key.shape[0],
        rows=key.shape[1],
        max_pages=table.shape[1],
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    # In place always: a row that is not written has to stay what it was.
    launch.run(paged_kv_append, inputs, [key_pages, value_pages])
    return [key_pages, value_pages]


def _paged_attention(call: Call) -> Values:
    inputs = _inputs(call)
    rows = inputs[0].shape[1]
    if rows > _ATTENTION_ROWS:
        # A chunk of a prompt in parts, since partial results take memory for every row and all of the table.
        parts = [
            _attend([inputs[0][:, start : start + _ATTENTION_ROWS].contiguous(), *inputs[1:4], inputs[4] + start], call)
            for start in range(0, rows, _ATTENTION_ROWS)
        ]
        return [torch.cat(parts, 1)]
    return [_attend(inputs, call, _out(call, 0, inputs[0]))]


def _attend(inputs: list[Tensor], call: Call, output: Tensor | None = None) -> Tensor:
    from mtp_plugins.paged_attention.kernel import paged_attention_combine, paged_attention_partial

    query, key_pages, table, lengths = (inputs[place] for place in (0, 1, 3, 4))
    batch, rows, width = query.shape
    _, page_size, kv_heads, head_dim = key_pages.shape
    sizes = attention_launch.Sizes(
        batch=batch,
        rows=rows,
        heads=width // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=table.shape[1],
        item_bytes=query.element_size(),
    )
    shapes = sizes.scratch().values()
    parts = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in shapes]
    output = torch.empty_like(query) if output is None else output
    partial = attention_launch.launch_partial(sizes, scale=call.attributes.get("scale"), widen=_interpreted())
    partial.run(paged_attention_partial, inputs, parts)
    attention_launch.launch_combine(sizes).run(paged_attention_combine, [*parts, lengths], [output])
    return output


def _skinny_product(call: Call) -> Values:
    from mtp_plugins.skinny_product.kernel import skinny_product

    x, weight = _inputs(call)
    launch = product_launch.launch(
        batch=x.shape[0] if x.ndim == 3 else 1,
        rows=x.shape[-2],
        width_in=weight.shape[1],
        width_out=weight.shape[0],
        item_bytes=x.element_size(),
        widen=_interpreted(),
    )
    output = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
    launch.run(skinny_product, [x, weight], [output])
    return [output]


def _accept(call: Call) -> Values:
    from mtp_plugins.accept.kernel import accept

    draft, chosen = _inputs(call)
    batch, width = chosen.shape
    launch = accept_launch.launch(batch=batch, draft_tokens=width - 1)
    counts = torch.empty((2, batch), dtype=torch.int32, device=draft.device)
    next_token = torch.empty(batch, dtype=torch.int64, device=draft.device)
    outputs = [_out(call, 0, counts[0]), _out(call, 1, counts[1]), _out(call, 2, chosen), _out(call, 3, next_token)]
    launch.run(accept, [draft, chosen], outputs)
    return outputs


_KERNELS: Mapping[str, Operator] = {
    "Accept": _accept,
    "DeferredConv": _deferred_conv,
    "DeferredDelta": _deferred_delta,
    "PagedAttention": _paged_attention,
    "PagedKvAppend": _paged_kv_append,
    "SkinnyProduct": _skinny_product,
}
