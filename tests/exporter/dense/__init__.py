"""MiMo, EAGLE drafts and plain dense targets: built bundles against independent oracles."""
