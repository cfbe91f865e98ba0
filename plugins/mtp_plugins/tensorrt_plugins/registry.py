"""All plugins of TensorRT by name; a new one is a declaration beside its kernel and a line here."""

from __future__ import annotations

import contextlib
import hashlib
from importlib import metadata
from pathlib import Path

from mtp_plugins.accept import tensorrt as accept
from mtp_plugins.deferred_conv import tensorrt as deferred_conv
from mtp_plugins.deferred_delta import tensorrt as deferred_delta
from mtp_plugins.paged_attention import tensorrt as paged_attention
from mtp_plugins.paged_kv_append import tensorrt as paged_kv_append
from mtp_plugins.skinny_product import tensorrt as skinny_product
from mtp_plugins.tensorrt_plugins.declaration import Plugin

PLUGINS: dict[str, Plugin] = {
    plugin.name: plugin
    for plugin in (
        accept.PLUGIN,
        deferred_conv.PLUGIN,
        deferred_delta.PLUGIN,
        paged_attention.COMBINE,
        paged_attention.PARTIAL,
        paged_kv_append.PLUGIN,
        skinny_product.PLUGIN,
    )
}


def digest_of_plugins() -> str:
    """sha256 over all that the plugins' PTX and launches come from, and the version of Triton."""
    root = Path(__file__).parents[1]
    modules = sorted({plugin.kernel.split(":")[0].split(".")[1] for plugin in PLUGINS.values()})
    folders = [*(root / name for name in modules), root / "triton_kernels", root / "tensorrt_plugins"]
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    with contextlib.suppress(metadata.PackageNotFoundError):
        digest.update(metadata.version("triton").encode())
    return digest.hexdigest()
