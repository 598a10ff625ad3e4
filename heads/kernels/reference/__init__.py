"""Plain-torch references of operations that have kernels, with their declarations."""
