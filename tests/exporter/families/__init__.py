"""End-to-end tests of single families: checkpoint, bundle, generation."""
