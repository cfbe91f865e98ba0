"""The mask of the next token: along a text, taken back, behind a delimiter, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import RequestError
from mtp_runtime.constraints.grammars import Grammar, Grammars
from mtp_runtime.constraints.matcher import TokenConstraint, _Kind
from mtp_runtime.constraints.options import Asked
from tests.fixtures.checkpoints import tinytext_tokenizer
from tests.support import refused

WORDS = ("a", "b", "ab", "</", "thin", "k>", "k>a", "</think>", "1", "12", "{", "}", '"', ":", " ", "[", "]", ",")
PIECES: tuple[str | bytes, ...] = (*WORDS, b"\xe2\x82", b"\xac")
VOCAB, ENDS = 26, (20, 23)
GRAMMARS = Grammars(tinytext_tokenizer(PIECES))
AFTER = "</think>"


def grammar(name: str, value: Any, after: str = "") -> Grammar:
    return GRAMMARS.compile(Asked(name, value, after))


def constraint(name: str, value: Any, after: str = "", ends: Sequence[int] = ENDS) -> TokenConstraint:
    """One over the pieces, whose end tokens have no text."""
    return TokenConstraint(grammar(name, value, after), ends, VOCAB)


def allowed(matcher: TokenConstraint) -> list[int] | None:
    """The ids that may come next; None for all."""
    mask = matcher.allowed()
    return None if mask is None else np.flatnonzero(mask).tolist()


def ids(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


DELIMITER_PARTS = ids("</", "thin", "k>", "k>a")
WALKS = [
    ("regex", "a+b?(ab|12)*", ""),
    ("regex", "(€|a){1,3}", AFTER),
    ("choice", ["a", "ab", "abab12"], ""),
    ("json_schema", {"type": "object", "additionalProperties": {"type": "integer"}}, ""),
    ("json_schema", {"type": "array", "items": {"enum": ["a", "b"]}}, AFTER),
    ("grammar", 'start: "a" start "b" | "1"', ""),
]


def differences(kind: type[TokenConstraint], steps: int = 60) -> int:
    """How often a matcher that went forth and back differs from one that only went forth."""
    found = 0
    for seed, (name, value, after) in enumerate(WALKS):
        made, rng = grammar(name, value, after), np.random.default_rng(seed)
        walked, text = kind(made, ENDS, VOCAB), list[int]()
        for _ in range(steps):
            if text and rng.random() < 0.45:
                count = int(rng.integers(1, len(text) + 1))
                walked.roll_back(count)
                del text[-count:]
            for _ in range(rng.integers(0, 5)):
                choice = allowed(walked)
                # Forbidden ones come too, as a draft may have them; so does the delimiter.
                free = DELIMITER_PARTS if choice is None and rng.random() < 0.7 else range(VOCAB)
                token = int(rng.choice(choice if choice and rng.random() < 0.8 else free))
                walked.advance([token])
                text.append(token)
            fresh = TokenConstraint(made, ENDS, VOCAB)
            fresh.advance(text)
            states = [(allowed(one), one.is_complete, one.is_ended) for one in (walked, fresh)]
            found += states[0] != states[1]
    return found


def test_what_is_taken_back_leaves_nothing_behind() -> None:
    assert differences(TokenConstraint) == 0


class _KeepsTheGrammar(TokenConstraint):
    """A deliberate fault: the steps are forgotten, the grammar goes on."""

    def roll_back(self, count: int) -> None:
        del self._steps[len(self._steps) - count :]


class _KeepsTheDelimiter(TokenConstraint):
    """A deliberate fault: a delimiter that was taken back still counts."""

    def roll_back(self, count: int) -> None:
        waits = self._waits
        super().roll_back(count)
        self._waits = waits


class _KeepsTheText(TokenConstraint):
    """A deliberate fault: what was read before the delimiter stays."""

    def roll_back(self, count: int) -> None:
        free = bytes(self._free)
        super().roll_back(count)
        self._free[:] = free


@pytest.mark.parametrize("kind", [_KeepsTheGrammar, _KeepsTheDelimiter, _KeepsTheText])
def test_control_a_matcher_that_keeps_something_is_seen(kind: type[TokenConstraint]) -> None:
    assert differences(kind) > 0


@pytest.mark.parametrize(
    "text",
    [
        ("a", "</think>"),
        ("</", "thin", "k>"),
        ("a", "</", "</", "thin", "k>a"),
        ("</think>",),
        ("</", "thin", "a", "</", "thin", "k>"),
    ],
    ids="".join,
)
def test_the_constraint_begins_behind_the_token_that_completes_the_delimiter(text: tuple[str, ...]) -> None:
    """Also where the delimiter is several tokens, and where it ends inside one."""
    matcher = constraint("regex", "1b", AFTER)
    for token in ids(*text):
        assert allowed(matcher) is None, "free before the delimiter"
        assert not matcher.is_complete
        matcher.advance([token])
    assert allowed(matcher) == ids("1")
    matcher.roll_back(1)
    assert allowed(matcher) is None


def test_what_only_looks_like_the_delimiter_begins_nothing() -> None:
    matcher = constraint("regex", "1b", AFTER)
    matcher.advance(ids("</", "k>", "thin", "</", "thin", "</"))
    assert allowed(matcher) is None


def test_a_special_token_is_a_delimiter_by_its_text() -> None:
    tokenizer = tinytext_tokenizer(["a", "b", "<tool>"])
    tokenizer.add_special_tokens(["<tool>"])
    made = Grammars(tokenizer).compile(Asked("regex", "b", "<tool>"))
    matcher = TokenConstraint(made, (), 3)
    matcher.advance([0, 2])
    assert allowed(matcher) == [1]


def test_where_the_grammar_is_complete_every_end_token_may_come() -> None:
    going = constraint("regex", "a+")
    assert allowed(going) == ids("a")
    going.advance(ids("a"))
    assert allowed(going) == [*ids("a"), *ENDS]
    assert going.is_complete
    assert not going.is_ended
    done = constraint("regex", "a{2}")
    done.advance(ids("a", "a"))
    assert allowed(done) == [*ENDS]
    assert done.is_ended
    done.advance([ENDS[1]])
    assert allowed(done) is None, "nothing is emitted behind an end, so nothing is masked"
    assert done.is_complete
    done.roll_back(2)
    assert allowed(done) == ids("a")


def test_an_end_token_that_comes_too_early_is_forbidden() -> None:
    matcher = constraint("regex", "ab1")
    matcher.advance([*ids("ab"), ENDS[0], *ids("1")])
    assert allowed(matcher) == []
    assert not matcher.is_complete
    matcher.roll_back(2)
    assert allowed(matcher) == ids(
        "1",
    )


def test_without_end_tokens_the_end_is_where_nothing_more_can_follow() -> None:
    matcher = constraint("choice", ["a", "ab"], ends=())
    assert (matcher.is_complete, matcher.is_ended) == (False, False)
    matcher.advance(ids("a"))
    assert (matcher.is_complete, matcher.is_ended) == (True, False)
    assert allowed(matcher) == ids("b"), "complete, but there is nothing that could end it here"
    matcher.advance(ids("b"))
    assert (matcher.is_complete, matcher.is_ended) == (True, True)
    assert allowed(matcher) is None


@pytest.mark.parametrize(("name", "value"), [("regex", ""), ("regex", "(a{0})"), ("choice", [""])])
def test_what_only_the_empty_text_satisfies_is_ended_at_once(name: str, value: Any) -> None:
    assert allowed(constraint(name, value)) == [*ENDS]
    assert constraint(name, value).is_ended
    assert constraint(name, value, ends=()).is_ended


def test_ids_without_a_token_are_never_allowed() -> None:
    matcher = constraint("regex", "(?s:.*)")
    # The last piece cannot begin a character.
    assert allowed(matcher) == [*range(len(PIECES) - 1), *ENDS]
    # The engine's own end of a text has the first id behind the tokenizer's.
    matcher.advance([len(PIECES) + 1])
    assert allowed(matcher) == []


def test_the_end_of_the_engine_does_not_pass_for_a_token() -> None:
    """Its id is 20 here, which is an end token in the other tests."""
    matcher = constraint("regex", "a*", ends=(23,))
    assert allowed(matcher) == [*ids("a"), 23]
    matcher.advance([20])
    assert allowed(matcher) == []


def test_a_character_may_be_split_over_tokens() -> None:
    matcher = constraint("regex", "€a")
    assert allowed(matcher) == ids(b"\xe2\x82")
    matcher.advance(ids(b"\xe2\x82"))
    assert allowed(matcher) == ids(b"\xac")
    matcher.advance(ids(b"\xac"))
    assert allowed(matcher) == ids("a")


def test_a_text_that_this_vocabulary_cannot_go_on_with_allows_nothing_and_can_be_taken_back() -> None:
    """There is 12, and there is no 2."""
    matcher = constraint("regex", "a(12)*")
    matcher.advance(ids("a", "1"))
    assert allowed(matcher) == []
    assert not matcher.is_complete
    matcher.roll_back(1)
    assert allowed(matcher) == [*ids("1", "12"), *ENDS]


def test_a_draft_is_cut_before_its_first_forbidden_token_and_nothing_else_changes() -> None:
    matcher = constraint("regex", "a*12b")
    matcher.advance(ids("a"))
    before = allowed(matcher)
    assert matcher.admissible(ids("a", "12", "b")) == ids("a", "12", "b")
    assert matcher.admissible(ids("a", "12", "a", "b")) == ids("a", "12")
    assert matcher.admissible(ids("b")) == []
    assert matcher.admissible([]) == []
    assert allowed(matcher) == before


def test_a_grammar_that_names_a_special_token_gets_it() -> None:
    tokenizer = tinytext_tokenizer(["a", "b", "<|end|>"])
    tokenizer.add_special_tokens(["<|end|>"])
    made = Grammars(tokenizer).compile(Asked("grammar", 'start: "a" <|end|> "b"'))
    matcher = TokenConstraint(made, (2,), 3)
    matcher.advance([0])
    assert allowed(matcher) == [2]
    matcher.advance([2, 1])
    assert matcher.is_complete


class _GivesUp:
    """An engine that gives up behind "b" and then never recovers, as the real one does."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._failed = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._failed |= tokens == ids("b")
        return 0 if self._failed else int(self._inner.try_consume_tokens(tokens))

    def rollback(self, count: int) -> bool:
        return not self._failed and bool(self._inner.rollback(count))

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "too many items.\n  3 | start: x\n         ^"


