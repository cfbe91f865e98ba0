"""Models for the cycle: the carried checkpoint's bundle, and published shapes with weights made up on the device."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.backends.onnxruntime_cuda.engine import OrtCudaEngine
from mtp_engines.backends.torch.engine import TorchEngine
from mtp_engines.backends.torch.tensors import dtype_of
from mtp_engines.bundle import open_bundle
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.precision import WEIGHT_TYPES, Precision
from mtp_exporter.families.description import Need
from mtp_exporter.graphs import backbone_graph, mtp_graph
from mtp_exporter.prepare import Ingredients, prepare
from mtp_exporter.storing.weights import shared_key
from mtp_tools.made_up.shapes import PublishedShape
from mtp_tools.made_up.write import write_headers

_BACKBONE, _MTP = Path("backbone"), Path("mtp")


@dataclass(frozen=True)
class Variant:
    """How an engine runs."""

    precision: Precision
    skinny: bool
    graphs: bool

    def __str__(self) -> str:
        return f"{self.precision}, {'skinny' if self.skinny else 'library'} products"


class CarriedModel:
    """A bundle of this project."""

    def __init__(self, directory: Path, device: torch.device, limits: Limits | None = None) -> None:
        """`limits` narrower than the bundle's make a run cheaper."""
        self.bundle, self.device = open_bundle(directory), device
        self.name = self.bundle.manifest.name
        self.spec: ModelSpec = self.bundle.manifest.model
        self.limits: Limits = limits or self.bundle.manifest.limits

    def engine(self, variant: Variant) -> TorchEngine:
        """The bundle on the device."""
        bundle = self.bundle
        return TorchEngine(
            self.spec,
            self.limits,
            load_graph,
            bundle.backbone,
            bundle.mtp,
            device=self.device,
            precision=variant.precision,
            skinny=variant.skinny,
            graphs=variant.graphs,
        )


class OrtModel:
    """The same bundle on ONNX Runtime."""

    def __init__(self, carried: CarriedModel) -> None:
        self._carried = carried
        self.name = f"{carried.name} on ONNX Runtime"
        self.spec, self.limits = carried.spec, carried.limits

    def engine(self, variant: Variant) -> OrtCudaEngine:
        """The bundle on the device."""
        bundle = self._carried.bundle
        return OrtCudaEngine(
            self.spec,
            self.limits,
            load_graph,
            bundle.backbone,
            bundle.mtp,
            device=self._carried.device,
            precision=variant.precision,
        )


class MadeUpModel:
    """A published shape; its weights exist on the device only, once for all engines."""

    def __init__(self, name: str, shape: PublishedShape, limits: Limits, device: torch.device, seed: int) -> None:
        self.name, self.limits, self._device = name, limits, device
        with tempfile.TemporaryDirectory() as place:
            write_headers(Path(place), shape)
            prepared = prepare(Ingredients(place))
        self.spec: ModelSpec = prepared.spec
        self._needs = {role: need for role, (need, _) in prepared.claimed.items()}
        keys = {role: shared_key(need, tensors) for role, (need, tensors) in prepared.claimed.items()}
        first: dict[object, str] = {}
        self._name_of = {role: first.setdefault(key, role) for role, key in keys.items()}
        self._generator = torch.Generator(device).manual_seed(seed)
        self._weights: dict[Precision, dict[str, torch.Tensor]] = {}

    def engine(self, variant: Variant) -> TorchEngine:
        """The model on the device."""
        if variant.precision not in self._weights:
            self._weights = {variant.precision: self._make(variant.precision)}
        return TorchEngine(
            self.spec,
            self.limits,
            self._graph,
            _BACKBONE,
            (_MTP,),
            device=self._device,
            precision=variant.precision,
            skinny=variant.skinny,
            graphs=variant.graphs,
            weights=self._weights[variant.precision],
        )

    @property
    def matrix_parameters(self) -> int:
        """Numbers that one row of the target multiplies with: all matrices but the head's and the embedding's rows."""
        target = (role for role in self._needs if not role.startswith("mtp.") and role != "embedding")
        return sum(math.prod(self._needs[role].shape) for role in target if len(self._needs[role].shape) > 1)

    def _graph(self, path: Path) -> ir.Model:
        tensors = {role: self._placeholder(role, need) for role, need in self._needs.items()}
        make = backbone_graph if path == _BACKBONE else mtp_graph
        return make(self.spec, self.limits, tensors)

    def _placeholder(self, role: str, need: Need) -> ir.ExternalTensor:
        """A weight of the right name and shape that no file holds."""
        size = 4 * math.prod(need.shape)
        return ir.ExternalTensor(
            "none", 0, size, ir.DataType.FLOAT, shape=ir.Shape(need.shape), name=self._name_of[role]
        )

    def _make(self, precision: Precision) -> dict[str, torch.Tensor]:
        half = dtype_of(WEIGHT_TYPES[precision])
        made: dict[str, torch.Tensor] = {}
        for role, need in self._needs.items():
            if self._name_of[role] in made:
                continue
            matrix = len(need.shape) == 2
            values = torch.empty(need.shape, dtype=half if matrix else torch.float32, device=self._device)
            if matrix:
                values.normal_(0.0, 0.02 if role == "embedding" else need.shape[1] ** -0.5, generator=self._generator)
            else:
                values.normal_(1.0 if role.endswith("norm") else 0.0, 0.1, generator=self._generator)
            made[self._name_of[role]] = values
        return made
