"""Configuration of `headstart pull`, and names on the Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from heads.api.config import config
from heads.api.errors import UserError
from inference.folders import require_folder_name

REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OWN = "headstart"
"""Of `pull.what`: the checkpoint."""


@config("pull")
@dataclass(frozen=True)
class PullConfig:
    """The published drafter to download, and the folder to write."""

    repo: str = ""
    """Repository on the Hub, "user/name"."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""
    what: str = OWN
    """Part to download: headstart (the checkpoint: for chat, measure and train), an engine's folder
    (vllm, sglang, speculators, transformers), or all."""
    out: Path | None = None
    """Folder to write; empty: <run.root>/pulled/<user>--<name>."""

    def __post_init__(self) -> None:
        if self.repo and not REPO_NAME.fullmatch(self.repo):
            raise UserError(f"pull.repo must look like 'user/name'; given: '{self.repo}'.")
        require_folder_name("pull.what", self.what)
