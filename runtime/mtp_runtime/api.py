"""Loading a bundle and generating from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_engines.backends import EngineOptions, open_engine
from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts.manifest import Manifest
from mtp_engines.engine import CycleSequences, Engine, Sequences
from mtp_engines.errors import RequestError
from mtp_runtime.acceptance import Acceptor, GreedyAcceptor
from mtp_runtime.auto import Auto, Opened
from mtp_runtime.constraints.drafter import AdmissibleDrafter
from mtp_runtime.constraints.matcher import TokenConstraint
from mtp_runtime.drafters.confidence import gated
from mtp_runtime.drafters.draft_model import open_draft_bundle
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.drafters.registry import Given, head_kind, make_drafter, own_head
from mtp_runtime.ending import Ending
from mtp_runtime.events import Event, Finished
from mtp_runtime.loop import Generation, Parts, WholeCycles
from mtp_runtime.policy import DraftPolicy, FixedPolicy
from mtp_runtime.prepare import Prepared
from mtp_runtime.prompts import Prompts
from mtp_runtime.request import AUTO, Request, ids_from, request_from
from mtp_runtime.sampling.sampler import Sampler
from mtp_runtime.stats import Stats
from mtp_runtime.text import TextStream
from mtp_runtime.timing import TimedAcceptor, TimedCycles, TimedDrafter, TimedSequences, TimedSlots
from mtp_runtime.trees.tree import Tree
from mtp_runtime.trees.verification import PathAcceptor, TreeVerification
from mtp_runtime.verification import VerifyMode, verification_of

_SCORED_LOGITS = 1 << 24
"""Logits of the prompt that are kept at once, 64 MiB."""


class Model:
    """A loaded bundle. Several threads may generate at once: each generation has a state of its own.

    Attributes:
        draft: the engine of the draft model, if one was loaded.
        auto: makes the policies that choose K.
        notes: what its user should know about how the two were loaded, in sentences without a full stop.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        prompts: Prompts,
        draft: Engine | None = None,
        notes: tuple[str, ...] = (),
        auto: Auto | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.prompts = prompts
        self.draft = draft
        self.notes = notes
        self.auto = auto or Auto(Opened(bundle, engine, EngineOptions()))

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    def generate(self, request: Request | None = None, **options: Any) -> Iterator[Event]:
        """Generate from one prompt, greedily unless the request says otherwise.

        Args:
            request: a request; or give its fields by name. `prompt_ids` may then be any sequence or
                one-dimensional array of integers.

        Returns:
            An iterator of `Emitted`, one for prefill and one for each cycle, then `Finished`; if several answers
            were asked for, all of the first one, then all of the next. Closing it early drops the generation.

        Raises:
            RequestError: at once, if the bundle cannot serve the request.
            NumericsError: while iterating, if the model produces a value that is not a number.
        """
        if request is not None and not isinstance(request, Request):
            raise RequestError(f"generate takes a Request, or options by name such as prompt=…; found {request!r}.")
        if request is None:
            if options.get("prompt_ids") is not None:
                options["prompt_ids"] = ids_from(options["prompt_ids"])
            request = request_from(options, "the request")
        elif options:
            request = request_from({**vars(request), **options}, "the request")
        prepared = self.prompts.prepare(request, self.manifest, self.draft is not None)
        prepared = replace(prepared, decoding=prepared.decoding.seeded())
        first = self.completion(prepared, request, 0)
        others = (self.completion(prepared, request, index) for index in range(1, prepared.decoding.completions))
        return _in_turn(first, others)

    def completion(
        self,
        prepared: Prepared,
        request: Request,
        index: int,
        sequences: Sequences | None = None,
    ) -> Generation:
        """One answer to a request, ready to run.

        Args:
            prepared: the request, checked; its decoding is seeded.
            request: what it was prepared from.
            index: which of the answers.
            sequences: fresh ones to run on; None opens some.
        """
        sequences = sequences or self.engine.sequences(1 + prepared.draft_branches)
        acceptor: Acceptor = GreedyAcceptor()
        sampler = None
        if prepared.decoding.needs_logits:
            vocab_size = self.manifest.model.vocab_size
            acceptor = sampler = Sampler(prepared.prompt, vocab_size, prepared.decoding, prepared.end_tokens, index)
        drawn = None if prepared.decoding.is_plain else sampler
        drafting = None if drawn is None else drawn.drafting
        tree = None
        if prepared.draft_branches:
            tree = Tree.over(sequences, prepared.draft_branches, None if drawn is None else drawn.draft_behind)
            sequences, drafting = tree.paths, tree.branching.begin
        if prepared.draft_confidence:
            drafting = gated(prepared.draft_confidence, drafting)
        given = Given(prepared.prompt, sequences, self.engine, self.draft, prepared.ngram, drafting)

        def new_drafter() -> Drafter:
            drafter = make_drafter(prepared.drafter, given)
            if sampler is not None and prepared.decoding.constraint is not None:
                drafter = AdmissibleDrafter(drafter, sampler.admissible)
            return drafter

        ending = self._ending(prepared, request)
        # A backend's own cycles take the best token of each row.
        on_host = sampler is not None or prepared.verify != "rows" or prepared.draft_confidence > 0
        own = not on_host and prepared.drafter in ("none", head_kind(self.engine.spec))
        drafts = prepared.draft_tokens != 0
        cycles = WholeCycles(sequences, drafts) if own and isinstance(sequences, CycleSequences) else None
        policy = self._policy(prepared, whole=cycles is not None)
        name, verify = prepared.drafter, prepared.verify
        drafter = new_drafter()
        made = self.run(prepared.prompt, sequences, drafter, policy, ending, name, acceptor, cycles, verify, tree)
        seconds = made.parts.stats.seconds
        made.parts = replace(made.parts, new_drafter=lambda: TimedDrafter(new_drafter(), seconds))
        return made

    def _policy(self, prepared: Prepared, *, whole: bool) -> DraftPolicy:
        if prepared.draft_tokens == AUTO:
            return self.auto.policy(prepared.drafter, len(prepared.prompt), whole=whole)
        return FixedPolicy(prepared.draft_tokens)

    def _ending(self, prepared: Prepared, request: Request) -> Ending:
        text = TextStream(self.prompts.tokenizer, request.stops, request.skip_special_tokens)
        grammar, vocab_size = prepared.decoding.constraint, self.manifest.model.vocab_size
        constraint = None if grammar is None else TokenConstraint(grammar, prepared.end_tokens, vocab_size)
        return Ending(prepared.limit, prepared.end_tokens, text, constraint)

    def complete(self, request: Request | None = None, **options: Any) -> Finished:
        """Generate to the end and return the last event.

        Raises:
            RequestError: as `generate`, or if several answers were asked for.
        """
        asked = options.get("n", 1 if request is None else getattr(request, "n", 1))
        if isinstance(asked, int) and asked > 1:
            raise RequestError(f"n is {asked}, and complete returns one answer; use complete_all.")
        (finished,) = self.complete_all(request, **options)
        return finished

    def complete_all(self, request: Request | None = None, **options: Any) -> list[Finished]:
        """Generate every answer to a request to its end and return their last events."""
        return [event for event in self.generate(request, **options) if isinstance(event, Finished)]

    def drafter(self, sequences: Sequences) -> Drafter:
        """A drafter over the bundle's own head."""
        return own_head(self.engine, sequences)

    def run(
        self,
        prompt: list[int],
        sequences: Sequences,
        drafter: Drafter,
        policy: DraftPolicy,
        ending: Ending,
        name: str | None = None,
        acceptor: Acceptor | None = None,
        cycles: WholeCycles | None = None,
        verify: VerifyMode = "rows",
        tree: Tree | None = None,
    ) -> Generation:
        """A generation with parts of the caller's choice; tools use it to force drafts and to look at states.

        `name` is that of the drafter, for the statistics. `acceptor` is the greedy one if left out. With `cycles` the
        backend drafts and accepts. `verify` is one of `VERIFY_MODES`; a `tree`, whose paths are the sequences, is
        verified in its own way.
        """
        stats = Stats(drafter=name)
        acceptor = acceptor or GreedyAcceptor()
        acceptor = TimedAcceptor(acceptor, stats.seconds) if acceptor.needs_logits else acceptor
        if tree is None:
            timed = TimedSequences(sequences, stats.seconds)
            verification = verification_of(verify, timed, logits=acceptor.needs_logits)
        else:
            acceptor = PathAcceptor(acceptor)
            slots = TimedSlots(tree.paths.every, stats.seconds)
            verification = TreeVerification(slots, tree.branching, acceptor, stats)
        parts = Parts(
            prefill=TimedSequences(sequences, stats.seconds, ("prefill", "prefill")),
            verification=verification,
            drafter=TimedDrafter(drafter, stats.seconds),
            policy=policy,
            ending=ending,
            stats=stats,
            prefill_chunk=self._prefill_chunk(acceptor),
            cycles=None if cycles is None else replace(cycles, sequences=TimedCycles(cycles.sequences, stats.seconds)),
            acceptor=acceptor,
        )
        return Generation(prompt, parts)

    def _prefill_chunk(self, acceptor: Acceptor) -> int:
        """Rows of the prompt that run at once; fewer where all of their logits are kept."""
        chunk = self.engine.limits.prefill_chunk
        return min(chunk, max(1, _SCORED_LOGITS // self.engine.spec.vocab_size)) if acceptor.scores_prompt else chunk


def _in_turn(first: Generation, others: Iterable[Generation]) -> Iterator[Event]:
    yield from first
    for other in others:
        yield from other


def load(
    bundle: str | Path,
    threads: int = 0,
    requests: Iterable[Request] = (),
    draft_model: str | Path | None = None,
    options: EngineOptions | None = None,
) -> Model:
    """Open a bundle and its engine, and those of a draft model.

    Args:
        bundle: directory that `mtp-export build` wrote.
        threads: intra-op threads; 0 chooses by the size of the model.
        requests: checked before the engine, which can take long, is opened.
        draft_model: directory of a second bundle, of the same vocabulary, whose model drafts for the first.
        options: backend, device and the like, for both bundles; `threads` counts if it is not 0.

    Raises:
        BundleError: incomplete, damaged, or not for this machine; or the draft model has another vocabulary.
        RequestError: one of several `requests` cannot be served; says which.
    """
    options = options or EngineOptions()
    options = replace(options, threads=threads or options.threads)
    opened = open_bundle(Path(bundle))
    prompts = Prompts(opened.directory)
    draft, note = (None, None) if draft_model is None else open_draft_bundle(Path(draft_model), opened)
    _check_all(list(requests), prompts, opened.manifest, draft is not None)
    engine, notes = open_engine(opened, options), () if note is None else (note,)
    draft_engine = None if draft is None else open_engine(draft, options)
    auto = Auto(
        Opened(opened, engine, options),
        None if draft is None or draft_engine is None else Opened(draft, draft_engine, options),
    )
    return Model(opened, engine, prompts, draft_engine, notes, auto)


def _check_all(requests: list[Request], prompts: Prompts, manifest: Manifest, has_draft_model: bool) -> None:
    for number, request in enumerate(requests, 1):
        try:
            prompts.prepare(request, manifest, has_draft_model)
        except RequestError as error:
            if len(requests) == 1:
                raise
            raise RequestError(f"prompt {number} of {len(requests)}: {error}") from error
