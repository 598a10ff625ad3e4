"""The learner's cycle: a real refresh on real samples, killed at every line of its journal; bad
candidates, full disks, budgets."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.api.errors import UserError
from heads.api.system_errors import explained
from inference.decoding.draft_file import read_draft
from inference.server.samples import batches
from inference.target.memory import MemoryPlan
from tests.train.learning.traffic import StandIn, cycle_settings, prepare
from train.learning import work
from train.learning.cycle import ENDS, STEPS, Learner, last_taken
from train.learning.journal import Entry, Journal, read_journal, writing
from train.learning.server import ServerGoneError
from train.learning.work import CrashError, CycleSettings, Part, in_own_process

ORDER = ["collected", "weighed", "trained", "measured", "trial", "compared", "swapped"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("place"))


def new_folder(place: Path, folder: Path) -> Path:
    """A learner's folder with samples."""
    shutil.copytree(place / "traffic", folder / "traffic")
    return folder


def directly(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    """Run a part in this process."""
    return part(settings, number, start)


def learn(settings: CycleSettings, server: StandIn, run: Any = directly) -> list[Entry]:
    """Learn until there is nothing to do; returns the journal."""
    with writing(settings.folder) as journal:
        learner = Learner(settings, server, journal, run)
        while not learner.done and learner.step():
            pass
    return read_journal(settings.folder)


def events(entries: list[Entry]) -> list[str]:
    return [entry.event for entry in entries if entry.event in STEPS]


@pytest.fixture(scope="module")
def learnt(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StandIn]:
    """A learner's folder after a whole cycle."""
    folder = new_folder(place, tmp_path_factory.mktemp("learnt") / "learn")
    server = StandIn(place / "drafter")
    learn(cycle_settings(place, folder, cycles=1), server)
    return folder, server


def test_a_cycle_brings_a_better_drafter_to_the_server(
    place: Path, learnt: tuple[Path, StandIn]
) -> None:
    folder, server = learnt
    found = read_journal(folder)
    assert [entry.event for entry in found] == ["traffic", *ORDER]
    facts = {entry.event: entry.facts for entry in found}
    assert facts["collected"]["clients"] == 4 and facts["collected"]["largest_client"] < 0.35
    assert min(facts["collected"]["held_out"].values()) > 0
    assert facts["trained"]["steps"] == 8
    assert facts["measured"]["after"]["tau"] > facts["measured"]["before"]["tau"]
    candidate = Path(facts["swapped"]["checkpoint"])
    assert read_draft(candidate)["depth"] == cycle_settings(place, folder).decode.depth
    assert server.swaps == [str(candidate)] and last_taken(found) == candidate
    before = load_file(place / "drafter" / "model.safetensors")
    after = load_file(candidate / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    # the cycle's work is gone, and what was read
    assert not list((folder / "cycles").iterdir())
    assert [path.name for path in (folder / "drafters").iterdir()] == ["0001"]


class Busy(StandIn):
    """A server to which new traffic has come whenever the learner looks."""

    samples: Path

    def current(self) -> str:
        first, *_, last = [*batches(self.samples)] * 2
        for table in ("verifications", "sequences"):
            new = self.samples / f"{table}-{int(last) + 1:020d}.parquet"
            shutil.copy(self.samples / f"{table}-{first}.parquet", new)
        return super().current()


def test_traffic_that_never_pauses_is_learnt_from(place: Path, tmp_path: Path) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"))
    server = Busy(place / "drafter")
    server.samples = tmp_path / "learn" / "traffic"
    with writing(settings.folder) as journal:
        learner = Learner(settings, server, journal)
        assert learner.step() and learner.step()
    seen, begun = journal.entries
    assert (seen.event, begun.event) == ("traffic", "collected")
    assert begun.facts["through"] == seen.facts["through"] < batches(server.samples)[-1]
    assert begun.facts["tokens"] == seen.facts["tokens"]  # what came since is the next cycle's


class Killed(BaseException):
    """Stands for kill -9."""


class Killing(Journal):
    """A journal whose process is killed at a line: just after it was written, or just before."""

    def __init__(self, folder: Path, number: int, after: bool) -> None:
        super().__init__(folder)
        self.number, self.after = number, after

    def append(self, event: str, cycle: int, **facts: Any) -> Entry:
        if len(self.entries) == self.number and not self.after:
            raise Killed
        entry = super().append(event, cycle, **facts)
        if entry.number == self.number and self.after:
            raise Killed
        return entry


@pytest.fixture(scope="module")
def candidate(learnt: tuple[Path, StandIn]) -> Path:
    return learnt[0] / "drafters" / "0001"


def replaying(candidate: Path, done: Counter[str]) -> Callable[..., dict[str, Any]]:
    """Parts that leave what real ones have left, at once; counts how often each one ran."""

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        done[part.__name__] += 1
        if part is work.refresh:
            out = settings.candidate(number)
            shutil.copytree(candidate, out, dirs_exist_ok=True)
            digest = work.checkpoint_hash(out)
            return {"checkpoint": str(out), "weights_sha256": digest, "steps": 4}
        return {"before": {"tau": 1.5}, "after": {"tau": 2.0}} if part is work.measure else {}

    return run


@pytest.mark.parametrize("server_too", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_after_a_kill_at_any_line_nothing_is_done_twice_and_the_swap_is_whole(
    place: Path, candidate: Path, tmp_path: Path, number: int, after: bool, server_too: bool
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    server, done = StandIn(place / "drafter"), Counter[str]()
    run = replaying(candidate, done)
    learner = Learner(settings, server, Killing(settings.folder, number, after), run)
    with pytest.raises(Killed):
        learner.run()
    known = read_journal(settings.folder)
    if server_too:
        server.restart(last_taken(known) or place / "drafter")
    found = learn(settings, server, run)
    assert found[: len(known)] == known  # appended to, nothing else
    own = [event for event in events(found) if event != "trial"]
    assert own == [event for event in ORDER if event != "trial"]
    taken = tmp_path / "learn" / "drafters" / "0001"
    assert Path(server.current()) == taken and server.running is None
    assert len(server.swaps) == (2 if server_too and number == 7 and not after else 1)
    # a part that has its line is not run again; the one that was under way is
    again = {2: "weigh", 3: "refresh", 4: "measure"}.get(number) if not after else None
    expected = {name: 1 + (name == again) for name in ("weigh", "refresh", "measure")}
    assert done == expected


def test_a_worse_candidate_is_rejected_and_its_files_go(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    server = StandIn(place / "drafter", gain=0.0)
    found = learn(settings, server, replaying(candidate, Counter()))
    assert found[-1].event == "rejected" and "open" in found[-1].facts["why"]
    assert server.running is None and not server.swaps
    assert not list((settings.folder / "drafters").iterdir())
    assert not list((settings.folder / "cycles").iterdir())


@pytest.mark.parametrize(
    "other", ["", "another drafter", "lower tau", "not above on held-out", "changed"]
)
def test_the_next_cycle_goes_on_from_a_candidate_that_was_better_so_far(
    place: Path, candidate: Path, tmp_path: Path, other: str
) -> None:
    """Gains that are too small to be shown add up. The comparison, and the measurement before it,
    are with the drafter that serves all the same; where that is another one by now, the candidate
    was no better, or its weights have changed, the next cycle begins with what serves."""
    folder = new_folder(place, tmp_path / "learn")
    settings = cycle_settings(place, folder, cycles=1, most_pairs=3)
    server = StandIn(place / "drafter", -0.1 if other == "lower tau" else 0.1, answers=3)
    kept_folder = folder / "drafters" / "0001"
    starts, done = dict[tuple[str, int], Path](), Counter[str]()

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        starts[part.__name__, number] = start
        facts = replaying(candidate, done)(part, settings, number, start)
        if part is work.measure and number == 1 and other == "not above on held-out":
            facts["after"] = facts["before"]
        return facts

    assert learn(settings, server, run)[-1].event == "rejected"
    kept = [path.name for path in (folder / "drafters").iterdir()]
    assert kept == ([] if other in ("lower tau", "not above on held-out") else ["0001"])
    if other == "changed":
        weights = load_file(kept_folder / "model.safetensors")
        weights = {name: value + 1 for name, value in weights.items()}
        save_file(weights, kept_folder / "model.safetensors")
    if other == "another drafter":
        server.install(shutil.copytree(place / "drafter", tmp_path / "else"))
    again = new_folder(place, tmp_path / "again") / "traffic"
    for name in batches(again):
        for table in ("verifications", "sequences"):
            later = f"{table}-{int(name) + 10**12:020d}.parquet"
            shutil.copy(again / f"{table}-{name}.parquet", folder / "traffic" / later)
    server.gain, server.answers = 1.0, 200
    found = learn(cycle_settings(place, folder, cycles=2), server, run)
    serves = tmp_path / "else" if other == "another drafter" else place / "drafter"
    begins = kept_folder if other == "" else serves
    assert starts["refresh", 2] == begins.resolve() and starts["measure", 2] == serves.resolve()
    assert found[-1].event == "swapped"
    assert [path.name for path in (folder / "drafters").iterdir()] == ["0002"]


def test_a_measurement_takes_as_many_rows_as_fit_into_memory(
    place: Path, candidate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    assert settings.train.eval_batch > 1
    needed: list[int] = []
    found: list[dict[str, Any]] = []

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        if part is work.measure:
            with monkeypatch.context() as roomy:
                roomy.setattr(MemoryPlan, "require", lambda plan, *_: needed.append(plan.total))
                found.append(work.measure(settings, number, start))
            with monkeypatch.context() as tight:
                free = needed[0] // 2
                tight.setattr("inference.decoding.engine.free_bytes", lambda device: free)
                found.append(work.measure(settings, number, start))
            return found[0]
        return replaying(candidate, Counter())(part, settings, number, start)

    learn(settings, StandIn(place / "drafter"), run)
    assert found[0] == found[1]


def test_a_candidate_with_nan_is_rejected_before_any_request_meets_it(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    server, plain = StandIn(place / "drafter"), replaying(candidate, Counter())

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        if part is work.measure:
            return work.measure(settings, number, start)
        facts = plain(part, settings, number, start)
        if part is work.refresh:
            path = settings.candidate(number) / "model.safetensors"
            tensors = load_file(path)
            name = next(iter(tensors))
            tensors[name][0] = float("nan")
            save_file(tensors, path)
            facts["weights_sha256"] = work.checkpoint_hash(path.parent)
        return facts

    found = learn(settings, server, run)
    assert events(found)[-1] == "rejected" and "finite" in found[-1].facts["why"]
    assert not server.trials and not server.swaps


def test_a_candidate_that_has_changed_on_disk_is_rejected(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    plain = replaying(candidate, Counter())

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        if part is work.measure:
            with (settings.candidate(number) / "model.safetensors").open("ab") as file:
                file.write(b"x")
        return plain(part, settings, number, start)

    server = StandIn(place / "drafter")
    found = learn(settings, server, run)
    assert found[-1].event == "rejected" and "changed" in found[-1].facts["why"]
    assert not server.trials


def test_a_candidate_that_changes_during_its_comparison_is_tried_no_longer(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    folder = new_folder(place, tmp_path / "learn")
    settings = cycle_settings(place, folder, most_pairs=10**6)
    server = StandIn(place / "drafter", gain=0.0)
    found = learn(settings, server, replaying(candidate, Counter()))
    assert events(found)[-1] == "trial" and server.running
    (folder / "drafters" / "0001" / "model.safetensors").write_bytes(b"changed")
    assert events(learn(settings, server))[-1] == "rejected"
    assert server.running is None


def test_what_a_kill_leaves_of_an_ended_cycle_stops_no_later_one(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    folder = new_folder(place, tmp_path / "learn")
    nobodys, aside = folder / "cycles" / "0000", folder / "cycles" / "0000.aside-20260101"
    for left in (nobodys, aside):
        left.mkdir(parents=True)
        (left / "answers.parquet").write_bytes(b"x")
    settings = cycle_settings(place, folder, cycles=1)
    found = learn(settings, StandIn(place / "drafter"), replaying(candidate, Counter()))
    assert events(found)[-1] == "swapped"
    assert {path.name for path in (folder / "cycles").iterdir()} == {nobodys.name, aside.name}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_by_its_words_and_by_its_cause(number: int) -> None:
    full = OSError(number, os.strerror(number), "state.pt")
    wrapped = UserError("the state cannot be saved")
    wrapped.__cause__ = full
    for error in (full, wrapped, UserError(f"not saved: {explained(full)}")):
        assert work.is_full(error)
    assert not work.is_full(UserError("the drafter is of another target"))


def test_what_the_server_refuses_is_rejected(place: Path, candidate: Path, tmp_path: Path) -> None:
    class Refusing(StandIn):
        def start_trial(self, checkpoint: Path, share: float) -> None:
            raise UserError("the drafter does not fit into memory.")

    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    found = learn(settings, Refusing(place / "drafter"), replaying(candidate, Counter()))
    assert found[-1].event == "rejected" and "memory" in found[-1].facts["why"]


def test_processes_that_crash_are_tried_again_and_then_given_up(
    place: Path, candidate: Path, tmp_path: Path
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    plain, crashes = replaying(candidate, Counter()), [2]

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        if part is work.refresh and crashes[0]:
            crashes[0] -= 1
            raise CrashError("killed")
        return plain(part, settings, number, start)

    assert learn(settings, StandIn(place / "drafter"), run)[-1].event == "swapped"
    crashes[0] = 99
    other = cycle_settings(place, new_folder(place, tmp_path / "other"), cycles=1)
    found = learn(other, StandIn(place / "drafter"), run)
    assert Counter(entry.event for entry in found)["crashed"] == 3
    assert found[-1].event == "rejected"


@pytest.mark.slow
def test_a_part_that_dies_says_so_in_its_learner(place: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashError, match="status 9"):
        in_own_process(die, cycle_settings(place, tmp_path), 1, tmp_path)


@pytest.mark.slow
def test_what_fails_in_a_process_of_its_own_is_raised_in_the_learner(
    place: Path, tmp_path: Path
) -> None:
    settings = cycle_settings(place, tmp_path, nice=5)
    with pytest.raises(UserError, match="there is no folder"):
        in_own_process(work.weigh, settings, 1, tmp_path / "none")
    with pytest.raises(OSError, match="No space left"):
        in_own_process(fill, settings, 1, tmp_path)
    assert in_own_process(niceness, settings, 1, tmp_path)["nice"] >= 5


@pytest.mark.slow
def test_a_cycle_in_processes_of_its_own(place: Path, tmp_path: Path) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    assert events(learn(settings, StandIn(place / "drafter"), in_own_process)) == ORDER


def niceness(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    return {"nice": os.nice(0)}


def die(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    os._exit(9)


def fill(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    raise RuntimeError("[enforce fail] write: No space left on device (os error 28)")


def test_a_full_disk_and_a_silent_server_pause_the_learner(
    place: Path, candidate: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"), cycles=1)
    plain, failures = replaying(candidate, Counter()), ["full", "gone"]

    def run(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
        if part is work.refresh and failures:
            if failures.pop() == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise ServerGoneError("the server does not answer")
        return plain(part, settings, number, start)

    with writing(settings.folder) as journal:
        learner = Learner(settings, StandIn(place / "drafter"), journal, run)
        while not learner.done:
            learner.attempt()
    assert events(read_journal(settings.folder)) == ORDER
    said = [record.getMessage() for record in caplog.records if "pauses" in record.getMessage()]
    assert len(said) == 2 and any("is full" in line for line in said)


def test_little_room_pauses_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    folder = new_folder(place, tmp_path / "learn")
    settings = cycle_settings(place, folder, free_megabytes=1e9)
    with writing(folder) as journal:
        learner = Learner(settings, StandIn(place / "drafter"), journal, directly)
        assert not learner.attempt() and not journal.entries


def test_budgets_of_tokens_hold(place: Path, candidate: Path, tmp_path: Path) -> None:
    folder = new_folder(place, tmp_path / "learn")
    settings = cycle_settings(place, folder, all_tokens=300, most_tokens=400)
    run = replaying(candidate, Counter())
    found = learn(settings, StandIn(place / "drafter"), run)
    tokens = [entry.facts["tokens"] for entry in found if entry.event == "collected"]
    assert len(tokens) == 1 and 200 < tokens[0] <= 300 + 4 * 16
    assert not batches(folder / "traffic")
    shutil.copytree(place / "traffic", folder / "traffic", dirs_exist_ok=True)
    assert events(learn(settings, StandIn(place / "drafter"), run)).count("collected") == 1


def test_without_enough_traffic_nothing_begins(place: Path, tmp_path: Path) -> None:
    folder = new_folder(place, tmp_path / "learn")
    settings = cycle_settings(place, folder, least_tokens=10**6, most_tokens=10**6)
    found = learn(settings, StandIn(place / "drafter"))
    assert [entry.event for entry in found] == ["traffic"]
    assert found[0].facts["tau"] > 1 and found[0].facts["tokens"] > 500


def test_a_drafter_without_weights_is_not_refreshed(place: Path, tmp_path: Path) -> None:
    settings = cycle_settings(place, new_folder(place, tmp_path / "learn"))
    with pytest.raises(UserError, match="no trained weights"):
        learn(settings, StandIn(Path("ngram")))
    assert not set(events(read_journal(settings.folder))) & set(ENDS)
