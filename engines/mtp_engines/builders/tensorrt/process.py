"""Runs a job in a process of its own and turns what goes wrong there into one sentence."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from mtp_engines.builders.tensorrt.job import JOB, REPORT, Job, Report
from mtp_engines.errors import BuildError

_WORKER = "mtp_engines.builders.tensorrt.worker"
_LONGEST = 400


def run_job(job: Job, title: str, graph: str) -> Report:
    """Build one engine.

    Args:
        title: of the library, for messages.
        graph: its name, for messages.

    Raises:
        BuildError: the library refused the graph, or its process ended early.
    """
    result = Path(job.result)
    result.unlink(missing_ok=True)
    path = result.with_suffix(".job.json")
    path.write_bytes(JOB.dump_json(job))
    command = [sys.executable, "-m", _WORKER, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if not path.is_file():
        raise BuildError("Another build replaced the bundle while its engines were built. Wait for it and build again.")
    if ended.returncode == -signal.SIGKILL:
        raise BuildError(
            f"The process that built the graph {graph} with {title} was killed, most likely for its memory. Free some, "
            "or build with fewer --draft-tokens."
        )
    if ended.returncode != 0 or not result.is_file():
        raise BuildError(
            f"The process that built the graph {graph} with {title} {_how(ended.returncode)}: "
            f"{_last_line(ended.stderr + ended.stdout)}. Build the bundle again with this release, and report this if "
            "it stays."
        )
    report: Report = REPORT.validate_json(result.read_bytes())
    if report.error is not None:
        raise BuildError(
            f"{title} {report.version} cannot build the graph {graph}: {_short(report.error)}. Build with another "
            "precision or another version, and report this if it stays."
        )
    return report


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else "it said nothing"


def _short(text: str) -> str:
    return text[:_LONGEST].rstrip(" .")
