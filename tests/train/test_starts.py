"""Trainings that start from another kind of the EAGLE family: what carries over, what begins anew,
and that the first token is drafted as before where the architectures permit it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.starts import named_parts
from heads.api.tree import TokenTree
from tests.heads.explicit import rms
from tests.heads.micro import MicroTarget, PlainNoise, micro_target, packed_batch, seen_states
from train.refresh import load_start

DOCUMENTS = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def target() -> MicroTarget:
    return micro_target()


def make(target: MicroTarget, kind: str, seed: int = 0, **options: Any) -> TrainableDrafter:
    """A fresh drafter, the draft vocabulary of which depends on the seed."""
    config = get_kind(kind).config_class(**options)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randperm(target.info.vocab_size, generator=generator)
    return new_drafter(kind, config, target.info, target.weights, seed, counts).eval()


def trained(target: MicroTarget, folder: Path, kind: str, **options: Any) -> TrainableDrafter:
    """A drafter with weights of its own, and its checkpoint in `folder`."""
    drafter, generator = make(target, kind, 1, **options), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_drafter(drafter, folder, target.info)
    return drafter


def first_logits(target: MicroTarget, drafter: TrainableDrafter) -> Tensor:
    return drafter.train_logits(packed_batch(target, drafter.needs, [DOCUMENTS]), 1)[0]


def first_tokens(target: MicroTarget, drafter: Any) -> list[list[int]]:
    """What is drafted behind every prefix of a document."""
    found = []
    for end in range(1, len(DOCUMENTS[0]) - 1):
        seen = seen_states(target, drafter.needs, DOCUMENTS, [(0, end), (0, min(end, 7))])
        state = drafter.start(seen, TokenTree.chain(1), 32)
        found.append(drafter.propose(state, PlainNoise()).tokens[:, 1].tolist())
    return found


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": 26, "train_lm_head": True},
        {"norm_before_residual": True, "qk_norm": True},
        {"tap_norm": False, "norm_before_fc": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_eagle3_goes_on_as_peagle(
    target: MicroTarget,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    layers: int,
) -> None:
    """Its layer is the first one, the outputs of the others are zero: the first token stays."""
    source = trained(target, tmp_path, "eagle3", **options)
    drafter, fresh = (make(target, "peagle", num_layers=layers, **options) for _ in range(2))
    with caplog.at_level(logging.WARNING, logger="train.refresh"):
        load_start(drafter, tmp_path, target.info, False)
    given, state = source.state_dict(), drafter.state_dict()
    shared = {name.replace("midlayer.", "layers.0."): value for name, value in given.items()}
    assert shared.keys() < state.keys()
    zero = ("o_proj.weight", "down_proj.weight")
    for name, value in state.items():
        if name in shared:
            assert torch.equal(value, shared[name]), name
        elif name.startswith("layers.") and name.endswith(zero):
            assert not value.any(), name
        else:
            assert torch.equal(value, fresh.state_dict()[name]), name
    assert torch.equal(first_logits(target, source), first_logits(target, drafter))
    assert first_tokens(target, source) == first_tokens(target, drafter)
    lines = [line for line in caplog.messages if "carry over" in line]
    assert len(lines) == 1 and "of kind eagle3 (here peagle)" in lines[0]
    assert f"layers{'.0' if layers > 1 else ''}, lm_head, norm" in lines[0]
    assert "mask_embedding, mask_hidden begin anew" in lines[0]
    assert ("layers.2.self_attn.o_proj are made to fit them" in lines[0]) == (layers > 1)
    assert "left out" not in lines[0]


@pytest.mark.parametrize("source_layers", [1, 2])
@torch.no_grad()
def test_peagle_goes_on_as_eagle3(
    target: MicroTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, source_layers: int
) -> None:
    """Its first layer, so that the first token stays where that is all of them."""
    options = {"draft_vocab_size": 26}
    source = trained(target, tmp_path, "peagle", num_layers=source_layers, **options)
    drafter = make(target, "eagle3", **options)
    with caplog.at_level(logging.WARNING, logger="train.refresh"):
        load_start(drafter, tmp_path, target.info, False)
    given = source.state_dict()
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, given[name.replace("midlayer.", "layers.0.")]), name
    same = torch.equal(first_logits(target, source), first_logits(target, drafter))
    assert same == (source_layers == 1)
    assert (first_tokens(target, source) == first_tokens(target, drafter)) == same
    others = "layers.1, " if source_layers == 2 else ""
    assert f"{others}mask_embedding, mask_hidden are left out" in caplog.text


@torch.no_grad()
def test_there_and_back_is_the_drafter_itself(target: MicroTarget, tmp_path: Path) -> None:
    source = trained(target, tmp_path / "one", "eagle3")
    between = make(target, "peagle", num_layers=2, own_embedding=True)
    load_start(between, tmp_path / "one", target.info, False)
    save_drafter(between, tmp_path / "two", target.info)
    again = make(target, "eagle3", seed=5)
    load_start(again, tmp_path / "two", target.info, False)
    for name, value in source.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def sized_target() -> MicroTarget:
    """A target whose last hidden states all have one size, other than 1, as has its final norm."""
    target = micro_target()
    with torch.no_grad():
        target.model.model.norm.weight.fill_(1.7)
    return target


@torch.no_grad()
def test_eagle_goes_on_as_eagle3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What carries over is equal, queries, keys and values compute what they did, the rest is as
    for a fresh drafter."""
    target = sized_target()
    source: Any = trained(target, tmp_path, "eagle", fc_bias=True)
    options = {"qk_norm": True, "draft_vocab_size": 26}
    drafter: Any = make(target, "eagle3", **options)
    fresh = make(target, "eagle3", **options).state_dict()
    with caplog.at_level(logging.WARNING, logger="train.refresh"):
        load_start(drafter, tmp_path, target.info, False)
    given = source.state_dict()
    made = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    for name, value in drafter.state_dict().items():
        theirs = name.replace("midlayer.", "layers.0.")
        if name in (*made, "fc.weight", "norm.weight"):
            continue
        carried = theirs in given
        assert torch.equal(value, given[theirs] if carried else fresh[name]), name
        assert carried == (".mlp." in name or "o_proj" in name or "post_attention" in name), name
    line = next(line for line in caplog.messages if "carry over" in line)
    assert "midlayer.mlp, midlayer.post_attention_layernorm, midlayer.self_attn.o_proj" in line
    assert "fc, midlayer.self_attn.k_proj, midlayer.self_attn.q_proj" in line
    assert line.endswith("; fc.bias are left out")
    # of an embedding and a feature of the usual sizes, the projections read the same
    generator = torch.Generator().manual_seed(3)
    size = target.weights.embedding.square().mean().sqrt()
    e, f = (F.normalize(torch.randn(16, generator=generator).double(), dim=0) * 4 for _ in "ef")
    e, f = e * size, f * 1.7
    fused = source.fc.weight @ torch.cat([e, f])
    ones = torch.ones(16, dtype=torch.float64)
    read = torch.cat([rms(ones, e), rms(ones, f)])
    for name in ("q_proj", "k_proj", "v_proj"):
        old = source.layers[0].self_attn.get_submodule(name).weight @ fused
        new = drafter.midlayer.self_attn.get_submodule(name).weight @ read
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_eagle_that_reads_features_alone_drafts_the_same_as_eagle3(tmp_path: Path) -> None:
    """Where the fusion is the feature itself, EAGLE-3 can be EAGLE for the first token, up to the
    size of its logits: the highest tap is the last layer's output."""
    target = sized_target()
    source: Any = trained(target, tmp_path, "eagle")
    source.fc.weight.copy_(torch.cat([torch.zeros(16, 16), torch.eye(16)], 1))
    save_drafter(source, tmp_path, target.info)
    drafter = make(target, "eagle3", taps=(1, 3, 5))
    load_start(drafter, tmp_path, target.info, False)
    old, new = (F.normalize(first_logits(target, each), dim=-1) for each in (source, drafter))
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    assert first_tokens(target, source) == first_tokens(target, drafter)


