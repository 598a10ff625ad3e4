"""The decoder: sampling, acceptance rules, one verification step, batches, the engine."""
