"""The contract between drafters, the decoder and the trainer: protocols, the values that cross,
trees, registry, checkpoints."""
