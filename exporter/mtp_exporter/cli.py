"""The command line `mtp-export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from mtp_engines.command import run_app
from mtp_exporter.build import BACKEND, DRAFT_TOKENS, BuildOptions, Built, Reporter, build
from mtp_exporter.inspect import inspect_checkpoint
from mtp_exporter.inspect_text import as_text
from mtp_exporter.resolve import resolve

app = typer.Typer(
    name="mtp-export",
    help="Split a checkpoint with a multi-token-prediction head into ONNX graphs and build a bundle.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command("build")
def build_command(
    model: Annotated[str, typer.Option("--model", help="Directory, hub id, or short name such as Qwen3.5-9B.")],
    out: Annotated[Path | None, typer.Option("--out", help="Bundle directory.  [default: bundles/<name>]")] = None,
    weights: Annotated[str, typer.Option("--weights", help=f"Weight format; {BACKEND} has fp32.")] = "fp32",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Most tokens of prompt and answer.  [default: up to 8192]")
    ] = None,
    max_batch_size: Annotated[int, typer.Option("--max-batch-size", help="Most sequences run together.")] = 1,
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", help="Largest number of draft tokens a request may ask for.")
    ] = DRAFT_TOKENS,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Leave the MTP head out.")] = False,
) -> None:
    """Build a bundle: graphs, weights, tokenizer and manifest, checked before it appears."""
    options = BuildOptions(model, out, weights, max_model_len, max_batch_size, draft_tokens, not no_mtp)
    with tqdm(total=0, unit="B", unit_scale=True, unit_divisor=1000, desc="weights", disable=None) as bar:

        def total(size: int) -> None:
            bar.reset(size)

        def advance(size: int) -> None:
            bar.update(size)

        def note(text: str) -> None:
            bar.write(text, file=sys.stderr)

        built = build(options, Reporter(total, advance, note))
    print(_summary(built))


@app.command("inspect")
def inspect_command(
    checkpoint: Annotated[str, typer.Argument(help="Directory, hub id, or short name such as Qwen3.5-9B.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint is, whether it is complete, and what could not be exported. Reads headers only."""
    report = inspect_checkpoint(resolve(checkpoint))
    print(json.dumps(report, indent=1) if as_json else as_text(report))


def main() -> None:
    """Entry point of `mtp-export`."""
    sys.exit(run_app(app, "mtp-export"))


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
    else:
        lines.append("acceptance: no MTP head")
    lines.append(f"bundle: {built.directory}")
    return "\n".join(lines)
