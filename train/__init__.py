"""What turns a target's answers into a drafter: generation, data, features, the training loop."""
