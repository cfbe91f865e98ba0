"""Tree drafts: several paths are verified together, one is committed, and nothing that is said depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.bundle import BACKBONE
from mtp_engines.engine import Floats, Ids, SlotSequences
from mtp_engines.errors import RequestError
from mtp_runtime import Emitted, Model
from mtp_runtime.drafters import registry
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.registry import own_head
from mtp_runtime.policy import FixedPolicy, SchedulePolicy
from mtp_runtime.stats import Seconds, Stats
from mtp_runtime.timing import TimedSlots
from mtp_runtime.trees.branching import Branching
from mtp_runtime.trees.paths import Paths
from mtp_runtime.trees.tree import Tree
from mtp_runtime.trees.verification import PathAcceptor
from mtp_tools.verify.digests import Digests, state_digests
from tests.fixtures.checkpoints import markov_checkpoint, random_checkpoint, tinytext_tokenizer
from tests.fixtures.dense_families import mimo_checkpoint
from tests.runtime.changed import changed, forty_after_eight
from tests.runtime.conftest import CARRIED, Models
from tests.runtime.decoding import PROMPT, TARGET, said
from tests.runtime.parts import Delegate, limit_only, plain
from tests.support import build_bundle, load_model, refused, run_command

BUILD = {"max_batch_size": 3, "draft_tokens": 4}
SHAPES = [(k, branches) for k in (1, 2, 3, 4) for branches in (1, 2) if branches <= k]
SIZE = 16
TEXT = [5, 6, 20]


class Slots(Delegate):
    """Slots that hand everything on; the base of deliberate faults."""

    inner: SlotSequences

    def window(self, start: int, count: int) -> SlotSequences:
        return self.inner.window(start, count)

    def save(self, sequence: int, since: int = 0) -> Any:
        return self.inner.save(sequence, since)

    def restore(self, sequence: int, parts: Any) -> None:
        self.inner.restore(sequence, parts)

    def copy(self, source: int, target: int, since: int = 0) -> None:
        self.inner.copy(source, target, since)


class CopiesNothing(Slots):
    """A fault: the other paths stay what they were, as long as what was committed."""

    def copy(self, source: int, target: int, since: int = 0) -> None:
        pass


class KeepsTheChain(Slots):
    """A fault: the chain is what all go on from, whoever won."""

    def copy(self, source: int, target: int, since: int = 0) -> None:
        self.inner.copy(0, target if target else source, since)


@dataclass(frozen=True)
class Grown:
    """A generation with a tree; states: committed length -> digests of every path that is as long as the first."""

    ids: list[int]
    stats: Stats
    accepted: list[int]
    states: dict[int, list[Digests]]


def grow(
    model: Model,
    prompt: list[int],
    limit: int,
    policy: int | SchedulePolicy,
    branches: int,
    wrap: Callable[[SlotSequences], Any] = Slots,
) -> Grown:
    """Decode greedily with a tree, and look at the states of all paths after every event."""
    inner = model.engine.sequences(1 + branches)
    assert isinstance(inner, SlotSequences)
    tree = Tree.over(wrap(inner), branches)
    drafter = own_head(model.engine, tree.paths, tree.branching.begin)
    chosen = FixedPolicy(policy) if isinstance(policy, int) else policy
    states, accepted = {}, []
    for event in model.run(prompt, tree.paths, drafter, chosen, limit_only(limit), tree=tree):
        if isinstance(event, Emitted):
            accepted.append(len(event.token_ids) - 1)
            level = np.flatnonzero(inner.lengths == inner.lengths[0]).tolist()
            states[int(inner.lengths[0])] = [state_digests(inner, path) for path in level]
        else:
            return Grown(list(event.token_ids), event.stats, accepted[1:], states)
    raise AssertionError("a generation ends with Finished")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The carried checkpoint, for three sequences."""
    out = tmp_path_factory.mktemp("tiny") / "bundle"
    return load_model(build_bundle(CARRIED, out, max_model_len=128, **BUILD))


