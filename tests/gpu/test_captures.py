"""Cycles as graphs that are captured once and replayed: with emulated graphs, and without values to read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtp_engines.backends import open_engine
from mtp_engines.backends.gpu import accepting, capture
from mtp_engines.backends.gpu.capture import Captures
from mtp_engines.backends.gpu.cycle import Cycler
from mtp_engines.backends.gpu.device import Device
from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.backends.torch import engine as engine_module
from mtp_engines.backends.torch import kernels
from mtp_engines.backends.torch.engine import TorchEngine
from mtp_engines.bundle import open_bundle
from mtp_plugins.triton_kernels.launch import Launch
from tests.gpu import parts
from tests.gpu.bundles import DRAFTING
from tests.gpu.emulated_graphs import EmulatedGraph, emulate
from tests.gpu.parts import Opened, by_cycles, by_host

PROMPT = [5, 6, 20]
CUDA = torch.device("cuda")


def test_the_first_run_is_eager_the_second_is_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    total = torch.zeros(1)
    calls: list[str] = []
    captures = Captures(CUDA, enabled=True)
    for expected_calls, expected_graphs in ((1, 0), (2, 1), (2, 1), (2, 1)):
        captures.run("a", lambda: (calls.append("a"), total.add_(1)))
        assert (len(calls), captures.count) == (expected_calls, expected_graphs)
    assert total.item() == 4, "every run happened once, the captured one too"
    captures.run("b", lambda: total.add_(10))
    assert (captures.count, total.item()) == (1, 14), "another key begins anew"
    captures.run("b", lambda: total.add_(10))
    assert (captures.count, total.item()) == (2, 24)


def test_all_graphs_share_the_pool_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    pools: list[Any] = []
    inner = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: (pools.append(pool), inner(graph, pool))[1])
    captures = Captures(CUDA, enabled=True)
    for key in ("a", "b", "c"):
        for _ in range(3):
            captures.run(key, lambda: None)
    assert pools == [None, "pool", "pool"]


@pytest.mark.parametrize(("device", "enabled"), [("cpu", True), ("cuda", False)])
def test_without_a_gpu_or_without_graphs_every_run_is_eager(device: str, enabled: bool) -> None:
    captures = Captures(torch.device(device), enabled=enabled)
    calls: list[int] = []
    for _ in range(3):
        captures.run("a", lambda: calls.append(1))
    assert (len(calls), captures.count, captures.enabled) == (3, 0, False)


def captured(engine: TorchEngine, batch: int = 1) -> DeviceSequences:
    """Sequences that capture their cycles although they are on a CPU."""
    engine._idle.clear()
    sequences = engine.sequences(batch)
    sequences._device.captures = Captures(CUDA, enabled=True)
    return sequences


@pytest.mark.parametrize("skinny", [False, True])
def test_replayed_cycles_say_what_eager_ones_say(
    partial: Opened, monkeypatch: pytest.MonkeyPatch, skinny: bool
) -> None:
    """Every K is captured for both sets of staged rows, and replayed behind other Ks."""
    emulate(monkeypatch)
    engine = partial.torch(skinny=skinny)
    schedule = [1, 3, 0, 3, 1, 0] * 4
    eager = by_cycles(engine, PROMPT, 22, schedule, states=True)
    sequences = captured(engine)
    replayed = by_cycles(engine, PROMPT, 22, schedule, sequences=sequences, states=True)
    assert (replayed.ids, replayed.drafts) == (eager.ids, eager.drafts)
    assert parts.state_error(replayed.states, eager.states) == 0
    graphs: dict[Any, EmulatedGraph] = sequences._device.captures._graphs  # type: ignore[assignment]
    assert sum(graph.replays for graph in graphs.values()) > len(graphs) > 3, "hardly anything was replayed"
    cycles = {key[-2:] for key in graphs if key[0] != "verify"}
    assert cycles <= {(k, newest) for k in (0, 1, 3) for newest in (0, 1)}


def test_graphs_outlive_a_reset(partial: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt after a reset replays what the first one captured."""
    emulate(monkeypatch)
    engine = partial.torch()
    sequences = captured(engine)
    by_cycles(engine, PROMPT, 14, 3, sequences=sequences)
    before = sequences._device.captures.count
    sequences.reset()
    again = by_cycles(engine, [40, 2], 14, 3, sequences=sequences)
    assert again.ids == by_cycles(engine, [40, 2], 14, 3).ids
    assert sequences._device.captures.count == before == 2


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _one_key(patch: pytest.MonkeyPatch) -> None:
    """The set of staged rows is not in the key."""
    right = Captures.run
    patch.setattr(Captures, "run", lambda self, key, enqueue: right(self, key[:-1], enqueue))


