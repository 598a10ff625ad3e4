"""Measures drafters on the embedded hybrid target: `python -m scripts.evidence.hybrid [RUN]` writes
hybrid.{json,md} and the table of docs/targets.md.

It reads the run of `headstart loop experiment=hybrid` as scripts.evidence.families reads its run,
and adds the cost of recurrent layers. It compares the bytes of a row and of a verification's nodes
in the cache with the closed form's formula, and the milliseconds of a step with a draft with those
of plain decoding. It also reports the results of transformers' loops on such a target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.report.claims import ratio_text
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from inference.target.recurrent.cache import RecurrentCache
from scripts.evidence import families
from scripts.evidence.common import DOCS, Facts, cell, read_json, write_report
from scripts.tools.common import REPORTS, ROOT, Section, command, cpu_target

COMMAND = "headstart loop experiment=hybrid && python -m scripts.evidence.hybrid"
RUN = ROOT / "outputs" / "hybrid"
TARGET, ASSISTANT = ROOT / "assets" / "tiny-hybrid", ROOT / "assets" / "tiny-target-small"
PAGE, SECTION = DOCS / "targets.md", Section("hybrid", "scripts/evidence/hybrid.py")
WIDTHS = {"chain of 4": (1, 5), "chain of 4, 8 rows": (8, 5), "tree of 26": (1, 27)}
"""Name of a verification -> rows, nodes (including the root)."""
LOOPS: dict[str, dict[str, Any]] = {
    "generate": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},
}
"""Loop of transformers -> its arguments for `generate`; `assisted` also gets a second model."""
ABOUT = (
    "Every row was trained on the same generated answers; measured on other prompts, batch size "
    "1. **tau**: committed tokens per verification, bonus included. **speedup**: against the same "
    "loop without a drafter, chain at T=0, same run. **step**: time of a step that verifies a "
    "chain, drafting not included, over the time of a step of plain decoding, same run. "
    "**lossless**: texts that are those of plain decoding, where the rule promises that (at T=1 "
    "block verification and specinfer promise the distribution). Brackets: 95% bootstrap intervals "
    "over prompts."
)


def report(given: argparse.Namespace) -> None:
    """Read the run, measure memory, try transformers' loops, write the report."""
    content = families.collect(given.run, COMMAND)
    plain = 1000 * content["baseline"]["chain"]["seconds"] / content["baseline"]["chain"]["tokens"]
    for row in content["rows"]:
        row["step_over_plain"] = verified_ms(row["measured"]["chain"]["step_ms"]) / plain
    target = cpu_target(TARGET)
    content["memory"] = memory(target, read_json(TARGET / "config.json"))
    content["transformers"] = transformers_loops()
    write_report(REPORTS / "hybrid", content, markdown(content))
    SECTION.write(PAGE, "\n".join(["", *table(content), ""]))


def verified_ms(phases: Mapping[str, float]) -> float:
    """Milliseconds of a step, without drafting."""
    return sum(spent for name, spent in phases.items() if name != "draft")


# Memory


def memory(target: TargetModel, config: Mapping[str, Any]) -> Facts:
    """Bytes per row of a target with gated delta rules, counted in its cache and computed by
    formula."""
    found: Facts = {"state": {"held": target.cache_sizes().row, "formula": state_bytes(config)}}
    found["verifications"] = {
        name: {
            "rows": rows,
            "nodes": nodes,
            "held": held_by_verification(target, rows, nodes),
            "formula": rows * verification_bytes(config, nodes),
        }
        for name, (rows, nodes) in WIDTHS.items()
    }
    return found


def held_by_verification(target: TargetModel, rows: int, nodes: int) -> int:
    """Bytes that a verification of a chain of `nodes` occupies until its commit."""
    cache = target.new_cache(rows, 64)
    assert isinstance(cache, RecurrentCache), "a target with recurrent layers"
    tokens = torch.arange(rows * 8).view(rows, 8) % target.info.vocab_size
    lengths, needs = torch.full((rows,), 8), FeatureSpec()
    target.prefill(cache, torch.arange(rows), tokens, lengths, needs)
    drafted = torch.arange(rows * nodes).view(rows, nodes) % target.info.vocab_size
    target.verify(cache, drafted, TokenTree.chain(nodes - 1), lengths, 8, needs)
    return cache.states.added_bytes()


