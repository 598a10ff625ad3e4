"""Commands for users: the `headstart` stages, the tools, and the scripts behind assets and
reports."""
