"""Refreshing: from a checkpoint for the same target or a changed one, all weights or low-rank
updates, merged on saving."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads.api.checkpoint import load_drafter, new_drafter, read_config, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.nn.matrices import matrices
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.manifest import file_entry, write_manifest
from inference.measure.run import quick_tau
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.micro import MicroTarget, micro_target, packed_batch
from tests.heads.recipes import build
from tests.train import micro_run
from tests.train.micro_run import prepare, settings
from train.refresh import RefreshConfig, load_start, merge_updates, prepare_start, require_reached
from train.run import train

DOCUMENTS = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]
HEAD = {"from_target_layers": (0, 1)}


@pytest.fixture(scope="module")
def target() -> MicroTarget:
    return micro_target(torch.float32)


def make(target: MicroTarget, kind: str = "distilled", **options: Any) -> TrainableDrafter:
    config = get_kind(kind).config_class(**options)
    return new_drafter(
        kind, config, target.info, target.weights, 0, torch.arange(target.info.vocab_size)
    ).float()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its answers, and a drafter in before/drafter/best that knows it."""
    folder = prepare(tmp_path_factory.mktemp("before"))
    train(
        out=folder / "drafter",
        **settings(folder, kind="distilled", head=HEAD, max_steps=4, eval_every=4, lr=1e-4),
    )
    return folder


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target after a change of its last MLP of low rank, as fine-tuning makes it, with its
    own answers."""
    plain = micro_run.save_micro_target

    def save_changed(folder: Path) -> Path:
        plain(folder)
        tensors, generator = (
            load_file(folder / "model.safetensors"),
            torch.Generator().manual_seed(1),
        )
        for name, value in tensors.items():
            if "layers.1.mlp" in name:
                up, down = (torch.randn(size, 2, generator=generator) for size in value.shape)
                tensors[name] = value + 0.04 * up @ down.T
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_run, "save_micro_target", save_changed)
        return prepare(tmp_path_factory.mktemp("after"))


def tau(folder: Path, drafter: TrainableDrafter, target: TargetModel) -> float:
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(10, target.info.vocab_size, (24, 5), generator=generator).tolist()
    requests = [Request(i, tuple(prompt), i, 24) for i, prompt in enumerate(prompts)]
    return quick_tau(target, drafter, requests, DecodeConfig(depth=3, batch_size=8)).tau


def refreshed(before: Path, after: Path, out: Path, rank: int, **options: Any) -> dict[str, Any]:
    refresh = RefreshConfig(str(before / "drafter" / "best"), other_target=True, lora_rank=rank)
    changes = {"max_steps": 60, "eval_every": 20, "lr": 5e-3, "refresh": refresh} | options
    return train(out=out, **settings(after, kind="distilled", head=HEAD, **changes))


@pytest.mark.parametrize(
    ("rank", "lr", "share"), [(4, 2e-2, 0.8), (0, 3e-3, 0.05)], ids=["updates", "all weights"]
)
def test_a_stale_drafter_is_restored(
    before: Path, after: Path, tmp_path: Path, rank: int, lr: float, share: float
) -> None:
    """What a change of the target cost comes back in a short training on the new answers: most of
    it where the training may change no more than the change did; with all weights free, sixty
    answers teach more slowly.
    """
    old, new = (
        TargetModel.load(TargetConfig(str(folder / "target"))) for folder in (before, after)
    )
    drafter = load_drafter(before / "drafter" / "best", old.info, old.weights)
    fresh_tau = tau(before, drafter, old)
    stale = new_drafter("distilled", drafter.config, new.info, new.weights, 0)
    load_start(stale, before / "drafter" / "best", new.info, other_target=True)
    stale_tau = tau(after, stale, new)
    assert stale_tau < fresh_tau - 1.2, "the target has not changed enough for this test"
    refreshed(before, after, tmp_path, rank, lr=lr, max_steps=150, eval_every=50)
    best = load_drafter(tmp_path / "best", new.info, new.weights)
    assert tau(after, best, new) > stale_tau + share * (fresh_tau - stale_tau)


def test_a_head_that_is_not_trained_becomes_the_new_targets(
    before: Path, after: Path, tmp_path: Path
) -> None:
    old, new = (
        TargetModel.load(TargetConfig(str(folder / "target"))) for folder in (before, after)
    )
    with torch.no_grad():  # the embedding too, which is the same weight
        new.weights.lm_head.mul_(1.5)
    config = get_kind("eagle3").config_class(taps=(0, 1), draft_vocab_size=0)
    drafter = new_drafter("eagle3", config, old.info, old.weights, 0)
    save_drafter(drafter, tmp_path, old.info)
    fresh = new_drafter("eagle3", config, new.info, new.weights, 0)
    load_start(fresh, tmp_path, new.info, other_target=True)
    assert torch.equal(fresh.lm_head.weight, new.weights.lm_head.to(fresh.lm_head.weight.dtype))
    again = new_drafter("eagle3", config, new.info, new.weights, 0).float()
    was = str(before / "target")  # the difference of the targets is not added to it once more
    refresh = RefreshConfig(str(tmp_path), other_target=True, old_target=was)
    prepare_start(again, refresh, new.info, 0, TargetConfig(str(after / "target")))
    assert torch.equal(again.lm_head.weight, new.weights.lm_head.to(again.lm_head.weight.dtype))


def test_the_result_is_an_ordinary_checkpoint(before: Path, after: Path, tmp_path: Path) -> None:
    """Plain names, the new target's facts, the frozen parts untouched, every linear layer changed
    by a matrix of the rank."""
    refreshed(before, after, tmp_path, rank=2, max_steps=6, eval_every=6)
    old = load_file(before / "drafter" / "best" / "model.safetensors")
    new = load_file(tmp_path / "best" / "model.safetensors")
    assert list(old) == list(new)
    content, target = (
        read_config(tmp_path / "best"),
        TargetModel.load(TargetConfig(str(after / "target"))),
    )
    assert content["target"]["revision"] == target.info.revision
    for name, value in new.items():
        change = value.double() - old[name].double()
        if "proj" in name or name == "lm_head.weight":
            ranks = torch.linalg.svdvals(change)
            assert int((ranks > 1e-4 * ranks[0]).sum()) == 2, name
        else:
            assert float(change.abs().max()) == 0, name


def test_a_refresh_continues_bit_for_bit(
    before: Path, after: Path, tmp_path: Path, stopping: AbstractContextManager[None]
) -> None:
    options = {"max_steps": 8, "eval_every": 4}
    refreshed(before, after, tmp_path / "whole", 2, **options)
    with stopping:
        refreshed(before, after, tmp_path / "halves", 2, **options)
    with pytest.raises(UserError, match="state of another training"):
        refreshed(before, after, tmp_path / "halves", 3, **options)
    refreshed(before, after, tmp_path / "halves", 2, **options)
    one, two = (tmp_path / name / "best" / "model.safetensors" for name in ("whole", "halves"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("distilled", {"tie_embeddings": True}), ("pard", {"depth": 3}), ("eagle3", {"ttt_steps": 2})],
)
def test_merged_weights_compute_what_the_updates_do(
    target: MicroTarget, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    plain = make(target, kind, **options)
    save_drafter(plain, tmp_path, target.info)
    config = RefreshConfig(str(tmp_path), lora_rank=3, lora_alpha=5.0)
    drafter = make(target, kind, **options)
    prepare_start(drafter, config, target.info, 1, TargetConfig("-"))
    batch = packed_batch(target, drafter.needs, [DOCUMENTS])
    before = drafter.train_logits(batch, 2)
    torch.testing.assert_close(before, plain.train_logits(batch, 2))
    assert all(("lora" in name) is p.requires_grad for name, p in drafter.named_parameters())
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                parameter.copy_(
                    0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
                )
    plain.load_state_dict(merge_updates(drafter.state_dict(), config), strict=True)
    torch.testing.assert_close(
        drafter.train_logits(batch, 2), plain.train_logits(batch, 2), rtol=1e-4, atol=1e-4
    )
    assert float((before[0] - plain.train_logits(batch, 2)[0]).abs().max()) > 0.1
    require_reached(drafter, drafter.loss(batch).loss_sum)
    assert all(p.grad is None for p in drafter.parameters())


def test_a_head_that_is_not_trained_gets_no_updates(target: MicroTarget, tmp_path: Path) -> None:
    """It is the target's, and follows it."""
    for trained in (False, True):
        given = {"ttt_steps": 2, "train_lm_head": trained}
        save_drafter(make(target, "eagle3", **given), tmp_path, target.info)
        drafter = make(target, "eagle3", **given)
        config = RefreshConfig(str(tmp_path), lora_rank=3)
        prepare_start(drafter, config, target.info, 1, TargetConfig("-"))
        names = [name for name, _ in drafter.named_parameters() if "lora" in name]
        assert names and any("lm_head" in name for name in names) is trained


