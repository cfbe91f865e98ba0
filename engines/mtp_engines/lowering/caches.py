"""How wide a cache row is on a CPU, which decides whether attention rounds alike for every number of rows."""

from __future__ import annotations

from mtp_engines.contracts.model import AttentionSpec, CachedMixer, ModelSpec

_KERNEL_UNIT = 8
UNSPLIT = 128
"""Values of a cache row that are always summed in one."""


def stored_width(width: int) -> int:
    """Width of a head in the cache: at least `width`, the rest zeros that change no score.

    GroupQueryAttention takes multiples of 8. Beyond 128 it sums a dot product in several parts whose borders
    depend on the number of cached rows, unless the width is a power of two (decision 0006), and with AVX-512 even then
    (`attention_trial`).
    """
    if width > UNSPLIT:
        return 1 << (width - 1).bit_length()
    return -(-width // _KERNEL_UNIT) * _KERNEL_UNIT


def cache_shape(mixer: CachedMixer) -> tuple[int, int]:
    """Heads and stored width of each cache of a layer."""
    if isinstance(mixer, AttentionSpec):
        return mixer.num_kv_heads, stored_width(mixer.head_dim)
    return 1, stored_width(mixer.row_width)


def cache_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes that one token of one sequence adds to the caches of target and head (float32)."""
    mixers = [*(mixer for _, mixer in spec.cached_layers()), *spec.head_mixers()]
    caches = ((2 if isinstance(mixer, AttentionSpec) else 1, *cache_shape(mixer)) for mixer in mixers)
    return sum(4 * count * heads * width for count, heads, width in caches)
