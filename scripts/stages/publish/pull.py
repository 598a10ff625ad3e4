"""`headstart pull`: fetches a drafter that `headstart push` published.

headstart pull pull.repo=user/name
headstart pull pull.repo=user/name pull.what=vllm
"""

from __future__ import annotations

from pathlib import Path

from inference.hub.config import OWN
from inference.hub.pull import pull
from scripts.config.schema import Settings


def run(settings: Settings) -> None:
    """Fetch it into pull.out, or <run.root>/pulled/<user>--<name>."""
    config = settings.pull
    name = config.repo.replace("/", "--")
    folder = name if config.what == OWN else f"{name}--{config.what}"
    pull(config, config.out or Path(settings.run.root) / "pulled" / folder)
