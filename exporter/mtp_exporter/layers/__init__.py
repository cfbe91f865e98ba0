"""Functions that add the nodes of one layer to a graph."""
