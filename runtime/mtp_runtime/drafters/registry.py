"""Every drafter that there is: its name, what it needs, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Choose, Engine, Sequences
from mtp_runtime.drafters.draft_model import DraftModelDrafter
from mtp_runtime.drafters.first import FirstDrafter
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.drafters.protocol import Drafter


@dataclass(frozen=True)
class Given:
    """What a drafter of one generation can be made from.

    Attributes:
        prompt: token ids of the whole prompt.
        sequences: the target's, through which its own head is reached.
        engine: the target's.
        draft: the draft model's engine, if one was loaded.
        ngram: shortest and longest match of a lookup.
        drafting: begins a draft whose tokens are chosen from logits; None takes the best ones.
    """

    prompt: list[int]
    sequences: Sequences
    engine: Engine
    draft: Engine | None
    ngram: tuple[int, int]
    drafting: Callable[[], Choose] | None = None


@dataclass(frozen=True)
class Entry:
    """One drafter: how it is made, and what must be there: a head of the kind of its name, or a draft model."""

    make: Callable[[Given], Drafter]
    needs: Literal["head", "draft model"] | None = None


def _head(given: Given) -> Drafter:
    return own_head(given.engine, given.sequences, given.drafting)


def _lookup(given: Given) -> Drafter:
    return NgramDrafter(given.prompt, *given.ngram)


def _draft_model(given: Given) -> Drafter:
    assert given.draft is not None, "a request for a draft model is refused where none was loaded"
    return DraftModelDrafter(given.draft.sequences(), given.prompt, given.draft.limits, given.drafting)


# A new drafter is a file of its own and a line here. Those that need something may also stand behind the lookup.
TABLE: dict[str, Entry] = {
    "none": Entry(lambda given: NoDrafter()),
    "ngram": Entry(_lookup),
    "mtp": Entry(_head, "head"),
    "eagle": Entry(_head, "head"),
    "eagle3": Entry(_head, "head"),
    "draft-model": Entry(_draft_model, "draft model"),
}
WITH_LOOKUP = "+ngram"
DRAFTERS = (*TABLE, *(name + WITH_LOOKUP for name, entry in TABLE.items() if entry.needs))
"""Every name that a request may give."""


def _known(name: str) -> str:
    if name not in DRAFTERS:
        raise PydanticCustomError("drafter", "{expected}", {"expected": f"expected one of {', '.join(DRAFTERS)}"})
    return name


DrafterName = Annotated[str, AfterValidator(_known)]


def make_drafter(name: str, given: Given) -> Drafter:
    """The drafter of a name from `DRAFTERS`; with a lookup, that comes first and the other where it finds nothing."""
    base = base_of(name)
    drafter = TABLE[base].make(given)
    return drafter if base == name else FirstDrafter([_lookup(given), drafter])


def own_head(engine: Engine, sequences: Sequences, drafting: Callable[[], Choose] | None = None) -> Drafter:
    """A drafter over the bundle's own head; without one, the engine refuses to draft."""
    if engine.spec.mtp is not None and engine.spec.mtp.has_table:
        # Rows of its logits are no ids, so it takes the best token, which any acceptor may judge.
        drafting = None
    return MtpDrafter(sequences, engine.limits.prefill_chunk, head_kind(engine.spec) or "mtp", drafting)


def head_kind(model: ModelSpec) -> str | None:
    """The name of the drafter that the bundle's own head is; None without a head."""
    # A manifest from before there were several kinds does not say.
    return None if model.mtp is None else model.mtp.kind


def base_of(name: str) -> str:
    """The name without the lookup before it: a key of `TABLE`."""
    return name.removesuffix(WITH_LOOKUP)


def uses_lookup(name: str) -> bool:
    """Whether n-grams are looked up."""
    return name == "ngram" or name.endswith(WITH_LOOKUP)
