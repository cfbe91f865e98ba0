"""From a checkpoint to canonical graphs and a bundle."""

from mtp_exporter.build import build
from mtp_exporter.options import BuildOptions

__all__ = ["BuildOptions", "build"]
