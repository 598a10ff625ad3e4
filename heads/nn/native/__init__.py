"""Layers of the target's own family, of transformers' classes, as parts of a drafter."""
