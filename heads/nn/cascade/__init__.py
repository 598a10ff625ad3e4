"""Drafters that consist of drafters: one speeds up another, or several share one verification."""
