"""Tree drafts: several sequences hold the same text, each has a draft of its own, and the best one counts."""
