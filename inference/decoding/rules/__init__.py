"""Acceptance rules, one per file: which drafted nodes are kept, and which token follows them."""
