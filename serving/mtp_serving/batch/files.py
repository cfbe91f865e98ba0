"""The files of a batch: which lines are done, and appending one so that a kill leaves it whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mtp_engines.errors import RequestError

_BEGINNING = b'{"line": '
"""Of every answer; what a kill left of one begins like that, too."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, with its number from 1.

    Raises:
        RequestError: the file cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}. Give a file of JSON lines.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text. Give a file of JSON lines.") from error


def digest_of(line: str) -> str:
    """Tells one line of the input from another, 16 hexadecimal digits."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


class Output:
    """A file of answers, one JSON object a line, that belongs to one process at a time.

    Attributes:
        done: number of every line of the input that is answered -> its digest.
        errors: number of those whose answer is an error -> what it says.
    """

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        """Open or begin it; what a kill left of a line at its end is cut off.

        Args:
            retry_errors: lines whose answer is an error are taken out, so that they are asked again.

        Raises:
            RequestError: it cannot be written, another process writes it, or it holds something else.
        """
        self._path = path
        self.errors: dict[int, str] = {}
        if path.exists() and not path.is_file():
            raise RequestError(f"{path} is no file. Give another --output.")
        if not path.parent.is_dir():
            raise RequestError(f"{path} cannot be written: there is no directory {path.parent}. Give another --output.")
        # It stays behind: who removes it may take it from under another process that has opened it and locks it next,
        # while a third one makes and locks a new one.
        self._lock = FileLock(f"{path}.lock", timeout=0)
        try:
            self._lock.acquire()
            self._file = path.open("ab", buffering=0)
        except Timeout as error:
            raise RequestError(f"{path} is being written by another process; wait for it, or end it.") from error
        except OSError as error:
            self._lock.release()
            raise RequestError(f"{path} cannot be written: {error.strerror}. Give another --output.") from error
        try:
            self.done = self._read(retry_errors)
        except BaseException:
            self.close()
            raise

    def add(self, number: int, line: str, record: dict[str, Any]) -> None:
        """Append the answer to a line of the input.

        Raises:
            RequestError: it could not be written whole; nothing of it stays.
        """
        digest = digest_of(line)
        text = json.dumps({"line": number, "digest": digest, **record}, ensure_ascii=False) + "\n"
        data, start = text.encode(), self._file.tell()
        try:
            # Without a buffer a write may take a part; with one, what failed would be written again later.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(start)
            raise RequestError(
                f"{self._path} cannot be written: {error.strerror}. Make room and start the same command again."
            ) from error
        self.done[number] = digest
        if "error" in record:
            self.errors[number] = str(record["error"])

    def close(self) -> None:
        """Write everything to the disk, and let others have it."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._lock.release()

    def _read(self, retry_errors: bool) -> dict[int, str]:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        kept, done = bytearray(), {}
        for position, text in enumerate(whole.splitlines(keepends=True), 1):
            try:
                record = json.loads(text)
                number, digest = int(record["line"]), str(record["digest"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise RequestError(
                    f"{self._path} line {position} is no answer of `mtp-run batch`. Give another --output."
                ) from error
            if "error" in record:
                if retry_errors:
                    continue
                self.errors[number] = str(record["error"])
            done[number] = digest
            kept += text
        left = data[len(whole) :]
        if not left.startswith(_BEGINNING[: len(left)]):
            raise RequestError(f"{self._path} ends in what is no answer of `mtp-run batch`. Give another --output.")
        if data.startswith(kept):
            self._file.truncate(len(kept))
        else:
            # Lines in the middle go: in one step, so that a kill leaves the old file or the new one.
            beside = self._path.with_name(self._path.name + ".partial")
            beside.write_bytes(kept)
            self._file.close()
            os.replace(beside, self._path)
            self._file = self._path.open("ab", buffering=0)
        self._file.seek(0, os.SEEK_END)
        return done


def require_same(done: dict[int, str], number: int, line: str, path: Path) -> bool:
    """Whether a line is answered already.

    Raises:
        RequestError: the line with this number was another one then.
    """
    if number not in done:
        return False
    if done[number] != digest_of(line):
        raise RequestError(
            f"{path} line {number} is not the one that the output answers; the input was changed since. Give another "
            "--output, or the old input."
        )
    return True
