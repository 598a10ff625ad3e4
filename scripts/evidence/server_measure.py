"""Measures the same drafters with our decoder and, through its API, in vLLM's server: writes
docs/reports/server_measure.{json,md}.

    python -m scripts.evidence.server_measure --engine-python .venv-serve/bin/python CHECKPOINT...

Every checkpoint is exported and served by vLLM's OpenAI server with `--speculative-config`; the
same server without speculation runs beside it. `headstart measure bench.server` measures both:
prompts as token ids through /v1/completions, acceptance from vLLM's counters and, with --responses,
also from its responses (--per-request-spec-decode-metrics). Our decoder answers the same prompts
with the same chain. The comparison covers tau and the texts at temperature 0. tau (by vLLM's
definition: the last step of an answer counts beyond its end,
`inference.export.check.live.count_steps`) must lie in the interval that was measured through the
API.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from inference.decoding.config import DecodeConfig
from inference.export.check import live
from inference.export.config import ExportConfig
from inference.export.engine_folder import export, prepare
from inference.export.layouts.base import Target
from inference.measure.config import BenchConfig, process_facts, split_prompts
from inference.measure.datasets import Loaded
from inference.measure.prompts import Prompt, load_prompts, to_requests
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.run import measure_server
from inference.report.markdown import markdown_table
from inference.report.model import Report, ServerCell
from inference.target.hardware import device_facts
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.common import Facts, write_report
from scripts.evidence.vllm_server import VllmServer
from scripts.tools.common import PROMPTS, REPORTS, command

POSITIONS = 1024
"""Positions of the served target (`VllmServer`)."""
Source = Literal["counters", "responses"]
APART = 0.02
"""Difference between the two sides' tau, relative to ours, that counts as agreement."""
PER_REQUEST = ["--per-request-spec-decode-metrics", "detailed"]
ABOUT = (
    "Drafters measured twice on the same prompts, with the same chain, at temperature 0 in "
    "float32: by Headstart's decoder, and by `headstart measure bench.server` from outside vLLM's "
    "server, whose counters (or responses) say what was accepted. **tau**: 1 + accepted / drafting "
    "steps; brackets: 95% bootstrap. **within 2%**: whether the two tau differ by at most that. "
    "**same text**: answers of the server with the text of the same server without speculation; "
    "**same as ours**: with that of our decoder, at the largest number of clients. Speeds are of a "
    "machine that was shared."
)


def report(given: argparse.Namespace) -> int:
    """Measure every checkpoint, write and print; the exit status is 1 if a comparison fails."""
    config = TargetConfig(path=given.target, dtype="float32", device="cpu")
    target, rows = TargetModel.load(config), list[Facts]()
    bench, decode, loaded = settings(given, target)
    with TemporaryDirectory(prefix="measured") as scratch:
        place = Path(scratch)
        plain = VllmServer(given.engine_python, Path(given.target).resolve(), place / "plain.txt")
        with plain.running():
            for checkpoint in given.checkpoints:
                rows += measured(given, config, target, bench, decode, loaded, checkpoint, plain)
    content: Facts = {
        "format": 1,
        "target": {"id": given.target, "revision": target.info.revision, "dtype": "float32"},
        "device": device_facts(target.device),
        **process_facts(),
        "python": platform.python_version(),
        "command": given.command,
        "rows": rows,
    }
    write_report(given.out / "server_measure", content, markdown(content))
    print("\n".join(markdown(content)))
    return 0 if all(map(agrees, rows)) else 1


def agrees(row: Facts) -> bool:
    """Whether acceptance and texts of a row are ours."""
    same = row["identical_to_ours"] in (None, row["prompts"])
    return bool(row["within"]) and row["identical"] == row["answers"] and same


def settings(
    given: argparse.Namespace, target: TargetModel
) -> tuple[BenchConfig, DecodeConfig, Loaded]:
    """The settings of the measurement, with the prompts that fit the server together with their
    answers."""
    decode = DecodeConfig(max_new_tokens=given.max_new_tokens)
    room = POSITIONS - given.max_new_tokens - 16
    fitting = [
        prompt for prompt in load_prompts(PROMPTS) if len(prompt.render(target.tokenizer)) < room
    ]
    bench = BenchConfig(
        prompts=str(PROMPTS),
        prompts_per_domain=given.prompts_per_domain,
        warmup_prompts=1,
        repeats=1,
        serving=ServingConfig(
            api="completions", concurrency=tuple(given.clients), timeout=given.timeout
        ),
    )
    return bench, decode, Loaded(fitting, str(PROMPTS), "")


