"""From ids to text: stop texts, split characters, padded vocabularies, special tokens in front."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from mtp_runtime import Model, Request
from mtp_runtime.ending import Ending
from mtp_runtime.text import TextStream
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.runtime.conftest import Models
from tests.runtime.parts import Run, play, streamed
from tests.support import build_bundle, load_model, refused

STOP_PIECES = ("A", "bc", "dS", "TO", "P!", "ef", "gh")
BYTES = tuple(bytes.fromhex("41E697A520C3A9F09F99825A")[i : i + 1] for i in range(12))
CHARACTERS = "A\u65e5 \u00e9\U0001f642Z"
NEXT = {9: 62, 62: 10}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("draft_tokens", range(7))
@pytest.mark.parametrize(
    ("stop", "text", "count", "reason"),
    [
        ("STOP", "bcd", 4, "stop"),
        ("S", "bcd", 2, "stop"),
        ("STOPP", "bcdSTOP!efgh", 6, "length"),
        (["gh", "STOP"], "bcd", 4, "stop"),
        (["gh"], "bcdSTOP!ef", 6, "stop"),
        (["TOP", "STOP"], "bcd", 4, "stop"),
        (["bcdSTOP!e"], "", 5, "stop"),
    ],
)
def test_a_stop_text_over_tokens_and_blocks_is_cut_out(
    markov: Models, stop: str | list[str], text: str, count: int, reason: str, draft_tokens: int
) -> None:
    """RT-03: the text ends before the stop text, the ids with the piece that completes it, for every K."""
    model = markov(pieces=STOP_PIECES)
    run = streamed(model, prompt="A", max_new_tokens=6, draft_tokens=draft_tokens, stop=stop)
    assert run.finished.text == text
    assert run.ids == list(range(1, count + 1))
    assert run.finished.finish_reason == reason


@pytest.mark.parametrize("draft_tokens", range(7))
def test_streamed_text_never_has_to_be_taken_back(markov: Models, draft_tokens: int) -> None:
    """RT-03: neither S nor ST is shown while STOP may still follow, and what was held is shown when it does not."""
    model = markov(pieces=STOP_PIECES)
    run = streamed(model, prompt="A", max_new_tokens=6, draft_tokens=draft_tokens, stop="STOPP")
    for shown, certain in zip(_growing(run), _certain(run, "STOPP"), strict=True):
        assert shown == certain
    run = streamed(model, prompt="A", max_new_tokens=6, draft_tokens=draft_tokens, stop="STOP")
    assert all("bcd".startswith(shown) for shown in _growing(run))


def test_control_text_that_is_not_held_shows_half_a_stop_text(markov: Models) -> None:
    """RT-03: a stream without holding is visible to the check above; one that searches the newest piece misses."""

    class HoldsNothing(TextStream):
        def _held(self) -> int:
            return 0

    class SearchesTheNewestPiece(TextStream):
        def _cut_at_stop(self, searched: int) -> None:
            if any(stop in self.decoded[searched:] for stop in self._stops):
                self.stopped = True

    model = markov(pieces=STOP_PIECES)
    for draft_tokens in range(7):
        run = _with_text(model, HoldsNothing(model.prompts.tokenizer, ["STOP"]), draft_tokens)
        if draft_tokens in (0, 1):
            # With longer blocks the whole stop text arrives at once.
            assert not all("bcd".startswith(shown) for shown in _growing(run))
        run = _with_text(model, SearchesTheNewestPiece(model.prompts.tokenizer, ["STOP"]), draft_tokens)
        assert len(run.ids) == 6
        right = _with_text(model, TextStream(model.prompts.tokenizer, ["STOP"]), draft_tokens)
        assert (len(right.ids), right.finished.text) == (4, "bcd")


def test_an_empty_stop_text_is_refused(markov: Models) -> None:
    """RT-03: alone and in a list."""
    for stop in ("", ["STOP", ""]):
        with refused("stop", "empty"):
            markov(pieces=STOP_PIECES).complete(prompt="A", max_new_tokens=6, stop=stop)


def test_more_and_longer_stop_texts_than_each_token_has_time_for_are_refused(markov: Models) -> None:
    asked = markov(pieces=STOP_PIECES)
    with refused("stop has 65 texts, expected at most 64", "leave some out"):
        asked.complete(prompt="A", max_new_tokens=6, stop=["x"] * 65)
    with refused("stop has a text of 1001 characters, expected at most 1000", "shorten it"):
        asked.complete(prompt="A", max_new_tokens=6, stop=["S", "x" * 1001])
    assert asked.complete(prompt="A", max_new_tokens=6, stop=["x" * 1000] * 63 + ["STOP"]).text == "bcd"


def test_more_and_longer_bad_words_than_each_row_has_time_for_are_refused(markov: Models) -> None:
    asked = markov(pieces=STOP_PIECES)
    words = [[3, 5 + i % 17, 5 + i // 17 % 17, 5 + i // 289] for i in range(4097)]
    with refused("bad_words has 4097 sequences of ids", "at most 4096", "leave some out"):
        asked.complete(prompt="A", max_new_tokens=6, bad_words=words)
    with refused("bad_words has a sequence of 65 ids, expected at most 64", "shorten it"):
        asked.complete(prompt="A", max_new_tokens=6, bad_words=[[3] * 65])
    assert asked.complete(prompt="A", max_new_tokens=6, bad_words=[[3] * 64] * 4096).token_ids


@pytest.mark.parametrize("count", [1, 3, 64])
def test_what_is_held_is_the_longest_end_that_any_stop_text_begins_with(count: int) -> None:
    """Against a search through all of them, length by length."""
    generator = random.Random(count)
    lengths = set()
    for _ in range(300):
        stops = ["".join(generator.choices("abc\u00e9", k=generator.randint(4, 9))) for _ in range(count)]
        stream = TextStream(None, stops)
        stream.decoded = "".join(generator.choices("abc\u00e9", k=generator.randint(0, 12)))
        if any(stop in stream.decoded for stop in stops):
            continue  # It would have been cut.
        ends = [length for stop in stops for length in range(len(stop)) if stream.decoded.endswith(stop[:length])]
        assert stream._held() == max(ends), (stops, stream.decoded)
        lengths.add(max(ends))
    assert lengths >= set(range(4)), "texts that hold much and nothing are needed"


def test_a_stop_text_is_refused_where_there_is_no_tokenizer(markov: Models) -> None:
    """RT-03 and P3: a bundle that makes no text cannot look for one, and says so."""
    with refused("stop", "tokenizer"):
        markov().complete(prompt_ids=[5], max_new_tokens=4, stop="x")


def test_random_texts_end_where_a_search_of_the_whole_text_ends_them() -> None:
    """RT-03 and RT-50: bytes of characters of 1 to 4 bytes, in blocks of 1 to 7, against str.find."""
    tokenizer = _byte_tokenizer()
    generator = random.Random(3)
    ended = 0
    for _ in range(400):
        text = "".join(generator.choices("ab \u00e9\u65e5\U0001f642", k=generator.randint(1, 20)))
        stops = ["".join(generator.choices("ab\u00e9\u65e5", k=generator.randint(1, 4))) for _ in range(2)]
        expected = _cut(text, stops)
        ended += expected != text
        for width in (1, 2, 3, 7):
            shown = _stream(tokenizer, list(text.encode()), stops, width)
            assert shown == expected, (text, stops, width)
    assert 100 < ended < 350, "both texts with and without a stop text are needed"


def test_random_bytes_stream_to_the_text_of_all_ids() -> None:
    """RT-50: bytes that form no characters, ids without an entry, in blocks of every size."""
    tokenizer = _byte_tokenizer()
    generator = random.Random(4)
    alphabet = [65, 66, *"\u65e5\u00e9\U0001f642\ufffd".encode(), 0xFF, 300]
    for _ in range(400):
        ids = generator.choices(alphabet, k=generator.randint(1, 24))
        for width in (1, 2, 5):
            assert _stream(tokenizer, ids, (), width) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("draft_tokens", range(7))
def test_a_character_split_over_tokens_is_shown_whole(markov: Models, draft_tokens: int) -> None:
    """RT-50: the streamed text is the decoded text for every K, and no chunk ends inside a character."""
    model = markov(pieces=BYTES)
    run = streamed(model, prompt_ids=[63], max_new_tokens=12, draft_tokens=draft_tokens)
    assert run.ids == list(range(12))
    assert run.finished.text == CHARACTERS == model.prompts.tokenizer.decode(run.ids)
    assert all("\ufffd" not in text for text in run.texts)
    # A chunk is every character that is complete after its block, not later and not earlier.
    for shown, count in zip(_growing(run), _emitted_counts(run), strict=True):
        assert shown == b"".join(BYTES[:count]).decode(errors="ignore")


def test_control_decoding_each_token_alone_breaks_characters(markov: Models) -> None:
    """RT-50: the fault of the case gives replacement characters with these pieces."""
    tokenizer = markov(pieces=BYTES).prompts.tokenizer
    assert "\ufffd" in "".join(tokenizer.decode([token]) for token in range(12))


def test_a_character_that_the_limit_cut_is_shown_as_replacement_at_the_end_only(markov: Models) -> None:
    """RT-50: after two of the three bytes of a character the limit ends; streamed and decoded text agree."""
    model = markov(pieces=BYTES)
    for draft_tokens in range(7):
        run = streamed(model, prompt_ids=[63], max_new_tokens=3, draft_tokens=draft_tokens)
        assert run.finished.text == model.prompts.tokenizer.decode([0, 1, 2])
        assert run.texts[-1] == "\ufffd"
        assert "\ufffd" not in "".join(run.texts[:-1])


@pytest.mark.parametrize("draft_tokens", range(5))
def test_a_padded_vocabulary_row_is_emitted_without_text(markov: Models, draft_tokens: int) -> None:
    """RT-49: an id without an entry is emitted, has no text, and may be drafted: the same rule for every K."""
    pieces = tuple(chr(ord("0") + token) for token in range(60))
    model = markov(pieces=pieces, target=_by_way_of_62)
    run = streamed(model, prompt_ids=[5], max_new_tokens=9, draft_tokens=draft_tokens)
    assert run.ids == [6, 7, 8, 9, 62, 10, 11, 12, 13]
    assert run.finished.text == "".join(pieces[6:14])
    if draft_tokens:
        # The drafter knows the rule too: all it may draft is accepted, the padded id included.
        assert run.finished.stats.accepted == run.finished.stats.drafted > 0
    # The control: with an entry for 62 the same ids have one more piece.
    full = markov(pieces=tuple(chr(ord("0") + token) for token in range(64)), target=_by_way_of_62)
    assert len(streamed(full, prompt_ids=[5], max_new_tokens=9, draft_tokens=draft_tokens).finished.text) == 9


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A chain whose tokenizer puts id 1, `!`, in front, and whose template prints it."""
    place = tmp_path_factory.mktemp("bos")
    checkpoint = markov_checkpoint(place / "checkpoint")
    tokenizer = tinytext_tokenizer(["#", "!", "a", "b", "c", "d"])
    write_tokenizer(checkpoint, tokenizer, bos=1, chat_template=TEMPLATE, prepend_bos=True)
    return load_model(build_bundle(checkpoint, place / "bundle"))


