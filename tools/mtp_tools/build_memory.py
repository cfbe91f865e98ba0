"""`python -m mtp_tools.build_memory --shape 4B --work DIR`: peak memory and time of a build.

The build runs in a process of its own; its peak resident memory counts mapped pages of files too.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_exporter.storing.formats import FORMATS
from mtp_tools.made_up.shapes import PUBLISHED, tensors
from mtp_tools.made_up.write import write_checkpoint

ALLOWANCE = 1.5e9
"""Bytes that a build may use beside the largest tensor (in float32, as it is written)."""


@click.command("python -m mtp_tools.build_memory")
@click.option("--shape", type=click.Choice(list(PUBLISHED)), default="4B", show_default=True, help="Released size.")
@click.option("--weights", type=click.Choice(FORMATS), default="fp32", show_default=True, help="Of all matrices.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("bundles"), help="For checkpoint and bundle.")
@click.option("--keep", is_flag=True, help="Leave both there.")
def main(shape: str, weights: str, work: Path, keep: bool) -> None:
    """Make a checkpoint, copy it once for comparison, build it, and print one JSON line."""
    checkpoint, out, copy = (work / f"made-up-{shape}{suffix}" for suffix in ("", "-bundle", "-copy"))
    size = write_checkpoint(checkpoint, PUBLISHED[shape])
    start = time.perf_counter()
    shutil.copytree(checkpoint, copy)
    copy_s = time.perf_counter() - start
    shutil.rmtree(copy)
    command = [sys.executable, "-m", "mtp_exporter", "build", "--model", str(checkpoint), "--out", str(out)]
    command += ["--weights", weights]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    build_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    largest = max(prod(axes) for axes in tensors(PUBLISHED[shape]).values()) * 4
    record = {
        "shape": shape,
        "weights": weights,
        "checkpoint_bytes": size,
        "largest_tensor_bytes": largest,
        "peak_bytes": peak,
        "allowed_bytes": int(ALLOWANCE + largest),
        "holds": peak <= ALLOWANCE + largest,
        "build_s": round(build_s, 1),
        "copy_s": round(copy_s, 1),
    }
    print(json.dumps(record))
    if not keep:
        shutil.rmtree(checkpoint)
        shutil.rmtree(out)


if __name__ == "__main__":
    sys.exit(run_command(main))
