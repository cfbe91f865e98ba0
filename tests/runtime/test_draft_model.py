"""A second bundle that drafts: what it proposes, what it costs, and that it changes no token."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.bundle import BACKBONE
from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_engines.errors import ContractError
from mtp_runtime import Emitted, Finished, Model, load
from mtp_runtime.drafters.draft_model import DraftModelDrafter
from mtp_runtime.drafters.first import FirstDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_tools.verify.digests import state_digests
from tests.fixtures.checkpoints import edit_tensor, markov_checkpoint, random_checkpoint, read_tensors
from tests.runtime.changed import changed as changed_bundle
from tests.runtime.parts import Delegate, emitted_ids, plain, play
from tests.runtime.proposals import CommitsDrafts, CountsDrafts, Heard, heard, looked_up, said_by
from tests.support import build_bundle, load_model, run_command

PROMPT = [5, 6, 20]
# Gaps of 1 to 5: a draft of four is right for 0, 1, 2, 3 and 4 tokens between them.
WRONG = {10, 11, 13, 16, 20, 25}
K_VALUES = (1, 2, 3, 4)
BUILD = {"max_model_len": 128, "draft_tokens": 8}
WITH_DRAFT = ("draft-model", "draft-model+ngram")


def skipping(token: int) -> int:
    """The chain t + 1, which skips one after some tokens."""
    return (token + (2 if token in WRONG else 1)) % 64


def with_other_head(checkpoint: Path, scale: float) -> Path:
    """The checkpoint with noise on its vocabulary head: right sometimes."""
    noise = np.random.default_rng(0)
    name = next(name for name in read_tensors(checkpoint) if name.endswith("lm_head.weight"))
    edit_tensor(checkpoint, name, lambda array: array + scale * noise.standard_normal(array.shape))
    return checkpoint


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The chain t + 1, whose head and whose draft model are wrong after the same tokens."""
    place = tmp_path_factory.mktemp("chain")
    head = markov_checkpoint(place / "c", draft=lambda token: token + 1 if token in WRONG else token)
    draft = build_bundle(markov_checkpoint(place / "d", target=skipping), place / "draft", **BUILD, mtp=False)
    return load(build_bundle(head, place / "bundle", **BUILD), 1, draft_model=draft)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random hybrid, drafted for by a hybrid that says the same sometimes."""
    place = tmp_path_factory.mktemp("hybrid")
    draft = with_other_head(random_checkpoint(place / "d", seed=30), 0.2)
    bundle = build_bundle(random_checkpoint(place / "c", seed=30), place / "bundle", **BUILD)
    return load(bundle, 1, draft_model=build_bundle(draft, place / "draft", **BUILD))


@pytest.fixture(params=["chain", "hybrid"])
def pair(request: pytest.FixtureRequest) -> Model:
    model: Model = request.getfixturevalue(request.param)
    return model


def draft_of(model: Model) -> Model:
    """The draft model loaded as a model of its own."""
    return load_model(model.bundle.directory.with_name("draft"))


# What is proposed


@pytest.mark.parametrize("draft_tokens", K_VALUES)
@pytest.mark.parametrize("prompt", [[5], [60, 3, 9], [7, 8, 9, 10, 7, 8]], ids=len)
def test_the_drafts_are_what_the_draft_model_says_itself(pair: Model, prompt: list[int], draft_tokens: int) -> None:
    run, listener = heard(pair, "draft-model", prompt, 48, draft_tokens)
    assert run.ids == plain(pair, prompt, 48).ids
    assert len(listener.proposals) == run.finished.stats.cycles > 10
    assert listener.differ_from(said_by(draft_of(pair))) == []
    assert run.finished.stats.drafted > run.finished.stats.accepted > 0, "control: both outcomes occur"


@pytest.mark.parametrize("draft_tokens", K_VALUES)
def test_a_lookup_comes_before_the_draft_model(pair: Model, draft_tokens: int) -> None:
    """The prompt has some tokens of the answer, so both have their turns."""
    prompt = [*PROMPT, *plain(pair, PROMPT, 6).ids, 40, *PROMPT]
    run, listener = heard(pair, "draft-model+ngram", prompt, 40, draft_tokens, (1, 4))
    by_model = said_by(draft_of(pair))
    assert run.ids == plain(pair, prompt, 40).ids
    assert listener.differ_from(lambda text, count: looked_up(text, count, 1) or by_model(text, count)) == []
    assert set(run.finished.stats.drafted_by_source) == {"ngram", "draft-model"}


def test_a_prompt_of_several_blocks_is_consumed_whole(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(3).integers(0, 112, 40).tolist()
    whole, expected = heard(hybrid, "draft-model", prompt, 24, 3)
    monkeypatch.setattr(hybrid.draft, "limits", replace(hybrid.draft.limits, prefill_chunk=7))
    recorders = recorded_drafts(hybrid, monkeypatch)
    run, listener = heard(hybrid, "draft-model", prompt, 24, 3)
    assert (run.ids, listener.proposals) == (whole.ids, expected.proposals)
    # 41 tokens are known at the first draft: prompt and the token of the prefill; then drafts 2 and 3.
    assert recorders[0].verified[:8] == [7, 7, 7, 7, 7, 6, 1, 2]


class OneTokenLate(DraftModelDrafter):
    """A fault: the newest token is fed with the next ones."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        known = [*getattr(self, "_held", []), *tokens.tolist()]
        self._held = known[-1:]
        super().observe(np.array(known[:-1], np.int64), hidden)