def state_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one row: per gated delta rule, a matrix [k, v] per value head and the convolution's
    last inputs, in float32."""
    heads, key, value = _sizes(config)
    matrix = heads * key * value
    return 4 * _recurrent(config) * (matrix + (_width(config) - 1) * _channels(config))


def verification_bytes(config: Mapping[str, Any], nodes: int) -> int:
    """Bytes of one row: per gated delta rule and node, a decay and a corrected value per value
    head, a key per key head, and the convolution's input; in addition, the last committed
    inputs."""
    heads, key, value = _sizes(config)
    node = heads * (1 + value) + config["linear_num_key_heads"] * key
    inputs = (nodes + _width(config) - 1) * _channels(config)
    return 4 * _recurrent(config) * (nodes * node + inputs)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    heads, key, value = (int(config[name]) for name in names)
    return heads, key, value


def _channels(config: Mapping[str, Any]) -> int:
    """Channels of the convolution: queries, keys, values."""
    heads, key, value = _sizes(config)
    return 2 * int(config["linear_num_key_heads"]) * key + heads * value


def _width(config: Mapping[str, Any]) -> int:
    return int(config["linear_conv_kernel_dim"])


def _recurrent(config: Mapping[str, Any]) -> int:
    """Number of layers without attention: three of four."""
    layers = int(config["num_hidden_layers"])
    return layers - layers // 4


# transformers


def transformers_loops() -> dict[str, str]:
    """Loop -> "runs", or the error of transformers for it."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    beside = AutoModelForCausalLM.from_pretrained(ASSISTANT, dtype=torch.float32)
    prompt, found = torch.arange(100, 116)[None], {}
    for name, options in LOOPS.items():
        more = {"assistant_model": beside} if name == "assisted" else {}
        try:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=8,
                **options,
                **more,
            )
            found[name] = "runs"
        except ValueError as error:
            found[name] = str(error)
    return found


# The page


def markdown(content: Facts) -> list[str]:
    """The lines of hybrid.md."""
    loops = content["transformers"]
    return [
        "# Drafters on a hybrid target",
        "",
        f"Written by `{content['command']}` from [hybrid.json](hybrid.json). {ABOUT}",
        "",
        *families.conditions(content),
        "",
        *table(content),
        "",
        "## Memory",
        "",
        "Bytes per cache as it holds them, and by the closed form's formula (per recurrent layer "
        "and node: a decay and a corrected value per value head, a key per key head, the "
        "convolution's input).",
        "",
        *markdown_table(["what", "rows", "held", "formula"], memory_rows(content["memory"])),
        "",
        "## Loops of transformers",
        "",
        *markdown_table(["loop", "result"], [[name, said] for name, said in loops.items()]),
        "",
    ]


def table(content: Facts) -> list[str]:
    """The drafters by descending tau of a chain."""
    header = ["drafter", "parameters", *(f"tau {title}" for _, title in families.MEASURES.values())]
    header += ["speedup", "step", "lossless"]
    lines = []
    for row in families.by_tau(content):
        measured = row["measured"]
        lines.append(
            [
                row["name"],
                f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] else "-",
                *(cell(one["tau"], one["tau_ci95"]) for one in measured.values()),
                ratio_text(measured["chain"]["speedup"], measured["chain"]["speedup_ci95"]),
                f"{row['step_over_plain']:.2f}",
                families.lossless_text(measured, content["settings"]),
            ]
        )
    return markdown_table(header, lines)


def memory_rows(found: Facts) -> list[list[str]]:
    state = found["state"]
    rows = [["states of a row", "1", f"{state['held']:,}", f"{state['formula']:,}"]]
    for name, one in found["verifications"].items():
        rows.append([name, str(one["rows"]), f"{one['held']:,}", f"{one['formula']:,}"])
    return rows


main = command(report, run={"positional": True, "type": Path, "nargs": "?", "default": RUN})

if __name__ == "__main__":
    sys.exit(main())
