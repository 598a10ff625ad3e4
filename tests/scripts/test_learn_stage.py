"""`headstart serve serve.learn=true`, whole: a server, its learner, traffic, a drafter that is
taken, kill -9, and what was learnt after a restart. The same with a learner started by hand."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import write_draft
from inference.server.config import ADMIN_VARIABLE, ServeConfig
from scripts.config.schema import load_settings, read_settings
from scripts.config.stages import STAGES
from scripts.run.drafters import Found, draft_settings
from scripts.stages import learn, relay
from scripts.stages.learn import exporting, learning_rate, sampled_folder
from scripts.stages.serve import admin_for, require_trials
from tests.train.learning.traffic import prepare
from train.learning.journal import Entry, read_journal, writing

WAIT_SECONDS = 900.0
LEARN = (
    "learn.least_tokens=600",
    "learn.look_seconds=0.3",
    "learn.held_out=0.4",
    "learn.held_out_prompts=16",
    "learn.free_megabytes=0",
    "learn.nice=0",
    "learn.error_rate=0.2",  # decided after fewer answers, which a busy machine gives slowly
    "train.max_steps=60",
    "train.eval_every=20",
    "train.eval_tokens=16",
    "train.sequence_length=64",
    "engine.name=torch",
    "engine.precision=float32",
    "optim.lr=5e-3",
)


def common(place: Path, folder: Path) -> list[str]:
    """Settings that a server and its learner share."""
    words = ["target=local", f"target.path={place / 'target'}", "target.device=cpu"]
    words += ["target.dtype=float32", "decode.depth=3", "decode.max_new_tokens=16"]
    return [*words, "decode.batch_size=8", "run.threads=1", f"run.root={folder / 'outputs'}"]


def started(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A stage in a process of its own, and the file with what it says."""
    path = folder / f"log-{time.time_ns()}.txt"
    with path.open("wb") as log:
        command = [sys.executable, "-m", "scripts.cli", *words]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), path


class Served:
    """`headstart serve` with `more` in a process of its own. base: its address."""

    def __init__(self, place: Path, folder: Path, *more: str) -> None:
        words = ["serve", *common(place, folder), f"serve.drafter={place / 'drafter'}"]
        words += ["serve.port=0", "serve.learn_seconds=2", f"serve.learn_folder={folder}"]
        more = more or ("serve.learn=true", f"serve.learn_settings=[{','.join(LEARN)}]")
        self.process, self.log = started(folder, *words, *more)
        self.base, self.failed = "", 0
        self.answers: dict[str, str] = {}
        self._stop = threading.Event()
        found = self._wait_for(r"at (http://[^/]+)/v1")
        self.base = found.group(1)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self.said()):
                return found
            time.sleep(0.2)
        raise AssertionError(self.said()[-3000:])

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Requests from two threads until the block ends."""
        threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, own: int) -> None:
        number = own
        with httpx.Client(base_url=self.base, timeout=60) as client:
            while not self._stop.is_set():
                number += 2
                time.sleep(0.2)  # leaves room for the learner
                prompt = [10 + number % 80, 11 + number // 80 % 80, 12]
                body = {"model": "target", "prompt": prompt, "temperature": 0, "seed": number}
                try:
                    answer = client.post("/v1/completions", json=body)
                    self.failed += answer.status_code != 200
                    text = answer.json()["choices"][0]["text"]
                    # whatever drafts, the same prompt has the same answer
                    assert self.answers.setdefault(str(prompt), text) == text
                except httpx.HTTPError:
                    self.failed += not self._stop.is_set()
                except AssertionError:
                    self.failed += 1000


def wait_for(folder: Path, event: str, count: int, served: Served) -> list[Entry]:
    """The journal once it has so many lines of an event."""

    def has_come(found: list[Entry]) -> bool:
        return sum(entry.event == event for entry in found) >= count

    return wait_until(has_come, folder, served)


def wait_until(
    has_come: Callable[[list[Entry]], bool], folder: Path, served: Served
) -> list[Entry]:
    """The journal once it is as asked for."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        found = read_journal(folder)
        if has_come(found):
            return found
        assert served.process.poll() is None, served.said()[-3000:]
        time.sleep(0.3)
    raise AssertionError(f"{[entry.event for entry in found]}\n{served.said()[-3000:]}")


