"""The faults that `scripts.faults` injects, one module per stage they hit."""
