"""Runs in a Python that has vLLM's `speculators`: saves drafters of its classes with random
weights, or loads folders of ours.

python speculators_worker.py JOB.json   {"do": "save" | "load", "target": folder, "out": folder,
...}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

CLASSES = {
    "eagle3": ("Eagle3SpeculatorConfig", "Eagle3DraftModel"),
    "peagle": ("PEagleSpeculatorConfig", "PEagleDraftModel"),
    "dflash": ("DFlashSpeculatorConfig", "DFlashDraftModel"),
    "dflash2": ("DFlash2SpeculatorConfig", "DFlash2DraftModel"),
    "dspark": ("DSparkSpeculatorConfig", "DSparkDraftModel"),
}


def layer_config(target: Path, family: str, layers: int) -> Any:
    """The decoder layer of a drafter for a target, with full attention."""
    config = json.loads((target / "config.json").read_text())
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "rope_parameters",
    )
    found = {name: config[name] for name in names}
    more = (
        {"layer_types": ["full_attention"] * layers, "use_sliding_window": False}
        if family == "qwen3"
        else {}
    )
    return AutoConfig.for_model(
        family, num_hidden_layers=layers, tie_word_embeddings=False, **found, **more
    )


def save(job: dict[str, Any]) -> None:
    """A drafter with random weights, the target's embedding where the library copies it, and a
    random draft vocabulary."""
    import importlib

    kind, target = job["kind"], Path(job["target"])
    module = importlib.import_module(f"speculators.models.{kind}")
    config_class, model_class = (getattr(module, name) for name in CLASSES[kind])
    layer = layer_config(target, job["family"], job["layers"])
    columns = job.get("draft_vocab_size", layer.vocab_size)
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=columns,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["tokens"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
        **job["values"],
    )
    torch.manual_seed(0)
    model = model_class(config)
    if columns != layer.vocab_size:
        known = torch.zeros(layer.vocab_size, dtype=torch.bool)
        known[torch.randperm(layer.vocab_size)[:columns]] = True
        ids = known.nonzero().squeeze(1)
        model.load_vocab_mappings(known, ids - torch.arange(columns))
    model.load_verifier_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            copied = name.startswith(("verifier", "embed_tokens")) or (
                name == "lm_head.weight" and not job.get("head")
            )
            if not copied or (name.startswith("embed_tokens") and kind == "peagle"):
                parameter.copy_(0.3 * torch.randn(parameter.shape) + ("norm" in name))
    model.save_pretrained(job["out"])


def load(job: dict[str, Any]) -> None:
    """Load a folder with the library's own class, and write what arrived."""
    model = SpeculatorModel.from_pretrained(job["given"])
    state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    Path(job["out"]).mkdir(parents=True)
    save_file(state, Path(job["out"]) / "model.safetensors")


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    {"save": save, "load": load}[given["do"]](given)