@pytest.mark.slow
def test_a_server_learns_from_its_traffic_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    place, folder = prepare(tmp_path), tmp_path / "learn"
    folder.mkdir()
    served = Served(place, folder)
    try:
        with served.traffic():
            known = wait_for(folder, "swapped", 1, served)
            time.sleep(1.0)
        assert served.failed == 0 and len(served.answers) > 50
        taken = next(entry for entry in known if entry.event == "swapped").facts["checkpoint"]
        facts = {entry.event: entry.facts for entry in known}
        assert facts["measured"]["after"]["tau"] > facts["measured"]["before"]["tau"]
        assert "swap" in (folder / "learn.html").read_text(encoding="utf-8")
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        again = Served(place, folder)
        try:
            assert taken in again.said() or "learning has taken last" in again.said()
            again.answers = served.answers
            before = len(read_journal(folder))
            with again.traffic():  # the next cycle may be anywhere by now
                wait_until(lambda found: len(found) > before, folder, again)
            assert again.failed == 0
            assert read_journal(folder)[: len(known)] == known
            again.process.send_signal(signal.SIGTERM)
            assert again.process.wait(60) == 0
        finally:
            again.process.kill()
    finally:
        served.process.kill()


@pytest.mark.slow
def test_a_learner_started_by_hand_learns_beside_a_server_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = prepare(tmp_path), tmp_path / "learn"
    folder.mkdir()
    monkeypatch.setenv(ADMIN_VARIABLE, secrets.token_hex(24))
    served = Served(place, folder, "serve.sample=true")
    words = ["learn", *common(place, folder), *LEARN, f"learn.server={served.base}"]
    words += ["learn.cycles=1"]
    learner, said = started(folder, *words, f"learn.folder={folder}")
    try:
        with served.traffic():
            known = wait_for(folder, "collected", 1, served)
            learner.kill()
            learner.wait()
            learner, said = started(folder, *words)  # the server knows the folder
            # with so little traffic the candidate need not be better
            assert learner.wait(WAIT_SECONDS) == 0, said.read_text()
        found = read_journal(folder)
        assert found[: len(known)] == known and found[-1].event in ("swapped", "rejected")
        assert sum(entry.event == "collected" for entry in found) == 1
        assert served.failed == 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
    finally:
        learner.kill()
        served.process.kill()


@pytest.mark.slow
def test_an_engines_traffic_becomes_an_export_for_it(tmp_path: Path) -> None:
    """The engine is a server of ours, which learns nothing; the export is checked as vLLM would
    load it."""
    place, folder = prepare(tmp_path), tmp_path / "learn"
    folder.mkdir()
    engine = Served(place, tmp_path, "serve.name=target")
    # one look at few prompts: what is shown there is shown at once
    own = [*(one for one in LEARN if "error_rate" not in one), "learn.error_rate=0.9"]
    relayed = [f"serve.engine={engine.base}", "serve.learn=true"]
    before = Served(place, folder, *relayed, f"serve.learn_settings=[{','.join(own)}]")
    try:
        with before.traffic():
            known = wait_for(folder, "swapped", 1, before)
        assert before.failed == 0 and len(before.answers) > 50
        facts = {entry.event: entry.facts for entry in known}
        assert "trial" not in facts and facts["traffic"]["passes"] == 0
        assert facts["measured"]["after"]["tau"] > facts["measured"]["before"]["tau"]
        export = Path(facts["swapped"]["export"])
        assert export == folder / "exports" / Path(facts["swapped"]["checkpoint"]).name
        assert f"{export}" in facts["swapped"]["command"]
        words = ["verify-export", f"verify.dir={export}", *common(place, folder)[:2]]
        checked, said = started(folder, *words, "verify.mode=static")
        assert checked.wait(300) == 0, said.read_text()
        before.process.send_signal(signal.SIGTERM)
        assert before.process.wait(60) == 0
    finally:
        before.process.kill()
        engine.process.kill()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["serve.engine=http://127.0.0.1:1"], r"add serve\.learn=true"),
        (["serve.engine=here", "serve.sample=true"], r"serve\.engine must be the address"),
        (["serve.engine=http://127.0.0.1:1", "serve.sample=true", "serve.drafter="], "is missing"),
        (["serve.engine=http://127.0.0.1:1", "serve.log_rejections=true"], "the engine drafts"),
        (["serve.engine=http://127.0.0.1:1", "serve.watch_folder=x"], "the engine drafts"),
    ],
)
def test_a_relay_says_what_it_lacks(tmp_path: Path, given: list[str], words: str) -> None:
    place = prepare(tmp_path)
    own = [f"serve.drafter={place / 'drafter'}", *common(place, tmp_path), "serve.port=0"]
    with pytest.raises(UserError, match=words):
        relay.run(load_settings(STAGES["serve"], [*own, *given]))


