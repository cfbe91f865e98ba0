"""Canonical graphs against what the CPU engine runs, and the commit graph against running the rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.contracts import names
from mtp_engines.lowering.heads import head_models, without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.graph import DOMAIN
from tests.engines.conftest import Case
from tests.engines.feeds import empty_feed

IDS = np.random.default_rng(1).integers(0, 112, (1, 9))
# The same float32 sums in another order; a wrong wiring moves values by more than 1e-1.
TOLERANCE = 1e-3


def test_the_canonical_graph_runs_by_itself_and_equals_the_engine(case: Case) -> None:
    session = ort.InferenceSession(case.model.bundle.backbone, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    feed = empty_feed(session, IDS) | {names.LOGIT_ROWS: np.array([2])}
    got = dict(zip(outputs, session.run(None, feed), strict=True))
    sequences = case.model.engine.sequences()
    hidden = sequences.verify(IDS, 2).hidden
    np.testing.assert_allclose(got[names.HIDDEN], hidden, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got[names.LOGITS][0], sequences.logits(hidden[0, -2:]), rtol=0, atol=TOLERANCE)
    sequences.commit(np.array([9]))
    for name, value in sequences.snapshot(0).items():
        present = name.replace("past_key_values", "present").replace("past.", "present.")
        cached = got[present][0][:, :9] if "key_values" in name else got[present][0]
        np.testing.assert_allclose(cached, value, rtol=0, atol=TOLERANCE, err_msg=name)
    wrong = session.run([names.HIDDEN], feed | {names.POSITION_IDS: feed[names.POSITION_IDS][:, ::-1].copy()})[0]
    assert np.abs(wrong - hidden).max() > 100 * TOLERANCE, "control: this test cannot see wrong positions"


def test_lowering_leaves_no_canonical_node_and_no_vocabulary_matrix_in_the_backbone(case: Case) -> None:
    spec = case.model.engine.spec
    canonical = ir.load(case.model.bundle.backbone)
    assert any(node.domain == DOMAIN for node in canonical.graph), "control: the canonical graph has custom nodes"
    whole = lower(ir.load(case.model.bundle.backbone))
    cut = lower(without_head(canonical))
    assert not any(node.domain == DOMAIN for node in cut.graph)

    def vocabulary_products(model: ir.Model) -> int:
        products = [node for node in model.graph if node.op_type == "FusedMatMul"]
        return sum(node.inputs[1].shape[0] == spec.vocab_size for node in products)

    assert vocabulary_products(whole) == 1, "control: with the head there is one"
    assert vocabulary_products(cut) == 0
    assert [value.name for value in cut.graph.inputs if value.name == names.LOGIT_ROWS] == []
    assert len(head_models(ir.load(case.model.bundle.backbone)).score.graph.initializers) == 1


@pytest.mark.parametrize("kept", range(6))
def test_a_commit_equals_running_only_the_kept_rows_to_the_last_bit(case: Case, kept: int) -> None:
    prompt, block = IDS[:, :4], IDS[:, 3:8]
    staged, plain = case.model.engine.sequences(), case.model.engine.sequences()
    for sequences in (staged, plain):
        sequences.verify(prompt, 0)
        sequences.commit(np.array([4]))
    staged.verify(block, 5)
    staged.commit(np.array([kept]))
    for row in range(kept):
        plain.verify(block[:, row : row + 1], 1)
        plain.commit(np.array([1]))
    assert staged.lengths.tolist() == plain.lengths.tolist()
    for name, value in plain.snapshot(0).items():
        np.testing.assert_array_equal(staged.snapshot(0)[name], value, err_msg=name)


def test_control_a_commit_of_one_row_too_many_is_noticed(case: Case) -> None:
    states = []
    for kept in (2, 3):
        sequences = case.model.engine.sequences()
        sequences.verify(IDS[:, :5], 5)
        sequences.commit(np.array([kept]))
        states.append(sequences.snapshot(0))
    recurrent = [name for name in states[0] if "recurrent" in name or "conv" in name]
    assert recurrent
    assert all(not np.array_equal(states[0][name], states[1][name]) for name in recurrent)


def test_prompts_of_different_lengths_are_prefilled_in_one_wide_call(case: Case) -> None:
    """Wider than any draft: a batch replays what each sequence keeps, one sequence alone never needs to."""
    prompts = np.random.default_rng(2).integers(0, 112, (3, 20))
    kept = np.array([20, 7, 0])
    together = case.model.engine.sequences(3)
    together.verify(prompts, 0)
    together.commit(kept)
    for index, length in enumerate(kept[:2]):
        alone = case.model.engine.sequences()
        alone.verify(prompts[index : index + 1, :length], 0)
        alone.commit(np.array([length]))
        for name, value in alone.snapshot(0).items():
            np.testing.assert_array_equal(together.snapshot(index)[name], value, err_msg=name)
    assert not any(value.any() for value in together.snapshot(2).values()), "a sequence that kept nothing is empty"


def test_a_fault_in_a_replay_leaves_the_committed_state(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_engines.backends.onnxruntime_cpu import steps as module

    # As in a company, where a commit does not wait for the next run.
    monkeypatch.setattr(module.Step, "defers", False)
    sequences = case.model.engine.sequences()
    sequences.verify(IDS[:, :4], 0)
    sequences.commit(np.array([4]))
    before = sequences.snapshot(0)
    sequences.verify(IDS[:, 4:8], 4)
    run = module.Bound.run

    def fails(self: object) -> None:
        run(self)  # type: ignore[arg-type]
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(module.Bound, "run", fails)
        with pytest.raises(MemoryError):
            sequences.commit(np.array([2]))
    assert sequences.lengths.tolist() == [4]
    for name, value in sequences.snapshot(0).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
