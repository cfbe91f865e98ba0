"""The command line `mtp-export`. Further commands come from the entry points `mtp_export.commands`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, Self

import click
from tqdm import tqdm

from mtp_engines.command import run_command
from mtp_engines.contracts.manifest import Manifest
from mtp_exporter.backends import BACKENDS, PRECISIONS, BackendOptions
from mtp_exporter.build import DRAFT_TOKENS, Built, Reporter, build
from mtp_exporter.checking.compare import DEFAULT_ROWS, compare_bundle
from mtp_exporter.checking.compare_text import as_lines, as_report
from mtp_exporter.draft_ids.choice import Size
from mtp_exporter.inspecting.inspect import inspect_checkpoint
from mtp_exporter.inspecting.text import as_text
from mtp_exporter.options import BuildOptions
from mtp_exporter.prepare import HiddenTap, Ingredients
from mtp_exporter.reading.resolve import resolve
from mtp_exporter.storing.formats import FORMATS


class _Size(click.ParamType[Size]):
    """A number or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Size:
        """The number, or the word."""
        return "auto" if value == "auto" else int(click.INT.convert(value, param, ctx))


@click.group("mtp-export", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mtp-export")
def group() -> None:
    """Split a checkpoint with a multi-token-prediction head into ONNX graphs and build a bundle."""


@group.command("build")
@click.argument("checkpoint", required=False)
@click.option("--model", help="Directory, hub id, or short name such as Qwen3.5-9B; the same as CHECKPOINT.")
@click.option("--out", type=click.Path(path_type=Path), help="Bundle directory.  [default: bundles/<name>]")
@click.option("--weights", default="fp32", show_default=True, help=f"Weight format: {', '.join(FORMATS)}.")
@click.option("--mtp-weights", help="Weight format of the draft head.  [default: as --weights]")
@click.option("--head-weights", help="Weight format of embedding and vocabulary head.  [default: as --weights]")
@click.option("--max-model-len", type=int, help="Most tokens of prompt and answer.  [default: up to 8192]")
@click.option("--max-batch-size", default=1, show_default=True, help="Most sequences run together.")
@click.option("--draft-tokens", type=int, help=f"Largest K that a request may ask for.  [default: {DRAFT_TOKENS}]")
@click.option("--mtp-from", help="Checkpoint to take the MTP head from, if this one lost it.")
@click.option("--draft-model", help="Separate draft (EAGLE) that becomes the head of the bundle.")
@click.option("--hidden-tap", type=click.Choice(["post-norm", "pre-norm"]), help="Hidden state that the head is fed.")
@click.option("--draft-vocab", type=_Size(), help="Ids that an MTP head drafts from: a number or auto.  [default: all]")
@click.option(
    "--draft-vocab-text",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Text whose most frequent tokens these are; repeatable.  [default: the first ids]",
)
@click.option("--no-mtp", is_flag=True, help="Leave the MTP head out.")
@click.option("--backend", type=click.Choice(BACKENDS), default="onnxruntime", show_default=True, help="What runs it.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where it runs.  [default: cpu for onnxruntime]")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Weights and caches on a GPU.  [default: bf16]")
@click.option(
    "--products",
    type=click.Choice(["library", "skinny"]),
    default="library",
    show_default=True,
    help="Matrix products on a GPU: the library's at one width, or our own for up to 16 rows.",
)
@click.option("--compute-capability", help="GPU that engines are for, such as 8.9.  [default: this machine's]")
def build_command(
    checkpoint: str | None,
    model: str | None,
    out: Path | None,
    weights: str,
    mtp_weights: str | None,
    head_weights: str | None,
    max_model_len: int | None,
    max_batch_size: int,
    draft_tokens: int | None,
    mtp_from: str | None,
    draft_model: str | None,
    hidden_tap: HiddenTap | None,
    draft_vocab: Size | None,
    draft_vocab_text: tuple[Path, ...],
    no_mtp: bool,
    **backend: Any,
) -> None:
    """Build a bundle: graphs, weights, tokenizer and manifest, checked before it appears."""
    if (model is None) == (checkpoint is None):
        raise click.UsageError("give the checkpoint once, with --model or alone.")
    name = checkpoint if model is None else model
    options = BuildOptions(
        str(name),
        out,
        weights,
        mtp_weights,
        head_weights,
        max_model_len,
        max_batch_size,
        draft_tokens,
        mtp=not no_mtp,
        mtp_from=mtp_from,
        draft_model=draft_model,
        hidden_tap=hidden_tap,
        draft_vocab=draft_vocab,
        draft_vocab_text=draft_vocab_text,
        backend=BackendOptions(**backend),
    )
    with _Bars() as bars:
        built = build(options, Reporter(bars.phase, bars.advance, bars.note))
    print(_summary(built))


@group.command("inspect")
@click.argument("checkpoint")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_command(checkpoint: str, as_json: bool) -> None:
    """Say what a checkpoint is, whether it is complete, and what could not be exported. Reads headers only."""
    report = inspect_checkpoint(resolve(checkpoint))
    print(json.dumps(report, indent=1) if as_json else as_text(report))


@group.command("check")
@click.argument("checkpoint")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--rows", default=DEFAULT_ROWS, show_default=True, help="Tokens of the text that both run over.")
@click.option("--mtp-from", help="Checkpoint that the head was taken from.")
@click.option("--draft-model", help="Separate draft that became the head.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(
    checkpoint: str, bundle: Path, rows: int, mtp_from: str | None, draft_model: str | None, as_json: bool
) -> int:
    """Compare a bundle with its checkpoint stage by stage and name the first stage that differs."""
    ingredients = Ingredients(checkpoint, mtp_from=mtp_from, draft_model=draft_model)
    comparison = compare_bundle(ingredients, bundle, rows)
    print(json.dumps(as_report(comparison), indent=1) if as_json else as_lines(comparison))
    return 1 if comparison.first_difference else 0


def main() -> None:
    """Entry point of `mtp-export`."""
    for entry in entry_points(group="mtp_export.commands"):
        group.add_command(entry.load(), entry.name)
    sys.exit(run_command(group))


class _Bars:
    """A progress bar for each phase of a build, on a terminal; notes go to stderr in any case."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def phase(self, name: str, total: int, unit: str) -> None:
        """Close the bar of the last phase and open one for this."""
        self._close()
        if not sys.stderr.isatty():
            amount = f"{total / 1e9:.2f} GB" if unit == "B" else f"{total}{unit}"
            print(f"{name}: {amount}", file=sys.stderr, flush=True)
        self._bar = tqdm(total=total, desc=name, unit=unit, unit_scale=unit == "B", disable=None)

    def advance(self, amount: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(amount)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text, file=sys.stderr)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _summary(built: Built) -> str:
    manifest = built.manifest
    ends = ", ".join(f"{token.id} ({' and '.join(token.sources)})" for token in manifest.end_tokens) or "none"
    parity = manifest.parity
    lines = [
        f"end tokens: {ends}",
        f"parity: {parity.rows} rows against NumPy, worst {parity.worst:.1e} at {parity.where} "
        f"(allowed {parity.tolerance:.0e})",
        f"rows: {manifest.numerics.promise}, one-row calls against blocks over {manifest.numerics.rows} rows",
    ]
    if manifest.draft_agreement:
        kept, drafted = manifest.draft_agreement.accepted, manifest.draft_agreement.drafted
        lines.append(f"acceptance: {kept} of {drafted} first drafts equal the target's choice ({kept / drafted:.0%})")
        if manifest.draft_agreement.accepted_whole is not None:
            lines.append(
                f"            {manifest.draft_agreement.accepted_whole} of {drafted} with the whole vocabulary"
            )
    else:
        lines.append("acceptance: no MTP head")
    lines += _draft_vocabulary(manifest)
    if manifest.quality:
        cost, weights = manifest.quality, manifest.weights
        lines.append(
            f"quality: {weights.target} weights, {weights.mtp} draft head, {weights.head} vocabulary: perplexity "
            f"{cost.perplexity:.5g} ({cost.perplexity_fp32:.5g} in float32), {cost.agreed} of {cost.rows} greedy "
            f"choices those of float32 ({cost.agreed / cost.rows:.0%})"
        )
    for name, made in manifest.backends.items():
        promise = made.numerics
        tested = f"{promise.promise} over {promise.rows} rows" if promise.rows else "not tested here"
        lines.append(f"{name}: {made.precision}, {made.products} products, rows {tested}")
    lines.append(f"bundle: {built.directory}")
    return "\n".join(lines)


def _draft_vocabulary(manifest: Manifest) -> list[str]:
    """Which ids the head drafts from, what of a text they hold, and what a draft costs with all and with these."""
    found, mtp = manifest.draft_vocabulary, manifest.model.mtp
    if found is None or mtp is None:
        return []
    size, whole = f"{mtp.draft_vocab_size:,}", f"{manifest.model.vocab_size:,}"
    share = f"{found.held / max(found.text_tokens, 1):.2%}"
    if found.origin == "text":
        ids = (
            f"{size} of {whole} ids, the most frequent of a text of {found.text_tokens:,} tokens; the list from one "
            f"half of it holds {share} of the other"
        )
    elif found.text_tokens:
        ids = f"the first {size} of {whole} ids, which hold {share} of {found.text_tokens:,} tokens of English text"
    else:
        ids = f"the first {size} of {whole} ids"
    step, before = found.step, found.step_whole
    cost = f"{before.weight_bytes / 1e6:,.1f} MB of weights with all ids, {step.weight_bytes / 1e6:,.1f} MB with these"
    timed = "not timed, memory does not hold both heads"
    if step.milliseconds is not None and before.milliseconds is not None:
        timed = f"{before.milliseconds:.3g} and {step.milliseconds:.3g} ms on this CPU (medians, in turns)"
    return [f"draft vocabulary: {ids}", f"draft step: {cost}; {timed}"]
