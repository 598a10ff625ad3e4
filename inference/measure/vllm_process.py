"""vLLM on the same prompts, as a process of its own: `vllm_worker.py`, run by the Python of vLLM's environment.

Not interleaved with our arms (an engine that is loaded takes memory and threads even when idle), and labelled so. Prompts cross as
token ids, answers come back as token ids, tokens per step and seconds, prefill and decoding apart. `serve` is the process;
`measure_vllm` are the modes that a measurement has beside its arms; `inference.export.check.live` serves exports with it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.decoding.requests import Request
from inference.measure.baselines import BaselinesConfig, assistant_arm, write_llama
from inference.target.model import TargetModel

SCRIPT = Path(__file__).with_name("vllm_worker.py")
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""The longest and shortest run of tokens that is looked up, as in kind ngram."""
Key = tuple[str, int]


@dataclass(frozen=True)
class ServingMode:
    """One engine. speculative: vLLM's `speculative_config`, None for plain decoding; additional: its `additional_config`;
    corrections: faults of vLLM to be corrected in its process, where it has them (`CORRECTIONS` in the script). They stay for the
    modes behind it. overrides: its `hf_overrides`, of the target's configuration.
    """

    name: str
    speculative: Mapping[str, Any] | None = None
    additional: Mapping[str, Any] = field(default_factory=dict)
    corrections: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As the script reads it."""
        shared = {"name": self.name, "speculative": self.speculative, "additional": dict(self.additional)}
        return {**shared, "corrections": list(self.corrections), "overrides": dict(self.overrides)}


@dataclass(frozen=True)
class ServedMode:
    """What one mode of vLLM gave with `batch` requests under way at once: (prompt id, repeat) -> tokens, tokens of every step after
    the first token, seconds; its own counters, and the seconds of the whole pass. error: why there is nothing; corrected: faults of
    vLLM that were corrected.
    """

    name: str
    version: str
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    seconds: dict[Key, dict[str, float]] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    steps: dict[Key, list[int]] = field(default_factory=dict)
    batch: int = 1
    wall: float = 0.0
    error: str = ""
    corrected: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineProcess:
    """How vLLM is run. python: of its environment; seconds: the longest that one call may take; said: what messages call the two
    settings; environment: more variables.
    """

    python: str
    seconds: float = 1800.0
    said: tuple[str, str] = ("bench.baselines.vllm_python", "bench.baselines.vllm_seconds")
    environment: Mapping[str, str] = field(default_factory=dict)


def vllm_request(
    target: TargetModel,
    modes: Sequence[ServingMode],
    prompts: Iterable[tuple[str, int, Request]],
    warmup: Sequence[Request] = (),
    batches: Sequence[int] = (1,),
) -> dict[str, Any]:
    """What `serve` asks: every mode answers every (prompt id, repeat, request), once per batch size."""
    return {
        "modes": [mode.to_dict() for mode in modes],
        "batches": list(batches),
        "model": str(Path(target.info.id).resolve()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_model_len": target.info.max_position_embeddings,
        "warmup": [list(request.tokens) for request in warmup],
        "prompts": [
            {"id": name, "repeat": repeat, "tokens": list(request.tokens), "max_new_tokens": request.max_new_tokens}
            for name, repeat, request in prompts
        ],
    }


def serve(process: EngineProcess, request: Mapping[str, Any], device: torch.device, what: str = "vLLM") -> list[ServedMode]:
    """Run the modes of a request (`vllm_request`) in one process; one `ServedMode` per mode and batch size, in that order.

    A mode that fails, and those behind one that takes the process down, have their error instead of answers. Raises `UserError`
    for a Python that cannot be run, a call that takes too long, and a process that ends before its first mode does.
    """
    threads = str(torch.get_num_threads())
    environment = {
        **os.environ,
        **({"OMP_NUM_THREADS": threads} if device.type == "cpu" else {}),
        **process.environment,
    }
    if "PYTHONPATH" not in process.environment:
        environment.pop("PYTHONPATH", None)
    python, seconds = process.said
    with TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "answers.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        try:
            done = subprocess.run(
                [process.python, str(SCRIPT), str(asked), str(answered)],
                capture_output=True,
                text=True,
                timeout=process.seconds,
                env=environment,
                check=False,
            )
        except OSError as error:
            raise UserError(
                f"{python} '{process.python}' cannot be run ({error}). Give the Python of an environment in which vLLM is "
                "installed."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{what} took longer than {seconds}={process.seconds:g}.") from error
        last = " / ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:])
        if not answered.is_file():
            raise UserError(f"{what} failed with status {done.returncode}: {last}")
        content = json.loads(answered.read_text(encoding="utf-8"))
    return _read(request, content, f"the process ended with status {done.returncode}: {last}")


def measure_vllm(
    config: BaselinesConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Mapping[str, Request],
    warmup: Sequence[Request],
    repeats: int,
) -> list[ServedMode]:
    """Run every mode of `config.vllm`, each in a process of its own. prompts: prompt id -> its request.

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
    require_folder(target, "bench.baselines.vllm_python")
    asked = [(name, repeat, request) for repeat in range(repeats) for name, request in prompts.items()]
    process = EngineProcess(config.vllm_python, config.vllm_seconds)
    found = []
    with TemporaryDirectory() as scratch:
        draft = ""
        if "draft_model" in config.vllm:
            folder = write_llama(assistant_arm(config, arms).drafter, target, Path(scratch) / "draft")
            target.tokenizer.save_pretrained(folder)  # vLLM reads one from every model's folder
            draft = str(folder)
        for name in config.vllm:
            mode = ServingMode(f"vllm_{name}", speculation(name, config.vllm_drafted, draft))
            what = f"bench.baselines: vLLM ({name})"
            (served,) = serve(process, vllm_request(target, [mode], asked, warmup), target.device, what)
            if served.error:
                raise UserError(f"{what} failed: {served.error}")
            found.append(served)
    return found


