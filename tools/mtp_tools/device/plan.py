"""What a run does, in order of importance, and at which sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
import torch

from mtp_engines.backends.torch.kernels import kernels_for
from mtp_engines.contracts.manifest import Limits
from mtp_tools.device.cases import Sizes
from mtp_tools.device.clock import Clock
from mtp_tools.device.cycles import Amount, CycleChecks
from mtp_tools.device.kernel_checks import KernelChecks
from mtp_tools.device.kernel_times import KernelTimes
from mtp_tools.device.models import CarriedModel, MadeUpModel, OrtModel, Variant
from mtp_tools.device.results import Results
from mtp_tools.made_up.shapes import PUBLISHED

_TINY = Sizes(2, 2, 4, 16, 4, 2, 32, 40, 64, 48)
_REAL = Sizes(4, 16, 32, 128, 16, 4, 256, 4096, 2560, 9216)
_LIMITS = Limits(max_model_len=2048, max_batch_size=4, max_draft_tokens=7)
_TINY_LIMITS = Limits(max_model_len=24, max_batch_size=1, max_draft_tokens=2, prefill_chunk=4)


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    bundle: Path
    device: torch.device
    seed: int
    sizes: Sizes
    dtypes: tuple[torch.dtype, ...]
    rows: tuple[int, ...]
    variants: tuple[Variant, ...]
    amount: Amount
    repeats: int
    shape: str | None
    seconds: float

    @classmethod
    def dry(cls, bundle: Path, seed: int) -> Plan:
        """The whole script in little, on a CPU."""
        return cls(
            bundle=bundle,
            device=torch.device("cpu"),
            seed=seed,
            sizes=_TINY,
            dtypes=(torch.float32,),
            rows=(1, 2),
            variants=(Variant("fp32", skinny=False, graphs=True),),
            amount=Amount([3, 14, 15], new_tokens=3, text_rows=3, widths=(2,), acceptances=(1.0,), rounds=1),
            repeats=1,
            shape=None,
            seconds=600.0,
        )

    @classmethod
    def real(cls, bundle: Path, seed: int, shape: str | None, minutes: float) -> Plan:
        """Everything, on the current CUDA device."""
        variants = tuple(
            Variant(precision, skinny, graphs=True) for precision in ("bf16", "fp16") for skinny in (False, True)
        )
        return cls(
            bundle=bundle,
            device=torch.device("cuda", torch.cuda.current_device()),
            seed=seed,
            sizes=_REAL,
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            rows=(1, 2, 4, 8, 16),
            variants=variants,
            amount=Amount(
                [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26],
                new_tokens=96,
                text_rows=48,
                widths=(1, 2, 3, 4),
                acceptances=(1.0, 0.7, 0.0),
                rounds=5,
            ),
            repeats=30,
            shape=shape,
            seconds=60 * minutes,
        )


def run_plan(plan: Plan, results: Results) -> None:
    """Run the parts until the time is up; a part that was left out is named."""
    end = time.monotonic() + plan.seconds
    clock = Clock(plan.device, plan.repeats)
    kernels = kernels_for(plan.device)
    carried = CarriedModel(plan.bundle, plan.device, None if plan.device.type == "cuda" else _TINY_LIMITS)
    checks = CycleChecks(carried, plan.amount, plan.device, results)

    def kernel_checks() -> None:
        KernelChecks(kernels, plan.sizes, plan.device, results, plan.seed).run(plan.dtypes, plan.rows)

    def kernel_times() -> None:
        bandwidth = clock.bandwidth(1 << 30 if plan.device.type == "cuda" else 1 << 20)
        results.measured("times", "bandwidth of a copy, read and written", f"{bandwidth / 1e9:.0f} GB/s")
        KernelTimes(kernels, plan.sizes, clock, results, plan.device).run(plan.rows, bandwidth)

    def cycles() -> None:
        for variant in plan.variants:
            _cycles(checks, variant)

    def onnxruntime() -> None:
        CycleChecks(OrtModel(carried), plan.amount, plan.device, results).run(
            Variant("fp16", skinny=False, graphs=False)
        )

    parts: list[tuple[str, Callable[[], None]]] = [
        ("kernels against float64", kernel_checks),
        ("cycles of the carried checkpoint", cycles),
        ("times of kernels", kernel_times),
    ]
    if "CUDAExecutionProvider" in ort.get_available_providers() or plan.device.type != "cuda":
        parts.append(("cycles of the carried checkpoint on ONNX Runtime", onnxruntime))
    else:
        results.measured("plan", "cycles on ONNX Runtime", "left out: it has no CUDA provider here")
    if plan.shape is not None:
        parts.append((f"cycles of the {plan.shape} shape", lambda: _made_up(plan, results)))
    for name, part in parts:
        if time.monotonic() > end:
            results.measured("plan", name, f"left out: {plan.seconds / 60:.0f} minutes are over")
        else:
            part()


def _made_up(plan: Plan, results: Results) -> None:
    assert plan.shape is not None
    model = MadeUpModel(plan.shape, PUBLISHED[plan.shape], _LIMITS, plan.device, plan.seed)
    checks = CycleChecks(model, plan.amount, plan.device, results)
    for skinny in (False, True):
        _cycles(checks, Variant("bf16", skinny, graphs=True))


def _cycles(checks: CycleChecks, variant: Variant) -> None:
    known = checks.run(variant)
    checks.split(variant)
    checks.times(variant, known)
