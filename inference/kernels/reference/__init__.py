"""The reference of every kernel in plain torch."""
