"""Cascades: the sped-up chain is the upper level's own, joined trees hold all parts, and a
checkpoint needs no other folder."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.drafter import Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.state import state_tensors
from heads.api.tree import DynamicShape, TokenTree
from heads.cascade import Config, Drafter
from heads.nn.cascade.chain import draft_chain, fill_tree
from heads.nn.cascade.join import choices_of, smaller, split_shape
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.rules.registry import get_rule
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from tests.heads.explicit import PAIR
from tests.heads.micro import MicroTarget, PlainNoise, micro_target, packed_batch, seen_states
from tests.inference.decoding.rules.toys import Toy, decode, p_value
from tests.inference.decoding.test_lossless import requests
from tests.models import random_target

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
EARLY = {"kind": "early_exit"}
NGRAM = {"kind": "ngram"}


def cascade(target: Any, *parts: dict[str, Any], **settings: Any) -> Drafter:
    made: Drafter = new_drafter(
        "cascade", Config(parts=parts, **settings), target.info, target.weights, 0
    )
    return made


# Two tables


@dataclass
class TableState:
    root: Tensor
    position: Tensor


class Table:
    """A drafter and a reader whose next token follows from the last one by a table of logits [V,
    V]."""

    def __init__(self, table: Tensor, depth: int = 3) -> None:
        self.table, self.depth, self.reads = table, depth, 0

    def root_logits(self, state: TableState) -> Tensor:
        return self.table[state.root]

    def read(self, state: TableState, tokens: Tensor, offset: Tensor) -> Tensor:
        self.reads += 1
        return self.table[tokens]

    def propose(self, state: TableState, noise: Any) -> Proposal:
        tokens = [state.root]
        for step in range(1, self.depth + 1):
            tokens.append(
                noise.pick(self.table[tokens[-1]][:, None], state.position[:, None] + step)[:, 0]
            )
        return Proposal(torch.stack(tokens, 1), TokenTree.chain(self.depth))

    def commit(self, state: TableState, accepted: TargetStates) -> TableState:
        last = accepted.lengths[:, None] - 1
        state.root.copy_(accepted.next_tokens.gather(1, last)[:, 0])
        state.position.copy_(accepted.positions.gather(1, last)[:, 0] + 1)
        return state


class TwoTables(Toy):
    """The toy of the rules' tests, drafted by a cascade: the toy's drafter above, another table
    below."""

    lower: Tensor
    rounds: int = 2

    def propose(
        self, plan: Any, root: Tensor, root_position: Tensor, noise: SharedNoise
    ) -> Proposal:
        states = [TableState(root.clone(), root_position.clone()) for _ in range(2)]
        upper, lower = Table(self.drafter), Table(self.lower, depth=2)
        keep = noise.keeps_logits or plan.max_rank > 0
        found = draft_chain(
            lower, states[0], upper, states[1], root, root_position, self.rounds, noise, keep
        )  # type: ignore[arg-type]
        return fill_tree(plan, found, root_position, noise)


def two_tables(apart: float = 1.0, below: float = 1.0) -> TwoTables:
    toy = Toy.random(apart=apart)
    made = TwoTables(toy.target, toy.drafter)
    made.lower = toy.drafter + below * torch.randn(5, 5, generator=torch.Generator().manual_seed(9))
    return made


@pytest.mark.parametrize(("below", "live"), [(0.0, 7), (50.0, 3)])
def test_a_perfect_lower_level_fills_every_round_and_a_hopeless_one_adds_one_token_each(
    below: float, live: int
) -> None:
    toy = two_tables()
    root = torch.arange(5)
    upper = Table(toy.drafter)
    lower = Table(toy.drafter if below == 0 else toy.drafter.roll(1, 1) * below, depth=2)
    states = [TableState(root.clone(), root * 0) for _ in range(2)]
    found = draft_chain(
        lower, states[0], upper, states[1], root, root * 0, 2, PlainNoise(), keep=True
    )  # type: ignore[arg-type]
    assert upper.reads == 2
    # the rolled table is right where an argmax happens to be followed by itself
    assert (found.live == live).sum() >= 4
    chain = [root]
    for _ in range(7):
        chain.append(toy.drafter[chain[-1]].argmax(-1))
    for row in range(5):
        end = int(found.live[row]) + 1
        assert found.tokens[row, :end].tolist() == torch.stack(chain, 1)[row, :end].tolist()
        assert found.logits is not None
        assert torch.equal(found.logits[row, : end - 1], toy.drafter[found.tokens[row, : end - 1]])


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("rejection", TokenTree.chain(4)),
        ("block", TokenTree.chain(4)),
        ("specinfer", TokenTree.chain(4)),
        ("specinfer", TokenTree.from_choices(TREE)),
        ("match", TokenTree.chain(4)),
        ("match", TokenTree.from_choices(TREE)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.num_nodes}nodes",
)
def test_every_lossless_rule_keeps_the_targets_law(rule: str, shape: TokenTree) -> None:
    """Chains that end early for reasons that depend on the drafts: dead nodes must be neither kept
    nor weighed."""
    settings = SamplingSettings(temperature=1.0)
    toy = two_tables()
    found = decode(toy, get_rule(rule, shape), shape, settings, rows=40_000, tokens=3)
    assert p_value(found.text, toy.law(settings, 3)) > 1e-4
    assert found.accepted[0] > 0.8  # drafts are kept: the rule did weigh them


def test_a_dead_node_that_were_weighed_would_bias_the_text() -> None:
    """The control: the same chains without `Proposal.limit`."""
    settings = SamplingSettings(temperature=1.0)
    toy, shape = two_tables(apart=0.3, below=3.0), TokenTree.chain(4)

    def forget(proposal: Proposal) -> None:
        proposal.limit = None

    found = decode(
        toy, get_rule("rejection", shape), shape, settings, rows=40_000, tokens=4, tamper=forget
    )
    assert p_value(found.text, toy.law(settings, 4)) < 1e-9
    right = decode(toy, get_rule("rejection", shape), shape, settings, rows=40_000, tokens=4)
    assert p_value(right.text, toy.law(settings, 4)) > 1e-4


# Real kinds


def walked(
    target: MicroTarget, drafter: Any, noise: Any, shape: Any, steps: int = 4
) -> list[Proposal]:
    """Proposals of a ragged batch along two documents."""
    ends = [5, 3]
    state = drafter.start(seen_states(target, drafter.needs, PAIR, [(0, 5), (0, 3)]), shape, 40)
    found = []
    for step in range(steps):
        found.append(copy.deepcopy(drafter.propose(state, noise)))
        runs = [1 + step % 2, 1 + (step + 1) % 2]
        spans = [(end, end + run) for end, run in zip(ends, runs, strict=True)]
        ends = [end for _, end in spans]
        if ends[1] >= len(PAIR[1]) - 1:
            break
        drafter.commit(state, seen_states(target, drafter.needs, PAIR, spans))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@torch.no_grad()
def test_the_chain_is_the_upper_levels_own_as_far_as_it_gets(
    rounds: int, temperature: float
) -> None:
    target = micro_target()
    alone = new_drafter(
        "early_exit", get_kind("early_exit").config_class(), target.info, target.weights, 0
    )
    noise = SharedNoise(SamplingSettings(temperature=temperature), torch.tensor([3, 4]), 41)
    noise.keeps_logits = True
    drafter = cascade(target, NGRAM, EARLY, rounds=rounds, proposed=2)
    wanted = walked(target, alone, noise, TokenTree.chain(6))
    found = walked(target, drafter, noise, TokenTree.chain(6))
    for one, two in zip(wanted, found, strict=True):
        assert two.limit is not None and one.logits is not None and two.logits is not None
        for row, live in enumerate(two.limit.tolist()):
            assert live >= rounds + 1
            assert two.tokens[row, : live + 1].tolist() == one.tokens[row, : live + 1].tolist()
            torch.testing.assert_close(two.logits[row, :live], one.logits[row, :live])


@torch.no_grad()
@pytest.mark.parametrize("lower", [NGRAM, {"kind": "suffix"}], ids=["ngram", "suffix"])
def test_proposing_leaves_the_lower_level_as_it_was(lower: dict[str, Any]) -> None:
    """The archive of a suffix part too, which all rows share: it holds committed text alone."""
    target = micro_target()
    drafter = cascade(target, lower, EARLY, rounds=3)
    state = drafter.start(
        seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)]), TokenTree.chain(6), 32
    )
    before = [value.clone() for value in state_tensors(state.parts[0])]
    first = drafter.propose(state, PlainNoise())
    now = state_tensors(state.parts[0])
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    second = drafter.propose(state, PlainNoise())
    assert torch.equal(first.tokens, second.tokens)
    assert state.passes.tolist() == [6, 6] and first.limit is not None
    assert state.drafted.tolist() == (2 * first.limit).tolist()


@torch.no_grad()
def test_second_choices_stand_beside_the_chain() -> None:
    target = micro_target()
    drafter = cascade(target, NGRAM, EARLY, rounds=3)
    alone = new_drafter(
        "early_exit", get_kind("early_exit").config_class(), target.info, target.weights, 0
    )
    tree = TokenTree.from_choices(TREE)
    for one, two in zip(
        *(walked(target, d, PlainNoise(), tree) for d in (alone, drafter)), strict=True
    ):
        same = [node for node, path in enumerate([(), *choices_of(tree)]) if not any(path[:-1])]
        assert two.tokens[:, same].tolist() == one.tokens[:, same].tolist()


# Joined


@pytest.mark.parametrize(
    "shape", [TokenTree.from_choices(TREE), DynamicShape(9, 3, 3)], ids=["tree", "dynamic"]
)
@torch.no_grad()
def test_a_joined_tree_holds_what_each_part_drafts_alone(shape: Any, tmp_path: Path) -> None:
    """With parts that read different taps: each must be told its own."""
    target = micro_target()
    settings = [EARLY, saved(target, "eagle3", tmp_path, taps=(1, 4)), NGRAM]
    drafter = cascade(target, *settings, mode="join", branches=(2, 1))
    shapes = split_shape(shape, (2, 1), torch.device("cpu"))
    parts = [(d, s) for d, s in zip(drafter.drafters, shapes, strict=True)]
    joined = walked(target, drafter, PlainNoise(), shape)
    separate = [walked(target, d, PlainNoise(), s) for d, s in parts]
    for step, proposal in enumerate(joined):
        assert (
            proposal.tokens.shape[1] <= shape.num_nodes
            and proposal.tree.max_depth <= shape.max_depth
        )
        checked = TokenTree.from_parents(proposal.tree.parents, proposal.tree.max_depth)
        assert torch.equal(checked.ancestors, proposal.tree.ancestors)
        assert torch.equal(checked.depth, proposal.tree.depth)
        for row in range(2):
            wanted = set().union(*(paths(part[step], row) for part in separate))
            assert paths(proposal, row) == wanted


@pytest.mark.parametrize("kind", ["pard", "peagle", "mtp", "ngram"])
@torch.no_grad()
def test_on_a_chain_the_first_part_drafts_alone_whatever_the_others_are(
    kind: str, tmp_path: Path
) -> None:
    target, shape = micro_target(), TokenTree.chain(3)
    drafter = cascade(target, EARLY, saved(target, kind, tmp_path), mode="join")
    joined = walked(target, drafter, PlainNoise(), shape)
    alone = walked(target, drafter.drafters[0], PlainNoise(), shape)
    for found, wanted in zip(joined, alone, strict=True):
        assert torch.equal(found.tokens, wanted.tokens)


def test_auto_is_match_for_the_static_tree_of_a_joined_cascade() -> None:
    """Its drafts have no probabilities, so other rules draft without the target's noise."""
    target, tree = random_target(), {"shape": "tree", "choices": TREE, "temperature": 1.0}
    joined = cascade(target, {"kind": "quantized_self", "bits": 8}, NGRAM, mode="join")
    auto, match, traversal = (
        tokens_of(target, joined, **tree, rule=rule) for rule in ("auto", "match", "traversal")
    )
    assert auto == match
    assert accepted(match) > 1.5 * accepted(traversal)
    assert Arm("joined", joined, DecodeConfig(**tree, rule="auto")).decode.acceptance == "match"
    chain = DecodeConfig(shape="chain", temperature=1.0, rule="auto")
    assert Engine(target, joined, chain).decode.acceptance == "block"
    alone = cascade(target, NGRAM, EARLY, mode="speed_up")
    assert Engine(target, alone, DecodeConfig(**tree)).decode.acceptance == "match"
    assert Engine(target, alone, DecodeConfig(**tree, rule="auto")).decode.acceptance == "traversal"


