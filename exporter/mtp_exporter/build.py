"""Build a bundle: describe, claim every tensor, stream the weights, write the graphs, check, publish."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from mtp_engines import bundle as bundles
from mtp_engines.contracts.manifest import (
    SCHEMA_VERSION,
    DraftVocabulary,
    Limits,
    Manifest,
    Numerics,
    Parity,
    Quality,
    WeightFormats,
)
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import BuildError, BundleError
from mtp_exporter.backends import check_backend, with_backend
from mtp_exporter.checking.check import Check, check_graphs
from mtp_exporter.checking.quality import QUALITY_ROWS, measure_quality
from mtp_exporter.checking.sample import SAMPLE_ROWS, sample_ids
from mtp_exporter.draft_ids.choice import Wish, choose_draft_vocabulary, untimed
from mtp_exporter.draft_ids.cost import STEPS, time_draft_step
from mtp_exporter.graphs import backbone_graph, mtp_graph
from mtp_exporter.options import BuildOptions, check_options
from mtp_exporter.prepare import Prepared, prepare
from mtp_exporter.reading.checkpoint import COPIED
from mtp_exporter.reading.end_tokens import end_tokens
from mtp_exporter.reading.resolve import resolve
from mtp_exporter.storing.weights import WeightWriter

DRAFT_TOKENS = 7
DEFAULT_MODEL_LEN = 8192
_PACKAGES = ("mtp-export", "onnxruntime", "onnx-ir", "numpy", "tokenizers")


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
    check_options(options)
    check_backend(options.backend)
    out = options.out or Path("bundles") / _name(options.model, resolve(options.model))
    # A link to another disk stays a link; the bundle goes where it points.
    out = out.resolve() if out.is_symlink() else out
    bundles.refuse_foreign(out)
    prepared = prepare(options.ingredients)
    for text in prepared.notes:
        report.note(text)
    if not (prepared.directory / "tokenizer.json").is_file():
        report.note("the checkpoint has no tokenizer.json: the bundle will take and give token ids, no text")
    prepared, vocabulary = _with_draft_vocabulary(options, prepared, report)
    manifest = replace(_manifest(options, prepared, out), draft_vocabulary=vocabulary)
    if not manifest.end_tokens:
        report.note("no end token was found: only a limit or a stop text will end a generation")
    if reusable := _reusable(out, manifest, prepared):
        report.note(f"{out} was built from the same checkpoint with the same options; it is used as it is")
        return _for_backend(Built(out, reusable, True), options, prepared, report)
    if (out / bundles.ENGINES).is_dir():
        report.note(f"the engines in {out} were built from other graphs and go when the new bundle takes its place")
    built = _write(out, manifest, prepared, report)
    return _for_backend(built, options, prepared, report)


def _with_draft_vocabulary(
    options: BuildOptions, prepared: Prepared, report: Reporter
) -> tuple[Prepared, DraftVocabulary | None]:
    if options.draft_vocab is None:
        return prepared, None
    wish = Wish(options.draft_vocab, options.draft_vocab_text, {token.id for token in end_tokens(prepared.checkpoint)})
    if sizes := [path.stat().st_size for path in wish.texts if path.is_file()]:
        report.phase("tokens of the text", sum(sizes), "B")
    chosen = choose_draft_vocabulary(prepared, wish, options.formats, report.advance)
    if chosen.note:
        report.note(chosen.note)
    return chosen.prepared, chosen.vocabulary


def _for_backend(built: Built, options: BuildOptions, prepared: Prepared, report: Reporter) -> Built:
    """Add what the backend needs, which can come later than the graphs and more than once."""
    bundle = bundles.Bundle(built.directory, built.manifest)
    spec, limits = built.manifest.model, built.manifest.limits
    ids = sample_ids(prepared.checkpoint.directory, spec.vocab_size, min(SAMPLE_ROWS, limits.max_model_len))
    manifest = with_backend(bundle, options.backend, ids, report.phase, report.note)
    if manifest != built.manifest:
        try:
            bundles.rewrite_manifest(bundle, manifest)
        except OSError as error:
            raise BuildError(
                f"{built.directory} could not be written: {error.strerror}. Make it writable, or choose another --out."
            ) from error
    return replace(built, manifest=manifest)


def _write(out: Path, manifest: Manifest, prepared: Prepared, report: Reporter) -> Built:
    """Graphs, weights, check and manifest, aside and then at `out`."""
    needed = sum(prepared.distinct(manifest.weights).values())
    try:
        with bundles.staging(out) as directory:
            _check_space(directory, needed)
            return _build_in(directory, out, manifest, prepared, report)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk is full, {needed / 1e9:.2f} GB are needed" if full else str(error.strerror or error)
        raise BuildError(f"{out} could not be written: {what}. Free some space or choose another --out.") from error


def _name(model: str, source: Path) -> str:
    """The last part of a hub id or short name, or the name of the local directory, whatever way it was written."""
    return source.resolve().name if Path(model).expanduser().exists() else model.rstrip("/").rsplit("/", 1)[-1]


def _build_in(directory: Path, out: Path, manifest: Manifest, prepared: Prepared, report: Reporter) -> Built:
    checkpoint = prepared.checkpoint
    backbone, heads, digests = _write_graphs(directory, manifest, prepared, report)
    for name in COPIED:
        if (checkpoint.directory / name).is_file():
            shutil.copyfile(checkpoint.directory / name, directory / name)
    report.phase("check against NumPy", len(manifest.model.layers), " layers")
    rows = min(SAMPLE_ROWS, manifest.limits.max_model_len)
    ids = sample_ids(checkpoint.directory, manifest.model.vocab_size, rows)
    stored = prepared.stored(manifest.weights)
    check = check_graphs(manifest.model, manifest.limits, backbone, heads, stored, ids, report.advance)
    _warn(check, report)
    vocabulary = manifest.draft_vocabulary
    if vocabulary is not None:
        report.phase("draft step", STEPS, " steps")
        vocabulary = time_draft_step(manifest.model, manifest.limits, backbone, heads[0], vocabulary, report.advance)
    complete = replace(
        manifest,
        source_digest=checkpoint.digest(digests),
        parity=check.parity,
        numerics=check.numerics,
        draft_agreement=check.agreement,
        quality=_quality(manifest, backbone, prepared, report),
        draft_vocabulary=vocabulary,
    )
    report.phase("digests", sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()), "B")
    return Built(out, bundles.publish(directory, out, complete, report.advance), False)


def _quality(manifest: Manifest, backbone: Path, prepared: Prepared, report: Reporter) -> Quality | None:
    """What the formats cost, measured where any weight was rounded."""
    if manifest.weights == WeightFormats():
        return None
    spec = manifest.model if manifest.model.mtp is None else replace(manifest.model, mtp=None)
    rows = min(QUALITY_ROWS, manifest.limits.max_model_len)
    ids = sample_ids(prepared.checkpoint.directory, spec.vocab_size, rows)
    report.phase("quality against float32", len(spec.layers), " layers")
    return measure_quality(spec, manifest.limits, backbone, prepared.source, ids, report.advance)


def _write_graphs(
    directory: Path, manifest: Manifest, prepared: Prepared, report: Reporter
) -> tuple[Path, tuple[Path, ...], dict[str, str]]:
    (directory / bundles.GRAPHS).mkdir()
    report.phase("weights", sum(prepared.distinct(manifest.weights).values()), "B")
    with WeightWriter(directory / bundles.WEIGHTS, prepared.source, manifest.weights, report.advance) as writer:
        tensors = {role: writer.add(need) for role, (need, _) in prepared.claimed.items()}
    spec, limits = manifest.model, manifest.limits
    backbone = directory / bundles.BACKBONE
    ir.save(backbone_graph(spec, limits, tensors), backbone)
    heads = tuple(directory / bundles.mtp_graph(depth) for depth in range(spec.mtp.depth if spec.mtp else 0))
    for depth, path in enumerate(heads):
        ir.save(mtp_graph(spec, limits, tensors, depth), path)
    return backbone, heads, writer.digests


def _manifest(options: BuildOptions, prepared: Prepared, out: Path) -> Manifest:
    """Everything that is known before the first weight is read; the check's figures come later."""
    spec = prepared.spec
    length = options.max_model_len or min(spec.max_position, DEFAULT_MODEL_LEN)
    if length > spec.max_position:
        raise BuildError(
            f"--max-model-len is {length}, but the model was made for {spec.max_position} positions. Choose at "
            "most that."
        )
    limits = Limits(length, options.max_batch_size, _draft_tokens(options, spec))
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=out.name,
        model=spec,
        limits=limits,
        backend="onnxruntime",
        device="cpu",
        weights=options.formats,
        end_tokens=end_tokens(prepared.checkpoint),
        source=options.model,
        source_digest="",
        parity=Parity(0, 0.0, "", 0.0),
        numerics=Numerics("near-tie", 0),
        draft_agreement=None,
        quality=None,
        versions={name: version(name) for name in _PACKAGES},
    )


