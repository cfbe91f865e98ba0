"""The graphs of a bundle: their files, axes, versions and rows, run by plain ONNX Runtime against the oracle.

Over 300 lines because it is a list of independent cases, each short and found by its case id.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from mtp_engines.bundle import entry_of
from mtp_engines.contracts.manifest import WeightFormats
from mtp_runtime import load
from tests.exporter.plain_graph import PlainGraph, distance, states_after, weight_regions
from tests.fixtures.checkpoints import (
    markov_checkpoint,
    partial_checkpoint,
    random_checkpoint,
    read_tensors,
)
from tests.fixtures.config import q35_config
from tests.oracles.float64 import FullState, Oracle, best, load_checkpoint
from tests.support import build_bundle, build_refused, copy_of, generate, ids_of, load_model, refused, top_two_margin

PROMPT = [5, 6, 7]
BACKBONE, MTP, WEIGHTS = "graphs/backbone.onnx", "graphs/mtp.onnx", "graphs/weights.data"
# float32 against float64 stays below 1e-5 of the greatest value; the faults below move it by more than 1e-2.
TOLERANCE, FAULT = 1e-4, 1e-2


@dataclass(frozen=True)
class Case:
    """A built random checkpoint with its oracle."""

    checkpoint: Path
    bundle: Path
    oracle: Oracle


def make_case(directory: Path, build: dict[str, Any] | None = None, **options: Any) -> Case:
    checkpoint = random_checkpoint(directory / "model", **options)
    bundle = build_bundle(checkpoint, directory / "out", **(build or {}))
    return Case(checkpoint, bundle, Oracle(load_checkpoint(checkpoint)))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Delta and attention layers, built for two sequences; never to be changed."""
    return make_case(tmp_path_factory.mktemp("hybrid"), {"max_batch_size": 2}, seed=1)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Attention layers only."""
    return make_case(tmp_path_factory.mktemp("attention"), seed=7, layer_types=["full_attention"] * 3)


def text(count: int, seed: int = 0, vocab_size: int = 112) -> list[int]:
    """Seeded token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


# -------------------------------------------------------------------------- EX-01, EX-03: files


def test_all_weights_lie_in_one_side_file_and_give_the_ids_of_an_inline_graph(hybrid: Case, tmp_path: Path) -> None:
    """EX-01: no weight in the graph file, however small; the same graph with its weights inside agrees."""
    for name in (BACKBONE, MTP):
        model = onnx.load(hybrid.bundle / name, load_external_data=False)
        assert model.graph.initializer
        assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer)
        assert (hybrid.bundle / name).stat().st_size < 1_000_000
    onnx.checker.check_model(str(hybrid.bundle / BACKBONE))
    inline = tmp_path / "inline.onnx"
    onnx.save(onnx.load(hybrid.bundle / BACKBONE), inline)
    assert inline.stat().st_size > (hybrid.bundle / WEIGHTS).stat().st_size // 2
    ids = text(12)
    runs = [
        PlainGraph(path).run([ids], [hybrid.oracle.initial_states()], [0])
        for path in (inline, hybrid.bundle / BACKBONE)
    ]
    assert np.array_equal(runs[0].logits, runs[1].logits)
    assert [best(row) for row in runs[0].logits[0]] == [best(row) for row in hybrid.oracle.forward(ids).logits]


@pytest.mark.slow
def test_weights_beyond_two_gigabytes_are_exported_and_run(tmp_path: Path) -> None:
    """EX-01: 2.16 GB in one matrix, past the limit of a protobuf file."""
    checkpoint = zero_checkpoint(tmp_path / "model", vocab_size=300_000, hidden_size=1_800)
    out = build_bundle(checkpoint, tmp_path / "out")
    assert (out / WEIGHTS).stat().st_size > 2**31
    assert (out / BACKBONE).stat().st_size < 10_000_000
    assert sorted(path.name for path in (out / "graphs").iterdir()) == ["backbone.onnx", "mtp.onnx", "weights.data"]
    # All logits are 0, and the lowest id wins a tie.
    assert ids_of(out, PROMPT, 3, 2) == [0, 0, 0]


