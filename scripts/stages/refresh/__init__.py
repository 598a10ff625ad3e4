"""`headstart refresh`: the stage, its parts, and its record."""
