"""Medusa: vLLM's layout (up to 0.32), and the two older ones of its authors.

Our checkpoints stack all heads of one layer in one tensor; these layouts store every head
separately. Without an LM head per head, vLLM requires the shared one in the file: the target's, or,
with a reduced draft vocabulary, its rows for the tokens in `token_map`. vLLM ignores unknown names
without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from inference.export.config import ExportConfig
from inference.export.layouts import base
from inference.export.layouts.base import Checkpoint, Imported, Target, TensorRow, Written
from inference.export.layouts.folder import HEAD, Folder, Receiver

PROPOSER = Path(__file__).parents[1] / "vllm_medusa.py"
"""A proposer that the folder contains for versions of vLLM without Medusa."""
MAP = "token_map"
"""Their tensor with the target ids of the draft columns."""
MAPS = ("d2t", "t2d")
"""Our maps of a reduced draft vocabulary."""
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
OLD_BLOCK = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
OLD_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight")


def rows(heads: int, layers: int, hidden: int, columns: int, head: str) -> list[TensorRow]:
    """The tensors of Medusa's heads.

    head: "each" where every one has its own LM head of `columns` tokens, "one" where they share a
    trained one, "target" where they share the target's.
    """
    found = []
    for number in range(heads):
        for layer in range(layers):
            name, at = f"blocks.{number}.layers.{layer}", (layer, number)
            found.append(TensorRow("residual_weight", f"{name}.weight", (hidden, hidden), at))
            found.append(TensorRow("residual_bias", f"{name}.bias", (hidden,), at))
        if head == "each":
            size, name = (columns, hidden), f"lm_heads.{number}.weight"
            found.append(TensorRow("lm_heads", name, size, (number,)))
    if head == "one":
        found.append(TensorRow("lm_heads", HEAD, (columns, hidden), (0,)))
    return found


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    config, hidden, size = folder.flat, info.hidden_size, info.vocab_size
    columns = int(config.get("truncated_vocab_size") or size)
    shared, reduced = bool(config.get("original_lm_head", False)), columns < size
    if reduced and not shared:
        raise UserError("vLLM reduces the vocabulary of an LM head that all heads share alone.")
    head = "one" if shared else "each"
    table = rows(int(config["num_heads"]), int(config["num_hidden_layers"]), hidden, columns, head)
    if not config.get("medusa_fc_bias", False):
        table = [row for row in table if not row.theirs.endswith(".bias")]
    return table + (base.same_names({MAP: (columns,)}) if reduced else []), {}


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
    config, info, ours = checkpoint.config, checkpoint.info, checkpoint.tensors
    hidden, vocabulary = info.hidden_size, info.vocab_size
    heads, layers, own = config.num_heads, config.num_layers, config.own_lm_head
    reduced = MAPS[0] in ours
    if own and reduced:
        what = "it drafts from a reduced vocabulary with an LM head for every head"
        raise base.refuse(what, "vLLM", "Train with head.own_lm_head=false: they then share one.")
    head = "each" if own else "one" if reduced else "target"
    columns = ours[MAPS[0]].shape[0] if reduced else vocabulary
    tensors = base.give(rows(heads, layers, hidden, columns, head), ours, left=MAPS)
    if reduced:
        tensors[MAP] = vocab.to_target_ids(ours[MAPS[0]])
    elif not own:
        if target.has_head_bias:
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
        "truncated_vocab_size": columns,
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
    """Tensors in any of the three layouts, renamed to vLLM's names."""
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
    for match in blocks:
        weight, name = theirs[match[0]], match[0].removesuffix("weight") + "bias"
        theirs.setdefault(name, weight.new_zeros(weight.shape[0]))
    own = any(name.startswith("lm_heads.") for name in theirs)
    head, columns, maps = "each" if own else "target", info.vocab_size, {}
    if MAP in theirs:
        maps = reduce(theirs, info.vocab_size, where)
        head, columns = "each" if own else "one", maps[MAPS[0]].shape[0]
    else:
        receiver.drop_shared(HEAD, theirs, where)
    found = base.take(rows(heads, layers, info.hidden_size, columns, head), theirs, where)
    values = {"num_heads": heads, "num_layers": layers, "own_lm_head": own}
    values |= {"draft_vocab_size": columns} if maps else {}
    return Imported("medusa", values, {**found, **maps})


def reduce(theirs: dict[str, Tensor], size: int, where: Path) -> dict[str, Tensor]:
    """Take `token_map` out of their tensors, and sort the rows of their LM heads by it in ascending
    order. The LM heads may have rows for all tokens. Returns our maps of the draft vocabulary.
    Raises `UserError` unless the map lists distinct tokens of the target."""
    ids = theirs.pop(MAP).long()
    ascending, order = ids.sort()
    counts = ids.ndim == 1 and 0 < len(ids) < size and bool((ascending.diff() > 0).all())
    if not counts or int(ascending[0]) < 0 or int(ascending[-1]) >= size:
        raise UserError(
            f"'{where}': {MAP} must hold fewer than {size} different token ids of the target."
        )
    for name in [name for name in theirs if name == HEAD or name.startswith("lm_heads.")]:
        held = theirs[name].shape[0]
        if held in (size, len(ids)):  # other shapes are refused with all shapes
            theirs[name] = theirs[name][ascending if held == size else order]
    return dict(zip(MAPS, vocab.to_maps(ascending, size), strict=True))
