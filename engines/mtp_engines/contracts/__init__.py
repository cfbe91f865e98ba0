"""Plain data that exporter, engines and runtime agree on."""
