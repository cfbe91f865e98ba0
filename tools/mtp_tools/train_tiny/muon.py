"""The Muon optimiser in fp32: momentum whose matrix is made orthogonal before each update.

torch has one since 2.9, which works in bf16: slow on CPUs without bf16 instructions.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Newton-Schulz coefficients and step count of Jordan et al., "Muon" (2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon:
    """Nesterov momentum with orthogonalised updates, for two-dimensional weights only."""

    def __init__(self, weights: Iterable[nn.Parameter], momentum: float, weight_decay: float) -> None:
        self._weights = list(weights)
        self._buffers = [torch.zeros_like(weight) for weight in self._weights]
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients that the weights hold; a weight without one stays as it is."""
        by_shape: dict[torch.Size, list[int]] = {}
        updates: dict[int, Tensor] = {}
        for index, (weight, buffer) in enumerate(zip(self._weights, self._buffers, strict=True)):
            if weight.grad is None:
                continue
            buffer.lerp_(weight.grad, 1 - self._momentum)
            updates[index] = weight.grad.lerp(buffer, self._momentum)
            by_shape.setdefault(weight.shape, []).append(index)
        for (rows, columns), indices in by_shape.items():
            orthogonal = orthogonalised(torch.stack([updates[index] for index in indices]))
            scale = learning_rate * max(1.0, rows / columns) ** 0.5
            for index, update in zip(indices, orthogonal, strict=True):
                self._weights[index].mul_(1 - learning_rate * self._weight_decay)
                self._weights[index].add_(update, alpha=-scale)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return matrices [count, rows, columns] with all singular values moved near 1."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result
