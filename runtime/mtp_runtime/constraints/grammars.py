"""From what a request asks to a grammar of the engine, llguidance, over the tokens of one tokenizer."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtp_engines.errors import RequestError
from mtp_runtime.constraints.options import Asked

# The engine lets a text end by a token of its own, which stands behind all of the tokenizer's. So it never takes one of
# those for an end, which tokens end an answer is decided in one place, and a grammar may still name them.
_END = "<|end of the constraint|>"
# One blank, or a line break and what indents the next line. Without a bound a model can write blanks for ever.
_JSON_SPACE = r" |\n[ \t]{0,20}"
# Where only one text can follow, the engine would allow none but the tokens that the tokenizer encodes that text to.
# But a tokenizer may normalise what it encodes, and then these tokens spell another text, which the grammar refuses.
_TOP = {"name": "top", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer'}
_LONGEST_REASON = 300
# How the engine begins to say that more must follow, and no token of the vocabulary can spell it.
_NO_TOKEN = "NoExtension"


class Vocabulary:
    """The tokens of one tokenizer, as the engine knows them; several threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the tokenizer, which takes about a second for 150,000 tokens; it is not changed.

        Raises:
            RequestError: the engine cannot read it.
        """
        extended = Tokenizer.from_str(tokenizer.to_str())
        extended.no_padding()
        extended.no_truncation()
        extended.add_special_tokens([_END])
        end = extended.token_to_id(_END)
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the highest id that has a text."""
        try:
            if end is None or end < self.size:
                raise ValueError(f"its ids have gaps below {self.size}")
            self.tokenizer = LLTokenizer(extended.to_str(), eos_token=end)
        except ValueError as error:
            raise RequestError(
                f"the tokenizer of this bundle cannot carry a constraint: {_one_line(str(error))}. Leave the "
                "constraint out."
            ) from error

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; special tokens as their text, ids without a token as nothing."""
        return self.tokenizer.decode_bytes([token]) if token < self.size else b""


class Grammar:
    """What an answer must look like, compiled; every answer takes a matcher of its own from it.

    Attributes:
        name: the field of the request that asked for it.
        vocabulary: the tokens that it is written in.
        after: bytes of the answer behind which it begins; empty where it begins at once.
    """

    def __init__(self, name: str, matcher: LLMatcher, vocabulary: Vocabulary, after: bytes) -> None:
        self.name, self.vocabulary, self.after = name, vocabulary, after
        self._matcher = matcher

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning."""
        return self._matcher.deep_copy()

    def followers(self, matcher: LLMatcher) -> NDArray[np.bool_]:
        """The tokens that can come next, without an end: bool[vocabulary.size].

        Raises:
            RequestError: the engine gave up.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if (failure := self.failure(matcher)) is not None:
            raise RequestError(failure)
        if matcher.is_error():
            return np.zeros(self.vocabulary.size, np.bool_)
        return np.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(np.bool_)

    def failure(self, matcher: LLMatcher) -> str | None:
        """Why the engine gave up on a matcher, as a sentence for the request; None if it did not."""
        if not matcher.is_error() or matcher.get_error().startswith(_NO_TOKEN):
            return None
        return _too_much(self.name, matcher.get_error())

    def require_room(self) -> None:
        """Take a token on trial, since the engine reads what can follow first of all only when one has come.

        Raises:
            RequestError: the engine gave up.
        """
        trial = self.matcher()
        first = np.flatnonzero(self.followers(trial))[:1]
        trial.try_consume_tokens(first.tolist())
        if (failure := self.failure(trial)) is not None:
            raise RequestError(failure)


class Grammars:
    """Compiles for one tokenizer, whose vocabulary is made when the first request needs it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._refused: str | None = None
        self._lock = threading.Lock()

    def vocabulary(self) -> Vocabulary:
        """The tokens, which are read once; there must be a tokenizer.

        Raises:
            RequestError: the engine cannot read it.
        """
        assert self._tokenizer is not None
        with self._lock:
            if self._refused is not None:
                raise RequestError(self._refused)
            if self._vocabulary is None:
                try:
                    self._vocabulary = Vocabulary(self._tokenizer)
                except RequestError as error:
                    self._refused = str(error)
                    raise
            return self._vocabulary

    def compile(self, asked: Asked) -> Grammar:
        """The grammar of what a request asks.

        Raises:
            RequestError: there is no tokenizer, the engine refuses it, or no text of this vocabulary can satisfy it.
        """
        if self._tokenizer is None:
            raise RequestError(f"{asked.name} is about text, but this bundle has no tokenizer; leave it out.")
        vocabulary = self.vocabulary()
        try:
            source, after = _source(asked), asked.after.encode("utf-8")
            source.encode("utf-8")
            failed, said = LLMatcher.validate_grammar_with_warnings(source, vocabulary.tokenizer)
        except UnicodeEncodeError as error:
            raise RequestError(f"{asked.name} is not valid UTF-8 text; give it in UTF-8.") from error
        except (TypeError, ValueError) as error:
            failed, said, source, after = True, [str(error)], "", b""
        if failed and "too big" in said[0]:
            raise RequestError(_too_much(asked.name, said[0]))
        if failed:
            raise RequestError(f"{asked.name} was refused: {_one_line(said[0])}. Correct it.")
        # Errors of later tokens would hold a dump of the engine's state.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
        grammar = Grammar(asked.name, matcher, vocabulary, after)
        first = grammar.matcher()
        if not grammar.followers(first).any() and not first.is_accepting():
            raise RequestError(
                f"{asked.name} allows no text that this tokenizer can begin; allow at least one, such as an empty one."
            )
        grammar.require_room()
        return grammar


def _source(asked: Asked) -> str:
    """In the engine's own form."""
    if asked.name in ("json_schema", "json_object"):
        schema = {"type": "object"} if asked.name == "json_object" else asked.value
        answer = {"json_schema": _bounded(schema) if isinstance(schema, dict) else schema}
    elif asked.name == "choice":
        # One terminal, which becomes one automaton: as alternatives of a rule each text would be followed by itself,
        # and the engine follows 2,000 at most.
        # DEL is no control character for JSON, and is one for the engine.
        texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in asked.value)
        answer = {"lark_grammar": f"start: ANSWER\nANSWER: {' | '.join(texts)}"}
    else:
        answer = {"lark_grammar": asked.value if asked.name == "grammar" else _rule(asked.value)}
    return json.dumps({"grammars": [_TOP, {"name": "answer", **answer}]}, ensure_ascii=False, allow_nan=False)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a bound on blanks, unless it says itself where they may stand."""
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or any(name.startswith("whitespace_") for name in options):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": _JSON_SPACE, **options}}


def _rule(regex: str) -> str:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        # The engine would drop it.
        raise ValueError("the expression ends in a single backslash")
    return f"start: /{regex_to_lark(regex, '')}/"


def _too_much(name: str, said: str) -> str:
    return f"{name} is too much for the grammar engine: {_one_line(said)}. Make it smaller or simpler."


def _one_line(said: str) -> str:
    """What the engine said without a trace, the lines that quote the grammar and point into it, and a full stop."""
    said = said.partition("<backtrace>")[0]
    lines = [line for line in said.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)", line)]
    reason = " ".join(" ".join(lines).split()).rstrip(".")
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"
