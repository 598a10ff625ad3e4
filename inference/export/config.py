"""Configurations of `headstart export` and `headstart import`, and the names that they allow."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError, suggest

ENGINES = ("vllm", "sglang", "speculators", "transformers")
"""Export targets. speculators: vLLM's library of drafters, whose folders vLLM serves directly."""
FLOATS = ("float32", "bfloat16", "float16")
"""Number formats of exported weights."""
READABLE = ("speculators", "mtp", "eagle3", "dflash", "eagle", "medusa", "causal")
"""Layouts that are imported, in the order in which `inference.export.importing` tries them."""


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, for which engine, and where to."""

    engine: str = "vllm"
    """vllm, sglang, speculators or transformers."""
    checkpoint: str = ""
    """A checkpoint folder; empty: the run's drafter (run.name, run.drafter)."""
    out: str = ""
    """The folder to write; empty: <run>/export/<drafter>/<engine>."""
    tokens: int = 0
    """Drafted tokens per step that the serve commands name; 0: as many as the checkpoint's
    decode.yaml says, without one as many as the drafter was trained for."""
    dtype: str = ""
    """Number format of the weights: float32, bfloat16 or float16; empty: as stored, which can be
    imported back bit for bit."""
    mask_token_id: int = -1
    """Token that stands for "not known yet" in drafters that learned a vector for it; -1: one that
    the tokenizer does not use."""
    overwrite: bool = False
    """Replace the folder if it exists and an export wrote it."""

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in FLOATS:
            raise UserError(
                f"export.dtype '{self.dtype}' is unknown. Allowed: {', '.join(FLOATS)}, or nothing."
            )
        if self.engine not in ENGINES:
            raise UserError(
                f"export.engine '{self.engine}' is unknown.{suggest(self.engine, ENGINES)}"
            )
        if self.tokens < 0:
            raise UserError(f"export.tokens must not be negative; given {self.tokens}.")


@dataclass(frozen=True)
class ImportConfig:
    """Which folder is imported, and where to."""

    source: str = ""
    """The folder that another trainer, or `headstart export`, wrote."""
    layout: str = "auto"
    """auto, speculators, mtp, eagle3 (P-EAGLE too), dflash (and DFlash 2, DSpark, Domino), eagle,
    medusa or causal (language models).
    """
    out: str = ""
    """The checkpoint folder to write; empty: <run>/train/<run.drafter, or the source's name>/best,
    where measuring finds it."""
    overwrite: bool = False
    """Replace the checkpoint if it exists and was imported."""

    def __post_init__(self) -> None:
        allowed = ("auto", *READABLE)
        if self.layout not in allowed:
            raise UserError(
                f"import.layout '{self.layout}' is unknown.{suggest(self.layout, allowed)}"
            )
