"""The clock of steps that the host runs ahead of: what it books is what they took, phase by phase,
and a clock that tells another time is found out."""

from __future__ import annotations

import logging
import time

import pytest

from heads.api.errors import UserError
from inference.decoding.clock import PHASES
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.graphs import WARM_UP_STEPS
from tests.inference.decoding.slow_device import SlowDevice, decoding_on
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import plain_texts, random_target, texts_of

PHASE = 0.004
"""Seconds of a phase: far more than the host takes to launch a step."""


BUSY = 0.3
"""How far two clocks may differ here: on a busy machine a thread is late, while the fault that is
looked for books a twentieth."""


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.decoding.clock.AGREEMENT", BUSY)


def new_engine(batch: int = 1) -> Engine:
    target = random_target()
    config = DecodeConfig(depth=3, batch_size=batch, lag=2)
    return Engine(target, drafter_of("medusa", target), config, capacity=96)


@pytest.mark.parametrize("batch", [1, 2])
def test_seconds_of_replayed_steps_are_those_of_the_device(batch: int) -> None:
    engine, device, items = new_engine(batch), SlowDevice(), requests(3, new=20)
    with decoding_on(device, engine, PHASE):
        list(engine.run(items))  # the first steps, and the capture
        engine.clock.reset()
        begin = time.perf_counter()
        found = texts_of(engine, items)
        wall = time.perf_counter() - begin
    assert device.captured == 1 and found == plain_texts(items)
    clock = engine.clock
    assert sum(clock.seconds.values()) == pytest.approx(wall, rel=BUSY)
    for phase in PHASES[1:]:
        assert clock.seconds[phase] >= 0.99 * clock.passes * PHASE, phase
    clock.require_agreement()


def test_steps_that_turn_out_to_be_too_many_are_booked() -> None:
    engine, device = new_engine(), SlowDevice()
    with decoding_on(device, engine, PHASE):
        (done,) = engine.run(requests(1, new=20))
    steps = engine.clock.passes
    assert steps > len(done.passes)  # launched before the host knew of the end
    assert engine.clock.decode_seconds >= 0.99 * steps * 4 * PHASE


def test_the_time_of_a_capture_belongs_to_no_phase() -> None:
    engine, device = new_engine(), SlowDevice(capture_seconds=1.0)
    with decoding_on(device, engine, PHASE):
        list(engine.run(requests(1, new=20)))
    assert device.captured == 1
    assert engine.clock.seconds["other"] < 0.5
    assert engine.clock.waited == pytest.approx(engine.clock.decode_seconds, rel=BUSY)


def test_a_capture_that_fails_is_tried_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    engine, device, items = new_engine(), SlowDevice(refuses="operation not permitted"), requests(2)
    with decoding_on(device, engine, 0.0), caplog.at_level(logging.WARNING):
        found = texts_of(engine, items)
    assert found == plain_texts(items) and engine.clock.passes > 2 * WARM_UP_STEPS
    assert device.captured == 1
    (said,) = [record.getMessage() for record in caplog.records if "captured" in record.message]
    assert "cannot be captured as a graph (RuntimeError: operation not permitted)" in said


def test_an_error_on_the_device_reaches_the_host() -> None:
    engine, device = new_engine(), SlowDevice()
    with decoding_on(device, engine, 0.0):
        list(engine.run(requests(1, new=20)))
        assert engine._kept.lanes is not None
        engine._kept.lanes.runner.decoder.rule = None  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            list(engine.run(requests(1, new=20)))


def test_clocks_that_disagree_are_refused() -> None:
    engine, device = new_engine(), SlowDevice()
    with decoding_on(device, engine, PHASE):
        list(engine.run(requests(1, new=20)))
    clock = engine.clock
    clock.require_agreement()
    booked = dict(clock.seconds)
    for wrong in (0.0, 0.5, 1.6):  # a clock that books nothing, too little, too much
        clock.seconds = {phase: wrong * seconds for phase, seconds in booked.items()}
        with pytest.raises(UserError, match="needs them within 30% of each other"):
            clock.require_agreement()
