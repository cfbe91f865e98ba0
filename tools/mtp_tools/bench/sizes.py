"""Bytes that a bundle needs and that a plain decode step reads, from its manifest and its canonical graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.bundle import WEIGHTS, Bundle
from mtp_engines.contracts.model import ModelSpec, MoeSpec
from mtp_engines.engine import Engine
from mtp_engines.lowering.caches import cache_bytes_per_token

_HALVES = 2
"""Recurrent states are double buffers."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that a generation has to keep; caches and states are float32.

    Attributes:
        weights: of the file that all graphs share.
        caches: rows that were used, of target and head.
        states: both halves of the recurrent and convolution states, and the replay factors of the widest verify.
    """

    weights: int
    caches: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.states


def sizes_of(bundle: Bundle, tokens: int, draft_tokens: int, paths: int = 1) -> Sizes:
    """Sizes for one text of so many tokens, drafted with so many at most on so many paths."""
    spec = bundle.manifest.model
    rows = tokens + draft_tokens + 1
    return Sizes(
        weights=bundle.manifest.files[WEIGHTS].size,
        caches=paths * rows * cache_bytes_per_token(spec),
        states=paths * (_HALVES * spec.state_bytes_per_sequence + (draft_tokens + 1) * spec.factor_bytes_per_row),
    )


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step of plain decoding cannot do without; caches and states are float32.

    Attributes:
        weights: every matrix of the target once, one row of the embedding, of a mixture the experts of one token.
        cache: rows of the context, at the middle of the answers.
        states: read and written.
    """

    weights: int
    cache: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.states


def step_bytes(bundle: Bundle, rows: int) -> StepBytes:
    """What a step reads behind so many rows."""
    spec = bundle.manifest.model
    values = load_graph(bundle.backbone).graph.initializers.values()
    return StepBytes(
        weights=sum(_read(value, spec) for value in values),
        cache=rows * cache_bytes_per_token(replace(spec, mtp=None)),
        states=2 * spec.state_bytes_per_sequence,
    )


def _read(value: ir.Value, spec: ModelSpec) -> int:
    tensor = value.const_value
    if tensor is None or not isinstance(tensor, ir.ExternalTensor):
        return 0
    size = int(tensor.nbytes)
    kinds = {use.node.op_type for use in value.uses()}
    first = tensor.shape.numpy()[0]
    if kinds <= {"Gather", "BlockRows", "RotatedRows"}:  # An embedding that is not the vocabulary head too.
        return size // first
    if kinds == {"RoutedExperts"}:
        mlp = spec.layers[int(str(value.name).split(".")[1])].mlp
        assert isinstance(mlp, MoeSpec)
        return size // first * mlp.top_k
    return size


def engine_threads(engine: Engine, physical: int) -> int | None:
    """Threads of the engine's own pool, so that memory is read with as many; None where that is not known."""
    if not isinstance(engine, CpuEngine):
        return None
    return engine.sessions.backbone.get_session_options().intra_op_num_threads or physical


def kernels_of(engine: Engine) -> str | None:
    """Whose kernels multiply on a CPU ("own, vnni", "own, avx2", "onnxruntime"); None where none of them does."""
    return engine.kernels if isinstance(engine, CpuEngine) else None
