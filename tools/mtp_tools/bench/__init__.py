"""`mtp-run bench`: speed of plain decoding and of every K, in turn within one process, on tokens that must agree."""
