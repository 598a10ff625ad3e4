"""Configuration of `headstart verify-export`."""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.api.errors import UserError, suggest

MODES = ("static", "live")


@dataclass(frozen=True)
class LiveConfig:
    """How an export is served for the comparison."""

    python: str = ""
    """Python of an environment with vLLM (`make serve-env` makes .venv-serve/bin/python)."""
    prompts: str = "assets/prompts"
    """A .jsonl file, or a folder with one <domain>.jsonl per domain."""
    prompts_per_domain: int = 4
    """Prompts of each domain."""
    max_new_tokens: int = 128
    """Most new tokens of an answer."""
    batches: tuple[int, ...] = (1, 8)
    """Requests in flight at once; every size is a pass over all prompts."""
    seconds: float = 1800.0
    """Longest time that the engine may take."""

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise UserError(
                f"verify.live.batches must name sizes of at least 1; given: {list(self.batches)}."
            )
        for name in ("prompts_per_domain", "max_new_tokens", "seconds"):
            if getattr(self, name) <= 0:
                raise UserError(
                    f"verify.live.{name} must be above 0; given: {getattr(self, name)}."
                )


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
    contexts: int | None = None
    """Not used any more; setting it is an error that names verify.mode=live."""

    def __post_init__(self) -> None:
        if self.contexts is not None or self.mode == "forward":
            raise UserError(
                f"verify.{'contexts' if self.contexts is not None else 'mode=forward'}: the static "
                "check no longer computes the engine's forward pass. Use verify.mode=live "
                "verify.live.python=<a Python that has vLLM>, which compares the engine's own "
                "drafts with ours, or verify.mode=static for the files alone."
            )
        if self.mode not in MODES:
            raise UserError(f"verify.mode '{self.mode}' is unknown.{suggest(self.mode, MODES)}")
