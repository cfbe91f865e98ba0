"""Takes the text of a chat answer apart as it comes: reasoning, content, calls of tools.

A text may end anywhere, in the middle of a delimiter too, since a cycle emits several tokens. So what may be the
beginning of a delimiter waits until the rest of it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from tokenizers import Tokenizer

from mtp_serving.openai.bodies import FunctionSpec
from mtp_serving.openai.calls import CallReader, Fragment

THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_DELIMITERS = (THINK_START, THINK_END, CALL_START, CALL_END)


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True)
class Reading:
    """How an answer is read.

    Attributes:
        thinks: it begins within its reasoning, since the prompt ended with the delimiter.
        has_calls: calls of tools are looked for.
        is_call: behind the reasoning, all of it is one call in JSON.
        functions: those that may be called, for the types of their parameters.
        markers: special tokens that stand in the text, because a delimiter is one of them; they are left out.
    """

    thinks: bool = False
    has_calls: bool = False
    is_call: bool = False
    functions: tuple[FunctionSpec, ...] = ()
    markers: tuple[str, ...] = ()


class _State(Enum):
    BEGINNING = "nothing but blanks so far"
    REASONING = "within the reasoning"
    BEHIND = "blanks behind the reasoning, which belong to nothing"
    CONTENT = "within the content"
    CALL = "within a call"


class AnswerReader:
    """Reads one answer.

    Attributes:
        calls: how many calls have been told of.
    """

    def __init__(self, reading: Reading) -> None:
        """Nothing has come yet."""
        self._reading = reading
        self._state = _State.REASONING if reading.thinks else _State.BEGINNING
        self._call: CallReader | None = None
        self._held = self._blanks = ""
        self.calls = 0

    def push(self, text: str) -> list[Piece | Fragment]:
        """Text that came; what can be told of it."""
        return _merged(self._read(self._held + text, is_end=False))

    def finish(self) -> list[Piece | Fragment]:
        """The answer has ended; what was held back."""
        pieces = self._read(self._held, is_end=True)
        if self._call is not None:
            pieces += self._end_call(closed=self._reading.is_call)
        if self._state is _State.BEGINNING and self._blanks:
            pieces.append(Piece("content", self._blanks))
        return _merged(pieces)

    def _read(self, text: str, *, is_end: bool) -> list[Piece | Fragment]:
        pieces: list[Piece | Fragment] = []
        while True:
            wanted = self._wanted()
            delimiters = (*wanted, *self._reading.markers)
            at, delimiter = _first_of(delimiters, text)
            if delimiter is None and not is_end:
                at -= _beginning_of(delimiters, text)
            pieces += self._plain(text[:at])
            text = text[at:]
            if text and self._wanted() != wanted:
                continue  # What came before decides what is looked for now.
            if delimiter is None:
                self._held = text
                return pieces
            pieces += self._delimited(delimiter)
            text = text[len(delimiter) :]

    def _wanted(self) -> tuple[str, ...]:
        """Delimiters that mean something here."""
        calls = (CALL_START,) if self._reading.has_calls else ()
        return {
            _State.BEGINNING: (THINK_START, *calls),
            _State.REASONING: (THINK_END,),
            _State.BEHIND: calls,
            _State.CONTENT: calls,
            _State.CALL: () if self._reading.is_call else (CALL_END,),
        }[self._state]

    def _plain(self, text: str) -> list[Piece | Fragment]:
        """Text without a delimiter that means something."""
        if not text:
            return []
        if self._state is _State.REASONING:
            return [Piece("reasoning", text)]
        if self._call is not None:
            return list(self._call.push(text))
        if self._state in (_State.BEGINNING, _State.BEHIND):
            if not text.strip():
                self._blanks += text if self._state is _State.BEGINNING else ""
                return []
            text = self._blanks + text if self._state is _State.BEGINNING else text.lstrip()
            self._blanks = ""
            if self._reading.is_call:
                return self._begin_call(text)
            self._state = _State.CONTENT
        return [Piece("content", text)]

    def _delimited(self, delimiter: str) -> list[Piece | Fragment]:
        if delimiter == THINK_START and self._state is _State.BEGINNING:
            self._state, self._blanks = _State.REASONING, ""
        elif delimiter == THINK_END and self._state is _State.REASONING:
            self._state = _State.BEHIND
        elif delimiter == CALL_START and self._reading.has_calls and self._state is not _State.REASONING:
            self._blanks = ""
            return self._begin_call("")
        elif delimiter == CALL_END and self._call is not None:
            return self._end_call(closed=True)
        return []

    def _begin_call(self, text: str) -> list[Piece | Fragment]:
        self._state, self._call = _State.CALL, CallReader(self.calls, self._reading.functions)
        return list(self._call.push(text)) if text else []

    def _end_call(self, *, closed: bool) -> list[Piece | Fragment]:
        assert self._call is not None
        call, self._call = self._call, None
        self._state = _State.BEHIND
        fragments = list(call.close(closed=closed))
        if call.told:
            self.calls += 1
            return list(fragments)
        # No call after all: nothing of it may be lost.
        start, end = ("", "") if self._reading.is_call else (CALL_START, CALL_END if closed else "")
        self._state = _State.CONTENT
        return [Piece("content", f"{start}{call.raw}{end}")]


def special_markers(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts of all special tokens, if a delimiter is one of them, so that they have to be kept; else none."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return tuple(special) if set(special) & set(_DELIMITERS) else ()


def _first_of(delimiters: Sequence[str], text: str) -> tuple[int, str | None]:
    """The first delimiter in a text, the longest of those that begin at one place."""
    found = [(at, -len(one), one) for one in delimiters if (at := text.find(one)) >= 0]
    if not found:
        return len(text), None
    at, _, delimiter = min(found)
    return at, delimiter


def _beginning_of(delimiters: Sequence[str], text: str) -> int:
    """Length of the longest end of a text that may be the beginning of a delimiter."""
    longest = max(map(len, delimiters), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(one.startswith(text[-length:]) for one in delimiters):
            return length
    return 0


def _merged(pieces: Sequence[Piece | Fragment]) -> list[Piece | Fragment]:
    return list(_merge(pieces))


def _merge(pieces: Sequence[Piece | Fragment]) -> Iterator[Piece | Fragment]:
    waiting: Piece | None = None
    for piece in pieces:
        if isinstance(piece, Piece) and waiting is not None and piece.kind == waiting.kind:
            waiting = Piece(piece.kind, waiting.text + piece.text)
            continue
        if waiting is not None:
            yield waiting
        waiting = piece if isinstance(piece, Piece) else None
        if waiting is None:
            yield piece
    if waiting is not None:
        yield waiting
