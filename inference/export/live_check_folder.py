"""`headstart verify-export verify.mode=live`: one exported folder, served by vLLM and compared with the drafter it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.export.forward_check import source_of
from inference.export.layouts.folder import Folder
from inference.export.live_check import CORRECTED, SAID, LiveRow, Served, live_check
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.measure.vllm_process import EngineProcess
from inference.target.model import TargetModel


@dataclass(frozen=True)
class LiveConfig:
    """How an export is served for the comparison."""

    python: str = ""
    """Python of an environment with vLLM (`make serve-env` makes .venv-serve/bin/python)."""
    prompts: str = "assets/prompts"
    """A .jsonl file, or a folder with one <domain>.jsonl per domain."""
    prompts_per_domain: int = 4
    """Prompts of each domain."""
    max_new_tokens: int = 128
    """Most new tokens of an answer."""
    batches: tuple[int, ...] = (1, 8)
    """Requests under way at once; every size is a pass over all prompts."""
    seconds: float = 1800.0
    """Longest time that the engine may take."""

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise UserError(f"verify.live.batches must name sizes of at least 1; given: {list(self.batches)}.")
        for name in ("prompts_per_domain", "max_new_tokens", "seconds"):
            if getattr(self, name) <= 0:
                raise UserError(f"verify.live.{name} must be above 0; given: {getattr(self, name)}.")

    def process(self) -> EngineProcess:
        """The engine's process; raises `UserError` without its Python."""
        if not self.python:
            raise UserError(
                "a live check serves the folder with vLLM: give the Python of an environment that has it with "
                "verify.live.python=<path>. `make serve-env` makes one (.venv-serve/bin/python)."
            )
        return EngineProcess(self.python, self.seconds, SAID)

    def requests(self, target: TargetModel, depth: int) -> list[Request]:
        """The prompts that fit the target with their answers and a draft."""
        prompts = select_prompts(load_prompts(self.prompts), self.prompts_per_domain, 0)
        decode = DecodeConfig(max_new_tokens=self.max_new_tokens)
        room = target.info.max_position_embeddings - depth - 1
        return to_requests(prompts, target.tokenizer, decode, capacity=room, overlong="skip")


def check_folder(config: LiveConfig, target: TargetModel, path: Path, source: str = "") -> list[LiveRow]:
    """Serve an exported folder. source: the checkpoint it was made of, if not the one that the folder names.

    Raises `UserError` without that checkpoint, for a folder of another engine, and where vLLM cannot be run.
    """
    process, served = config.process(), served_folder(path, target, source)
    return live_check(target, [served], config.requests(target, served.depth), process, config.batches)


def served_folder(path: Path, target: TargetModel, source: str = "") -> Served:
    """An exported folder with the drafter that it was made of."""
    folder = Folder.read(path)
    said: dict[str, Any] = folder.export
    if "speculative_config" not in said:
        raise UserError(
            f"'{path}' does not say how it is served: `headstart export` did not write it. Check it with verify.mode=static."
        )
    if said["engine"] not in ("vllm", "speculators"):
        raise UserError(f"'{path}' is for {said['engine']}; a live check serves with vLLM. Export it with export.engine=vllm.")
    checkpoint, why = source_of(folder, source)
    if checkpoint is None:
        raise UserError(f"a live check compares with our own decoder, but {why}. Give verify.source=<checkpoint folder>.")
    drafter = load_drafter(checkpoint, target.info, target.weights)
    corrections = ("grouped_rms_norm",) if drafter.kind == "dflash" else ()
    told, overrides = said["speculative_config"], said.get("hf_overrides", {})
    return Served(path.name, str(said["method"]), drafter, path, told, corrections=corrections, overrides=overrides)


def lines(rows: Sequence[LiveRow]) -> list[str]:
    """The comparison for a person to read."""
    found = []
    for row in rows:
        if row.ours is None or row.theirs is None:
            found.append(f"{row.name}, {row.engine}, batch {row.batch}: {'; '.join(row.problems)}")
            continue
        ours, theirs, counts = row.ours.counts, row.theirs.counts, row.lossless
        plain = row.plain_tokens_per_second
        found.append(
            f"{row.name}, {row.engine}, batch {row.batch}: text identical {counts['identical']}/{counts['sequences']} "
            f"(near ties {counts['near_ties']}), acceptance length {theirs.length:.3f}, ours {ours.length:.3f} "
            f"({row.difference:+.2%}), equal steps in {row.same_steps} answers; tokens/s {row.theirs.tokens_per_second:.0f} "
            f"(engine without drafter {plain['engine']:.0f}), ours {row.ours.tokens_per_second:.0f} ({plain['ours']:.0f})"
        )
        found.append("  position   " + "  ".join(f"{place + 1:5d}" for place in range(len(ours.rates))))
        found.append("  engine     " + "  ".join(f"{rate:5.3f}" for rate in theirs.rates))
        found.append("  ours       " + "  ".join(f"{rate:5.3f}" for rate in ours.rates))
        found += [f"  note: {CORRECTED[name]}" for name in row.corrected]
        found += [f"  near tie: prompt {item.prompt}, token {item.place}, {item.margin:.2g} apart" for item in row.divergences]
        found += [f"  PROBLEM: {problem}" for problem in row.problems]
    return found
