"""What an engine is built with and for: the installed package and a compute capability."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata

from mtp_engines.errors import BuildError
from mtp_plugins.triton_kernels.ptx import CAPABILITIES

Capability = tuple[int, int]
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries.

    `elsewhere`: it builds for devices that this machine has not; `plugins`: it takes plugins from Python.
    """

    name: str
    title: str
    module: str
    package: str
    least_version: tuple[int, int]
    capabilities: tuple[Capability, ...]
    elsewhere: bool
    plugins: bool


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour(
            name="tensorrt-rtx",
            title="TensorRT-RTX",
            module="tensorrt_rtx",
            package="tensorrt-rtx-cu13",
            least_version=(1, 7),
            # Version 1.7 knows 7.5 too and builds our graphs for it in no half precision.
            capabilities=((8, 0), (8, 6), (8, 9), (12, 0), (12, 1)),
            elsewhere=True,
            plugins=False,
        ),
        Flavour(
            name="tensorrt",
            title="TensorRT",
            module="tensorrt",
            package="tensorrt-cu13",
            least_version=(10, 16),
            # Those that the plugins' kernels are compiled for.
            capabilities=tuple(divmod(capability, 10) for capability in CAPABILITIES),
            elsewhere=False,
            plugins=True,
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """A flavour as installed here and the device to build for."""

    flavour: Flavour
    version: str
    capability: Capability

    @property
    def name(self) -> str:
        """As in `sm_89`."""
        return "sm_{}{}".format(*self.capability)


def resolve_target(flavour: str, capability: str) -> Target:
    """Find the package and check that it builds for the device.

    Args:
        flavour: `tensorrt-rtx` or `tensorrt`; the name of the former's module will do.
        capability: as NVIDIA writes it, such as `8.9`.

    Raises:
        BuildError: one of them is unknown, absent, too old or does not fit the other.
    """
    found = FLAVOURS.get(flavour.replace("_", "-"))
    if found is None:
        raise BuildError(f"{flavour} is no backend that engines are built for; give one of {', '.join(FLAVOURS)}.")
    device = parse_capability(capability)
    _check_capability(found, device)
    version = installed_version(found)
    here = device if found.elsewhere else local_capability()
    if here != device:
        has = "none was found here" if here is None else "here that is {}.{}".format(*here)
        raise BuildError(
            f"{found.title} builds for the GPU of the machine that it runs on, and {has}, not {capability}. Build on a "
            "machine with that GPU."
        )
    return Target(found, version, device)


def parse_capability(text: str) -> Capability:
    """(8, 9) for `8.9`.

    Raises:
        BuildError: it is written in another way.
    """
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise BuildError(f"{text!r} is no compute capability; write it like 8.9 or 12.0.")
    return int(match.group(1)), int(match.group(2))


def _check_capability(flavour: Flavour, capability: Capability) -> None:
    if capability not in flavour.capabilities:
        known = ", ".join("{}.{}".format(*each) for each in flavour.capabilities)
        others = [other for other in FLAVOURS.values() if other is not flavour and capability in other.capabilities]
        hint = f" or the backend {others[0].name}" if others else ""
        raise BuildError(
            "{} does not build for compute capability {}.{}; give one of {}{}.".format(
                flavour.title, *capability, known, hint
            )
        )


def installed_version(flavour: Flavour) -> str:
    """Version of the package that has the module.

    Raises:
        BuildError: there is none, or Polygraphy is missing, or it is older than this release needs.
    """
    for module in (flavour.module, "polygraphy"):
        if importlib.util.find_spec(module) is None:
            raise BuildError(
                f"{flavour.title} is not installed: there is no Python module {module}. Install it with "
                f"`pip install 'mtp-export[{flavour.name}]'`."
            )
    version = _version_of(flavour)
    least = ".".join(map(str, flavour.least_version))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < flavour.least_version:
        raise BuildError(
            f"{flavour.title} {version} is installed, {least} or newer is needed. Install it with "
            f"`pip install --upgrade 'mtp-export[{flavour.name}]'`."
        )
    return version


def _version_of(flavour: Flavour) -> str:
    try:
        return metadata.version(flavour.package)
    except metadata.PackageNotFoundError:
        # The module comes in packages of several names, one for each CUDA version.
        owners = metadata.packages_distributions().get(flavour.module, [])
        return metadata.version(owners[0]) if owners else "0.0"


def local_capability() -> Capability | None:
    """Compute capability of the first GPU of this machine, or None without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return None
    return numbers[0].value, numbers[1].value
