"""Quantised checkpoints: the tensors on disk as the floats that they stand for.

What a tensor is, its dtype, its shape and the tensors beside it say; the configuration settles only
what they leave open, and a contradiction is refused. One file a method: `scaled` (fp8 and int8 with
scales), `packed` (compressed-tensors), `gptq`, `awq`, and `unsupported` for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mtp_exporter.quantised.awq import awq_tensor
from mtp_exporter.quantised.bundles import Bundle, bundles
from mtp_exporter.quantised.gptq import gptq_tensor
from mtp_exporter.quantised.packed import packed_tensor
from mtp_exporter.quantised.raw import FP8_TYPES, check_size
from mtp_exporter.quantised.scaled import scaled_tensor
from mtp_exporter.quantised.settings import Settings, read_settings
from mtp_exporter.quantised.stored import StoredTensor, UnreadableError
from mtp_exporter.quantised.unsupported import Unsupported, has_mark, unsupported
from mtp_exporter.reading.safetensors_file import TensorInfo

__all__ = ["StoredTensor", "Unsupported", "describe_methods", "logical_tensors"]


def logical_tensors(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors that an unquantised checkpoint would hold, under the keys that they would have there.

    Plain tensors stay as they are. Parts of a quantised weight become one tensor; scales of activations
    that go with it are left out. A weight that cannot be decoded becomes `Unsupported`, which refuses
    when it is read. A part whose weight is missing stays under its own key. No weights are read here.

    Raises:
        CheckpointError: a file got shorter since its header was read.
    """
    settings = read_settings(config)
    logical: dict[str, StoredTensor] = {}
    parts: set[str] = set()
    found = list(bundles(tensors))
    names = Counter(bundle.name for bundle in found)
    for bundle in found:
        parts.update(bundle.dropped, (part.name for part in bundle.roles.values()))
        logical[bundle.name] = _decoded(bundle, tensors, settings, names[bundle.name] > 1)
    # A plain tensor under the key of a quantised one is part of the contradiction that was refused above.
    return {name: tensor for name, tensor in tensors.items() if name not in parts and name not in logical} | logical


def describe_methods(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Method -> number of tensors stored in it; plain ones count under their dtype."""
    return dict(sorted(Counter(tensor.dtype for tensor in tensors.values()).items()))


def _decoded(bundle: Bundle, tensors: Mapping[str, TensorInfo], settings: Settings, is_double: bool) -> StoredTensor:
    name, roles = bundle.name, bundle.roles
    forms = [role for role in ("weight", "qweight", "weight_packed") if role in roles]
    is_beside_plain = name in tensors and all(part.name != name for part in roles.values())
    if is_double or is_beside_plain or len(forms) > 1:
        return unsupported(name, roles, "it is there in more than one form")
    try:
        for part in roles.values():
            check_size(part)
        return _by_method(name, roles, settings)
    except UnreadableError as error:
        return unsupported(name, roles, str(error))


def _by_method(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> StoredTensor:
    """Raises:
    UnreadableError: the parts are those of a known method and do not fit together.
    """
    if "qweight" in roles:
        return _by_packing(name, roles, settings)
    if "weight_packed" in roles and roles["weight_packed"].dtype == "I32":
        return packed_tensor(name, roles, settings)
    weight = roles.get("weight")
    if weight is not None and (weight.dtype in FP8_TYPES or (weight.dtype == "I8" and not has_mark(roles))):
        return scaled_tensor(name, roles, settings)
    return unsupported(name, roles)


def _by_packing(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> StoredTensor:
    """GPTQ and AWQ have the same names; qweight is as wide as the scales in one, an eighth of it in the other."""
    weight, zeros, scales = (roles.get(role) for role in ("qweight", "qzeros", "scales"))
    if weight is None or zeros is None or scales is None:
        raise UnreadableError("it has no qzeros or no scales")
    if (weight.dtype, zeros.dtype) != ("I32", "I32") or {len(p.shape) for p in (weight, zeros, scales)} != {2}:
        raise UnreadableError("its qweight and qzeros are not matrices of I32")
    if weight.shape[1] == scales.shape[1]:
        return gptq_tensor(name, roles, settings)
    if weight.shape[1] * 8 == scales.shape[1]:
        return awq_tensor(name, roles, settings)
    raise UnreadableError(
        f"qweight {list(weight.shape)} and scales {list(scales.shape)} fit neither GPTQ nor AWQ in its gemm layout"
    )