def _read_by_the_host(patch: pytest.MonkeyPatch) -> None:
    """The pending token goes through the host, so that a replay has that of the capture."""
    right = Cycler._enqueue

    def wrong(self: Cycler, draft_tokens: int, newest: int) -> None:
        self._pending.fill_(int(self._pending[0]))
        right(self, draft_tokens, newest)

    patch.setattr(Cycler, "_enqueue", wrong)


@pytest.mark.parametrize("fault", [_one_key, _read_by_the_host])
def test_control_a_graph_of_something_else_changes_tokens(
    partial: Opened, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    emulate(monkeypatch)
    engine = partial.torch()
    eager = by_cycles(engine, PROMPT, 16, 2)
    fault(monkeypatch)
    assert by_cycles(engine, PROMPT, 16, 2).ids == eager.ids, "without graphs the fault is none"
    assert by_cycles(engine, PROMPT, 16, 2, sequences=captured(engine)).ids != eager.ids


def windows(sequences: DeviceSequences) -> tuple[list[list[list[int]]], parts.Snapshots]:
    """Verifies of windows in a random order, of which some rows are kept: their ids, and the states at the end."""
    rng, ids = np.random.default_rng(4), []
    for slot, prompt in enumerate((PROMPT, [40, 2])):
        sequences.window(slot, 1).verify(np.array([prompt]), 1)
        sequences.window(slot, 1).commit(np.array([len(prompt)]))
    for _ in range(24):
        start = int(rng.integers(0, 2))
        window = sequences.window(start, int(rng.integers(1, 3 - start)))
        count = len(window.lengths)
        ids.append(window.verify(rng.integers(0, 64, (count, 3)), 3).ids.tolist())
        window.commit(rng.integers(0, 3, count))
    return ids, {slot: sequences.snapshot(slot) for slot in (0, 1)}


def test_replayed_windows_say_what_eager_ones_say(partial: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    engine = partial.torch()
    eager, states = windows(engine.sequences(2))
    sequences = captured(engine, 2)
    ids, replayed = windows(sequences)
    assert ids == eager
    assert parts.state_error(replayed, states) == 0
    graphs: dict[Any, EmulatedGraph] = sequences._device.captures._graphs  # type: ignore[assignment]
    assert {key[1] for key in graphs} == {(0, 1), (1, 1), (0, 2)}
    assert sum(graph.replays for graph in graphs.values()) > len(graphs)


def test_control_a_graph_of_another_window_changes_the_ids(partial: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    engine = partial.torch()
    eager, _ = windows(engine.sequences(2))
    right = Captures.run

    def wrong(self: Captures, key: Any, enqueue: Callable[[], None]) -> None:
        right(self, (key[1][1], *key[2:]), enqueue)

    monkeypatch.setattr(Captures, "run", wrong)
    assert windows(engine.sequences(2))[0] == eager, "without graphs the fault is none"
    assert windows(captured(engine, 2))[0] != eager


def test_beyond_a_number_of_graphs_work_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(capture, "MOST_GRAPHS", 2)
    captures, calls = Captures(CUDA, enabled=True), []
    for _ in range(3):
        for key in ("a", "b", "c"):
            captures.run(key, lambda key=key: calls.append(key))  # type: ignore[misc]
    assert (captures.count, calls.count("a"), calls.count("c")) == (2, 2, 3)


class NoTransfers(TorchDispatchMode):
    """Fails on every operation that moves more than a number between the host and the device `meta`."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        results = function(*arguments, **(named or {}))
        given = [x for x in tree_leaves((arguments, named)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in given if x.ndim or "copy" in str(function)}
        devices |= {x.device.type for x in tree_leaves(results) if isinstance(x, torch.Tensor)}
        assert len(devices) < 2, f"{function} moves values between {sorted(devices)}"
        return results


def on_meta(opened: Opened, monkeypatch: pytest.MonkeyPatch, *, skinny: bool = False) -> Cycler:
    """A cycler whose device tensors have no values at all, so that reading one raises; kernels leave theirs alone.

    The kernels stand in, since their bodies are for a CPU and may look at sizes there.
    """
    monkeypatch.setattr(parts, "CPU", torch.device("meta"))
    for name in kernels._KERNELS:
        module = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        monkeypatch.setitem(sys.modules, f"mtp_plugins.{module}.kernel", MagicMock())
    monkeypatch.setattr(Launch, "run", lambda self, kernel, inputs, outputs: None)
    for place in (engine_module, accepting):
        monkeypatch.setattr(place, "kernels_for", lambda device: kernels._KERNELS)
    return Cycler(Device.empty(opened.torch(skinny=skinny)._setup, 1))


def cycles_without_values(cycler: Cycler) -> None:
    """Every K with both sets: once to warm up, then under the guard, as a capture would run it."""
    with torch.inference_mode():
        cycler._drafting = True
        for draft_tokens in (0, 2):
            for newest in (0, 1):
                cycler._enqueue(draft_tokens, newest)
                with NoTransfers():
                    cycler._enqueue(draft_tokens, newest)


@pytest.mark.parametrize("skinny", [False, True])
def test_a_cycle_never_waits_for_its_device(partial: Opened, monkeypatch: pytest.MonkeyPatch, skinny: bool) -> None:
    cycles_without_values(on_meta(partial, monkeypatch, skinny=skinny))


def test_a_verify_of_a_window_never_waits_either(partial: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that begins between two addresses that kernels take, so that parts are bound as copies."""
    on_meta(partial, monkeypatch)
    device = Device.empty(partial.torch()._setup, 2).window(1, 1)
    run = device.target(device.widths.widest)
    with torch.inference_mode():
        for newest in (0, 1):
            run.enqueue(newest)
            with NoTransfers():
                run.enqueue(newest)


@pytest.mark.parametrize("family", DRAFTING)
def test_a_cycle_of_other_families_never_waits_either(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts run by their body on a GPU too; drafts of EAGLE have their own vocabulary head."""
    bundle = open_bundle(DRAFTING[family](tmp_path))
    cycles_without_values(on_meta(Opened(bundle, open_engine(bundle)), monkeypatch))


READS: dict[str, Callable[[Cycler], object]] = {
    "a number": lambda cycler: cycler._pending[0].item(),
    "a condition": lambda cycler: bool((cycler._pending > 0).all()),
    "a list": lambda cycler: cycler._pending.tolist(),
    "an array": lambda cycler: cycler._pending.cpu().numpy(),
    "a value from the host": lambda cycler: cycler._pending.copy_(torch.from_numpy(np.ones(1, np.int64))),
    "a tensor from the host": lambda cycler: torch.ones(3).to(cycler._pending.device),
    "a choice of rows": lambda cycler: cycler._pending[cycler._pending > 0],
}


@pytest.mark.parametrize("read", READS)
def test_control_a_read_inside_a_cycle_is_noticed(partial: Opened, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    cycler = on_meta(partial, monkeypatch)
    right = Cycler._keep

    def reads(self: Cycler, *given: Any) -> None:
        READS[read](self)
        right(self, *given)

    monkeypatch.setattr(Cycler, "_keep", reads)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        cycles_without_values(cycler)


def test_control_the_host_way_does_read(partial: Opened) -> None:
    """The guard's emulation is not what makes the tokens right: plain host calls say the same."""
    engine = partial.torch()
    assert by_host(engine, PROMPT, 12, 2).ids == by_cycles(engine, PROMPT, 12, 2).ids
