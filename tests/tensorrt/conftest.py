"""Bindings of TensorRT in a worker, one version at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mtp_plugins.tensorrt_plugins.registration import register_all
from tests.plugins.workers import Worker
from tests.plugins.workers import missing as missing_for_kernels
from tests.tensorrt import bindings, building


@pytest.fixture(scope="session", params=[bindings.INSTALLED, bindings.OLDER])
def tensorrt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process that has imported one version of the bindings."""
    version = str(request.param)
    if reason := bindings.missing():
        pytest.skip(reason)
    if absent := missing_for_kernels():
        pytest.skip(f"{' and '.join(absent)} not installed: python -m pip install -e '.[dev]'")
    # Not a folder of pytest's, which keeps those of the last three runs: the packages take 150 MB.
    with TemporaryDirectory() as folder:
        packages = None
        if version != bindings.INSTALLED:
            packages = Path(folder)
            if reason := bindings.download(version, packages):
                pytest.skip(f"The package index does not give TensorRT {version}: {reason}")
        stub = bindings.compile_stub(tmp_path_factory.mktemp("stub"), version)
        worker = Worker(interpret=False, cache=str(tmp_path_factory.mktemp("triton")))
        assert worker.call(bindings.load, bindings.Bindings(version, stub, packages)) == version
        yield worker
        worker.close()


@pytest.fixture(scope="session")
def registered(tensorrt: Worker, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """A process whose registry has every plugin."""
    tensorrt.call(register_all, building.CAPABILITY, tmp_path_factory.mktemp("ptx"))
    return tensorrt
