"""The command `mtp-export triton`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mtp_engines.backends import BACKENDS
from mtp_serving.triton.config import DEVICES, Settings
from mtp_serving.triton.repository import write_repository


def _gpus(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"expected numbers with commas, found {text!r}.") from error


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The model repository.")
@click.option("--name", help="Name of the model.  [default: that of the bundle]")
@click.option("--link", is_flag=True, help="Link to the bundle instead of copying it.")
@click.option("--slots", type=click.IntRange(1), help="Answers at once in an instance.  [default: as built]")
@click.option("--max-queue", type=click.IntRange(0), default=Settings.max_queue, show_default=True, help="May wait.")
@click.option(
    "--prefix-cache-bytes",
    type=click.IntRange(0),
    default=Settings.prefix_cache_bytes,
    show_default=True,
    help="Memory for texts that were read before.",
)
@click.option("--cache-rows", type=click.IntRange(1), help="Of all answers together.  [default: every context]")
@click.option(
    "--instances", type=click.IntRange(1), default=1, show_default=True, help="Processes, for each GPU if any."
)
@click.option("--gpus", callback=_gpus, help="GPUs that get instances, such as 0,1.  [default: all]")
@click.option("--device", type=click.Choice(DEVICES), help="Where it runs.  [default: as built]")
@click.option("--backend", type=click.Choice(BACKENDS), help="What runs it.  [default: as built]")
@click.option(
    "--threads", type=click.IntRange(0, 4 * (os.cpu_count() or 1)), default=0, help="Of an instance; 0 chooses."
)
def triton(
    bundle: Path,
    out: Path,
    name: str | None,
    link: bool,
    slots: int | None,
    max_queue: int,
    prefix_cache_bytes: int,
    cache_rows: int | None,
    instances: int,
    gpus: tuple[int, ...],
    device: str | None,
    backend: str | None,
    threads: int,
) -> None:
    """Write a bundle as a model of Triton Inference Server into a model repository."""
    settings = Settings(slots, max_queue, prefix_cache_bytes, threads, backend, device, instances, gpus, cache_rows)
    print(f"model: {write_repository(bundle, out, settings, name, link=link)}")