def _draft_tokens(options: BuildOptions, spec: ModelSpec) -> int:
    """The largest K: with several trained depths, each proposes one token and none is used twice."""
    depth = spec.mtp.depth if spec.mtp else 1
    if depth == 1:
        return options.draft_tokens or DRAFT_TOKENS
    if (options.draft_tokens or 0) > depth:
        raise BuildError(
            f"--draft-tokens is {options.draft_tokens}, but the head has {depth} trained depths, which propose one "
            f"token each. Choose at most {depth}."
        )
    return options.draft_tokens or depth


def _reusable(out: Path, wanted: Manifest, prepared: Prepared) -> Manifest | None:
    """The manifest at `out` if it was made from the same input, to the last byte; a damaged bundle is built again."""
    if not (out / bundles.MANIFEST_FILE).is_file():
        return None
    try:
        found = bundles.open_bundle(out).manifest
    except BundleError:
        return None
    same = ("model", "limits", "weights", "versions", "end_tokens")
    if any(getattr(found, name) != getattr(wanted, name) for name in same):
        return None
    if untimed(found.draft_vocabulary) != wanted.draft_vocabulary:
        return None
    digests = {role: prepared.source.digest(role) for role in prepared.distinct(wanted.weights)}
    return found if found.source_digest == prepared.checkpoint.digest(digests) else None


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