def test_learning_for_an_engine_needs_samples_and_a_drafter_that_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = prepare(tmp_path)
    own = [f"learn.drafter={place / 'drafter'}", *common(place, tmp_path)]
    with pytest.raises(UserError, match=r"no samples to learn from.*serve\.engine"):
        exporting(load_settings(STAGES["learn"], own), tmp_path / "empty")
    found = exporting(load_settings(STAGES["learn"], own), tmp_path)
    found.install(place / "drafter")
    told = found.describe()
    assert (Path(told["export"]) / "config.json").is_file() and "vllm" in told["command"]
    found.install(place / "drafter")  # over what a kill has left
    taken = tmp_path / "taken"
    taken.mkdir()
    (tmp_path / "engine.json").write_text(f'{{"drafter": "{taken}", "export": "x"}}')
    capsys.readouterr()
    assert exporting(load_settings(STAGES["learn"], own), tmp_path).current() == str(taken)
    assert "exported last" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(UserError, match="cannot be exported for speculators"):
        exporting(load_settings(STAGES["learn"], [*own, "export.engine=speculators"]), tmp_path)
    assert not (tmp_path / "exports" / "0000").exists()
    words = tmp_path / "eagle3-run"  # vLLM would take the drafter for one of EAGLE
    (words / "traffic").mkdir(parents=True)
    with pytest.raises(UserError, match="holds the word 'eagle3'"):
        exporting(load_settings(STAGES["learn"], own), words)
    with pytest.raises(UserError, match="Leave one of them out"):
        load_settings(STAGES["learn"], [*own, "learn.server=http://127.0.0.1:8000"])


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("train.domains=[code]", "all sampled traffic is learnt from"),
        ("train.prompts=[x.jsonl]", r"learn\.held_out"),
        ("train.goal=3", r"train\.max_steps or train\.patience"),
        ("train.refresh.init_from=x", "the drafter that serves"),
        ("feedback.variations=4", "the weights and replay count"),
        ("feedback.branch_likely=0.1", "the weights and replay count"),
        ("feedback.hard_prompts=0.5", "the weights and replay count"),
        ("feedback.records=[x]", r"learn\.folder"),
    ],
)
def test_settings_that_no_cycle_reads_are_refused(given: str, instead: str, tmp_path: Path) -> None:
    words = f"{given.partition('=')[0]} is given, but .* does not read it: .*{instead}"
    with pytest.raises(UserError, match=words):
        learn.run(load_settings(STAGES["learn"], [given, "learn.server=http://127.0.0.1:1"]))
    served = load_settings(STAGES["serve"], [f"serve.learn_settings=['{given}']"])
    with pytest.raises(UserError, match=words):
        learn.start_learner(served, tmp_path, {}, {})


def test_a_learner_starts_beside_modules_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with a train.py or scripts/, only `headstart` finds Headstart's packages."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    learn.start_learner(load_settings(STAGES["serve"], []), tmp_path, {}, {})
    assert commands[0][1:4] == ["-m", "headstart", "learn"]


@pytest.mark.parametrize("name", ["plain", "o'neil", "${x}", 'a,b "(1)"', "back\\slash", "a=b: #c"])
def test_a_learner_gets_its_folder_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: None)
    folder = tmp_path / name
    whom = {"drafter": str(folder / "drafter")}
    learn.start_learner(load_settings(STAGES["serve"], []), folder, whom, {})
    found = read_settings(STAGES["learn"], folder / learn.SETTINGS_FILE).learn
    assert (found.folder, found.drafter) == (str(folder), whom["drafter"])
    assert found.parent == os.getpid()


