"""The bundle's manifest: what was built, from what, within which limits, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from mtp_engines.contracts.model import ModelSpec

SCHEMA_VERSION = 4
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Limits:
    """What a bundle was built for."""

    max_model_len: int
    max_batch_size: int
    max_draft_tokens: int
    prefill_chunk: int = 256

    @property
    def capacity(self) -> int:
        """Rows of every cache: the context, the rows a shorter sequence of a batch pads, one spare row."""
        return self.max_model_len + self.max_draft_tokens + 1


WeightFormat = Literal["fp32", "int8", "int4"]


@dataclass(frozen=True)
class WeightFormats:
    """Format of the matrices of the target, of those of the draft head, and of embedding and vocabulary head.

    `int8` has a scale for each row, see `mtp_plugins.rotated_weight`; `int4` one for each run of 63 columns, see
    `mtp_plugins.block_weight`.
    """

    target: WeightFormat = "fp32"
    mtp: WeightFormat = "fp32"
    head: WeightFormat = "fp32"


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes, sha256 of the whole file, and sha256 of samples for files too large to read at start."""

    size: int
    sha256: str
    sample: str


@dataclass(frozen=True)
class EndToken:
    """One end token and the places that named it."""

    id: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Parity:
    """Built graphs against the NumPy forward: greatest difference over the greatest reference value."""

    rows: int
    worst: float
    where: str
    tolerance: float


@dataclass(frozen=True)
class Quality:
    """What rounded weights cost over a text, teacher-forced: against a NumPy forward of the checkpoint in float32.

    Attributes:
        agreed: rows whose greedy choice is that of float32.
    """

    rows: int
    perplexity_fp32: float
    perplexity: float
    agreed: int


@dataclass(frozen=True)
class Numerics:
    """`exact`: a row of any call is bit-identical to a one-row call; tested where the bundle was built."""

    promise: Literal["exact", "near-tie"]
    rows: int
    first_difference: str | None = None


@dataclass(frozen=True)
class BackendBuild:
    """How a bundle runs on a backend other than the one every bundle is checked with, ONNX Runtime on a CPU.

    Attributes:
        precision: of weights and caches.
        products: `library` takes the backend's matrix products, in runs of one width; `skinny` takes our own,
            whose rows do not depend on their number.
        numerics: as tested where the bundle was built; 0 rows: not tested, since that needs the device.
        tested_on: `cpu`, or the compute capability as in `sm_90`; the promise holds there.
    """

    precision: Literal["fp32", "bf16", "fp16"]
    products: Literal["library", "skinny"] = "library"
    numerics: Numerics = Numerics("near-tie", 0)
    tested_on: str | None = None

    def promise_on(self, device: str) -> Literal["exact", "near-tie"]:
        """What holds on a device: what was tested on one of its kind, else no more than `near-tie`."""
        return self.numerics.promise if device == self.tested_on else "near-tie"


@dataclass(frozen=True)
class DraftAgreement:
    """First drafts that equal the target's own greedy choice, over a teacher-forced text.

    Attributes:
        accepted_whole: with the whole vocabulary, where the head was cut down to a part of it.
    """

    drafted: int
    accepted: int
    accepted_whole: int | None = None


@dataclass(frozen=True)
class DraftStep:
    """One draft token: bytes of weights that it reads, and its median time where it was measured, on the CPU."""

    weight_bytes: int
    milliseconds: float | None = None


@dataclass(frozen=True)
class DraftVocabulary:
    """How a head was cut down to a part of the vocabulary.

    Attributes:
        origin: `ranks`: the first ids; `text`: the most frequent tokens of a text, then the first ids.
        text_tokens: tokens of that text, or of the one that the exporter carries; 0 without a tokenizer.
        held: how many of them are among the ids. Of a text of the user's, each half is held against the list that
            comes from the other half.
        step: with these ids.
        step_whole: with the whole vocabulary.
    """

    origin: Literal["ranks", "text"]
    text_tokens: int
    held: int
    step: DraftStep
    step_whole: DraftStep


@validated(frozen=True, config=_STRICT)
class Manifest:
    """Everything that a runtime needs to know before it opens a graph."""

    schema_version: int
    name: str
    model: ModelSpec
    limits: Limits
    backend: Literal["onnxruntime", "torch", "tensorrt"]
    device: Literal["cpu", "cuda"]
    weights: WeightFormats
    end_tokens: tuple[EndToken, ...]
    source: str
    source_digest: str
    parity: Parity
    numerics: Numerics
    draft_agreement: DraftAgreement | None
    quality: Quality | None
    """None where every weight is float32."""
    versions: dict[str, str]
    backends: dict[str, BackendBuild] = field(default_factory=dict)
    """By backend and device, as in `torch-cuda`."""
    draft_vocabulary: DraftVocabulary | None = None
    """None where the head drafts from the whole vocabulary, or from a draft's own."""
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset(token.id for token in self.end_tokens)


MANIFEST = TypeAdapter(Manifest)
"""Reads and writes a manifest as JSON; unknown or missing fields are errors."""