@pytest.mark.parametrize(
    ("kind", "options", "tables"),
    [
        ("dflash", {"dependency": "markov"}, {"markov_head.markov_w2"}),
        ("dflash", {"dependency": "gru"}, {"embed_proj.2"}),
        (
            "eagle3",
            {"train_lm_head": True, "shortlist": 8, "shortlist_rank": 4},
            {"lm_head", "shortlist.up_proj"},
        ),
    ],
    ids=lambda value: "",
)
def test_updates_of_tables_are_no_matrices(
    target: MicroTarget, tmp_path: Path, kind: str, options: dict[str, Any], tables: set[str]
) -> None:
    """Their second factor has a row per token, as the table has."""
    save_drafter(make(target, kind, **options), tmp_path, target.info)
    drafter = make(target, kind, **options)
    config = RefreshConfig(str(tmp_path), lora_rank=3)
    prepare_start(drafter, config, target.info, 1, TargetConfig("-"))
    chosen = {id(weight) for weight in matrices(drafter)}
    updates = {name: weight for name, weight in drafter.named_parameters() if "lora" in name}
    others = {name for name, weight in updates.items() if id(weight) not in chosen}
    assert others == {f"{table}.lora_B.default.weight" for table in tables}


def test_updates_are_the_same_in_every_process(target: MicroTarget, tmp_path: Path) -> None:
    save_drafter(make(target), tmp_path, target.info)
    states: list[dict[str, Tensor]] = []
    for process in range(2):
        torch.manual_seed(process)
        drafter = make(target)
        prepare_start(
            drafter, RefreshConfig(str(tmp_path), lora_rank=2), target.info, 4, TargetConfig("-")
        )
        states.append(drafter.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_updates_without_effect_are_refused(target: MicroTarget, tmp_path: Path) -> None:
    save_drafter(make(target), tmp_path, target.info)
    drafter: Any = make(target)
    prepare_start(
        drafter, RefreshConfig(str(tmp_path), lora_rank=2), target.info, 4, TargetConfig("-")
    )
    drafter.logits = lambda states: nn.functional.linear(states, drafter.lm_head.weight)
    loss = drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS])).loss_sum
    with pytest.raises(UserError, match=r"\['lm_head'\] directly"):
        require_reached(drafter, loss)


