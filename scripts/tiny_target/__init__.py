"""Everything that makes the embedded target: corpus, tokenizer, training, export, card and prompts."""
