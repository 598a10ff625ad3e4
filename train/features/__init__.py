"""Where the target's hidden states for training come from: this process, a store, servers, other
processes."""