def test_an_engine_that_gave_up_on_a_draft_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Grammar.matcher
    monkeypatch.setattr(Grammar, "matcher", lambda self: _GivesUp(real(self)))
    matcher = constraint("regex", "(a|b|1)*")
    matcher.advance(ids("a", "1", "b", "1"))
    assert matcher._newest is _Kind.FAILED
    assert not matcher.is_complete
    matcher.roll_back(2)
    assert allowed(matcher) == [*ids("a", "b", "ab", "1"), *ENDS]
    assert matcher.admissible(ids("a", "b", "a")) == ids("a")
    matcher.advance(ids("a"))
    assert matcher.is_complete


def test_an_engine_that_gives_up_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the token that it gave up on, and where it gives up on a mask; not as a text that is forbidden."""
    real = Grammar.matcher
    made = grammar("regex", "(a|b|1)*")
    monkeypatch.setattr(Grammar, "matcher", lambda self: _GivesUp(real(self)))
    matcher = TokenConstraint(made, ENDS, VOCAB)
    matcher.advance(ids("a", "b"))
    matcher.roll_back(0)
    for _ in range(2):
        with refused(
            "regex is too much for the grammar engine: too many items.", "Make it smaller", error=RequestError
        ):
            allowed(matcher)
        matcher.advance(ids("1"))
        matcher.roll_back(1)
    failed = made.matcher()
    failed.try_consume_tokens(ids("b"))
    with refused("regex is too much for the grammar engine: too many items.", error=RequestError):
        made.followers(failed)


def test_a_choice_of_thousands_of_texts_is_one_like_any_other() -> None:
    """As alternatives of a rule the engine would give up on more than 2,000 of them, as it does on a grammar's own."""
    texts = ["1", *("a" * count + "b" for count in range(3000))]
    matcher = constraint("choice", texts)
    assert allowed(matcher) == ids("a", "b", "ab", "1")
    matcher.advance(ids("a", "a", "ab"))
    assert (allowed(matcher), matcher.is_complete) == ([*ENDS], True)
    alternatives = " | ".join(f'"{text}"' for text in texts)
    with refused("grammar is too much for the grammar engine", "max is 2000", "Make it smaller", error=RequestError):
        grammar("grammar", f"start: {alternatives}")
    assert grammar("grammar", f"start: ANSWER\nANSWER: {alternatives}").name == "grammar"


def test_a_choice_may_have_any_character() -> None:
    """The engine takes DEL for a control character where JSON does not; unescaped, every text beside it was refused."""
    assert grammar("choice", ["a\x7fb", "a\x00b", "a\u2028b", 'a"b', "a\\b", "a\nb"]).name == "choice"


def test_a_choice_that_is_too_large_for_the_engine_is_refused_when_it_is_asked_for() -> None:
    texts = [f"a{number * 7919 % 1000003:x}{'ab' * (number % 7)}" for number in range(250_000)]
    with refused("choice is too much for the grammar engine", "too big", "Make it smaller", error=RequestError):
        grammar("choice", texts)
