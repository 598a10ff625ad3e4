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
    """How an export is served for the comparison."""

    python: str = ""
    """Python of an environment with vLLM (`make serve-env` makes .venv-serve/bin/python)."""
    prompts: str = ""
    """A .jsonl file, or a folder with one <domain>.jsonl per domain; empty: what `measure` would
    take, `bench` or the prompts held out of the data that the drafter was trained on."""
    prompts_per_domain: PositiveInt = 4
    """Prompts of each domain."""
    max_new_tokens: Tokens = 128
    """Most new tokens of an answer."""
    batches: NonEmpty[Rows] = (1, 8)
    """Requests in flight at once; every size is a pass over all prompts."""
    seconds: Seconds = 1800.0
    """Longest time that the engine may take."""


@config("verify")
@dataclass(frozen=True)
class VerifyConfig:
    """Which exported folder is checked, and how."""

    dir: str = ""
    """The folder that `headstart export` wrote, or any other in one of its layouts."""
    mode: str = "static"
    """static: the files, by the engine's loading rules, without the engine; live: vLLM serves the
    folder, and text and acceptance are compared with the bundled decoder's."""
    source: str = ""
    """The checkpoint that the folder was made of; empty: the one that `headstart_export.json`
    names, if it still exists."""
    live: LiveConfig = field(default_factory=LiveConfig)
    """How the engine is run, for verify.mode=live."""
    contexts: Size | None = None
    """Not used any more; setting it is an error that names verify.mode=live."""

    def __post_init__(self) -> None:
        if self.contexts is not None or self.mode == "forward":
            raise UserError(
                f"verify.{'contexts' if self.contexts is not None else 'mode=forward'}: the static "
                "check no longer computes the engine's forward pass. Use verify.mode=live "
                "verify.live.python=<a Python that has vLLM>, which compares the engine's own "
                "drafts with ours, or verify.mode=static for the files alone."
            )
        require_one_of("verify.mode", self.mode, ("static", "live"))
