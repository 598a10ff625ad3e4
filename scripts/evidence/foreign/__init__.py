"""Scripts that run in the environment of another project; nothing here imports Headstart."""
