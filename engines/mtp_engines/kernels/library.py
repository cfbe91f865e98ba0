"""The compiled kernels: where they are, and whether this processor should use them."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from mtp_engines.errors import BundleError
from mtp_engines.kernels.build import LIBRARY, SOURCES, source_digest

CHOICE = "MTP_CPU_KERNELS"
"""Environment variable: `own` asks for these kernels, `own-avx2` for them without what a processor can do beyond AVX2,
`onnxruntime` for none of them; without it they are taken wherever they run."""
_OWN, _OWN_AVX2, _ONNXRUNTIME = _CHOICES = ("own", "own-avx2", "onnxruntime")
INSTRUCTIONS = ("avx2", "vnni")
"""What kernels can be made of: AVX2, or AVX-512 with its products of 8-bit integers too. Results are the same bits."""


def path_of_kernels() -> Path | None:
    """The library for `register_custom_ops_library`; None where ONNX Runtime's own kernels run.

    Raises:
        BundleError: the environment asks for kernels that there are not, or for something unknown.
    """
    asked, missing = _asked(), why_missing()
    if asked in (_OWN, _OWN_AVX2) and missing is not None:
        raise BundleError(f"{CHOICE} asks for the tool's own kernels, but {missing}.")
    return None if asked == _ONNXRUNTIME or missing is not None else LIBRARY


def instructions() -> str:
    """Which of `INSTRUCTIONS` the kernels use here."""
    return INSTRUCTIONS[0] if _asked() == _OWN_AVX2 else INSTRUCTIONS[kernels().mtp_best_instructions()]


def _asked() -> str:
    asked = os.environ.get(CHOICE, "")
    if asked and asked not in _CHOICES:
        raise BundleError(f"{CHOICE} is {asked!r}. It takes {', '.join(_CHOICES)}; unset it to let the tool choose.")
    return asked


@cache
def why_missing() -> str | None:
    """Why the kernels cannot run here, as a part of a sentence; None if they can."""
    if not LIBRARY.exists():
        return "they were not compiled when the package was installed; install it again where a C++ compiler is"
    try:
        kernels = ctypes.CDLL(str(LIBRARY))
        kernels.mtp_source_digest.restype = ctypes.c_char_p
        digest, supported = kernels.mtp_source_digest().decode(), bool(kernels.mtp_is_supported())
    except (OSError, AttributeError) as error:
        return f"they cannot be loaded ({error}); install the package again"
    if SOURCES.exists() and digest != source_digest():
        return "they were compiled from other sources; install the package again"
    return None if supported else "this processor has no AVX2"


@cache
def kernels() -> ctypes.CDLL:
    """The library with the types of its functions."""
    found = ctypes.CDLL(str(LIBRARY))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.mtp_new_arena.argtypes, found.mtp_new_arena.restype = [number], pointer
    found.mtp_let_arena_go.argtypes, found.mtp_let_arena_go.restype = [pointer], None
    found.mtp_pack_blocks.argtypes, found.mtp_pack_blocks.restype = [pointer] * 3 + [number] * 3, pointer
    found.mtp_pack_rotated.argtypes, found.mtp_pack_rotated.restype = [pointer] * 3 + [number] * 5, pointer
    found.mtp_pack_whole.argtypes, found.mtp_pack_whole.restype = [pointer] * 2 + [number] * 3, pointer
    return found
