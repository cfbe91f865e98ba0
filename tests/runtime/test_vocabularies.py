"""Whether a draft model speaks the target's vocabulary: what is compared, what is refused, and what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_engines.errors import BundleError, RequestError
from mtp_engines.vocabularies import Comparison, Vocabulary, compare_vocabularies, first_difference
from mtp_runtime import Request, load
from mtp_runtime.drafters import draft_model
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer
from tests.support import build_bundle, command_refused, copy_of, refused, run_command

PIECES = [chr(ord("a") + index) for index in range(26)]
SWAPPED = [*PIECES[:7], PIECES[19], *PIECES[8:19], PIECES[7], *PIECES[20:]]
"""h and t, ids 7 and 19, have changed places."""


def swapped(token: int) -> int:
    """The id that the swapped vocabulary gives to the string of an id, and the other way round."""
    return {7: 19, 19: 7}.get(token, token)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target of 64 ids, the chain a b c …; drafts that say the same strings, in this and in other vocabularies."""
    place = tmp_path_factory.mktemp("vocabularies")

    def make(name: str, pieces: Sequence[str] | None, size: int = 64, **options: object) -> Path:
        tokenizer = None if pieces is None else tinytext_tokenizer(pieces)
        checkpoint = markov_checkpoint(place / f"{name}-c", size=size, tokenizer=tokenizer, **options)
        return build_bundle(checkpoint, place / name, mtp=False)

    return {
        "target": make("target", PIECES),
        "same": make("same", PIECES),
        "swapped": make("swapped", SWAPPED, target=lambda token: swapped((swapped(token) + 1) % 64)),
        "smaller": make("smaller", PIECES, size=48),
        "silent": make("silent", None),
        "longer": make("longer", [*PIECES, "AA", "BB"]),
    }


def compared(bundles: dict[str, Path], target: str, draft: str, size: int = 64) -> Comparison:
    return compare_vocabularies(Vocabulary(bundles[target], 64), Vocabulary(bundles[draft], size))


def test_the_same_vocabulary_is_taken_without_a_word(bundles: dict[str, Path]) -> None:
    """LD-34: the same file, and another file that says the same of every id that both know."""
    assert compared(bundles, "target", "same") == Comparison()
    for first, second in (("target", "longer"), ("longer", "target")):
        assert compared(bundles, first, second) == Comparison()
    model = load(bundles["target"], 1, draft_model=bundles["same"])
    assert model.notes == ()
    done = model.complete(prompt="a", max_new_tokens=20, draft_tokens=3)
    assert done.text == "bcdefghijklmnopqrstu"
    assert done.stats.accepted == done.stats.drafted > 0


def test_a_string_that_means_another_id_is_refused_with_the_first_one(bundles: dict[str, Path]) -> None:
    """LD-34: the first id that differs and both strings; which of the two is whose."""
    with refused("token id 7 is 't'", f"{bundles['swapped']} and 'h' in {bundles['target']}", error=BundleError):
        load(bundles["target"], 1, draft_model=bundles["swapped"])
    with refused("token id 7 is 'h'", f"{bundles['target']} and 't' in {bundles['swapped']}", error=BundleError):
        load(bundles["swapped"], 1, draft_model=bundles["target"])


def test_sizes_that_differ_are_refused_with_both(bundles: dict[str, Path]) -> None:
    """LD-34: whatever the strings are."""
    with refused("smaller knows 48 token ids", "target 64", "made for this model", error=BundleError):
        load(bundles["target"], 1, draft_model=bundles["smaller"])
    with refused("target knows 64 token ids", "smaller 48", error=BundleError):
        load(bundles["smaller"], 1, draft_model=bundles["target"])


@pytest.mark.parametrize(("target", "draft"), [("target", "silent"), ("silent", "target"), ("silent", "silent")])
def test_without_a_tokenizer_it_is_said_that_strings_were_not_compared(
    bundles: dict[str, Path], target: str, draft: str
) -> None:
    """LD-34: in the note of the model, and on stderr of the command."""
    model = load(bundles[target], 1, draft_model=bundles[draft])
    (note,) = model.notes
    assert note.startswith(f"{bundles['silent']} has no tokenizer.json")
    assert "only the sizes" in note
    assert list(model.complete(prompt_ids=[5], max_new_tokens=3).token_ids) == [6, 7, 8]


