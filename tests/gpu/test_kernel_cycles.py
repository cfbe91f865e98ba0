"""Whole cycles through the real kernels and the code that launches them, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_plugins.registry import OPERATORS
from tests.fixtures.checkpoints import partial_checkpoint
from tests.plugins.workers import missing
from tests.support import build_bundle

SIZES: dict[str, Any] = {
    "size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "noise": 0.15,
    "head_noise": 0.3,
    "seed": 5,
}
# float32 in another order of sums; worst found: 6e-7 of the greatest value. A wrong kernel moves more than 1e-2.
STATES, VISIBLE = 1e-5, 1e-2
DEVICE_KERNELS = {"Accept", "DeferredConv", "DeferredDelta", "PagedAttention", "PagedKvAppend", "SkinnyProduct"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Comparisons by name: `library`, `skinny`, and every kernel that was made wrong."""
    if absent := missing():
        pytest.skip(f"{' and '.join(absent)} not installed")
    place = tmp_path_factory.mktemp("kernels")
    bundle = build_bundle(partial_checkpoint(place / "checkpoint", **SIZES), place / "bundle", draft_tokens=2)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernel_cycles", str(bundle)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
        cwd=root,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("form", ["library", "skinny"])
def test_cycles_by_kernels_say_what_cycles_by_bodies_say(compared: dict[str, dict[str, Any]], form: str) -> None:
    found = compared[form]
    assert found["ids"] == found["body_ids"]
    assert found["drafts"] == found["body_drafts"]
    assert set(found["accepted"]) == {0, 1, 2}, "not every accepted count was reached"
    assert found["state_error"] < STATES
    used = DEVICE_KERNELS - ({"SkinnyProduct"} if form == "library" else set())
    assert set(found["runs"]) == used
    assert all(count >= len(found["accepted"]) for count in found["runs"].values())


@pytest.mark.parametrize("kernel", sorted(DEVICE_KERNELS))
def test_control_a_wrong_kernel_is_seen(compared: dict[str, dict[str, Any]], kernel: str) -> None:
    found = compared[kernel]
    wrong_states = found["state_error"] is None or found["state_error"] > VISIBLE
    assert wrong_states or found["ids"] != found["body_ids"], f"these tests cannot see a wrong {kernel}"


def test_every_kernel_of_a_gpu_is_an_operator_that_was_looked_at() -> None:
    assert set(OPERATORS) >= DEVICE_KERNELS
