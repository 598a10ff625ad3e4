"""The static check of a GGUF drafter: what llama.cpp requires in the file, by its architecture.

Faults have the names of `inference.export.check.verify`, and "tokenizer" for tokens that differ
from the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.export.gguf_file import GgufContent
from inference.export.layouts.base import Shapes
from inference.export.layouts.folder import ExportNotes, Json
from inference.export.layouts.gguf import DFLASH, EAGLE3, FILE, FREQUENCIES
from inference.manifest import file_sha256
from inference.target.model import TargetModel

MODELS = ("llama", "qwen2", "qwen3")
"""Architectures that are complete language models."""
NUMBERS = (
    "block_count embedding_length feed_forward_length attention.head_count vocab_size "
    "attention.head_count_kv attention.key_length"
).split()


def check_gguf(folder: Path, notes: ExportNotes, target: TargetModel) -> list[str]:
    """All faults of `folder`/drafter.gguf. Raises `UserError` for a file that cannot be read."""
    content, info = GgufContent(folder / FILE), target.info
    name = str(content.keys.get("general.architecture"))
    if name not in (*MODELS, EAGLE3, DFLASH):
        return [f"architecture: '{name}' is none of {', '.join((*MODELS, EAGLE3, DFLASH))}"]
    start = f"{name}."
    own = {
        key.removeprefix(start): value
        for key, value in content.keys.items()
        if key.startswith(start)
    }
    missing = [key for key in NUMBERS if key not in own]
    if missing:
        return [f"config: the keys {', '.join(missing)} are missing"]
    try:
        needed, spare = expected(name, own, content, info)
    except (UserError, KeyError, TypeError) as error:
        return [f"config: the keys do not describe a drafter ({error})"]
    return [
        *wrong_tensors(content, needed, spare),
        *wrong_keys(name, own, notes, info),
        *wrong_tokens(content.keys, target),
        *changed_files(folder, notes),
    ]


def expected(name: str, own: Json, content: GgufContent, info: TargetInfo) -> tuple[Shapes, Shapes]:
    """The tensors that llama.cpp requires, and the optional ones."""
    hidden, wide = int(own["embedding_length"]), int(own["feed_forward_length"])
    size, head = int(own["vocab_size"]), int(own["attention.key_length"])
    queries, keys = (head * int(own[f"attention.head_count{end}"]) for end in ("", "_kv"))
    reads = 2 * hidden if name == EAGLE3 else hidden
    needed: Shapes = {"output_norm.weight": (hidden,)}
    spare: Shapes = {FREQUENCIES: (head // 2,)}
    for layer in range(int(own["block_count"])):
        at = f"blk.{layer}."
        needed |= {
            f"{at}attn_norm.weight": (hidden,),
            f"{at}attn_q.weight": (queries, reads),
            f"{at}attn_k.weight": (keys, reads),
            f"{at}attn_v.weight": (keys, reads),
            f"{at}attn_output.weight": (hidden, queries),
            f"{at}ffn_norm.weight": (hidden,),
            f"{at}ffn_gate.weight": (wide, hidden),
            f"{at}ffn_up.weight": (wide, hidden),
            f"{at}ffn_down.weight": (hidden, wide),
        }
        if name == EAGLE3:
            needed[f"{at}attn_norm_2.weight"] = (hidden,)
        if name in ("qwen3", DFLASH):
            needed |= {f"{at}attn_{part}_norm.weight": (head,) for part in "qk"}
        biases: Shapes = {f"{at}attn_{part}.bias": (keys,) for part in "kv"}
        biases[f"{at}attn_q.bias"] = (queries,)
        if name == "qwen2":
            needed |= biases
        if name == "llama":
            spare |= biases | {f"{at}attn_output.bias": (hidden,)}
    embedding, columns = {"token_embd.weight": (size, hidden)}, size
    if "d2t" in content.tensors:
        columns = int(content.tensors["d2t"].shape[0])
        needed["d2t"] = (columns,)
    output = {"output.weight": (columns, hidden)}
    if name in MODELS:
        return needed | embedding, spare | output
    taps = len(own["target_layers"])
    needed["fc.weight"] = (hidden, taps * info.hidden_size)
    if name == EAGLE3:
        if own.get("norm_before_fc"):
            needed["enc.output_norm.weight"] = (taps * info.hidden_size,)
        return needed | output, spare | embedding
    needed["enc.output_norm.weight"] = (hidden,)
    if "sample_from_anchor" in own:
        first = content.tensors.get("markov_w1.weight", torch.empty(0, 0))
        rank = int(first.shape[-1])
        needed |= {"markov_w1.weight": (size, rank), "markov_w2.weight": (columns, rank)}
        if own.get("has_confidence_head"):
            needed |= {"conf_proj.weight": (1, hidden + rank), "conf_proj.bias": (1,)}
    return needed, spare | embedding | output


def wrong_tensors(content: GgufContent, needed: Shapes, spare: Shapes) -> Iterator[str]:
    """Missing, unknown and misshapen tensors, and values that are not finite."""
    found = content.tensors
    for name in sorted(needed.keys() - found.keys()):
        yield f"tensor: '{name}' is missing (it does not load)"
    for name in sorted(found.keys() - needed.keys() - spare.keys()):
        yield f"tensor: '{name}' is none of this architecture (it does not load)"
    for name, value in found.items():
        shape = (needed | spare).get(name, tuple(value.shape))
        if tuple(value.shape) != shape:
            yield f"shape: '{name}' is {list(value.shape)}, the engine needs {list(shape)}"
        elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield f"tensor: '{name}' holds values that are not finite"
    ids = found.get("d2t")
    if ids is not None and ids.is_floating_point():
        yield "dtype: 'd2t' holds no whole numbers"


def wrong_keys(name: str, own: Json, notes: ExportNotes, info: TargetInfo) -> Iterator[str]:
    """Keys that belong to another target or another training."""
    if int(own["vocab_size"]) != info.vocab_size:
        yield f"vocabulary: {own['vocab_size']} tokens, the target has {info.vocab_size}"
    if int(own.get("context_length", 0)) < info.max_position_embeddings:
        last = info.max_position_embeddings
        yield f"positions: they end at {own.get('context_length')}, the target's at {last}"
    if name in MODELS:
        return
    taps = [int(layer) for layer in own["target_layers"]]
    if taps and (min(taps) < 1 or max(taps) > info.num_layers):
        yield f"layer ids: the engine reads layers {taps}; the target has {info.num_layers}"
    if notes.taps and taps != notes.taps:
        yield f"layer ids: the engine reads layers {taps}, the drafter was trained on {notes.taps}"
    base = float(own.get("rope.freq_base", 0.0))
    if abs(base - info.rope_theta) > 1e-3 * info.rope_theta:
        yield f"rope: freq_base is {base}, the drafter was trained with {info.rope_theta}"
    eps = float(own.get("attention.layer_norm_rms_epsilon", 0.0))
    if abs(eps - info.rms_norm_eps) > 1e-3 * info.rms_norm_eps:
        yield f"norm eps: {eps}, the drafter was trained with {info.rms_norm_eps}"
    size = notes.config.get("block_size")
    if name == DFLASH and size and int(own["block_size"]) != int(size):
        yield f"anchor: block_size is {own['block_size']}, the drafter was trained with {size}"


def wrong_tokens(keys: Json, target: TargetModel) -> Iterator[str]:
    """Tokens that are not the target's: llama.cpp refuses to draft with them."""
    named = target.tokenizer.get_vocab()
    tokens = keys.get("tokenizer.ggml.tokens") or []
    other = sum(place >= len(tokens) or tokens[place] != token for token, place in named.items())
    if len(tokens) != target.info.vocab_size or other:
        yield (
            f"tokenizer: {len(tokens)} tokens, {other} of the target's {len(named)} under another "
            "number"
        )
    if not keys.get("tokenizer.ggml.model"):
        yield "tokenizer: its kind (tokenizer.ggml.model) is missing"


def changed_files(folder: Path, notes: ExportNotes) -> Iterator[str]:
    """Files that differ from what was exported."""
    for name, digest in notes.files.items():
        path = folder / Path(name).name
        if not path.is_file() or file_sha256(path) != digest:
            yield f"files: '{name}' is not there, or has changed since the export"
