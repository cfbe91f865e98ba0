"""A head that drafts from a part of the vocabulary: no token changes, and what it loses and spares is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.bundle import WEIGHTS, Bundle, open_bundle
from mtp_engines.contracts.manifest import DraftAgreement, DraftVocabulary
from mtp_engines.contracts.model import MoeSpec
from mtp_exporter.checking.compare import compare_bundle
from mtp_exporter.draft_ids import cost as draft_cost
from mtp_exporter.prepare import Ingredients
from mtp_exporter.reading import source
from mtp_runtime import EngineOptions, load
from mtp_tools.verify.checks import checks
from tests.fixtures.checkpoints import random_checkpoint
from tests.fixtures.moe_families import qwen3_5_moe_checkpoint
from tests.support import build_bundle, build_refused, generate, refused, run_command

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "checkpoints" / "tiny-mtp"
TEXT = ROOT / "docs" / "commands.md"
COUNT = 512
PROMPT = list(range(3, 15))


def from_ranks(out: Path, **options: object) -> Path:
    fields = {"max_model_len": 128, "draft_tokens": 4, "draft_vocab": COUNT, **options}
    return build_bundle(CARRIED, out, **fields)


def from_text(out: Path, **options: object) -> Path:
    return from_ranks(out, **{"draft_vocab_text": (TEXT,), **options})


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return from_ranks(tmp_path_factory.mktemp("vocabulary") / "cut")


@pytest.fixture(scope="module")
def frequent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return from_text(tmp_path_factory.mktemp("vocabulary") / "frequent")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return from_ranks(tmp_path_factory.mktemp("vocabulary") / "whole", draft_vocab=None)


@pytest.fixture(scope="module", params=["ranks fp32", "ranks int4", "text fp32", "text int4"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_from, weights = request.param.split()
    if weights == "fp32":
        found: Path = request.getfixturevalue({"ranks": "cut", "text": "frequent"}[made_from])
        return found
    out = tmp_path_factory.mktemp("vocabulary") / "bundle"
    return {"ranks": from_ranks, "text": from_text}[made_from](out, weights=weights)


def table_of(bundle: Path) -> np.ndarray:
    tensor = ir.load(bundle / "graphs" / "mtp.onnx").graph.initializers["mtp.ids"].const_value
    assert tensor is not None
    return np.asarray(tensor.numpy())


def agreement_of(bundle: Path) -> DraftAgreement:
    agreement = open_bundle(bundle).manifest.draft_agreement
    assert agreement is not None
    return agreement


def vocabulary_of(bundle: Path) -> DraftVocabulary:
    vocabulary = open_bundle(bundle).manifest.draft_vocabulary
    assert vocabulary is not None
    return vocabulary


def test_speculation_changes_nothing(bundle: Path) -> None:
    assert [line.text for line in checks(load(bundle, threads=1), 12, 24) if not line.holds] == []


@pytest.mark.parametrize("name", ["cut", "frequent"])
def test_drafts_are_the_best_of_the_ids(name: str, whole: Path, request: pytest.FixtureRequest) -> None:
    """Where the whole head's choice is one of them it stays, elsewhere another takes its place."""
    path: Path = request.getfixturevalue(name)
    ids = range(COUNT) if name == "cut" else set(table_of(path).tolist())
    models = [load(path, threads=1), load(whole, threads=1)]
    kept = lost = 0
    for start in range(1, 25):
        tokens = np.array([[start, start + 7, 3 * start, start + 2]])
        drafts = []
        for model in models:
            sequences = model.engine.sequences()
            hidden = sequences.verify(tokens, 1).hidden.copy()
            drafts.append(int(sequences.draft(tokens, hidden, np.array([4]), 1)[0, 0]))
        assert drafts[0] in ids
        kept += drafts[1] in ids
        lost += drafts[1] not in ids
        assert drafts[0] == drafts[1] or drafts[1] not in ids
    assert kept
    assert lost, "control: some choices are outside"


