"""What runs in an environment of another project; nothing here imports Headstart."""