@pytest.mark.parametrize(
    "options",
    [
        {"dependency": "markov", "confidence": True, "tv": 1.0},
        {"dependency": "gru"},
        {"dependency": "selector", "convolution": True},
        {"dependency": "parent"},
    ],
    ids=lambda options: options["dependency"],
)
def test_a_block_drafter_goes_on_as_one_with_more_parts(
    target: MicroTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """What is new changes little at first, and the way back leaves it out."""
    sizes = {"block_size": 5, "dependency_rank": 6, "conv_group_size": 4}
    plain = make(target, "dflash", **sizes).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator())
    save_drafter(plain, tmp_path / "plain", target.info)
    more = make(target, "dflash", **sizes, **options).eval()
    with caplog.at_level(logging.WARNING, logger="train.refresh"):
        load_start(more, tmp_path / "plain", target.info, False)
    assert "begin anew" in caplog.text
    batch = packed_batch(target, more.needs, [DOCUMENTS])
    before, after = (drafter.train_logits(batch, 3) for drafter in (plain, more))
    for known, found in zip(before, after, strict=True):
        assert torch.equal(known.argmax(-1), found.argmax(-1))
    save_drafter(more, tmp_path / "more", target.info)
    again = make(target, "dflash", **sizes).eval()
    load_start(again, tmp_path / "more", target.info, False)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    with pytest.raises(UserError, match="missing tensors"):
        load_start(
            make(target, "dflash", **sizes, num_layers=4), tmp_path / "plain", target.info, False
        )


