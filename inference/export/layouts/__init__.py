"""How serving engines and other trainers lay out a drafter: one file per family."""
