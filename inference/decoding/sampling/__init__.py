"""From logits to tokens: processors, temperature, filters, and the noise that target and drafter
share."""