def test_cycles_train_with_the_draft_of_the_server(tmp_path: Path) -> None:
    """Not with the one that the drafter was trained for, nor `decode`'s."""
    drafter = prepare(tmp_path) / "drafter"
    write_draft(drafter, asdict(DecodeConfig(depth=6)))
    server: Any = SimpleNamespace(current=lambda: str(drafter))
    settings = load_settings(STAGES["learn"], [f"run.root={tmp_path}"])
    with writing(tmp_path) as journal:
        for draft, depth in (({"depth": 2}, 2), ({}, 6)):
            found = learn.cycle_settings(settings, tmp_path, server, journal, draft)
            assert found.decode.depth == depth


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (DecodeConfig(adaptive="confidence", depth=6), r"decode\.adaptive.*decode\.depth=6"),
        (DecodeConfig(compile=True), r"decode\.compile"),
        (DecodeConfig(ahead=True), r"decode\.ahead"),
    ],
)
def test_settings_with_which_no_candidate_can_be_tried_are_refused_at_the_start(
    decode: DecodeConfig, words: str
) -> None:
    with pytest.raises(UserError, match=f"serve.learn and serve.sample .*{words}"):
        require_trials(decode)
    require_trials(DecodeConfig())


def test_settings_of_a_recipe_that_no_cycle_reads_are_left_out() -> None:
    given = ["experiment=[embedded_few_prompts]", "learn.server=http://127.0.0.1:1"]
    settings = load_settings(STAGES["learn"], given)
    assert settings.feedback.variations and settings.train.prompts
    learn.require_read(settings)


def stand_in(samples: Path | None) -> Any:
    return SimpleNamespace(base="http://there", samples=lambda: samples)


def test_a_learner_takes_the_folder_into_which_its_server_samples(tmp_path: Path) -> None:
    samples = tmp_path / "traffic"
    with pytest.raises(UserError, match="not on this machine"):
        sampled_folder("", stand_in(samples))
    samples.mkdir()
    assert sampled_folder("", stand_in(samples)) == tmp_path
    assert sampled_folder(os.path.relpath(tmp_path), stand_in(samples)).resolve() == tmp_path
    with pytest.raises(UserError, match=r"Leave learn\.folder out"):
        sampled_folder(str(tmp_path / "other"), stand_in(samples))
    with pytest.raises(UserError, match=r"serve\.sample=true"):
        sampled_folder("", stand_in(None))


def test_sampling_for_another_learner_needs_a_token_that_both_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADMIN_VARIABLE, raising=False)
    assert admin_for(ServeConfig()) is None
    drawn = admin_for(ServeConfig(learn=True))
    assert drawn is not None and drawn != admin_for(ServeConfig(learn=True))
    with pytest.raises(UserError, match=ADMIN_VARIABLE):
        admin_for(ServeConfig(sample=True))
    monkeypatch.setenv(ADMIN_VARIABLE, "a-token-of-sixteen")
    given = admin_for(ServeConfig(sample=True))
    assert given is not None and given.value == b"a-token-of-sixteen"
    for wrong in ({"learn": True}, {"records_redact": True}, {"watch_folder": "x"}):
        with pytest.raises(UserError, match=r"serve\.sample"):
            ServeConfig(sample=True, **wrong)


def test_an_accepted_drafter_keeps_the_draft_that_it_was_trained_for(tmp_path: Path) -> None:
    """Also in a server that is started again; Medusa's heads draft no further."""
    accepted, decode = Found("0003", "medusa", tmp_path), DecodeConfig()
    assert draft_settings(accepted, decode) == decode
    write_draft(tmp_path, asdict(DecodeConfig(shape="tree", choices=((0,), (1,)))))
    found = draft_settings(accepted, decode)
    assert (found.shape, found.choices) == ("tree", ((0,), (1,)))


def test_cycles_keep_the_rate_of_those_before(tmp_path: Path) -> None:
    taken: Any = SimpleNamespace(stage_folder=None)  # as a drafter that a cycle has brought forth
    trained: Any = SimpleNamespace(
        stage_folder=tmp_path, trained_with=lambda group: {"lr": 4e-4} if group == "optim" else {}
    )

    def settings(*given: str) -> Any:
        return SimpleNamespace(given=given.__contains__, optim=SimpleNamespace(lr=1e-2))

    with writing(tmp_path) as journal:
        assert learning_rate(settings(), trained, journal) == 2e-4
        journal.append("trained", 1, rate=2e-4)
        journal.append("swapped", 1, checkpoint="drafters/0001")
        assert learning_rate(settings(), taken, journal) == 2e-4
        assert learning_rate(settings("optim.lr"), taken, journal) == 1e-2
