"""`draft_confidence`: drafts end where an oracle says so, and neither tokens nor laws change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.engine import Choose, Floats, Ids
from mtp_runtime import Finished, Model, load
from mtp_runtime.drafters.confidence import best_probability, gated
from mtp_runtime.drafters.draft_model import DraftModelDrafter
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.sampling.sampler import Sampler
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer
from tests.runtime.conftest import Models
from tests.runtime.decoding import CAUGHT, FALSE_ALARM, PROMPT, SIZE, TARGET, fit, said
from tests.support import build_bundle, load_model, refused, run_command

K = 4
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6)
"""Far from every product of best probabilities, so that float32 and float64 agree about them."""
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 3}
Law = Callable[[int], np.ndarray]


def head_law(token: int) -> np.ndarray:
    """What the head of the world says after a token."""
    return TARGET[(token + 1) % SIZE]


def target_law(token: int) -> np.ndarray:
    """What the target says, and the world as its own draft model."""
    return TARGET[token]


@dataclass
class Proposals:
    """Every proposal of a kind of drafter: the newest token, how many were asked for, the draft."""

    found: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def wrong(self, law: Law, least: float) -> list[tuple[int, int, list[int]]]:
        """Those that did not end where the product of the best probabilities falls below `least`."""
        return [found for found in self.found if len(found[2]) != _depth(*found, law, least)]


def _depth(newest: int, asked: int, draft: list[int], law: Law, least: float) -> int:
    """How many tokens of a draft there should be; behind the end of the draft, one too many is enough to know."""
    product = 1.0
    for place, token in enumerate([newest, *draft][:asked]):
        product *= law(token).max()
        assert abs(product - least) > 1e-6, "control: the threshold lies on a product"
        if product < least:
            return place
    return min(asked, len(draft) + 1)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> dict[str, Proposals]:
    """Hears the head, the draft model and the lookup."""
    heard = {"head": Proposals(), "draft model": Proposals(), "lookup": Proposals()}

    def hear(kind: type, name: str, newest: Callable[[Any], int]) -> None:
        right = kind.propose

        def propose(self: Any, draft_tokens: int) -> list[int]:
            token = newest(self)
            draft: list[int] = right(self, draft_tokens)
            if draft_tokens:
                heard[name].found.append((token, draft_tokens, draft))
            return draft

        monkeypatch.setattr(kind, "propose", propose)

    hear(MtpDrafter, "head", lambda drafter: int(drafter._waiting[-1][0][-1]))
    hear(DraftModelDrafter, "draft model", lambda drafter: int(drafter._text[-1]))
    hear(NgramDrafter, "lookup", lambda drafter: -1)
    return heard


def test_the_best_probability_is_that_of_the_softmax() -> None:
    rows = np.log(TARGET).astype(np.float32)
    assert [best_probability(row) for row in rows] == pytest.approx(TARGET.max(axis=1))
    assert best_probability(rows[0] + np.float32(500)) == pytest.approx(TARGET[0].max(), rel=1e-4)
    assert best_probability(np.array([0.0, -np.inf], np.float32)) == 1.0


# Where drafts end


@pytest.mark.parametrize("least", THRESHOLDS)
@pytest.mark.parametrize("asked", [{}, HOT, HOT | {"acceptor": "rejection"}], ids=["greedy", "coupled", "rejection"])
def test_a_draft_ends_where_the_oracle_says(
    world: Model, proposals: dict[str, Proposals], asked: dict[str, Any], least: float
) -> None:
    """Whatever is drawn, the head's raw laws count, of the tokens that were."""
    done = said(world, PROMPT, 58, K, draft_confidence=least, **asked)
    assert len(proposals["head"].found) == done.stats.cycles - (done.stats.draft_tokens_chosen.get(0, 0))
    assert proposals["head"].wrong(head_law, least) == []
    assert sum(len(draft) for _, _, draft in proposals["head"].found) == done.stats.drafted


def _drafted(least: float) -> tuple[int, int]:
    """Drafted and accepted tokens of a greedy answer of 58, by the laws alone."""
    text, drafted, accepted, emitted = list(PROMPT), 0, 0, 1
    text.append(int(target_law(text[-1]).argmax()))
    while emitted < 58:
        draft, product = [], 1.0
        for _ in range(min(K, 58 - emitted - 1)):
            law = head_law([text[-1], *draft][-1])
            product *= law.max()
            if product < least:
                break
            draft.append(int(law.argmax()))
        kept = 0
        while kept < len(draft) and draft[kept] == target_law(text[-1]).argmax():
            text.append(draft[kept])
            kept += 1
        text.append(int(target_law(text[-1]).argmax()))
        drafted, accepted, emitted = drafted + len(draft), accepted + kept, emitted + kept + 1
    return drafted, accepted


