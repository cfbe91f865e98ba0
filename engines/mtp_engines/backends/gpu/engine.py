"""An engine of the shared GPU runner: a bundle's canonical graphs, lowered by a backend and run by its executor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from mtp_engines.backends.gpu.capture import DEVICE_LOCK
from mtp_engines.backends.gpu.device import Setup
from mtp_engines.backends.gpu.executor import Executor, Graph
from mtp_engines.backends.gpu.sequences import DeviceSequences, Slot
from mtp_engines.backends.gpu.widths import Widths
from mtp_engines.backends.torch.tensors import name_of
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import RequestError
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.precision import Precision, to_precision
from mtp_engines.lowering.standard import head_standard
from mtp_engines.lowering.widen import widen_matrices

Lowering = Callable[[ir.Model], ir.Model]


@dataclass(frozen=True)
class Canonical:
    """The canonical graphs of a bundle.

    Attributes:
        load: reads one of them.
        backbone, mtp: their files; a head may have several depths, of which the first is taken.
    """

    spec: ModelSpec
    load: Callable[[Path], ir.Model]
    backbone: Path
    mtp: tuple[Path, ...]


def lower_graphs(
    canonical: Canonical, precision: Precision, lower: Lowering, lower_head: Lowering
) -> dict[Graph, ir.Model]:
    """The graphs that an executor runs.

    Args:
        canonical: where they come from.
        precision: of weights and caches.
        lower: takes a backbone or draft head without its vocabulary head, in that precision.
        lower_head: takes a vocabulary head.

    Raises:
        BundleError: a part of the model has no form for the backend.
    """

    def load(path: Path) -> ir.Model:
        return to_precision(widen_matrices(canonical.load(path)), precision)

    lowered: dict[Graph, ir.Model] = {
        "backbone": lower(without_head(load(canonical.backbone))),
        "head": lower_head(_vocabulary_head(load(canonical.backbone))),
    }
    if canonical.mtp:
        lowered["mtp"] = lower(without_head(load(canonical.mtp[0])))
        if canonical.spec.mtp is not None and canonical.spec.mtp.own_head:
            lowered["draft_head"] = lower_head(_vocabulary_head(load(canonical.mtp[0])))
    return lowered


class DeviceEngine:
    """A bundle on a backend of the shared runner; see `mtp_engines.engine.Engine`."""

    def __init__(
        self, executor: Executor, spec: ModelSpec, limits: Limits, widths: Widths, *, graphs: bool = True
    ) -> None:
        """`graphs` False runs without CUDA graphs."""
        self.spec, self.limits = spec, limits
        self.numerics, self.runs_on = "near-tie", name_of(executor.device)
        self._setup = Setup(executor, spec, limits, widths, graphs)
        self._idle: dict[tuple[int, int | None], list[Slot]] = {}

    def sequences(self, batch: int = 1, cache_rows: int | None = None) -> DeviceSequences:
        """Fresh state for `batch` sequences, which share `cache_rows` rows of the caches, if that is not None."""
        if not 1 <= batch <= self.limits.max_batch_size:
            raise RequestError(
                f"{batch} sequences were asked for at once, this bundle was built for 1 to "
                f"{self.limits.max_batch_size}. Build it again with --max-batch-size {max(batch, 1)}."
            )
        with DEVICE_LOCK:
            idle = self._idle.setdefault((batch, cache_rows), [])
            if not idle:
                # Their memory goes before more is taken.
                for other in self._idle.values():
                    other.clear()
            slot = idle.pop() if idle else Slot(self._setup, batch, cache_rows)
            slot.clear()
        sequences = DeviceSequences(slot)
        # Graphs are captured for a slot's own memory; a request that had to capture its own would wait for them.
        weakref.finalize(sequences, idle.append, slot)
        return sequences


def _vocabulary_head(model: ir.Model) -> ir.Model:
    """The vocabulary head, which also gives logits to tools that ask for them."""
    head = head_standard(model)
    logits = next(value for node in head.graph for value in node.outputs if value.name == names.LOGITS)
    head.graph.outputs.append(logits)
    return head
