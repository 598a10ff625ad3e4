"""How steps are run: operation by operation, as a captured CUDA graph, or compiled."""
