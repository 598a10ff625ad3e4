"""From logits to tokens: processors, temperature, filters, and the shared noise."""
