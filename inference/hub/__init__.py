"""The connection to a Hugging Face Hub, and fetching drafters that were published there."""
