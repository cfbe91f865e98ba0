"""Inputs and outputs that the engine of each graph must have, and the shapes of its profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtp_engines.backends.gpu.pages import PAGE_SIZE, page_columns
from mtp_engines.backends.gpu.widths import prefill_widths
from mtp_engines.builders.tensorrt.job import Range
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import TensorSpec
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, CachedMixer, ModelSpec, MtpSpec
from mtp_engines.errors import BuildError
from mtp_engines.lowering.heads import CHECKSUM, IDS
from mtp_engines.lowering.precision import WEIGHT_TYPES, Precision
from mtp_plugins.graph import Axis

BACKBONE, HEAD, MTP, MTP_HEAD = "backbone", "head", "mtp", "mtp_head"
_ROWS: tuple[Axis, Axis] = ("batch", "rows")
_TAP_ROWS, _CHAIN_ROWS, _PAGES = "tap_rows", "chain_rows", "pages"
MOST_ROWS = 16
"""Rows of the widest verify."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of one engine."""

    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]

    def check(self, graph: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
        """Compare what a network has with what it must have.

        Raises:
            BuildError: a tensor is missing, unknown, or of another type or shape.
        """
        for what, wanted, found in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            by_name = {spec.name: spec for spec in found}
            expected = {tensor.name: _spec(tensor) for tensor in wanted}
            for name in sorted({*by_name, *expected}):
                if by_name.get(name) != expected.get(name):
                    raise BuildError(
                        f"The engine of the graph {graph} has as {what} {name}: {_text(by_name.get(name))}; this "
                        f"bundle needs {_text(expected.get(name))}. Build the bundle again with this release, and the "
                        "engines from it."
                    )

    def profile(self, sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, Range]:
        """Least, typical and greatest shape of every input, from those of each axis."""
        shapes: dict[str, Range] = {}
        for tensor in self.inputs:
            ranges = [(axis,) * 3 if isinstance(axis, int) else sizes[axis] for axis in tensor.axes]
            least, typical, most = (tuple(each[i] for each in ranges) for i in range(3))
            shapes[tensor.name] = (least, typical, most)
        return shapes


def _spec(tensor: _Tensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.dtype, tuple(axis if isinstance(axis, int) else -1 for axis in tensor.axes))


def _text(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def checked_rows(rows: Iterable[int], limits: Limits) -> tuple[int, ...]:
    """The widths of calls in ascending order.

    Raises:
        BuildError: a width is none that the bundle's calls can have, or the one that every loop needs is missing.
    """
    widths, prefill = tuple(sorted(set(rows))), prefill_widths(limits)
    for width in widths:
        if not 1 <= width <= MOST_ROWS and width not in prefill:
            raise BuildError(
                f"A profile of {width} rows is out of range: a verify has 1 to {MOST_ROWS} rows and prefill "
                f"{' or '.join(map(str, prefill))}. Give row widths among these."
            )
        if width > limits.max_model_len:
            raise BuildError(
                f"A profile of {width} rows is out of range: the bundle's context ends at {limits.max_model_len}. Give "
                "fewer rows."
            )
    if 1 not in widths:
        raise BuildError("The row widths lack 1, which a chained draft and the end of a prompt run with. Add it.")
    return widths


def profiles_of(
    graph: str, interface: Interface, widths: tuple[int, ...], limits: Limits
) -> tuple[dict[str, Range], ...]:
    """One profile for each width: the rows are fixed, the batch goes up to that of the limits.

    A vocabulary head scores the rows of a verify, and of prefill the last one. A draft head that takes its own rows
    as another input than the target's takes the target's in these, and has one more for a row of its own.
    """
    batch, columns = limits.max_batch_size, page_columns(limits)
    if graph in (HEAD, MTP_HEAD):
        scored = [width for width in widths if width <= MOST_ROWS]
        return tuple(interface.profile({"rows": (width, width * batch, width * batch)}) for width in scored)
    kinds = [{"rows": width, _TAP_ROWS: width, _CHAIN_ROWS: 0} for width in widths]
    if any(tensor.name == names.CHAIN for tensor in interface.inputs):
        kinds.append({"rows": 1, _TAP_ROWS: 0, _CHAIN_ROWS: 1})
    return tuple(
        interface.profile(
            {"batch": (1, batch, batch), _PAGES: (columns, batch * columns, batch * columns)}
            | {axis: (size,) * 3 for axis, size in kind.items()}
        )
        for kind in kinds
    )


def interface_of(
    graph: str, spec: ModelSpec, limits: Limits, precision: Precision, *, paged: bool = False
) -> Interface:
    """What the engine of a graph must have: `backbone`, `head`, `mtp`, `mtp.1`, ... or `mtp_head`.

    Args:
        paged: caches lie in pages and states are committed by the next call, as `lower_paged` makes them.
    """
    if graph == BACKBONE:
        return _backbone(spec, limits, precision, paged=paged)
    if graph == HEAD:
        return _head(spec.hidden_size)
    assert spec.mtp is not None
    if graph == MTP_HEAD:
        return _head(spec.mtp.hidden_size)
    return _mtp(spec, spec.mtp, int(graph.partition(".")[2] or 0), limits, precision, paged=paged)


def _backbone(spec: ModelSpec, limits: Limits, precision: Precision, *, paged: bool) -> Interface:
    inputs, outputs = [_Tensor(names.INPUT_IDS, "int64", _ROWS)], []
    if any(True for _ in spec.cached_layers()):
        inputs += _positions(limits, paged=paged)
    for index, mixer in spec.cached_layers():
        pasts, presents = _caches(index, mixer, limits, precision, paged=paged)
        inputs += pasts
        outputs += presents
    for index, delta in spec.delta_layers():
        conv: tuple[Axis, ...] = ("batch", delta.conv_kernel - 1, delta.conv_width)
        state: tuple[Axis, ...] = ("batch", delta.value_heads, delta.key_head_dim, delta.value_head_dim)
        inputs += [
            _Tensor(names.past_conv(index), "float32", conv),
            _Tensor(names.past_recurrent(index), "float32", state),
        ]
        outputs += [
            _Tensor(names.present_conv(index), "float32", conv),
            _Tensor(names.present_recurrent(index), "float32", state),
        ]
        for name, width in delta.factor_widths.items():
            if paged:
                room: tuple[Axis, ...] = ("batch", limits.max_draft_tokens + 1, width)
                inputs.append(_Tensor(names.staged(index, name), "float32", room))
                outputs.append(_Tensor(names.following(index, name), "float32", room))
            else:
                outputs.append(_Tensor(names.factor(index, name), "float32", (*_ROWS, width)))
    if paged and any(True for _ in spec.delta_layers()):
        inputs += [_Tensor(name, "int32", ("batch",)) for name in (names.ACCEPTED_ROWS, names.KEPT_ROWS)]
    outputs.append(_Tensor(names.HIDDEN, "float32", (*_ROWS, spec.hidden_size)))
    if spec.mtp is not None and spec.mtp.taps:
        outputs.append(_Tensor(names.TAP, "float32", (*_ROWS, spec.tap_width)))
    return Interface(tuple(inputs), tuple(outputs))


def _mtp(spec: ModelSpec, mtp: MtpSpec, depth: int, limits: Limits, precision: Precision, *, paged: bool) -> Interface:
    mixer = spec.head_mixers()[depth]
    pasts, presents = _caches(0, mixer, limits, precision, paged=paged)
    inputs = [
        _Tensor(names.INPUT_IDS, "int64", _ROWS),
        _Tensor(names.tap_of(mtp), "float32", ("batch", _TAP_ROWS, spec.tap_width)),
        *_positions(limits, paged=paged),
        *pasts,
    ]
    if mtp.tap_projection:
        inputs.append(_Tensor(names.CHAIN, "float32", ("batch", _CHAIN_ROWS, mtp.hidden_size)))
    outputs = [*presents, _Tensor(names.HIDDEN_OUT, "float32", (*_ROWS, mtp.hidden_size))]
    if mtp.chain == "residual" and mtp.output_norm:
        outputs.append(_Tensor(names.CHAIN_OUT, "float32", (*_ROWS, mtp.hidden_size)))
    return Interface(tuple(inputs), tuple(outputs))


def _head(hidden_size: int) -> Interface:
    return Interface(
        (_Tensor(names.HIDDEN, "float32", ("rows", hidden_size)),),
        (_Tensor(IDS, "int64", ("rows",)), _Tensor(CHECKSUM, "float32", ("rows",))),
    )


def _positions(limits: Limits, *, paged: bool) -> list[_Tensor]:
    positions = _Tensor(names.POSITION_IDS, "int64", _ROWS)
    if not paged:
        return [positions, _Tensor(names.PAST_LENGTH, "int64", ("batch",))]
    table = _Tensor(names.BLOCK_TABLE, "int32", ("batch", page_columns(limits)))
    return [positions, _Tensor(names.PAST_LENGTH, "int32", ("batch",)), table]


def _caches(
    index: int, mixer: CachedMixer, limits: Limits, precision: Precision, *, paged: bool
) -> tuple[list[_Tensor], list[_Tensor]]:
    """The caches of a layer before and after a call."""
    dtype = WEIGHT_TYPES[precision].numpy().name
    if isinstance(mixer, AttentionSpec):
        heads, width = mixer.num_kv_heads, mixer.head_dim
        pairs = [(names.past_key, names.present_key), (names.past_value, names.present_value)]
    else:
        heads, width = 1, mixer.row_width
        pairs = [(names.past_latent, names.present_latent)]
    axes: tuple[Axis, ...] = ("batch", heads, limits.capacity, width)
    if paged:
        axes = (_PAGES, PAGE_SIZE, heads, width)
    pasts = [_Tensor(past(index), dtype, axes) for past, _ in pairs]
    return pasts, [_Tensor(present(index), dtype, axes) for _, present in pairs]
