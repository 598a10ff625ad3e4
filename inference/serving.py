"""vLLM on the same prompts, as a process of its own: `scripts/serving_baseline.py`, run by the Python of
vLLM's environment.

Not interleaved with our arms (an engine that is loaded takes memory and threads even when idle), and labelled
so. Prompts cross as token ids, answers come back as token ids and seconds, prefill and decoding apart.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from heads.api.errors import UserError
from inference.baselines import BaselinesConfig, assistant_arm, write_llama
from inference.requests import Request
from inference.target import TargetModel

if TYPE_CHECKING:
    from inference.bench import Arm

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "serving_baseline.py"


@dataclass(frozen=True)
class ServedMode:
    """What one mode of vLLM gave: (prompt id, repeat) -> tokens and seconds; its own counters; its version."""

    name: str
    version: str
    tokens: dict[tuple[str, int], list[int]]
    seconds: dict[tuple[str, int], dict[str, float]]
    acceptance: dict[str, int]


def measure_vllm(
    config: BaselinesConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Mapping[str, Request],
    warmup: Sequence[Request],
    repeats: int,
) -> list[ServedMode]:
    """Run every mode of `config.vllm`. prompts: prompt id -> its request.

    Raises `UserError` for a target that is not a folder (only its files can be handed over), sampled
    measurements, a Python that cannot be run, and for vLLM's own failures, whose last lines are quoted.
    """
    if not config.vllm_python:
        return []
    if arms[0].decode.temperature > 0:
        raise UserError(
            "bench.baselines.vllm_python is compared token by token and needs decode.temperature=0; given: "
            f"{arms[0].decode.temperature}."
        )
    if not Path(target.info.id).is_dir():
        raise UserError(
            f"bench.baselines.vllm_python needs the target as a folder; given: '{target.info.id}'. Download it and set "
            "target.path to the folder."
        )
    found = []
    with TemporaryDirectory() as scratch:
        draft = ""
        if "draft_model" in config.vllm:
            folder = write_llama(assistant_arm(config, arms).drafter, target, Path(scratch) / "draft")
            target.tokenizer.save_pretrained(folder)  # vLLM reads one from every model's folder
            draft = str(folder)
        for mode in config.vllm:
            request = _request(config, mode, target, draft, prompts, warmup, repeats)
            found.append(_run(config, request, Path(scratch), target.device))
    return found


def _request(
    config: BaselinesConfig,
    mode: str,
    target: TargetModel,
    draft: str,
    prompts: Mapping[str, Request],
    warmup: Sequence[Request],
    repeats: int,
) -> dict[str, Any]:
    return {
        "mode": mode,
        "model": str(Path(target.info.id).resolve()),
        "draft_model": draft,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafted": config.vllm_drafted,
        "max_model_len": target.info.max_position_embeddings,
        "warmup": [list(request.tokens) for request in warmup],
        "prompts": [
            {
                "id": name,
                "repeat": repeat,
                "tokens": list(request.tokens),
                "max_new_tokens": request.max_new_tokens,
            }
            for repeat in range(repeats)
            for name, request in prompts.items()
        ],
    }


def _run(config: BaselinesConfig, request: dict[str, Any], scratch: Path, device: torch.device) -> ServedMode:
    """One mode in one process."""
    asked, answered = scratch / "request.json", scratch / "answers.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    answered.unlink(missing_ok=True)
    threads = str(torch.get_num_threads())
    environment = {**os.environ, **({"OMP_NUM_THREADS": threads} if device.type == "cpu" else {})}
    environment.pop("PYTHONPATH", None)
    command = [config.vllm_python, str(SCRIPT), str(asked), str(answered)]
    name = f"bench.baselines: vLLM ({request['mode']})"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=config.vllm_seconds, env=environment, check=False
        )
    except OSError as error:
        raise UserError(
            f"bench.baselines.vllm_python '{config.vllm_python}' cannot be run ({error}). Give the Python of an "
            "environment in which vLLM is installed."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{name} took longer than bench.baselines.vllm_seconds={config.vllm_seconds:g}."
        ) from error
    if done.returncode != 0 or not answered.is_file():
        last = " / ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:])
        raise UserError(f"{name} failed with status {done.returncode}: {last}")
    return _read(request["mode"], json.loads(answered.read_text(encoding="utf-8")))


def _read(mode: str, content: Mapping[str, Any]) -> ServedMode:
    answers = {(item["id"], item["repeat"]): item for item in content["answers"]}
    return ServedMode(
        name=f"vllm_{mode}",
        version=str(content["version"]),
        tokens={key: list(item["tokens"]) for key, item in answers.items()},
        seconds={key: dict(item["seconds"]) for key, item in answers.items()},
        acceptance=dict(content["acceptance"]),
    )
