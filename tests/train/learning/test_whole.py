"""A learner and a real server together: traffic becomes a candidate, which is compared within the
server and taken, and no answer changes."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from heads.api.checkpoint import load_drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.server.config import ADMIN_VARIABLE
from inference.server.front.secret import Secret
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.server.running import MODEL, Running, serving
from tests.train.learning.test_cycle import directly
from tests.train.learning.traffic import cycle_settings, prepare
from train.learning.cycle import Learner
from train.learning.journal import read_journal, writing
from train.learning.server import HttpServer

ADMIN = "an-admin-token-for-tests"


class Clients:
    """Requests from a thread until the end, each prompt again and again."""

    def __init__(self, running: Running) -> None:
        self.running, self.answers, self.failures = running, dict[int, str](), list[str]()
        self.asked = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self, own: int) -> None:
        number = own
        while not self._stop.is_set():
            number, self.asked = number + 3, self.asked + 1
            prompt = 10 + number % 60
            try:
                done = self.running.client.completions.create(
                    model=MODEL, prompt=[prompt, prompt + 7, 12], temperature=0, seed=number
                )
            except Exception as error:  # noqa: BLE001 - counted, whatever it is
                self.failures.append(repr(error))
                continue
            text = done.choices[0].text
            if self.answers.setdefault(prompt, text) != text:
                self.failures.append(f"{prompt}: {self.answers[prompt]!r} became {text!r}")

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_a_servers_traffic_brings_it_a_better_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = prepare(tmp_path), tmp_path / "learn"
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    target = TargetModel.load(TargetConfig(str(place / "target"), device="cpu", dtype="float32"))
    drafter = load_drafter(place / "drafter", target.info, target.weights)
    decode = DecodeConfig(batch_size=4, depth=3, max_new_tokens=16, rule="match")
    with serving(
        Engine(target, drafter, decode),
        admin=Secret(ADMIN.encode()),
        checkpoint=str(place / "drafter"),
        samples=folder / "traffic",
        learn_seconds=0.5,
    ) as running:
        own = {"least_tokens": 800, "server": running.base}
        settings = cycle_settings(place, folder, cycles=1, **own)
        more = replace(settings.train, max_steps=60, eval_every=20)
        settings = replace(settings, train=more)
        clients = Clients(running)
        try:
            with writing(folder) as journal:
                learner = Learner(settings, HttpServer(settings.learn), journal, directly)
                end = time.monotonic() + 600
                while not learner.done:
                    assert time.monotonic() < end, [one.event for one in journal.entries]
                    if not learner.attempt():
                        time.sleep(0.5)
            asked = clients.asked
            while clients.asked < asked + 20:
                time.sleep(0.05)
        finally:
            clients.end()
        serves = running.service.swaps.current()
    found = {entry.event: entry.facts for entry in read_journal(folder)}
    assert "swapped" in found, found.get("rejected")
    assert Path(serves) == Path(found["swapped"]["checkpoint"])
    assert found["compared"]["acceptance"][1] > found["compared"]["acceptance"][0]
    assert found["compared"]["evidence"] >= found["compared"]["needed"]
    assert not clients.failures and len(clients.answers) == 60
