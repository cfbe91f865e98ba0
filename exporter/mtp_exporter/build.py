"""Build a bundle: describe, claim every tensor, stream the weights, write the graphs, check, publish."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from mtp_engines import bundle as bundles
from mtp_engines.contracts.manifest import SCHEMA_VERSION, Limits, Manifest, Numerics, Parity
from mtp_engines.errors import BuildError, BundleError
from mtp_engines.lowering.onnxruntime_cpu import refuse_unsupported
from mtp_exporter.check import Check, check_graphs
from mtp_exporter.checkpoint import COPIED, Checkpoint, open_checkpoint
from mtp_exporter.end_tokens import end_tokens
from mtp_exporter.families import describe
from mtp_exporter.families.description import Description, Need, check_duplicates, claim
from mtp_exporter.graft import graft_head
from mtp_exporter.graphs import backbone_graph, mtp_graph
from mtp_exporter.resolve import resolve
from mtp_exporter.safetensors_file import TensorInfo
from mtp_exporter.sample import sample_ids
from mtp_exporter.source import Source
from mtp_exporter.weights import WeightWriter

BACKEND: Literal["onnxruntime-cpu"] = "onnxruntime-cpu"
WEIGHT_FORMATS = ("fp32",)
DRAFT_TOKENS = 7
MAX_DRAFT_TOKENS = 15
MAX_BATCH_SIZE = 256
DEFAULT_MODEL_LEN = 8192
_PACKAGES = ("mtp-export", "onnxruntime", "onnx-ir", "numpy", "tokenizers")

Claimed = dict[str, tuple[Need, TensorInfo]]


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose.

    Attributes:
        model: directory, hub id or short name.
        out: bundle directory; None means bundles/<name of the model>.
        weights: weight format of every matrix.
        max_model_len: tokens of prompt and answer together; None takes the model's own limit, at most 8192.
        max_batch_size: sequences that one engine can run together.
        draft_tokens: the largest K that the bundle will accept.
        mtp: False leaves the MTP head out.
        mtp_from: checkpoint to take the head from, if this one lost it.
    """

    model: str
    out: Path | None = None
    weights: str = "fp32"
    max_model_len: int | None = None
    max_batch_size: int = 1
    draft_tokens: int = DRAFT_TOKENS
    mtp: bool = True
    mtp_from: str | None = None


@dataclass(frozen=True)
class Reporter:
    """Told what a build does; the defaults say nothing.

    Attributes:
        phase: a phase begins: its name, how much there is to do, and in what unit ("B" for bytes).
        advance: so much of the phase was just done.
        note: a sentence that a user should see.
    """

    phase: Callable[[str, int, str], None] = lambda name, total, unit: None
    advance: Callable[[int], None] = lambda amount: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Built:
    """A finished build; `reused` if the bundle that stood there was made from the same input."""

    directory: Path
    manifest: Manifest
    reused: bool


def build(options: BuildOptions, reporter: Reporter | None = None) -> Built:
    """Build a bundle from a checkpoint.

    Returns:
        Where it is and what its manifest says.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or of an unknown kind.
        BuildError: an option cannot be honoured, the place cannot be written, or the check fails.
    """
    report = reporter or Reporter()
    _check_options(options)
    source = resolve(options.model)
    out = options.out or Path("bundles") / _name(options.model, source)
    # A link to another disk stays a link; the bundle goes where it points.
    out = out.resolve() if out.is_symlink() else out
    bundles.refuse_foreign(out)
    checkpoint = open_checkpoint(source)
    if options.mtp_from is not None:
        checkpoint = graft_head(checkpoint, open_checkpoint(resolve(options.mtp_from)))
        report.note(f"the MTP head is taken from {options.mtp_from}")
    description = describe(checkpoint, options.mtp)
    claimed = claim(checkpoint, description)
    check_duplicates(checkpoint, description)
    refuse_unsupported(description.spec)
    for reason, keys in description.ignored.items():
        report.note(f"ignored {len(keys)} {reason}")
    for text in description.notes:
        report.note(text)
    if not (source / "tokenizer.json").is_file():
        report.note("the checkpoint has no tokenizer.json: the bundle will take and give token ids, no text")
    manifest = _manifest(options, checkpoint, description, out)
    if not manifest.end_tokens:
        report.note("no end token was found: only a limit or a stop text will end a generation")
    if reusable := _reusable(out, manifest, checkpoint, claimed):
        report.note(f"{out} was built from the same checkpoint with the same options; it is used as it is")
        return Built(out, reusable, True)
    needed = _weight_bytes(claimed)
    try:
        with bundles.staging(out) as directory:
            _check_space(directory, needed)
            return _build_in(directory, out, manifest, checkpoint, claimed, report)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk is full, {needed / 1e9:.2f} GB are needed" if full else str(error.strerror or error)
        raise BuildError(f"{out} could not be written: {what}. Free some space or choose another --out.") from error


def _name(model: str, source: Path) -> str:
    """The last part of a hub id or short name, or the name of the local directory, whatever way it was written."""
    return source.resolve().name if Path(model).expanduser().exists() else model.rstrip("/").rsplit("/", 1)[-1]


