"""The live check's judgement, with our decoder in the engine's place: what agrees passes, what does
not is named."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.export.check.config import LiveConfig
from inference.export.check.live import (
    Served,
    check_folder,
    count_steps,
    decode,
    first_position,
    lines,
    live_check,
    read_served,
)
from inference.measure import vllm_process
from inference.measure.foreign.vllm_worker import ServedMode
from inference.measure.vllm_process import EngineProcess
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, AlwaysWrong, Fake, SometimesRight
from tests.inference.export.ground import load_target, save, save_target, write

DEPTH, NEW = 3, 14
TOLD = {"method": "eagle3", "num_speculative_tokens": DEPTH}
PROCESS = EngineProcess("no-python")


class RightOnce(Fake):
    """The first draft is right, the others never."""

    def spoil(self, tokens: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        return torch.where(depth > 1, (tokens + 1) % self.vocab_size, tokens)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def requests(target: TargetModel) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    draws = [
        torch.randint(5, target.info.vocab_size - 8, (4 + place,), generator=generator)
        for place in range(5)
    ]
    return [Request(place, tuple(draw.tolist()), 0, NEW) for place, draw in enumerate(draws)]


@pytest.fixture(scope="module")
def known(target: TargetModel, requests: list[Request]) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> prompt and plain text, far beyond any end."""
    endless = copy.copy(target)
    endless.eos_token_ids = ()
    longer = [replace(request, max_new_tokens=NEW + 2 * DEPTH) for request in requests]
    done = Engine(endless, None, DecodeConfig(shape="none")).run(longer)
    return {item.request.tokens: [*item.request.tokens, *item.tokens] for item in done}


