"""`mtp-run verify`: proof on this machine that speculation changes no token and no state."""
