"""A NumPy forward straight from the checkpoint: what the built graphs are checked against.

It shares with the graphs only the family's description. The weights are read from the checkpoint's own
files, one layer at a time, and the operators are the NumPy references of the plugins.
"""

from mtp_exporter.reference.model import Stage, final_hidden, head_stages, layer_output

__all__ = ["Stage", "final_hidden", "head_stages", "layer_output"]
