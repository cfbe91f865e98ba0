"""Standard ONNX operators that compute: elementwise, reductions, products, attention."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch
from torch.nn import functional

from mtp_engines.backends.torch.call import Call, Tensor, Values, operator
from mtp_engines.backends.torch.tensors import dtype_of


def _elementwise(name: str, function: Callable[..., Tensor]) -> None:
    def run(call: Call) -> Values:
        return [function(*(value for value in call.inputs if value is not None))]

    operator(name)(run)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """ONNX divides integers toward zero."""
    return torch.div(a, b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _divide,
    "Mod": torch.remainder,
    "Neg": torch.neg,
    "Exp": torch.exp,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Sigmoid": torch.sigmoid,
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "Less": torch.less,
    "LessOrEqual": torch.less_equal,
    "Equal": torch.eq,
    "Not": torch.logical_not,
    "Where": torch.where,
    "Greater": torch.greater,
    "GreaterOrEqual": torch.greater_equal,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Identity": lambda x: x,
}
for _name, _function in _ELEMENTWISE.items():
    _elementwise(_name, _function)


@operator("Cast", attributes="to")
def cast(call: Call) -> Values:
    """To the type of the attribute."""
    return [call[0].to(dtype_of(ir.DataType(call.attributes["to"])))]


@operator("CastLike")
def cast_like(call: Call) -> Values:
    """To the type of the second input."""
    return [call[0].to(call[1].dtype)]


@operator("MatMul")
def matmul(call: Call) -> Values:
    """The library's product; float32 in full precision."""
    return [torch.matmul(call[0], call[1])]


@operator("RMSNormalization", attributes="axis epsilon")
def rms_normalization(call: Call) -> Values:
    """scale * x / sqrt(mean(x^2) + epsilon) over the last axis, in float32."""
    assert call.attributes.get("axis", -1) == -1
    x, scale = call[0], call[1]
    normed = functional.rms_norm(x.float(), (x.shape[-1],), eps=call.attributes.get("epsilon", 1e-5))
    return [(normed * scale.float()).to(x.dtype)]


@operator("Softmax", attributes="axis")
def softmax(call: Call) -> Values:
    """Over one axis."""
    return [torch.softmax(call[0], call.attributes.get("axis", -1))]


@operator("ReduceSum", attributes="keepdims")
def reduce_sum(call: Call) -> Values:
    """Sum over the axes of the second input."""
    return [call[0].sum(call.ints(1), keepdim=bool(call.attributes.get("keepdims", 1)))]


@operator("ReduceMax", attributes="keepdims")
def reduce_max(call: Call) -> Values:
    """Greatest value over the axes of the second input; not a number if one of them is none."""
    axes = call.ints(1) if call.optional(1) is not None else list(range(call[0].ndim))
    return [call[0].amax(axes, keepdim=bool(call.attributes.get("keepdims", 1)))]


@operator("ReduceMin", attributes="keepdims")
def reduce_min(call: Call) -> Values:
    """Least value over the axes of the second input."""
    axes = call.ints(1) if call.optional(1) is not None else list(range(call[0].ndim))
    return [call[0].amin(axes, keepdim=bool(call.attributes.get("keepdims", 1)))]


@operator("CumSum")
def cumulative_sum(call: Call) -> Values:
    """Along one axis."""
    return [torch.cumsum(call[0], call.ints(1)[0]).to(call[0].dtype)]


@operator("ArgMax", attributes="axis keepdims")
def arg_max(call: Call) -> Values:
    """The first of equal values, which torch.argmax does not promise."""
    axis, keep = call.attributes.get("axis", 0), bool(call.attributes.get("keepdims", 1))
    return [first_maximum(call[0], axis, keepdim=keep)]


def first_maximum(x: Tensor, axis: int, *, keepdim: bool = False) -> Tensor:
    """int64 place of the greatest value; of equal ones the first. NaN anywhere gives the size of the axis less one."""
    size = x.shape[axis]
    shape = [1] * x.ndim
    shape[axis] = size
    places = torch.arange(size, device=x.device).reshape(shape)
    best = torch.where(x == x.amax(axis, keepdim=True), places, size)
    return best.amin(axis, keepdim=keepdim).clamp_max(size - 1)


@operator("TopK", attributes="axis")
def top_k(call: Call) -> Values:
    """Greatest values first, of equal ones the first, which torch.topk does not promise."""
    count, axis = call.ints(1)[0], call.attributes.get("axis", -1)
    values, places = torch.sort(call[0], dim=axis, descending=True, stable=True)
    return [values.narrow(axis, 0, count), places.narrow(axis, 0, count)]


@operator("Attention", attributes="scale", inputs=4)
def attention(call: Call) -> Values:
    """softmax(scale * q k^T, masked) v with grouped heads; [batch, heads, rows, head_dim], in float32."""
    query, key, value = (call[index].float() for index in range(3))
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    scale = call.attributes.get("scale") or query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    mask = call.optional(3)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return [torch.matmul(torch.softmax(scores, -1), value).to(call[0].dtype)]


@operator("RotaryEmbedding", attributes="num_heads rotary_embedding_dim interleaved")
def rotary_embedding(call: Call) -> Values:
    """Rotate the first dimensions of each head of [batch, rows, heads * head_dim] by tables of positions."""
    x, cosine, sine, positions = call[0], call[1], call[2], call[3]
    batch, rows, width = x.shape
    heads = call.attributes["num_heads"]
    dim = call.attributes.get("rotary_embedding_dim", 0) or width // heads
    split = x.reshape(batch, rows, heads, width // heads)
    cos, sin = (table[positions][:, :, None].to(x.dtype) for table in (cosine, sine))
    rotated, rest = split[..., :dim], split[..., dim:]
    if call.attributes.get("interleaved", 0):
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return [torch.cat([turned, rest], -1).reshape(x.shape)]
