"""Network parts and losses that several kinds share. Nothing here knows a kind."""
