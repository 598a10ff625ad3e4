"""Faults, injected from outside into real stages: `python -m tests.chaos`, and kills of a loop of
rounds."""
