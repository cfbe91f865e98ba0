"""The speed over K as a picture, one line for each acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtp_engines.errors import RequestError
from mtp_runtime.request import AUTO
from mtp_tools.bench.cases import PLAIN
from mtp_tools.bench.summary import Row

_SUFFIXES = (".png", ".svg")
Line = tuple[list[int], list[float], list[float], list[float]]
"""Values of K, medians, and how far least and greatest are away from them."""


def require_drawable(file: Path) -> None:
    """Refuse before anything is measured.

    Raises:
        RequestError: it has the name of no picture that can be made, or matplotlib is not installed.
    """
    if file.suffix.lower() not in _SUFFIXES:
        raise RequestError(f"--plot is {file}, expected a name that ends in {' or '.join(_SUFFIXES)}. Rename it.")
    require_matplotlib()


def require_matplotlib() -> None:
    """Refuse before anything is measured.

    Raises:
        RequestError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise RequestError(
            "--plot draws with matplotlib, which is not installed. Install it with `pip install 'mtp-export[bench]'`, "
            "or leave --plot out."
        )


def lines_of(rows: Sequence[Row]) -> dict[str, Line]:
    """Label -> what is drawn; every line begins at plain decoding."""
    plain = next(row for row in rows if row.case == PLAIN)
    lines: dict[str, Line] = {}
    for row in rows:
        if row.case == PLAIN:
            continue
        line = lines.setdefault(_label(row), ([], [], [], []))
        for point in (row,) if line[0] else (plain, row):
            if point.case.draft_tokens == AUTO:
                continue  # It has no K to stand at: a level.
            speed = point.figures["decode_tokens_per_s"]
            line[0].append(point.case.draft_tokens)
            line[1].append(speed.median)
            line[2].append(speed.median - speed.least)
            line[3].append(speed.greatest - speed.median)
    return lines or {"plain decoding": _plain_line(plain)}


def levels_of(rows: Sequence[Row]) -> dict[str, float]:
    """Label of a line -> median of the policy `auto`."""
    return {_label(row): row.figures["decode_tokens_per_s"].median for row in rows if row.case.draft_tokens == AUTO}


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Write what the file's suffix says, a PNG or an SVG.

    Raises:
        RequestError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    levels = levels_of(rows)
    for label, (widths, medians, below, above) in lines_of(rows).items():
        drawn = axes.errorbar(widths, medians, yerr=[below, above], marker="o", capsize=3, label=label)
        if label in levels:
            axes.axhline(levels[label], linestyle="--", color=drawn.lines[0].get_color(), label=f"auto, {label}")
    axes.set_xticks(sorted(row.case.draft_tokens for row in rows if row.case.draft_tokens != AUTO))
    axes.set_xlabel("K, draft tokens a cycle")
    axes.set_ylabel("tokens/s of decoding: median, least, greatest")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(file, format=file.suffix.lower().removeprefix("."), dpi=150)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}. Choose another --plot.") from error


def _label(row: Row) -> str:
    rate, branches = row.case.acceptance, row.case.draft_branches
    if branches:
        return f"drafts of the head, {branches} branch{'es' if branches > 1 else ''}"
    return "drafts of the head" if rate is None else f"forced acceptance {rate:g}"


def _plain_line(plain: Row) -> Line:
    speed = plain.figures["decode_tokens_per_s"]
    return [0], [speed.median], [speed.median - speed.least], [speed.greatest - speed.median]
