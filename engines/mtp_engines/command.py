"""What both command lines share: one sentence on stderr for an error, and the exit code that goes with it."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

import click

from mtp_engines.errors import MtpError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    An `MtpError` is one line on stderr and 1; bad usage is one line and 2; an interrupt is 130. Anything
    else is a bug and keeps its traceback.
    """
    name = str(command.name)
    # A stream that the caller closed would send errors to the other one, or raise.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    # An ordinary end, so that a build removes what it had begun.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = command.main(list(arguments) if arguments is not None else None, name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        print(f"{path}: {error.format_message()} See `{path} --help`.", file=sys.stderr)
        return USAGE
    except MtpError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILURE
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return FAILURE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _drop_output()
        print(f"{name}: the output cannot be written: {error.strerror}. Free some space.", file=sys.stderr)
        return FAILURE


def _drop_output() -> None:
    """Point stdout to nowhere, so that Python's own flush at exit does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
