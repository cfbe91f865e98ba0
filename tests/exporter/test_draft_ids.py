"""Which ids a draft vocabulary gets: by rank, from a text, or as many as `auto` finds enough."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mtp_engines.contracts.manifest import WeightFormats
from mtp_exporter.draft_ids import choice, token_counts
from mtp_exporter.draft_ids.choice import LADDER, SHARE, Chosen, Size, Wish, choose_draft_vocabulary
from mtp_exporter.prepare import Ingredients, prepare
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle, build_refused, copy_of, refused

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "checkpoints" / "tiny-mtp"
TEXT = ROOT / "docs" / "commands.md"
ENDS = (0, 2)
"""What the carried checkpoint names."""


def choose(size: Size, *texts: Path, checkpoint: Path = CARRIED, ends: tuple[int, ...] = ENDS) -> Chosen:
    return choose_draft_vocabulary(prepare(Ingredients(str(checkpoint))), Wish(size, texts, ends), WeightFormats())


def ids_of(chosen: Chosen) -> list[int]:
    mtp = chosen.prepared.spec.mtp
    assert mtp is not None
    assert mtp.draft_vocab_size is not None
    return list(chosen.prepared.source("mtp.ids")) if mtp.has_table else list(range(mtp.draft_vocab_size))


def encoded(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(CARRIED / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that outweighs the layer, with a tokenizer that knows the first ids of it."""
    directory = tmp_path_factory.mktemp("large") / "checkpoint"
    random_checkpoint(directory, seed=3, vocab_size=9000)
    (directory / "tokenizer.json").write_bytes((CARRIED / "tokenizer.json").read_bytes())
    return directory


def test_the_most_frequent_tokens_are_taken_and_ends_always() -> None:
    counts = Counter(encoded(TEXT.read_text(encoding="utf-8")))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    assert not set(ENDS) & set(counts), "control: no text has the end tokens"
    assert ids_of(choose(64, TEXT)) == sorted([*ENDS, *ranked[:62]])
    assert ids_of(choose(64, TEXT, ends=())) == sorted(ranked[:64])
    assert len(ids_of(choose(2, TEXT))) == 2


