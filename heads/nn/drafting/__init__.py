"""From a draft's shape to the tensors that steps look up, and filling it with tokens."""
