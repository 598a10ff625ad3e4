"""The search over layers of a target: on problems whose answer is known, on a target, and from the
command line."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from heads.api.checkpoint import build_config, new_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.measure.prompts import load_prompts
from inference.measure.run import quick_tau
from scripts.tools.common import VALIDATION
from scripts.tools.layers.search import (
    Chosen,
    SearchConfig,
    SkippablePart,
    ideal_speedup,
    parts_of,
    search_layers,
)
from scripts.tools.search_layers import main, settings
from tests.inference.decoding.test_lossless import requests
from tests.models import random_target

PARTS = tuple(SkippablePart(layer, "layer", 0.08) for layer in range(10))


def planned(seed: int, parts: tuple[SkippablePart, ...] = PARTS) -> Any:
    """tau of a set whose acceptance falls by every part left out, more if parts near it are gone
    too, and by chance: not what the search's model assumes.
    """
    draw = random.Random(seed)
    worth = [draw.uniform(0.01, 0.5) for _ in parts]
    far = [draw.uniform(0.0, 0.3) for _ in parts]

    def tau(kept: Chosen) -> float:
        loss = sum(w for w, keep in zip(worth, kept, strict=True) if not keep)
        loss += sum(
            t for t, one, two in zip(far, kept, kept[2:], strict=False) if not one and not two
        )
        accepted = math.exp(-loss) * random.Random(str((seed, kept))).uniform(0.9, 1.0)
        return sum(accepted**power for power in range(5))

    return tau


def every_set(tau: Any, config: SearchConfig) -> list[float]:
    """The value of every set there is, best first."""
    values = []
    for kept in itertools.product((False, True), repeat=len(PARTS)):
        cost = config.fixed_cost + sum(
            part.cost for part, keep in zip(PARTS, kept, strict=True) if keep
        )
        if any(kept) and not all(kept) and cost <= config.most_cost:
            values.append(
                tau(kept)
                if config.objective == "tau"
                else ideal_speedup(tau(kept), config.depth, cost)
            )
    return sorted(values, reverse=True)


@pytest.mark.parametrize(("objective", "most_cost"), [("speedup", 1.0), ("tau", 0.61)])
@pytest.mark.parametrize("seed", range(6))
def test_few_trials_come_near_the_best_of_all_sets(
    seed: int, objective: str, most_cost: float
) -> None:
    """50 of a thousand sets; random trials of as many sets do worse."""
    tau = planned(seed)
    config = SearchConfig(50, 4, 0.2, most_cost, objective, seed)
    ranked = every_set(tau, config)
    found = search_layers(PARTS, tau, config)
    assert len(found.trials) == 50 == len({trial.kept for trial in found.trials})
    assert found.best.value >= ranked[len(ranked) // 100], "not among the best hundredth"
    draw = random.Random(seed)
    assert found.best.value >= sum(max(draw.sample(ranked, 50)) for _ in range(20)) / 20


def test_trials_say_what_they_cost() -> None:
    config = SearchConfig(12, 3, 0.1)
    found = search_layers(PARTS, planned(1), config)
    for trial in found.trials:
        assert trial.cost == pytest.approx(0.1 + 0.08 * sum(trial.kept))
        assert trial.speedup == pytest.approx(trial.tau / (1 + 3 * trial.cost)) == trial.value
    again = search_layers(PARTS, planned(1), config)
    assert again == found, "the same seed searches the same way"


def test_limits_hold() -> None:
    found = search_layers(PARTS, planned(2), SearchConfig(20, 4, 0.2, most_cost=0.5))
    assert all(trial.cost <= 0.5 for trial in found.trials)
    assert not any(all(trial.kept) or not any(trial.kept) for trial in found.trials)


def test_a_small_space_is_searched_through_and_ends() -> None:
    parts = PARTS[:3]
    found = search_layers(parts, lambda kept: 1.0 + sum(kept), SearchConfig(40, 2))
    assert len(found.trials) == 6  # all subsets but the empty and the full one


def test_sets_without_attention_are_not_tried() -> None:
    parts = tuple(
        SkippablePart(layer, what, 0.1) for layer in range(3) for what in ("attention", "mlp")
    )
    found = search_layers(parts, lambda kept: 1.0, SearchConfig(40, 2))
    for trial in found.trials:
        assert any(part.attends for part, keep in zip(parts, trial.kept, strict=True) if keep)
    assert len(found.trials) > 20


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(UserError, match=r"search\.evaluations must lie in \[4, "):
        SearchConfig(3)
    with pytest.raises(UserError, match="Did you mean 'speedup'"):
        SearchConfig(objective="sped")
    with pytest.raises(UserError, match="nothing to search among 1 parts"):
        search_layers(PARTS[:1], planned(0), SearchConfig())
    with pytest.raises(UserError, match="Allow a larger cost"):
        search_layers(PARTS, planned(0), SearchConfig(fixed_cost=0.3, most_cost=0.2))


def test_shares_are_of_the_weights_that_a_token_reads() -> None:
    target = random_target("qwen3")
    info = target.info
    parts, head = parts_of(target)
    halves, same = parts_of(target, sublayers=True)
    assert head == same
    assert head + sum(part.cost for part in parts) == pytest.approx(1.0)
    assert [(part.layer, part.what) for part in halves[:3]] == [
        (0, "attention"),
        (0, "mlp"),
        (1, "attention"),
    ]
    assert halves[0].cost + halves[1].cost == pytest.approx(parts[0].cost)
    mlp = 3 * info.hidden_size * info.intermediate_size
    assert halves[1].cost / head == pytest.approx(
        mlp / (info.vocab_size * info.hidden_size), rel=0.02
    )


@pytest.mark.parametrize("kind", ["early_exit", "quantized_self"])
def test_tau_is_measured_by_decoding(kind: str) -> None:
    """The search on a random target of three layers tries them all; tau is the engine's own."""
    target = random_target()
    parts, head = parts_of(target)
    decode, items = DecodeConfig(depth=2, batch_size=4), requests(3, new=10)

    def tau(kept: Chosen) -> float:
        values = settings(kind, parts, kept) | ({"bits": 8} if kind == "quantized_self" else {})
        drafter = new_drafter(kind, build_config(kind, values), target.info, target.weights, 0)
        return quick_tau(target, drafter, items, decode).tau

    found = search_layers(parts, tau, SearchConfig(20, 2, head, objective="tau"))
    assert len(found.trials) == 6
    assert 1.0 <= min(t.tau for t in found.trials) <= found.best.tau <= 3.0
    whole = tau((True, True, True))
    assert whole >= found.best.tau and (
        kind == "quantized_self" or whole == pytest.approx(27 / 9, rel=0.15)
    )


