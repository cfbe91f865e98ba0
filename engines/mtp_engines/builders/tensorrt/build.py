"""Engines of an opened bundle: lowered here, built in worker processes, checked and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from mtp_engines.builders.tensorrt.cache import (
    default_directory,
    key_of,
    load_entry,
    publish_entry,
    refuse_foreign,
)
from mtp_engines.builders.tensorrt.graphs import plugin_form, standard_form, write_graphs
from mtp_engines.builders.tensorrt.io import checked_rows, interface_of, profiles_of
from mtp_engines.builders.tensorrt.job import Job
from mtp_engines.builders.tensorrt.process import run_job
from mtp_engines.builders.tensorrt.target import Target, resolve_target
from mtp_engines.bundle import Bundle, staging
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.lowering.precision import Precision

_REGISTER = "mtp_plugins.tensorrt_plugins.registration:register_all"


def build_engines(
    bundle: Bundle,
    flavour: str,
    capability: str,
    precision: Precision,
    rows: Iterable[int],
    directory: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    *,
    skinny: bool = False,
) -> tuple[EngineFile, ...]:
    """Build the engines of every graph, or find them built.

    Args:
        flavour: `tensorrt-rtx` or `tensorrt`.
        capability: of the device that will run them, such as `8.9`.
        rows: widths of the calls, one optimisation profile each.
        directory: for the engines; None takes one inside the bundle. What it holds is used again only if it was
            built from the same graphs and weights, within the same limits, for the same target, and is undamaged.
        report: is told a line about each engine.
        skinny: matrix products by `SkinnyProduct`, where the flavour takes plugins.

    Raises:
        BuildError: the package or the device does not fit, the library refuses a graph, or an engine has other
            inputs and outputs than the bundle's model says.
    """
    target = resolve_target(flavour, capability)
    widths = checked_rows(rows, bundle.manifest.limits)
    place = directory or default_directory(bundle, target, precision)
    key = key_of(bundle, target, precision, widths, skinny=skinny)
    found = load_entry(place, key)
    if found is not None:
        report(f"engines: {place}, as built before")
        return found
    refuse_foreign(place)
    with staging(place) as staged:
        work = staged / "work"
        work.mkdir()
        limits = bundle.manifest.limits
        form = plugin_form(limits, skinny=skinny) if target.flavour.plugins else standard_form(limits)
        graphs = write_graphs(bundle, precision, work, form)
        timings = place.parent / f"{target.flavour.name}-{target.version}-{target.name}.timings"
        engines = tuple(
            _build(bundle, target, precision, widths, name, path, staged, timings, report)
            for name, path in graphs.items()
        )
        shutil.rmtree(work)
        publish_entry(staged, place, key, engines)
    report(f"engines: {place}")
    return engines


def find_engines(
    bundle: Bundle,
    flavour: str,
    capability: str,
    precision: Precision,
    rows: Iterable[int],
    directory: Path | None = None,
    *,
    skinny: bool = False,
) -> tuple[Path, tuple[EngineFile, ...]] | None:
    """Directory and engines that `build_engines` made with the same arguments here, or None; every byte is read.

    Raises:
        BuildError: the package or the device does not fit.
    """
    target = resolve_target(flavour, capability)
    place = directory or default_directory(bundle, target, precision)
    widths = checked_rows(rows, bundle.manifest.limits)
    engines = load_entry(place, key_of(bundle, target, precision, widths, skinny=skinny))
    return None if engines is None else (place, engines)


def _build(
    bundle: Bundle,
    target: Target,
    precision: Precision,
    widths: tuple[int, ...],
    name: str,
    graph: Path,
    directory: Path,
    timings: Path,
    report: Callable[[str], None],
) -> EngineFile:
    """One engine in `directory`."""
    limits, plugins = bundle.manifest.limits, target.flavour.plugins
    interface = interface_of(name, bundle.manifest.model, limits, precision, paged=plugins)
    plan = directory / f"{name}.plan"
    job = Job(
        module=target.flavour.module,
        graph=str(graph.resolve()),
        plan=str(plan.resolve()),
        result=str(graph.with_suffix(".report.json").resolve()),
        capability=target.capability,
        elsewhere=target.flavour.elsewhere,
        profiles=profiles_of(name, interface, widths, limits),
        plugins=_REGISTER if plugins else None,
        aliased_io=plugins,
        # TensorRT-RTX measures when an engine is first run.
        timing_cache=str(timings.resolve()) if plugins else None,
    )
    done = run_job(job, target.flavour.title, name)
    interface.check(name, done.inputs, done.outputs)
    report(f"{name}: {done.layers} layers, {done.plan_bytes / 1e6:.1f} MB in {done.seconds:.1f} s")
    return EngineFile(
        graph=name,
        file=plan.name,
        backend=target.flavour.name,
        version=target.version,
        target=target.name,
        precision=precision,
        rows=widths,
        inputs=done.inputs,
        outputs=done.outputs,
    )
