"""Plain-torch meanings of operations that have kernels, with their declarations."""
