"""Several generations at once over the slots of one engine."""
