"""Configuration of `headstart verify-export`."""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.api.config import (
    NonEmpty,
    PositiveInt,
    Rows,
    Seconds,
    Size,
    Tokens,
    config,
    require_one_of,
)
from heads.api.errors import UserError


@config("verify.live")
@dataclass(frozen=True)
class LiveConfig:
    """The serving of an export for the comparison."""

    python: str = ""
    """Python of an environment with vLLM (`make serve-env` makes .venv-serve/bin/python)."""
    prompts: str = ""
    """A .jsonl file, or a folder with one <domain>.jsonl per domain; empty: the prompts that
    `measure` would use, which are those of `bench` or those held out of the drafter's training
    data."""
    prompts_per_domain: PositiveInt = 4
    """Number of prompts of each domain."""
    max_new_tokens: Tokens = 128
    """Maximum number of new tokens per answer."""
    batches: NonEmpty[Rows] = (1, 8)
    """Numbers of concurrent requests; each number takes a pass over all prompts."""
    seconds: Seconds = 1800.0
    """Time limit of the engine in seconds."""


@config("verify")
@dataclass(frozen=True)
class VerifyConfig:
    """Which exported folder is checked, and how."""

    dir: str = ""
    """Folder that `headstart export` wrote, or any other folder in one of its layouts."""
    mode: str = "static"
    """static: check the files by the engine's loading rules, without the engine. live: serve the
    folder with vLLM, and compare text and acceptance with the bundled decoder's."""
    source: str = ""
    """Checkpoint that the folder was made from; empty: the one that `headstart_export.json` names,
    if it still exists."""
    live: LiveConfig = field(default_factory=LiveConfig)
    """How the engine is run, for verify.mode=live."""
    contexts: Size | None = None
    """No longer used; setting it is an error that names verify.mode=live."""

    def __post_init__(self) -> None:
        if self.contexts is not None or self.mode == "forward":
            raise UserError(
                f"verify.{'contexts' if self.contexts is not None else 'mode=forward'}: the static "
                "check no longer computes the engine's forward pass. Use verify.mode=live "
                "verify.live.python=<a Python that has vLLM>, which compares the engine's own "
                "drafts with ours, or verify.mode=static for the files alone."
            )
        require_one_of("verify.mode", self.mode, ("static", "live"))
