"""The parts of a target that rendering prompts needs, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from heads.api.target_info import TargetInfo
from inference.target import loading
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel


@dataclass(frozen=True)
class TargetFacts:
    """A target's tokenizer, end-of-text tokens, and the description of the loaded target."""

    tokenizer: Any
    info: TargetInfo
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, config: TargetConfig) -> TargetFacts:
        """Read configuration and tokenizer; raises `UserError` for a model that is no target."""
        described, tokenizer = loading.checked_config(config), loading.load_tokenizer(config)
        with torch.device("meta"):
            model = loading.model_class(described).from_config(
                described, trust_remote_code=config.trust_remote_code
            )
        model = loading.text_alone(model)
        generation = loading.load_generation_config(config) or model.config
        ends = loading.end_tokens(getattr(generation, "eos_token_id", None), tokenizer)
        return cls(tokenizer, loading.describe(model, tokenizer, config), ends)


AnyTarget = TargetModel | TargetFacts