def require_folder(target: TargetModel, setting: str) -> None:
    """Raise `UserError` for a target that is no folder: only files can be handed to another program."""
    if not Path(target.info.id).is_dir():
        raise UserError(
            f"{setting} needs the target as a folder; given: '{target.info.id}'. Download it and set target.path to the folder."
        )


def speculation(name: str, drafted: int, draft_model: str = "") -> dict[str, Any] | None:
    """vLLM's `speculative_config` for plain, ngram and draft_model."""
    if name == "plain":
        return None
    common = {"method": name, "num_speculative_tokens": drafted}
    return {**common, **(LOOKUP if name == "ngram" else {"model": draft_model})}


def _read(request: Mapping[str, Any], content: Mapping[str, Any], ended: str) -> list[ServedMode]:
    given = {mode["name"]: mode for mode in content["modes"]}
    version, found = str(content["version"]), []
    for mode in request["modes"]:
        answered = given.get(mode["name"], {"error": ended})
        if "error" in answered:
            found += [ServedMode(mode["name"], version, batch=batch, error=answered["error"]) for batch in request["batches"]]
            continue
        found += [_one(answered, version, batch) for batch in answered["batches"]]
    return found


def _one(mode: Mapping[str, Any], version: str, content: Mapping[str, Any]) -> ServedMode:
    answers = {(item["id"], item["repeat"]): item for item in content["answers"]}
    return ServedMode(
        name=mode["name"],
        version=version,
        tokens={key: list(item["tokens"]) for key, item in answers.items()},
        seconds={key: dict(item["seconds"]) for key, item in answers.items()},
        acceptance=dict(content["acceptance"]),
        steps={key: list(item["steps"]) for key, item in answers.items()},
        batch=int(content["batch"]),
        wall=float(content["wall"]),
        corrected=tuple(mode["corrected"]),
    )
