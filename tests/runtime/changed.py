"""Bundles with one changed value, as a build would refuse them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from mtp_engines.bundle import MANIFEST_FILE, WEIGHTS, entry_of, open_bundle
from mtp_engines.contracts.manifest import MANIFEST, Manifest
from tests.support import copy_of


def changed(bundle: Path, out: Path, graph: str, tensor: str, at: tuple[int, ...], value: float) -> Path:
    """A copy of the bundle with one value of one tensor replaced, and the manifest's digests with it."""
    copy_of(bundle, out)
    proto = onnx.load(out / graph, load_external_data=False).graph
    (found,) = (initializer for initializer in proto.initializer if initializer.name == tensor)
    place = {entry.key: entry.value for entry in found.external_data}
    weights = np.memmap(out / WEIGHTS, np.float32, "r+", int(place["offset"]), tuple(found.dims))
    weights[at] = value
    weights.flush()
    manifest = _manifest(out)
    files = {**manifest.files, WEIGHTS: entry_of(out / WEIGHTS)}
    (out / MANIFEST_FILE).write_bytes(MANIFEST.dump_json(replace(manifest, files=files)))
    open_bundle(out, thorough=True)
    return out


def forty_after_eight(token: int) -> int:
    """A drafter's map for `markov_checkpoint`: id 40 is drafted after 8, which the target never meets."""
    return 39 if token == 8 else token


def _manifest(bundle: Path) -> Manifest:
    """The manifest without a check of the files."""
    return MANIFEST.validate_json((bundle / MANIFEST_FILE).read_bytes())
