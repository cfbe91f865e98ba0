"""`python -m mtp_tools.made_up --shape 0.8B --out DIR [--acceptance 0.7]`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_tools.made_up.shapes import PUBLISHED
from mtp_tools.made_up.write import write_checkpoint


@click.command("python -m mtp_tools.made_up")
@click.option("--shape", type=click.Choice(list(PUBLISHED)), required=True, help="Released size.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    help="Share of the tokens after which the draft head is right.  [default: random weights]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(shape: str, out: Path, acceptance: float | None, seed: int) -> None:
    """Write a checkpoint of a published shape with made-up weights."""
    total = write_checkpoint(out, PUBLISHED[shape], seed, acceptance)
    print(f"{out}: {total:,} bytes of tensors")


if __name__ == "__main__":
    sys.exit(run_command(main))