def test_what_it_costs_is_said(bundle: Path, whole: Path) -> None:
    agreement = open_bundle(bundle).manifest.draft_agreement
    assert agreement is not None
    assert agreement.accepted_whole is not None
    assert 0 < agreement.accepted <= agreement.accepted_whole
    assert open_bundle(whole).manifest.draft_agreement.accepted_whole is None  # type: ignore[union-attr]


def test_the_head_has_rows_of_the_targets(bundle: Path, whole: Path) -> None:
    """The first ones without a table, or those that the table says."""
    initializers = ir.load(bundle / "graphs" / "mtp.onnx").graph.initializers
    made_from = open_bundle(bundle).manifest.draft_vocabulary.origin  # type: ignore[union-attr]
    assert ("mtp.ids" in initializers) == (made_from == "text")
    ids = table_of(bundle) if made_from == "text" else np.arange(COUNT)
    assert len(ids) == COUNT
    name = "mtp.head" if "mtp.head" in initializers else "mtp.head.scales"
    ours = initializers[name].const_value.numpy()  # type: ignore[union-attr]
    target = ir.load(bundle / "graphs" / "backbone.onnx").graph.initializers
    suffix = name.removeprefix("mtp.head")
    theirs = next(target[f"{role}{suffix}"] for role in ("head", "embedding") if f"{role}{suffix}" in target)
    rows = theirs.const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_array_equal(ours, rows[ids])
    assert not np.array_equal(ours, rows[ids + 1]), "control: other rows are other values"
    if name == "mtp.head":
        assert (bundle / WEIGHTS).stat().st_size > (whole / WEIGHTS).stat().st_size


@pytest.mark.parametrize("name", ["cut", "frequent"])
def test_the_torch_backend_drafts_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """In float32: ONNX Runtime rounds the rows of products with blocks."""
    tokens = []
    for options in (EngineOptions(threads=1), EngineOptions(backend="torch", device="cpu")):
        finished = load(request.getfixturevalue(name), options=options).complete(
            prompt_ids=PROMPT, max_new_tokens=16, draft_tokens=3
        )
        tokens.append((finished.token_ids, finished.stats.accepted))
    assert tokens[0] == tokens[1]


def test_check_takes_the_ids_from_the_bundle(bundle: Path) -> None:
    assert compare_bundle(Ingredients(str(CARRIED)), bundle).first_difference is None


@pytest.mark.parametrize("start", [3, 40, 700])
def test_tokens_are_the_same_for_every_k(bundle: Path, start: int) -> None:
    model, prompt = load(bundle, threads=1), list(range(start, start + 12))
    plain = generate(model, prompt, 32, 0)
    drafted = accepted = 0
    for draft_tokens in range(1, 5):
        finished = generate(model, prompt, 32, draft_tokens)
        assert finished.token_ids == plain.token_ids
        drafted += finished.stats.drafted
        accepted += finished.stats.accepted
    assert 0 < accepted < drafted, "control: some drafts were kept and some were not"


