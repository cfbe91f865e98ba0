"""What seeds, penalties and log-probabilities promise: the same answer for every K, drafter, policy and place."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends import EngineOptions
from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.engine import Floats, Ids, Verified
from mtp_engines.errors import ContractError
from mtp_runtime import Emitted, Finished, Model, load
from mtp_runtime.drafters.registry import Given, make_drafter
from mtp_runtime.policy import SchedulePolicy
from mtp_runtime.prepare import decoding_of
from mtp_runtime.request import Request
from mtp_runtime.sampling import Context, Stream, coupled, token_logprobs
from mtp_runtime.sampling.sampler import Sampler
from mtp_runtime.sampling.stream import derived_seed
from mtp_runtime.sampling.transforms import Rows
from mtp_runtime.verification import Scored
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.runtime.conftest import Models
from tests.runtime.decoding import FALSE_ALARM, PROMPT, TARGET, TRANSFORMS, fit, said
from tests.runtime.parts import collect, limit_only
from tests.support import build_bundle, load_model, refused, run_command

TEXT = {"prompt": "The king", "max_new_tokens": 24, "ignore_eos": True}
WARM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
HEAVY: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 1.5}


# Seeds


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_coupled_answers_are_the_same_for_every_k_and_drafter(world: Model, transform: str) -> None:
    for seed in range(3):
        options = TRANSFORMS[transform] | {"seed": seed}
        plain = said(world, PROMPT, 20, 0, **options)
        for drafter, draft_tokens in itertools.product(["mtp", "ngram", "mtp+ngram"], range(1, 5)):
            found = said(world, PROMPT, 20, draft_tokens, drafter=drafter, **options)
            assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
            assert found.completion.seed == seed


def test_coupled_answers_of_a_trained_model_are_the_same_for_every_k(carried: Model) -> None:
    """RT-28; drafts are drawn, and every number of them is kept at some time."""
    options = TEXT | WARM | {"repetition_penalty": 1.1}
    plain = carried.complete(**options, draft_tokens=0)
    for draft_tokens in (1, 2, 3, 5, 7):
        found = carried.complete(**options, draft_tokens=draft_tokens)
        assert found.token_ids == plain.token_ids
        assert found.stats.accepted > 0
    other = carried.complete(**options | {"seed": 4}, draft_tokens=3)
    assert other.token_ids != plain.token_ids, "control: another seed, another answer"
    counts = set()
    for seed in range(8):
        counts |= set(carried.complete(**options | {"seed": seed}, draft_tokens=2).stats.emitted_histogram)
    assert counts == {1, 2, 3}


def test_coupled_answers_do_not_depend_on_the_policy(partial: Model) -> None:
    """K that changes from cycle to cycle, and `auto`; a target that depends on all of its states."""
    options = {"temperature": 9.0, "seed": 11}
    plain = said(partial, PROMPT, 40, 0, **options)
    request = Request(prompt_ids=PROMPT, **options)
    for schedule in ([1, 0, 3], [8, 2], [0, 5]):
        sequences = partial.engine.sequences()
        decoding = decoding_of(request, (), 64)
        acceptor = Sampler(PROMPT, 64, decoding, ())
        given = Given(PROMPT, sequences, partial.engine, None, (2, 4), acceptor.drafting)
        drafter, policy = make_drafter("mtp+ngram", given), SchedulePolicy(schedule)
        run = collect(partial.run(PROMPT, sequences, drafter, policy, limit_only(40), None, acceptor))
        assert run.finished.token_ids == plain.token_ids
        assert run.finished.stats.accepted > 0
    assert said(partial, PROMPT, 40, "auto", **options).token_ids == plain.token_ids
    assert plain.token_ids != said(partial, PROMPT, 40, 0).token_ids, "control: it is not greedy"


def test_a_seed_does_not_depend_on_other_requests_or_processes(world: Model) -> None:
    """RT-28: alone, after others, in a fresh process; 50 seeds say nearly as many things; none is drawn twice."""
    options = {"temperature": 1.0, "acceptor": "rejection"}
    first = [said(world, PROMPT, 12, 2, seed=seed, **options).token_ids for seed in range(50)]
    assert len(set(first)) >= 40
    said(world, [4], 7, 3, temperature=2.0)
    assert [said(world, PROMPT, 12, 2, seed=seed, **options).token_ids for seed in range(5)] == first[:5]
    arguments = ["--prompt-ids", "1,2,2", "--max-new-tokens", "12", "--draft-tokens", "2", "--ignore-eos", "--json"]
    arguments += ["--temperature", "1", "--acceptor", "rejection", "--seed", "7"]
    shown = json.loads(run_command("mtp-run", "generate", world.bundle.directory, *arguments).stdout)
    assert (tuple(shown["token_ids"]), shown["seed"], shown["acceptor"]) == (first[7], 7, "rejection")


def test_a_fresh_seed_is_told_and_can_be_sent_back(world: Model) -> None:
    found = [said(world, PROMPT, 12, 2, temperature=1.0) for _ in range(2)]
    seeds = [answer.completion.seed for answer in found]
    assert seeds[0] != seeds[1]
    for answer in found:
        assert said(world, PROMPT, 12, 0, temperature=1.0, seed=answer.completion.seed).token_ids == answer.token_ids
    assert said(world, PROMPT, 12, 2, seed=5).completion.seed is None, "greedy decoding draws nothing"


def test_rejection_is_the_same_for_the_same_k_and_not_for_another(world: Model) -> None:
    """Control: the equality of the coupled answers is no accident."""
    options = {"temperature": 1.0, "acceptor": "rejection", "seed": 2}
    assert len({said(world, PROMPT, 30, 3, **options).token_ids for _ in range(3)}) == 1
    assert len({said(world, PROMPT, 30, draft_tokens, **options).token_ids for draft_tokens in range(5)}) > 2


def test_several_answers_have_seeds_of_their_own(world: Model) -> None:
    """The first has the request's; each can be had alone with the seed that it tells."""
    options = {"prompt_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    events = list(world.generate(n=4, seed=9, draft_tokens=3, **options))
    answers = [event for event in events if isinstance(event, Finished)]
    assert [answer.completion.index for answer in answers] == [0, 1, 2, 3]
    assert [answer.completion.seed for answer in answers] == [9, *(derived_seed(9, index) for index in (1, 2, 3))]
    assert len({answer.token_ids for answer in answers}) == 4
    for answer in answers:
        index = answer.completion.index
        emitted = [event for event in events if isinstance(event, Emitted) and event.index == index]
        assert sum((event.token_ids for event in emitted), ()) == answer.token_ids
        assert world.complete(seed=answer.completion.seed, draft_tokens=1, **options).token_ids == answer.token_ids
    shown = world.complete_all(n=2, seed=9, draft_tokens=0, **options)
    assert [answer.token_ids for answer in shown] == [answer.token_ids for answer in answers[:2]]
    seeds = {derived_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50
    assert max(seeds) < 2**53, "a JSON number keeps it"


def test_a_place_in_a_batch_changes_no_logit_and_so_no_token(world: Model) -> None:
    """RT-28: three sequences verified together draw what each draws alone."""
    texts = [[1, 2, 2, 4], [3, 3, 0, 5], [5, 1, 4, 2]]
    together = world.engine.sequences(3).verify(np.array(texts), 3, logits=True).logits
    for place, text in enumerate(texts):
        alone = world.engine.sequences().verify(np.array([text]), 3, logits=True).logits
        np.testing.assert_array_equal(together[place], alone[0])
        request = Request(prompt_ids=text, temperature=1.0, seed=6)
        found = []
        for logits in (together[place], alone[0]):
            sampler = Sampler(text[:2], 6, decoding_of(request, (), 6), ())
            found.append(sampler.accept(text[2:], Scored([0, 0, 0], logits)))
        assert found[0] == found[1]


# Greedy decoding of changed logits


@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
def test_greedy_answers_with_penalties_are_the_same_for_every_k(carried: Model, acceptor: str) -> None:
    """RT-21: row j counts the drafts 0 to j - 1."""
    plain = carried.complete(**TEXT, **HEAVY, draft_tokens=0)
    assert plain.token_ids != carried.complete(**TEXT, draft_tokens=0).token_ids, "control: they change the answer"
    for draft_tokens in (1, 2, 4, 7):
        found = carried.complete(**TEXT, **HEAVY, draft_tokens=draft_tokens, acceptor=acceptor)
        assert found.token_ids == plain.token_ids
        assert found.completion.seed is None
        assert found.stats.accepted > 0


def test_control_penalties_that_ignore_the_draft_change_a_greedy_answer(
    carried: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = carried.complete(**TEXT, **HEAVY, draft_tokens=0)

    class Blind(Rows):
        def __init__(self, logits: Floats, draft: list[int], *others: Any) -> None:
            super().__init__(logits, [], *others)

    monkeypatch.setattr("mtp_runtime.sampling.sampler.Rows", Blind)
    assert carried.complete(**TEXT, **HEAVY, draft_tokens=0).token_ids == plain.token_ids
    assert carried.complete(**TEXT, **HEAVY, draft_tokens=4).token_ids != plain.token_ids


def test_drafts_are_made_with_the_penalties_too(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without them fewer are kept, and the answer is the same."""
    found = carried.complete(**TEXT, **HEAVY, draft_tokens=3)
    monkeypatch.setattr(Sampler, "drafting", None)
    best = carried.complete(**TEXT, **HEAVY, draft_tokens=3)
    assert best.token_ids == found.token_ids
    assert best.stats.as_dict()["acceptance_rate"] < found.stats.as_dict()["acceptance_rate"]


@pytest.mark.parametrize("draft_tokens", range(5))
def test_bans_biases_and_end_tokens_hold_inside_accepted_blocks(markov: Models, draft_tokens: int) -> None:
    """A chain t + 1 with a perfect head: what is banned never comes, whatever is drafted."""
    model = markov(eos=12, pieces=("A", "bc", "dS", "TO", "P!", "ef", "gh"))
    plain = {"prompt_ids": [5], "max_new_tokens": 10, "draft_tokens": draft_tokens}
    assert model.complete(**plain).token_ids == tuple(range(6, 13))
    masked = model.complete(**plain, min_new_tokens=9)
    assert (masked.token_ids[:6], masked.finish_reason) == ((6, 7, 8, 9, 10, 11), "length")
    assert 12 not in masked.token_ids
    assert model.complete(**plain, min_new_tokens=6).token_ids == tuple(range(6, 13))
    assert 8 not in model.complete(**plain, logit_bias={8: -math.inf}, ignore_eos=True).token_ids
    banned = model.complete(**plain, bad_words=[[7, 8]], ignore_eos=True).token_ids
    assert banned[:2] == (6, 7)
    assert banned[2] != 8
    assert model.complete(**plain, logit_bias={20: 1000.0}).token_ids == (20,) * 10
    words = model.complete(prompt="A", max_new_tokens=4, draft_tokens=draft_tokens, bad_words=["dS"])
    assert "dS" not in words.text
    assert model.complete(prompt="A", max_new_tokens=4, draft_tokens=draft_tokens).text == "bcdSTOP!"


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_tokens", range(4))
def test_log_probabilities_are_those_of_the_table(world: Model, temperature: float, draft_tokens: int) -> None:
    """RT-26: one entry for each token, from the raw logits, whatever the temperature and K."""
    options = {"logprobs": 2, "prompt_logprobs": 1, "seed": 1, "temperature": temperature}
    answer = said(world, PROMPT, 15, draft_tokens, **options)
    assert len(answer.logprobs) == 15
    text = [*PROMPT, *answer.token_ids]
    assert answer.prompt_logprobs[0] is None
    for before, entry in zip(text, [*answer.prompt_logprobs[1:], *answer.logprobs], strict=False):
        assert entry.logprob == pytest.approx(math.log(TARGET[before, entry.token]), abs=1e-5)
        best = np.argsort(-TARGET[before])[: len(entry.top)]
        assert [token for token, _ in entry.top] == best.tolist()
    assert [len(entry.top) for entry in answer.logprobs] == [2] * 15
    assert [entry.token for entry in answer.prompt_logprobs[1:]] == PROMPT[1:]
    assert [entry.token for entry in answer.logprobs] == list(answer.token_ids)


@pytest.mark.parametrize("options", [{}, WARM, HEAVY], ids=["greedy", "warm", "penalties"])
def test_log_probabilities_have_the_same_bits_for_every_k(carried: Model, options: dict[str, Any]) -> None:
    asked = TEXT | options | {"logprobs": 3, "prompt_logprobs": 2}
    plain = carried.complete(**asked, draft_tokens=0)
    silent = carried.complete(**TEXT, **options, draft_tokens=3)
    assert silent.token_ids == plain.token_ids, "reporting changes no token"
    assert silent.logprobs is silent.prompt_logprobs is None
    for draft_tokens in (1, 3, 7):
        found = carried.complete(**asked, draft_tokens=draft_tokens)
        assert found.logprobs == plain.logprobs
        assert found.prompt_logprobs == plain.prompt_logprobs
        assert found.stats.accepted > 0


def test_log_probabilities_come_with_their_tokens_and_end_with_the_answer(world: Model) -> None:
    for draft_tokens, limit in itertools.product((0, 3), (0, 1, 9)):
        options = {"draft_tokens": draft_tokens, "logprobs": 0, "prompt_logprobs": 0, "temperature": 1.0, "seed": 4}
        events = list(world.generate(prompt_ids=PROMPT, max_new_tokens=limit, **options))
        assert all(len(event.logprobs) == len(event.token_ids) for event in events if isinstance(event, Emitted))
        assert len(events[-1].logprobs) == len(events[-1].token_ids)
        assert len(events[-1].prompt_logprobs) == len(PROMPT)
    done = world.complete(prompt_ids=[5], max_new_tokens=30, draft_tokens=4, logprobs=0, temperature=1.0, seed=1)
    assert done.finish_reason == "eos", "control: an end token cuts a block"
    assert len(done.logprobs) == len(done.token_ids)


def test_control_log_probabilities_of_a_shifted_row_are_seen(world: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = said(world, PROMPT, 15, 0, logprobs=0)
    right = CpuSequences.verify

    def shifted(self: CpuSequences, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        found = right(self, tokens, logit_rows, logits=logits)
        scores = None if found.logits is None else np.roll(found.logits, 1, axis=1)
        return Verified(found.ids, found.hidden, scores)

    monkeypatch.setattr(CpuSequences, "verify", shifted)
    assert said(world, PROMPT, 15, 3, logprobs=0).logprobs != plain.logprobs


# The engine


def test_logits_are_the_same_bits_for_every_number_of_rows(carried: Model) -> None:
    """A row of a verify, and a draft's, as one-row calls have it; the ids are the best of them."""
    ids = np.random.default_rng(3).integers(0, carried.manifest.model.vocab_size, (1, 24))
    alone = []
    sequences = carried.engine.sequences()
    for place in range(24):
        alone.append(sequences.verify(ids[:, place : place + 1], 1, logits=True).logits[0, 0])
        sequences.commit(np.array([1]))
    for rows in (2, 3, 5, 8):
        sequences = carried.engine.sequences()
        for start in range(0, 24 - rows + 1, rows):
            verified = sequences.verify(ids[:, start : start + rows], rows, logits=True)
            np.testing.assert_array_equal(verified.logits[0], alone[start : start + rows])
            np.testing.assert_array_equal(verified.ids[0], verified.logits[0].argmax(axis=1))
            sequences.commit(np.array([rows]))
    assert not np.array_equal(alone[0], alone[1])


def test_a_choice_among_the_heads_logits_is_what_is_drafted(carried: Model) -> None:
    sequences = carried.engine.sequences()
    ids = np.array([[5, 6, 20]])
    hidden = sequences.verify(ids, 3).hidden.copy()
    best = sequences.draft(ids, hidden, np.array([3]), 4)
    seen: list[Floats] = []

    def second(logits: Floats) -> Ids:
        seen.append(logits.copy())
        return np.argsort(-logits, axis=1)[:, 1]

    def first(logits: Floats) -> Ids:
        return logits.argmax(axis=1)

    drafts = []
    for choose in (first, second):
        sequences.reset()
        drafts.append(sequences.draft(ids, hidden, np.array([3]), 4, choose=choose))
    np.testing.assert_array_equal(drafts[0], best)
    assert drafts[1][0, 0] == np.argsort(-seen[0][0])[1] != best[0, 0]
    assert [logits.shape for logits in seen] == [(1, carried.manifest.model.vocab_size)] * 4


def test_greedy_decoding_takes_no_logits_out_of_the_graph(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: VocabularyHead, hidden: Floats) -> object:
        raise AssertionError("logits were asked for")

    monkeypatch.setattr(VocabularyHead, "score", fails)
    assert len(carried.complete(**TEXT, draft_tokens=3, top_k=5, seed=1).token_ids) == 24
    with pytest.raises(AssertionError, match="were asked for"):
        carried.complete(**TEXT, draft_tokens=3, temperature=0.5)


def test_pytorch_says_the_same(world: Model) -> None:
    """A backend with cycles of its own: sampling goes through the host's loop there."""
    torch = load(world.bundle.directory, options=EngineOptions(backend="torch", device="cpu", threads=1))
    for options in (TRANSFORMS["all"], {"temperature": 1.0, "acceptor": "rejection"}, HEAVY):
        for draft_tokens in (0, 3):
            asked = {**options, "seed": 8, "logprobs": 1, "prompt_logprobs": 0}
            theirs, ours = (said(model, PROMPT, 16, draft_tokens, **asked) for model in (world, torch))
            assert ours.token_ids == theirs.token_ids
            assert ours.stats.accepted == theirs.stats.accepted
            scores = ((*answer.prompt_logprobs[1:], *answer.logprobs) for answer in (ours, theirs))
            for mine, other in zip(*scores, strict=True):
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_draft_model_draws_its_drafts_too(carried: Model, tmp_path: Path) -> None:
    """The same model as its own draft: with the coupled race every drawn draft is kept."""
    pair = load(carried.bundle.directory, threads=1, draft_model=carried.bundle.directory)
    options = TEXT | WARM | {"draft_tokens": 3, "drafter": "draft-model"}
    found = pair.complete(**options)
    assert found.token_ids == carried.complete(**TEXT | WARM, draft_tokens=0).token_ids
    assert found.stats.as_dict()["acceptance_rate"] == 1.0
    kept = pair.complete(**options | {"acceptor": "rejection"}).stats.as_dict()["acceptance_rate"]
    assert kept == 1.0, "p = q: nothing is rejected"


def test_the_sampler_reports_what_the_arithmetic_says(world: Model) -> None:
    """The loop adds nothing: one cycle by hand."""
    sequences = world.engine.sequences()
    logits = sequences.verify(np.array([[1, 2, 2, 4, 5]]), 3, logits=True).logits
    request = Request(prompt_ids=[1, 2, 2], temperature=0.8, seed=3, logprobs=2, frequency_penalty=0.5)
    decoding = decoding_of(request, (), 6)
    sampler = Sampler([1, 2, 2], 6, decoding, ())
    verified = Verified(np.zeros((1, 3), np.int64), logits[0], logits)
    emitted = sampler.accept([4, 5], Scored.last_of(verified, 3))
    laws = Rows(logits[0], [4, 5], Context([1, 2, 2], 6), decoding.options)
    assert emitted == coupled(laws, [4, 5], 0, Stream(3)).emitted
    wanted = tuple(token_logprobs(logits[0, row], token, 2) for row, token in enumerate(emitted))
    assert sampler.emit(emitted, verified) == wanted


@pytest.mark.parametrize("text", [None, "3 5 5 3 1"], ids=["first ids", "table"])
def test_a_draft_vocabulary_is_drawn_from_where_its_rows_are_ids(tmp_path: Path, text: str | None) -> None:
    """The law and the answers are those of the whole vocabulary; a table of ids leaves the best token as the draft."""
    checkpoint = markov_checkpoint(tmp_path / "c", table=TARGET, size=6, layer_types=["full_attention"], eos=0)
    build: dict[str, Any] = {"draft_tokens": 4, "draft_vocab": 4}
    if text is not None:
        write_tokenizer(checkpoint, tinytext_tokenizer([str(token) for token in range(6)]))
        (tmp_path / "text.txt").write_text(text)
        build["draft_vocab_text"] = (tmp_path / "text.txt",)
    model = load_model(build_bundle(checkpoint, tmp_path / "b", **build))
    assert model.manifest.model.mtp.has_table == (text is not None)
    options = {"temperature": 1.0, "seed": 2}
    plain = said(model, PROMPT, 30, 0, **options)
    found = said(model, PROMPT, 30, 3, **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 0
    assert fit(model, {"temperature": 1.0}, 2, 300, draft_tokens=2, acceptor="rejection") > FALSE_ALARM
    banned = {"bad_words": [[token] for token in range(4)], "temperature": 1.0, "seed": 2}
    assert set(said(model, PROMPT, 9, 2, **banned).token_ids) == {4, 5}, "none of what the head can say"
    sequences = model.engine.sequences()
    hidden = sequences.verify(np.array([PROMPT]), 1).hidden.copy()
    arguments = (np.array([PROMPT]), hidden, np.array([3]), 2)
    if text is not None:
        with refused("looks the ids of its rows up in a table", error=ContractError):
            sequences.draft(*arguments, choose=lambda logits: logits.argmax(axis=1))
    else:
        assert sequences.draft(*arguments, choose=lambda logits: logits.argmax(axis=1)).max() < 4
