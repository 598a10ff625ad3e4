"""The meaning of every kernel in plain torch."""
