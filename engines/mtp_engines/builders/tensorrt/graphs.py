"""The graphs of a bundle as files that the parser reads, beside one file of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from mtp_engines.backends.gpu.pages import PAGE_SIZE, page_columns
from mtp_engines.backends.gpu.widths import prefill_widths
from mtp_engines.builders.tensorrt.io import BACKBONE, HEAD, MOST_ROWS, MTP, MTP_HEAD
from mtp_engines.bundle import Bundle
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.paged import lower_paged, skinny_products
from mtp_engines.lowering.precision import Precision, to_precision
from mtp_engines.lowering.standard import fix_axes, head_standard, lower_standard
from mtp_engines.lowering.tensorrt import lower_tensorrt
from mtp_engines.lowering.widen import widen_matrices

Lowering = Callable[[ir.Model], ir.Model]
_ALIGNMENT = 4096
_WEIGHTS = "weights.cast.data"


def graph_names(spec: ModelSpec) -> tuple[str, ...]:
    """Every engine that a model needs."""
    heads = [MTP if depth == 0 else f"{MTP}.{depth}" for depth in range(spec.mtp.depth if spec.mtp else 0)]
    own = [MTP_HEAD] if spec.mtp and (spec.mtp.own_head or spec.mtp.draft_vocab_size is not None) else []
    return (BACKBONE, HEAD, *heads, *own)


@dataclass(frozen=True)
class Form:
    """How the graphs of a flavour look.

    Attributes:
        body: lowers a backbone or draft head without its vocabulary head.
        head: lowers a vocabulary head.
        axes: sizes that the engines fix.
    """

    body: Lowering
    head: Lowering
    axes: Mapping[str, int]


def standard_form(limits: Limits) -> Form:
    """Standard operators alone over one cache for each sequence."""
    most_rows = max(MOST_ROWS, *prefill_widths(limits))
    return Form(lambda model: lower_standard(model, most_rows), lambda head: head, {"capacity": limits.capacity})


def plugin_form(limits: Limits, *, skinny: bool) -> Form:
    """Plugins over pages, and states that the next call commits."""
    widest = limits.max_draft_tokens + 1

    def head(model: ir.Model) -> ir.Model:
        return lower_tensorrt(skinny_products(model, flat=True)) if skinny else model

    axes = {"page_size": PAGE_SIZE, "max_pages": page_columns(limits)}
    return Form(lambda model: lower_tensorrt(lower_paged(model, widest, skinny=skinny)), head, axes)


def write_graphs(bundle: Bundle, precision: Precision, directory: Path, form: Form) -> dict[str, Path]:
    """Lower every graph and write it into `directory`, each weight once."""
    spec = bundle.manifest.model
    weights = _Weights(directory)
    paths = {}
    for name in graph_names(spec):
        model = to_precision(widen_matrices(ir.load(_source(bundle, name))), precision)
        if name in (HEAD, MTP_HEAD):
            model = form.head(head_standard(model))
        else:
            model = fix_axes(form.body(without_head(model)), form.axes)
        weights.place(model)
        paths[name] = directory / f"{name}.onnx"
        ir.save(model, paths[name])
    return paths


def _source(bundle: Bundle, name: str) -> Path:
    """The canonical graph that an engine's graph is made from."""
    if name in (BACKBONE, HEAD):
        return bundle.backbone
    return bundle.mtp[0 if name == MTP_HEAD else int(name.partition(".")[2] or 0)]


class _Weights:
    """Cast weights in one file, uncast ones where the bundle has them, under a link."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, ir.ExternalTensor] = {}

    def place(self, model: ir.Model) -> None:
        """Make every weight of a model external to files in the directory."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                self._link(Path(tensor.path))
            elif isinstance(tensor, ir.LazyTensor):
                value.const_value = self._write(tensor)

    def _link(self, path: Path) -> None:
        link = self._directory / path.name
        if not link.exists():
            link.symlink_to(path.resolve())

    def _write(self, tensor: ir.LazyTensor) -> ir.ExternalTensor:
        name = tensor.name
        assert name is not None
        if name not in self._written:
            with (self._directory / _WEIGHTS).open("ab") as stream:
                offset = -(-stream.tell() // _ALIGNMENT) * _ALIGNMENT
                stream.truncate(offset)
                stream.seek(offset)
                content = tensor.tobytes()
                stream.write(content)
            shape = ir.Shape(tensor.shape.numpy())
            self._written[name] = ir.ExternalTensor(
                _WEIGHTS, offset, len(content), tensor.dtype, shape=shape, name=name, base_dir=self._directory
            )
        return self._written[name]
