"""From a checkpoint to canonical graphs and a bundle."""

from mtp_exporter.build import BuildOptions, build

__all__ = ["BuildOptions", "build"]
