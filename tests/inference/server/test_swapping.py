"""Changing the drafter of a running server: no request is lost, no text changes, and what cannot
draft is refused."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.decoding.pair import DrafterPair
from inference.decoding.requests import PassRecord, Request
from inference.decoding.session import Session
from inference.server import swapping
from inference.server.drafter_folder import DrafterFolder
from inference.server.trial import TrialCounts, drafts_with_candidate
from inference.target.model import TargetModel
from tests.inference.server.drafters import BAD, checkpoint
from tests.inference.server.running import MODEL, Running, offline, serving
from tests.waiting import until

PROMPTS = ["Write a list.", "What is a list?", "def add(a, b):", "Hello! Hi there.", "Bye now."]
GIVEN = "test"
"""The name of the drafter that a server of `serving` starts with."""


@pytest.fixture(scope="module")
def folders(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    kinds = {"first": ("eagle3", 1), "second": ("eagle3", 2), "small": ("distilled", 3)}
    return {name: checkpoint(root / name, target, *kind) for name, kind in kinds.items()}


@pytest.fixture
def running(target: TargetModel, folders: dict[str, Path]) -> Iterator[Running]:
    drafter = load_drafter(folders["first"], target)
    decode = DecodeConfig(batch_size=4, depth=3, max_new_tokens=40, rule="match")
    with serving(Engine(target, drafter, decode)) as found:
        yield found


async def ask(running: Running, number: int) -> tuple[int, str]:
    """One answer, streamed for every second request."""
    client, prompt = running.asynchronous(), PROMPTS[number % len(PROMPTS)]
    given: dict[str, Any] = {"temperature": 0.9 if number % 3 == 0 else 0.0, "seed": number}
    message = [{"role": "user", "content": prompt}]
    async with client:
        if number % 2:
            done = await client.chat.completions.create(model=MODEL, messages=message, **given)  # type: ignore[call-overload]
            return number, done.choices[0].message.content
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=message, stream=True, **given
        )
        return number, "".join([part.choices[0].delta.content or "" async for part in stream])


def ask_during(running: Running, count: int, work: Callable[[], None]) -> dict[int, str]:
    """The answers to `count` requests, eight at a time, while `work` is done again and again."""
    ended, failures = threading.Event(), list[BaseException]()

    def worker() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    async def all_of_them() -> dict[int, str]:
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> tuple[int, str]:
            async with gate:
                return await ask(running, number)

        return dict(await asyncio.gather(*(one(number) for number in range(count))))

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        return asyncio.run(all_of_them())
    finally:
        ended.set()
        thread.join(60)
        for failure in failures:
            raise failure


def expected(engine: Engine, count: int) -> dict[int, str]:
    return {
        number: offline(
            engine,
            PROMPTS[number % len(PROMPTS)],
            number,
            temperature=0.9 if number % 3 == 0 else 0.0,
            max_new_tokens=40,
        )[0]
        for number in range(count)
    }


def test_no_request_is_lost_and_no_text_changes_over_many_swaps(
    running: Running, folders: dict[str, Path]
) -> None:
    swaps, count = running.service.swaps, 16
    turn = itertools.cycle([folders["second"], "ngram", folders["small"], folders["first"]])

    def swap() -> None:
        time.sleep(0.3)
        given = next(turn)
        swaps.install(given)
        assert swaps.current() == str(given)

    answers = ask_during(running, count, swap)
    assert answers == expected(running.service.engine, count)
    shown = running.metrics()
    assert shown['headstart_drafter_swaps_total{outcome="installed"}'] >= 4
    assert shown[f'headstart_drafter{{drafter="{swaps.current()}"}}'] == 1
    assert shown["headstart_drafter_swap_seconds_count"] >= 4


def test_the_check_of_a_new_drafter_counts_as_a_stop(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = swapping.check_drafts

    def slowly(*given: Any) -> None:
        time.sleep(0.3)
        check(*given)

    monkeypatch.setattr(swapping, "check_drafts", slowly)
    running.service.swaps.install("ngram")
    assert running.metrics()["headstart_drafter_swap_seconds_sum"] >= 0.3


def test_a_trial_counts_both_drafters_and_changes_no_text(
    running: Running, folders: dict[str, Path]
) -> None:
    swaps, count = running.service.swaps, 24
    swaps.start_trial(folders["small"], share=0.5)
    assert swaps.current() == GIVEN
    for refused in (lambda: swaps.install("ngram"), lambda: swaps.start_trial("ngram")):
        with pytest.raises(UserError, match="trial"):
            refused()
    answers = ask_during(running, count, lambda: time.sleep(0.1))
    assert answers == expected(running.service.engine, count)
    state = swaps.trial()
    assert state is not None
    arms = state.current, state.candidate
    assert [arm.drafter for arm in arms] == [GIVEN, str(folders["small"])]
    assert sum(arm.rows for arm in arms) <= count and all(arm.rows > 3 for arm in arms)
    shown = running.metrics()
    for name, arm in zip(("current", "candidate"), arms, strict=True):
        # a pass that the end of an answer cuts commits no token of the target's own
        assert arm.passes <= arm.committed <= arm.accepted + arm.passes
        assert 0 < len(arm.answers) <= arm.rows
        assert all(1 <= one.passes <= state.most for one in arm.answers)
        assert shown[f'headstart_trial_verify_passes_total{{arm="{name}"}}'] == arm.passes
        assert shown[f'headstart_trial_accepted_drafts_total{{arm="{name}"}}'] == arm.accepted
    assert shown["headstart_drafter_trial"] == 1
    swaps.end_trial(keep=True)
    assert swaps.trial() is None and swaps.current() == str(folders["small"])
    assert running.service.engine.drafter.kind == "distilled"
    with pytest.raises(UserError, match="no trial"):
        swaps.end_trial(keep=True)


def test_trials_come_and_go_under_load(running: Running, folders: dict[str, Path]) -> None:
    swaps, count = running.service.swaps, 16
    turn = itertools.cycle([("second", True), ("small", False), ("small", True), ("first", False)])

    def work() -> None:
        name, keep = next(turn)
        if swaps.current() != str(folders[name]):
            swaps.start_trial(folders[name], share=0.4)
            time.sleep(0.2)
            swaps.end_trial(keep)

    assert ask_during(running, count, work) == expected(running.service.engine, count)


@pytest.mark.parametrize("words", BAD)
def test_a_bad_checkpoint_is_refused_and_the_old_drafter_stays(
    running: Running, target: TargetModel, tmp_path: Path, words: str
) -> None:
    swaps, bad = running.service.swaps, BAD[words](tmp_path / "bad", target)
    for refused in (swaps.install, swaps.start_trial):
        with pytest.raises(UserError, match=f"(?i){words}"):
            refused(bad)
    assert swaps.current() == GIVEN and swaps.trial() is None
    assert asyncio.run(ask(running, 1))[1] == expected(running.service.engine, 2)[1]
    assert running.metrics()['headstart_drafter_swaps_total{outcome="refused"}'] == 2


def test_what_else_is_refused(
    running: Running, target: TargetModel, folders: dict[str, Path], monkeypatch: Any
) -> None:
    swaps = running.service.swaps
    wrong = {"nowhere": "no folder", "x" * 5000: "no folder", "eagle3": "has to be trained"}
    for name, words in wrong.items():
        with pytest.raises(UserError, match=words):
            swaps.install(name)
    for share in (0.0, 1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            swaps.start_trial("ngram", share)

    def broken(self: Any, state: Any, noise: Any) -> Any:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr("heads.distilled.Drafter.propose", broken)
    with pytest.raises(UserError, match="fails to draft a short text: a kernel is missing"):
        swaps.install(folders["small"])
    with monkeypatch.context() as patch:
        patch.setattr("inference.decoding.engine.free_bytes", lambda device: 1 << 12)
        with pytest.raises(UserError, match="are free"):
            swaps.install(folders["second"])
    assert swaps.current() == GIVEN
    with (
        serving(Engine(target, None, DecodeConfig())) as plain,
        pytest.raises(UserError, match="nothing is drafted here"),
    ):
        plain.service.swaps.install("ngram")


def test_a_failed_step_ends_a_trial_without_the_candidate(
    running: Running, folders: dict[str, Path], monkeypatch: Any
) -> None:
    """The session is made anew with the drafter that worked, and the server goes on."""
    swaps = running.service.swaps
    swaps.start_trial(folders["small"])

    def broken(self: Any, state: Any, noise: Any) -> Any:
        raise RuntimeError("a kernel is missing")

    with monkeypatch.context() as patch:
        patch.setattr("heads.distilled.Drafter.propose", broken)
        with pytest.raises(Exception, match="the engine failed"):
            asyncio.run(ask(running, 1))
    until(lambda: running.service.scheduler.healthy)
    assert swaps.trial() is None and not isinstance(running.service.engine.drafter, DrafterPair)
    assert asyncio.run(ask(running, 1))[1] == expected(running.service.engine, 2)[1]


def test_nobody_waits_for_a_worker_that_has_ended(target: TargetModel) -> None:
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    with serving(Engine(target, load_drafter("ngram", target), decode)) as found:
        swaps = found.service.swaps
    with pytest.raises(UserError, match="stopping"):
        swaps.install("ngram")


# The watched folder


def test_the_newest_checkpoint_of_a_watched_folder_is_taken_and_a_bad_one_told_once(
    target: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    watched, made = tmp_path / "watched", tmp_path / "made"
    watched.mkdir()
    with serving(Engine(target, load_drafter("ngram", target), decode)) as found:
        swaps = found.service.swaps
        folder = DrafterFolder(swaps, watched)
        folder.look()
        assert swaps.current() == GIVEN
        checkpoint(made / "one", target, "eagle3").rename(watched / "one")
        folder.look()
        assert swaps.current() == GIVEN  # it may still be written
        folder.look()
        assert swaps.current() == str(watched / "one")
        BAD["not finite"](made / "bad", target).rename(watched / "bad")
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                folder.look()
        refusals = [one for one in caplog.records if "not taken" in one.message]
        assert len(refusals) == 1 and "not finite" in refusals[0].message
        assert swaps.current() == str(watched / "one")
        checkpoint(watched / "bad", target, "eagle3", 5)  # it is written anew
        for _ in range(2):
            folder.look()
        assert swaps.current() == str(watched / "bad")
        swaps.start_trial(watched / "one")
        checkpoint(made / "run" / "best", target, "eagle3", 6).parent.rename(watched / "run")
        for _ in range(3):
            folder.look()
        swaps.end_trial(keep=False)
        assert swaps.current() == str(watched / "bad")
        folder.look()
        assert swaps.current() == str(watched / "run" / "best")
    with pytest.raises(UserError, match="is not a folder"):
        DrafterFolder(swaps, tmp_path / "nowhere")


def test_files_in_a_watched_folder_and_a_trial_that_begins_meanwhile_lose_no_checkpoint(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("notes")
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    with serving(Engine(target, load_drafter("ngram", target), decode)) as found:
        swaps = found.service.swaps
        folder = DrafterFolder(swaps, tmp_path)
        checkpoint(tmp_path / "one", target, "eagle3")
        folder.look()
        install = swaps.install

        def begins(path: Path) -> None:
            swaps.start_trial(tmp_path / "one")
            install(path)

        with monkeypatch.context() as patch:
            patch.setattr(swaps, "install", begins)
            folder.look()
        swaps.end_trial(keep=False)
        assert swaps.current() == GIVEN
        folder.look()
        assert swaps.current() == str(tmp_path / "one")


def test_a_server_looks_at_its_folder_by_itself(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.server.drafter_folder.LOOK_SECONDS", 0.05)
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    engine = Engine(target, load_drafter("ngram", target), decode)
    with serving(engine, watch_folder=str(tmp_path)) as found:
        made = checkpoint(tmp_path / ".making", target, "eagle3")
        made.rename(tmp_path / "one")
        until(lambda: found.service.swaps.current() == str(tmp_path / "one"))
        assert asyncio.run(ask(found, 1))[1] == offline(engine, PROMPTS[1], 1, max_new_tokens=8)[0]


def test_a_checkpoint_with_a_fault_of_its_own_does_not_end_the_looking(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a foreign kind; the next one is taken."""
    monkeypatch.setattr("inference.server.drafter_folder.LOOK_SECONDS", 0.05)
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    with serving(
        Engine(target, load_drafter("ngram", target), decode), watch_folder=str(tmp_path)
    ) as found:
        swaps, real, tried = found.service.swaps, found.service.swaps.install, list[str]()

        def install(checkpoint_: Any) -> Any:
            tried.append(Path(checkpoint_).name)
            if tried[-1] == "odd":
                raise KeyError("layers")
            return real(checkpoint_)

        monkeypatch.setattr(swaps, "install", install)
        checkpoint(tmp_path / ".odd", target, "eagle3").rename(tmp_path / "odd")
        until(lambda: "odd" in tried)
        checkpoint(tmp_path / ".good", target, "eagle3", 5).rename(tmp_path / "good")
        until(lambda: swaps.current() == str(tmp_path / "good"))