def accepted(found: dict[int, Any]) -> int:
    """The accepted drafts of some answers."""
    return sum(record.accepted for _, passes in found.values() for record in passes)


def paths(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to every node."""
    parents = proposal.tree.parents.expand(proposal.tokens.shape[0], -1)[row].tolist()
    tokens, found = proposal.tokens[row].tolist(), [()]
    found = [(tokens[0],)]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    return set(found)


def test_a_smaller_tree_keeps_its_best_path_and_stays_a_tree() -> None:
    tree = TokenTree.from_choices(TREE)
    for drafted in range(1, 7):
        small = smaller(tree, drafted, torch.device("cpu"))
        assert isinstance(small, TokenTree) and small.num_nodes == drafted + 1
        assert set(choices_of(small)) <= set(TREE)
        small.levels()
    assert choices_of(smaller(tree, 3, torch.device("cpu"))) == [(0,), (0, 0), (0, 0, 0)]  # type: ignore[arg-type]


def test_shares_of_the_nodes_stay_within_the_shape() -> None:
    for shape in (
        TokenTree.chain(5),
        TokenTree.from_choices(TREE),
        TokenTree.from_choices([[0]]),
        DynamicShape(12, 4, 4),
    ):
        parts = split_shape(shape, (5, 5), torch.device("cpu"))
        assert sum(part.num_nodes - 1 for part in parts) == shape.num_nodes - 1
        assert parts[0].num_nodes - 1 >= (shape.num_nodes - 1) / 2
        assert max(part.max_depth for part in parts) == shape.max_depth
    assert [
        part.num_nodes for part in split_shape(TokenTree.chain(5), (5,), torch.device("cpu"))
    ] == [6, 1]


# Checkpoints, depth, refusals


def saved(target: Any, kind: str, folder: Path, **settings: Any) -> dict[str, Any]:
    counts = torch.arange(target.info.vocab_size).flip(0)
    config = get_kind(kind).config_class(**settings)
    save_drafter(
        new_drafter(kind, config, target.info, target.weights, 5, counts), folder, target.info
    )
    return {"checkpoint": str(folder)}


def tokens_of(target: Any, drafter: Any, **settings: Any) -> dict[int, Any]:
    config = DecodeConfig(batch_size=2, **settings)
    return {
        c.request.index: (c.tokens, c.passes)
        for c in Engine(target, drafter, config).run(requests(3))
    }


def test_a_saved_cascade_needs_no_other_folder(tmp_path: Path) -> None:
    target = random_target()
    part = saved(target, "eagle3", tmp_path / "part", draft_vocab_size=31)
    inner = saved(
        target, "cascade", tmp_path / "inner", mode="join", parts=(part, NGRAM), branches=(2,)
    )
    drafter = cascade(target, inner, {"kind": "ngram", "max_n": 2}, mode="join", branches=(1,))
    save_drafter(drafter, tmp_path / "all", target.info)
    shutil.rmtree(tmp_path / "part")
    shutil.rmtree(tmp_path / "inner")
    assert "checkpoint" not in (tmp_path / "all" / "config.json").read_text()
    loaded = load_drafter(tmp_path / "all", target.info, target.weights)
    settings: dict[str, Any] = {
        "shape": "dynamic",
        "nodes": 9,
        "depth": 3,
        "width": 3,
        "temperature": 0.7,
    }
    found = tokens_of(target, loaded, **settings)
    assert found == tokens_of(target, drafter, **settings)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(name.startswith("parts.0.parts.0.") for name in loaded.state_dict())
    other = random_target("llama", 4, vocab_size=98)
    with pytest.raises(UserError, match="was trained for target"):
        load_drafter(tmp_path / "all", other.info, other.weights)


def test_a_part_for_another_target_and_incomplete_weights_are_refused(tmp_path: Path) -> None:
    target, other = random_target(), random_target("llama", 4, vocab_size=98)
    part = saved(other, "eagle3", tmp_path / "part")
    with pytest.raises(UserError, match="was trained for target"):
        cascade(target, part, NGRAM, mode="join")
    part = saved(target, "eagle3", tmp_path / "part")
    config = json.loads((tmp_path / "part" / "config.json").read_text())
    config["config"]["taps"] = [1]
    (tmp_path / "part" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit kind 'eagle3'"):
        cascade(target, part, NGRAM, mode="join")


def test_a_cascade_within_a_cascade_is_lossless() -> None:
    """A sped-up drafter joined with a lookup: three levels deep and two wide."""
    target = random_target()
    inner = {"kind": "cascade", "parts": [NGRAM, EARLY], "rounds": 2}
    drafter = cascade(target, inner, NGRAM, mode="join", branches=(2,))
    plain = {i: tokens for i, (tokens, _) in tokens_of(target, None, temperature=0.8).items()}
    for shape in (
        {"shape": "chain", "depth": 4},
        {"shape": "dynamic", "nodes": 9, "depth": 3, "width": 3},
    ):
        found = tokens_of(target, drafter, temperature=0.8, **shape)
        assert {i: tokens for i, (tokens, _) in found.items()} == plain


def test_training_a_cascade_says_what_to_train_instead() -> None:
    target = micro_target()
    drafter = cascade(target, NGRAM, EARLY)
    assert not get_kind("cascade").trainable
    assert not get_kind("cascade").needs_training(drafter.config)
    with pytest.raises(UserError, match="train its parts"):
        drafter.loss(packed_batch(target, drafter.needs, [PAIR]))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([EARLY, EARLY], "reads the target's inner states"),
        ([NGRAM, {"kind": "medusa"}], "cannot judge tokens"),
        ([NGRAM, {"kind": "ngrm"}], "Did you mean 'ngram'"),
        ([NGRAM, {}], r"either \{checkpoint: FOLDER\}"),
        ([NGRAM, {"kind": "early_exit", "exit": 2}], "does not fit kind 'early_exit'"),
        ([NGRAM, {"kind": "distilled"}], r"of kind 'distilled'.*headstart train head=distilled"),
    ],
)
def test_parts_that_cannot_do_what_is_asked_are_refused(
    parts: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        cascade(micro_target(), *parts)


@torch.no_grad()
def test_a_sped_up_language_model_speeds_up_another_one(tmp_path: Path) -> None:
    """Three levels, n-gram -> small LM -> part of the target: the last one's chain, with caches put
    back without a copy."""
    target = micro_target()
    small = saved(target, "distilled", tmp_path, from_target_layers=(0, 1, 2))
    inner = {"kind": "cascade", "parts": [NGRAM, small], "proposed": 2, "rounds": 2}
    alone = new_drafter(
        "early_exit", get_kind("early_exit").config_class(), target.info, target.weights, 0
    )
    noise = SharedNoise(SamplingSettings(temperature=1.0), torch.tensor([3, 4]), 41)
    wanted = walked(target, alone, noise, TokenTree.chain(6))
    reached = []
    for lower in (small, inner):
        drafter = cascade(target, lower, EARLY, rounds=2, proposed=3)
        for one, two in zip(
            wanted, walked(target, drafter, noise, TokenTree.chain(6)), strict=True
        ):
            assert two.limit is not None
            for row, live in enumerate(two.limit.tolist()):
                assert two.tokens[row, : live + 1].tolist() == one.tokens[row, : live + 1].tolist()
                reached.append(live)
    assert max(reached) > 3, "no proposal was ever right, so nothing was tested"


@torch.no_grad()
def test_caches_that_are_not_copied_still_draft_the_same_afterwards(tmp_path: Path) -> None:
    """`behind_root`: after a draft the small model must propose what it would have proposed
    before."""
    target = micro_target()
    small = saved(target, "distilled", tmp_path, from_target_layers=(0, 1, 2))
    drafter = cascade(target, small, EARLY, rounds=3, proposed=2)
    state = drafter.start(
        seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)]), TokenTree.chain(6), 32
    )
    lower = drafter.drafters[0]
    fresh = lower.propose(copy.deepcopy(state.parts[0]), PlainNoise()).tokens
    drafter.propose(state, PlainNoise())
    assert torch.equal(lower.propose(state.parts[0], PlainNoise()).tokens, fresh)
    cached = {id(value) for value in (*state.parts[0].keys, *state.parts[0].values)}
    assert not cached & {id(value) for value in state_tensors(state.parts[0])}