def test_a_greedy_answer_drafts_as_many_as_the_oracle_counts(world: Model) -> None:
    counts = []
    for least in (0.0, *THRESHOLDS, 1.0):
        stats = said(world, PROMPT, 58, K, draft_confidence=least).stats
        assert (stats.drafted, stats.accepted) == _drafted(least)
        counts.append(stats.drafted)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 3, "control: the thresholds cut at several depths"
    assert counts[0] == said(world, PROMPT, 58, K).stats.drafted, "0 never ends a draft"
    assert counts[-1] == 0, "1 drafts nothing that is not certain"


def test_1_drafts_what_is_certain(markov: Models) -> None:
    """The chain's head leaves the others less than a last bit; with a smaller margin it is not certain."""
    done = said(markov(gain=8.0), [5], 20, 3, draft_confidence=1.0)
    assert done.stats.drafted == said(markov(gain=8.0), [5], 20, 3).stats.drafted > 0
    assert said(markov(), [5], 20, 3, draft_confidence=1.0).stats.drafted == 0


def _by_single(least: float, drafting: Callable[[], Choose] | None) -> Callable[[], Choose]:
    """A fault: each probability for itself."""

    def begin() -> Choose:
        choose = (lambda logits: logits.argmax(axis=-1)) if drafting is None else drafting()
        return lambda logits: None if best_probability(logits[0]) < least else choose(logits)

    return begin


