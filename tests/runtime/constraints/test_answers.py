"""Answers under a constraint: the same for every K and drafter, inside the grammar, ended where they should."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from mtp_runtime import Finished, Model
from mtp_runtime.constraints.drafter import AdmissibleDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.sampling import transforms
from tests.runtime.conftest import Models
from tests.runtime.parts import streamed
from tests.support import refused

CHAIN = ("start", "hm ", "</th", "ink>\n", "no", "yes", "!", "{", "}", "x", '"', "a", "<e>")
AFTER = {"constraint_after": "</think>", "choice": ["yes", "yes!x"]}
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["ä", "b"]}, "n": {"type": "integer"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": RECORD},
    {"json_object": True},
    {"regex": "[a-z]{3,12}( [A-Z][a-z]*){2}"},
    {"grammar": 'start: call ("," call)*\ncall: /[a-z]{2,6}/ "(" (call | /[0-9]{1,3}/)? ")"'},
    {"choice": ["return", "returns nothing", "retry"]},
    {"regex": "(ab|cd){1,100000}"},
]


def answers(model: Model, **options: Any) -> list[Finished]:
    """With K from 0 to 4 by the bundle's own head, then by lookups and by both."""
    ways = [{"draft_tokens": depth} for depth in range(5)]
    ways += [{"draft_tokens": 4, "drafter": drafter} for drafter in ("ngram", "mtp+ngram")]
    return [model.complete(**{"max_new_tokens": 40, **options, **way}) for way in ways]


@pytest.mark.parametrize("form", FORMS, ids=[next(iter(form)) for form in FORMS])
def test_an_answer_is_the_same_for_every_k_and_drafter(carried: Model, form: dict[str, Any]) -> None:
    prompt = "def call(x):\n    return call(x)\n\ndef call(y):\n    return"
    said = answers(carried, prompt=prompt, **form)
    assert len({one.token_ids for one in said}) == 1
    free = carried.complete(prompt=prompt, max_new_tokens=40)
    assert said[0].token_ids != free.token_ids, "control: the constraint changes the answer"
    assert {(one.finish_reason, one.constraint) for one in said} <= {
        ("eos", "complete"),
        ("length", said[0].constraint),
    }


def test_a_drawn_answer_is_the_same_for_every_k_and_lies_in_the_grammar(carried: Model) -> None:
    for seed in range(4):
        said = answers(carried, prompt="value = ", regex="[0-9]{2}(-[a-z]{1,3}){2}", temperature=1.5, seed=seed)
        assert len({one.token_ids for one in said}) == 1
        assert re.fullmatch("[0-9]{2}(-[a-z]{1,3}){2}", said[0].text), said[0].text


@pytest.mark.parametrize("acceptor", ["rejection", "relaxed", "typical"])
@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
def test_no_acceptor_keeps_what_the_grammar_forbids(carried: Model, acceptor: str, drafter: str) -> None:
    lossy: dict[str, Any] = {"relaxed": {"relaxed_delta": 1.0, "relaxed_top_k": 9999}, "typical": {}}.get(acceptor, {})
    for seed in range(4):
        options = {"draft_tokens": 4, "acceptor": acceptor, "temperature": 1.0, "seed": seed, **lossy}
        said = carried.complete(prompt="return ", json_schema=RECORD, drafter=drafter, max_new_tokens=64, **options)
        assert said.constraint == "complete"
        assert set(json.loads(said.text)) >= {"name", "kind"}
        assert json.loads(said.text)["kind"] in ("ä", "b")


def test_the_constraint_begins_inside_a_block_behind_the_delimiter(markov: Models) -> None:
    """The chain says no behind the delimiter, which ends inside a token; the grammar leaves yes."""
    model = markov(pieces=CHAIN, eos=12)
    for draft in ("perfect", "third"):
        model = markov(pieces=CHAIN, eos=12, draft=draft)
        said = answers(model, prompt="start", **AFTER)
        assert {one.token_ids for one in said} == {(1, 2, 3, 5, 6, 9, 12)}
        assert {one.text for one in said} == {"hm </think>\nyes!x<e>"}
        assert {(one.finish_reason, one.constraint) for one in said} == {("eos", "complete")}
    perfect = markov(pieces=CHAIN, eos=12).complete(prompt="start", draft_tokens=4, **AFTER)
    assert 5 in perfect.stats.emitted_histogram, "control: a block went past the delimiter"
    free = markov(pieces=CHAIN, eos=12).complete(prompt="start")
    assert free.text.startswith("hm </think>\nno")


