"""From lines of JSON to answers, through a scheduler; the one way that files and clusters share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from mtp_engines.errors import MtpError, RequestError
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.tickets import Failed, Ticket, Told
from mtp_runtime.events import Finished
from mtp_runtime.records import record_of
from mtp_runtime.request import object_from_json, request_from

_WAITING = 2
"""Requests in flight for each slot, so that a slot that is free never waits for the file."""


@dataclass
class _Open:
    """A line whose answers are not all there yet."""

    number: int
    ticket: Ticket
    finished: list[Finished]
    error: Exception | None = None
    left: int = 0


def answers(
    scheduler: Scheduler, lines: Iterable[tuple[int, str]], defaults: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answer numbered lines, each a request as one JSON object; in the order in which they are done.

    Args:
        scheduler: runs in a thread of its own.
        lines: read as slots become free, so there may be any number of them.
        defaults: fields of requests that lines may override.

    Yields:
        The number of a line, and what `mtp-run generate --json` would print for it; several answers to one line as
        `answers`; a line that cannot be answered as `error`, a sentence.
    """
    told: SimpleQueue[tuple[int, Told]] = SimpleQueue()
    opened: dict[int, _Open] = {}
    source = iter(lines)
    more = True
    while more or opened:
        while more and len(opened) < _WAITING * scheduler.slots:
            number, line = next(source, (0, None))
            if line is None:
                more = False
                break
            try:
                opened[number] = _submit(scheduler, number, line, dict(defaults), told)
            except RequestError as error:
                yield number, {"error": str(error)}
        if not opened:
            continue
        number, event = told.get()
        one = opened[number]
        if isinstance(event, Failed):
            one.error = event.error
        elif isinstance(event, Finished):
            one.finished.append(event)
        else:
            continue
        one.left -= 1
        if not one.left:
            del opened[number]
            yield number, _record(one)


def _submit(
    scheduler: Scheduler, number: int, line: str, defaults: dict[str, Any], told: SimpleQueue[tuple[int, Told]]
) -> _Open:
    where = f"line {number}"
    request = request_from(defaults | object_from_json(line, where), where)
    ticket = scheduler.submit(request, listener=lambda event: told.put((number, event)))
    return _Open(number, ticket, [], left=ticket.prepared.decoding.completions)


def _record(one: _Open) -> dict[str, Any]:
    request = one.ticket.request
    if one.error is not None:
        said = str(one.error) if isinstance(one.error, MtpError) else f"{type(one.error).__name__}: {one.error}"
        return ({} if request.id is None else {"id": request.id}) | {"error": said}
    records = [record_of(request, event) for event in sorted(one.finished, key=lambda event: event.completion.index)]
    if request.n == 1:
        return records[0]
    return ({} if request.id is None else {"id": request.id}) | {"answers": records}
