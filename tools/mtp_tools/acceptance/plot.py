"""A study as a picture: acceptance by position and the expected speed-up over K, a line for each domain."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_engines.errors import RequestError
from mtp_tools.acceptance.results import Result
from mtp_tools.bench.plot import require_matplotlib

_SUFFIXES = (".png", ".html")
_APART = 0.06
Line = tuple[list[int], list[float], list[float], list[float]]
"""Positions or values of K, figures, and how far the ends of the intervals are below and above them."""


def require_drawable(file: Path) -> None:
    """Refuse before anything is measured.

    Raises:
        RequestError: another type of file, no place for it, or nothing to draw with.
    """
    if file.suffix.lower() not in _SUFFIXES:
        raise RequestError(f"--plot is {file}, expected a name that ends in {' or '.join(_SUFFIXES)}. Rename it.")
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise RequestError(f"--plot is {file}, which cannot be written; give a file in a directory that exists.")
    require_matplotlib()


def acceptance_line(result: Result) -> Line:
    """Free-running, given that the drafts before were kept; positions without a trial are left out."""
    line: Line = ([], [], [], [])
    for position, share in enumerate(result.conditional, 1):
        if share.rate is not None and share.interval is not None:
            _add(line, position, share.rate, share.interval)
    return line


def speed_line(result: Result) -> Line:
    """Expected speed-up of every K that can be told."""
    line: Line = ([], [], [], [])
    for one in result.expected:
        if one.speedup is not None and one.between is not None:
            _add(line, one.draft_tokens, one.speedup, one.between)
    return line


def draw(results: Sequence[Result], title: str, text: str, file: Path) -> None:
    """Write the picture in one step, so that nobody meets half of one.

    Args:
        text: the report, which a page shows below the picture.

    Raises:
        RequestError: it cannot be written.
    """
    figure = _figure(results, title)
    content = _png(figure) if file.suffix.lower() == ".png" else _page(_svg(figure), title, text)
    aside = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(content)
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RequestError(f"{file} cannot be written: {error.strerror}. Choose another --plot.") from error


def _add(line: Line, place: int, value: float, interval: tuple[float, float]) -> None:
    # Rounding may put an end of an interval on the wrong side by the last bit, and a bar has no negative length.
    below, above = max(value - interval[0], 0.0), max(interval[1] - value, 0.0)
    line[0].append(place)
    for values, one in zip(line[1:], (value, below, above), strict=True):
        values.append(one)


def _figure(results: Sequence[Result], title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, speeds = figure.subplots(1, 2)
    for axes, line_of in ((rates, acceptance_line), (speeds, speed_line)):
        for number, result in enumerate(results):
            places, values, below, above = line_of(result)
            # Beside each other, or their intervals would cover each other.
            beside = [place + _APART * (number - (len(results) - 1) / 2) for place in places]
            axes.errorbar(beside, values, yerr=[below, above], marker="o", capsize=3, label=result.domain.name)
    rates.set_xticks(range(1, 1 + max((len(result.conditional) for result in results), default=1)))
    rates.set_xlabel("position of the draft")
    rates.set_ylabel("kept of reached, 95 % interval")
    rates.set_ylim(0, 1.05)
    speeds.set_xticks(sorted({one.draft_tokens for result in results for one in result.expected}))
    speeds.set_xlabel("K, draft tokens a cycle")
    speeds.set_ylabel("expected tokens/s over plain decoding")
    speeds.axhline(1.0, linestyle=":", color="grey")
    speeds.set_ylim(bottom=0)
    speeds.legend()
    figure.suptitle(title)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    return stream.getvalue()


def _svg(figure: Any) -> str:
    """The element alone: what stands before it belongs to a file of its own."""
    from matplotlib import rc_context

    stream = io.StringIO()
    # The same figures give the same file: fixed ids, and no date.
    with rc_context({"svg.hashsalt": "acceptance"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _page(svg: str, title: str, text: str) -> bytes:
    name = html.escape(title)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{name}</title></head>\n<body>\n'
        f"<h1>{name}</h1>\n{svg}\n<pre>{html.escape(text)}</pre>\n</body>\n</html>\n"
    )
    return page.encode()
