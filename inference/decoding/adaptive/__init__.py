"""Adaptive draft lengths."""
