"""`mtp-run acceptance`: how well a drafter drafts, by position and domain, and what that should gain."""
