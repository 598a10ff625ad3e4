"""Sources of the target's hidden states for training: this process, a store, servers, other
processes."""
