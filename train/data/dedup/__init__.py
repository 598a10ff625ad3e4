"""Finding repeated and similar rows."""
