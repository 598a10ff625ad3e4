"""Schedules are pure functions of the step; only matrices decay."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from heads.api.errors import UserError
from tests.heads.micro import micro_target
from tests.heads.recipes import build
from train.optim import OptimConfig, ScheduleConfig, learning_rate, make_optimizer, parameter_groups


def rates(total: int, **schedule: object) -> list[float]:
    return [learning_rate(step, total, 2.0, ScheduleConfig(**schedule)) for step in range(total)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_rises_to_the_peak_and_nothing_exceeds_it(kind: str) -> None:
    found = rates(100, kind=kind, warmup=0.1, min_ratio=0.1)
    assert found[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert max(found) == found[10] == pytest.approx(2.0)


def test_each_kind_ends_where_it_should() -> None:
    assert rates(50, kind="constant", min_ratio=0.1)[-1] == 2.0
    for kind in ("cosine", "linear", "wsd"):
        assert rates(50, kind=kind, min_ratio=0.1)[-1] == pytest.approx(0.2)
        assert rates(50, kind=kind, min_ratio=0.0)[-1] == pytest.approx(0.0)


def test_the_middle_of_cosine_and_linear_is_halfway() -> None:
    assert rates(101, kind="cosine", warmup=0, min_ratio=0.0)[50] == pytest.approx(1.0)
    assert rates(101, kind="linear", warmup=0, min_ratio=0.0)[25] == pytest.approx(1.5)
    assert rates(101, kind="cosine", warmup=0, min_ratio=0.0)[25] > 1.5


def test_wsd_stays_at_the_peak_until_its_last_part() -> None:
    found = rates(100, kind="wsd", warmup=5, decay=0.2, min_ratio=0.0)
    assert found[5:80] == [2.0] * 75
    assert all(earlier > later for earlier, later in pairwise(found[80:]))


def test_warm_up_counts_steps_from_one_on_and_shares_below() -> None:
    assert ScheduleConfig(warmup=7).warmup_steps(1000) == 7
    assert ScheduleConfig(warmup=0.25).warmup_steps(1000) == 250
    assert ScheduleConfig(warmup=0).warmup_steps(1000) == 0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_parts_of_a_schedule_are_the_whole_but_for_their_climb(kind: str) -> None:
    whole = rates(120, kind=kind, warmup=0.05)
    parts = [
        rates(40, kind=kind, warmup=0.05, begin=part / 3, end=(part + 1) / 3) for part in range(3)
    ]
    assert parts[0] == pytest.approx(whole[:40])
    for part in (1, 2):
        assert parts[part][2:] == pytest.approx(whole[40 * part + 2 : 40 * (part + 1)])
        assert parts[part][0] == pytest.approx(whole[40 * part] / 2)  # two steps of climbing
    assert rates(40, kind=kind, warmup=0.0, begin=1 / 3, end=2 / 3) == pytest.approx(
        rates(120, kind=kind, warmup=0.0)[40:80]
    )


def test_short_runs_have_a_rate_at_every_step() -> None:
    for kind in ("cosine", "linear", "constant", "wsd"):
        assert all(rate > 0 for total in (1, 2, 3) for rate in rates(total, kind=kind))


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module[0].bias.requires_grad_(False)
    matrices, vectors = parameter_groups(module, OptimConfig(weight_decay=0.1))
    assert (matrices["weight_decay"], [p.shape for p in matrices["params"]]) == (
        0.1,
        [torch.Size([3, 3])],
    )
    assert (vectors["weight_decay"], len(vectors["params"])) == (0.0, 2)


STACKS = ("residual_bias", "base_kernel", "fusion.mix", "mask_hidden", "relative_slot_bias")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("recipe", ["medusa", "dflash2", "dflare", "peagle", "lilicorr"])
def test_stacks_of_vectors_do_not_decay(recipe: str, kind: str) -> None:
    drafter = build(recipe, micro_target(torch.float32))
    trained = {name: value for name, value in drafter.named_parameters() if value.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(drafter, OptimConfig(kind=kind, weight_decay=0.1)).step()
    kept = {name for name, value in trained.items() if torch.equal(value, before[name])}
    vectors = {name for name, value in trained.items() if value.ndim < 2 or name.endswith(STACKS)}
    assert kept == vectors and any(name.endswith(STACKS) for name in kept)


def test_nothing_to_train_is_said() -> None:
    with pytest.raises(UserError, match="no trainable weights"):
        make_optimizer(nn.Module(), OptimConfig())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: OptimConfig(lr=0.0), "optim.lr must be above 0"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), r"optim.betas\[1\] must lie in \[0, 1\)"),
        (lambda: OptimConfig(clip=-1.0), r"optim.clip must lie in \[0, "),
        (lambda: ScheduleConfig(kind="cosin"), "Did you mean 'cosine'"),
        (lambda: ScheduleConfig(warmup=-1), r"schedule.warmup must lie in \[0, "),
        (lambda: ScheduleConfig(min_ratio=1.5), r"schedule.min_ratio must lie in \[0, 1\]"),
        (lambda: ScheduleConfig(decay=0.0), "schedule.decay must be above 0"),
        (lambda: ScheduleConfig(begin=0.5, end=0.5), "0 <= begin < end <= 1; given: 0.5 and 0.5"),
    ],
)
def test_wrong_values_are_refused(made: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made()  # type: ignore[operator]
