"""What a checkpoint is and whether it can be exported, from its headers alone."""