class NewestOnly(DraftModelDrafter):
    """A fault: of each block, only the last token is fed, as if the draft model had seen its own accepted drafts."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        super().observe(tokens[-1:], hidden)


@pytest.mark.parametrize(
    ("fault", "wrap"),
    [
        (DraftModelDrafter, CommitsDrafts),
        (DraftModelDrafter, CountsDrafts),
        (OneTokenLate, None),
        (NewestOnly, None),
    ],
    ids=["commits drafts", "commits and counts drafts", "one token late", "accepted drafts not fed"],
)
def test_control_a_wrong_text_in_the_draft_model_is_noticed(
    hybrid: Model, fault: type[DraftModelDrafter], wrap: Callable[[Sequences], Any] | None
) -> None:
    """Each fault leaves the ids alone and is seen by the comparison that holds without it."""
    by_model = said_by(draft_of(hybrid))
    differ = []
    for drafter, between in ((DraftModelDrafter, None), (fault, wrap)):
        sequences = hybrid.draft.sequences()
        listener = Heard(drafter(between(sequences) if between else sequences, PROMPT, hybrid.draft.limits), PROMPT)
        assert play(hybrid, PROMPT, 48, 3, listener).ids == plain(hybrid, PROMPT, 48).ids
        differ.append(len(listener.differ_from(by_model)))
    assert differ[0] == 0
    assert differ[1] > 5


# What it costs


class Calls(Delegate):
    """The rows of every verify and of every commit."""

    def __init__(self, inner: Sequences) -> None:
        super().__init__(inner)
        self.verified: list[int] = []
        self.committed: list[tuple[int, int]] = []

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        self.verified.append(tokens.shape[1])
        return super().verify(tokens, logit_rows)

    def commit(self, rows: Ids) -> None:
        self.committed.append((int(rows[0]), self.verified[-1]))
        super().commit(rows)


def recorded_drafts(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Fills with the calls of every draft model's sequences that are opened from now on."""
    opened: list[Calls] = []
    sequences = model.draft.sequences

    def record(batch: int = 1) -> Calls:
        opened.append(Calls(sequences(batch)))
        return opened[-1]

    monkeypatch.setattr(model.draft, "sequences", record)
    return opened


@pytest.mark.parametrize("draft_tokens", K_VALUES)
def test_a_rejected_draft_costs_the_draft_model_nothing(
    pair: Model, monkeypatch: pytest.MonkeyPatch, draft_tokens: int
) -> None:
    """K calls a cycle, and every commit keeps all rows of its verify: nothing is replayed or computed twice."""
    opened = recorded_drafts(pair, monkeypatch)
    run, _ = heard(pair, "draft-model", PROMPT, 40, draft_tokens)
    (calls,) = opened
    expected, unseen, emitted = [], len(PROMPT), 0
    for block in run.blocks[:-1]:
        unseen, emitted = unseen + len(block), emitted + len(block)
        if wanted := min(draft_tokens, 40 - emitted - 1):
            expected += [unseen, *range(1, wanted)]
            unseen = 0
    assert calls.verified == expected
    assert all(kept == staged for kept, staged in calls.committed)
    assert int(calls.lengths[0]) == sum(kept for kept, _ in calls.committed) == len(PROMPT) + emitted - unseen


