"""`python -m mtp_tools.device --bundle BUNDLE --json RESULT`: what a CUDA device proves, within 8 minutes."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_engines.errors import BundleError


@click.command("python -m mtp_tools.device")
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Bundle of the carried checkpoint.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the results.")
@click.option("--shape", default="2B", show_default=True, help="Published shape to make up; none leaves it out.")
@click.option("--minutes", default=8.0, show_default=True, help="Later parts are left out when so much time is gone.")
@click.option("--seed", type=int, help="Of the random inputs.  [default: a new one]")
@click.option("--dry-run", is_flag=True, help="Tiny sizes on the CPU, to prove the script itself.")
def main(bundle: Path, path: Path | None, shape: str, minutes: float, seed: int | None, dry_run: bool) -> int:
    """Prove kernels, CUDA graphs and the whole loop on this machine's CUDA device."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # Read when the kernels are imported.
    try:
        import torch
        import triton
    except ImportError as error:
        raise BundleError(
            f"This needs the package {error.name}, which is not installed. Install it with "
            "`pip install 'mtp-export[torch]'`, or from a clone with `pip install -e '.[torch]'`."
        ) from error

    from mtp_tools.device.plan import Plan, run_plan
    from mtp_tools.device.results import Results

    if not dry_run and not torch.cuda.is_available():
        raise BundleError("There is no CUDA device here. Use --dry-run to run the script on the CPU at tiny sizes.")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": "CPU, dry run: no figure here is one of a device" if dry_run else torch.cuda.get_device_name(),
        "capability": None if dry_run else ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seed": seed,
        "command": " ".join(["python -m mtp_tools.device", *sys.argv[1:]]),
    }
    results = Results(about, lambda line: print(line, flush=True))
    for name, value in about.items():
        print(f"{name}: {value}")
    plan = Plan.dry(bundle, seed) if dry_run else Plan.real(bundle, seed, None if shape == "none" else shape, minutes)
    run_plan(plan, results)
    if path is not None:
        results.write(path)
    failed = len(results.failed)
    print(
        f"{len(results.lines)} lines, {failed} claims failed"
        if failed
        else f"{len(results.lines)} lines, every claim holds"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
