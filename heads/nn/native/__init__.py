"""Layers of the target's own family, from transformers' classes, as parts of a drafter."""
