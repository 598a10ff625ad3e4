"""Measures drafters on held-out prompts: the compared arms, their timing, and the computed
numbers."""
