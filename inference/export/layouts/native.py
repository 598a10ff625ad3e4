"""The MTP block of a target, as checkpoints of its family store it. It is read from the target's
own files and written under the same names, for engines that look for it there.

| where the block stands | families |
|---|---|
| `mtp.` | Qwen3-Next, Qwen3.5 |
| `model.layers.<n>.`, behind the last layer | DeepSeek V3, GLM-4.5, Ling hybrid |
| `model.mtp_layers.0.` | MiMo |

`Form` describes the names within it. The projection reads the token first, except MiMo's, which
reads the state first. Files store experts one by one; transformers' modules store them together.

Legend: E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import cached_file

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.native.family import one_layer
from inference.export.config import ExportConfig
from inference.export.layouts import base
from inference.export.layouts.base import Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import CONFIG, Folder, Json, Receiver, read_json
from inference.export.layouts.mtp import NAMES as MIMO
from inference.export.layouts.mtp import swap_halves

KIND = "native_mtp"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The families' keys for the number of blocks in config.json."""
QUANTISED = "quantization_config"
"""The key of config.json for the format of quantised weights."""
LAYER = "layers.0."
SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Copies of the target's tensors within a block -> the tensors that they copy."""
EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = re.compile(r"(.*mlp\.experts)\.(gate_up|down)_proj")


@dataclass(frozen=True)
class Form:
    """How checkpoints of some families name a block. prefix: with {n}, the number of layers; names:
    ours within a block -> theirs, where they differ; layer: the prefix of the layer's own names;
    state_first: the projection's order; model_type: for the layer's settings, where transformers
    does not know the target's."""

    prefix: str
    names: Mapping[str, str] = field(default_factory=dict)
    layer: str = ""
    state_first: bool = False
    model_type: str = ""

    def to_theirs(self, name: str, layers: int) -> str:
        """The checkpoint's name for our name behind `mtp.`."""
        prefix = self.prefix.format(n=layers)
        if name.startswith(LAYER):
            return prefix + self.layer + name.removeprefix(LAYER)
        return prefix + self.names.get(name, name)


DEEPSEEK = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}
FORMS = {
    "qwen3_next": Form("mtp.", layer=LAYER),
    "qwen3_5_text": Form("mtp.", layer=LAYER),
    "qwen3_5_moe_text": Form("mtp.", layer=LAYER),
    "deepseek_v3": Form("model.layers.{n}.", DEEPSEEK),
    "glm4_moe": Form("model.layers.{n}.", DEEPSEEK),
    "bailing_hybrid": Form("model.layers.{n}.", DEEPSEEK),
    "mimo": Form("model.mtp_layers.0.", MIMO, state_first=True, model_type="qwen2"),
}
"""Model type of a target's text part -> the form of its block."""


def form_of(config: Json) -> Form | None:
    """The form of the block that a target's config.json implies, or None."""
    return FORMS.get(str(text_part(config).get("model_type")))


def text_part(config: Json) -> Json:
    """The text part of a config.json; for text models, all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def is_of_block(name: str, config: Json) -> bool:
    """Whether a tensor of a target's checkpoint belongs to the MTP block."""
    form = form_of(config)
    if form is None:
        return False
    return name.startswith(form.prefix.format(n=text_part(config).get("num_hidden_layers")))


def matches(folder: Folder) -> bool:
    """Whether a folder contains a target's MTP block, alone or within the target."""
    form, text = form_of(folder.config), text_part(folder.config)
    if form is None:
        return False
    return form.to_theirs("fc.weight", text["num_hidden_layers"]) in folder.tensors


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a target's folder, or from a folder that contains only its block."""
    form, text, where = form_of(folder.config), text_part(folder.config), folder.path
    if form is None:
        raise UserError(
            f"'{where}' is of model type '{text.get('model_type')}', whose MTP block we cannot "
            f"read; those of {', '.join(FORMS)} we can."
        )
    theirs = {name: value for name, value in folder.tensors.items() if is_of_block(name, text)}
    prefix = form.prefix.format(n=text["num_hidden_layers"])
    for name, original in SHARED.items():
        copy = theirs.pop(prefix + name, None)
        if copy is not None:
            receiver.drop_shared(original, {original: copy}, where)
    quantised = [name for name, value in theirs.items() if value.element_size() == 1]
    if quantised:
        raise UserError(
            f"'{where}' holds quantised weights in its MTP block ('{quantised[0]}' is "
            f"{theirs[quantised[0]].dtype}), which cannot be trained or measured here. Take a "
            "checkpoint in bfloat16."
        )
    layer = settings(form, text, where)
    found = {}
    names = expected(layer, receiver.info)
    for ours, shape in names.items():
        name = form.to_theirs(ours.removeprefix("mtp."), text["num_hidden_layers"])
        if name not in theirs:
            raise UserError(f"'{where}' lacks '{name}' of its MTP block.")
        value = theirs.pop(name)
        if tuple(value.shape) != shape:
            sizes = f"{list(value.shape)}, expected {list(shape)}"
            raise UserError(f"'{where}': tensor '{name}' has shape {sizes}.")
        found[ours] = swap_halves(value) if form.state_first and ours == "mtp.fc.weight" else value
    spare = [name for name in theirs if not name.endswith("rotary_emb.inv_freq")]
    if spare:
        raise UserError(
            f"'{where}' has '{spare[0]}' in its MTP block, which the layers of a "
            f"{layer['model_type']} model of transformers do not have."
        )
    return Imported(KIND, {"layer": layer}, fused(found))


