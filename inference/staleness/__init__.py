"""Detects stale drafters: a sequential test compares acceptance on fresh traffic with an earlier
measurement."""
