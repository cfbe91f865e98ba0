"""`./dev demo`: export the carried checkpoint and generate from it with and without MTP, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from mtp_engines.command import run_command
from mtp_exporter.cli import group
from mtp_runtime.api import Model, load
from mtp_runtime.events import Finished
from mtp_runtime.stats import Stats

_ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = _ROOT / "checkpoints" / "tiny-mtp"
BUNDLE = _ROOT / "bundles" / "tiny-mtp"
_NEW_TOKENS = 160
_DRAFT_TOKENS = 3
_REPEATS = 5
_LABELS = {0: "plain decoding", _DRAFT_TOKENS: f"MTP, K = {_DRAFT_TOKENS}"}


def main() -> int:
    """Build, stream both ways, then time both in turn."""
    print(f"== mtp-export build --model {CHECKPOINT.relative_to(_ROOT)} --out {BUNDLE.relative_to(_ROOT)}", flush=True)
    code = run_command(group, ["build", "--model", str(CHECKPOINT), "--out", str(BUNDLE)])
    if code:
        return code
    model = load(BUNDLE)
    prompt = json.loads((CHECKPOINT / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
    answers = {width: _stream(model, prompt, width) for width in _LABELS}
    same = len({answer.token_ids for answer in answers.values()}) == 1
    print(f"\n== both answers have the same {len(answers[0].token_ids)} tokens: {'yes' if same else 'NO'}")
    _table(model, prompt)
    return 0 if same else 1


def _stream(model: Model, prompt: str, draft_tokens: int) -> Finished:
    print(f"\n== {_LABELS[draft_tokens]}, streamed\n{prompt}", end="", flush=True)
    for event in model.generate(prompt=prompt, max_new_tokens=_NEW_TOKENS, draft_tokens=draft_tokens, ignore_eos=True):
        if isinstance(event, Finished):
            return event
        print(event.text, end="", flush=True)
    raise AssertionError("a generation ends with Finished")


def _table(model: Model, prompt: str) -> None:
    """Medians of interleaved runs, so that a busy machine slows both alike."""
    runs: dict[int, list[Stats]] = {width: [] for width in _LABELS}
    for _ in range(_REPEATS):
        for width, stats in runs.items():
            finished = model.complete(prompt=prompt, max_new_tokens=_NEW_TOKENS, draft_tokens=width, ignore_eos=True)
            stats.append(finished.stats)
    print(f"\n{'':24}" + "".join(f"{label:>24}" for label in _LABELS.values()))
    rows: list[tuple[str, Callable[[list[Stats]], str]]] = [
        ("tokens a second, median", lambda s: f"{median(map(_speed, s)):.0f}"),
        ("slowest .. fastest", lambda s: f"{min(map(_speed, s)):.0f} .. {max(map(_speed, s)):.0f}"),
        ("emitted a cycle", lambda s: f"{s[0].as_dict()['emitted_per_cycle']:.2f}"),
        ("acceptance by position", lambda s: _positions(s[0])),
        *((f"{part} ms a cycle", partial(_milliseconds, part)) for part in ("draft", "verify", "commit")),
    ]
    for name, cell in rows:
        print(f"{name:24}" + "".join(f"{cell(stats):>24}" for stats in runs.values()))
    ratios = [_speed(fast) / _speed(slow) for slow, fast in zip(runs[0], runs[_DRAFT_TOKENS], strict=True)]
    print(
        f"\nMTP over plain decoding: {median(ratios):.2f}x (median of {_REPEATS} pairs, {min(ratios):.2f} .. "
        f"{max(ratios):.2f})"
    )
    print("A pair is two runs, one right behind the other; speeds in the table are medians of a column alone, of the")
    print("tokens after the first one. On a busy machine their ratio may be another one.")
    print("This model has 5 million parameters: it shows that everything works, not what a large model gains.")


def _speed(stats: Stats) -> float:
    """Tokens a second after the first token."""
    seconds = stats.seconds.draft + stats.seconds.verify + stats.seconds.commit
    return (_NEW_TOKENS - 1) / seconds


def _positions(stats: Stats) -> str:
    shares = stats.as_dict()["acceptance_by_position"]
    return " / ".join(f"{share:.2f}" for share in shares) or "n/a"


def _milliseconds(part: str, stats: list[Stats]) -> str:
    return f"{median(getattr(s.seconds, part) / s.cycles for s in stats) * 1e3:.2f}"


if __name__ == "__main__":
    sys.exit(main())
