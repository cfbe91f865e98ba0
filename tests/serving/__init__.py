"""Tests of the package mtp_serving."""
