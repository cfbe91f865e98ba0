"""Which tensors of a checkpoint belong together as one quantised weight, by names and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mtp_exporter.quantised.unsupported import MODULE_MARKS, NESTED_MAIN
from mtp_exporter.reading.safetensors_file import FLOAT_TYPES, TensorInfo

# They scale what goes into a module, comes out of it or is cached, never its weight: in float32 nothing needs them.
ACTIVATION_ROLES = frozenset(
    {
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
        "input_global_scale",
        "activation_scale",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
    }
)
# Beside a packed `weight` these change its values or say that its method is another one.
_FOREIGN_ROLES = frozenset({"scale", "scales", "zeros", "SCB", "pre_quant_scale", "channel_scales", "theta", "pairs"})
# What follows the name of a fused expert tensor, which has no module of its own; other endings are other tensors.
_FUSED_ROLES = {
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_scale_2": "weight_scale_2",
    "_global_scale": "weight_global_scale",
    "_zero_point": "weight_zero_point",
    "_g_idx": "weight_g_idx",
    "_shape": "weight_shape",
    "_scales": "weight_scales",
    "_input_scale": "input_scale",
    "_activation_scale": "activation_scale",
}
_FUSED_MAINS = {"_packed": "weight_packed", "_blocks": "weight_blocks"}


@dataclass(frozen=True)
class Bundle:
    """One quantised weight."""

    name: str
    """The key that it has in an unquantised checkpoint."""
    roles: dict[str, TensorInfo]
    """Role, as if the weight were `X.weight` -> part."""
    dropped: tuple[str, ...]
    """Keys of the activation scales that go with it."""


def bundles(tensors: Mapping[str, TensorInfo]) -> Iterator[Bundle]:
    """Every quantised weight; tensors in none of them are plain."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    for module, leaves in modules.items():
        prefix = f"{module}." if module else ""
        taken = _module_roles(leaves, modules, prefix)
        if taken:
            yield _bundle(f"{prefix}weight", taken)
        elif NESTED_MAIN in leaves and module not in tensors:
            yield _bundle(module, leaves)
        for leaf in leaves:
            fused = _fused_roles(leaf, leaves)
            if fused and leaves[leaf].name not in {part.name for part in taken.values()}:
                yield _bundle(prefix + _fused_name(leaf), fused)


def _bundle(name: str, roles: Mapping[str, TensorInfo]) -> Bundle:
    dropped = tuple(part.name for role, part in roles.items() if role in ACTIVATION_ROLES)
    return Bundle(name, {role: part for role, part in roles.items() if role not in ACTIVATION_ROLES}, dropped)


def _module_roles(
    leaves: Mapping[str, TensorInfo], modules: Mapping[str, dict[str, TensorInfo]], prefix: str
) -> dict[str, TensorInfo]:
    """Parts of the weight of one module; none if its weight is plain or missing."""
    if "qweight" in leaves or any(leaf in MODULE_MARKS and _is_packed(leaves, leaf) for leaf in leaves):
        return {leaf: part for leaf, part in leaves.items() if leaf != "bias"}
    has_weight = "weight" in leaves and leaves["weight"].dtype not in FLOAT_TYPES
    if not has_weight and not _is_packed(leaves, "weight_packed"):
        return {}
    roles = {
        leaf: part
        for leaf, part in leaves.items()
        if leaf.startswith("weight_") or leaf == "weight" or leaf in _FOREIGN_ROLES | ACTIVATION_ROLES
    }
    nested = modules.get(f"{prefix}weight", {}) | modules.get(f"{prefix}weight.quant_state", {})
    return roles | nested


def _fused_roles(leaf: str, leaves: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Parts of a fused tensor if `leaf` is its main part."""
    if not _is_packed(leaves, leaf):
        return {}
    stem, main = _fused_name(leaf), "weight"
    if stem != leaf:
        main = _FUSED_MAINS[leaf[len(stem) :]]
    companions = {role: leaves[stem + ending] for ending, role in _FUSED_ROLES.items() if stem + ending in leaves}
    dtype = leaves[leaf].dtype
    is_main = (main == "weight" and dtype.startswith("F")) or (dtype in _packings(main) and _has_scale(companions))
    # `weight` of a module was looked at before; a scale may be fp8 itself.
    if not is_main or leaf.startswith("weight") or leaf.endswith(tuple(_FUSED_ROLES)) or leaf in _FOREIGN_ROLES:
        return {}
    return {main: leaves[leaf], **companions}


def _packings(main: str) -> tuple[str, ...]:
    """Integer dtypes that a part is packed into; on their own they are numbers like any."""
    return ("I32", "U8") if main == "weight_packed" else ("I8", "U8")


def _fused_name(leaf: str) -> str:
    for ending in _FUSED_MAINS:
        if leaf.endswith(ending):
            return leaf.removesuffix(ending)
    return leaf


def _is_packed(leaves: Mapping[str, TensorInfo], leaf: str) -> bool:
    return leaf in leaves and leaves[leaf].dtype not in FLOAT_TYPES


def _has_scale(companions: Mapping[str, TensorInfo]) -> bool:
    return not companions.keys().isdisjoint({"weight_scale", "weight_scale_inv", "weight_scales"})
