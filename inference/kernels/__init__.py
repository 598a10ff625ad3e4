"""Fast implementations of single operations, each tested against its reference in plain torch."""
