"""What peft computes from an exported adapter: the target with the adapter switched off reads the
text, and switched on drafts behind it.

Legend: T positions of the text with the draft's root, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference.target.model import TargetModel


@torch.no_grad()
def run(folder: Path, target: TargetModel, tokens: Tensor, noise: Tensor) -> Tensor:
    """Logits [K, V] behind tokens [T] and noise [K-1], which is the engine's to choose."""
    plain = AutoModelForCausalLM.from_pretrained(target.info.id, dtype=torch.float32)
    model = cast(Any, PeftModel.from_pretrained(plain, str(folder))).eval()
    with model.disable_adapter():
        seen = model(input_ids=tokens[None], use_cache=True)
    rows = [seen.logits[0, -1:]]
    if noise.numel():
        drafted = model(input_ids=noise[None], past_key_values=seen.past_key_values)
        rows.append(drafted.logits[0])
    return torch.cat(rows)
