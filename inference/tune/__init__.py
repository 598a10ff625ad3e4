"""Chooses how to draft: predicts speeds from measured costs and measured acceptance, then checks
the best few by running them."""