def test_the_draft_model_holds_the_state_of_the_text_alone(hybrid: Model) -> None:
    """After every cycle, bit for bit: drafts leave no trace in caches, convolutions and recurrences."""
    sequences = hybrid.draft.sequences()
    drafter = Heard(DraftModelDrafter(sequences, PROMPT, hybrid.draft.limits), PROMPT)
    text, states = [*PROMPT, *plain(hybrid, PROMPT, 32).ids], {}

    class Looks(Heard):
        def propose(self, draft_tokens: int) -> list[int]:
            draft = super().propose(draft_tokens)
            states[int(sequences.lengths[0])] = state_digests(sequences)
            return draft

    play(hybrid, PROMPT, 32, 4, Looks(drafter, PROMPT))
    assert len(states) > 5
    fresh = hybrid.draft.sequences()
    for length, digests in sorted(states.items()):
        fresh.verify(np.array([text[int(fresh.lengths[0]) : length]]), 0)
        fresh.commit(np.array([length - int(fresh.lengths[0])]))
        assert state_digests(fresh) == digests, f"at {length} tokens"


def test_no_draft_no_call(pair: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 0 and other drafters open no sequences of the draft model; one token of room asks it for nothing."""
    opened = recorded_drafts(pair, monkeypatch)
    for options in ({"draft_tokens": 0}, {"drafter": "mtp"}, {"drafter": "ngram"}, {"drafter": "none"}):
        pair.complete(prompt_ids=PROMPT, max_new_tokens=8, **options)
    assert opened == []
    pair.complete(prompt_ids=PROMPT, max_new_tokens=2)
    assert [calls.verified for calls in opened] == [[]]


# Every drafter


def quoting(model: Model, right: int) -> list[int]:
    """A prompt after which a lookup is right for `right` tokens: it quotes what comes, then something else."""
    start = [30, 31, 32]
    said = plain(model, start, 8).ids
    other = [token ^ 1 for token in said]
    return [*start, *said[:right], *other[right : right + 4], *start[:2]]


@pytest.mark.parametrize("draft_tokens", K_VALUES)
@pytest.mark.parametrize("name", ["mtp", "ngram", "mtp+ngram", *WITH_DRAFT, "none"])
def test_every_drafter_reaches_every_accepted_count_and_changes_no_token(
    chain: Model, name: str, draft_tokens: int
) -> None:
    reached: set[int] = set()
    sources: set[str] = set()
    asked = None if name == "none" else draft_tokens
    for prompt in ([5], *(quoting(chain, right) for right in range(5))):
        options = {"prompt_ids": prompt, "max_new_tokens": 40}
        done = chain.complete(**options, drafter=name, draft_tokens=asked)
        assert done.token_ids == chain.complete(**options, draft_tokens=0).token_ids
        assert done.stats.drafter == name
        reached |= {length - 1 for length in done.stats.emitted_histogram}
        sources |= done.stats.drafted_by_source.keys()
    assert reached == ({0} if name == "none" else set(range(draft_tokens + 1)))
    assert sources == set(name.split("+")) - {"none"}


@pytest.mark.parametrize("draft_tokens", K_VALUES)
@pytest.mark.parametrize("name", WITH_DRAFT)
def test_a_hybrid_draft_model_reaches_every_accepted_count(hybrid: Model, name: str, draft_tokens: int) -> None:
    reached: set[int] = set()
    for prompt in (PROMPT, [9, 8, 7, 30, 31], [60]):
        run, _ = heard(hybrid, name, prompt, 60, draft_tokens)
        assert run.ids == plain(hybrid, prompt, 60).ids
        reached |= set(run.accepted)
    assert reached == set(range(draft_tokens + 1))


@pytest.mark.parametrize("name", WITH_DRAFT)
def test_states_of_the_target_are_those_of_plain_decoding(hybrid: Model, name: str) -> None:
    """Bit for bit after every cycle."""
    reference = plain(hybrid, PROMPT, 40, states=True)
    drafter: Any = DraftModelDrafter(hybrid.draft.sequences(), PROMPT, hybrid.draft.limits)
    if name == "draft-model+ngram":
        drafter = FirstDrafter([NgramDrafter(PROMPT), drafter])
    run = play(hybrid, PROMPT, 40, 3, drafter, states=True)
    assert run.ids == reference.ids
    assert all(reference.states[length] == digests for length, digests in run.states.items())


# Where the draft model ends


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A random hybrid that drafts for itself in a context of 18 tokens, and with as much room as the target has."""
    place = tmp_path_factory.mktemp("short")
    checkpoint = random_checkpoint(place / "c", seed=31)
    bundle = build_bundle(checkpoint, place / "bundle")
    draft = build_bundle(checkpoint, place / "draft", max_model_len=18, mtp=False)
    return load(bundle, 1, draft_model=draft), load(bundle, 1, draft_model=bundle)


@pytest.mark.parametrize("length", [12, 15, 16, 17, 18, 30])
def test_a_shorter_context_drafts_as_far_as_it_goes(
    short: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Fewer near its end, nothing behind it, and the answer goes on; a prompt beyond it is never consumed."""
    model, roomy = short
    prompt = np.random.default_rng(length).integers(0, 112, length).tolist()
    opened = recorded_drafts(model, monkeypatch)
    run, listener = heard(model, "draft-model", prompt, 20, 4)
    assert run.ids == plain(model, prompt, 20).ids
    assert listener.differ_from(said_by(draft_of(model))) == []
    counts = [len(draft) for _, _, draft in listener.proposals]
    assert counts[0] == min(max(18 - length - 1, 0), 4)
    assert counts[-1] == 0
    if length > 16:
        assert opened[0].verified == []
    # The control: with room enough the same model drafts to the end.
    _, listener = heard(roomy, "draft-model", prompt, 20, 4)
    assert all(len(draft) == count for _, count, draft in listener.proposals)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft of the chain t + 1; after 8 the draft says 40."""
    place = tmp_path_factory.mktemp("sound")
    draft = markov_checkpoint(place / "d", target=lambda token: 40 if token == 8 else (token + 1) % 64)
    return (
        build_bundle(markov_checkpoint(place / "c"), place / "b", mtp=False),
        build_bundle(draft, place / "db", mtp=False),
    )


@pytest.mark.parametrize(
    ("tensor", "at", "start", "drafts"),
    [
        ("layers.0.input_norm", (3,), 5, []),
        ("embedding", (5, 0), 5, []),
        ("embedding", (10, 0), 5, [[7, 8, 40], [10]]),
        ("embedding", (40, 0), 6, [[8, 40], [10, 11, 12], [14, 15, 16]]),
        ("embedding", (50, 0), 5, [[7, 8, 40], [10, 11, 12], [14, 15, 16]]),
    ],
    ids=["everywhere", "in the prompt", "from an id of the answer on", "at an id that is only drafted", "control"],
)
def test_a_draft_model_that_is_not_finite_loses_its_drafts_only(
    sound: tuple[Path, Path], tmp_path: Path, tensor: str, at: tuple[int, ...], start: int, drafts: list[list[int]]
) -> None:
    """The answer is that of plain decoding; drafts end where a value is not a number, for good if the text has it."""
    broken = changed_bundle(sound[1], tmp_path / "broken", BACKBONE, tensor, at, np.nan)
    run, listener = heard(load(sound[0], 1, draft_model=broken), "draft-model", [start], 12, 3)
    assert run.ids == list(range(start + 1, start + 13))
    found = [draft for _, _, draft in listener.proposals]
    assert found[: len(drafts)] == drafts
    assert not any(found[len(drafts) :])
    assert run.finished.stats.drafted == sum(map(len, drafts))


def test_a_draft_model_that_broke_is_not_asked_again_in_that_answer(
    sound: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = changed_bundle(sound[1], tmp_path / "broken", BACKBONE, "embedding", (9, 0), np.nan)
    model = load(sound[0], 1, draft_model=broken)
    opened = recorded_drafts(model, monkeypatch)
    assert model.complete(prompt_ids=[9], max_new_tokens=12).token_ids == tuple(range(10, 22))
    assert opened[-1].verified == [2], "one attempt"
    assert model.complete(prompt_ids=[20], max_new_tokens=12).stats.accepted > 5, "the next answer has its drafts"


# Several generations


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_a_cancelled_generation_leaves_nothing_in_the_draft_model(pair: Model, count: int) -> None:
    for name in WITH_DRAFT:
        options = {"prompt_ids": PROMPT, "max_new_tokens": 40, "drafter": name, "draft_tokens": 4}
        whole = pair.complete(**options)
        events = pair.generate(**options)
        ids = emitted_ids(events, count)
        events.close()
        assert tuple(ids) == whole.token_ids[: len(ids)]
        again = pair.complete(**options)
        assert again.token_ids == whole.token_ids
        assert again.stats.emitted_histogram == whole.stats.emitted_histogram


def test_generations_that_take_turns_do_not_mix(pair: Model) -> None:
    """Each has draft sequences of its own: event by event in turn, ids and counts are those of one after the other."""
    prompts = [[index, index + 30, 3 * index] for index in range(4)]
    options = {"max_new_tokens": 40, "draft_tokens": 3}
    alone = [pair.complete(prompt_ids=prompt, **options) for prompt in prompts]
    turns = list(zip_longest(*(pair.generate(prompt_ids=prompt, **options) for prompt in prompts)))
    for index, expected in enumerate(alone):
        events = [turn[index] for turn in turns if turn[index] is not None]
        assert isinstance(events[-1], Finished)
        assert events[-1].token_ids == expected.token_ids
        assert events[-1].stats.emitted_histogram == expected.stats.emitted_histogram
        assert sum(len(event.token_ids) for event in events if isinstance(event, Emitted)) == 40
    assert len({done.token_ids for done in alone}) == 4, "prompts that say the same cannot show a mix-up"


def test_control_shared_draft_sequences_are_noticed(pair: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above looks for."""
    shared = pair.draft.sequences()
    monkeypatch.setattr(pair.draft, "sequences", lambda batch=1: shared)
    generations = [pair.generate(prompt_ids=[index, 30], max_new_tokens=20, draft_tokens=3) for index in range(2)]
    with pytest.raises(ContractError):
        list(zip_longest(*generations))


@pytest.mark.parametrize(("count", "tokens"), [(2, 100), (6, 40)])
def test_threads_that_draft_with_one_draft_model_do_not_mix(hybrid: Model, count: int, tokens: int) -> None:
    names = ("draft-model", "draft-model+ngram", "mtp+ngram")
    requests = [
        {"prompt_ids": [index, index + 40, 3 * index], "max_new_tokens": tokens, "drafter": names[index % 3]}
        for index in range(count)
    ]
    expected = [hybrid.complete(**options) for options in requests]
    for _ in range(3):
        results: dict[int, Finished] = {}
        start = threading.Barrier(count)

        def work(index: int, start: threading.Barrier = start, results: dict = results) -> None:
            start.wait()
            results[index] = hybrid.complete(**requests[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, serial in enumerate(expected):
            assert results[index].token_ids == serial.token_ids
            assert results[index].stats.emitted_histogram == serial.stats.emitted_histogram


# The command


def test_a_file_of_requests_may_mix_drafters(chain: Model, tmp_path: Path) -> None:
    """One process, one draft model: every line has its drafter, and all say the same."""
    names = [None, "mtp", "ngram", "mtp+ngram", "draft-model", "draft-model+ngram", "none"]
    lines = [{"prompt_ids": [5, 6, 7, 5, 6], "id": str(name)} | ({"drafter": name} if name else {}) for name in names]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = chain.bundle.directory
    arguments = ("--prompts", file, "--max-new-tokens", "30", "--json", "--draft-model", place.with_name("draft"))
    result = run_command("mtp-run", "generate", place, *arguments)
    assert result.returncode == 0, result.stderr
    assert "no tokenizer.json" in result.stderr
    records = {record["id"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert len({tuple(record["token_ids"]) for record in records.values()}) == 1
    assert records["None"]["token_ids"][:5] == [7, 8, 9, 10, 11]
    for name, record in records.items():
        used = "draft-model" if name == "None" else name
        assert record["stats"]["drafter"] == used
        assert set(record["stats"]["drafted_by_source"]) == set(used.split("+")) - {"none"}
        assert sum(record["stats"]["drafted_by_source"].values()) == record["stats"]["drafted"]
        assert sum(record["stats"]["accepted_by_source"].values()) == record["stats"]["accepted"]


def test_the_command_says_what_drafted(chain: Model) -> None:
    place = chain.bundle.directory
    arguments = ("--prompt-ids", "5", "--max-new-tokens", "20", "--draft-model", place.with_name("draft"))
    result = run_command("mtp-run", "generate", place, *arguments)
    assert result.returncode == 0, result.stderr
    stats = chain.complete(prompt_ids=[5], max_new_tokens=20).stats
    assert f"(draft-model {stats.accepted} of {stats.drafted})" in result.stderr
    assert result.stdout.split() == [str(token) for token in range(6, 26)]
