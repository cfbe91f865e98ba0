"""`python -m mtp_tools.load BUNDLE`: how fast a server is under load, and whether it stays right (`--soak`)."""
