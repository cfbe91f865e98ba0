"""Acceptance on the device, by the kernel of `Accept` or by its body."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtp_engines.backends.torch.interpreter import Interpreter
from mtp_engines.backends.torch.kernels import kernels_for
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS


class Accepted(NamedTuple):
    """Outputs of `Accept`, in its order."""

    accepted: torch.Tensor
    accepted_rows: torch.Tensor
    emitted: torch.Tensor
    next_token: torch.Tensor


class Acceptor:
    """Greedy acceptance for a batch and a number of draft tokens."""

    def __init__(self, device: torch.device, batch: int, draft_tokens: int) -> None:
        operator = OPERATORS["Accept"]
        g = GraphBuilder("accept")
        inputs = [
            g.input("draft", "int64", ["batch", draft_tokens]),
            g.input("chosen", "int64", ["batch", draft_tokens + 1]),
        ]
        results = g.op_multi(operator.name, *inputs, outputs=operator.outputs, domain=DOMAIN)
        for name, value in zip(operator.outputs, results, strict=True):
            dtype = "int32" if name in ("accepted", "accepted_rows") else "int64"
            g.label(name, value, dtype, ["batch", draft_tokens + 1] if name == "emitted" else ["batch"])
            g.outputs.append(value)
        self._graph = Interpreter(g.model(domains=[DOMAIN]), device, kernels_for(device))
        self._into = {
            "accepted": torch.zeros(batch, dtype=torch.int32, device=device),
            "accepted_rows": torch.zeros(batch, dtype=torch.int32, device=device),
            "emitted": torch.zeros((batch, draft_tokens + 1), dtype=torch.int64, device=device),
            "next_token": torch.zeros(batch, dtype=torch.int64, device=device),
        }

    def enqueue(self, draft: torch.Tensor, chosen: torch.Tensor) -> Accepted:
        """int64[batch, draft_tokens] and int64[batch, draft_tokens + 1], contiguous."""
        self._graph.run({"draft": draft, "chosen": chosen}, self._into)
        return Accepted(**self._into)
