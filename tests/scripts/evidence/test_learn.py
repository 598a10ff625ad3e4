"""The report on learning from traffic: its figures, a real server that is asked, and the whole
command on the smallest target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.api.checkpoint import build_config, new_drafter, save_drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from scripts.assets import changed_targets, cpp_headers, drifting
from scripts.assets.conversations import Pair
from scripts.evidence import learn
from scripts.evidence.learn_figures import (
    FROZEN,
    LEARNED,
    RETRAINED,
    cycles,
    over_time,
    shares,
    swaps_of_itself,
)
from scripts.evidence.served import Answer, Ask, ask_all, read_answers
from scripts.tools.common import ROOT, cpu_target
from tests.inference.server.running import MODEL, serving
from tests.inference.tokenizers import save_micro_target
from train.learning.journal import Entry

SMALL = ROOT / "assets" / "tiny-target-small"


def arm(*committed: int, passes: int = 10) -> dict[str, Any]:
    """What a drafter does with a probe for each number of committed tokens."""
    return {"committed": list(committed), "passes": [passes] * len(committed)}


def test_the_shares_of_the_retrained_tau() -> None:
    arms = {FROZEN: arm(15, 15), LEARNED: arm(23, 23), RETRAINED: arm(25, 25)}
    found = shares(arms)
    assert [found[name]["tau"] for name in arms] == [1.5, 2.3, 2.5]
    assert found["by_retrained"] == pytest.approx(2.3 / 2.5)
    assert found["accepted_by_retrained"] == pytest.approx(1.3 / 1.5)
    assert found["regained"] == pytest.approx(0.8)
    assert found["regained_ci95"] == pytest.approx((0.8, 0.8))  # all probes are alike


def test_nothing_is_regained_where_a_training_from_scratch_is_not_better() -> None:
    frozen, retrained = arm(20, 30, 20, 30), arm(21, 29, 30, 20)
    arms = {FROZEN: frozen, LEARNED: arm(24, 24, 24, 26), RETRAINED: retrained}
    found = shares(arms)
    assert found["regained"] is None and found["by_retrained"] == pytest.approx(0.98)


def test_tau_over_time_is_of_the_same_requests() -> None:
    live = [Answer(4 * n + 3, 0.0, passes=10, committed=20 + n) for n in range(4)]
    arms = {FROZEN: arm(11, 13, 15, 17), RETRAINED: arm(30, 30, 40, 40)}
    assert over_time(live, arms, windows=2) == [
        {"through": 8, "learning": 2.05, FROZEN: 1.2, RETRAINED: 3.0},
        {"through": 16, "learning": 2.25, FROZEN: 1.6, RETRAINED: 4.0},
    ]


def test_the_journal_gives_cycles_and_what_they_cost() -> None:
    cost = {"tokens": 100, "seconds": 2.0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("traffic", {"tokens": 7}),
        ("collected", {"tokens": 40}),
        ("trained", cost),
        ("swapped", {"checkpoint": "a"}),
        ("collected", {"tokens": 50}),
        ("trained", cost),
        ("rejected", {"why": "worse"}),
    ]
    found = cycles([Entry(n, 0.0, event, 1, facts) for n, (event, facts) in enumerate(events)])
    assert found == {
        "begun": 2,
        "swapped": 1,
        "rejected": ["worse"],
        "crashed": 0,
        "learnt_from_tokens": 90,
        "trainings": 2,
        "tokens": 200,
        "seconds": 4.0,
    }


def test_a_drafter_is_hardly_ever_swapped_for_itself() -> None:
    pool = {"observed": [[a, 10] for a in range(5, 26)] + [[0, 0]], "depth": 3}
    found = swaps_of_itself([pool], 30, pairs=80, clients=6)
    assert found["comparisons"] == 30 == found["swaps"] + found["found_worse"] + found["open"]
    assert found["swaps"] <= 1 and found["bound"] == 0.01


def test_a_server_is_asked_for_what_is_left(tmp_path: Path) -> None:
    target = cpu_target(save_micro_target(tmp_path / "target"))
    asked = [Ask(n, (10 + n, 17, 12), 8, store=n % 2 == 0) for n in range(7)]
    asked.append(Ask(7, tuple(range(10, 200)), 8, store=True))  # longer than the target's positions
    out = tmp_path / "answers.jsonl"
    decode = DecodeConfig(batch_size=2, max_new_tokens=16, temperature=0.0)
    with serving(Engine(target, None, decode)) as running:
        ask_all(f"{running.base}/v1", MODEL, asked[:3], clients=2, seconds=0.1, out=out)
        with out.open("a") as file:
            file.write('{"number": 3, "at"')  # as a kill leaves it
        assert [one.number for one in read_answers(out)] == [0, 1, 2]
        ask_all(f"{running.base}/v1", MODEL, asked[3:], clients=3, seconds=0.0, out=out)
    found = read_answers(out)
    assert [one.number for one in found] == list(range(8))
    assert "400" in found[7].failure and not any(one.failure for one in found[:7])
    plain = Engine(target, None, decode).generate([ask.prompt for ask in asked[:7]])
    for one, answer in zip(found, plain, strict=False):
        assert one.tokens == tuple(answer.completion.tokens)[:8] and one.at > 0


def test_prompts_drift_and_then_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drifting, "python_pairs", few_pairs)
    drifting.write_prompts(tmp_path, 24)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("*.jsonl")
    }
    domains = {name: {row["domain"] for row in own} for name, own in rows.items()}
    assert domains["python"] == set(drifting.ENGLISH)
    assert domains["drift"] == {*cpp_headers.DOMAINS, *drifting.JSON}
    asked = {name: [str(row["messages"]) for row in own] for name, own in rows.items()}
    assert all(len(own) == len(set(own)) == 24 for own in asked.values())
    before = {*asked["python"], *asked["drift"]}
    assert not {*asked["python"]} & {*asked["drift"]}
    assert {*asked["finetuned"], *asked["merged"]} == before  # each has one half
    assert drifting.json_pairs() == [one for one in few_pairs() if one.domain == "json"]


def few_pairs() -> tuple[Pair, ...]:
    """Stands for what the standard library gives."""
    domains = (*drifting.ENGLISH, *drifting.JSON)
    return tuple(
        Pair(domain, "m", f"m{n}", f"f{n}_{domain}", f"def f{n}(a, b):", f"It adds {n} and {n}.")
        for domain in domains
        for n in range(30)
    )


@pytest.mark.slow
def test_the_whole_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drifting, "python_pairs", few_pairs)
    recipe = changed_targets.Recipe(steps=2, tokens_per_step=512)
    monkeypatch.setattr(learn, "RECIPES", {"finetuned": recipe, "merged": recipe})
    monkeypatch.setattr(learn, "COMPARISONS", 4)
    monkeypatch.setattr(learn, "REFRESH_PROMPTS", 8)
    target = cpu_target(SMALL)
    config = build_config("distilled", {"from_target_layers": [0]})
    fresh = new_drafter("distilled", config, target.info, target.weights, seed=0)
    save_drafter(fresh, tmp_path / "drafter", target.info)
    out, work = tmp_path / "report", tmp_path / "work"
    words = "--requests 40 --minutes 0.1 --clients 2 --tokens 8 --steps 2 --learner-steps 2".split()
    words += "--least-tokens 40 --pairs 20 --phases python finetuned".split()
    words += ["--drafter", str(tmp_path / "drafter"), "--target", str(SMALL)]
    words += ["--work", str(work), "--out", str(out)]
    assert learn.main(words) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert [phase["name"] for phase in content["phases"]] == ["python", "finetuned"]
    totals = content["totals"]
    assert totals["sent"] == totals["answered"] == totals["compared"] == 80
    assert totals["lost"] == totals["mismatches"] == 0
    first, second = content["phases"]
    assert first["refresh"] is None and second["refresh"]["answers"] == 8
    assert second["cost"]["tokens"] >= second["refresh"]["tokens"] > 0
    assert first["probes"] == 8 and first["retraining"]["steps"] == 2
    assert content["holds"]["no_request_lost"]
    assert not content["holds"]["all_answers_as_plain_decoding"]  # too few
    assert "| finetuned |" in out.with_suffix(".md").read_text()
    begun = (work / "phases" / "python" / "served.jsonl").stat().st_mtime
    assert learn.main(words) == 0  # all of it is there
    assert json.loads(out.with_suffix(".json").read_text())["phases"] == content["phases"]
    assert (work / "phases" / "python" / "served.jsonl").stat().st_mtime == begun
    assert learn.main([*words, "--tokens", "9"]) == 2


def test_a_drafter_without_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn.main(["--drafter", str(tmp_path / "x"), "--work", str(tmp_path)]) == 2
    assert "there is no folder" in capsys.readouterr().err
