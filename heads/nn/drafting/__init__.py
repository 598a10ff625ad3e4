"""Plans of a draft's shape, as tensors that steps look up, and filling the shape with tokens."""
