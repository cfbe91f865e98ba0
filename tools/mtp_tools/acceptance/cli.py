"""The command `mtp-run acceptance`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from tqdm import tqdm

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.errors import RequestError
from mtp_runtime.cli import bundle_argument, engine_options, find_bundle, open_model
from mtp_runtime.drafters.registry import DRAFTERS
from mtp_runtime.prompts import Prompts
from mtp_tools.acceptance.lines import tasks_from
from mtp_tools.acceptance.plot import draw, require_drawable
from mtp_tools.acceptance.report import report
from mtp_tools.acceptance.results import Result, Setting, record_of, results_of
from mtp_tools.acceptance.study import costs_of, missing_coverage, study


@click.command()
@bundle_argument
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="File with one JSON object a line.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Most tokens an answer.")
@click.option("--draft-tokens", help="Values of K, such as 1,2,3.  [default: 1 to the bundle's limit]")
@click.option("--drafter", type=click.Choice(DRAFTERS), help="What drafts.  [default: draft model or head, if any]")
@click.option("--draft-model", type=click.Path(path_type=Path), help="Bundle of a second model that drafts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Picture of it, .png or .html.")
@engine_options
def acceptance(
    bundle: Path | None,
    prompts: Path,
    new_tokens: int,
    draft_tokens: str | None,
    drafter: str | None,
    draft_model: Path | None,
    as_json: bool,
    plot_file: Path | None,
    engine: EngineOptions,
) -> None:
    """Measure by domain how well a drafter drafts, and what that should gain on this machine."""
    if plot_file is not None:
        require_drawable(plot_file)
    directory = find_bundle(bundle)
    opened = open_bundle(directory)
    widths = _widths(draft_tokens, opened.manifest.limits.max_draft_tokens)
    defaults = {"drafter": drafter, "draft_tokens": max(widths), "max_new_tokens": new_tokens}
    tasks = tasks_from(
        prompts, defaults, Prompts(opened.directory), opened.manifest, has_draft_model=draft_model is not None
    )
    model = open_model(directory, engine, (), draft_model)
    name = tasks[0].prepared.drafter
    domains = study(model, tqdm(tasks, unit="prompt", disable=None), max(widths))
    setting = Setting(
        opened.manifest.name,
        name,
        widths,
        new_tokens,
        costs_of(model, tasks),
        missing_coverage(name, model.engine.spec),
    )
    _deliver(results_of(domains, setting), setting, plot_file, as_json=as_json)


def _deliver(results: list[Result], setting: Setting, plot_file: Path | None, *, as_json: bool) -> None:
    text = "\n".join(report(results, setting))
    print(json.dumps(record_of(results, setting), ensure_ascii=False) if as_json else text, flush=True)
    if plot_file is not None:
        draw(results, f"{setting.bundle}, drafter {setting.drafter}", text, plot_file)


def _widths(text: str | None, limit: int) -> list[int]:
    """Values of K, rising.

    Raises:
        UsageError: the list cannot be read, or has a value below 1.
        RequestError: the bundle was built for less.
    """
    if text is None:
        return list(range(1, limit + 1))
    try:
        widths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise click.UsageError(f"--draft-tokens takes whole numbers with commas, found {text!r}.") from error
    if widths[0] < 1:
        raise click.UsageError(f"--draft-tokens is {text}; acceptance is measured for values of at least 1.")
    if widths[-1] > limit:
        raise RequestError(
            f"--draft-tokens asks for {widths[-1]}, this bundle was built for 0 to {limit}. Choose within, or build it "
            "again with --draft-tokens."
        )
    return widths
