"""How a step runs: operation by operation, as a captured CUDA graph, or compiled."""
