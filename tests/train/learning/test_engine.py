"""Learning for an engine that loads exports: traffic without verifications, a candidate that is
compared on held-out prompts, and its export, whole after a kill at any line."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.server.samples import TrafficSamples
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.verifications import target_facts
from tests.train.learning.test_cycle import Killed, Killing, directly, events, replaying
from tests.train.learning.traffic import cycle_settings, decode, prepare
from train.learning import work
from train.learning.comparison import BETTER, OPEN, paired
from train.learning.cycle import Learner
from train.learning.engine import ExportingServer
from train.learning.journal import Entry, read_journal, writing
from train.learning.work import CycleSettings, Part

ORDER = ["collected", "weighed", "trained", "measured", "compared", "swapped"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def traffic(place: Path) -> Path:
    """An engine's answers, of which no verification is known."""
    target = TargetModel.load(TargetConfig(str(place / "target"), device="cpu", dtype="float32"))
    drafter = load_drafter(place / "drafter", target.info, target.weights)
    engine = Engine(target, drafter, DecodeConfig(batch_size=16, depth=3))
    facts: Any = {"target": target_facts(target.info)}
    samples = TrafficSamples(place / "learn" / "traffic", facts, 10**9, 1.0)
    for answer in decode(engine, 60):
        samples.add(replace(answer, passes=()))
    samples.flush()
    return place / "learn"


@pytest.fixture
def folder(traffic: Path, tmp_path: Path) -> Path:
    """A learner's folder with these answers."""
    return shutil.copytree(traffic, tmp_path / "learn")


class Exports:
    """Stands for an export: a file that names the checkpoint. count: of each folder."""

    def __init__(self) -> None:
        self.count = Counter[str]()

    def __call__(self, checkpoint: Path, out: Path) -> str:
        out.mkdir(parents=True, exist_ok=True)
        (out / "source").write_text(str(checkpoint))
        self.count[out.name] += 1
        return f"serve {out}"


def learn(settings: CycleSettings, server: ExportingServer, run: Any) -> list[Entry]:
    with writing(settings.folder) as journal:
        learner = Learner(settings, server, journal, run)
        while not learner.done and learner.step():
            pass
    return read_journal(settings.folder)


def test_a_better_drafter_comes_of_an_engines_traffic(place: Path, folder: Path) -> None:
    settings = cycle_settings(place, folder, cycles=1, error_rate=0.3)
    exports = Exports()
    server = ExportingServer(folder, place / "drafter", exports)
    found = learn(settings, server, directly)
    facts = {entry.event: entry.facts for entry in found}
    assert facts["traffic"]["passes"] == 0 and facts["traffic"]["answers"] == 60
    assert facts["weighed"]["verifications"] == 0 and facts["weighed"]["documents"] > 20
    assert facts["trained"]["steps"] == 8
    shown, measured = facts["measured"]["paired"], facts["measured"]
    assert shown["pairs"] == measured["prompts"] and shown["needed"] > 0
    # every prompt counts alike there, every pass in tau
    gain = shown["acceptance"][1] - shown["acceptance"][0]
    assert gain == pytest.approx(measured["after"]["tau"] - measured["before"]["tau"], abs=0.3)
    assert events(found) == [*ORDER[:-1], found[-1].event]
    assert (found[-1].event == "swapped") == (shown["verdict"] == BETTER)


def replay(candidate: Path, done: Counter[str], gain: float) -> Callable[..., dict[str, Any]]:
    """Parts as real ones; the candidate's acceptance exceeds the drafter's by `gain` on 40
    prompts."""
    plain = replaying(candidate, done)
    shown = asdict(paired([1.0] * 40, [1.0 + gain] * 40, 3, 0.01))

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        facts = plain(part, settings, number, start)
        return facts | {"paired": shown} if part is work.measure else facts

    return run


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(7))
def test_after_a_kill_at_any_line_the_export_is_whole_and_noted(
    place: Path, folder: Path, number: int, after: bool
) -> None:
    settings = cycle_settings(place, folder, cycles=1)
    exports, run = Exports(), replay(place / "drafter", Counter(), gain=0.8)
    server = ExportingServer(folder, place / "drafter", exports)
    learner = Learner(settings, server, Killing(folder, number, after), run)
    with pytest.raises(Killed):
        learner.run()
    known = read_journal(folder)
    server = ExportingServer(folder, place / "drafter", exports)  # of a process started again
    found = learn(settings, server, run)
    assert found[: len(known)] == known and events(found) == ORDER
    taken = folder / "drafters" / "0001"
    assert Path(server.current()) == taken
    assert Path(found[-1].facts["export"]) == folder / "exports" / "0001"
    assert found[-1].facts["command"] == f"serve {folder / 'exports' / '0001'}"
    assert (folder / "exports" / "0001" / "source").read_text() == str(taken)
    assert exports.count == {"0001": 1}


def test_what_the_prompts_do_not_show_is_not_exported(place: Path, folder: Path) -> None:
    settings = cycle_settings(place, folder, cycles=1)
    exports, run = Exports(), replay(place / "drafter", Counter(), gain=0.1)
    server = ExportingServer(folder, place / "drafter", exports)
    found = learn(settings, server, run)
    assert found[-1].event == "rejected" and OPEN in found[-1].facts["why"]
    assert not exports.count and Path(server.current()) == (place / "drafter").resolve()
    # with the higher tau the next cycle goes on from it
    assert [path.name for path in (folder / "drafters").iterdir()] == ["0001"]


def test_a_drafter_that_cannot_be_exported_is_rejected(place: Path, folder: Path) -> None:
    def refuse(checkpoint: Path, out: Path) -> str:
        raise UserError("the folder is not ours.")

    server = ExportingServer(folder, place / "drafter", refuse)
    run = replay(place / "drafter", Counter(), gain=0.8)
    found = learn(cycle_settings(place, folder, cycles=1), server, run)
    assert found[-1].event == "rejected" and "not ours" in found[-1].facts["why"]
    assert Path(server.current()) == (place / "drafter").resolve()


def test_a_damaged_state_is_refused_with_advice(place: Path, folder: Path) -> None:
    server = ExportingServer(folder, place / "drafter", Exports())
    (folder / "engine.json").write_text("{")
    with pytest.raises(UserError, match=r"Delete it to begin with learn\.drafter"):
        server.current()


def test_until_something_is_exported_the_given_drafter_counts(place: Path, folder: Path) -> None:
    ExportingServer(folder, place / "mistaken", Exports())
    server = ExportingServer(folder, place / "drafter", Exports())
    assert Path(server.current()) == (place / "drafter").resolve()
    server.install(folder / "drafters" / "0001")
    server = ExportingServer(folder, place / "drafter", Exports())
    assert Path(server.current()) == folder / "drafters" / "0001"


def test_a_candidate_that_was_compared_with_another_drafter_is_rejected(
    place: Path, folder: Path
) -> None:
    settings = cycle_settings(place, folder, cycles=1)
    exports, run = Exports(), replay(place / "drafter", Counter(), gain=0.8)
    server = ExportingServer(folder, place / "drafter", exports)
    with pytest.raises(Killed):  # once the comparison has ended
        Learner(settings, server, Killing(folder, len(ORDER) - 1, False), run).run()
    other = shutil.copytree(place / "drafter", folder.parent / "other")
    found = learn(settings, ExportingServer(folder, other, exports), run)
    assert found[-1].event == "rejected" and "was not compared" in found[-1].facts["why"]
    assert not exports.count
