"""The stage `generate`: the target answers prompts, and its answers become training data."""
