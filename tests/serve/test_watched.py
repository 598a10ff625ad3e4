"""The counters of a real vLLM server that drafts: `headstart watch` is calm about the drafter that it
knows and raises an alarm about a worse one; `headstart measure` outlives a server that is killed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.export.check.live import read_served
from inference.measure.prompts import load_prompts, to_requests
from inference.measure.serving.log import PARTIAL_FILE
from inference.report.model import REPORT_FILE, ServerSide, read_report
from inference.target.model import TargetModel
from scripts.cli import main
from scripts.evidence.vllm_server import VllmServer
from tests.inference.export.ground import write
from tests.scripts.test_watch_stage import write_prompts
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

DEPTH, TOKENS, PROMPTS, CLIENTS = 4, 32, 48, 4
WINDOWS = 20
"""Windows that a calm server is watched for, at least; a bad drafter is found in fewer than thrice as
many."""
NOISE = {"good": 0.02, "bad": 1.0}
"""Of the drafters, copies of the target, relative to the spread of each weight."""
LONG = 900.0
"""Seconds that something may take while a server starts on a busy machine."""


@dataclass(frozen=True)
class Ground:
    """A target, its prompts, drafters and their reference in a folder, and a server of it."""

    folder: Path
    server: VllmServer
    bodies: list[dict[str, Any]]

    def serve(self, name: str, wait: bool = True) -> None:
        """Let the server draft with that drafter."""
        told = self.folder / name / "export"
        place = self.server.command.index("--speculative-config") + 1
        speculative = json.dumps({**json.loads(self.server.command[place]), "model": str(told)})
        if wait and self.runs and self.server.command[place] == speculative:
            return
        self.server.kill()
        self.server.command[place] = speculative
        (self.server.start if wait else self.server.launch)()

    @property
    def runs(self) -> bool:
        return self.server.process is not None and self.server.process.poll() is None

    def answered(self) -> float:
        """Requests that the server has answered; 0 if it does not say."""
        try:
            text = httpx.get(f"{self.server.address}/metrics", timeout=60, trust_env=False).text
        except httpx.HTTPError:
            return 0.0
        return sum(map(float, re.findall(r"^vllm:request_success_total\S* (\S+)$", text, re.M)))

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Clients that ask one thing after the other."""
        over = threading.Event()

        def ask(number: int) -> None:
            with httpx.Client(timeout=120, trust_env=False) as client:
                while not over.is_set():
                    body = self.bodies[number % len(self.bodies)]
                    client.post(f"{self.server.address}/v1/completions", json=body)
                    number += CLIENTS

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            until(self.answered, LONG)
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def watch(self, *more: str) -> list[str]:
        """The command line."""
        return [
            "watch",
            f"target.path={self.folder / 'target'}",
            "target.device=cpu",
            "bench=jsonl",
            f"bench.prompts={self.folder / 'asked.jsonl'}",
            "bench.domains=[]",
            f"watch.drafter={self.folder / 'good' / 'checkpoint'}",
            f"watch.reference={self.folder / 'reference.json'}",
            f"decode.max_new_tokens={TOKENS}",
            f"decode.depth={DEPTH}",
            *more,
        ]

    def watch_server(self, name: str, seconds: int) -> tuple[int, dict[str, Any]]:
        """The exit status of a watch of the server under traffic, and what it has written."""
        given = [f"watch.metrics=[{self.server.address}/metrics]", f"watch.name={name}"]
        given += ["watch.every=0.05", "watch.window=8", "watch.tolerance=0.2"]
        with self.traffic():
            status = main(self.watch(*given, f"watch.seconds={seconds}"))
        return status, json.loads(Path(f"outputs/default/{name}/staleness.json").read_text())


