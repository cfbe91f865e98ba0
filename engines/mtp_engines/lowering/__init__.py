"""From the canonical graph to what one backend runs."""