def test_the_command_prints_the_note_and_refuses_in_one_line(bundles: dict[str, Path]) -> None:
    arguments = ("--prompt-ids", "5", "--max-new-tokens", "3", "--json", "--draft-model")
    noted = run_command("mtp-run", "generate", bundles["target"], *arguments, bundles["silent"])
    assert noted.returncode == 0
    (line,) = noted.stderr.splitlines()
    assert "only the sizes of the two vocabularies were compared" in line
    result = run_command("mtp-run", "generate", bundles["target"], *arguments, bundles["swapped"])
    command_refused(result, "token id 7 is 't'", "'h'")
    assert result.stdout == ""


def test_control_a_swapped_vocabulary_drafts_noise_and_changes_no_token(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LD-34: what the check is for. Let through, drafts about h and t are wrong; the answer is right all the same."""
    honest = load(bundles["target"], 1, draft_model=bundles["same"])
    monkeypatch.setattr(draft_model, "compare_vocabularies", lambda target, draft: Comparison())
    let_through = load(bundles["target"], 1, draft_model=bundles["swapped"])
    options = {"prompt": "a", "max_new_tokens": 24, "draft_tokens": 3}
    ours, theirs = honest.complete(**options), let_through.complete(**options)
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.accepted == ours.stats.drafted
    assert theirs.stats.accepted < theirs.stats.drafted


def test_an_id_that_one_tokenizer_does_not_know_contradicts_nothing() -> None:
    ours, more = tinytext_tokenizer(PIECES), tinytext_tokenizer([*PIECES, "AA"])
    other = tinytext_tokenizer([*PIECES, "BB"])
    assert first_difference(ours, more, 64) is None
    assert first_difference(more, ours, 64) is None
    assert first_difference(more, other, 64) == (26, "AA", "BB")
    assert first_difference(more, other, 26) is None, "ids that the models do not know are nobody's"
    assert first_difference(ours, tinytext_tokenizer(SWAPPED), 64) == (7, "h", "t")


def test_added_tokens_are_compared_too() -> None:
    """Files keep them apart from the vocabulary proper."""
    tokenizers = [tinytext_tokenizer(PIECES) for _ in range(3)]
    for tokenizer, added in zip(tokenizers, ("<end>", "<end>", "<stop>"), strict=True):
        tokenizer.add_special_tokens([added])
    assert first_difference(tokenizers[0], tokenizers[1], 64) is None
    assert first_difference(tokenizers[0], tokenizers[2], 64) == (26, "<end>", "<stop>")


def test_a_tokenizer_that_cannot_be_read_is_named(bundles: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    problem = compare_vocabularies(Vocabulary(bundles["target"], 64), Vocabulary(tmp_path, 64)).problem
    assert problem is not None
    assert problem.startswith(f"{tmp_path / 'tokenizer.json'} cannot be read")


def test_a_draft_model_that_is_no_bundle_is_refused_before_anything_is_loaded(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing directory, a checkpoint, a damaged bundle; and a request that would not be served."""
    monkeypatch.setattr("mtp_runtime.api.open_engine", lambda *_: pytest.fail("an engine was opened"))
    target = bundles["target"]
    with refused("does not exist", "give the directory of a bundle", error=BundleError):
        load(target, draft_model=tmp_path / "missing")
    with refused("no bundle but a checkpoint", "mtp-export build", error=BundleError):
        load(target, draft_model=bundles["same"].with_name("same-c"))
    damaged = copy_of(bundles["same"], tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    with refused(str(damaged / "config.json"), error=BundleError):
        load(target, draft_model=damaged)
    request = Request(prompt="a", drafter="eagle")
    with refused("drafter is 'eagle'", "use 'draft-model', 'ngram' or 'none'", error=RequestError):
        load(target, requests=[request], draft_model=bundles["same"])
