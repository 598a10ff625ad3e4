"""A Hugging Face Hub: the connection to it, and fetching drafters that were published there."""
