"""Decode prompts with vLLM, greedily: `python vllm_worker.py request.json answers.json`.

It runs in vLLM's environment, so it imports nothing from Headstart;
`inference.measure.vllm_process` starts it. The request is a `ServingRequest` and the answers are a
list of `ServedMode`, as JSON. A mode is an engine; the modes run one after another in this process.
The answers are written after every mode, so an engine that ends the process costs only the modes
after it.

A mode may name `corrections` of faults in vLLM (`CORRECTIONS`). `corrected` in its answers names
those that were needed and made, in this process only. With TRITON_INTERPRET=1 and
VLLM_USE_V2_MODEL_RUNNER=1, vLLM's second runner works here, for methods that the first runner lacks
(dspark). Triton's kernels are interpreted, which takes about a second per step.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # the engine runs in this process: no messages between processes
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # n-gram lookup uses one thread; a pool of more made it seven times slower on a busy machine
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
WARMUP_TOKENS = 32


class PromptRequest(TypedDict):
    """One prompt as token ids."""

    id: str
    repeat: int
    tokens: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class ServingMode:
    """One engine of vLLM."""

    name: str
    speculative: Mapping[str, object] | None = None
    """vLLM's `speculative_config`; None for plain decoding."""
    additional: Mapping[str, object] = field(default_factory=dict)
    """vLLM's `additional_config`."""
    corrections: Sequence[str] = ()
    """Faults to correct if vLLM has them (`CORRECTIONS`), for later modes as well."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """vLLM's `hf_overrides` of the target's configuration."""


class ServingRequest(TypedDict):
    """Every mode answers every prompt, once per batch size."""

    modes: list[dict[str, Any]]
    """By the fields of `ServingMode`."""
    batches: list[int]
    """Requests that run at once, one number for each pass over the prompts."""
    model: str
    dtype: str
    max_model_len: int
    warmup: list[list[int]]
    prompts: list[PromptRequest]


AcceptanceCounts = dict[str, Any]
"""vLLM's own counters, empty without speculation: numbers `drafts`, `draft_tokens` and
`accepted_tokens`, and the list `accepted_by_position`."""


class PromptAnswer(TypedDict):
    """The answer to one prompt."""

    id: str
    repeat: int
    tokens: list[int]
    steps: list[int]
    """Tokens of every step after the first token, which ends prefill."""
    seconds: dict[str, float]
    """"prefill", and "other" for decoding."""


@dataclass(frozen=True)
class ServedMode:
    """The answers of one mode with `batch` requests at once."""

    name: str
    version: str
    """The version of vLLM."""
    batch: int = 1
    answers: list[PromptAnswer] = field(default_factory=list)
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    wall: float = 0.0
    """Seconds of a whole pass over the prompts."""
    error: str = ""
    """Why there are no answers."""
    corrected: Sequence[str] = ()
    """The corrections that were needed and made."""
    taken: Mapping[str, Any] = field(default_factory=dict)
    """The requested speculative settings as the engine's configuration has them."""


def main(arguments: list[str]) -> int:
    """Read the request, decode, write the answers; returns the exit status."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python vllm_worker.py request.json answers.json\n")
        return 2
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TRITON_INTERPRET") == "1":
        stand_in_driver()
    request: ServingRequest = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    served: list[ServedMode] = []
    for mode in (ServingMode(**item) for item in request["modes"]):
        try:
            served += decode(request, mode)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is this mode's answer
            traceback.print_exc()
            failed = ServedMode(mode.name, version(), error=shorten(error))
            served += [replace(failed, batch=batch) for batch in request["batches"]]
        answers = json.dumps([asdict(item) for item in served])
        Path(arguments[1]).write_text(answers, encoding="utf-8")
        gc.collect()
    return 0


def version() -> str:
    """The version of vLLM, whichever package contains it."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def shorten(error: Exception, longest: int = 400) -> str:
    """The first lines of an engine's error as one line of at most `longest` characters."""
    text = " / ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return f"{type(error).__name__}: {text}"[:longest]


def decode(request: ServingRequest, mode: ServingMode) -> list[ServedMode]:
    """Answer every prompt with one engine, once per batch size."""
    corrected = [name for name in mode.corrections if CORRECTIONS[name]()]
    engine = importlib.import_module("vllm").LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=max(request["batches"]),
        enforce_eager=True,
        enable_prefix_caching=False,  # a repeated prompt must be read again
        disable_log_stats=False,
        seed=0,
        speculative_config=mode.speculative,
        **({"additional_config": mode.additional} if mode.additional else {}),
        **({"hf_overrides": mode.overrides} if mode.overrides else {}),
    )
    warmup: list[PromptRequest] = [
        {"id": "", "repeat": 0, "tokens": tokens, "max_new_tokens": WARMUP_TOKENS}
        for tokens in request["warmup"]
    ]
    list(answer(engine, warmup, 1))
    found = []
    for batch in request["batches"]:
        before, begin = counters(engine), time.perf_counter()
        answers = list(answer(engine, request["prompts"], batch))
        wall, after = time.perf_counter() - begin, counters(engine)
        acceptance = {key: _difference(after[key], before[key]) for key in after}
        facts = (batch, answers, acceptance, wall, "", corrected, taken(engine, mode))
        found.append(ServedMode(mode.name, version(), *facts))
    return found


