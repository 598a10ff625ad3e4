"""Publishing drafters on the Hub and fetching them."""
