"""The report on our drafters and those of `speculators`, without the library: what is kept is found
by what decided it, and a kind's rows take the place of its earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.decoding.config import DecodeConfig
from inference.manifest import write_json
from inference.measure.metrics import Totals
from inference.measure.prompts import Prompt
from scripts.evidence import peers, sides
from scripts.evidence.common import settings_of
from scripts.evidence.peers import Contest
from scripts.evidence.small_targets import EXPERIMENT, PLACES, Place
from tests.train.micro_run import prepare


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = prepare(tmp_path_factory.mktemp("micro"))
    prompts = folder / "prompts.jsonl"
    return Place(folder / "target", folder / "answers", prompts, prompts)


def test_their_training_is_done_again_with_other_flags(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest, done = Contest("python", place, tmp_path, 1, 1), []

    def train(
        setting: sides.Setting, kind: str, name: str, words: list[str], seed: int, out: Path
    ) -> dict[str, int]:
        done.append((kind, words, seed))
        write_json(out / "weights.json", words)
        return {"steps": 1}

    monkeypatch.setattr(contest, "train_theirs", train)
    first = contest.trained("eagle3", "speculators", 1e-3, 0)
    assert contest.trained("eagle3", "speculators", 1e-3, 0) == first
    sizes = ["--num-layers", "1", "--full-attention-indices", "0"]
    assert done == [("eagle3", [*sizes, "--lr", "0.001", "--muon-lr", "0.001"], 0)]
    other = "float32" if contest.setting.dtype == "bfloat16" else "bfloat16"
    contest.setting = replace(contest.setting, dtype=other)
    assert contest.trained("eagle3", "speculators", 1e-3, 0) != first
    monkeypatch.setattr(peers, "EPOCHS", 3)
    contest.setting = replace(contest.setting, dtype=sides.fast_dtype())
    assert contest.trained("eagle3", "speculators", 1e-3, 0) != first
    assert len(done) == 3


@pytest.mark.parametrize(
    ("heads", "losses"),
    [
        (("dflash", "dspark", "dflare"), peers.DIVERGENCES),
        (("domino", "dflash2", "treeflash", "lilicorr"), ["head.ce=1", "head.kl=0", "head.tv=0"]),
        (("jetspec",), ["head.ce=0", "head.kl=1", "head.tv=0"]),
    ],
    ids=["divergences", "cross entropy", "KL"],
)
def test_block_drafters_have_the_losses_and_initial_values_that_were_measured_as_best(
    heads: tuple[str, ...], losses: list[str]
) -> None:
    for head in heads:
        default = settings_of("train", f"head={head}").head
        assert default == settings_of("train", f"head={head}", *losses, peers.SMALL_START).head


def test_p_eagle_has_the_same_sizes_on_both_sides(place: Place, tmp_path: Path) -> None:
    contest = Contest("python", place, tmp_path, 1, 1)
    head = settings_of("train", EXPERIMENT, *peers.OURS["peagle"]).head.config
    words = " ".join(contest.their_flags("peagle", peers.LIBRARY))
    assert f"--num-layers {head.num_layers} " in words
    assert words.endswith(f"--num-depths {head.depths} --max-anchors {peers.TOKENS}")


def test_the_control_has_as_many_anchors(place: Place, tmp_path: Path) -> None:
    contest = Contest("python", place, tmp_path, 1, 1)
    for kind in peers.BLOCK_KINDS:
        own = settings_of("train", EXPERIMENT, *peers.OURS[kind]).head.config.num_anchors
        for side, anchors in ((peers.LIBRARY, peers.ANCHORS), (peers.CONTROL, peers.ROWS * own)):
            assert contest.their_flags(kind, side)[-2:] == ["--max-anchors", str(anchors)]
        assert peers.ROWS * own > peers.ANCHORS


@pytest.mark.parametrize(
    ("best", "tried"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [1, 2, 3]), (3, [1, 2, 3])]
)
def test_rates_are_swept_from_the_middle_to_the_best(best: int, tried: list[int]) -> None:
    found = peers.swept(peers.RATES, lambda rate: -abs(peers.RATES.index(rate) - best))
    assert [*found] == [peers.RATES[at] for at in tried]
    assert peers.best_rate(found) == peers.RATES[best]


def test_a_sweep_ends_at_the_first_rate_that_is_worse() -> None:
    scores = {1.0: 3.0, 2.0: 1.0, 3.0: 2.0, 4.0: 1.5, 5.0: 0.0, 6.0: 0.0}
    assert [*peers.swept([*scores], scores.__getitem__)] == [2.0, 3.0, 4.0]


def test_a_best_rate_at_the_edge_is_marked_and_costs_are_told(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = Contest("python", place, tmp_path, 1, 1)
    scores = {"ours": peers.RATES[-1], "speculators": peers.RATES[1]}
    facts = {"steps": 5, "tokens": 1000, "trained_weights": 2_000_000}
    told = {"optimizer": "muon", "scheduler_type": "linear", "loss_fn": "kl_div"}
    theirs = facts | {"validation": {"loss_epoch": 1.25}, "settings": told}

    def best(kind: str, side: str) -> tuple[dict[float, float], list[Path]]:
        return {rate: float(rate == scores[side]) for rate in peers.RATES}, [Path(side)]

    monkeypatch.setattr(contest, "best", best)
    monkeypatch.setattr(contest, "ways", lambda _: {})
    monkeypatch.setattr(contest, "losses", lambda kind, rates: {"0.003": 1.25})
    monkeypatch.setattr(contest, "taps", lambda _, side: [2, 10, 17] if side == "ours" else [1])
    monkeypatch.setattr(contest, "facts", lambda at: facts if at.name == "ours" else theirs)
    _, trainings = peers.compare(contest, "eagle3")
    assert trainings["ours"]["at_edge"] and not trainings["speculators"]["at_edge"]
    content = {"rows": [], "trainings": {"embedded": {"eagle3": trainings}}}
    content |= {"command": "c"}
    page = "\n".join(peers.markdown(content))
    assert (
        f"| embedded | eagle3 | ours | 0.03 (edge) | 5 | 1,000 | 2.00 M | {contest.setting.dtype} | "
        f"2, 10, 17 | - | - | `{' '.join(peers.OURS['eagle3'])}` |" in page
    )
    assert (
        f"| 0.003 | 5 | 1,000 | 2.00 M | {contest.setting.dtype} | 1 | - | 1.250 | muon, linear, kl_div |"
        in page
    )


def test_the_report_keeps_other_kinds_and_says_its_command(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, "embedded", place)

    def compare(contest: Contest, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        side = {"tau": 2.0, "tau_ci95": [1.9, 2.1]}
        row = {"temperature": 0.0, "rule": "match", "depth": 3, "ours": side, "theirs": side}
        facts: dict[str, Any] = {
            "rate": 1e-3,
            "at_edge": True,
            "steps": 5,
            "tokens": 9,
            "trained_weights": 7,
        }
        facts |= {"taps": [1], "dtype": "float32", "recipe": ["head=dflash"]}
        return [{**row, "ratio": 1.0, "ratio_ci95": [0.9, 1.1]}] * 2, {"ours": facts}

    monkeypatch.setattr(peers, "compare", compare)
    monkeypatch.setattr(peers, "controls", lambda *_: [])
    monkeypatch.setattr(peers, "confirm", lambda *given: compare(*given)[0][:1])
    out = tmp_path / "report"
    words = ["--python", "P", "--targets", "embedded", "--work", str(tmp_path), "--out", str(out)]
    for kind in ("eagle3", "dflash", "eagle3"):
        assert peers.main([*words, "--threads", "1", "--prompts", "1", "--kinds", kind]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert [row["kind"] for row in content["rows"]] == ["dflash"] * 2 + ["eagle3"] * 2
    assert set(content["trainings"]["embedded"]) == {"dflash", "eagle3"}
    assert [row["kind"] for row in content["confirmed"]] == ["dflash", "eagle3"]
    assert "--kinds eagle3" in content["command"]
    assert f"Made by `{content['command']}`" in out.with_suffix(".md").read_text()


def test_drafters_are_confirmed_on_prompts_that_no_recipe_was_chosen_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = Contest("python", place, tmp_path, 1, 1)
    chosen = {prompt.id for prompt in contest.measuring}
    assert len(contest.further) == len(chosen)
    assert not chosen & {prompt.id for prompt in contest.further}
    asked: list[str] = []

    def totals(checkpoint: Path, name: str, prompts: list[Prompt], decode: DecodeConfig) -> Totals:
        asked.append(name)
        assert prompts == contest.further
        tau = {"ours": 3.0, peers.LIBRARY: 2.0}[checkpoint.name]
        passes = np.array([10.0])
        sums = dict.fromkeys(("accepted", "refused", "reached"), np.zeros((1, 1)))
        return Totals(["a"], ["d"], committed=tau * passes, passes=passes, seconds={}, **sums)

    monkeypatch.setattr(contest, "best", lambda kind, side: ({}, [Path(side)]))
    monkeypatch.setattr(contest, "totals", totals)
    rows = peers.confirm(contest, "dflash")
    assert [row["ratio"] for row in rows] == [2.0] * len(peers.CONFIRMED)
    assert len({*asked}) == len(peers.CONFIRMED)
    lines = peers.confirmed_lines([{"target": "d", "kind": "dflash", **row} for row in rows])
    assert "| d | dflash | 1.0 | block | 7 | 3.00" in "\n".join(lines)


def test_the_control_has_the_prompts_of_the_same_documents(place: Place, tmp_path: Path) -> None:
    contest = Contest("python", place, tmp_path, 1, 1)
    rows = {}
    for setting in (contest.setting, contest.prompted):
        setting.write_rows([([1, 2, 3], [0, 0, 1])])
        lines = (setting.work / "rows.jsonl").read_text().splitlines()
        rows[setting.prompts_too] = [json.loads(line) for line in lines]
    assert rows[True][-1] == rows[False][-1], "validation stays as it is"
    for prompted, plain in zip(rows[True][:-1], rows[False][:-1], strict=True):
        assert prompted["tokens"] == plain["tokens"]
        assert prompted["mask"] == [0] + [1] * (len(plain["tokens"]) - 1)
        assert sum(plain["mask"]) < len(plain["mask"]) - 1


def test_the_control_is_compared_with_both_sides(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(tau - 1) of 2 against 1 and 0.5, so that the ratios are 2 and 2."""
    contest = Contest("python", place, tmp_path, 1, 1)
    trained: list[tuple[str, float, int]] = []

    def checkpoint(kind: str, side: str, rate: float, seed: int) -> Path:
        trained.append((side, rate, seed))
        return Path(side)

    def measured(path: Path) -> list[tuple[peers.Way, Totals]]:
        tau = {"ours": 3.0, peers.CONTROL: 2.0, peers.LIBRARY: 1.5}[path.name]
        sums = dict.fromkeys(("accepted", "refused", "reached"), np.zeros((2, 1)))
        passes = np.array([10, 20])
        totals = Totals(
            ["a", "b"], ["d", "d"], committed=tau * passes, passes=passes, seconds={}, **sums
        )
        return [((1.0, "block", 7), totals)]

    def score(path: Path) -> float:
        return float(trained[-1][1] == 1e-2)

    monkeypatch.setattr(contest, "trained", checkpoint)
    monkeypatch.setattr(contest, "measured", measured)
    monkeypatch.setattr(contest, "score", score)
    (row,) = peers.controls(contest, "eagle3", [0, 2])
    assert [each for each in trained if each[0] == peers.CONTROL] == [
        (peers.CONTROL, 1e-2, seed) for seed in (0, 2)
    ]
    assert row["against_ours"]["ratio"] == row["against_own"]["ratio"] == 2.0
    assert "| d | eagle3 | 1.0 | block | 7 | 2.00" in "\n".join(
        peers.control_lines([{"target": "d", "kind": "eagle3", **row}])
    )
