"""Training a drafter and its target together."""
