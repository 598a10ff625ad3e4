"""Measures a running server: prompts through its API, acceptance from what it counts."""
