"""`mtp-run acceptance`: how many drafts a target keeps, by position, on given prompts."""
