"""The second small target, kept aside to check that what holds on the embedded target holds elsewhere (scripts/evidence/held_out.py)."""
