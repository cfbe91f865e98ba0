"""Installing, converting and loading, one contender after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_tools.neighbours.contenders import Contender
from mtp_tools.neighbours.conversions import Job
from mtp_tools.neighbours.process import Worker
from mtp_tools.neighbours.protocol import NeighbourError
from mtp_tools.neighbours.rounds import Entry, Report

_WORKERS = Path(__file__).resolve().parent / "workers"


@dataclass(frozen=True)
class Absent:
    """A contender that never answered, and why."""

    contender: Contender
    reason: str


def bring_up(
    contenders: Sequence[Contender], job: Job, report: Report, load: bool = True
) -> tuple[list[Entry], list[Absent]]:
    """Install, convert and load one after the other; who fails is absent, and the others go on."""
    entries, absent = [], []
    for contender in contenders:
        worker = None
        try:
            report(f"{contender.name}: is made ready")
            prepared = contender.engine.prepare(job, contender.weights)
            if not load:
                continue
            command = [str(prepared.python), str(_WORKERS / "host.py"), str(_WORKERS / contender.engine.worker)]
            log = job.work / "logs" / f"{contender.name.replace(' ', '-')}.log"
            worker = Worker(command, log, job.threads)
            entries.append(Entry(contender, worker, worker.start(prepared.settings)))
        except NeighbourError as error:
            report(f"{contender.name}: {error}")
            absent.append(Absent(contender, str(error)))
            if worker is not None:
                worker.close()
    return entries, absent
