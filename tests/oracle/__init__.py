"""Slow, plain references that fast code is compared with."""