def test_the_first_special_token_is_there_exactly_once(with_bos: Model) -> None:
    """RT-55: raw text and chat have it once; ids are used as they are."""
    encode = with_bos.prompts.encode
    assert encode(Request(prompt="abc")) == [1, 2, 3, 4]
    assert encode(Request(prompt="abc", chat=True)) == [1, 2, 3, 4]
    assert encode(Request(messages=[{"role": "user", "content": "abc"}])) == [1, 2, 3, 4]
    assert encode(Request(prompt_ids=[2, 3, 4])) == [2, 3, 4]
    assert encode(Request(prompt_ids=[1, 1, 2])) == [1, 1, 2]
    # Text is encoded under the tokenizer's own rules, so a BOS that is written out comes on top.
    assert encode(Request(prompt="!abc")) == [1, 1, 2, 3, 4]
    # The control: encoding the rendered template as raw text is the fault of the case.
    assert with_bos.prompts.tokenizer.encode("!abc").ids == [1, 1, 2, 3, 4]


def test_usage_counts_the_first_special_token(with_bos: Model) -> None:
    """RT-55: the recorded length of the prompt is that of its ids."""
    lengths = {
        name: with_bos.complete(max_new_tokens=1, **options).prompt_tokens
        for name, options in {
            "raw": {"prompt": "abc"},
            "chat": {"prompt": "abc", "chat": True},
            "ids": {"prompt_ids": [2, 3, 4]},
        }.items()
    }
    assert lengths == {"raw": 4, "chat": 4, "ids": 3}


