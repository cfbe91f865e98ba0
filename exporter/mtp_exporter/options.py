"""What a user may choose about a build."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from mtp_engines.contracts.manifest import WeightFormat, WeightFormats
from mtp_engines.errors import BuildError
from mtp_exporter.backends import BackendOptions
from mtp_exporter.draft_ids.choice import Size
from mtp_exporter.prepare import HiddenTap, Ingredients
from mtp_exporter.storing.formats import FORMATS

MAX_DRAFT_TOKENS = 15
MAX_BATCH_SIZE = 256


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose.

    Attributes:
        model: directory, hub id or short name.
        out: bundle directory; None means bundles/<name of the model>.
        weights: format of the matrices, one of `FORMATS`.
        mtp_weights: of the draft head's; None takes that of the others.
        head_weights: of embedding and vocabulary head; None takes that of the others.
        max_model_len: tokens of prompt and answer together; None takes the model's own limit, at most 8192.
        max_batch_size: sequences that one engine can run together.
        draft_tokens: the largest K that the bundle will accept; None means 7, or the head's trained depths where
            it has several.
        mtp: False leaves the MTP head out.
        mtp_from: checkpoint to take the head from, if this one lost it.
        draft_model: directory of a separate draft (EAGLE) that becomes the bundle's head.
        hidden_tap: which hidden state an MTP head is fed; None takes what its family was trained on.
        draft_vocab: how many ids an MTP head drafts from, or `auto`; None for all.
        draft_vocab_text: texts whose most frequent tokens these are; empty for the first ids.
        backend: what `mtp-run` opens the bundle with unless it is told otherwise, and what is built for that.
    """

    model: str
    out: Path | None = None
    weights: str = "fp32"
    mtp_weights: str | None = None
    head_weights: str | None = None
    max_model_len: int | None = None
    max_batch_size: int = 1
    draft_tokens: int | None = None
    mtp: bool = True
    mtp_from: str | None = None
    draft_model: str | None = None
    hidden_tap: HiddenTap | None = None
    draft_vocab: Size | None = None
    draft_vocab_text: tuple[Path, ...] = ()
    backend: BackendOptions = field(default_factory=BackendOptions)

    @property
    def formats(self) -> WeightFormats:
        """The formats, chosen or taken over."""
        chosen = (self.weights, self.mtp_weights or self.weights, self.head_weights or self.weights)
        return WeightFormats(*cast(tuple[WeightFormat, WeightFormat, WeightFormat], chosen))

    @property
    def ingredients(self) -> Ingredients:
        """Where the parts come from."""
        return Ingredients(self.model, self.mtp, self.mtp_from, self.draft_model, self.hidden_tap)


def check_options(options: BuildOptions) -> None:
    for name in ("weights", "mtp_weights", "head_weights"):
        value = getattr(options, name)
        if value is not None and value not in FORMATS:
            raise BuildError(
                f"--{name.replace('_', '-')} {value} is no format of this release; use one of: {', '.join(FORMATS)}."
            )
    if options.draft_tokens is not None and not 1 <= options.draft_tokens <= MAX_DRAFT_TOKENS:
        raise BuildError(
            f"--draft-tokens is {options.draft_tokens}, expected 1 to {MAX_DRAFT_TOKENS}. To build without "
            "speculation, use --no-mtp."
        )
    if options.draft_vocab_text and options.draft_vocab is None:
        raise BuildError(
            "--draft-vocab-text says which ids --draft-vocab takes, and that is missing. Add --draft-vocab with a "
            "number or auto."
        )
    if not 1 <= options.max_batch_size <= MAX_BATCH_SIZE:
        raise BuildError(f"--max-batch-size is {options.max_batch_size}, expected 1 to {MAX_BATCH_SIZE}.")
    if options.max_model_len is not None and options.max_model_len < 2:
        raise BuildError(f"--max-model-len is {options.max_model_len}, expected at least 2.")
