"""Measures vLLM on the same prompts: runs `foreign/vllm_worker.py` in a separate process with the
Python of vLLM's environment.

It is not interleaved with our arms, because a loaded engine takes memory and threads even when it
is idle; reports say so. Prompts are passed as token ids. Answers are token ids, tokens per step,
and seconds, with prefill and decoding separate. `serve` runs the process, and `measure_vllm` runs
the modes that a measurement has besides its arms. `inference.export.check.live` serves exports with
it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from heads.api.errors import UserError
from heads.api.reading import read_json
from inference.decoding.arm import Arm
from inference.decoding.requests import Request
from inference.measure.baselines import BaselinesConfig, assistant_arm, write_llama
from inference.measure.foreign.vllm_worker import ServedMode, ServingMode, ServingRequest
from inference.measure.prompts import Requests
from inference.target.model import TargetModel

SCRIPT = Path(__file__).with_name("foreign") / "vllm_worker.py"
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""The longest and shortest n-gram that is looked up, as in kind ngram."""


OURS = ("PYTHONPATH", "TRITON_INTERPRET")
"""Variables for this process alone: vLLM has packages of its own, and would interpret its own
kernels, which takes up to a second for a step."""


@dataclass(frozen=True)
class EngineProcess:
    """How vLLM is run."""

    python: str
    """The Python of vLLM's environment."""
    seconds: float = 1800.0
    """Time limit of one call."""
    settings: tuple[str, str] = ("bench.baselines.vllm_python", "bench.baselines.vllm_seconds")
    """Names of the two settings, for messages."""
    environment: Mapping[str, str] = field(default_factory=dict)


def inherited() -> dict[str, str]:
    """The environment that a process of vLLM takes over from this one."""
    return {name: value for name, value in os.environ.items() if name not in OURS}


def vllm_request(
    target: TargetModel,
    modes: Sequence[ServingMode],
    prompts: Iterable[tuple[str, int, Request]],
    warmup: Sequence[Request] = (),
    batches: Sequence[int] = (1,),
) -> ServingRequest:
    """Every mode answers every (prompt id, repeat, request), once per batch size."""
    return {
        "modes": [asdict(mode) for mode in modes],
        "batches": list(batches),
        "model": str(Path(target.info.id).resolve()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_model_len": target.info.max_position_embeddings,
        "warmup": [list(request.tokens) for request in warmup],
        "prompts": [
            {
                "id": name,
                "repeat": repeat,
                "tokens": list(request.tokens),
                "max_new_tokens": request.max_new_tokens,
            }
            for name, repeat, request in prompts
        ],
    }


def serve(
    process: EngineProcess, request: ServingRequest, device: torch.device, what: str = "vLLM"
) -> list[ServedMode]:
    """Run the modes of a request in one process; a `ServedMode` per mode and batch size.

    A mode that fails has its error instead of answers, and so have the modes after one that ends
    the process. Raises `UserError` for a Python that cannot be run, a call that takes too long, and
    a process that ends before its first mode does.
    """
    environment = inherited()
    if device.type == "cpu":
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    python, seconds = process.settings
    with TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "answers.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        try:
            done = subprocess.run(
                [process.python, str(SCRIPT), str(asked), str(answered)],
                capture_output=True,
                text=True,
                timeout=process.seconds,
                env={**environment, **process.environment},
                check=False,
            )
        except OSError as error:
            raise UserError(
                f"{python} '{process.python}' cannot be run ({error}). Give the Python of an "
                "environment in which vLLM is installed."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{what} took longer than {seconds}={process.seconds:g}.") from error
        last = " / ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:])
        if not answered.is_file():
            raise UserError(f"{what} failed with status {done.returncode}: {last}")
        content = read_json(answered, "Run it again.")
        if not isinstance(content, list) or not content:
            raise UserError(f"{what} answered with something else than a list: {last}")
        try:
            found = [ServedMode(**item) for item in content]
        except TypeError as error:
            raise UserError(f"{what} answered with something else ({error}): {last}") from error
    by_mode = {(mode.name, mode.batch): mode for mode in found}
    ended = f"the process ended with status {done.returncode}: {last}"
    return [
        by_mode.get((name, batch)) or ServedMode(name, found[0].version, batch, error=ended)
        for name in (mode["name"] for mode in request["modes"])
        for batch in request["batches"]
    ]


def measure_vllm(
    config: BaselinesConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    requests: Requests,
    warmup: Sequence[Request],
    repeats: int,
) -> list[ServedMode]:
    """Run every mode of `config.vllm`, each in a separate process.

    Raises `UserError` for a target that is not a folder, sampled measurements, a Python that cannot
    be run, and for vLLM's own failures, whose last lines are quoted.
    """
    if not config.vllm_python:
        return []
    if warm := arms[0].decode.temperature:
        raise UserError(
            "bench.baselines.vllm_python is compared token by token and needs "
            f"decode.temperature=0; given: {warm}."
        )
    require_folder(target, "bench.baselines.vllm_python")
    asked = [
        (name, repeat, request) for repeat in range(repeats) for name, request in requests.items()
    ]
    process = EngineProcess(config.vllm_python, config.vllm_seconds)
    found = []
    with TemporaryDirectory() as draft:
        if "draft_model" in config.vllm:
            write_llama(assistant_arm(config, arms).drafter, target, Path(draft))
            target.tokenizer.save_pretrained(draft)  # vLLM reads one from each model's folder
        for name in config.vllm:
            mode = ServingMode(f"vllm_{name}", speculation(name, config.vllm_drafted, draft))
            what = f"bench.baselines: vLLM ({name})"
            (served,) = serve(
                process, vllm_request(target, [mode], asked, warmup), target.device, what
            )
            if served.error:
                raise UserError(f"{what} failed: {served.error}")
            found.append(served)
    return found


def require_folder(target: TargetModel, setting: str) -> None:
    """Raise `UserError` for a target without files that another program can load."""
    if not Path(target.info.id).is_dir():
        raise UserError(
            f"{setting} needs the target as a folder; given: '{target.info.id}'. Download it and "
            "set target.path to the folder."
        )


def speculation(name: str, drafted: int, draft_model: str = "") -> dict[str, object] | None:
    """vLLM's `speculative_config` for plain, ngram and draft_model."""
    if name == "plain":
        return None
    own = LOOKUP if name == "ngram" else {"model": draft_model}
    return {"method": name, "num_speculative_tokens": drafted, **own}
