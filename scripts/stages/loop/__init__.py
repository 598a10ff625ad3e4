"""`headstart loop`: the steps of one turn, and rounds that learn from rejected drafts."""
