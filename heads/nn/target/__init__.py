"""The target's own layers as parts of a drafter (self-speculation)."""
