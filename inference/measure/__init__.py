"""Measuring drafters on held-out prompts: what is compared, how it is timed, what is computed from
it."""
