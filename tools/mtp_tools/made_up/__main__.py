"""`python -m mtp_tools.made_up --shape 0.8B --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_tools.made_up.shapes import PUBLISHED
from mtp_tools.made_up.write import write_checkpoint


def main(
    shape: Annotated[str, typer.Option("--shape", help=f"One of {', '.join(PUBLISHED)}.")],
    out: Annotated[Path, typer.Option("--out", help="Directory to write.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Write a checkpoint of a published shape with made-up weights."""
    if shape not in PUBLISHED:
        raise typer.BadParameter(f"--shape is {shape!r}, expected one of {', '.join(PUBLISHED)}.")
    total = write_checkpoint(out, PUBLISHED[shape], seed)
    print(f"{out}: {total:,} bytes of tensors")


if __name__ == "__main__":
    typer.run(main)
