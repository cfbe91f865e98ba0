"""`python -m mtp_tools.load BUNDLE`: see `--help`."""

from __future__ import annotations

import sys

from mtp_engines.command import run_command
from mtp_tools.load.cli import main

sys.exit(run_command(main))
