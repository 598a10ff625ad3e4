"""From a draft's shape to the tensors that drafting steps look up, and filling the shape with
tokens."""
