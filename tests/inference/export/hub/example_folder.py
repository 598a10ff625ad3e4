"""A drafter checkpoint with its measured report, made by hand: what the card and the push start
from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inference.export.hub.config import PushConfig
from inference.export.hub.folder import Sources, build_folder
from inference.folders import EXPORT_FILE
from inference.manifest import file_sha256
from inference.report.model import write_report
from tests.inference.example_report import example_report, merged

TARGET = {"id": "someone/target-1b", "revision": "abc123", "tokenizer_hash": "t0k3n1z3r"}
CONFIG = {"format": 1, "kind": "eagle3", "config": {}, "needs": {}, "target": TARGET}


def write_checkpoint(folder: Path, seed: int = 0) -> str:
    """Write config.json and random weights to `folder`; returns the weights' hash."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    save_file(
        {"weight": torch.randn(64, 200, generator=generator)}, str(folder / "model.safetensors")
    )
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return file_sha256(folder / "model.safetensors")


def report_of(digest: str, *entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The example report, having measured the weights with this hash beside an n-gram drafter."""
    ngram = {
        "kind": "ngram",
        "draft": {"name": "ngram", "weights_sha256": ""},
        "tau": 1.31,
        "tau_ci95": [1.2, 1.4],
    }
    own = [merged({"draft": {"weights_sha256": digest}}, entry) for entry in (entries or ({},))]
    target = {key: TARGET[key] for key in ("id", "revision")}
    return example_report(*own, ngram, **merged({"target": target}, changes))


def write_measured(folder: Path, digest: str, *entries: dict[str, Any], **changes: Any) -> Path:
    """Write `report_of` to `folder` and return report.json's path."""
    write_report(report_of(digest, *entries, **changes), folder / "report.json")
    return folder / "report.json"


def build(
    checkpoint: Path,
    reports: Sequence[Path],
    out: Path,
    config: PushConfig,
    engines: Mapping[str, Path] | None = None,
) -> Path:
    """The Hub folder that a push with `config` would build."""
    return build_folder(Sources(checkpoint, reports, engines or {}), out, config)


def write_export(folder: Path, digest: str, engine: str = "vllm") -> Path:
    """An engine's folder as `headstart export` leaves it; returns it."""
    folder.mkdir(parents=True)
    save_file({"fc.weight": torch.ones(3, 5)}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    told = {
        "engine": engine,
        "source": {"checkpoint": str(folder.parent / "best"), "sha256": digest},
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 4},
        "serve": f"serve {folder}",
    }
    (folder / EXPORT_FILE).write_text(json.dumps(told), encoding="utf-8")
    return folder
