"""The losslessness audit: tests whether any drafter changes the target's text."""
