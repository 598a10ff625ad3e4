"""What `headstart verify-export` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heads.api.config import PositiveInt, config
from inference.export.live_check_folder import LiveConfig


@config("verify")
@dataclass(frozen=True)
class VerifyConfig:
    """Which exported folder is checked, and how."""

    dir: str = ""
    """The folder that `headstart export` wrote, or any other in one of its layouts."""
    mode: Literal["static", "live"] = "static"
    """static: the engine's loading rules and its forward pass, replayed without it; live: the engine itself serves the folder."""
    contexts: PositiveInt = 6
    """Places in the target's own text at which the forward passes are compared (>= 1)."""
    source: str = ""
    """The checkpoint that the folder was made of; empty: where `headstart_export.json` says, if it is still there."""
    live: LiveConfig = field(default_factory=LiveConfig)
    """How the engine is asked, for verify.mode=live."""
