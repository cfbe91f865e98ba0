"""Writes a model repository: one directory with a configuration, a few lines of Python and the bundle."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from mtp_engines.bundle import open_bundle, staging
from mtp_engines.errors import BuildError
from mtp_serving.triton.config import Settings, config_of, problems, text_of

CONFIG, MODEL = "config.pbtxt", "1/model.py"
BUNDLE = "bundle"
"""Directory or link beside model.py."""
_MODEL_TEXT = '''"""Written by `mtp-export triton`. The package mtp-export has to be installed in this interpreter."""

import triton_python_backend_utils as pb_utils

from mtp_serving.triton.backend import Backend


class TritonPythonModel(Backend):
    """A bundle, served; everything is in the package."""

    utils = pb_utils
'''


def write_repository(bundle: Path, out: Path, settings: Settings, name: str | None = None, *, link: bool) -> Path:
    """Write one model into a repository, or take the place of the one that we wrote before.

    Args:
        bundle: directory of the bundle; its files are checked.
        out: the repository, which may hold other models.
        settings: how to open and run it.
        name: of the model; None takes that of the bundle.
        link: link to the bundle, by its absolute path, instead of copying it.

    Returns:
        The directory of the model.

    Raises:
        BundleError: the bundle is incomplete or damaged.
        BuildError: a setting does not fit the bundle, or the place is taken or cannot be written.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    wrong = problems(config_of(settings, manifest), manifest)
    if settings.gpus and settings.place(manifest) == "cpu":
        wrong.append("--gpus names GPUs, but the device is cpu; leave it out, or use --device cuda.")
    if wrong:
        raise BuildError(" ".join(wrong))
    name = manifest.name if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise BuildError(f"the model would be called {name!r}; give a --name of letters, digits, dots, - and _.")
    target = out / name
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out} is a file, and a model repository is a directory; choose another --out.")
    if target.exists() and not (target / MODEL).is_file():
        raise BuildError(f"{target} exists and is no model that this command wrote; choose another --out or --name.")
    with staging(target) as directory:
        (directory / CONFIG).write_text(text_of(settings, manifest), encoding="utf-8")
        model = directory / MODEL
        model.parent.mkdir()
        model.write_text(_MODEL_TEXT, encoding="utf-8")
        try:
            if link:
                (model.parent / BUNDLE).symlink_to(bundle.resolve())
            else:
                shutil.copytree(bundle, model.parent / BUNDLE)
        except OSError as error:
            raise BuildError(f"{out} cannot be written: {error}. Choose another --out, or use --link.") from error
        directory.chmod(0o755)
        _replace(target, directory)
    return target


def _replace(target: Path, directory: Path) -> None:
    """Move a complete directory to its place, and remove what stood there."""
    if not target.exists():
        directory.rename(target)
        return
    # A name that `staging` clears away, should this be killed in between.
    aside = target.with_name(f".{target.name}.{os.getpid()}.old.partial")
    os.rename(target, aside)
    directory.rename(target)
    shutil.rmtree(aside)
