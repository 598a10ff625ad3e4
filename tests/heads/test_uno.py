"""Uno: which rows have the update, what noise slots see, that the target stays what it is. (What
holds for every kind: test_contract.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.cascade import Config as CascadeConfig
from heads.nn import losses
from heads.nn.anchors import Anchors
from heads.nn.target.layers import FAMILIES
from heads.nn.target.updates import MODULES
from heads.uno import Config, Drafter, noise_at
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.parity import check_parity
from inference.target.model import TargetModel
from tests.heads.explicit import LONG_PAIR
from tests.heads.micro import MicroTarget, PlainNoise, micro_target, packed_batch, seen_states
from tests.heads.test_target_layers import requests, shaken_target


def drafter_of(target: TargetModel | MicroTarget, seed: int = 1, **settings: Any) -> Drafter:
    """A drafter whose updates change every row that has them."""
    values = {"rank": 3, "alpha": 6.0, "block_size": 5, "curriculum": (), **settings}
    drafter: Drafter = new_drafter("uno", Config(**values), target.info, target.weights, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return drafter


@contextmanager
def adapted(target: MicroTarget, drafter: Drafter, first: int) -> Iterator[None]:
    """The target of Hugging Face with the drafter's updates on rows from `first` on, by hooks on
    its linear layers."""
    scale, handles = drafter.config.alpha / drafter.config.rank, []
    tensors = drafter.state_dict()
    for name, part in target.model.named_modules():
        down = tensors.get(f"{name.removeprefix('model.')}.lora_A")
        if down is None:
            continue
        up = tensors[f"{name.removeprefix('model.')}.lora_B"]

        def add(
            module: Any, inputs: Any, output: Tensor, a: Tensor = down, b: Tensor = up
        ) -> Tensor:
            more = scale * (inputs[0] @ a.T) @ b.T
            more[:, :first] = 0
            return output + more

        handles.append(part.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def slow(
    target: MicroTarget, drafter: Drafter, text: list[int], noise: list[int], mask: bool = False
) -> Tensor:
    """Logits [1 + S, V] of the last row of `text`, the root's, and of the noise behind it, from one
    pass over all of it."""
    states = target.weights.embed(torch.tensor([[*text, *noise]]))
    if mask:
        states[:, len(text) :] = drafter.mask_embedding
    with adapted(target, drafter, len(text)):
        return target.model(inputs_embeds=states).logits[0, len(text) - 1 :]


def serving_noise(drafter: Drafter, root: int, slots: int) -> list[int]:
    return drafter.noise(root + 1 + torch.arange(slots)).tolist()


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "o_proj", "down_proj"), ("v_proj",)])
@pytest.mark.parametrize("slots", ["noise", "mask"])
@torch.no_grad()
def test_slots_are_rows_of_the_target_with_the_update(slots: str, modules: tuple[str, ...]) -> None:
    """Two documents packed into one row, every place, four deep."""
    target = micro_target()
    drafter = drafter_of(target, slots=slots, modules=modules)
    batch = packed_batch(target, drafter.needs, [LONG_PAIR])
    found = drafter.train_logits(batch, 4)
    first = 0
    for document in LONG_PAIR:
        for last in range(len(document) - 1):
            text = document[: last + 2]
            noise = serving_noise(drafter, last + 1, 3)
            expected = slow(target, drafter, text, noise, slots == "mask")
            for depth in range(4):
                torch.testing.assert_close(found[depth][0, first + last], expected[depth])
        first += len(document)


@torch.no_grad()
def test_a_draft_is_one_pass_behind_the_root() -> None:
    """Ragged, after a commit, deeper than in training: every depth's token is that of the slow
    pass."""
    target = micro_target()
    drafter = drafter_of(target, block_size=2)
    seen = seen_states(target, drafter.needs, LONG_PAIR, [(0, 7), (0, 4)])
    state = drafter.start(seen, TokenTree.chain(6), 32)
    drafter.propose(state, PlainNoise())
    drafter.commit(state, seen_states(target, drafter.needs, LONG_PAIR, [(7, 8), (4, 7)]))
    tokens = drafter.propose(state, PlainNoise()).tokens
    for row, root in ((0, 8), (1, 7)):
        text = LONG_PAIR[row][: root + 1]
        logits = slow(target, drafter, text, serving_noise(drafter, root, 5))
        assert tokens[row].tolist() == [text[-1], *logits.argmax(-1).tolist()]


@torch.no_grad()
def test_the_roots_row_does_not_depend_on_the_update() -> None:
    """To the last bit; the rows behind it do."""
    target, outputs = micro_target(), []
    seen = seen_states(target, drafter_of(target).needs, LONG_PAIR, [(0, 7), (0, 4)])
    for seed in (1, 2):
        drafter = drafter_of(target, seed)

        class Keeping(PlainNoise):
            def pick(self, logits: Tensor, positions: Tensor, token_ids: Any = None) -> Tensor:
                outputs.append(logits.clone())
                return super().pick(logits, positions, token_ids)

        drafter.propose(drafter.start(seen, TokenTree.chain(4), 32), Keeping())
    one, other = outputs
    assert torch.equal(one[:, 0], other[:, 0])
    assert bool((one[:, 1:] != other[:, 1:]).any(-1).all())


def test_the_target_is_the_same_to_the_last_bit_while_a_drafter_lives() -> None:
    """Before it is bound, after drafting and after a training step: logits, weights, and where the
    weights lie."""
    target = micro_target(torch.float32)
    tokens = torch.tensor([LONG_PAIR[0]])

    def look() -> tuple[Tensor, dict[str, Tensor], list[int]]:
        with torch.no_grad():
            logits = target.model(tokens).logits
        weights = {name: value.clone() for name, value in target.model.state_dict().items()}
        return logits, weights, [value.data_ptr() for value in target.model.state_dict().values()]

    before = look()
    drafter = drafter_of(target).train()
    seen = seen_states(target, drafter.needs, LONG_PAIR, [(0, 7), (0, 4)])
    with torch.no_grad():
        drafter.propose(drafter.start(seen, TokenTree.chain(4), 32), PlainNoise())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01)
    drafter.loss(packed_batch(target, drafter.needs, [LONG_PAIR])).loss_sum.backward()
    optimizer.step()
    after = look()
    assert torch.equal(before[0], after[0]) and before[2] == after[2]
    assert all(torch.equal(value, after[1][name]) for name, value in before[1].items())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_draft_is_the_targets_own_pick(family: str, temperature: float) -> None:
    """Windows, biases and norms of queries and keys included."""
    target = shaken_target(family)
    settings = DecodeConfig(temperature=temperature, batch_size=3, depth=3)
    passes = 0
    for done in Engine(target, drafter_of(target), settings).run(requests()):
        assert all(record.committed >= 2 for record in done.passes[:-1])
        passes += len(done.passes) - 1
    assert passes >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_training_computes_what_decoding_computes_in_every_family(family: str) -> None:
    target = shaken_target(family)
    generator = torch.Generator().manual_seed(4)
    documents = [
        torch.randint(3, 90, (length,), generator=generator).tolist() for length in (24, 19)
    ]
    report = check_parity(target, drafter_of(target), documents, depth=5)
    assert report.compared > 20


@pytest.mark.parametrize("size", [2, 5])
def test_the_loss_is_that_of_every_slot_by_itself(size: int) -> None:
    target = micro_target()
    drafter = drafter_of(target, block_size=size, tv=0.7, kl=0.2, ce=0.1)
    batch = packed_batch(target, drafter.needs, [LONG_PAIR])
    batch.seeds = torch.tensor([3])
    generators = batch.generators()
    eligible = batch.supervised(1) & batch.supervised(3)
    anchors = Anchors.sample(eligible, 64, generators)
    noise = drafter._draw(generators, anchors.last.shape[1], size - 1)
    total, counts = torch.zeros((), dtype=torch.float64), [0] * (size - 1)
    for last, tokens in zip(anchors.last[0].tolist(), noise[0].tolist(), strict=True):
        number = 0 if last < len(LONG_PAIR[0]) else 1
        document, place = LONG_PAIR[number], last - number * len(LONG_PAIR[0])
        rows = slow(target, drafter, document[: place + 2], tokens)
        teacher = target.model(torch.tensor([document])).logits[0]
        for slot in range(1, size):
            at = place + 1 + slot  # where the slot stands, and the target predicts the same
            if at + 1 >= len(document):
                continue
            drafted, wanted = rows[slot][None], teacher[at][None]
            label = torch.tensor([document[at + 1]])
            total = total + 0.7 * losses.total_variation(drafted, wanted)[0]
            total = total + 0.2 * losses.forward_kl(drafted, wanted)[0]
            total = total + 0.1 * losses.cross_entropy(drafted, label)[0]
            counts[slot - 1] += 1
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum.detach(), total)
    assert [int(output.metrics[f"loss/depth{k}"][1]) for k in range(2, size + 1)] == counts
    assert min(counts) > 0 and "loss/depth1" not in output.metrics


def test_few_blocks_estimate_the_loss_of_all() -> None:
    target = micro_target()
    batch = packed_batch(target, drafter_of(target).needs, [LONG_PAIR])
    means = []
    for most, draws in ((64, 40), (4, 160)):
        drafter, sums = drafter_of(target, num_anchors=most), []
        for seed in range(draws):
            batch.seeds = torch.tensor([seed])
            with torch.no_grad():
                sums.append(float(drafter.loss(batch).loss_sum))
        means.append(sum(sums) / draws)
    assert means[1] == pytest.approx(means[0], rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"tv": 0.1, "annealed_lk": 1.0}], ids=str)
def test_chunks_and_micro_batches_change_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = micro_target()
    drafter = drafter_of(target, **settings)
    batch = packed_batch(target, drafter.needs, [[document] for document in LONG_PAIR])
    batch.seeds = torch.tensor([3, 4])
    whole, logits = drafter.loss(batch), drafter.train_logits(batch, 3)
    whole.loss_sum.backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    monkeypatch.setattr(Drafter, "_chunk", lambda self, batch, slots: 3)
    pieces = drafter.loss(batch)
    pieces.loss_sum.backward()
    torch.testing.assert_close(pieces.loss_sum, whole.loss_sum)
    for parameter, gradient in zip(drafter.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(drafter.train_logits(batch, 3), logits)
    alone = []
    for document, seed in zip(LONG_PAIR, (3, 4), strict=True):
        row = packed_batch(target, drafter.needs, [[document]])
        row.seeds = torch.tensor([seed])
        alone.append(drafter.loss(row).loss_sum)
    torch.testing.assert_close(torch.stack(alone).sum(), whole.loss_sum)


def test_training_goes_through_the_block_sizes() -> None:
    config = Config(block_size=8, curriculum=(2, 4, 12))
    assert [config.size_at(share) for share in (0.0, 0.3, 0.4, 0.7, 1.0)] == [2, 2, 4, 8, 8]
    assert Config(block_size=5, curriculum=()).size_at(0.0) == 5
    target = micro_target()
    drafter = drafter_of(target, curriculum=(2, 4))
    batch = packed_batch(target, drafter.needs, [LONG_PAIR])
    deepest = []
    for progress in (0.0, 0.5, 0.9):
        batch.progress = progress
        counts = {k: int(drafter.loss(batch).metrics[f"loss/depth{k}"][1]) for k in range(2, 6)}
        deepest.append(max(k for k, count in counts.items() if count))
    assert deepest == [2, 4, 5]


def test_noise_is_even_and_follows_from_the_position() -> None:
    positions = torch.arange(20_000)
    found = noise_at(positions, 40)
    assert torch.equal(found, noise_at(positions.view(4, -1), 40).flatten())
    counts = torch.bincount(found, minlength=40)
    assert counts.shape == (40,) and float(((counts - 500) ** 2 / 500).sum()) < 90  # chi squared
    pairs = torch.bincount(found[1:] * 40 + found[:-1], minlength=1600)
    assert float(((pairs - 12.5) ** 2 / 12.5).sum()) < 1900
    target = micro_target()
    drafter = drafter_of(target, noise_tokens=6)
    assert set(drafter.noise(positions).tolist()) == set(range(6))
    drawn = drafter._draw([torch.Generator().manual_seed(seed) for seed in (1, 2)], 50, 4)
    assert drawn.shape == (2, 50, 4) and set(drawn.unique().tolist()) == set(range(6))


def test_checkpoints_hold_the_updates_alone(tmp_path: Path) -> None:
    target = micro_target()
    drafter = drafter_of(target, modules=("q_proj", "down_proj"))
    save_drafter(drafter, tmp_path / "noise", target.info)
    names = {
        f"layers.{layer}.{part}.lora_{side}"
        for layer in range(5)
        for part in ("self_attn.q_proj", "mlp.down_proj")
        for side in "AB"
    }
    assert set(load_file(tmp_path / "noise" / "model.safetensors")) == names
    masked = drafter_of(target, modules=("q_proj", "down_proj"), slots="mask")
    save_drafter(masked, tmp_path / "mask", target.info)
    assert set(load_file(tmp_path / "mask" / "model.safetensors")) == {*names, "mask_embedding"}
    loaded = load_drafter(tmp_path / "mask", target.info, target.weights)
    batch = packed_batch(target, masked.needs, [LONG_PAIR])
    torch.testing.assert_close(loaded.train_logits(batch, 3), masked.train_logits(batch, 3))


def test_a_fresh_drafter_updates_nothing() -> None:
    target = micro_target()
    fresh = new_drafter("uno", Config(rank=3), target.info, target.weights, 0)
    batch = packed_batch(target, fresh.needs, [LONG_PAIR[:1]])
    found = fresh.train_logits(batch, 2)[1]
    tokens = torch.tensor([[*LONG_PAIR[0][:5], *serving_noise(fresh, 4, 1)]])
    torch.testing.assert_close(found[0, 3], target.model(tokens).logits[0, -1])


def test_settings_that_make_no_sense_say_what_is_allowed() -> None:
    with pytest.raises(UserError, match=r"head.curriculum must ascend .* given \[4, 2\]"):
        Config(curriculum=(4, 2))
    with pytest.raises(UserError, match=r"head.modules names a layer twice"):
        Config(modules=("q_proj", "q_proj"))
    with pytest.raises(UserError, match=r"above the vocabulary of 41; given 50"):
        drafter_of(micro_target(), noise_tokens=50)
    with pytest.raises(UserError, match=r"head.tv"):
        Config(tv=0.0)


def test_a_cascade_does_not_take_it_for_a_judge_of_tokens() -> None:
    target = micro_target()
    parts = [{"kind": "ngram"}, {"kind": "uno"}]
    with pytest.raises(UserError, match=r"kind 'uno', cannot judge tokens"):
        new_drafter("cascade", CascadeConfig(parts=parts), target.info, target.weights, 0)
