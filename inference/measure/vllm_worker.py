"""Decode prompts with vLLM, greedily: `python vllm_worker.py request.json answers.json`.

It runs inside an environment of vLLM's own, so it imports nothing of Headstart;
`inference.measure.vllm_process` starts it. The request holds `model`, `dtype`, `max_model_len`, `warmup`
[[ids]], `prompts` [{id, repeat, tokens, max_new_tokens}], `batches` (how many requests run at once, one
number per pass over the prompts) and `modes` [{name, speculative}], `speculative` being vLLM's
`speculative_config` or null (and `additional` its `additional_config`, `overrides` its `hf_overrides`,
where there are any). A mode is an engine; they follow one another in this process. The answers hold
`version` and per mode its `error` or its `batches`: tokens, tokens per step and seconds (prefill and
decode apart) of every prompt, the seconds of the whole pass, and vLLM's own counters over it. The file
is written after every mode, so that an engine that takes the process down costs only the modes after it.

A mode may name `corrections` of faults of vLLM's own (`CORRECTIONS`); `corrected` in its answers names
those that were needed and made, in this process only. With TRITON_INTERPRET=1 and
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no messages between processes
    "NUMBA_NUM_THREADS": "1",  # n-gram lookup uses one; a pool of more made it seven times slower on a busy machine
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


def main(arguments: list[str]) -> int:
    """Read the request, decode, write the answers; returns the exit status."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python vllm_worker.py request.json answers.json\n")
        return 2
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TRITON_INTERPRET") == "1":
        stand_in_driver()
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answers: dict[str, Any] = {"version": "", "modes": []}
    for mode in request["modes"]:
        try:
            found = decode(request, mode)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is this mode's answer
            traceback.print_exc()
            found = {"error": in_short(error)}
        answers["version"] = version()
        answers["modes"].append({"name": mode["name"], **found})
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


def in_short(error: Exception, longest: int = 400) -> str:
    """An engine's error in one line; its lists of all architectures are cut."""
    said = " / ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return f"{type(error).__name__}: {said}"[:longest]


def decode(request: dict[str, Any], mode: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt with one engine, once per batch size."""
    corrected = [name for name in mode.get("corrections", []) if CORRECTIONS[name]()]
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
        **({"additional_config": mode["additional"]} if mode.get("additional") else {}),
        **({"hf_overrides": mode["overrides"]} if mode.get("overrides") else {}),
    )
    list(answer(engine, [{"tokens": tokens, "max_new_tokens": WARMUP_TOKENS} for tokens in request["warmup"]], 1))
    passes = [one_pass(engine, request["prompts"], batch) for batch in request["batches"]]
    return {"batches": passes, "corrected": corrected}


def one_pass(engine: Any, prompts: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """All prompts with `batch` of them under way at once, and what vLLM counted meanwhile."""
    before, begin = counters(engine), time.perf_counter()
    found = [
        {"id": prompts[place]["id"], "repeat": prompts[place]["repeat"], **given}
        for place, given in answer(engine, prompts, batch)
    ]
    wall, after = time.perf_counter() - begin, counters(engine)
    acceptance: dict[str, Any] = {
        name: [now - then for now, then in zip(after[name], before[name], strict=True)]
        if isinstance(after[name], list)
        else after[name] - before[name]
        for name in after
    }
    return {"batch": batch, "answers": found, "acceptance": acceptance, "wall": wall}


def answer(engine: Any, prompts: list[dict[str, Any]], batch: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(place of the prompt, its tokens, the tokens of each step, seconds), as they end. The first token ends prefill; every
    step after it is one verification (or one plain token), cut where the answer ends.
    """
    vllm = importlib.import_module("vllm")
    delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
    inner, waiting = engine.llm_engine, list(range(len(prompts)))
    running: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < batch:
            place = waiting.pop(0)
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=prompts[place]["max_new_tokens"], detokenize=False, output_kind=delta
            )
            running[str(place)] = {"begin": time.perf_counter(), "steps": []}
            inner.add_request(str(place), {"prompt_token_ids": prompts[place]["tokens"]}, sampling)
        for output in inner.step():
            state = running[output.request_id]
            new = list(output.outputs[0].token_ids)
            if new:
                state["steps"].append(new)
            if output.finished:
                del running[output.request_id]
                yield int(output.request_id), finished(state, output.metrics)


def finished(state: dict[str, Any], stats: Any) -> dict[str, Any]:
    """One answer. Decoding lasts from the first token to the last on vLLM's own clock."""
    decoding = stats.last_token_ts - stats.first_token_ts
    seconds = {"prefill": time.perf_counter() - state["begin"] - decoding, "other": decoding}
    tokens = [token for step in state["steps"] for token in step]
    return {"tokens": tokens, "steps": [len(step) for step in state["steps"]][1:], "seconds": seconds}


def counters(engine: Any) -> dict[str, Any]:
    """vLLM's counters of drafts and acceptance so far; empty without speculation."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    counts: dict[str, Any] = {short: int(found[name].value) for name, short in COUNTERS.items() if name in found}
    if BY_POSITION in found:
        counts["accepted_by_position"] = [int(value) for value in found[BY_POSITION].values]
    return counts


def grouped_rms_norm() -> bool:
    """vLLM 0.32's CPU kernel of `rms_norm` reads only the first row of a weight [layers, size], so that DFlash's context keys get
    layer 0's k_norm in every layer. Gives every layer its own; returns whether that was needed.
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
    """What Triton asks a device's driver, answered for the host: its interpreter needs no device, vLLM wants an active driver."""

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
    importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(driver=HostDriver, compiler=None)
    importlib.import_module("triton.runtime.driver").driver.set_active(HostDriver())
    masks_of_numbers()


def masks_of_numbers() -> None:
    """Let Triton's interpreter load and store by masks that its own operators have made whole numbers of, which it refuses."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_truth(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else type(mask)(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, place, mask, *rest: load(self, place, as_truth(mask), *rest)
    builder.create_masked_store = lambda self, place, value, mask, *rest: store(self, place, value, as_truth(mask), *rest)


CORRECTIONS: dict[str, Callable[[], bool]] = {"grouped_rms_norm": grouped_rms_norm}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