def test_text_is_refused_where_nothing_can_encode_it(markov: Models) -> None:
    """RT-55 and P3: chat without a template, text without a tokenizer."""
    with refused("chat template"):
        markov(pieces=STOP_PIECES).complete(prompt="A", chat=True)
    with refused("tokenizer"):
        markov().complete(prompt="A")


def test_chat_is_refused_beside_ids(with_bos: Model) -> None:
    """RT-55 and P3: no template can render ids, so asking for it is not dropped in silence."""
    with refused("chat"):
        with_bos.complete(prompt_ids=[2, 3], max_new_tokens=1, chat=True)


def _by_way_of_62(token: int) -> int:
    return NEXT.get(token, (token + 1) % 64)


def _byte_tokenizer() -> Tokenizer:
    """One entry for each byte; `tinytext_tokenizer` holds 64 at most."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stream(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], width: int) -> str:
    """What a stream shows for blocks of `width` ids, as the loop drives it."""
    stream, shown = TextStream(tokenizer, stops), ""
    for start in range(0, len(ids), width):
        for token in ids[start : start + width]:
            if stream.push(token):
                break
        shown += stream.take()
        if stream.stopped:
            break
    shown += stream.finish()
    assert shown == stream.decoded
    return shown


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that is complete first; of two at the same place, the longer one."""
    for end in range(1, len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


def _growing(run: Run) -> list[str]:
    """The text that was shown after each event with ids."""
    shown, grown = "", []
    for text in run.texts[: len(run.blocks)]:
        shown += text
        grown.append(shown)
    return grown


def _emitted_counts(run: Run) -> list[int]:
    return [sum(map(len, run.blocks[: index + 1])) for index in range(len(run.blocks))]


def _certain(run: Run, stop: str) -> list[str]:
    """After each block, the text without the longest end that is a beginning of the stop text."""
    certain = []
    for count in _emitted_counts(run):
        text = "".join(STOP_PIECES[1 : count + 1])
        held = max(length for length in range(len(stop)) if text.endswith(stop[:length]))
        certain.append(text[: len(text) - held])
    return certain


def _with_text(model: Model, text: TextStream, draft_tokens: int) -> Run:
    return play(model, [0], 6, draft_tokens, ending=Ending(6, (), text))
