"""Training data, from any dataset to packed rows: sources, answers on disk, loss masks, packing,
the step loader."""