# Counting


def test_answers_are_cut_at_the_passes_that_count_and_kept_once() -> None:
    counts = TrialCounts("a", "b", 0.5, 2, 3)

    def verified(index: int, arm: int | None, *accepted: int) -> None:
        for one in accepted:
            record = PassRecord(one, one + 1, True, arm=arm)
            counts.count(index, "code", record, f"client {index}")

    verified(0, None, 3)
    counts.ended(0, "code")
    verified(1, 1, 2, 1, 3)
    verified(2, 0, 1)
    for index in (1, 2, 7):
        counts.ended(index, "code", f"client {index}")
    state = counts.state()
    assert [(one.accepted, one.passes, one.client) for one in state.candidate.answers] == [
        (3, 2, 0)
    ]
    assert [(one.accepted, one.passes, one.client) for one in state.current.answers] == [(1, 1, 1)]
    assert (state.candidate.rows, state.candidate.passes, state.candidate.accepted) == (1, 3, 6)
    assert (state.current.rows, state.current.committed) == (1, 2)


def test_requests_are_assigned_by_seed_and_number_in_the_asked_share() -> None:
    base = Request(0, (1,), 7, 4)
    for share in (0.1, 0.5, 0.9):
        asked = [replace(base, index=number) for number in range(4000)]
        chosen = [drafts_with_candidate(share, b"a key", one) for one in asked]
        assert abs(sum(chosen) / len(chosen) - share) < 0.03
        assert chosen == [drafts_with_candidate(share, b"a key", one) for one in asked]
        other = [drafts_with_candidate(share, b"another key", one) for one in asked]
        expected_equal = share**2 + (1 - share) ** 2  # as of two independent draws
        equal = sum(a == b for a, b in zip(chosen, other, strict=True)) / len(asked)
        assert abs(equal - expected_equal) < 0.04


def test_a_refusal_of_an_idle_worker_is_sent_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Session, request: Request) -> None:
        raise UserError("not today")

    monkeypatch.setattr(Session, "check", refuse)
    with pytest.raises(BadRequestError, match="not today"):
        running.client.with_options(timeout=20.0, max_retries=0).completions.create(
            model=MODEL, prompt="Hi", max_tokens=4
        )
