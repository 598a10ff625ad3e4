"""Choosing how to draft: predicted from measured costs and measured acceptance, then checked by
running the best few."""
