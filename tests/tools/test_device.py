"""The script for a CUDA device, run dry: every part of it on the CPU at tiny sizes, and faults that it must see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_engines.contracts.manifest import Limits
from mtp_tools.device.cycles import Amount, CycleChecks, Script
from mtp_tools.device.models import MadeUpModel, Variant
from mtp_tools.device.results import Results
from mtp_tools.made_up import shapes
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle

# Triton's interpreter takes milliseconds for every program of a kernel: one for each head of each layer.
TINY = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAULT = """
import sys
import torch
from dataclasses import replace
from pathlib import Path
from mtp_engines.backends.torch import kernels
from mtp_tools.device.kernel_checks import KernelChecks
from mtp_tools.device.plan import Plan
from mtp_tools.device.results import Results

plan = Plan.dry(Path("unused"), 7)
right = kernels.kernels_for(plan.device)
for operator, place in (fault.split(":") for fault in sys.argv[1:]):

    def wrong(call):
        call.inputs[int(place)].add_(1)
        return right[operator](call)

    results = Results({}, lambda line: None)
    checks = KernelChecks({**right, operator: wrong}, plan.sizes, plan.device, results, 7)
    checks.run((torch.float32,), (1,))
    print(" ".join(sorted({line.name.split()[0] for line in results.failed})))
"""


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process whose Triton kernels run in the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("device")
    checkpoint = random_checkpoint(place / "checkpoint", seed=3, **TINY)
    return build_bundle(checkpoint, place / "bundle", draft_tokens=2)


def test_the_dry_run_goes_through_every_part(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = interpreted("-m", "mtp_tools.device", "--bundle", str(bundle), "--dry-run", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every claim holds" in done.stdout
    result = json.loads(out.read_text())
    assert "no figure here is one of a device" in result["about"]["device"]
    sections = {line["section"] for line in result["lines"]}
    assert sections == {"kernels", "bits", "cycles", "graphs", "split", "speed", "times"}
    kernels = {line["name"].split()[0] for line in result["lines"] if line["section"] == "kernels"}
    assert kernels >= {"Accept", "DeferredConv", "DeferredDelta", "PagedAttention", "PagedKvAppend", "SkinnyProduct"}
    assert any("ONNX Runtime" in line["name"] for line in result["lines"])


def test_control_a_wrong_kernel_fails_the_run() -> None:
    # An input that is one too great: accepted rows, accepted rows, lengths, x, chosen.
    faults = {"DeferredDelta": 10, "DeferredConv": 4, "PagedKvAppend": 5, "SkinnyProduct": 0, "Accept": 1}
    done = interpreted("-c", FAULT, *(f"{operator}:{place}" for operator, place in faults.items()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(faults)


def test_without_a_device_the_run_is_refused(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_tools.device", "--bundle", str(bundle)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    assert "--dry-run" in done.stderr


def test_a_made_up_shape_runs_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape's weights exist on the device only; the script runs the 2B shape so."""
    for name, value in {"VOCAB": 96, "HEAD_DIM": 32, "DELTA_DIM": 16, "KEY_HEADS": 2}.items():
        monkeypatch.setattr(shapes, name, value)
    shape = shapes.PublishedShape(4, 48, 64, 2, 1, 4, True)
    limits = Limits(max_model_len=64, max_batch_size=1, max_draft_tokens=3, prefill_chunk=16)
    model = MadeUpModel("little", shape, limits, torch.device("cpu"), 1)
    results = Results({}, lambda line: None)
    amount = Amount([3, 14, 15], new_tokens=5, text_rows=4, widths=(3,), acceptances=(1.0,), rounds=1)
    checks = CycleChecks(model, amount, torch.device("cpu"), results)
    known = checks.run(Variant("bf16", skinny=False, graphs=True))
    assert len(known) == 3 + 5
    assert results.failed == []
    checks.times(Variant("bf16", skinny=False, graphs=True), known)
    speed = {line.name: line.value for line in results.lines if line.section == "speed"}
    assert len(speed) == 1
    # What a script of right tokens is for: a cycle then emits K + 1 tokens, and a wrong one emits a single token.
    sequences = model.engine(Variant("bf16", skinny=False, graphs=True)).sequences()
    for acceptance, emitted in ((1.0, 4), (0.0, 1)):
        sequences.reset()
        sequences.redraft(Script(known, acceptance, 96, torch.device("cpu"), 5))
        sequences.prefill(np.array([[3, 14, 15]]), drafting=True)
        assert len(sequences.cycle(3).emitted[0]) == emitted
