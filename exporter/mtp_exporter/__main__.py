"""`python -m mtp_exporter` is `mtp-export`."""

from mtp_exporter.cli import main

main()
