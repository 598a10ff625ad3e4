"""The contract between drafters, the decoder and the trainer: protocols, the values they exchange,
trees, registry, checkpoints."""
