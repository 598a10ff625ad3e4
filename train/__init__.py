"""Training of drafters: generation of answers, data, features and the training loop."""
