"""What does it cost in tau to compress stored features? One drafter trained per format, from stores of the same target states.

    python -m scripts.feature_formats --answers outputs/families/generate --work outputs/feature_formats

For each head and seed the same training runs online and from a store of every format: same answers, same order of rows, same first
weights, so that the numbers of the features are the only difference. tau is measured at temperature 0 on all validation prompts,
with a chain. Every training is kept in --work; a rerun does what is missing, and the report holds what has been done so far.

docs/reports/feature_formats.json: `formats` (bytes per token of the heads' store, estimated and real size, share of bf16) and
`rows` (one per head and way: tau per seed, its mean, and the mean's change against bf16 over the seeds that both have, with the
standard error of the changes: a training with other rounding ends elsewhere, whatever the features).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE, file_sha256, write_json
from scripts.config import Settings, load_settings
from scripts.stages import STAGES
from train.features.config import FeaturesConfig
from train.features.store.run import StoreJob, write_features
from train.run import train

ROOT = Path(__file__).resolve().parents[1]
HEADS: dict[str, tuple[str, ...]] = {
    "eagle3": ("head.ttt_steps=4", "optim.lr=1.0e-2"),
    "dflash": ("head.num_anchors=64", "optim.lr=1.0e-3"),
}
"""The measured heads, with their settings of conf/experiment/families.yaml."""
STORED = ("bf16", "fp8", "int8", "int4")
ONLINE = "online"
COMMON = (
    "engine.name=torch", "engine.precision=bfloat16", "decode.temperature=0.0", "decode.depth=4", "train.patience=0",
    "train.global_batch=8", "train.micro_batch=8", "train.sequence_length=512", "train.save_every=0", "train.parity=false",
    "train.tracker.wandb=disabled", "train.eval_prompts=96", "train.eval_batch=32",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is missing and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.feature_formats", description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=Path, default=Path("outputs/families/generate"))
    parser.add_argument("--work", type=Path, default=Path("outputs/feature_formats"))
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    ways = [*STORED, ONLINE]
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways, help="bf16 is what others are compared with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "feature_formats.json")
    given = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(given.threads)
    try:
        stores = {fmt: write_store(given, fmt) for fmt in STORED if fmt in given.ways}
        for seed in given.seeds:
            for head in given.heads:
                for way in given.ways:
                    train_one(given, head, way, seed)
                    write_json(given.out, report(given, stores))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(json.loads(given.out.read_text(encoding="utf-8")))))
    return 0


def settings_of(given: argparse.Namespace, head: str, seed: int) -> Settings:
    """The settings of one training."""
    length = (f"train.max_steps={given.steps}", f"train.eval_every={given.steps}", f"train.eval_tokens={given.tokens}")
    return load_settings(STAGES["train"], [f"head={head}", f"run.seed={seed}", *COMMON, *HEADS[head], *length])


def write_store(given: argparse.Namespace, fmt: str) -> dict[str, Any]:
    """The store of one format for all measured heads; returns its manifest."""
    heads = [(name, settings_of(given, name, 0)) for name in HEADS]
    first = heads[0][1]
    job = StoreJob(
        heads=tuple((name, made.head.kind, made.head.config) for name, made in heads),
        target=replace(first.target, device="cpu"),
        answers=given.answers,
        features=FeaturesConfig(mode="store", format=fmt, path=str(given.work / "features" / fmt), shard_mib=32.0),
        dtype=first.engine.dtype,
        sequence_length=first.train.sequence_length,
        batch_rows=first.train.micro_batch,
        seed=0,
    )
    return write_features(job)


def train_one(given: argparse.Namespace, head: str, way: str, seed: int) -> None:
    """One training, unless it is there already."""
    out = given.work / f"{head}-{way}-{seed}"
    if (out / MANIFEST_FILE).is_file():
        return
    made = settings_of(given, head, seed)
    features = FeaturesConfig()
    if way != ONLINE:
        features = FeaturesConfig(mode="store", format=way, path=str(given.work / "features" / way))
    train(
        made.head.kind, made.head.config, target=replace(made.target, device="cpu"), data=given.answers, out=out,
        config=made.train, features=features, engine=made.engine, optim=made.optim, schedule=made.schedule,
        decode=made.decode,
    )  # fmt: skip


def report(given: argparse.Namespace, stores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What has been measured so far."""
    asked = [("heads", given.heads), ("ways", given.ways), ("seeds", given.seeds), ("steps", [given.steps])]
    options = [f"--{name} {' '.join(map(str, values))}" for name, values in asked]
    formats = [format_row(given.work / "features" / fmt, manifest, stores["bf16"]) for fmt, manifest in stores.items()]
    rows = [row for head in HEADS for way in (ONLINE, *STORED) if (row := tau_row(given, head, way)) is not None]
    facts = {"steps": given.steps, "rows_per_step": 8, "sequence_length": 512, "prompts": 96, "tokens": given.tokens}
    return {
        "format": 1,
        "command": " ".join(["python -m scripts.feature_formats", *options]),
        "answers": file_sha256(given.answers / MANIFEST_FILE),
        "settings": facts,
        "formats": formats,
        "rows": rows,
    }


