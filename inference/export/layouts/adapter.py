"""Adapters of the target: a drafter's low-rank updates in the layout of the library peft.

The folder contains `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
after the target's layers. Peft loads it onto the target. SGLang (0.5.19 and later) reads it with
`--speculative-algorithm UNO` and applies it to drafted rows only. The folder does not declare that
an adapter is a drafter: any LoRA of the target's decoder layers can be read as one.
"""

from __future__ import annotations

from heads.api.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.target.updates import MODULES
from inference.export.config import ExportConfig
from inference.export.layouts import base
from inference.export.layouts.base import Checkpoint, Imported, Target, TensorRow, Written
from inference.export.layouts.folder import Folder, Json, Receiver

KIND, LORA = "uno", "LORA"
PREFIX, SUFFIX = "base_model.model.model.", ".weight"
"""The prefix and suffix of our tensor names: peft wraps the model, whose decoder is called
model."""
ALTERED = ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora")
"""Switches of peft that change the result."""
PARTIAL = (
    *("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"),
    *("exclude_modules", "layer_replication", "target_parameters", "trainable_token_indices"),
)
"""Settings of peft for parts of the model; empty where all layers have the same updates."""


def values_of(config: Json) -> Json:
    """Our configuration's values by an adapter_config.json; raises `UserError` for an adapter that
    updates anything but the linear layers of all decoder layers, or updates them in another way."""
    odd = [name for name in (*ALTERED, *PARTIAL) if config.get(name)]
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    named = config.get("target_modules")
    names = [named] if isinstance(named, str) else list(named or [])
    modules = {str(name).rpartition(".")[2] for name in names}
    odd += ["target_modules"] if not modules or modules - set(MODULES) else []
    if odd:
        raise UserError(
            f"the adapter's {', '.join(odd)} cannot be a drafter's: ours update linear layers of "
            f"all decoder layers ({', '.join(MODULES)}) by plain LoRA."
        )
    chosen = [name for name in MODULES if name in modules]
    return {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "modules": chosen}


def rows(values: Json, info: TargetInfo) -> list[TensorRow]:
    """The adapter's tensors by our configuration's values."""
    own = base.own_rows(KIND, values, info)
    return [TensorRow(row.ours, f"{PREFIX}{row.ours}{SUFFIX}", row.shape) for row in own]


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    return rows(values_of(folder.config), info), {}


LAYOUT = base.Layout("adapter", (LORA,), expect, rope=None, eps=False)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder that peft and SGLang load."""
    config = checkpoint.config
    if config.slots != "noise":
        what = "its slots hold a trained vector instead of noise"
        raise base.refuse(what, "SGLang", "Train with head.slots=noise.")
    values = {"rank": config.rank, "alpha": config.alpha, "modules": list(config.modules)}
    tensors = base.give(rows(values, checkpoint.info), checkpoint.tensors)
    described = peft_config(
        target.config.path, config.rank, config.alpha, config.modules, "CAUSAL_LM"
    )
    speculative = {"method": KIND, "num_speculative_tokens": options.tokens or config.block_size}
    written = Written(described, tensors, speculative)
    written.described, written.weights = ADAPTER_CONFIG, ADAPTER_WEIGHTS
    if config.noise_tokens:
        written.notes.append(
            "SGLang draws noise from the whole vocabulary, the drafter was trained with the first "
            f"{config.noise_tokens} tokens (head.noise_tokens)"
        )
    return written


def matches(folder: Folder) -> bool:
    """Whether a folder holds a LoRA of peft."""
    return folder.config.get("peft_type") == LORA


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from an adapter that was trained to draft."""
    values = values_of(folder.config)
    if not folder.export.config:
        receiver.notes.append(
            "taken for an Uno adapter: nothing in the folder says what it was trained for"
        )
    found = base.take(rows(values, receiver.info), folder.tensors, folder.path)
    return Imported(KIND, values, found)
