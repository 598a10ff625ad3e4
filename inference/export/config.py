"""Configurations of `headstart export` and `headstart import`, and the names that they allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from heads.api.config import Layers, OptionalToken, config

Engine = Literal["vllm", "sglang", "speculators", "transformers", "llama.cpp"]
"""Export targets. speculators: vLLM's library of drafters, whose folders vLLM serves directly."""
ENGINES: tuple[str, ...] = get_args(Engine)
Readable = Literal[
    "speculators", "native_mtp", "mtp", "eagle3", "dflash", "eagle", "medusa", "adapter", "causal"
]
"""Layouts that are imported, in the order in which `inference.export.importing` tries them."""
READABLE: tuple[str, ...] = get_args(Readable)


@config("export")
@dataclass(frozen=True)
class ExportConfig:
    """The checkpoint to export, the engine, and the folder to write."""

    engine: Engine = "vllm"
    """vllm, sglang, speculators, transformers or llama.cpp (a GGUF file)."""
    checkpoint: str = ""
    """A checkpoint folder; empty: the run's drafter (run.name, run.drafter)."""
    out: str = ""
    """Folder to write; empty: <run>/export/<drafter>/<engine>, for an adapter alone
    <run>/export/<drafter>/adapter."""
    merge: bool = False
    """For an adapter (train.refresh.adapter): write the drafter that its base and its updates make
    together, as the engine loads it. false: only the updates, in peft's layout."""
    tokens: Layers = 0
    """Drafted tokens per step in the serve commands; 0: the number in the checkpoint's decode.yaml,
    or without that file the number that the drafter was trained for."""
    settings: str = ""
    """A tune.json or traffic.json, whose settings for the engine the serving command gets; empty:
    those of the checkpoint's decode.yaml. Not read with export.tokens."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Number format of the weights: float32, bfloat16 or float16; empty: as stored, so that they
    can be imported back bit for bit."""
    quantise: Literal["", "int8", "fp8", "nvfp4"] = ""
    """Quantise the weights of decoder layers and of `fc` in the layout of compressed-tensors, for
    vLLM: int8 or fp8 (e4m3) with a scale per output, or nvfp4 (4 bits) with one per 16 inputs;
    empty: do not quantise."""
    mask_token_id: OptionalToken = -1
    """Token that replaces the mask in drafters that learned a mask vector; -1: one that the
    tokenizer does not use."""
    stitch: bool = False
    """For the MTP block of a target (native_mtp): write the whole target with this block in place
    of the original one. Weight files without parts of the block are linked instead of copied if
    possible."""
    overwrite: bool = False
    """Replace the folder if it exists and an export wrote it."""


@config("import")
@dataclass(frozen=True)
class ImportConfig:
    """The folder to import, and the checkpoint to write."""

    source: str = ""
    """Folder that another trainer or `headstart export` wrote, or the target's folder for its MTP
    block."""
    layout: Literal["auto", Readable] = "auto"
    """Layout of the folder: auto, speculators, native_mtp (the MTP block in a target's own
    checkpoint), mtp, eagle3 (P-EAGLE too), dflash (and DFlash 2, DSpark, Domino), eagle, medusa,
    adapter (a LoRA of the target: Uno) or causal (language models)."""
    out: str = ""
    """Checkpoint folder to write; empty: <run>/train/<run.drafter, or the source's name>/best,
    where measuring finds it."""
    overwrite: bool = False
    """Replace the checkpoint if it exists and was imported."""
