"""The checks that a device must pass before its figures are trusted (`python -m
scripts.evidence.gpu`)."""
