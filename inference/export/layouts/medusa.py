"""Medusa: vLLM's layout (up to 0.32), and the two older ones of its authors.

All heads of one layer are one stacked tensor of ours; there, every head has a file entry of its
own. Without an LM head per head, vLLM wants the target's in the file. vLLM ignores names that it
does not know without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.export.config import ExportConfig
from inference.export.layouts import base
from inference.export.layouts.base import Checkpoint, Imported, Target, TensorRow, Written
from inference.export.layouts.folder import HEAD, Folder, Receiver

PROPOSER = Path(__file__).parents[1] / "vllm_medusa.py"
"""A proposer that the folder holds for versions of vLLM without Medusa."""
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
OLD_BLOCK = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
OLD_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight")


def rows(heads: int, layers: int, hidden: int, vocabulary: int, own_heads: bool) -> list[TensorRow]:
    """The tensors of Medusa's heads; own_heads: every head has an LM head of its own."""
    found = []
    for head in range(heads):
        for layer in range(layers):
            name, at = f"blocks.{head}.layers.{layer}", (layer, head)
            found.append(TensorRow("residual_weight", f"{name}.weight", (hidden, hidden), at))
            found.append(TensorRow("residual_bias", f"{name}.bias", (hidden,), at))
        if own_heads:
            size, name = (vocabulary, hidden), f"lm_heads.{head}.weight"
            found.append(TensorRow("lm_heads", name, size, (head,)))
    return found


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    config, hidden, size = folder.flat, info.hidden_size, info.vocab_size
    own = not config.get("original_lm_head", False)
    table = rows(int(config["num_heads"]), int(config["num_hidden_layers"]), hidden, size, own)
    if not config.get("medusa_fc_bias", False):
        table = [row for row in table if not row.theirs.endswith(".bias")]
    return table + ([] if own else base.same_names({HEAD: (size, hidden)})), {}


LAYOUT = base.Layout(
    "medusa",
    ("MedusaModel",),
    expect,
    rope=None,
    draftable=lambda config: (int(config["num_heads"]), f"{config['num_heads']} heads"),
    silent=True,
)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder that vLLM's Medusa loads."""
    config, info = checkpoint.config, checkpoint.info
    hidden, vocabulary = info.hidden_size, info.vocab_size
    heads, layers, own = config.num_heads, config.num_layers, config.own_lm_head
    tensors = base.give(rows(heads, layers, hidden, vocabulary, own), checkpoint.tensors)
    if not own:
        if any(name.endswith("lm_head.bias") for name in target.weights.state):
            raise UserError(
                "the target's LM head has a bias, which Medusa's layout cannot hold. Train with "
                "head.own_lm_head=true."
            )
        tensors[HEAD] = target.weights.lm_head.to(tensors["blocks.0.layers.0.weight"].dtype)
    if options.tokens > heads:
        raise UserError(f"export.tokens: this drafter has {heads} heads; given {options.tokens}.")
    described = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
    }
    speculative = {"method": "medusa", "num_speculative_tokens": options.tokens or heads}
    return Written(described, tensors, speculative, {PROPOSER.name: PROPOSER.read_bytes()})


def matches(folder: Folder) -> bool:
    """Whether a folder holds Medusa heads in one of the three layouts."""
    return any(
        name.startswith("blocks.0.layers.") or OLD_BLOCK.fullmatch(name) for name in folder.tensors
    )


def modernise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any of the three layouts under vLLM's names."""
    found = {}
    for name, value in tensors.items():
        if block := OLD_BLOCK.fullmatch(name):
            name = f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        elif head := OLD_HEAD.fullmatch(name):
            name = f"lm_heads.{head[1]}.weight"
        found[name.removeprefix("medusa_heads.")] = value
    return found


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from Medusa heads; a missing bias is zero."""
    where, info, config = folder.path, receiver.info, folder.config
    theirs = modernise(folder.tensors)
    blocks = [match for name in theirs if (match := BLOCK.fullmatch(name))]
    if not blocks:
        raise UserError(f"'{where}' holds no Medusa block.")
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    named = int(config.get("num_heads") or config.get("medusa_num_heads") or heads)
    if named > heads:
        raise UserError(f"'{where}': config.json names {named} heads, the weights hold {heads}.")
    if "token_map" in theirs:
        raise UserError(
            f"'{where}' drafts from a reduced vocabulary (token_map), which our medusa does not."
        )
    for match in blocks:
        weight, name = theirs[match[0]], match[0].removesuffix("weight") + "bias"
        theirs.setdefault(name, weight.new_zeros(weight.shape[0]))
    receiver.drop_shared(HEAD, theirs, where)
    own = any(name.startswith("lm_heads.") for name in theirs)
    found = base.take(rows(heads, layers, info.hidden_size, info.vocab_size, own), theirs, where)
    values = {"num_heads": heads, "num_layers": layers, "own_lm_head": own}
    return Imported("medusa", values, found)
