"""The runner of steps: what cannot be captured is launched, what was captured with other weights is
captured anew, and devices without compiled steps are named."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.graphs import WARM_UP_STEPS, StepRunner
from inference.decoding.execution.layers import compile_layers
from inference.decoding.requests import Request
from inference.decoding.session import Session
from tests.inference.decoding.slow_device import SlowDevice, decoding_on
from tests.inference.decoding.test_lossless import prompts, requests
from tests.models import plain_texts, random_target, texts_of


class Uncapturable(SlowDevice):
    """Raises errors of another type than torch's own, as Triton's compiler does."""

    def capture(self, step: Any) -> Any:
        self.captured += 1
        raise LookupError("no such kernel")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "cannot be captured" in message]


def test_any_error_of_a_capture_is_a_reason_to_launch(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(random_target(), None, DecodeConfig(batch_size=2, lag=2), capacity=96)
    device, items = Uncapturable(), requests(2)
    with decoding_on(device, engine, 0.0), caplog.at_level(logging.WARNING):
        found = texts_of(engine, items)
    assert found == plain_texts(items) and engine.clock.passes > 2 * WARM_UP_STEPS
    assert device.captured == 1
    (said,) = warnings_in(caplog)
    assert "(LookupError: no such kernel)" in said


def test_a_capture_that_fails_is_tried_for_no_other_number_of_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, device = random_target(), Uncapturable()
    target.eos_token_ids = ()
    engine = Engine(target, None, DecodeConfig(batch_size=3, lag=2))
    items = [
        Request(index, prompt, seed=index, max_new_tokens=8 * (index + 1))
        for index, prompt in enumerate(prompts(3))
    ]
    plain = texts_of(Engine(target), items)
    found = {}
    with (
        decoding_on(device, engine, 0.0),
        caplog.at_level(logging.WARNING),
        Session(engine, capacity=96) as session,
    ):
        for item in items:
            session.add(item)
        while session.unfinished:
            found.update({done.request.index: done.tokens for done in session.step()})
    runners = [session.lanes.runner, *(part.runner for part in session.lanes._narrow.values())]
    launched = [variant.launched for runner in runners for variant in runner.variants.values()]
    assert len(launched) == 3 and min(launched) > WARM_UP_STEPS
    assert found == plain
    assert device.captured == len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(("experts", "captured"), [("eager", 0), ("grouped_mm", 1)])
def test_steps_that_ask_the_device_for_experts_are_not_captured(
    experts: str, captured: int
) -> None:
    """transformers' loop over experts asks it which of them have tokens."""
    target = random_target("qwen3_moe", dtype=torch.float32)
    target.model.set_experts_implementation(experts)
    engine = Engine(target, None, DecodeConfig(batch_size=2, lag=2), capacity=96)
    device = SlowDevice()
    with decoding_on(device, engine, 0.0):
        assert len(list(engine.run(requests(2)))) == 2
    assert engine.clock.passes > WARM_UP_STEPS and device.captured == captured


def test_dense_targets_are_captured_in_float64() -> None:
    target = random_target()
    target.model.config._experts_implementation = "eager"
    assert target.capturable


def test_captured_steps_are_captured_anew_once_weights_are_merged() -> None:
    """In the middle of a run: another engine of the target compiles its layers."""
    target = random_target()
    engine = Engine(target, None, DecodeConfig(batch_size=2, lag=2), capacity=96)
    device, items, found = SlowDevice(), requests(2), {}
    with decoding_on(device, engine, 0.0):
        for done in engine.run(items, yield_steps=True):
            found[done.request.index] = done.tokens
            if device.captured == 1 and not target.compiled_attention:
                assert compile_layers(target, backend="eager")
                assert engine._kept.lanes is not None
                before = engine._kept.lanes.runner.captured
        assert before and engine._kept.lanes.runner.captured
    assert device.captured == 2
    assert found == plain_texts(items)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_steps_are_not_compiled_for_other_devices(kind: str) -> None:
    """They are launched there; a compiled step would be code for a CPU."""
    rows: Any = SimpleNamespace(lengths=SimpleNamespace(device=torch.device(kind)))
    target, clock = SimpleNamespace(drafters_after_merge=None), SimpleNamespace(times=None)
    decoder: Any = SimpleNamespace(target=target, clock=clock, drafter=None)
    cache: Any = None
    runner = StepRunner(decoder, cache, rows, DecodeConfig())
    assert runner.accelerator is runner.compiled is None and not runner.captures.wanted
    wanted = f"the target is on '{kind}': steps are compiled for cpu and cuda alone. Use decode.com"
    with pytest.raises(UserError, match=wanted):
        StepRunner(decoder, cache, rows, DecodeConfig(compile=True))


def test_a_graph_cannot_be_demanded() -> None:
    """Whether steps are captured depends on the device, so no setting promises it."""
    with pytest.raises(UserError, match=r"decode\.graph True is unknown\. Allowed: auto, off"):
        DecodeConfig(graph=True)  # type: ignore[arg-type]
