"""Drafters that look tokens up in earlier text instead of computing them."""
