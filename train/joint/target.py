"""A jointly trained target on disk: a Hugging Face folder that states its drift.

config.json   with an entry "headstart": original, revision, LoRA settings, drift
README.md     the same as a model card
drift.json    only the measured drift (`inference.measure.drift`)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from heads.api.reading import read_object
from heads.api.target_info import TargetInfo
from inference.folders import replace_part
from inference.manifest import write_bytes, write_json
from inference.measure.drift import Drift
from inference.report.quoting import code, escape
from inference.target.model import TargetModel
from train.joint.config import JointConfig
from train.manifest import Settings

CONFIG_FILE, CARD_FILE, DRIFT_FILE = "config.json", "README.md", "drift.json"
ENTRY = "headstart"
"""The key of config.json under which a changed target is labelled."""

CARD = """\
---
{base_model}library_name: transformers
pipeline_tag: text-generation
tags: [headstart, speculative-decoding, merged-lora]
---
# A changed {name}

**This is not {original}.** Its layers were trained together with a drafter (kind {kind}) and the
updates are merged into the weights, so its answers differ from the original's. Speculative decoding
with the drafter is lossless with respect to this model only.

| | |
|---|---|
| original | {original} |
| revision | {revision} |
| updates | LoRA of rank {rank}, alpha {alpha:g}, on {modules} |
| drafter's weight in the updates' gradient | {heads_weight:g} |

Drift from the original, on {prompts} held-out prompts and {tokens} tokens of the original's greedy
answers, with 95% intervals over prompts:

| | |
|---|---|
| mean KL(original \\|\\| this) per token | {kl:.4f} [{kl_low:.4f}, {kl_high:.4f}] nats |
| same next token, given the original's answer | {agreement:.1%} \
[{agreement_low:.1%}, {agreement_high:.1%}] |
| greedy answers that are identical | {identical:.1%} [{identical_low:.1%}, {identical_high:.1%}] |

Measure what matters for your use before you serve it.
"""


def save_changed_target(target: TargetModel, folder: Path) -> None:
    """Write the model in its present state, with its tokenizer; replaces `folder` as a whole."""
    text = target.model.config.get_text_config()
    # a setting of loading, not of the model
    ours = vars(text).pop("headstart_long_context", None)
    with replace_part(folder, known=("*",)) as fresh:
        target.model.save_pretrained(str(fresh))
        target.tokenizer.save_pretrained(str(fresh))
    if ours is not None:
        text.headstart_long_context = ours


def label(folder: Path, original: TargetInfo, kind: str, joint: JointConfig, drift: Drift) -> None:
    """Write drift.json, an entry of config.json and the model card into the new target's folder."""
    facts = {"original": original.id, "revision": original.revision, **drift.to_dict()}
    write_json(folder / DRIFT_FILE, facts)
    config = read_object(folder / CONFIG_FILE)
    config[ENTRY] = {
        "changed_from": original.id,
        "revision": original.revision,
        "trained_with": kind,
        "lora": {name: value for name, value in plain(joint).items() if name != "mode"},
        "drift": drift.to_dict(),
    }
    write_json(folder / CONFIG_FILE, config)
    write_bytes(folder / CARD_FILE, card(original, kind, joint, drift).encode("utf-8"))


def card(original: TargetInfo, kind: str, joint: JointConfig, drift: Drift) -> str:
    """The text of the model card."""
    bounds = {
        f"{name}_{side}": getattr(drift, f"{name}_ci95")[place]
        for name in ("kl", "agreement", "identical")
        for place, side in enumerate(("low", "high"))
    }
    on_hub = original.id.count("/") == 1 and not Path(original.id).exists()
    return CARD.format(
        base_model=yaml.safe_dump({"base_model": original.id}) if on_hub else "",
        name=escape(original.id.rstrip("/").split("/")[-1]),
        original=code(original.id),
        kind=code(kind),
        revision=code(original.revision),
        rank=joint.rank,
        alpha=joint.alpha,
        modules=escape(", ".join(joint.modules)) or "all linear layers of the decoder layers",
        heads_weight=joint.heads_weight,
        **asdict(drift),
        **bounds,
    )


def plain(joint: JointConfig) -> Settings:
    found: Settings = json.loads(json.dumps(asdict(joint)))
    return found
