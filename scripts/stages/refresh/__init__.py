"""`headstart refresh`: the stage, its parts, and the record that it writes."""