@pytest.fixture(scope="module")
def noisy(hybrid: Models) -> Model:
    """A random hybrid, whose head is hardly ever right."""
    return hybrid(seed=30, build=BUILD)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A head of two trained depths."""
    place = tmp_path_factory.mktemp("deep")
    mimo_checkpoint(place / "checkpoint", seed=1, depths=2)
    return load_model(build_bundle(place / "checkpoint", place / "bundle", **{**BUILD, "draft_tokens": 2}))


def second_best(place: Path, sigma: Callable[[int], int]) -> Model:
    """After t comes t + 1, and t + 2 is the second best; the head at t says what follows sigma(t)."""
    table = np.full((SIZE, SIZE), 0.1 / (SIZE - 2))
    for token in range(SIZE):
        table[token, (token + 1) % SIZE], table[token, (token + 2) % SIZE] = 0.6, 0.3
    checkpoint = markov_checkpoint(place / "c", table=table, size=SIZE, draft=sigma, layer_types=["full_attention"])
    return load_model(build_bundle(checkpoint, place / "b", **BUILD))


@pytest.fixture(scope="module")
def always_second(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The head's second best token is right after every token, its best one never."""
    return second_best(tmp_path_factory.mktemp("second"), lambda token: (token - 1) % SIZE)


@pytest.fixture(scope="module")
def second_after_odd(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The head is right after even tokens; after odd ones its second best token is."""
    return second_best(tmp_path_factory.mktemp("odd"), lambda token: (token - token % 2) % SIZE)


# Tokens and states


def require_plain(model: Model, prompt: list[int], limit: int, shape: tuple[int, int], wrap: Any = Slots) -> Grown:
    """Decode with and without a tree; ids and the states of every path must be the same."""
    run = plain(model, prompt, limit, states=True)
    grown = grow(model, prompt, limit, *shape, wrap)
    assert grown.ids == run.ids
    for length, paths in grown.states.items():
        assert all(digests == run.states[length] for digests in paths)
    between = list(grown.states.values())[1:-1]
    assert between, "control: there were cycles"
    assert all(len(paths) == 1 + shape[1] for paths in between), "a path was left behind"
    return grown


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_and_the_states_of_all_paths_are_those_of_plain_decoding(
    partial: Model, noisy: Model, tiny: Model, shape: tuple[int, int]
) -> None:
    grown = [require_plain(partial, TEXT, 40, shape), require_plain(tiny, [84, 104, 101], 40, shape)]
    require_plain(noisy, [7, 3, 9], 20, shape)
    assert all(run.stats.rescued for run in grown), "control: branches won"
    assert all(run.stats.rescued < run.stats.cycles for run in grown), "control: the chain won"
    assert max(run.accepted[i] for run in grown for i in range(len(run.accepted))) == shape[0]


@pytest.mark.parametrize("sigma", ["perfect", "wrong", "third"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chains_with_a_tree(markov: Models, sigma: str, shape: tuple[int, int]) -> None:
    require_plain(markov(draft=sigma, build=BUILD), [5], 24, shape)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_heads_of_several_depths_draft_trees(deep: Model, shape: tuple[int, int]) -> None:
    require_plain(deep, [7, 3, 9, 11], 24, shape)


@pytest.mark.parametrize("fault", [CopiesNothing, KeepsTheChain])
@pytest.mark.parametrize("which", ["partial", "tiny"])
def test_control_a_state_that_is_not_the_winners_is_seen(
    fault: Any, which: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(which)
    prompt = TEXT if which == "partial" else [84, 104, 101]
    with pytest.raises(AssertionError):
        require_plain(model, prompt, 40, (3, 2), fault)
    prompts = [prompt, *([token, 5, 6] for token in range(8))]
    assert any(grow(model, text, 40, 3, 2, fault).ids != plain(model, text, 40).ids for text in prompts)


@pytest.mark.parametrize("fault", [False, True])
def test_the_heads_of_all_paths_have_read_the_whole_text(
    partial: Model, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At place 0 all of them say the same, bit for bit. Control: heads that have not read the prompt do not."""
    right, same = Branching._choose, []

    def compared(self: Branching, logits: Floats) -> Ids | None:
        if not self.drafts[0]:
            same.append(bool((logits == logits[:1]).all()))
        return right(self, logits)

    def only_the_first(self: Paths, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, **more: Any) -> Ids:
        if not draft_tokens:
            return self.first.draft(tokens, hidden, rows, 0)
        return consumes(self, tokens, hidden, rows, draft_tokens, **more)

    consumes = Paths.draft
    monkeypatch.setattr(Branching, "_choose", compared)
    if fault:
        monkeypatch.setattr(Paths, "draft", only_the_first)
    prompt = np.random.default_rng(2).integers(0, 64, 60).tolist()
    blocks = replace(partial.engine.limits, prefill_chunk=8)
    monkeypatch.setattr(partial.engine, "limits", blocks)
    partial.complete(prompt_ids=prompt, max_new_tokens=12, draft_tokens=3, draft_branches=2, ignore_eos=True)
    assert len(same) > 2
    assert all(same) is not fault


@pytest.mark.parametrize("schedule", [[0, 2], [2, 0, 0, 1, 3], [0, 0, 0, 4]])
def test_cycles_without_a_draft_leave_the_other_paths_behind_until_the_next_one(
    partial: Model, schedule: list[int]
) -> None:
    run = plain(partial, TEXT, 40, states=True)
    grown = grow(partial, TEXT, 40, SchedulePolicy(schedule), 2)
    assert grown.ids == run.ids
    assert all(digests == run.states[at] for at, paths in grown.states.items() for digests in paths)
    assert {len(paths) for paths in grown.states.values()} == {1, 3}


@pytest.mark.parametrize("prompt", [[5], list(range(40, 3, -1))])
def test_prompts_of_one_token_and_of_several_chunks(
    partial: Model, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is read by one path, whatever part of it the head reads at once: the same drafts are kept."""
    whole = grow(partial, prompt, 30, 3, 2)
    monkeypatch.setattr(registry, "MtpDrafter", lambda s, block, *rest: MtpDrafter(s, 7, *rest))
    pieces = grow(partial, prompt, 30, 3, 2)
    assert pieces.ids == whole.ids == plain(partial, prompt, 30).ids
    assert pieces.accepted == whole.accepted


# What a rescue brings


def test_the_second_best_token_is_rescued_at_place_0(always_second: Model) -> None:
    """By hand: no chain is ever right, and every second path is right at place 0 and wrong behind it."""
    for k, branches in SHAPES:
        grown = grow(always_second, [3], 1 + 2 * 6, k, branches)
        assert grown.accepted == [1] * 6
        assert (grown.stats.cycles, grown.stats.rescued, grown.stats.accepted) == (6, 6, 6)
        chain = said(always_second, [3], 13, k)
        assert (chain.stats.accepted, chain.stats.rescued) == (0, 0)


def test_the_second_best_token_is_rescued_at_place_1(second_after_odd: Model) -> None:
    """By hand, K = 2: after an even token the chain goes wrong at place 1, after an odd one at place 0.

    With two branches 3 tokens come in every cycle and the pending token is odd and even in turn. With one, the first
    cycle takes it from 3 to 6; from then on it is even, the chain keeps its first token and nobody has the second.
    """
    limit = 1 + 3 * 4
    both = grow(second_after_odd, [2], limit, 2, 2)
    assert both.accepted == [2, 2, 2, 2]
    assert both.stats.rescued == 4
    assert both.stats.drafted == 8, "what one path proposed counts"
    one = grow(second_after_odd, [2], 1 + 3 + 2 * 4, 2, 1)
    assert one.accepted == [2, 1, 1, 1, 1]
    assert one.stats.rescued == 1
    chain = said(second_after_odd, [2], 1 + 1 + 2 * 4, 2)
    assert [chain.stats.cycles, chain.stats.accepted] == [5, 4]


def _best_two(row: np.ndarray) -> list[int]:
    return np.argsort(-row, kind="stable")[:2].tolist()


def _tree(text: list[int], k: int, branches: int) -> list[list[int]]:
    """Paths by the laws alone: the world's head says at t what follows t + 1."""
    size = len(TARGET)

    def law(token: int) -> np.ndarray:
        return np.asarray(TARGET[(token + 1) % size])

    def onwards(path: list[int]) -> list[int]:
        while len(path) < k:
            path.append(int(law([text[-1], *path][-1]).argmax()))
        return path

    chain = onwards([])
    rescues = [onwards([*chain[:at], _best_two(law([text[-1], *chain][at]))[1]]) for at in range(branches) if at < k]
    return [chain, *rescues]


def _counted(limit: int, k: int, branches: int) -> tuple[int, int, int]:
    """Cycles, accepted and rescued of a greedy answer in the world, without the code under test."""
    text, emitted, found = [*PROMPT, int(TARGET[PROMPT[-1]].argmax())], 1, np.zeros(3, int)
    while emitted < limit:
        truth = [text[-1]]
        while len(truth) < k + 2:
            truth.append(int(TARGET[truth[-1]].argmax()))
        kept = []
        for path in _tree(text, min(k, limit - emitted - 1), branches):
            right = [a == b for a, b in zip(path, truth[1:], strict=False)]
            kept.append([*right, False].index(False))
        text += truth[1 : max(kept) + 2]
        emitted += max(kept) + 1
        found += [1, max(kept), kept.index(max(kept)) > 0]
    return tuple(found.tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_are_those_of_the_laws(world: Model, shape: tuple[int, int]) -> None:
    k, branches = shape
    for limit in (40, 41, 42):
        stats = said(world, PROMPT, limit, k, draft_branches=branches).stats
        assert (stats.cycles, stats.accepted, stats.rescued) == _counted(limit, *shape)
    assert _counted(40, k, 0)[2] == 0


def test_control_an_acceptor_that_only_looks_at_the_chain_is_seen(
    world: Model, partial: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PathAcceptor, "furthest", lambda self, drafts, scored: 0)
    found = [said(world, PROMPT, 40, k, draft_branches=branches).stats for k, branches in SHAPES]
    assert all(stats.rescued == 0 for stats in found)
    assert any(s.accepted != _counted(40, *shape)[1] for s, shape in zip(found, SHAPES, strict=True))


def test_a_branch_takes_the_next_best_token_and_goes_on() -> None:
    """By hand, over four tokens: places are logits of all three paths."""
    branching = Branching(2)
    choose = branching.begin()
    places: list[list[list[float]]] = [
        [[1, 4, 3, 2]] * 3,
        [[1, 2, 4, 3], [9, 2, 4, 3], [1, 2, 4, 3]],
        [[9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0]],
    ]
    said = [choose(np.array(place, np.float32)) for place in places]
    assert [ids.tolist() for ids in said if ids is not None] == [[1, 2, 1], [2, 0, 3], [0, 1, 2]]
    assert branching.drafts == [[1, 2, 0], [2, 0, 1], [1, 3, 2]]
    branching.begin()
    assert branching.drafts == [[], [], []]


def test_a_path_that_finds_no_token_ends_and_the_chain_ends_all() -> None:
    answers: list[int | None] = [1, None, 2, 3, None]
    branching = Branching(2, lambda logits, draft: answers.pop(0))
    choose, logits = branching.begin(), np.zeros((3, 4), np.float32)
    # The first path finds its token, the second none; the third shares it and then takes another than the chain.
    assert choose(logits) is not None
    assert choose(logits) is not None
    assert choose(logits) is None
    assert branching.drafts == [[1, 2], [], [1, 3]]


# Sampling, constraints, scores

HOT: dict[str, Any] = {"temperature": 0.9, "seed": 4}
ASKED: dict[str, dict[str, Any]] = {
    "hot": HOT,
    "cut": {"temperature": 1.2, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 2.0, 4: -np.inf}},
    "bans": {"temperature": 0.7, "seed": 8, "bad_words": [[3], [5, 2]], "logprobs": 2, "prompt_logprobs": 1},
    "several": {"temperature": 1.0, "seed": 3, "n": 2},
    "confidence": {"draft_confidence": 0.1},
    "hot confidence": {**HOT, "draft_confidence": 0.2},
}


@pytest.mark.parametrize("name", ASKED)
def test_drawn_tokens_and_scores_do_not_depend_on_branches(
    tiny: Model, partial: Model, world: Model, name: str
) -> None:
    rescued = 0
    for model, prompt in ((tiny, [84, 104, 101]), (partial, TEXT), (world, PROMPT)):
        options = {"prompt_ids": prompt, "max_new_tokens": 30, "ignore_eos": True, **ASKED[name]}
        bare = [vars(done) for done in model.complete_all(**options, draft_tokens=0)]
        for k, branches in ((1, 1), (3, 1), (4, 2)):
            for before, found in zip(
                bare, model.complete_all(**options, draft_tokens=k, draft_branches=branches), strict=True
            ):
                same = {key: value for key, value in vars(found).items() if key != "stats"}
                assert same == {key: value for key, value in before.items() if key != "stats"}
                rescued += found.stats.rescued
    assert rescued > 3, "control: branches won"


def test_drawn_branches_win_more_often_than_none(tiny: Model) -> None:
    """The token that would be drawn without the first one comes second in the race, which the target runs too."""
    kept = []
    for branches in (0, 1, 2):
        stats = [
            tiny.complete(
                prompt="The king",
                max_new_tokens=40,
                draft_tokens=2,
                draft_branches=branches,
                temperature=0.9,
                seed=seed,
            ).stats
            for seed in range(5)
        ]
        kept.append(sum(s.accepted for s in stats) / sum(s.cycles for s in stats))
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize("asked", [{"regex": "[a-z ]+, [a-z]+\\."}, {"choice": ["a king", "a kind man", "the queen"]}])
def test_constrained_answers_do_not_depend_on_branches(tiny: Model, asked: dict[str, Any]) -> None:
    for hot in ({}, HOT):
        options: dict[str, Any] = {"prompt": "The king", "max_new_tokens": 40, **asked, **hot}
        bare = tiny.complete(**options, draft_tokens=0)
        for k, branches in SHAPES:
            found = tiny.complete(**options, draft_tokens=k, draft_branches=branches)
            assert (found.token_ids, found.text, found.constraint) == (bare.token_ids, bare.text, bare.constraint)


# Ends and numerics


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (4, 1)])
def test_ends_inside_a_block(always_second: Model, second_after_odd: Model, shape: tuple[int, int]) -> None:
    """An end token, and a limit, at every place of a block."""
    k, branches = shape
    for model in (always_second, second_after_odd):
        for limit in range(1, 12):
            found = said(model, [3], limit, k, draft_branches=branches)
            assert list(found.token_ids) == [(4 + i) % SIZE for i in range(limit)]
            assert found.stats.drafted == 0 or found.stats.accepted <= found.stats.drafted


