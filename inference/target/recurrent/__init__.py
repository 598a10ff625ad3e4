"""Targets with recurrent layers: states that verify trees of drafts and take refused ones back."""
