"""Writes an exported drafter to a folder, complete or not at all, with a note of what it is and how to serve it.

`headstart_export.json` names kind, engine, layout, the checkpoint it came from and the target's facts; `verify-export` and the
model card read it, and an import of our own folder finds the exact configuration there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.api.checkpoint import build_config, read_config
from heads.api.errors import UserError, suggest
from inference.decoding.decode_file import DECODE_FILE, draft_length
from inference.export.layouts import registry
from inference.export.layouts.base import Checkpoint, Options, Target, Written, read_checkpoint
from inference.export.layouts.folder import CONFIG
from inference.folders import EXPORT_FILE, replaced
from inference.manifest import file_sha256

FORMAT = 1
STAGE = "export"
WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "float64"}
TELLING = {"eagle": ("eagle",), "eagle3": ("eagle3",), "dflash": ("dflash",), "dspark": ("dspark",)}
WORDS = ("eagle-", "eagle3", "dflash", "dspark")
"""What vLLM looks for in a draft model's path when its method is none of `TELLING`'s: the path then decides the method."""


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, for which engine, and where to."""

    engine: str = "vllm"
    """vllm, sglang, speculators or transformers."""
    checkpoint: str = ""
    """A checkpoint folder; empty: the run's drafter (run.name, run.drafter)."""
    out: str = ""
    """The folder to write; empty: <run>/export/<drafter>/<engine>."""
    tokens: int = 0
    """Drafted tokens per step that the serve commands name; 0: as many as the checkpoint's decode.yaml says, without one as many
    as the drafter was trained for."""
    dtype: str = ""
    """Number format of the weights: float32, bfloat16 or float16; empty: as stored, which can be imported back bit for bit."""
    mask_token_id: int = -1
    """Token that stands for "not known yet" in drafters that learned a vector for it; -1: one that the tokenizer does not use."""
    overwrite: bool = False
    """Replace the folder when it is there and an export wrote it."""

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise UserError(
                f"export.dtype '{self.dtype}' is unknown. Allowed: {', '.join(DTYPES)}, or nothing."
            )
        if self.engine not in registry.ENGINES:
            raise UserError(
                f"export.engine '{self.engine}' is unknown.{suggest(self.engine, registry.ENGINES)}"
            )
        if self.tokens < 0:
            raise UserError(f"export.tokens must not be negative; given {self.tokens}.")


