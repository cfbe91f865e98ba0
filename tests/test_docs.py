"""The documentation: links resolve, commands exist, and the console blocks of the README run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import run_command

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "checkpoints").rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_RUNNABLE = ("mtp-run ", "mtp-export ", "python -c ")


def readme_commands() -> list[str]:
    """Commands of the README's console blocks that need nothing but this repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line[2:] for block in _BLOCK.findall(text) for line in block.splitlines() if line.startswith("$ ")]
    return [
        line for line in lines if line.startswith(_RUNNABLE) and "Qwen3.5-" not in line and "acceptance" not in line
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_resolves(document: Path) -> None:
    targets = [link for link in _LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in targets if not (document.parent / link).exists()]
    assert missing == []


def test_the_console_blocks_of_the_readme_run_in_order(tmp_path: Path) -> None:
    """In a directory of their own that sees the repository's checkpoints."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    commands = readme_commands()
    assert len(commands) >= 5, "control: the README has console blocks"
    for command in commands:
        words = shlex.split(command)
        program = str(Path(sys.executable).with_name(words[0]))
        done = subprocess.run(
            [program, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mtp-export", "build"),
        ("mtp-export", "inspect"),
        ("mtp-export", "triton"),
        ("mtp-run", "generate"),
        ("mtp-run", "verify"),
        ("mtp-run", "acceptance"),
        ("mtp-run", "bench"),
        ("mtp-run", "batch"),
        ("mtp-run", "serve"),
    ],
)
def test_the_reference_lists_every_option(name: str, command: str) -> None:
    shown = run_command(name, command, "--help").stdout
    options = set(re.findall(r"--[a-z][a-z-]+", shown)) - {"--help"}
    reference = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = re.split(rf"^## `{name} {command}`", reference, flags=re.MULTILINE)[1].split("\n## ")[0]
    documented = set(re.findall(r"--[a-z][a-z-]+", section))
    assert options, "control: the help lists options"
    assert options - documented == set(), "options that the reference does not know"
    assert documented - options - {"--help"} == set(), "options that exist only in the reference"


def test_the_dev_script_lists_its_commands_and_refuses_others() -> None:
    shown = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    for command in ("demo", "test", "setup", "lint", "check"):
        assert f"./dev {command}" in shown
    wrong = subprocess.run([ROOT / "dev", "dance"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "there is no command 'dance'" in wrong.stderr
