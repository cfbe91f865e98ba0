"""Keeps one engine loaded and answers for it: `python host.py WORKER`, one JSON object a line in both directions.

It needs the standard library alone. The first line that it reads holds the settings of the worker, which is a Python
file with `load(settings)`; what that returns has

* `draft_tokens`: values of K that it can be asked for, 0 first;
* `about`: versions and remarks, name -> text;
* `answer(prompt, new_tokens, draft_tokens)`: a dictionary with `ids`, `first_s` (seconds until the first new token),
  `total_s`, and, if drafts are counted, `drafted` and `accepted`;
* `processes`: ids of the processes whose memory counts, if it is not this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Load the worker, then answer line by line until stdin ends."""
    out = _own_stdout()
    try:
        engine = _load(sys.argv[1], json.loads(sys.stdin.readline()))
    except Exception as error:
        _write(out, {"error": _reason(error)})
        raise
    _write(out, {"draft_tokens": list(engine.draft_tokens), "about": engine.about})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply = engine.answer(asked["prompt"], asked["new_tokens"], asked["draft_tokens"])
            reply["peak_bytes"] = sum(_peak_bytes(process) for process in getattr(engine, "processes", ("self",)))
        except Exception as error:
            reply = {"error": _reason(error)}
        _write(out, reply)


def _own_stdout() -> TextIO:
    """A stream of our own to stdout; whatever a library prints goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _load(path: str, settings: dict[str, Any]) -> Any:
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker"] = module
    spec.loader.exec_module(module)
    return module.load(settings)


def _write(out: TextIO, reply: dict[str, Any]) -> None:
    print(json.dumps(reply), file=out, flush=True)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _peak_bytes(process: int | str) -> int:
    """The most memory that the process has had resident."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