def export(config: ExportConfig, checkpoint: Checkpoint, target: Target, out: Path) -> dict[str, Any]:
    """Write `out` and return what `headstart_export.json` says; raises `UserError` before anything is written.

    With config.overwrite an `out` that an export wrote, and nobody has added files to, is replaced.
    """
    layout, written = write_layout(config, checkpoint, target)
    if not config.overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise UserError(
            f"'{out}' is there already. Choose another export.out, or replace it with export.overwrite=true."
        )
    require_plain_path(written, config.engine, out)
    if config.dtype:
        written.tensors = {name: cast(value, DTYPES[config.dtype]) for name, value in written.tensors.items()}
    written.config["dtype"] = FLOAT_NAMES[
        next(value.dtype for value in written.tensors.values() if value.is_floating_point())
    ]
    facts = describe(config, checkpoint, target, layout, written, out)
    with replaced(out, STAGE, "export.overwrite" if config.overwrite else "export.out") as fresh:
        save_file(
            {name: value.contiguous() for name, value in written.tensors.items()},
            fresh / WEIGHTS,
            {"format": "pt"},
        )
        for name, content in written.files.items():
            (fresh / name).write_bytes(content)
        if written.tokenizer:
            target.tokenizer.save_pretrained(str(fresh))
        (fresh / CONFIG).write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
        facts["files"] = {path.name: file_sha256(path) for path in sorted(fresh.iterdir())}
        (fresh / EXPORT_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def write_layout(config: ExportConfig, checkpoint: Checkpoint, target: Target) -> tuple[str, Written]:
    """The layout and its files, with the draft length asked for, or the tuned one where the layout takes it."""
    tuned = 0 if config.tokens else draft_length(checkpoint.folder)
    if tuned:
        try:
            layout, written = registry.write(checkpoint, target, Options(tuned, config.mask_token_id), config.engine)
        except UserError:
            pass  # a block whose slots see each other is drafted whole; any other objection comes again below
        else:
            written.notes.append(f"drafts {tuned} tokens per step, as {DECODE_FILE} says; change it with export.tokens")
            return layout, written
    return registry.write(checkpoint, target, Options(config.tokens, config.mask_token_id), config.engine)


def prepare(folder: Path, engine: str) -> Checkpoint:
    """Read a checkpoint that has a way into `engine`; raises `UserError` with the reason where it has none."""
    content = read_config(folder)
    registry.way(
        registry.method_of(content["kind"], build_config(content["kind"], content["config"])), engine
    )
    return read_checkpoint(folder)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point tensors in another format; numbers of tokens as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def require_plain_path(written: Written, engine: str, out: Path) -> None:
    """Raise `UserError` for a path that vLLM would read another method from than the one it is told."""
    method = written.speculative.get("method")
    if engine != "vllm" or method in TELLING:
        return
    word = next((word for word in WORDS if word in str(out.resolve()).lower()), None)
    if word is not None:
        raise UserError(
            f"export.out '{out}' holds the word '{word}', from which vLLM would conclude another method than {method}. Choose a "
            "path without it."
        )


def describe(
    config: ExportConfig, checkpoint: Checkpoint, target: Target, layout: str, written: Written, out: Path
) -> dict[str, Any]:
    """What the folder is: the content of `headstart_export.json` but for its files."""
    return {
        "format": FORMAT,
        "kind": checkpoint.kind,
        "method": registry.method_of(checkpoint.kind, checkpoint.config),
        "engine": config.engine,
        "layout": layout,
        "source": {"checkpoint": str(checkpoint.folder.resolve()), "sha256": checkpoint.sha256},
        "config": asdict(checkpoint.config),
        "taps": list(checkpoint.drafter.needs.taps),
        "target": checkpoint.info.to_dict(),
        "speculative_config": written.speculative,
        "hf_overrides": target_overrides(config.engine, written.speculative),
        "serve": serve(config.engine, target.config.path, out, written.speculative),
        "serve_as_custom_class": custom_class(target.config.path, out, written.speculative),
        "kept": written.kept,
        "notes": written.notes,
    }


def custom_class(target: str, out: Path, speculative: dict[str, Any]) -> str:
    """The command for vLLM 0.33 and later, which runs Medusa through the proposer in the folder; empty for other methods."""
    if speculative.get("method") != "medusa":
        return ""
    told = json.dumps({**speculative, "method": "custom_class", "model": "vllm_medusa.MedusaProposer"})
    setting = json.dumps({"headstart_medusa": str(out)})
    return (
        f"PYTHONPATH={out} vllm serve {target} --speculative-config '{told}' --additional-config '{setting}'"
    )


def target_overrides(engine: str, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM must be told about the target (--hf-overrides): it looks there for the number of MTP blocks."""
    return {"num_nextn_predict_layers": 1} if engine == "vllm" and speculative.get("method") == "mtp" else {}


def serve(engine: str, target: str, out: Path, speculative: dict[str, Any]) -> str:
    """The command, in one line, that serves the target with the exported drafter."""
    count = speculative.get("num_speculative_tokens", 1)
    if engine in ("vllm", "speculators"):
        told = json.dumps({**speculative, "model": str(out)})
        overrides = target_overrides(engine, speculative)
        tail = f" --hf-overrides '{json.dumps(overrides)}'" if overrides else ""
        return f"vllm serve {target} --speculative-config '{told}'{tail}"
    if engine == "sglang":
        name = {
            "mtp": "EAGLE",
            "eagle": "EAGLE",
            "eagle3": "EAGLE3",
            "dflash": "DFLASH",
            "dspark": "DSPARK",
            "draft_model": "STANDALONE",
        }
        algorithm = name[speculative["method"]]
        chain = f" --speculative-num-steps {count} --speculative-eagle-topk 1 --speculative-num-draft-tokens {count + 1}"
        tail = "" if algorithm in ("DFLASH", "DSPARK") else chain
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {out}{tail}"
        )
    if "speculation_type" in speculative:
        return f"model.generate(..., assistant_model=AutoModel.from_pretrained('{out}'), speculation_type='dflash')"
    return f"model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained('{out}'), num_assistant_tokens={count})"
