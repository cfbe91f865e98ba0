"""The training loop: every schedule is a function of the step number alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_tools.train_tiny.layout import model_config
from mtp_tools.train_tiny.model import TinyModel
from mtp_tools.train_tiny.muon import Muon
from mtp_tools.train_tiny.objective import losses

# Matrices that Muon must not take: the embedding is a table, the others have a row a head.
VECTOR_LIKE = ("embed_tokens", "in_proj_a", "in_proj_b")


@dataclass(frozen=True)
class Schedule:
    """Everything that decides the weights, apart from the text, the versions and the machine."""

    steps: int
    seed: int
    threads: int
    batch: int = 12
    length: int = 256
    warmup_steps: int = 30
    constant_share: float = 0.4
    final_scale: float = 0.02
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    draft_weight: float = 0.3

    def scale(self, step: int) -> float:
        """Return the learning-rate factor: warm-up, constant, then linear decay."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        decayed = (step / self.steps - self.constant_share) / (1 - self.constant_share)
        return warmup * max(self.final_scale, 1 - max(0.0, decayed))

    def chained_steps(self, step: int) -> int:
        """Return how often the head is fed its own output: little at first, as it costs time."""
        if step < 0.4 * self.steps:
            return step % 2
        return (1, 3)[step % 2]


def train(tokens: Tensor, schedule: Schedule, report: Callable[[str], None]) -> TinyModel:
    """Train from scratch on int64[tokens] and return the model, in fp32."""
    _fix_arithmetic(schedule.threads)
    torch.manual_seed(schedule.seed)
    model = TinyModel(model_config())
    muon, adam = _optimisers(model, schedule)
    windows = torch.Generator().manual_seed(schedule.seed + 1)
    started, started_cpu = time.monotonic(), time.process_time()
    for step in range(schedule.steps):
        chained_steps = schedule.chained_steps(step)
        ids = _batch(tokens, schedule.batch, schedule.length + chained_steps, windows)
        loss = losses(model, ids, chained_steps)
        loss.total(schedule.draft_weight).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = schedule.scale(step)
        for group in adam.param_groups:
            group["lr"] = schedule.adam_rate * scale
        adam.step()
        muon.step(schedule.muon_rate * scale)
        model.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0 or step + 1 == schedule.steps:
            wall_s, cpu_s = time.monotonic() - started, time.process_time() - started_cpu
            seen = (step + 1) * schedule.batch * schedule.length
            agreement = " ".join(f"{share:.3f}" for share in loss.agreement)
            report(
                f"step {step + 1}/{schedule.steps} loss {loss.text.item():.3f} agree {agreement} "
                f"tokens/s {seen / wall_s:.0f} wall {wall_s:.0f} s cpu {cpu_s:.0f} s"
            )
    return model.eval()


def _fix_arithmetic(threads: int) -> None:
    """Pin what changes rounding on one machine: the number of threads, and denormal numbers."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would take a fifth of the time, and nothing here reads it unwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _optimisers(model: TinyModel, schedule: Schedule) -> tuple[Muon, torch.optim.AdamW]:
    """Give Muon the matrices inside the layers, and AdamW the embedding and all else."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and not any(part in name for part in VECTOR_LIKE)
        (matrices if is_matrix else others).append(parameter)
    muon = Muon(matrices, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return muon, adam


def _batch(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut int64[batch, length] windows at random places."""
    starts = torch.randint(0, len(tokens) - length, (batch,), generator=generator)
    return tokens[starts.unsqueeze(1) + torch.arange(length)]