def test_what_never_reaches_the_delimiter_stays_free_and_is_not_complete(markov: Models) -> None:
    model = markov(pieces=CHAIN, eos=12)
    said = answers(model, prompt="start", constraint_after="</never>", choice=["yes"])
    assert {(one.finish_reason, one.constraint) for one in said} == {("eos", "incomplete")}
    assert {one.token_ids for one in said} == {model.complete(prompt="start").token_ids}


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {}], ids=["ignore_eos", "no end tokens"])
def test_without_end_tokens_an_answer_ends_where_its_grammar_does(markov: Models, options: dict[str, Any]) -> None:
    model = markov(pieces=CHAIN, eos=12 if options else None)
    for form, ids in (({"regex": "hm no(yes)+!"}, (1, 4, 5, 6)), ({"choice": ["hm ", "hm yes"]}, (1, 5))):
        said = answers(model, prompt="start", **form, **options)
        assert {(one.token_ids, one.finish_reason, one.constraint) for one in said} == {(ids, "stop", "complete")}
    (empty,) = {(one.token_ids, one.text, one.finish_reason) for one in answers(model, prompt="a", regex="", **options)}
    assert empty == ((), "", "stop")
    scored = model.complete(prompt="start", regex="", prompt_logprobs=0, **options)
    assert scored.prompt_logprobs is not None
    assert (scored.token_ids, scored.finish_reason) == ((), "stop")


def test_rows_of_the_head_without_a_token_are_never_said(markov: Models) -> None:
    """The chain runs into ids that no tokenizer has."""
    model = markov(pieces=CHAIN)
    assert max(model.complete(prompt='"', max_new_tokens=6).token_ids) >= len(CHAIN), "control"
    for one in answers(model, prompt='"', regex="(?s:.*)", max_new_tokens=9):
        assert max(one.token_ids) < len(CHAIN)
        assert one.finish_reason == "length"
        assert one.constraint == "complete"


def test_every_end_token_of_the_bundle_may_end_a_complete_answer(carried: Model) -> None:
    assert carried.manifest.eos_token_ids == {0, 2}
    for token in (0, 2):
        for depth in (0, 3):
            said = carried.complete(prompt="a", choice=["no"], logit_bias={token: 9.0}, draft_tokens=depth)
            assert said.token_ids[-1] == token
            assert (said.text, said.finish_reason) == ("no", "eos")


def test_a_special_token_is_a_delimiter_and_can_be_kept_in_the_text(carried: Model) -> None:
    """Whole, though several come in one block; and nothing else of the answer changes."""
    options = {"prompt": "a", "logit_bias": {1: 90.0}, "regex": "[0-9]{2}", "constraint_after": "<|im_start|>"}
    for depth in range(4):
        shown, hidden = (
            streamed(carried, draft_tokens=depth, skip_special_tokens=skips, **options).finished
            for skips in (False, True)
        )
        assert re.fullmatch(r"<\|im_start\|>[0-9]{2}<\|(im_end|endoftext)\|>", shown.text)
        assert re.fullmatch("[0-9]{2}", hidden.text)
        assert shown.token_ids == hidden.token_ids
    many = {"prompt": "a", "logit_bias": {1: 90.0}, "max_new_tokens": 9, "draft_tokens": 3}
    assert streamed(carried, skip_special_tokens=False, **many).finished.text == "<|im_start|>" * 9
    stopped = streamed(carried, skip_special_tokens=False, stop="<|im_start|><|im_start|>", **many).finished
    assert (stopped.text, len(stopped.token_ids)) == ("", 2)
    assert carried.complete(stop="<|im_start|>", **many).finish_reason == "length", "a hidden token stops nothing"


def test_several_answers_each_have_the_form(carried: Model) -> None:
    options: dict[str, Any] = {"prompt": "a = ", "regex": "[0-9]{3,5}", "temperature": 1.2, "n": 3, "seed": 4}
    plain = carried.complete_all(draft_tokens=0, logprobs=1, **options)
    assert all(re.fullmatch("[0-9]{3,5}", one.text) for one in plain)
    assert len({one.token_ids for one in plain}) > 1
    auto = carried.complete_all(draft_tokens="auto", logprobs=1, **options)
    assert [one.token_ids for one in auto] == [one.token_ids for one in plain]
    assert [one.logprobs for one in auto] == [one.logprobs for one in plain], "of the raw logits, whatever is masked"


