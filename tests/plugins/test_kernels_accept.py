"""The Accept kernel, interpreted, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_plugins.accept import OPERATOR
from mtp_plugins.accept.launch import launch
from mtp_plugins.accept.reference import accept
from tests.plugins.workers import Arrays, Worker, run_kernel

LARGEST = np.iinfo(np.int64).max


def feeds(draft_tokens: int) -> Arrays:
    """For every number of accepted tokens one sequence whose first wrong token is followed by right ones."""
    random = np.random.default_rng(draft_tokens)
    chosen = random.integers(1, 100, (draft_tokens + 1, draft_tokens + 1))
    draft = chosen[:, :draft_tokens].copy()
    for wrong in range(draft_tokens):
        # 2^32 further: equal to whoever compares 32 bits.
        draft[wrong, wrong] += 1 << 32
    return {"draft": draft, "chosen": chosen}


def run(worker: Worker, x: Arrays) -> Arrays:
    """Outputs of the kernel."""
    batch, draft_tokens = x["draft"].shape
    counts = np.full(batch, -7, np.int32)
    outputs = {
        "accepted": counts,
        "accepted_rows": counts,
        "emitted": np.full_like(x["chosen"], -7),
        "next_token": np.full(batch, -7, np.int64),
    }
    sizes = launch(batch=batch, draft_tokens=draft_tokens)
    return worker.call(run_kernel, "mtp_plugins.accept.kernel", "accept", sizes, x, outputs)


def reference(x: Arrays) -> Arrays:
    """Outputs of the reference."""
    results = [accept(draft, chosen) for draft, chosen in zip(x["draft"], x["chosen"], strict=True)]
    emitted = np.zeros_like(x["chosen"])
    for row, (_, ids, _) in zip(emitted, results, strict=True):
        row[: len(ids)] = ids
    accepted = np.array([count for count, _, _ in results], np.int32)
    tokens = np.array([token for _, _, token in results], np.int64)
    return {"accepted": accepted, "accepted_rows": accepted + 1, "emitted": emitted, "next_token": tokens}


@pytest.mark.parametrize("draft_tokens", [0, 1, 4, 15, 17])
def test_the_kernel_equals_the_reference(interpreter: Worker, draft_tokens: int) -> None:
    x = feeds(draft_tokens)
    got, want = run(interpreter, x), reference(x)
    assert set(want["accepted"]) == set(range(draft_tokens + 1))
    for name in OPERATOR.outputs:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        assert got[name].dtype == want[name].dtype


def test_large_ids_keep_all_their_bits(interpreter: Worker) -> None:
    x = {"draft": np.array([[LARGEST, 1]]), "chosen": np.array([[LARGEST, LARGEST - 1, 3]])}
    got = run(interpreter, x)
    np.testing.assert_array_equal(got["emitted"], [[LARGEST, LARGEST - 1, 0]])
    np.testing.assert_array_equal(got["next_token"], [LARGEST - 1])


def test_control_counting_all_right_tokens_is_no_prefix(interpreter: Worker) -> None:
    x = feeds(5)
    counted = (x["draft"] == x["chosen"][:, :5]).sum(axis=1)
    assert (run(interpreter, x)["accepted"] != counted).any(), "no sequence has right tokens behind a wrong one"
