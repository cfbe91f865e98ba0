"""What proposes draft tokens: one file each, all of them in the table of `registry`."""
