"""Drafters: every public module here is one kind; `heads.api` and `heads.nn` support them."""