def test_a_table_that_is_off_by_one_is_caught(frequent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = source._places
    with monkeypatch.context() as patch:
        patch.setattr(source, "_places", lambda need: places(need) + 1)
        wrong = from_text(tmp_path / "wrong")
    assert agreement_of(wrong).accepted < agreement_of(frequent).accepted / 2
    assert agreement_of(wrong).accepted_whole == agreement_of(frequent).accepted_whole
    assert (np.diff(table_of(wrong)) > 0).all(), "control: the table itself looks sound"
    assert compare_bundle(Ingredients(str(CARRIED)), frequent).first_difference is None
    found = compare_bundle(Ingredients(str(CARRIED)), wrong).first_difference
    assert found is not None
    assert found.name == "logits of the draft head"
    with monkeypatch.context() as patch:
        patch.setattr(source, "_places", lambda need: places(need) + 2000)
        outside = from_text(tmp_path / "outside")
    with refused("do not rise from 0 up to at most 2175", "Build the bundle again"):
        compare_bundle(Ingredients(str(CARRIED)), outside)


def test_what_a_draft_reads_and_takes_is_said(frequent: Path, cut: Path, whole: Path) -> None:
    for path in (frequent, cut):
        found = vocabulary_of(path)
        assert found.step.weight_bytes == read_by_a_draft(open_bundle(path))
        assert found.step.milliseconds is not None
        assert found.step.milliseconds > 0
        assert found.step_whole.milliseconds is not None
        assert found.step.weight_bytes < found.step_whole.weight_bytes
    head = 4 * 256
    saved = vocabulary_of(cut).step_whole.weight_bytes - vocabulary_of(cut).step.weight_bytes
    assert saved == (2176 - COUNT) * head
    assert open_bundle(whole).manifest.draft_vocabulary is None


def test_of_a_mixture_the_experts_of_one_token_count(tmp_path: Path) -> None:
    checkpoint = qwen3_5_moe_checkpoint(tmp_path / "c", seed=4)
    bundle = open_bundle(build_bundle(checkpoint, tmp_path / "b", draft_vocab=16))
    assert vocabulary_of(bundle.directory).step.weight_bytes == read_by_a_draft(bundle)
    assert read_by_a_draft(bundle) < read_by_a_draft(bundle, all_experts=True), "control: all of them are more"


def read_by_a_draft(bundle: Bundle, *, all_experts: bool = False) -> int:
    """From the graph itself: one row of the embedding, the experts of one token, no table, and all other weights."""
    total = 0
    for value in ir.load(bundle.mtp[0]).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and value.name != "mtp.ids":
            uses = {use.node.op_type for use in value.uses()}
            rows = tensor.shape.numpy()[0]
            read = 1 if uses <= {"Gather", "BlockRows", "RotatedRows"} else rows
            if uses == {"RoutedExperts"} and not all_experts:
                mlp = bundle.manifest.model.mtp.layers[0].mlp  # type: ignore[union-attr]
                assert isinstance(mlp, MoeSpec)
                read = mlp.top_k
            total += tensor.nbytes // rows * read
    return total


def test_a_machine_without_room_for_both_heads_says_the_bytes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_cost, "_available_bytes", lambda: 1 << 20)
    found = vocabulary_of(from_text(tmp_path / "b"))
    assert found.step.milliseconds is None
    assert found.step.weight_bytes > 0


def test_the_command_says_which_ids_and_what_they_cost(tmp_path: Path) -> None:
    shown = run_command(
        "mtp-export", "build", CARRIED, "--out", tmp_path / "b", "--draft-vocab", "512", "--draft-vocab-text", TEXT
    )
    assert shown.returncode == 0, shown.stderr
    assert "draft vocabulary: 512 of 2,176 ids, the most frequent of a text of" in shown.stdout
    assert "draft step: 6.4 MB of weights with all ids, 4.7 MB with these" in shown.stdout
    assert "with the whole vocabulary" in shown.stdout
    wrong = run_command("mtp-export", "build", CARRIED, "--draft-vocab", "some")
    assert wrong.returncode == 2
    assert "'some' is not a valid integer" in wrong.stderr


def test_the_same_text_reuses_a_bundle_and_another_does_not(tmp_path: Path) -> None:
    out, notes = tmp_path / "b", list[str]()
    table = table_of(from_text(out))
    from_text(out, notes=notes)
    assert any("used as it is" in note for note in notes)
    notes.clear()
    from_text(out, notes=notes, draft_vocab_text=(ROOT / "LICENSE",))
    assert not any("used as it is" in note for note in notes)
    assert not np.array_equal(table_of(out), table)


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_number_out_of_range_is_refused(tmp_path: Path, count: int) -> None:
    build_refused(CARRIED, tmp_path / "b", f"--draft-vocab is {count}", "a part of the vocabulary", draft_vocab=count)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", seed=2)
    build_refused(checkpoint, tmp_path / "b", "has no head", "Leave it out", draft_vocab=8, mtp=False)
    assert build_bundle(checkpoint, tmp_path / "b", draft_vocab=8), "control: with its head it is built"