def test_ranks_fill_what_a_text_leaves(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("the values the list", encoding="utf-8")
    seen = {*encoded("the values the list"), 2000}
    fill = [token for token in range(2176) if token not in seen]
    want = sorted([*seen, *fill[: 64 - len(seen)]])
    assert ids_of(choose(64, text, ends=(2000,))) == want
    assert max(want[:-1]) >= 64, "control: the first 64 ids are another list"


def test_the_same_text_gives_the_same_list(tmp_path: Path) -> None:
    """In one file or in several, as text or as JSON lines."""
    want = ids_of(choose(300, TEXT))
    assert ids_of(choose(300, TEXT)) == want
    lines = TEXT.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, half in zip(parts, (lines[:50], lines[50:]), strict=True):
        path.write_text("".join(half), encoding="utf-8")
    assert ids_of(choose(300, *parts)) == want
    assert ids_of(choose(300, parts[0])) != want, "control: another text gives another list"
    entries = ({"text": lines[0]}, {"prompt": "".join(lines[1:40])}, {"messages": [{"content": "".join(lines[40:])}]})
    records = tmp_path / "c.jsonl"
    records.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    assert ids_of(choose(300, records)) == want


def test_a_text_that_gives_the_first_ids_needs_no_table(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("the", encoding="utf-8")
    mtp = choose(1024, text).prepared.spec.mtp
    assert mtp is not None
    assert mtp.draft_ids == "first"
    assert not mtp.has_table


def test_the_share_is_that_of_text_that_the_list_did_not_see() -> None:
    found = choose(128, TEXT).vocabulary
    assert found is not None
    ids = encoded(TEXT.read_text(encoding="utf-8"))
    assert found.text_tokens == pytest.approx(len(ids), rel=0.001), "pieces are cut between words"
    chosen = set(ids_of(choose(128, TEXT)))
    own = sum(token in chosen for token in ids)
    assert 0.5 * own < found.held < own, "control: of its own text a list holds more"


def test_a_file_is_read_in_pieces(tmp_path: Path) -> None:
    text = tmp_path / "large.txt"
    content = "some words and a \u00e9 in a line\n" * 250_000 + "x" * 50_000
    text.write_text(content, encoding="utf-8")
    tracemalloc.start()
    count = longest = 0
    for piece in token_counts._pieces(text):
        count += len(piece)
        longest = max(longest, len(piece))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    text.read_text(encoding="utf-8")
    _, whole = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == len(content)
    assert longest <= 1 << 14
    assert peak < 1 << 20
    assert whole > len(content), "control: reading it at once shows"


def test_auto_takes_the_smallest_size_that_holds_enough(large: Path) -> None:
    chosen = choose("auto", TEXT, checkpoint=large)
    size = len(ids_of(chosen))
    assert size in LADDER
    assert chosen.vocabulary is not None
    assert chosen.vocabulary.held >= SHARE * chosen.vocabulary.text_tokens
    smaller = choose(LADDER[LADDER.index(size) - 1], TEXT, checkpoint=large).vocabulary
    assert smaller is not None
    assert smaller.held < SHARE * smaller.text_tokens, "control: the size below holds less"
    assert chosen.note is None


def test_auto_without_a_text_takes_a_share_of_the_ranks(large: Path, tmp_path: Path) -> None:
    """At least a quarter, and as much as the carried text needs where there is a tokenizer."""
    bare = random_checkpoint(tmp_path / "bare", seed=3, vocab_size=9000)
    unread = choose("auto", checkpoint=bare)
    assert len(ids_of(unread)) == 3072
    assert unread.vocabulary is not None
    assert (unread.vocabulary.origin, unread.vocabulary.text_tokens) == ("ranks", 0)
    assert choose("auto", checkpoint=large).vocabulary is not None


def test_auto_leaves_a_vocabulary_whole_that_costs_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = choose("auto")
    assert chosen.vocabulary is None
    assert "left whole (2,176 ids): the smallest part that would do, 2,048 ids, spares 2.1%" in str(chosen.note)
    assert "mtp.head" not in chosen.prepared.claimed
    tiny = choose("auto", checkpoint=random_checkpoint(tmp_path / "c", seed=2))
    assert "no larger than the smallest part that is tried, 1,024 ids" in str(tiny.note)
    monkeypatch.setattr(choice, "LEAST_SAVED", 0.02)
    assert choose("auto").vocabulary is not None, "control: less would be enough"
    monkeypatch.setattr(choice, "LADDER", (1024,))
    assert "no smaller part that is tried holds 99% of the 416 tokens" in str(choose("auto").note)


def test_auto_builds_and_says_that_it_left_the_vocabulary_whole(tmp_path: Path) -> None:
    notes: list[str] = []
    build_bundle(random_checkpoint(tmp_path / "c", seed=2), tmp_path / "b", draft_vocab="auto", notes=notes)
    assert any("left whole" in note for note in notes)


def refusal(name: str, content: bytes, directory: Path, *parts: str) -> None:
    file = directory / name
    file.write_bytes(content)
    with refused(str(file), *parts):
        choose(64, file)


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with refused("gone.txt cannot be read: No such file or directory", "Give a UTF-8 text file"):
        choose(64, tmp_path / "gone.txt")
    with refused("cannot be read: Is a directory"):
        choose(64, tmp_path)
    refusal("latin.txt", "ein Stück Text".encode("latin-1"), tmp_path, "is not UTF-8", "in that encoding")
    refusal("empty.txt", b"", tmp_path, "holds no token of this model", "Give a text")
    refusal("broken.jsonl", b'{"text": "a"}\n{"text": \n', tmp_path, "line 2 is no JSON object", "Mend the line")
    refusal("other.jsonl", b'{"words": "a"}\n', tmp_path, "line 1 is no JSON object with a text")
    refusal("messages.jsonl", b'{"messages": 3}\n', tmp_path, "line 1 is no JSON object with a text")
    refusal("list.jsonl", b"[1]\n", tmp_path, "line 1 is no JSON object with a text")
    good = tmp_path / "good.txt"
    good.write_text("\ufeffthe values", encoding="utf-8")
    assert choose(64, good).vocabulary, "control: such a file is read"


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "b"
    build_refused(CARRIED, out, "--draft-vocab-text says which ids", "Add --draft-vocab", draft_vocab_text=(TEXT,))
    for size in (0, 2176):
        with refused(f"--draft-vocab is {size}, expected 1 to 2175"):
            choose(size, TEXT)
    with refused("--draft-vocab is 1, and the 2 end tokens are always among the ids"):
        choose(1, TEXT)
    bare = copy_of(CARRIED, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    build_refused(bare, out, "has no tokenizer.json", "Leave it out", draft_vocab=64, draft_vocab_text=(TEXT,))
    with refused("has no head", "Leave it out"):
        choose_draft_vocabulary(prepare(Ingredients(str(CARRIED), mtp=False)), Wish("auto", (), ()), WeightFormats())