def test_stop_texts_and_end_tokens(tmp_path: Path) -> None:
    checkpoint = markov_checkpoint(
        tmp_path / "c", draft="third", tokenizer=tinytext_tokenizer(("A", "bc", "dS", "TO", "P!", "ef")), eos=17
    )
    model = load_model(build_bundle(checkpoint, tmp_path / "b", **BUILD))
    for start in range(4, 12):
        for options in ({}, {"stop": ["STOP"], "ignore_eos": True}):
            bare, found = (
                model.complete(
                    prompt_ids=[start], max_new_tokens=30, draft_tokens=k, draft_branches=branches, **options
                )
                for k, branches in ((0, 0), (3, 2))
            )
            assert (found.token_ids, found.text, found.finish_reason) == (bare.token_ids, bare.text, bare.finish_reason)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_path_that_is_not_finite_changes_no_id(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Id 40 is drafted after 8 and gives NaN in every path of the run; plain decoding never meets it."""
    bundle = build_bundle(markov_checkpoint(tmp_path / "c", draft=forty_after_eight), tmp_path / "b", **BUILD)
    model = load_model(changed(bundle, tmp_path / "changed", BACKBONE, "embedding", (40, 0), np.nan))
    grown = grow(model, [7], 20, *shape)
    assert grown.ids == list(range(8, 28))
    assert grown.accepted[0] == 0


# Time and statistics


def test_copies_count_as_commit(partial: Model) -> None:
    ticks = iter(range(1000))
    slots, seconds = partial.engine.sequences(3), Seconds()
    assert isinstance(slots, SlotSequences)
    timed = TimedSlots(slots, seconds, lambda: float(next(ticks)))
    timed.verify(np.array([TEXT] * 3), 1)
    timed.commit(np.array([2, 2, 2]))
    timed.copy(1, 0)
    window = timed.window(0, 1)
    window.verify(np.array([[4]]), 1)
    window.commit(np.array([1]))
    timed.restore(1, [timed.save(0)])
    assert (seconds.verify, seconds.commit, seconds.total) == (2.0, 3.0, 5.0)
    assert state_digests(slots, 1) == state_digests(slots, 0)


def test_the_command_reports_rescued_cycles(tiny: Model) -> None:
    command = ["mtp-run", "generate", tiny.bundle.directory, "--prompt", "The king", "--ignore-eos", "--json"]
    command += ["--max-new-tokens", "40", "--draft-tokens", "3"]
    shown = [run_command(*command, *more) for more in ([], ["--draft-branches", "2"])]
    chain, tree = (json.loads(result.stdout) for result in shown)
    assert chain["token_ids"] == tree["token_ids"]
    assert chain["stats"]["rescued"] == 0 < tree["stats"]["rescued"]
    assert tree["stats"]["cycles"] < chain["stats"]["cycles"]


# Refusals


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"draft_branches": 3}, ("draft_branches is 3", "0 to 2")),
        ({"draft_branches": -1}, ("draft_branches is -1", "0 to 2")),
        ({"drafter": "ngram"}, ("the drafter is 'ngram'", "use 0, or the drafter 'mtp'")),
        ({"drafter": "mtp+ngram"}, ("the drafter is 'mtp+ngram'", "only the bundle's own head")),
        ({"drafter": "none", "draft_tokens": 0}, ("the drafter is 'none'",)),
        ({"draft_tokens": "auto"}, ("draft_tokens is 'auto'", "give a number")),
        ({"draft_tokens": 0}, ("draft_tokens is 0", "at most 0")),
        ({"draft_branches": 2, "draft_tokens": 1}, ("draft_branches is 2", "draft_tokens is 1", "at most 1")),
        ({"acceptor": "rejection"}, ("the acceptor is 'rejection'", "'coupled'")),
        ({"acceptor": "relaxed"}, ("the acceptor is 'relaxed'", "'coupled'")),
        ({"acceptor": "typical"}, ("the acceptor is 'typical'", "'coupled'")),
        ({"verify": "step"}, ("verify is 'step'", "or 'rows'")),
    ],
)
def test_what_does_not_go_with_branches_is_refused(
    world: Model, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    asked = {"prompt_ids": PROMPT, "draft_tokens": 3, "draft_branches": 1, **options}
    with refused(*parts, error=RequestError):
        world.complete(**asked)
    assert world.complete(**{**asked, "draft_branches": 0}).token_ids


def test_bundles_that_cannot_are_refused(markov: Models, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"prompt_ids": [5], "draft_tokens": 2, "draft_branches": 2}
    with refused("runs 1 sequences together", "--max-batch-size 3", error=RequestError):
        markov().complete(**asked)
    with refused("draft_branches is 2", "runs 2 sequences together", error=RequestError):
        markov(build={"max_batch_size": 2}).complete(**asked)
    checkpoint = random_checkpoint(tmp_path / "c", seed=1)
    bare = load_model(build_bundle(checkpoint, tmp_path / "b", mtp=False, **{**BUILD, "draft_tokens": 3}))
    with refused("draft_branches is 2", "without an MTP head", error=RequestError):
        bare.complete(**{**asked, "draft_tokens": 0})


def test_a_head_with_a_table_is_refused_and_one_without_is_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"table": TARGET, "size": len(TARGET), "layer_types": ["full_attention"]}
    checkpoint = markov_checkpoint(tmp_path / "c", tokenizer=tinytext_tokenizer(tuple("abcde")), **options)
    (tmp_path / "text.txt").write_text("edcbedcedced" * 40, encoding="utf-8")
    text = (tmp_path / "text.txt",)
    table = load_model(build_bundle(checkpoint, tmp_path / "t", draft_vocab=4, draft_vocab_text=text, **BUILD))
    with refused("draft_branches is 1", "looks its ids up in a table", error=RequestError):
        said(table, PROMPT, 12, 2, draft_branches=1)
    ranks = load_model(build_bundle(checkpoint, tmp_path / "r", draft_vocab=4, **BUILD))
    for asked in ({}, HOT):
        bare, found = (said(ranks, PROMPT, 30, 2, draft_branches=branches, **asked) for branches in (0, 2))
        assert found.token_ids == bare.token_ids


def test_a_backend_without_slots_is_refused(world: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = world.engine.sequences
    monkeypatch.setattr(world.engine, "sequences", lambda batch=1: Delegate(opened(batch)))
    with refused("draft_branches is 1", "the backend", "--backend onnxruntime", error=RequestError):
        world.generate(prompt_ids=PROMPT, draft_tokens=2, draft_branches=1)
    assert said(world, PROMPT, 5, 2).token_ids