def test_a_block_drafter_goes_on_with_the_slots_that_it_was_trained_for(
    target: MicroTarget, tmp_path: Path
) -> None:
    """The recipes themselves: DSpark reads every token one slot earlier than DFlash. With the
    settings that the message gives, it drafts what DFlash did."""
    for name in ("dflash", "dspark"):
        save_drafter(build(name, target, seed=3), tmp_path / name, target.info)
    shared = "head.sample_from_anchor=false head.block_size=8"
    with pytest.raises(UserError, match=f"trained with head.sample_from_anchor=false.*{shared}, "):
        load_start(build("dspark", target), tmp_path / "dflash", target.info, False)
    with pytest.raises(UserError, match=r"head.sample_from_anchor=true head\.block_size=7, "):
        load_start(build("dflash", target), tmp_path / "dspark", target.info, False)
    changes = {"sample_from_anchor": False, "block_size": 8}
    begun = build("dspark", target, shaken=0.0, changes=changes)
    load_start(begun, tmp_path / "dflash", target.info, False)
    known = load_drafter(tmp_path / "dflash", target.info, target.weights).float()
    assert begun.depths == known.depths == build("dspark", target).depths
    batch = packed_batch(target, begun.needs, [DOCUMENTS])
    for depth in zip(*(each.train_logits(batch, 7) for each in (known, begun)), strict=True):
        torch.testing.assert_close(*depth)


def test_a_flipped_bit_is_not_trained_on(target: MicroTarget, tmp_path: Path) -> None:
    drafter = make(target)
    save_drafter(drafter, tmp_path / "best", target.info)
    names = ("config.json", "model.safetensors")
    files = [file_entry(tmp_path, f"best/{name}") for name in names]
    write_manifest(tmp_path, "train", {"checkpoint": "best", "files": files})
    load_start(drafter, tmp_path / "best", target.info, False)
    content = bytearray((tmp_path / "best" / names[1]).read_bytes())
    content[-5] ^= 4
    (tmp_path / "best" / names[1]).write_bytes(content)
    with pytest.raises(UserError, match="was changed or damaged"):
        load_start(drafter, tmp_path / "best", target.info, False)


def test_what_does_not_fit_is_refused(
    target: MicroTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make(target)
    save_drafter(drafter, tmp_path, target.info)
    with pytest.raises(UserError, match=r"kind 'distilled', but kind 'pard'"):
        load_start(make(target, "pard"), tmp_path, target.info, False)
    changed = replace(target.info, revision="r2", id="tuned")
    with pytest.raises(UserError, match=r"revision r1.*other_target=true"):
        load_start(drafter, tmp_path, changed, False)
    load_start(drafter, tmp_path, changed, True)
    with pytest.raises(UserError, match="tokenizer_hash t1"):
        load_start(drafter, tmp_path, replace(changed, tokenizer_hash="t2"), True)
    settings = r"missing tensors.*give them: head\.num_layers=\d+$"
    with pytest.raises(UserError, match=settings):
        load_start(make(target, num_layers=3), tmp_path, target.info, False)
    with caplog.at_level(logging.WARNING, logger="train.refresh"):
        load_start(make(target, reverse_kl=1.0), tmp_path, target.info, False)
    assert "other values of head.reverse_kl (head.reverse_kl=0.0)" in caplog.text
    with pytest.raises(UserError, match="there is no folder"):
        load_start(drafter, tmp_path / "nowhere", target.info, False)
    for options in ({"lora_rank": 4}, {"other_target": True}, {"init_from": "x", "lora_rank": -1}):
        with pytest.raises(UserError, match=r"train\.refresh\."):
            RefreshConfig(**options)
