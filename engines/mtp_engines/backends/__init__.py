"""Backends: each opens a bundle as an engine."""

from __future__ import annotations

from mtp_engines.backends.options import BACKENDS, EngineOptions
from mtp_engines.backends.registry import open_engine

__all__ = ["BACKENDS", "EngineOptions", "open_engine"]
