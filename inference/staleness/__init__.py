"""Has a drafter gone stale? A sequential test of its acceptance on fresh traffic against what was
measured before."""