def fake(kind: type[Fake], known: dict[tuple[int, ...], list[int]], target: TargetModel) -> Fake:
    return kind(known, target.info.vocab_size)


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_are_counted_as_engines_count_them(
    target: TargetModel,
    requests: list[Request],
    known: dict[tuple[int, ...], list[int]],
    batch: int,
) -> None:
    settings = DecodeConfig(depth=DEPTH, batch_size=batch)
    plain = sorted(
        Engine(target, None, replace(settings, shape="none")).run(requests),
        key=lambda done: done.request.index,
    )
    decoded = [len(done.tokens) - 1 for done in plain]
    assert any(left % (DEPTH + 1) for left in decoded), "some answer must end inside a step"
    right = count_steps(target, fake(AlwaysRight, known, target), plain, DEPTH, settings)
    # what is accepted behind an answer's end counts
    steps = sum(-(-left // (DEPTH + 1)) for left in decoded)
    assert (right.steps, right.drafted, right.accepted) == (steps, DEPTH * steps, DEPTH * steps)
    assert right.by_position == [steps] * DEPTH
    assert right.length == 1 + DEPTH
    wrong = count_steps(target, fake(AlwaysWrong, known, target), plain, DEPTH, settings)
    assert (wrong.steps, wrong.accepted, wrong.by_position) == (sum(decoded), 0, [0] * DEPTH)


class StandIn:
    """The engine: our decoder with other drafters, spoiled texts, or an error. Stands where `serve`
    stands."""

    def __init__(
        self,
        target: TargetModel,
        drafters: dict[str, Any],
        errors: dict[str, str] | None = None,
        spoil: int = 0,
    ) -> None:
        self.target, self.drafters, self.errors, self.spoil = target, drafters, errors or {}, spoil
        self.requests: list[dict[str, Any]] = []

    def __call__(
        self, process: Any, request: dict[str, Any], device: Any, what: str
    ) -> list[ServedMode]:
        self.requests.append(request)
        return [
            self.one(mode, request, batch)
            for mode in request["modes"]
            for batch in request["batches"]
        ]

    def one(self, mode: dict[str, Any], request: dict[str, Any], batch: int) -> ServedMode:
        name = mode["name"]
        if name in self.errors:
            return ServedMode(name, "9.9", batch=batch, error=self.errors[name])
        asked = [
            Request(int(item["id"]), tuple(item["tokens"]), 0, item["max_new_tokens"])
            for item in request["prompts"]
        ]
        depth = 0 if mode["speculative"] is None else mode["speculative"]["num_speculative_tokens"]
        found = decode(self.target, self.drafters.get(name), asked, depth, batch)
        tokens = [list(line) for line in found.tokens]
        if self.spoil and depth:
            tokens[1][self.spoil] = (tokens[1][self.spoil] + 1) % 40
        counts = found.counts
        acceptance: dict[str, Any] = {
            "drafts": counts.steps,
            "draft_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
        }
        answers: list[Any] = [
            {"id": str(item.index), "repeat": 0, "tokens": text, "steps": steps, "seconds": {}}
            for item, text, steps in zip(asked, tokens, found.steps, strict=True)
        ]
        acceptance["accepted_by_position"] = counts.by_position
        return ServedMode(name, "9.9", batch, answers, acceptance, wall=1.0)


def check(
    monkeypatch: pytest.MonkeyPatch,
    stand_in: StandIn,
    ours: Any,
    requests: list[Request],
    **options: Any,
) -> Any:
    monkeypatch.setattr(vllm_process, "serve", stand_in)
    served = Served("head", "eagle3", ours, Path("exported"), TOLD, **options)
    return live_check(stand_in.target, [served], requests, PROCESS, (1, 2))


def test_an_engine_that_drafts_as_we_do_passes(
    monkeypatch: pytest.MonkeyPatch,
    target: TargetModel,
    requests: list[Request],
    known: dict[tuple[int, ...], list[int]],
) -> None:
    stand_in = StandIn(target, {"head": fake(AlwaysRight, known, target)})
    rows = check(monkeypatch, stand_in, fake(AlwaysRight, known, target), requests)
    assert [row.batch for row in rows] == [1, 2]
    for row in rows:
        found = row.to_dict()
        assert (found["identical"], found["sequences"], found["identical_to_ours"]) == (5, 5, 5)
        assert (found["answers_with_equal_steps"], found["difference"], found["problems"]) == (
            5,
            0.0,
            [],
        )
        assert found["positions"] == {"ours": [1.0] * DEPTH, "engine": [1.0] * DEPTH}
    asked = stand_in.requests[0]
    assert [mode["speculative"] for mode in asked["modes"]] == [
        None,
        {**TOLD, "model": str(Path("exported").resolve())},
    ]
    text = "\n".join(lines(rows))
    assert "text identical 5/5" in text
    assert "acceptance length 4.000, ours 4.000 (+0.00%)" in text


@pytest.mark.parametrize(
    ("theirs", "place", "cause"),
    [(AlwaysWrong, 1, "the layers that are tapped"), (RightOnce, 2, r"norm_output")],
)
def test_where_acceptance_parts_is_named(
    monkeypatch: pytest.MonkeyPatch,
    target: TargetModel,
    requests: list[Request],
    known: dict[tuple[int, ...], list[int]],
    theirs: type[Fake],
    place: int,
    cause: str,
) -> None:
    stand_in = StandIn(target, {"head": fake(theirs, known, target)})
    for row in check(monkeypatch, stand_in, fake(AlwaysRight, known, target), requests):
        assert row.lossless["identical"] == 5, "the text is right all the same"
        (problem,) = row.problems
        assert f"part at drafted position {place} " in problem
        assert "first in prompt 0 behind answer token 1" in problem
        assert cause in problem
    rows = check(monkeypatch, stand_in, fake(AlwaysRight, known, target), requests, compared=False)
    assert not any(row.problems for row in rows), "a control is not compared"


def test_a_wrong_text_is_a_problem_with_its_margin(
    monkeypatch: pytest.MonkeyPatch,
    target: TargetModel,
    requests: list[Request],
    known: dict[tuple[int, ...], list[int]],
) -> None:
    drafter = fake(SometimesRight, known, target)
    row = check(
        monkeypatch,
        StandIn(target, {"head": drafter}, spoil=4),
        fake(SometimesRight, known, target),
        requests,
    )[0]
    assert (row.lossless["identical"], row.lossless["mismatches"]) == (4, 1)
    assert any(
        problem.startswith("prompt 1, token 4: with the drafter") for problem in row.problems
    )


def test_refusals_and_an_engine_that_cannot_serve_the_target(
    monkeypatch: pytest.MonkeyPatch, target: TargetModel, requests: list[Request]
) -> None:
    rows = check(
        monkeypatch,
        StandIn(target, {}, errors={"head": "ValueError: not registered"}),
        None,
        requests,
    )
    assert [row.problems for row in rows] == [
        ["the engine refuses it: ValueError: not registered"]
    ] * 2
    assert "not registered" in "\n".join(lines(rows))
    with pytest.raises(
        UserError, match=r"vLLM cannot serve the target .* by itself: OSError: no config"
    ):
        check(
            monkeypatch, StandIn(target, {}, errors={"plain": "OSError: no config"}), None, requests
        )
    with pytest.raises(UserError, match="needs prompts"):
        live_check(target, [], [], PROCESS)


def test_the_first_position_that_parts() -> None:
    assert first_position([0.8, 0.5, 0.2], [0.8, 0.5, 0.1]) == 2
    assert first_position([0.8, 0.5, 0.2], [0.795, 0.3, 0.1]) == 1
    assert first_position([0.8, 0.5], [0.8, 0.492]) == 1, (
        "the largest gap, where none is beyond the tolerance"
    )


def test_only_what_was_exported_for_vllm_can_be_served(target: TargetModel, tmp_path: Path) -> None:
    checkpoint = save(target, "eagle", tmp_path / "checkpoint")
    write(target, checkpoint, tmp_path / "vllm", "vllm")
    write(target, checkpoint, tmp_path / "sglang", "sglang")
    served = read_served(tmp_path / "vllm", target)
    assert (served.name, served.kind, served.drafter.kind) == ("vllm", "eagle", "eagle")
    assert served.mode().speculative == {
        "model": str(tmp_path / "vllm"),
        "method": "eagle",
        "num_speculative_tokens": 4,
    }
    with pytest.raises(UserError, match="is for sglang; a live check serves with vLLM"):
        read_served(tmp_path / "sglang", target)
    gguf = tmp_path / "gguf"  # without a config.json, which the other checks read
    gguf.mkdir()
    (gguf / "headstart_export.json").write_text('{"engine": "llama.cpp"}')
    with pytest.raises(UserError, match=r"is for llama\.cpp; a live check serves with vLLM"):
        read_served(gguf, target)
    (tmp_path / "vllm" / "headstart_export.json").unlink()
    with pytest.raises(UserError, match="does not say how it is served"):
        read_served(tmp_path / "vllm", target)


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"verify\.live\.python=<path>"):
        check_folder(LiveConfig(), None, Path("folder"), [])  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"verify\.live\.batches\[0\] must lie in \[1, 65536\]; given: 0"
    ):
        LiveConfig(batches=(0,))
    with pytest.raises(UserError, match=r"verify\.live\.max_new_tokens must lie in \[1, "):
        LiveConfig(max_new_tokens=0)
