"""Logs, tracking services and displays of a run in training."""
