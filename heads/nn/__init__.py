"""Network parts and losses that several kinds share. Nothing here depends on a kind."""