def test_what_cannot_be_started_from_is_refused(target: MicroTarget, tmp_path: Path) -> None:
    trained(target, tmp_path / "medusa", "medusa")
    trained(target, tmp_path / "eagle", "eagle")
    trained(target, tmp_path / "eagle3", "eagle3")
    for kind, folder, allowed in (
        ("eagle3", "medusa", "eagle3, eagle, peagle"),
        ("peagle", "eagle", "peagle, eagle3"),
        ("eagle", "eagle3", "eagle"),
    ):
        with pytest.raises(
            UserError, match=rf"from checkpoints of kind {allowed}\. Use head={folder}"
        ):
            load_start(make(target, kind), tmp_path / folder, target.info, False)
    with pytest.raises(
        UserError, match=r"unknown tensors \['fc_norm.*give them: head.tap_norm=true"
    ):
        load_start(make(target, "peagle", tap_norm=False), tmp_path / "eagle3", target.info, False)
    wide = make(target, "eagle3", intermediate_size=20)
    with pytest.raises(UserError, match=r"shape .*give them: head.intermediate_size=0"):
        load_start(wide, tmp_path / "eagle", target.info, False)


def test_a_broken_checkpoint_of_another_kind_is_refused(
    target: MicroTarget, tmp_path: Path
) -> None:
    """It has to be whole as what it says it is, before anything is made of it."""
    drafter: Any = trained(target, tmp_path, "eagle")
    state = {name: value for name, value in drafter.state_dict().items() if name != "fc.weight"}
    save_drafter(drafter, tmp_path, target.info, state)
    with pytest.raises(
        UserError, match=r"does not fit kind 'eagle': missing tensors \['fc.weight'"
    ):
        load_start(make(target, "eagle3"), tmp_path, target.info, False)


def test_parts_are_named_by_the_shortest_names_that_hold_nothing_else() -> None:
    names = ["a.b.weight", "a.b.bias", "a.c.weight", "d.0.e.weight", "d.1.e.weight", "f"]
    assert named_parts(names, names) == ["a", "d", "f"]
    assert named_parts(names[1:4], names) == ["a.b.bias", "a.c", "d.0"]
    assert named_parts(["a.b.weight"], names) == ["a.b"]
    assert named_parts([], names) == []
