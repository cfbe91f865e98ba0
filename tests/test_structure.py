"""The structure of the code: which package may import which, and how long things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_exporter.families import families as found_families

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "mtp_plugins": ROOT / "plugins" / "mtp_plugins",
    "mtp_engines": ROOT / "engines" / "mtp_engines",
    "mtp_exporter": ROOT / "exporter" / "mtp_exporter",
    "mtp_runtime": ROOT / "runtime" / "mtp_runtime",
    "mtp_serving": ROOT / "serving" / "mtp_serving",
    "mtp_tools": ROOT / "tools" / "mtp_tools",
}
ALLOWED = {
    "mtp_plugins": {"mtp_plugins"},
    "mtp_engines": {"mtp_plugins", "mtp_engines"},
    "mtp_exporter": {"mtp_plugins", "mtp_engines", "mtp_exporter"},
    "mtp_runtime": {"mtp_plugins", "mtp_engines", "mtp_runtime"},
    "mtp_serving": {"mtp_engines", "mtp_runtime", "mtp_serving"},
    "mtp_tools": set(PACKAGES),
}
HEAVY = {"torch", "transformers", "tensorrt"}
# The recipe of the carried checkpoint trains with torch, and a real model is compared with transformers; nothing else
# may need them.
TRAINS = PACKAGES["mtp_tools"] / "train_tiny"
# Plugins are registered with TensorRT where it builds an engine.
REGISTERS = PACKAGES["mtp_plugins"] / "tensorrt_plugins"
# Backends that run on PyTorch's tensors, whatever runs the graphs; they are imported when a bundle is opened on them.
ON_TORCH = [PACKAGES["mtp_engines"] / "backends" / name for name in ("torch", "gpu", "onnxruntime_cuda", "tensorrt")]
# A tool for a machine with a GPU.
MEASURES = PACKAGES["mtp_tools"] / "device"
MAY_BE_HEAVY = (TRAINS, PACKAGES["mtp_tools"] / "smollm2" / "oracle", REGISTERS, *ON_TORCH, MEASURES)
# What writes checkpoints has to name the family it writes; what reads them finds it by its file.
WRITES_CHECKPOINTS = (TRAINS, PACKAGES["mtp_tools"] / "made_up")
FILE_LINES, FUNCTION_LINES = 300, 50


def sources() -> list[tuple[str, Path]]:
    """Every source file with its package."""
    return [(name, path) for name, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level package of every import, inside functions and type checks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def forbidden(package: str, tree: ast.AST) -> set[str]:
    """Packages of ours that this package may not import."""
    return {name for name in imports(tree) if name in PACKAGES and name not in ALLOWED[package]}


def long_functions(tree: ast.AST) -> list[str]:
    """Functions over the limit, docstring included."""
    return [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    ]


@pytest.mark.parametrize(
    ("package", "path"), sources(), ids=lambda v: str(v.relative_to(ROOT)) if isinstance(v, Path) else ""
)
def test_a_file_keeps_to_the_structure(package: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert forbidden(package, tree) == set()
    assert ast.get_docstring(tree), "a module says in its docstring what it holds"
    assert len(text.splitlines()) <= FILE_LINES
    assert long_functions(tree) == []
    if not any(folder in path.parents for folder in MAY_BE_HEAVY):
        assert HEAVY & set(imports(tree)) == set()


def test_control_the_structure_test_sees_violations() -> None:
    body = "\n".join(f"    x = {i}" for i in range(60))
    tree = ast.parse(f"def f():\n    from mtp_runtime import api\n{body}\n    import torch")
    assert forbidden("mtp_exporter", tree) == {"mtp_runtime"}
    assert long_functions(tree)
    assert HEAVY & set(imports(tree))


def heavy_modules(statement: str) -> set[str]:
    """Heavy packages that a fresh process has imported after a statement."""
    heavy = sorted({*HEAVY, "triton", "tensorrt_rtx"})
    code = f"import sys\n{statement}\nprint(*(name for name in {heavy} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(result.stdout.split())


def test_the_default_path_imports_no_heavy_package() -> None:
    modules = "mtp_runtime.api, mtp_runtime.cli, mtp_exporter.cli, mtp_engines.backends, mtp_plugins.registry"
    assert heavy_modules(f"import {modules}") == set()


def test_control_a_heavy_import_is_seen() -> None:
    assert "torch" in heavy_modules("import mtp_engines.backends.torch.engine")


def test_every_operator_folder_is_registered() -> None:
    from mtp_plugins.registry import OPERATORS

    folders = {path.parent.name for path in PACKAGES["mtp_plugins"].glob("*/__init__.py")}
    folders -= {"tensorrt_plugins", "triton_kernels"}  # What the operators' kernels and plugins share.
    names = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in OPERATORS}
    assert folders == names
    for folder in folders:
        parts = {path.name for path in (PACKAGES["mtp_plugins"] / folder).glob("*.py")}
        assert {"reference.py", "body.py"} <= parts


def test_no_family_is_named_outside_its_file() -> None:
    families = PACKAGES["mtp_exporter"] / "families"
    names = {family.__name__.rsplit(".", 1)[-1] for family in found_families()}
    assert {path.stem for path in families.glob("*.py")} > names > {"qwen3_5"}
    for _, path in sources():
        if any(folder in path.parents for folder in (families, *WRITES_CHECKPOINTS)):
            continue
        text = path.read_text(encoding="utf-8")
        assert not [name for name in names if name in text], f"{path} names a family"


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_a_default_install_asks_for_no_heavy_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if re.split(r"\W", line)[0] in HEAVY]
    assert "torch==2.13.0" in project["optional-dependencies"]["dev"], "control: the dev extra has it, pinned"
