"""`python -m headstart <stage> ...`: the command line, from any folder."""

from __future__ import annotations

import sys

from headstart.siblings import load_siblings


def main() -> int:
    """Run one command; returns its exit status."""
    load_siblings(("heads", "inference", "train", "scripts", "conf"))
    from scripts.cli import main as command  # found whatever lies in the working directory

    return command()


if __name__ == "__main__":
    sys.exit(main())