def _build_in(
    directory: Path, out: Path, manifest: Manifest, checkpoint: Checkpoint, claimed: Claimed, report: Reporter
) -> Built:
    backbone, mtp, digests = _write_graphs(directory, manifest, claimed, report)
    for name in COPIED:
        if (checkpoint.directory / name).is_file():
            shutil.copyfile(checkpoint.directory / name, directory / name)
    report.phase("check against NumPy", len(manifest.model.layers), " layers")
    ids = sample_ids(checkpoint.directory, manifest.model.vocab_size, manifest.limits.max_model_len)
    check = check_graphs(manifest.model, manifest.limits, backbone, mtp, Source(claimed), ids, report.advance)
    _warn(check, report)
    complete = replace(
        manifest,
        source_digest=checkpoint.digest(digests),
        parity=check.parity,
        numerics=check.numerics,
        draft_agreement=check.agreement,
    )
    report.phase("digests", sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()), "B")
    return Built(out, bundles.publish(directory, out, complete, report.advance), False)


def _write_graphs(
    directory: Path, manifest: Manifest, claimed: Claimed, report: Reporter
) -> tuple[Path, Path | None, dict[str, str]]:
    (directory / bundles.GRAPHS).mkdir()
    distinct = {need.key: tensor.size for need, tensor in claimed.values()}
    report.phase("weights", sum(distinct.values()), "B")
    with WeightWriter(directory / bundles.WEIGHTS, report.advance) as writer:
        tensors = {role: writer.add(need, tensor) for role, (need, tensor) in claimed.items()}
    spec, limits = manifest.model, manifest.limits
    backbone = directory / bundles.BACKBONE
    ir.save(backbone_graph(spec, limits, tensors), backbone)
    if spec.mtp is None:
        return backbone, None, writer.digests
    ir.save(mtp_graph(spec, limits, tensors), directory / bundles.MTP)
    return backbone, directory / bundles.MTP, writer.digests


def _check_options(options: BuildOptions) -> None:
    if options.weights not in WEIGHT_FORMATS:
        raise BuildError(
            f"--weights {options.weights} has no kernel on the backend {BACKEND}; use one of: "
            f"{', '.join(WEIGHT_FORMATS)}."
        )
    if not 1 <= options.draft_tokens <= MAX_DRAFT_TOKENS:
        raise BuildError(
            f"--draft-tokens is {options.draft_tokens}, expected 1 to {MAX_DRAFT_TOKENS}. To build without "
            "speculation, use --no-mtp."
        )
    if not 1 <= options.max_batch_size <= MAX_BATCH_SIZE:
        raise BuildError(f"--max-batch-size is {options.max_batch_size}, expected 1 to {MAX_BATCH_SIZE}.")
    if options.mtp_from is not None and not options.mtp:
        raise BuildError("--mtp-from takes a head and --no-mtp leaves it out; give one of them.")
    if options.max_model_len is not None and options.max_model_len < 2:
        raise BuildError(f"--max-model-len is {options.max_model_len}, expected at least 2.")


def _manifest(options: BuildOptions, checkpoint: Checkpoint, description: Description, out: Path) -> Manifest:
    """Everything that is known before the first weight is read; the check's figures come later."""
    spec = description.spec
    length = options.max_model_len or min(spec.max_position, DEFAULT_MODEL_LEN)
    if length > spec.max_position:
        raise BuildError(
            f"--max-model-len is {length}, but the model was made for {spec.max_position} positions. Choose at "
            "most that."
        )
    limits = Limits(length, options.max_batch_size, options.draft_tokens)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=out.name,
        model=spec,
        limits=limits,
        backend=BACKEND,
        weights="fp32",
        end_tokens=end_tokens(checkpoint),
        source=options.model,
        source_digest="",
        parity=Parity(0, 0.0, "", 0.0),
        numerics=Numerics("near-tie", 0),
        draft_agreement=None,
        versions={name: version(name) for name in _PACKAGES},
    )


def _reusable(out: Path, wanted: Manifest, checkpoint: Checkpoint, claimed: Claimed) -> Manifest | None:
    """The manifest at `out` if it was made from the same input, to the last byte; a damaged bundle is built again."""
    if not (out / bundles.MANIFEST_FILE).is_file():
        return None
    try:
        found = bundles.open_bundle(out).manifest
    except BundleError:
        return None
    same = ("model", "limits", "weights", "backend", "versions", "end_tokens")
    if any(getattr(found, name) != getattr(wanted, name) for name in same):
        return None
    digests = {need.key: tensor.digest() for need, tensor in claimed.values()}
    return found if found.source_digest == checkpoint.digest(digests) else None


def _weight_bytes(claimed: Claimed) -> int:
    shapes = {(need.key, need.transform): need.shape for need, _ in claimed.values()}
    return sum(prod(shape) * 4 for shape in shapes.values())


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise BuildError(
            f"{directory.parent} has {free / 1e9:.2f} GB free, the bundle needs {needed / 1e9:.2f} GB. Free some space "
            "or choose another --out."
        )


def _warn(check: Check, report: Reporter) -> None:
    agreement = check.agreement
    if agreement and agreement.drafted >= 16 and agreement.accepted == 0:
        report.note(
            f"WARNING: none of {agreement.drafted} first drafts was right; the MTP head of this checkpoint looks "
            "broken or untrained. Output stays right, but speculation will only cost time"
        )
    if check.numerics.first_difference:
        report.note(
            f"WARNING: on this machine rows depend on their number (first at {check.numerics.first_difference}); "
            "greedy output may differ from plain decoding at near ties"
        )