def format_row(folder: Path, manifest: dict[str, Any], bf16: dict[str, Any]) -> dict[str, Any]:
    """Sizes of one store: tokens, estimate, and every byte that lies there."""
    real = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "format": manifest["identity"]["format"],
        "tokens": manifest["tokens"],
        "estimated_bytes": manifest["estimated_bytes"],
        "bytes": real,
        "estimate_error": manifest["estimated_bytes"] / real - 1,
        "bytes_per_token": real / manifest["tokens"],
        "share_of_bf16": manifest["bytes"] / bf16["bytes"],
    }


def tau_row(given: argparse.Namespace, head: str, way: str) -> dict[str, Any] | None:
    """tau of one head and way by seed, and its mean change against bf16; None before the first."""
    own, plain = taus(given, head, way), taus(given, head, "bf16")
    if not own:
        return None
    both = sorted(set(own) & set(plain))
    row: dict[str, Any] = {"head": head, "features": way, "tau": {str(seed): tau for seed, tau in sorted(own.items())}}
    row["mean"] = sum(own.values()) / len(own)
    if both:
        row["seeds"] = len(both)
        row["change"] = sum(own[seed] for seed in both) / sum(plain[seed] for seed in both) - 1
        row["changes"] = changes = [own[seed] / plain[seed] - 1 for seed in both]
        row["standard_error"] = stdev(changes) / len(both) ** 0.5 if len(both) > 1 else None
    if way == ONLINE and both:
        row["same_weights_as_bf16"] = all(
            weights(given, head, way, seed) == weights(given, head, "bf16", seed) for seed in both
        )
    return row


def taus(given: argparse.Namespace, head: str, way: str) -> dict[int, float]:
    """tau by seed of the trainings that are done."""
    found = {}
    for path in sorted(given.work.glob(f"{head}-{way}-*/{MANIFEST_FILE}")):
        found[int(path.parent.name.rsplit("-", 1)[1])] = float(json.loads(path.read_text(encoding="utf-8"))["best"]["tau"])
    return found


def weights(given: argparse.Namespace, head: str, way: str, seed: int) -> str:
    """The hash of a trained drafter's weights."""
    return file_sha256(given.work / f"{head}-{way}-{seed}" / "best" / "model.safetensors")


def table(content: dict[str, Any]) -> list[str]:
    """The report as markdown: sizes, then tau."""
    lines = ["| format | bytes per token | share of bf16 | estimate off by |", "|---|---|---|---|"]
    for row in content["formats"]:
        lines.append(
            f"| {row['format']} | {row['bytes_per_token']:,.0f} | {row['share_of_bf16']:.1%} | {row['estimate_error']:+.2%} |"
        )
    lines += ["", "| head | features | seeds | tau | against bf16 | by seed |", "|---|---|---|---|---|---|"]
    for row in content["rows"]:
        each = ", ".join(f"{change:+.2%}" for change in row.get("changes", []))
        change = f"{row['change']:+.2%}" if "change" in row else ""
        if row.get("standard_error"):
            change += f" ± {row['standard_error']:.2%}"
        lines.append(f"| {row['head']} | {row['features']} | {len(row['tau'])} | {row['mean']:.3f} | {change} | {each} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