def settings(form: Form, text: Json, where: Any) -> Json:
    """The settings of the block's layer, from the target's config.json."""
    values = {key: value for key, value in text.items() if key != "model_type"}
    try:
        described = AutoConfig.for_model(form.model_type or text["model_type"], **values)
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"'{where}': its config.json describes no model ({error}).") from error
    return one_layer(described)


def expected(layer: Json, info: TargetInfo) -> base.Shapes:
    """Our names and shapes, with separate experts."""
    return {
        name: tuple(value.shape)
        for name, value in separate(base.meta_state(KIND, {"layer": layer}, info)).items()
    }


def separate(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with separate experts, as in checkpoints: gate_up_proj [E, 2I, H] and down_proj [E,
    H, I] -> <e>.{gate,up,down}_proj.weight."""
    found: dict[str, Tensor] = {}
    for name, value in ours.items():
        whole = FUSED.fullmatch(name)
        if whole is None:
            found[name] = value
            continue
        parts = ("gate", "up") if whole[2] == "gate_up" else ("down",)
        for expert, matrix in enumerate(value):
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{whole[1]}.{expert}.{part}_proj.weight"] = piece.contiguous()
    return found


def fused(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `separate`."""
    together = {name: value for name, value in found.items() if EXPERT.fullmatch(name) is None}
    stacks: dict[str, dict[str, list[Tensor]]] = {}
    for name in sorted(found.keys() - together.keys(), key=_expert_number):
        parts = EXPERT.fullmatch(name)
        assert parts is not None, "chosen by the same pattern"
        stacks.setdefault(parts[1], {}).setdefault(parts[3], []).append(found[name])
    for prefix, stack in stacks.items():
        gate, up, down = (torch.stack(stack[part]) for part in ("gate", "up", "down"))
        together[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
        together[f"{prefix}.down_proj"] = down
    return together


def _expert_number(name: str) -> int:
    parts = EXPERT.fullmatch(name)
    assert parts is not None, "only experts are numbered"
    return int(parts[2])


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    form, text = form_of(folder.config), text_part(folder.config)
    if form is None:
        raise UserError(f"its model type '{text.get('model_type')}' has no MTP block that we know")
    names = expected(settings(form, text, folder.path), info)
    rows = [
        base.TensorRow(name, form.to_theirs(name.removeprefix("mtp."), info.num_layers), shape)
        for name, shape in names.items()
    ]
    return rows, {}


ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "BailingMoeV2_5ForCausalLM",
    "BailingHybridForCausalLM",
    "MiMoForCausalLM",
)
LAYOUT = base.Layout("mtp-native", ARCHITECTURES, expect, rope=None, silent=True)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder for vLLM and SGLang: the target's config.json and only its block. Of a quantised
    target, config.json has no quantisation: the block's weights are plain."""
    described = described_by(target)
    form, config = form_of(described), checkpoint.config
    engine = "vLLM" if options.engine == "vllm" else "SGLang"
    quantised = [part.pop(QUANTISED, None) for part in (described, text_part(described))]
    if options.stitch and any(quantised):
        raise base.refuse(
            f"the target's weights are quantised ({QUANTISED} in its config.json), by which it "
            "would read this block's plain weights too",
            engine,
            "Stitch it into the target's checkpoint without quantisation, or export the block "
            "alone (export.stitch=false).",
        )
    if form is None:
        raise base.refuse(
            f"engines have no MTP block for model type '{text_part(described).get('model_type')}'",
            engine,
            f"They have those of {', '.join(FORMS)}.",
        )
    own = dict(config.layer)
    theirs = settings(form, text_part(described), target.config.path)
    if own.get("model_type") != theirs["model_type"]:
        raise base.refuse(
            f"its layer is a {own.get('model_type')} layer, and the engine builds the target's",
            engine,
            "Train without head.layer.",
        )
    ours = separate(checkpoint.tensors)
    require_shapes(ours, expected(theirs, checkpoint.info), engine)
    tensors = {}
    for name, value in ours.items():
        named = form.to_theirs(name.removeprefix("mtp."), checkpoint.info.num_layers)
        turned = form.state_first and name == "mtp.fc.weight"
        tensors[named] = swap_halves(value) if turned else value
    speculative = {"method": "mtp", "num_speculative_tokens": options.tokens or config.depths}
    written = Written(described, tensors, speculative)
    if any(quantised):
        written.notes.append(
            f"config.json has no {QUANTISED}: the target's weights are quantised, this block's are "
            "plain"
        )
    return written


def require_shapes(ours: Mapping[str, Tensor], wanted: base.Shapes, engine: str) -> None:
    """Raise `UserError` unless our tensors (see `separate`) are those of the block that an engine
    builds by the target's config.json."""
    held = {name: tuple(value.shape) for name, value in ours.items()}
    for name in sorted(held.keys() | wanted.keys()):
        own, theirs = held.get(name), wanted.get(name)
        if own != theirs:
            shapes = ["missing" if one is None else str(list(one)) for one in (own, theirs)]
            raise base.refuse(
                f"its '{name}' is {shapes[0]}, in the block that the engine builds by the target's "
                f"config.json it is {shapes[1]}",
                engine,
                "Train without head.layer.",
            )


def target_folder(target: Target) -> Path:
    """The folder of a target's files, local or in the cache of the Hub."""
    path = cached_file(target.config.path, CONFIG, revision=target.config.revision)
    assert path is not None, "the target's config.json was read before"
    return Path(path).parent


def described_by(target: Target) -> Json:
    """A target's config.json, with the number of blocks that engines expect."""
    described = read_json(target_folder(target) / CONFIG)
    text = text_part(described)
    counts = [name for name in COUNTS if name in text]
    for name in counts or COUNTS:
        text[name] = 1
    return described
