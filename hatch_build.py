"""Compiles the CPU kernels while the package is built or installed; without a compiler it goes on and says so."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_KERNELS = "engines/mtp_engines/kernels"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Makes the wheel one of this platform if it holds compiled kernels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` is "standard" or "editable"."""
        spec = importlib.util.spec_from_file_location("build_kernels", Path(self.root) / _KERNELS / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        reason = build.compile_kernels()
        if reason is not None:
            self.app.display_warning(f"Without kernels of its own (ONNX Runtime's are used): {reason}.")
            return
        build_data["artifacts"].append(f"/{_KERNELS}/{build.LIBRARY.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self._platform()}"

    @staticmethod
    def _platform() -> str:
        from packaging.tags import platform_tags  # comes with hatchling

        return next(iter(platform_tags()))