def test_control_single_probabilities_are_seen(
    world: Model, proposals: dict[str, Proposals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_runtime.api.gated", _by_single)
    for least in (0.2, 0.3):
        assert said(world, PROMPT, 58, K, draft_confidence=least).stats.drafted != _drafted(least)[0]
        assert proposals["head"].wrong(head_law, least)
        proposals["head"].found.clear()


def test_a_gate_begins_anew_with_every_draft() -> None:
    """By hand: 0.8 twice is 0.64, three times 0.512."""
    logits = np.log(np.array([[0.8, 0.1, 0.1]], np.float32))
    begin = gated(0.6, None)
    for _ in range(2):
        choose = begin()
        assert [None if (ids := choose(logits)) is None else ids.tolist() for _ in range(3)] == [[0], [0], None]


# Tokens and laws


@pytest.mark.parametrize("least", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_tokens_do_not_depend_on_it(carried: Model, partial: Model, least: float) -> None:
    for model, prompt in ((carried, {"prompt": "The king"}), (partial, {"prompt_ids": [5, 6, 20]})):
        for asked in ({}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.3}):
            options: dict[str, Any] = {**prompt, "max_new_tokens": 24, "ignore_eos": True, **asked}
            plain = model.complete(**options, draft_tokens=0)
            for draft_tokens in (1, 3, "auto"):
                found = model.complete(**options, draft_tokens=draft_tokens, draft_confidence=least)
                assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
@pytest.mark.parametrize("least", [0.2, 0.45])
def test_the_law_is_kept_where_drafts_end_early(world: Model, acceptor: str, least: float) -> None:
    options = {"draft_tokens": 3, "acceptor": acceptor}
    assert fit(world, {"temperature": 1.0}, 3, 600, draft_confidence=least, **options) > FALSE_ALARM
    whole, cut = (
        said(world, PROMPT, 58, 3, draft_confidence=asked, acceptor=acceptor, **HOT).stats for asked in (0.0, least)
    )
    assert 0 < cut.drafted < 0.8 * whole.drafted, "control: it cut often, and not always"


class _ByDrawn(Sampler):
    """A fault: a place is drafted if the token drawn there is probable enough, and forgotten otherwise."""

    least = 0.2

    def _choose(self, logits: Floats) -> Ids | None:
        ids = super()._choose(logits)
        if self._draft_laws[-1].of(self._drafted[-1]) >= self.least:
            return ids
        del self._drafted[-1], self._draft_laws[-1]
        return None


def test_control_going_by_the_drawn_token_breaks_the_law_of_rejection(
    world: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told to the acceptor is then not the law of the tokens that are left; `coupled` asks for none."""
    monkeypatch.setattr("mtp_runtime.api.Sampler", _ByDrawn)
    hot = {"temperature": 1.0}
    assert fit(world, hot, 2, 1200, draft_tokens=3, acceptor="rejection") < CAUGHT
    assert fit(world, hot, 2, 200, draft_tokens=3, acceptor="coupled") > FALSE_ALARM


# Other drafters


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The world without a head, and the world as its own draft model."""
    place = tmp_path_factory.mktemp("twins")
    checkpoint = markov_checkpoint(place / "c", table=TARGET, size=SIZE, layer_types=["full_attention"], eos=0)
    bundle = build_bundle(checkpoint, place / "bundle", draft_tokens=K, mtp=False)
    return load(bundle, 1, draft_model=bundle)


@pytest.mark.parametrize("least", [0.05, 0.2, 0.45])
def test_a_draft_model_ends_its_drafts_too(twins: Model, proposals: dict[str, Proposals], least: float) -> None:
    for asked in ({}, HOT):
        plain = said(twins, PROMPT, 58, 0, **asked)
        done = said(twins, PROMPT, 58, K, draft_confidence=least, **asked)
        assert done.token_ids == plain.token_ids
        assert len(proposals["draft model"].found) > 5
        assert proposals["draft model"].wrong(target_law, least) == []
        proposals["draft model"].found.clear()


@pytest.mark.parametrize("drafter", ["mtp+ngram", "draft-model+ngram"])
def test_a_lookup_before_it_is_not_ended(
    world: Model, twins: Model, proposals: dict[str, Proposals], drafter: str
) -> None:
    """What a lookup finds has no probabilities; the other's part ends where it would alone."""
    model, name, law = (world, "head", head_law) if "mtp" in drafter else (twins, "draft model", target_law)
    done = said(model, PROMPT, 58, K, drafter=drafter, draft_confidence=0.45, **HOT)
    looked_up = [(asked, draft) for _, asked, draft in proposals["lookup"].found if draft]
    assert any(len(draft) == asked == K for asked, draft in looked_up)
    assert len(proposals[name].found) > 3
    assert proposals[name].wrong(law, 0.45) == []
    assert done.stats.drafted_by_source["ngram"] == sum(len(draft) for _, draft in looked_up)


# Refusals


@pytest.mark.parametrize(("drafter", "draft_tokens"), [("ngram", 3), ("none", 0)])
def test_drafters_without_probabilities_are_refused(world: Model, drafter: str, draft_tokens: int) -> None:
    with refused("draft_confidence is 0.5", f"drafter is '{drafter}'", "has no probabilities"):
        said(world, PROMPT, 5, draft_tokens, drafter=drafter, draft_confidence=0.5)
    assert said(world, PROMPT, 5, draft_tokens, drafter=drafter, draft_confidence=0.0).token_ids


@pytest.mark.parametrize("least", [-0.1, 1.5, float("nan")])
def test_numbers_out_of_range_are_refused(world: Model, least: float) -> None:
    with refused("draft_confidence is", "expected 0 to 1"):
        said(world, PROMPT, 5, 2, draft_confidence=least)


@pytest.fixture(scope="module", params=[True, False], ids=["table", "ranks"])
def smaller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A head over four of six ids: the most frequent ones of a text, or the first ones."""
    place = tmp_path_factory.mktemp("smaller")
    options: dict[str, Any] = {"table": TARGET, "size": SIZE, "layer_types": ["full_attention"], "eos": 0}
    checkpoint = markov_checkpoint(place / "c", tokenizer=tinytext_tokenizer(tuple("abcde")), **options)
    build: dict[str, Any] = {"draft_tokens": K, "draft_vocab": 4}
    if request.param:
        (place / "text.txt").write_text("edcbedcedced" * 40, encoding="utf-8")
        build["draft_vocab_text"] = (place / "text.txt",)
    return load_model(build_bundle(checkpoint, place / "bundle", **build))


def test_a_head_with_a_table_is_refused_and_one_without_is_not(smaller: Model) -> None:
    assert smaller.manifest.model.mtp is not None
    if smaller.manifest.model.mtp.has_table:
        with refused("draft_confidence is 0.3", "looks its ids up in a table", "draft_tokens 'auto'"):
            said(smaller, PROMPT, 12, 2, draft_confidence=0.3)
        return
    plain, cut = (said(smaller, PROMPT, 30, 2, draft_confidence=least) for least in (0.0, 0.6))
    assert cut.token_ids == plain.token_ids
    assert cut.stats.drafted < plain.stats.drafted


def test_the_command_takes_it(world: Model, tmp_path: Path) -> None:
    command = ["mtp-run", "generate", world.bundle.directory, "--prompt-ids", "1,2,2", "--ignore-eos"]
    command += ["--max-new-tokens", "20", "--draft-tokens", "4"]
    shown = [run_command(*command, *more) for more in ([], ["--draft-confidence", "0.45"])]
    assert [result.returncode for result in shown] == [0, 0], shown[1].stderr
    assert shown[0].stdout == shown[1].stdout != ""
    assert shown[0].stderr != shown[1].stderr, "the line below the answer counts what was drafted"


def test_its_cycles_are_the_hosts(world: Model) -> None:
    """Statistics tell what was asked for and what came."""
    done: Finished = said(world, PROMPT, 30, K, draft_confidence=0.45)
    assert max(done.stats.draft_tokens_chosen) == K
    assert sum(done.stats.proposed_by_position) == done.stats.drafted
