"""State bytes per token of every head in every format, for a target of given sizes: docs/reports/feature_sizes.json.

    python -m scripts.feature_sizes

The target is described by its sizes alone (Llama-3.1-8B by default); nothing is loaded. Heads are those of conf/head as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from inference.manifest import write_json
from scripts.config import load_settings, options
from scripts.stages import STAGES
from train.features.store.run import spec_of
from train.features.store.size import FORMATS, bytes_per_token, slots

ROOT = Path(__file__).resolve().parents[1]
LLAMA = TargetInfo(
    id="meta-llama/Llama-3.1-8B-Instruct", revision="", model_type="llama", tokenizer_hash="", vocab_size=128_256,
    hidden_size=4096, num_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=14_336,
    rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=131_072, parameters=8_030_261_248,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.feature_sizes", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "feature_sizes.json")
    parser.add_argument("--top", type=int, default=64, help="teacher logits per token in the last column")
    given = parser.parse_args(arguments)
    try:
        rows = [row for name in options("head") if (row := row_of(name, LLAMA, given.top)) is not None]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    target = {key: value for key, value in asdict(LLAMA).items() if key in ("id", "hidden_size", "num_layers", "vocab_size")}
    command = " ".join(["python -m scripts.feature_sizes", *(sys.argv[1:] if arguments is None else arguments)])
    write_json(given.out, {"format": 1, "command": command, "target": target, "top_logits": given.top, "heads": rows})
    print("\n".join(table(rows, given.top)))
    return 0


def row_of(name: str, info: TargetInfo, top: int) -> dict[str, Any] | None:
    """One head's features and their bytes per token; None for heads that are not trained on features of the target."""
    try:
        head = load_settings(STAGES["features"], [f"head={name}"]).head
        if not get_kind(head.kind).trainable:
            return None
        needs = spec_of(head.kind, head.config, info)
    except UserError:  # a head that leaves a setting to the user, such as the parts of a cascade
        return None
    if not slots(needs):
        return None
    row: dict[str, Any] = {"head": name, "taps": list(needs.taps), "last_hidden": needs.last_hidden or needs.logits}
    row["bytes_per_token"] = {fmt: bytes_per_token(needs, info, fmt) for fmt in FORMATS}
    if needs.logits and needs.taps:
        row["bf16_with_top_logits"] = bytes_per_token(needs, info, "bf16", top)
    return row


def table(rows: Sequence[dict[str, Any]], top: int) -> list[str]:
    """The rows as markdown."""
    lines = [f"| head | states | {' | '.join(FORMATS)} | bf16, top {top} |", "|---|---|" + "---|" * (len(FORMATS) + 1)]
    for row in rows:
        count = len(row["taps"]) + int(row["last_hidden"])
        sizes = " | ".join(f"{size:,.0f}" for size in row["bytes_per_token"].values())
        special = f"{row['bf16_with_top_logits']:,.0f}" if "bf16_with_top_logits" in row else ""
        lines.append(f"| {row['head']} | {count} | {sizes} | {special} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