def taken(engine: Any, mode: ServingMode) -> dict[str, Any]:
    """The values in the engine's configuration of every requested setting."""
    settings = getattr(engine.llm_engine, "vllm_config", None)
    found = getattr(settings, "speculative_config", None)
    return {name: getattr(found, name, None) for name in mode.speculative or ()}


def _difference(now: Any, then: Any) -> Any:
    if isinstance(now, list):
        return [one - other for one, other in zip(now, then, strict=True)]
    return now - then


def answer(engine: Any, prompts: list[PromptRequest], batch: int) -> Iterator[PromptAnswer]:
    """The answers in the order in which they end.

    The first token ends prefill; every step after it is one verification (or one plain token), cut
    where the answer ends. Decoding lasts from the first token to the last, by vLLM's own clock.
    """
    vllm = importlib.import_module("vllm")
    delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
    inner, waiting = engine.llm_engine, list(range(len(prompts)))
    running: dict[str, tuple[float, list[list[int]]]] = {}  # begin, tokens of every step
    while waiting or running:
        while waiting and len(running) < batch:
            place = waiting.pop(0)
            longest = prompts[place]["max_new_tokens"]
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=longest, detokenize=False, output_kind=delta
            )
            running[str(place)] = (time.perf_counter(), [])
            tokens = {"prompt_token_ids": prompts[place]["tokens"]}
            inner.add_request(str(place), tokens, sampling)
        for output in inner.step():
            begin, steps = running[output.request_id]
            new = list(output.outputs[0].token_ids)
            if new:
                steps.append(new)
            if not output.finished:
                continue
            del running[output.request_id]
            prompt, stats = prompts[int(output.request_id)], output.metrics
            decoding = stats.last_token_ts - stats.first_token_ts
            prefill = time.perf_counter() - begin - decoding
            yield {
                "id": prompt["id"],
                "repeat": prompt["repeat"],
                "tokens": [token for step in steps for token in step],
                "steps": [len(step) for step in steps][1:],
                "seconds": {"prefill": prefill, "other": decoding},
            }


def counters(engine: Any) -> AcceptanceCounts:
    """vLLM's counters of drafts and acceptance so far."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    counts = {key: int(found[name].value) for name, key in COUNTERS.items() if name in found}
    if BY_POSITION in found:
        return {**counts, "accepted_by_position": list(map(int, found[BY_POSITION].values))}
    return counts


def grouped_rms_norm() -> bool:
    """vLLM 0.32's CPU kernel of `rms_norm` reads only the first row of a weight [layers, size], so
    DFlash's context keys get layer 0's k_norm in every layer. This gives every layer its own norm
    and returns whether that was needed.
    """
    torch: Any = importlib.import_module("torch")
    ops: Any = importlib.import_module("vllm._custom_ops")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    given, weight = torch.ones(2, 1, 1, 8), torch.stack([torch.ones(8), torch.full((8,), 2.0)])
    found = torch.empty_like(given)
    inner = ops.rms_norm
    if getattr(inner, "corrected", False):
        return True
    inner(found, given, weight, 0.0)
    if torch.allclose(found[1], 2 * found[0]):
        return False

    def rms_norm(out: Any, states: Any, weight: Any, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            inner(out, states, weight, epsilon)
            return
        for place, row in enumerate(weight):
            inner(out[place], states[place], row, epsilon)

    rms_norm.corrected = True  # type: ignore[attr-defined]
    ops.rms_norm = rms_norm
    return True


class HostDriver:
    """A stand-in for the device driver that Triton queries, for the host: vLLM requires an active
    driver."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cpu", 0, 32)

    def get_device_interface(self) -> Any:
        return importlib.import_module("torch").cpu

    def get_active_torch_device(self) -> Any:
        return importlib.import_module("torch").device("cpu")


def stand_in_driver() -> None:
    """Make Triton, and vLLM's check for it, find a driver; called before vLLM is imported."""
    importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(
        driver=HostDriver, compiler=None
    )
    importlib.import_module("triton.runtime.driver").driver.set_active(HostDriver())
    masks_of_numbers()


def masks_of_numbers() -> None:
    """Make Triton's interpreter accept masks of whole numbers in loads and stores."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_truth(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else type(mask)(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, place, mask, *rest: load(
        self, place, as_truth(mask), *rest
    )
    builder.create_masked_store = lambda self, place, value, mask, *rest: store(
        self, place, value, as_truth(mask), *rest
    )


CORRECTIONS: dict[str, Callable[[], bool]] = {"grouped_rms_norm": grouped_rms_norm}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