def zero_checkpoint(directory: Path, **sizes: int) -> Path:
    """A tied checkpoint of zeros whose data is a hole in the file, so that it takes no room."""
    config = q35_config(tied=True, layer_types=["linear_attention", "full_attention"], **sizes)
    small = random_checkpoint(directory, seed=0, tied=True, layer_types=["linear_attention", "full_attention"])
    wide, header, offset = {40: sizes["hidden_size"], 80: 2 * sizes["hidden_size"], 112: sizes["vocab_size"]}, {}, 0
    for name, array in read_tensors(small).items():
        shape = [wide.get(axis, axis) for axis in array.shape]
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        stream.truncate(8 + len(encoded) + offset)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_moved_bundle_runs_from_anywhere(hybrid: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EX-03: moved, from another working directory, and by a relative path."""
    right = hybrid.oracle.greedy(PROMPT, 8)
    first = copy_of(hybrid.bundle, tmp_path / "a")
    second = first.rename(tmp_path / "b")
    monkeypatch.chdir("/")
    assert ids_of(second, PROMPT, 8, 2) == right
    monkeypatch.chdir(tmp_path)
    assert ids_of(Path("b"), PROMPT, 8, 2) == right
    elsewhere = tmp_path / "deep" / "er"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert ids_of(Path("../../b"), PROMPT, 8, 2) == right


def test_a_copy_without_its_data_file_is_refused_by_name(hybrid: Case, tmp_path: Path) -> None:
    """EX-03: the sentence names the missing file, not a message about protobuf."""
    copied = copy_of(hybrid.bundle, tmp_path / "out")
    (copied / WEIGHTS).unlink()
    with refused("weights.data is missing", "Copy the whole directory"):
        generate(copied, PROMPT, 4, 2)
    shutil.copyfile(hybrid.bundle / WEIGHTS, copied / WEIGHTS)
    assert ids_of(copied, PROMPT, 4, 2) == hybrid.oracle.greedy(PROMPT, 4)


# -------------------------------------------------------------------------------- EX-05: sharing


def test_a_tied_matrix_is_written_once(tmp_path: Path) -> None:
    """EX-05: embedding and head of target and draft are one region of the weight file."""
    sizes = {"vocab_size": 4096, "hidden_size": 64}
    found = {}
    for name, tied in (("tied", True), ("untied", False)):
        checkpoint = random_checkpoint(tmp_path / name, seed=1, tied=tied, **sizes)
        out = build_bundle(checkpoint, tmp_path / f"{name}.out", draft_tokens=1)
        tensors = read_tensors(checkpoint)
        matrix = tensors["model.language_model.embed_tokens.weight"]
        assert matrix.nbytes == 1_048_576
        data = (out / WEIGHTS).read_bytes()
        assert data.count(matrix.tobytes()[:64]) == 1
        found[name] = len(data)
        assert len(data) <= 1.05 * sum(array.nbytes for array in tensors.values())
        regions = [r for r in weight_regions(out / BACKBONE, out / MTP) if r[3] == (4096, 64)]
        assert len({offset for _, offset, _, _ in regions}) == (1 if tied else 2)
    assert found["untied"] - found["tied"] >= 1_048_576, "this test cannot see a second copy"


# ----------------------------------------------------------------------------------- EX-07: axes

FIXED = {"capacity", "batch", "rows", "logit_rows"}


def axes(graph: Path) -> dict[str, list[str | int]]:
    """Every input and output with its axes, symbolic ones by name."""
    model = onnx.load(graph, load_external_data=False)
    return {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }


def test_batch_rows_and_past_are_symbolic_in_both_graphs(hybrid: Case) -> None:
    """EX-07: only sizes of the model are numbers."""
    for name in (BACKBONE, MTP):
        found = axes(hybrid.bundle / name)
        for value in ("input_ids", "position_ids"):
            assert found[value] == ["batch", "rows"]
        assert found["past_length"] == ["batch"]
        assert found["logits"] == ["batch", "logit_rows", 112]
        assert found["logit_rows"] == [1]
        for value, shape in found.items():
            assert value == "logit_rows" or shape[0] == "batch", value
            if value.endswith((".key", ".value")) and not value.startswith("factors."):
                assert shape == ["batch", 2, "capacity", 32], value
            assert {axis for axis in shape if isinstance(axis, str)} <= FIXED
    assert axes(hybrid.bundle / BACKBONE)["past.0.conv"] == ["batch", 3, 190]
    assert axes(hybrid.bundle / BACKBONE)["past.0.recurrent"] == ["batch", 10, 7, 12]


def check_against_oracle(graph: PlainGraph, oracle: Oracle, starts: list[int], rows: int, capacity: int) -> None:
    """One run with the given pasts must give the oracle's logits, hidden rows and states."""
    texts = [text(start + rows, seed=start + 100 * i) for i, start in enumerate(starts)]
    states = [states_after(oracle, ids[:start]) for ids, start in zip(texts, starts, strict=True)]
    blocks = [ids[start:] for ids, start in zip(texts, starts, strict=True)]
    run = graph.run(blocks, states, starts, capacity=capacity)
    for i, (block, before, start) in enumerate(zip(blocks, states, starts, strict=True)):
        want = oracle.extend(block, before, start)
        assert distance(run.logits[i], want.logits) < TOLERANCE
        assert distance(run.outputs["hidden_states"][i], want.hidden) < TOLERANCE
        for layer, state in enumerate(want.states):
            if isinstance(state, FullState):
                for name in ("key", "value"):
                    rows_of = run.outputs[f"present.{layer}.{name}"][i, :, : start + rows].transpose(1, 0, 2)
                    assert distance(rows_of, getattr(state, name)) < TOLERANCE
            else:
                assert distance(run.outputs[f"present.{layer}.conv"][i], state.conv) < TOLERANCE
                assert distance(run.outputs[f"present.{layer}.recurrent"][i], state.recurrent) < TOLERANCE
        if start:
            unseen = oracle.extend(block, oracle.initial_states(), start).logits
            assert distance(run.logits[i], unseen) > FAULT, "this test cannot see a past that was not read"


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_the_backbone_runs_at_every_size_and_equals_the_oracle(hybrid: Case, rows: int) -> None:
    """EX-07: rows 1, 2, 5 and K + 1, pasts 0, 1, 7 and 31, batches 1 and 2 with pasts of their own, two capacities."""
    graph = PlainGraph(hybrid.bundle / BACKBONE)
    for starts in ([0], [1], [7], [31], [0, 0], [7, 7], [31, 1], [0, 7]):
        check_against_oracle(graph, hybrid.oracle, starts, rows, capacity=48 if rows > 2 else 40)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_head_runs_at_every_size_and_equals_the_oracle(hybrid: Case, rows: int) -> None:
    """EX-07: the second graph, chained and whole, at pasts 0, 1, 7 and 31 and batches 1 and 2."""
    graph, oracle = PlainGraph(hybrid.bundle / MTP), hybrid.oracle
    for starts in ([0], [1], [7], [31], [31, 1]):
        blocks, caches, hidden, wants = [], [], [], []
        for i, start in enumerate(starts):
            ids = text(start + rows + 1, seed=start + 100 * i)
            rows_in = oracle.forward(ids).hidden[:-1]
            cache = oracle.head(ids[1 : start + 1], rows_in[:start]).cache if start else states_after(oracle, [])[-1]
            assert isinstance(cache, FullState)
            blocks.append(ids[start + 1 :])
            caches.append([cache])
            hidden.append(rows_in[start:])
            wants.append(oracle.head(ids[1:], rows_in))
            unshifted = oracle.head(ids[:-1], rows_in)
            assert distance(unshifted.logits[start:], wants[-1].logits[start:]) > FAULT
        run = graph.run(blocks, caches, starts, hidden=np.stack(hidden))
        for i, (start, want) in enumerate(zip(starts, wants, strict=True)):
            assert distance(run.logits[i], want.logits[start:]) < TOLERANCE
            assert distance(run.outputs["hidden_states_out"][i], want.out[start:]) < TOLERANCE


@pytest.mark.parametrize(
    "fault", ["flat_q_gate", "read_before_update", "no_decay", "repeat_not_interleave", "q_unscaled"]
)
def test_control_the_comparison_with_the_oracle_sees_a_wrong_convention(hybrid: Case, fault: str) -> None:
    """EX-07: the tolerance lies below the mildest of these faults."""
    ids = text(12)
    run = PlainGraph(hybrid.bundle / BACKBONE).run([ids], [hybrid.oracle.initial_states()], [0])
    broken = Oracle(hybrid.oracle.checkpoint, broken=fault).forward(ids)
    assert distance(run.outputs["hidden_states"][0], broken.hidden) > TOLERANCE


def test_only_the_last_rows_get_logits(hybrid: Case) -> None:
    """EX-07: logit_rows is a number of rows, from the end."""
    graph, ids = PlainGraph(hybrid.bundle / BACKBONE), text(6)
    everything = graph.run([ids], [hybrid.oracle.initial_states()], [0]).logits
    feed = {
        "input_ids": np.array([ids]),
        "position_ids": np.arange(6)[None],
        "past_length": np.array([0]),
        "logit_rows": np.array([2]),
    }
    for name, value in graph.inputs.items():
        if name not in feed:
            feed[name] = np.zeros([{"batch": 1, "capacity": 9}.get(axis, axis) for axis in value.shape], np.float32)
    (last,) = graph.session.run(["logits"], feed)
    assert distance(last[0], everything[0, -2:]) < 1e-6
    assert distance(last[0], everything[0, -3:-1]) > FAULT


# ---------------------------------------------------------------------------- EX-09, EX-10: types


def test_a_bfloat16_checkpoint_is_converted_once_and_said_so(tmp_path: Path) -> None:
    """EX-09: float32 in every graph, stated in the manifest, ids of the same bfloat16 values."""
    case = make_case(tmp_path, seed=9, dtype="bfloat16")
    right = case.oracle.greedy(PROMPT, 32)
    model = load_model(case.bundle)
    assert model.manifest.weights == WeightFormats()
    for draft_tokens in (0, 3):
        assert ids_of(model, PROMPT, 32, draft_tokens) == right
    unrounded = random_checkpoint(tmp_path / "float32", seed=9)
    assert Oracle(load_checkpoint(unrounded)).greedy(PROMPT, 32) != right, "this seed cannot see the rounding"
    for name in (BACKBONE, MTP):
        graph = onnx.load(case.bundle / name, load_external_data=False).graph
        assert {tensor.data_type for tensor in graph.initializer} == {onnx.TensorProto.FLOAT}
        kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        assert kinds == {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


@pytest.mark.parametrize("weights", ["bf16", "int3", "float32", ""])
def test_a_weight_format_without_a_kernel_is_refused_at_build_time(tmp_path: Path, weights: str) -> None:
    """EX-09: bf16 on this backend has no kernel; the sentence says what has."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    build_refused(checkpoint, tmp_path / "out", f"--weights {weights}", "fp32", weights=weights)


def test_built_files_stay_within_the_versions_that_the_runtime_reads(hybrid: Case) -> None:
    """EX-10: plain ONNX Runtime opens both graphs; the manifest names its version; only declared domains occur."""
    assert load_model(hybrid.bundle).manifest.versions["onnxruntime"] == ort.__version__
    for name in (BACKBONE, MTP):
        model = onnx.load(hybrid.bundle / name, load_external_data=False)
        assert model.ir_version <= 11
        assert {entry.domain: entry.version for entry in model.opset_import} == {"": 24, "mtp": 1}
        bodies = {function.name for function in model.functions}
        assert {node.op_type for node in model.graph.node if node.domain == "mtp"} <= bodies
        assert PlainGraph(hybrid.bundle / name).outputs


def rewritten(bundle: Path, target: Path, **versions: int) -> Path:
    """A bundle whose backbone claims other versions, with a manifest that agrees."""
    copied = copy_of(bundle, target)
    model = onnx.load(copied / BACKBONE, load_external_data=False)
    model.ir_version = versions.get("ir", model.ir_version)
    for entry in model.opset_import:
        if entry.domain == "":
            entry.version = versions.get("opset", entry.version)
    (copied / BACKBONE).write_bytes(model.SerializeToString())
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"][BACKBONE] = vars(entry_of(copied / BACKBONE))
    (copied / "manifest.json").write_text(json.dumps(manifest))
    return copied


@pytest.mark.parametrize("versions", [{"ir": 99}, {"opset": 99}], ids=str)
def test_a_graph_of_a_newer_version_is_refused_with_what_it_needs(
    hybrid: Case, tmp_path: Path, versions: dict[str, int]
) -> None:
    """EX-10: the sentence says that a newer ONNX Runtime is needed; the control is rewritten with no change."""
    with refused("ONNX Runtime", "99"):
        generate(rewritten(hybrid.bundle, tmp_path / "out", **versions), PROMPT, 4, 2)
    same = rewritten(hybrid.bundle, tmp_path / "same")
    assert ids_of(same, PROMPT, 4, 2) == hybrid.oracle.greedy(PROMPT, 4)


def test_a_bundle_of_a_newer_runtime_is_refused_before_a_graph_is_opened(hybrid: Case, tmp_path: Path) -> None:
    """EX-10: found X, needs Y, from the manifest."""
    copied = copy_of(hybrid.bundle, tmp_path / "out")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["versions"]["onnxruntime"] = "99.1.0"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with refused("built with ONNX Runtime 99.1.0", f"this machine has {ort.__version__}", "mtp-export build"):
        generate(copied, PROMPT, 4, 2)


# --------------------------------------------------------------------------- EX-11: integer widths

IDS: dict[str, Any] = {
    "a list": [5, 6, 7],
    "a tuple": (5, 6, 7),
    "a range": range(5, 8),
    "int32": np.array([5, 6, 7], np.int32),
    "int64": np.array([5, 6, 7], np.int64),
    "uint32": np.array([5, 6, 7], np.uint32),
    "uint8": np.array([5, 6, 7], np.uint8),
    "NumPy scalars": [np.int32(5), np.int64(6), np.uint8(7)],
    "a strided view": np.array([5, 0, 6, 0, 7, 0])[::2],
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_every_integer_kind_gives_the_same_ids(hybrid: Case, ids: Any) -> None:
    """EX-11: widths and containers do not matter."""
    model = load_model(hybrid.bundle)
    end = model.complete(prompt_ids=ids, max_new_tokens=8, draft_tokens=2)
    assert list(end.token_ids) == hybrid.oracle.greedy(PROMPT, 8)


def test_a_torch_tensor_gives_the_same_ids(hybrid: Case) -> None:
    """EX-11: what a tokenizer of transformers returns."""
    torch = pytest.importorskip("torch", reason="torch is not installed; its tensors cannot be tried")
    model = load_model(hybrid.bundle)
    for dtype in (torch.int64, torch.int32):
        end = model.complete(prompt_ids=torch.tensor(PROMPT, dtype=dtype), max_new_tokens=8, draft_tokens=2)
        assert list(end.token_ids) == hybrid.oracle.greedy(PROMPT, 8)


@pytest.mark.parametrize("ids", [np.array([5.0, 6.0]), [5.0, 6.0], [[5, 6]], ["5"], [True, False], [5, None]], ids=str)
def test_anything_but_whole_numbers_in_a_row_is_refused(hybrid: Case, ids: Any) -> None:
    """EX-11: floats are not rounded, batches not flattened, words not parsed."""
    with refused("token ids must be integers"):
        load_model(hybrid.bundle).complete(prompt_ids=ids, max_new_tokens=8)


@pytest.mark.parametrize("token", [-1, 112, 2**31, 2**32 + 5, 2**63 - 1])
def test_an_id_outside_the_vocabulary_is_refused_and_never_wrapped(hybrid: Case, token: int) -> None:
    """EX-11: 2**32 + 5 is not 5."""
    with refused(f"token id {token}", "0 to 111"):
        generate(hybrid.bundle, [5, token], 4, 2)


def test_positions_are_int64_and_end_at_the_length_limit(hybrid: Case) -> None:
    """EX-11: the type of both graphs' positions, and a prompt past the limit refused with both numbers."""
    for name in (BACKBONE, MTP):
        graph = PlainGraph(hybrid.bundle / name)
        for value in ("input_ids", "position_ids", "past_length", "logit_rows"):
            assert graph.inputs[value].type == "tensor(int64)"
    with refused("the prompt has 64 tokens", "may have 64"):
        generate(hybrid.bundle, [5] * 64, 4, 2)
    assert len(ids_of(hybrid.bundle, [5] * 63, 4, 2)) == 1


# ------------------------------------------------------------------------------- EX-13: the mask


@pytest.mark.parametrize("start", [0, 1, 17])
def test_a_block_of_rows_equals_single_rows(attention: Case, start: int) -> None:
    """EX-13: K = 1..8; the control shifts what a row may see by one position."""
    graph, oracle = PlainGraph(attention.bundle / BACKBONE), attention.oracle
    ids = text(start + 9, seed=7)
    before = states_after(oracle, ids[:start])
    singles = []
    for i in range(9):
        states = states_after(oracle, ids[: start + i])
        singles.append(graph.run([[ids[start + i]]], [states], [start + i]).logits[0, 0])
    want = np.stack(singles)
    for draft_tokens in range(1, 9):
        block = graph.run([ids[start : start + draft_tokens + 1]], [before], [start]).logits[0]
        assert distance(block, want[: draft_tokens + 1]) < TOLERANCE
    assert distance(want, oracle.extend(ids[start:], before, start).logits) < TOLERANCE
    if start:
        # The row's own key is appended one place too early, as with a mask that is one short.
        short = graph.run([[ids[start]]], [states_after(oracle, ids[: start - 1])], [start - 1]).logits[0, 0]
        assert distance(short, want[0]) > FAULT, "this test cannot see a mask that is one short"


@pytest.mark.parametrize("start", [0, 1, 17])
@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_a_row_does_not_depend_on_later_rows(name: str, start: int, request: pytest.FixtureRequest) -> None:
    """EX-13: other tokens after row 0 leave it as it is, and change every row from theirs on."""
    case = request.getfixturevalue(name)
    graph = PlainGraph(case.bundle / BACKBONE)
    ids = text(start + 6, seed=8)
    before = states_after(case.oracle, ids[:start])
    block = ids[start:]
    first = graph.run([block], [before], [start]).logits[0]
    for changed in range(1, 6):
        other = [*block[:changed], *((token + 11) % 112 for token in block[changed:])]
        second = graph.run([other], [before], [start]).logits[0]
        assert distance(second[:changed], first[:changed]) < 1e-6
        assert min(distance(second[i], first[i]) for i in range(changed, 6)) > FAULT


# ------------------------------------------------------------------------------- EX-15: row counts


@pytest.mark.parametrize("seed", range(10, 30))
def test_ids_do_not_depend_on_the_number_of_rows(tmp_path: Path, seed: int) -> None:
    """EX-15: plain decoding and K = 1..7 agree, or part at a near tie that the bundle's promise allows."""
    case = make_case(tmp_path, seed=seed)
    right = case.oracle.greedy(PROMPT, 56)
    for threads, lengths in ((1, range(1, 8) if seed < 14 else (1, 3, 7)), (4, (3, 7) if seed == 10 else ())):
        if not lengths:
            continue
        model = load(case.bundle, threads=threads)
        plain = ids_of(model, PROMPT, 56)
        for draft_tokens in lengths:
            check_promise(model.manifest.numerics.promise, case.oracle, plain, ids_of(model, PROMPT, 56, draft_tokens))
        check_promise("near-tie", case.oracle, plain, right)


def test_control_an_id_that_no_near_tie_explains_breaks_the_promise(hybrid: Case) -> None:
    """EX-15: the check above refuses a different id at a clear margin, under either promise."""
    plain = hybrid.oracle.greedy(PROMPT, 8)
    other = [*plain[:4], (plain[4] + 1) % 112, *plain[5:]]
    for promise, message in (("exact", "promises exact rows"), ("near-tie", "part at place 4")):
        with pytest.raises(AssertionError, match=message):
            check_promise(promise, hybrid.oracle, plain, other)
        check_promise(promise, hybrid.oracle, plain, plain)


def check_promise(promise: str, oracle: Oracle, plain: list[int], other: list[int]) -> None:
    """Equal ids, or a first difference at a margin that float32 cannot decide."""
    if plain == other:
        return
    assert promise != "exact", f"the bundle promises exact rows, but {plain} became {other}"
    place = next(i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    logits = oracle.forward([*PROMPT, *plain[:place]]).logits[-1:]
    margin = top_two_margin(logits)
    assert margin < 1e-4 * np.abs(logits).max(), f"ids part at place {place} with a margin of {margin}"


def test_wide_margins_never_diverge(tmp_path: Path) -> None:
    """EX-15: chains have a margin of 32, so every K gives every id, with one thread and with four."""
    out = build_bundle(markov_checkpoint(tmp_path / "model", draft="third"), tmp_path / "out")
    want = [(6 + i) % 64 for i in range(58)]
    for threads in (1, 4):
        model = load(out, threads=threads)
        for draft_tokens in range(8):
            assert ids_of(model, [5], 58, draft_tokens) == want


def test_partly_right_drafts_give_the_ids_of_plain_decoding(tmp_path: Path) -> None:
    """EX-15: every accepted length occurs, so blocks of every size are kept and cut; the control keeps states."""
    checkpoint = partial_checkpoint(tmp_path / "model")
    loaded = load_checkpoint(checkpoint)
    prompt = [5, 6, 20]
    right = Oracle(loaded).greedy(prompt, 48)
    assert Oracle(loaded, broken="state_not_rolled_back").speculate(prompt, 48, 3).ids != right
    model = load_model(build_bundle(checkpoint, tmp_path / "out"))
    for draft_tokens in range(8):
        assert ids_of(model, prompt, 48, draft_tokens) == right
    end = generate(model, prompt, 48, 3)
    assert set(end.stats.emitted_histogram) == {1, 2, 3, 4}
    reference = Oracle(loaded).speculate(prompt, 48, 3)
    assert (end.stats.drafted, end.stats.accepted) == (sum(reference.drafted), sum(reference.accepted))


def test_the_promise_about_rows_is_measured_and_recorded(hybrid: Case) -> None:
    """EX-15: the claim is exact only where the build measured it, over at least eight rows."""
    numerics = load_model(hybrid.bundle).manifest.numerics
    assert numerics.rows >= 8
    assert (numerics.promise == "exact") == (numerics.first_difference is None)