def test_penalties_biases_and_bad_words_go_with_a_constraint(carried: Model) -> None:
    banned: dict[str, Any] = {"bad_words": ["r", "re", "red"], "repetition_penalty": 1.3, "logit_bias": {5: 1.0}}
    said = answers(carried, prompt="a = ", choice=["red", "green"], **banned)
    assert {one.text for one in said} == {"green"}
    assert len({one.token_ids for one in said}) == 1


def test_a_step_by_step_verify_says_the_same(carried: Model) -> None:
    options = {"prompt": "x = ", "json_schema": RECORD, "max_new_tokens": 48, "draft_tokens": 3}
    assert carried.complete(verify="step", **options).token_ids == carried.complete(**options).token_ids


def test_the_paths_of_a_tree_draft_have_masks_of_their_own(markov: Models) -> None:
    model = markov(pieces=CHAIN, eos=12, draft="third", build={"max_batch_size": 3})
    for form in (AFTER, {"regex": "hm (no|yes){2}!x{3}"}, {"regex": "(?s:.{9})"}):
        plain = model.complete(prompt="start", draft_tokens=0, **form)
        for branches in (0, 1, 2):
            said = model.complete(prompt="start", draft_tokens=3, draft_branches=branches, **form)
            assert said.token_ids == plain.token_ids
            assert said.constraint == "complete"


def test_a_head_that_can_say_nothing_allowed_ends_its_draft(markov: Models) -> None:
    """It scores six ids, and the grammar goes on with others; a head with a table knows nothing of the mask."""
    model = markov(pieces=CHAIN, eos=12, build={"draft_vocab": 6})
    said = answers(model, prompt="start", regex="hm (no|yes)!x{3}")
    assert len({one.token_ids for one in said}) == 1
    assert said[0].text == "hm no!xxx<e>"
    assert all(one.stats.drafted < said[1].stats.cycles * 4 for one in said[1:])


class _Lookup:
    """Says what a list holds."""

    source = "list"

    def __init__(self, draft: list[int]) -> None:
        self._draft = draft
        self.observed = 0

    def observe(self, tokens: Any, hidden: Any) -> None:
        self.observed += len(tokens)

    def propose(self, draft_tokens: int) -> list[int]:
        return self._draft[:draft_tokens]


def test_a_draft_is_cut_before_it_is_verified(markov: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _Lookup([1, 2, 3, 4])
    cut = AdmissibleDrafter(inner, lambda draft: draft[:2])
    assert (cut.source, cut.propose(1), cut.propose(4)) == ("list", [1], [1, 2])
    cut.observe(np.array([1, 2]), np.zeros((2, 1), np.float32))
    assert inner.observed == 2
    # Every lookup proposes what the chain says, which the grammar forbids behind "hm ".
    monkeypatch.setattr(NgramDrafter, "propose", lambda self, draft_tokens: [4, 5, 6, 7][:draft_tokens])
    options: dict[str, Any] = {"prompt": "start", "regex": "hm no(yes){6}!", "drafter": "ngram", "draft_tokens": 4}
    model = markov(pieces=CHAIN, eos=12)
    said = model.complete(**options)
    monkeypatch.setattr("mtp_runtime.api.AdmissibleDrafter", lambda inner, admissible: inner)
    whole = model.complete(**options)
    assert said.token_ids == whole.token_ids
    assert (said.stats.drafted, said.stats.accepted) == (2, 2)
    assert whole.stats.drafted > 8, "control: without the cut forbidden tokens are verified"


def test_threads_share_the_vocabulary(carried: Model) -> None:
    alone = [carried.complete(prompt="x", max_new_tokens=24, **form).token_ids for form in FORMS[:4]]
    found: dict[int, Any] = {}

    def answer(place: int) -> None:
        found[place] = carried.complete(prompt="x", max_new_tokens=24, **FORMS[place]).token_ids

    threads = [threading.Thread(target=answer, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == alone


def test_control_a_mask_of_the_first_row_alone_is_seen(markov: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forbidden token stands behind the delimiter, inside the block."""
    real = transforms.law_behind

    def first_row_only(logits: Any, draft: Any, context: Any, *others: Any) -> Any:
        kept, context.constraint = context.constraint, None if draft else context.constraint
        try:
            return real(logits, draft, context, *others)
        finally:
            context.constraint = kept

    monkeypatch.setattr(transforms, "law_behind", first_row_only)
    model = markov(pieces=CHAIN, eos=12)
    model.complete(prompt="start", draft_tokens=0, **AFTER)
    # What was said outside of the grammar leaves nothing to say.
    with refused("every token is masked", "or the constraint"):
        model.complete(prompt="start", draft_tokens=4, **AFTER)
