"""The stages of the command line: one module each, with `run(settings)`."""
