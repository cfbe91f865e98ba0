"""Processes that run and compile Triton kernels, started once for all tests of a session that ask for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.workers import Worker, missing


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Runs kernels on the CPU."""
    yield from _worker(tmp_path_factory, interpret=True)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Compiles kernels for GPUs that need not be there."""
    yield from _worker(tmp_path_factory, interpret=False)


def _worker(tmp_path_factory: pytest.TempPathFactory, *, interpret: bool) -> Iterator[Worker]:
    if missing():
        pytest.skip(f"not installed: {', '.join(missing())}")
    worker = Worker(interpret=interpret, cache=str(tmp_path_factory.mktemp("triton")))
    yield worker
    worker.close()
