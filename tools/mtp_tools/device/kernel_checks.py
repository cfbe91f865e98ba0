"""Kernels on the device: right against float64, and the same bits for a row whatever runs beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mtp_engines.backends.torch.call import Call, Operator, Tensor
from mtp_tools.device.cases import Case, Cases, Sizes, wide
from mtp_tools.device.results import Results

_ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Greatest difference over the greatest value; both sides have the same rounded inputs."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class KernelChecks:
    """Checks of all kernels on one device."""

    def __init__(
        self, kernels: Mapping[str, Operator], sizes: Sizes, device: torch.device, results: Results, seed: int
    ) -> None:
        self._kernels, self._sizes, self._device, self._results = kernels, sizes, device, results
        self._seed = seed

    def run(self, dtypes: tuple[torch.dtype, ...], rows: tuple[int, ...]) -> None:
        """Every kernel in every type and for every number of rows."""
        for dtype in dtypes:
            cases = Cases(self._sizes, self._device, dtype, self._seed)
            for count in rows:
                self._right(cases, dtype, count)
            self._prefixes(cases, dtype, rows)
            self._places(cases, dtype, rows[-1])
            self._positions(cases, dtype, rows[-1])
        self._control()

    def _right(self, cases: Cases, dtype: torch.dtype, rows: int) -> None:
        accepted = min(rows, self._sizes.staged_rows) - 1
        made = [cases.delta(rows, accepted), cases.conv(rows, accepted), cases.append(rows), cases.attention(rows)]
        made.append(cases.product(rows, self._sizes.hidden, self._sizes.intermediate))
        if dtype is torch.float32:
            made.append(cases.accept(rows))
        for case in made:
            worst = self._worst(case)
            name = f"{case.operator} {_NAMES[dtype]} M={rows} against float64"
            self._results.claim("kernels", name, worst <= _ALLOWED[dtype], f"{worst:.1e}")

    def _worst(self, case: Case) -> float:
        worst = 0.0
        for got, expected in zip(case.run(self._kernels[case.operator]), case.expected, strict=True):
            if expected is not None:
                scale = max(float(np.abs(expected).max()), 1e-30)
                difference = np.abs(wide(got).reshape(expected.shape) - expected).max() / scale
                # NaN is no small difference.
                worst = float(difference) if not difference <= worst else worst
        return worst

    def _prefixes(self, cases: Cases, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
        """The first rows of the widest call are those of every narrower call."""
        most = rows[-1]
        made = [cases.delta(most, 1), cases.conv(most, 1), cases.attention(most)]
        made.append(cases.product(most, self._sizes.hidden, self._sizes.intermediate))
        for case in made:
            kernel = self._kernels[case.operator]
            whole = case.run(kernel)[0]
            same = all(torch.equal(case.run(kernel, 0, count)[0], whole[:, :count]) for count in rows)
            self._results.claim("bits", f"{case.operator} {_NAMES[dtype]} rows do not depend on M", same)

    def _places(self, cases: Cases, dtype: torch.dtype, rows: int) -> None:
        """A row of a product alone, at the first place of the tile, and at its own: also of the library's product."""
        case = cases.product(rows, self._sizes.hidden, self._sizes.intermediate)
        kernel = self._kernels[case.operator]
        whole = case.run(kernel)[0]
        same = all(torch.equal(case.run(kernel, row, 1)[0], whole[:, row : row + 1]) for row in range(rows))
        self._results.claim("bits", f"SkinnyProduct {_NAMES[dtype]} rows do not depend on their place", same)
        x, weight = case.inputs
        turned = torch.matmul(x, weight.T)
        rolled = torch.matmul(x.roll(1, 1), weight.T).roll(-1, 1)
        name = f"library product {_NAMES[dtype]} M={rows}"
        self._results.measured("bits", f"{name}: rows independent of place", str(torch.equal(turned, rolled)))
        alone = torch.cat([torch.matmul(x[:, row : row + 1], weight.T) for row in range(rows)], 1)
        self._results.measured("bits", f"{name}: equals M=1", str(torch.equal(turned, alone)))

    def _positions(self, cases: Cases, dtype: torch.dtype, rows: int) -> None:
        """A query row of attention alone behind the rows before it."""
        case = cases.attention(rows)
        kernel = self._kernels["PagedAttention"]
        whole = case.run(kernel)[0]
        query, *stored, lengths = case.inputs

        def alone(row: int) -> Tensor:
            inputs = [query[:, row : row + 1].contiguous(), *stored, lengths + row]
            return kernel(Call(inputs, {}, 1, self._device))[0]

        same = all(torch.equal(alone(row), whole[:, row : row + 1]) for row in range(rows))
        self._results.claim("bits", f"PagedAttention {_NAMES[dtype]} rows equal a decode of one row", same)

    def _control(self) -> None:
        """A stale count has to be seen by the comparison with float64."""
        cases = Cases(self._sizes, self._device, torch.float32, self._seed + 1)
        case = cases.delta(2, 1)
        case.inputs[10].add_(1)
        worst = self._worst(case)
        self._results.claim("kernels", "control: one accepted row too many is seen", worst > 1e-3, f"{worst:.1e}")
