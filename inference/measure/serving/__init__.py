"""Measures a running server: sends prompts through its API and takes acceptance from its
counters."""
