"""What a user may choose when a bundle is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKENDS = ("onnxruntime", "torch", "tensorrt")
DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class EngineOptions:
    """How to open a bundle.

    Attributes:
        threads: intra-op threads on a CPU; 0 chooses.
        backend: one of `BACKENDS`; None takes what the bundle was built for.
        device: where it runs; None takes what the bundle was built for, or what the backend prefers.
        graphs: False runs without CUDA graphs.
    """

    threads: int = 0
    backend: str | None = None
    device: DeviceKind | None = None
    graphs: bool = True