def measured(
    given: argparse.Namespace,
    config: TargetConfig,
    target: TargetModel,
    bench: BenchConfig,
    decode: DecodeConfig,
    loaded: Loaded,
    checkpoint: Path,
    plain: VllmServer,
) -> list[Facts]:
    """The rows of one checkpoint, one per source of acceptance and number of clients."""
    with TemporaryDirectory(prefix="served") as scratch:
        folder = Path(scratch) / "export"
        read = prepare(checkpoint, "vllm")
        options = ExportConfig(engine="vllm", out=str(folder))
        export(options, read, Target.of(config, read.info), folder)
        served = live.read_served(folder, target)
        ours = OwnDecoding.of(target, served, bench, decode, loaded.prompts)
        words = ["--speculative-config", json.dumps({**served.speculative, "model": str(folder)})]
        words += PER_REQUEST if given.responses else []
        server = VllmServer(
            given.engine_python, Path(given.target).resolve(), Path(scratch) / "log.txt", 4, words
        )
        rows = []
        with server.running():
            sources: list[Source] = ["counters", "responses"]
            for source in sources[: 2 if given.responses else 1]:
                serving = replace(bench.serving, acceptance=source)
                asked = replace(
                    bench, server=server.address, baseline_server=plain.address, serving=serving
                )
                out = Path(scratch) / source
                texts: dict[str, str] = {}
                found = measure_server(
                    asked, decode, loaded, out, tokenizer=target.tokenizer, texts=texts
                )
                same = sum(texts[name] == text for name, text in ours.texts.items())
                rows += [row(checkpoint, found, cell, ours, same) for cell in whole(found)]
        return rows


class OwnDecoding:
    """Our decoder's results on the measured prompts. counts: by vLLM's definition; texts: of the
    answers, by the prompt's id."""

    def __init__(self, counts: live.Counts, texts: dict[str, str]) -> None:
        self.counts, self.texts = counts, texts

    @classmethod
    def of(
        cls,
        target: TargetModel,
        served: live.Served,
        bench: BenchConfig,
        decode: DecodeConfig,
        prompts: list[Prompt],
    ) -> OwnDecoding:
        """Decode those of the prompts that `bench` chooses, with the drafter that is served."""
        chosen, _ = split_prompts(bench, prompts)
        requests = to_requests(chosen, target.tokenizer, decode)
        found = live.decode(target, served.drafter, requests, served.depth, 4)
        texts = {}
        for prompt, tokens in zip(chosen, found.tokens, strict=True):
            kept = [token for token in tokens if token not in target.eos_token_ids]
            texts[prompt.id] = target.tokenizer.decode(kept, skip_special_tokens=True)
        return cls(found.counts, texts)


def whole(found: Report) -> list[ServerCell]:
    assert found.server is not None
    return found.server.speculative.overall()


def row(checkpoint: Path, found: Report, cell: ServerCell, ours: OwnDecoding, same: int) -> Facts:
    """One comparison. same: number of the server's texts, at the largest number of clients, that
    equal ours."""
    most = max(one.concurrency for one in whole(found))
    assert found.server is not None and cell.tau is not None and cell.tau_ci95 is not None
    return {
        "drafter": checkpoint.parent.name if checkpoint.name == "best" else checkpoint.name,
        "source": found.server.speculative.source,
        "clients": cell.concurrency,
        "answers": cell.requests,
        "tau_ours": ours.counts.length,
        "positions_ours": ours.counts.rates,
        "tau": cell.tau,
        "tau_ci95": list(cell.tau_ci95),
        "positions": cell.acceptance,
        "within": abs(cell.tau - ours.counts.length) <= APART * ours.counts.length,
        "identical": cell.identical,
        "prompts": len(ours.texts),
        "identical_to_ours": same if cell.concurrency == most else None,
        "speedup": cell.speedup,
        "speedup_ci95": list(cell.speedup_ci95 or ()),
        "repeated": found.server.speculative.repeated,
    }


def markdown(content: Facts) -> list[str]:
    """The lines of server_measure.md."""
    table = [
        [
            one["drafter"],
            one["source"],
            str(one["clients"]),
            f"{one['tau_ours']:.3f}",
            f"{one['tau']:.3f} [{one['tau_ci95'][0]:.3f}, {one['tau_ci95'][1]:.3f}]",
            "yes" if one["within"] else "NO",
            f"{one['identical']}/{one['answers']}",
            "-"
            if one["identical_to_ours"] is None
            else f"{one['identical_to_ours']}/{one['prompts']}",
            f"{one['speedup']:.2f}",
        ]
        for one in content["rows"]
    ]
    header = ["drafter", "acceptance from", "clients", "tau, ours", "tau, vLLM", "within 2%"]
    header += ["same text", "same as ours", "speedup"]
    command_line = f"    {content['command']}"
    return [
        f"# Measured from outside\n\n{ABOUT}\n\nMade by\n\n{command_line}\n",
        *markdown_table(header, table, texts=2),
        "",
    ]


main = command(
    report,
    checkpoints={"positional": True, "nargs": "+", "type": Path, "help": "checkpoint folders"},
    engine_python={"required": True, "help": "the Python that has vLLM"},
    target="assets/tiny-target",
    prompts_per_domain=8,
    max_new_tokens=128,
    clients={"nargs": "+", "type": int, "default": [1, 4]},
    timeout=300.0,
    responses=False,
    out=REPORTS,
)

if __name__ == "__main__":
    sys.exit(main())