def test_parts_become_a_heads_settings() -> None:
    whole = tuple(SkippablePart(layer, "layer", 0.1) for layer in range(4))
    kept = (True, False, True, True)
    assert settings("distilled", whole, kept) == {"from_target_layers": [0, 2, 3]}
    halves = tuple(
        SkippablePart(layer, what, 0.1) for layer in range(2) for what in ("attention", "mlp")
    )
    assert settings("early_exit", halves, (True, False, True, True)) == {
        "layers": [0, 1],
        "without_attention": [],
        "without_mlp": [0],
    }


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(["--sublayers"], id="sublayers"),
        pytest.param([], id="layers", marks=pytest.mark.slow),
        pytest.param(["--kind", "distilled"], id="distilled", marks=pytest.mark.slow),
    ],
)
def test_the_script_writes_a_recipe_that_builds(tmp_path: Path, extra: list[str]) -> None:
    asked = (
        "--per-domain 1 --held-out 1 --tokens 8 --evaluations 5 --depth 2 --domain code "
        "--device cpu"
    ).split()
    assert main([*asked, "--out", str(tmp_path), *extra]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["trials"]) == 5
    # a measurement has other prompts
    assert set(report["searched_on"]) <= {prompt.id for prompt in load_prompts(VALIDATION)}
    assert set(report["held_out"]) == {"found", "evenly spread", "first layers"}
    costs = [row["cost"] for row in report["held_out"].values()]
    if "--sublayers" not in extra:  # halves of layers may cost less than any whole one
        assert max(costs) <= costs[0] + 1e-4, "compared at no higher cost"
    (recipe,) = (tmp_path / "head").glob("*.yaml")  # as HEADSTART_CONF finds it
    values = yaml.safe_load(recipe.read_text())
    kind = values.pop("kind")
    assert recipe.stem == f"{kind}_layers" and all(values.values())
    build_config(kind, values)
    best = max(report["trials"], key=lambda row: row["ideal_speedup"])
    assert {name: best[name] for name in values} == values


def test_the_script_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--domain", "poetry", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert (
        "no prompts of domain 'poetry'; there are: code, explain, json, reference, rewrite, summarise"
        in capsys.readouterr().err
    )
    assert main(["--kind", "distilled", "--sublayers"]) == 2
    assert "takes whole layers" in capsys.readouterr().err