@pytest.fixture(scope="module")
def ground(engine_python: str, micro: Path, target: TargetModel) -> Iterator[Ground]:
    write_prompts(micro / "asked.jsonl", PROMPTS)
    config = get_kind("distilled").config_class(from_target_layers=(0, 1))
    for name, noise in NOISE.items():
        drafter = new_drafter("distilled", config, target.info, target.weights, seed=1)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weights in drafter.parameters():
                spread = noise * weights.std(correction=0)
                weights += spread * torch.randn(weights.shape, generator=generator)
        save_drafter(drafter, micro / name / "checkpoint", target.info)
        write(target, micro / name / "checkpoint", micro / name / "export", "vllm")
    told = read_served(micro / "good" / "export", target).speculative
    speculative = json.dumps({**told, "num_speculative_tokens": DEPTH})
    decode = DecodeConfig(max_new_tokens=TOKENS)
    prompts = load_prompts(micro / "asked.jsonl")
    bodies = [
        {"model": "tiny", "prompt": list(one.tokens), "max_tokens": TOKENS, "temperature": 0}
        for one in to_requests(prompts, target.tokenizer, decode)
    ]
    more = ["--max-model-len", "128", "--speculative-config", speculative]
    server = VllmServer(engine_python, micro / "target", micro / "log.txt", rows=CLIENTS, more=more)
    found = Ground(micro, server, bodies)
    assert main(found.watch("watch.learn=true")) == 0
    yield found
    server.kill()


@pytest.fixture(autouse=True)
def folder(in_folder: Path) -> Path:
    return in_folder


def test_a_watched_server_that_drafts_as_before_raises_no_alarm(ground: Ground) -> None:
    ground.serve("good")
    status, found = ground.watch_server("calm", 30)
    assert (status, found["alarms"]) == (0, [])
    assert (found["test"]["unit"], found["test"]["guarantee"]) == ("windows", "exact")
    mixed = found["domains"]["mixed"]
    assert mixed["answers"] >= WINDOWS
    assert mixed["reference"] > 2 and abs(mixed["change"]) < 0.15
    assert mixed["by_depth"] == pytest.approx(mixed["reference_by_depth"], abs=0.1)


def measured(ground: Ground, name: str, retries: int) -> int:
    """The exit status of a measurement of the server."""
    return main(
        [
            "measure",
            f"measure.name={name}",
            "bench=jsonl",
            f"bench.prompts={ground.folder / 'asked.jsonl'}",
            "bench.prompts_per_domain=8",
            "bench.repeats=1",
            f"bench.server={ground.server.address}",
            "bench.serving.acceptance=counters",
            f"bench.serving.retries={retries}",
            "bench.serving.backoff=0.2",
            f"decode.max_new_tokens={TOKENS}",
        ]
    )


def side_of(name: str) -> ServerSide:
    report = read_report(Path("outputs/default") / name)
    assert report.server is not None
    return report.server.speculative


def test_a_measurement_outlives_its_server_and_says_so_where_it_stays_away(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    ground.serve("good")
    assert measured(ground, "calm", 3) == 0
    calm = side_of("calm")
    (cell,) = calm.overall()
    assert cell.requests == 16 and cell.tau is not None and cell.tau > 2
    assert calm.repeated == 0

    def strike(back: bool) -> threading.Thread:
        """Kill the server in the middle; back: start it again."""
        middle = ground.answered() + cell.requests / 2

        def act() -> None:
            until(lambda: ground.answered() >= middle, LONG)
            ground.server.kill()
            if back:
                ground.server.launch()

        thread = threading.Thread(target=act)
        thread.start()
        return thread

    thread = strike(back=True)
    assert measured(ground, "struck", 14) == 0
    thread.join()
    struck = side_of("struck")
    assert struck.repeated > 0 and struck.restarts == 1
    assert "was started again" in struck.caveat
    assert [each.tau for each in struck.cells] == [each.tau for each in calm.cells]
    thread = strike(back=False)
    capsys.readouterr()
    assert measured(ground, "gone", 1) == 2
    thread.join()
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"failed 2 times: .*Is the server up, and used by nobody else\?", said)
    assert "repeat the command to continue" in said
    kept = (Path("outputs/default/gone") / PARTIAL_FILE).read_text().splitlines()
    assert not (Path("outputs/default/gone") / REPORT_FILE).exists()
    ground.serve("good")
    before = ground.answered()
    assert measured(ground, "gone", 1) == 0
    gone = side_of("gone")
    # one client: every window is a prompt; the command's other answers are those of the warm-up
    assert ground.answered() - before < cell.requests and len(kept) > 1
    assert gone.restarts == 1
    assert [each.tau for each in gone.cells] == [each.tau for each in calm.cells]


def test_a_watched_server_with_a_worse_drafter_raises_an_alarm(ground: Ground) -> None:
    ground.serve("bad")
    status, found = ground.watch_server("bad", 300)
    assert (status, found["alarms"], found["verdict"]) == (1, ["mixed", "all"], "alarm")
    assert found["alarm_after"] < 3 * WINDOWS
    assert found["domains"]["mixed"]["change"] < -0.5
