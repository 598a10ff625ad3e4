"""Decode settings for serving engines, derived from the drafts that were chosen per batch size.

`SETTINGS` is the table of docs/serving.md: the names of a Headstart setting in each engine, read
from the versions in `VERSIONS`. A test compares vLLM's names with the installed version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.decoding.draft import NONE, Draft

Json = dict[str, Any]
LENGTHS = "num_speculative_tokens_per_batch_size"
"""vLLM's draft lengths per batch size: [first, last, tokens]; the last entry also applies beyond
its end."""
TOKENS = "num_speculative_tokens"
N_MAX, P_MIN = "--spec-draft-n-max", "--spec-draft-p-min"
"""llama.cpp's options: most tokens of a draft, and the least probability of one of its tokens."""
LENGTH_NAMES = (TOKENS, "--speculative-num-steps", N_MAX)
"""Each engine's name of the draft length."""
SCHEDULED = ("eagle", "eagle3", "draft_model", "mtp")
"""Methods of vLLM that draft token by token, so that any length is possible."""
TREES = ("eagle", "eagle3")
"""Methods for which SGLang drafts trees."""

STOPPABLE = {"distilled": True, "eagle3": True, "dflash": False}
"""Methods (`Kind.export_method`) whose drafts llama.cpp ends before a token below `P_MIN`, and
whether such a draft is computed token by token, so that ending it saves drafting too. For DSpark
llama.cpp compares the confidence head instead."""
CONSIDERED = 10
"""The drafter's best tokens, among which llama.cpp takes the probability of a drafted token."""


@dataclass(frozen=True)
class Setting:
    """A setting by engine. vllm: a field of its `--speculative-config`; sglang, llama_cpp: options
    of the server; empty: the version read has none. Names in parentheses are features that decide
    by themselves."""

    ours: str
    vllm: str
    sglang: str
    llama_cpp: str


VERSIONS = {"vllm": "vLLM 0.32", "sglang": "SGLang (not run)", "llama_cpp": "llama.cpp b11434"}
SETTINGS = (
    Setting(
        "draft length", TOKENS, "--speculative-num-steps, --speculative-num-draft-tokens", N_MAX
    ),
    Setting("draft length per batch size", LENGTHS, "", ""),
    Setting("draft length per sequence length", "", "", ""),
    Setting(
        "tree: width and nodes", "", "--speculative-eagle-topk, --speculative-num-draft-tokens", ""
    ),
    Setting("static tree by its paths", "", "", ""),
    Setting("stop by confidence", "(enable_adaptive_verification, DSpark)", "", P_MIN),
    Setting("drafts at temperature", "draft_sample_method", "", ""),
    Setting(
        "rule of acceptance",
        "rejection_sample_method",
        "--speculative-accept-threshold-single, --speculative-accept-threshold-acc",
        "",
    ),
)


def markdown() -> str:
    """The table for docs/serving.md."""
    lines = [f"| setting | {' | '.join(VERSIONS.values())} |", "|---" * 4 + "|"]
    for row in SETTINGS:
        cells = []
        for value in (row.vllm, row.sglang, row.llama_cpp):
            names = [name.strip() for name in value.strip("()").split(", ")]
            said = ", ".join(f"`{name}`" for name in names[:1] if name)
            said += "".join(f", {f'`{n}`' if n[0] in '-' else n}" for n in names[1:])
            cells.append(f"({said})" if value.startswith("(") else said or "no")
        lines.append(f"| {row.ours} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ranges(depths: Mapping[int, int]) -> list[list[int]]:
    """vLLM's ranges [first, last, tokens] of draft lengths by batch size. Every batch size gets the
    length of the nearest one in `depths` (as a ratio, ties to the smaller); neighbours with the
    same length form one range."""
    sizes, found = sorted(depths), list[list[int]]()
    for place, size in enumerate(sizes):
        last = math.isqrt(size * sizes[place + 1]) if place + 1 < len(sizes) else size
        first = found[-1][1] + 1 if found else 1
        if found and found[-1][2] == depths[size]:
            found[-1][1] = last
        elif last >= first:
            found.append([first, last, depths[size]])
    return found


def length_at(schedule: Sequence[Sequence[int]], batch: int) -> int:
    """The draft length for a batch size, by the ranges of `ranges`."""
    below = [tokens for first, _, tokens in schedule if first <= batch]
    return below[-1]


def vllm_settings(drafts: Mapping[int, Draft]) -> Json:
    """Fields of vLLM's speculative_config for greedy chains by batch size; a length of 0 means that
    no chain was faster. Empty if nothing speculates."""
    depths = {batch: draft.depth for batch, draft in drafts.items()}
    most = max(depths.values(), default=0)
    if not most:
        return {}
    found, schedule = {TOKENS: most}, ranges(depths)
    return found if len({tokens for *_, tokens in schedule}) == 1 else found | {LENGTHS: schedule}


def sglang_settings(drafts: Mapping[int, Draft]) -> Json:
    """SGLang's options, by name, for the smallest batch size that speculates. SGLang grows trees by
    the drafter's probabilities; a static tree becomes such a tree of its depth, width and size."""
    chosen = next((drafts[batch] for batch in sorted(drafts) if drafts[batch] != NONE), None)
    if chosen is None:
        return {}
    children: dict[tuple[int, ...], int] = {}
    for path in chosen.choices:
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    width = chosen.width or max(children.values(), default=1)
    # the root, its children, and the children of `width` nodes at each further level
    most = 1 + width + (chosen.depth - 1) * width**2
    return {
        "--speculative-num-steps": chosen.depth,
        "--speculative-eagle-topk": width,
        "--speculative-num-draft-tokens": min(chosen.size, most),
    }


def llama_cpp_settings(drafts: Mapping[int, Draft], least: Mapping[int, float]) -> Json:
    """llama.cpp's options for greedy chains, and for the least probability of a drafted token where
    it is known: those of the smallest batch size that speculates."""
    batch = next((size for size in sorted(drafts) if drafts[size] != NONE), None)
    if batch is None:
        return {}
    found: Json = {N_MAX: drafts[batch].depth}
    return found | {P_MIN: least[batch]} if batch in least else found


def engine_settings(
    drafts: Mapping[int, Draft], chains: Mapping[int, Draft], least: Mapping[int, float]
) -> dict[str, Json]:
    """The settings of each engine for the best greedy drafts by batch size, and for the best chains
    among them, to which vLLM and llama.cpp are limited. least: the least probability of a token of
    these chains, where it is known."""
    return {
        "vllm": vllm_settings(chains),
        "sglang": sglang_settings(drafts),
        "llama.cpp": llama_cpp_settings(chains, least),
    }


def greedy_drafts(rows: Iterable[tuple[int, float, Draft]]) -> dict[int, Draft]:
    """The drafts by batch size of the rows (batch size, temperature, draft) with the lowest
    temperature: the greedy ones, if there are any."""
    listed = list(rows)
    coldest = min((temperature for _, temperature, _ in listed), default=0.0)
    return {batch: draft for batch, temperature, draft in listed if temperature == coldest}


def known_least(rows: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """The least probability of a drafted token by batch size, of the rows (batch size, probability)
    that have one: greedy ones."""
    return {batch: least for batch, least in rows if least is not None}
