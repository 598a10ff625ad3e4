"""Replays: the work of a real drafter, accepted exactly as recorded, in any batch; negative
controls notice when it is not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.distilled import Config as DistilledConfig
from heads.eagle3 import Config as Eagle3Config
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.measure.answers import Record
from inference.report.model import write_report
from inference.target.model import TargetModel
from scripts.tools.replay import ReplayDrafter, Trajectory, read_trajectories
from tests.inference.example_report import example_report
from tests.models import VOCAB, random_target

DECODE = DecodeConfig(depth=3, max_new_tokens=40)
TRAJECTORY = Trajectory((3, 0, 1, 1, 2, 0, 3))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = random_target()
    model.eos_token_ids = ()
    return model


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 9, 3, 7)
    return [
        Request(n, tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()), n, 40)
        for n, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def plain(target: TargetModel, requests: list[Request]) -> list[list[int]]:
    done = {c.request.index: c.tokens for c in Engine(target, None, DECODE).run(requests)}
    return [done[request.index] for request in requests]


def replayed(
    target: TargetModel,
    requests: list[Request],
    plain: list[list[int]],
    kind: str,
    trajectory: Trajectory,
) -> ReplayDrafter:
    configs: dict[str, Any] = {"eagle3": Eagle3Config(), "distilled": DistilledConfig(num_layers=1)}
    inner = new_drafter(kind, configs[kind], target.info, target.weights, seed=0)
    texts = [[*request.tokens, *tokens] for request, tokens in zip(requests, plain, strict=True)]
    return ReplayDrafter(inner, texts, [len(r.tokens) for r in requests], trajectory, VOCAB)


@pytest.mark.parametrize("kind", ["eagle3", "distilled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_acceptance_is_the_recorded_one(
    target: TargetModel, requests: list[Request], plain: list[list[int]], kind: str, batch: int
) -> None:
    drafter = replayed(target, requests, plain, kind, TRAJECTORY)
    done = list(Engine(target, drafter, replace(DECODE, batch_size=batch)).run(requests))
    for completion in done:
        number = completion.request.index
        assert completion.tokens == plain[number]  # whatever is replayed, the text is the target's
        found = [record.accepted for record in completion.passes][:-1]
        wanted = [
            TRAJECTORY.accepted[(number + i) % 7] for i in range(len(found))
        ]  # each text begins elsewhere
        assert found == wanted
        assert len(found) > 7  # all of the trajectory, and round again
    assert drafter.followed(done, 3)
    done[0].passes[1] = replace(done[0].passes[1], accepted=2 - done[0].passes[1].accepted)
    assert not drafter.followed(done, 3)


def test_a_trajectory_deeper_than_the_draft_is_cut(
    target: TargetModel, requests: list[Request], plain: list[list[int]]
) -> None:
    drafter = replayed(target, requests[:1], plain[:1], "eagle3", Trajectory((9, 1)))
    done = list(Engine(target, drafter, DECODE).run(requests[:1]))
    assert [record.accepted for record in done[0].passes][:6] == [3, 1, 3, 1, 3, 1]
    assert drafter.followed(done, 3)


def test_the_real_drafter_does_its_work(
    target: TargetModel, requests: list[Request], plain: list[list[int]]
) -> None:
    """Every pass runs the inner drafter's propose and commit, with the states that it would get
    when decoding alone.
    """
    drafter = replayed(target, requests[:1], plain[:1], "eagle3", TRAJECTORY)
    inner, calls = drafter.drafter, []
    for name in ("propose", "commit"):
        real = getattr(inner, name)
        setattr(inner, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    (done,) = list(Engine(target, drafter, DECODE).run(requests[:1]))
    steps = calls[calls.index("propose") :]
    assert steps == ["propose", "commit"] * len(done.passes)
    assert any(
        module is inner for module in drafter.modules()
    )  # so that its linears are packed like any drafter's


def test_a_text_that_the_target_does_not_write_is_noticed(
    target: TargetModel, requests: list[Request], plain: list[list[int]]
) -> None:
    wrong = [[*plain[0][:10], *((token + 1) % VOCAB for token in plain[0][10:])]]
    drafter = replayed(target, requests[:1], wrong, "eagle3", TRAJECTORY)
    done = list(Engine(target, drafter, DECODE).run(requests[:1]))
    assert done[0].tokens == plain[0]
    assert not drafter.followed(done, 3)


def test_trees_are_refused(
    target: TargetModel, requests: list[Request], plain: list[list[int]]
) -> None:
    drafter = replayed(target, requests, plain, "eagle3", TRAJECTORY)
    tree = replace(DECODE, shape="tree", choices=((0,), (1,)))
    with pytest.raises(UserError, match="a replay drafts chains"):
        list(Engine(target, drafter, tree).run(requests[:1]))


def test_trajectories_are_recorded_and_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"fingerprint": "x"}]
    for prompt in ("a", "b"):
        passes = [(2, 3, True), (0, 1, True), (1, 2, False)]
        rows.append(asdict(Record("eagle3", prompt, 0, [], passes, {})))
        rows.append(asdict(Record("baseline", prompt, 0, [], [(0, 1, False)], {})))
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = Trajectory.of_records(tmp_path, "eagle3")
    # last passes are left out
    assert (found.accepted, found.source) == ((2, 0, 2, 0), "eagle3, 2 answers")
    assert found.tau == 2.0
    assert Trajectory.of_records(tmp_path, "eagle3", most=3).accepted == (2, 0, 2)
    write_report(example_report(), tmp_path / "report.json")
    said = Trajectory.of_records(tmp_path, "eagle3").source
    assert said == "eagle3, 2 answers of assets/tiny-target, chain 4, temperature 0"
    with pytest.raises(UserError, match=r"no records of an arm 'eagle'\. Did you mean 'eagle3'"):
        Trajectory.of_records(tmp_path, "eagle")
    with pytest.raises(UserError, match=r"holds no records\.jsonl"):
        Trajectory.of_records(tmp_path / "nowhere", "eagle3")
    path = tmp_path / "trajectories.json"
    path.write_text(json.dumps({"a": {"accepted": [1, 2], "source": "here"}}), encoding="utf-8")
    assert read_trajectories(path) == {"a": Trajectory((1, 2), "here")}
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="holds no trajectories"):
        read_trajectories(path)
    with pytest.raises(UserError, match="a trajectory needs one accepted length"):
        Trajectory((1, -1))
