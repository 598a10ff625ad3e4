"""What holds for every recipe of conf/head/ and so for every kind: lossless decoding, steps without
host synchronisation, training equal to decoding, complete checkpoints, own gradients only, errors
for settings that make no sense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.api.checkpoint import load_drafter, new_drafter, read_config, save_drafter
from heads.api.config import build as to_dataclass
from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from heads.api.state import write_rows
from heads.api.tree import DraftShape, DynamicShape, TokenTree
from heads.nn.matrices import matrices
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.parity import check_parity
from inference.target.model import TargetModel
from tests.heads.explicit import LONG_PAIR, PAIR
from tests.heads.micro import PlainNoise, micro_target, packed_batch, seen_states
from tests.heads.recipes import (
    MICRO,
    RECIPES,
    SENSELESS,
    TRAINED,
    UNREACHED,
    WITH_WEIGHTS,
    build,
    recipe,
    unnamed_kinds,
)
from tests.inference.steps import NoHost
from tests.models import VOCAB, plain_texts, random_target

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"shape": "chain", "depth": 4},
    "tree": {"shape": "tree", "choices": TREE},
    "dynamic": {"shape": "dynamic", "nodes": 9, "depth": 3, "width": 3},
}
DRAFTS: dict[str, DraftShape] = {
    "chain": TokenTree.chain(3),
    "tree": TokenTree.from_choices(TREE),
    "dynamic": DynamicShape(9, 3, 3),
}
NAMED_BY_THE_FIELD = (
    "medusa hydra_heads eagle eagle3 peagle mtp dflash jetspec dspark domino dflash2 lilicorr "
    "distilled pard early_exit quantized_self uno ngram suffix lookahead jacobi cascade"
).split()


def test_no_kind_and_no_recipe_is_left_out() -> None:
    assert unnamed_kinds() == []
    assert set(MICRO) <= set(RECIPES), "changes for a recipe that does not exist"
    assert set(NAMED_BY_THE_FIELD) <= set(RECIPES)
    assert set(SENSELESS) == set(kind_names())


# Decoding


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in (9, 1, 5, 12, 3)
    ]
    return [
        Request(i, tuple(prompt), seed=40 + i, max_new_tokens=20)
        for i, prompt in enumerate(prompts)
    ]


def texts(drafter: str, **settings: Any) -> dict[int, list[int]]:
    target = random_target()
    found = Engine(target, build(drafter, target), DecodeConfig(**settings))
    return {c.request.index: c.tokens for c in found.run(requests())}


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        ("chain", 0.0),
        *((shape, 0.8) for shape in SHAPES),
        # greedy trees of every recipe: test_greedy_text_is_the_same_under_every_rule
        *(pytest.param(shape, 0.0, marks=pytest.mark.slow) for shape in ("tree", "dynamic")),
    ],
)
@pytest.mark.parametrize("name", RECIPES)
def test_lossless_in_a_refilled_ragged_batch(name: str, shape: str, temperature: float) -> None:
    found = texts(name, temperature=temperature, batch_size=3, **SHAPES[shape])
    assert found == plain_texts(requests(), temperature=temperature)


def build_or_refusal(name: str, target: TargetModel) -> Any:
    try:
        return build(name, target)
    except UserError as error:
        return error


@pytest.mark.rotated
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
@pytest.mark.parametrize("name", RECIPES)
def test_other_families_are_served_losslessly_or_refused_by_name(name: str, family: str) -> None:
    """A window and no rotary positions at all: what cannot use them says so, nothing drafts
    nonsense in silence."""
    target = random_target(family)
    drafter = build_or_refusal(name, target)
    if isinstance(drafter, UserError):
        assert target.info.model_type in str(drafter)
        return
    settings = DecodeConfig(temperature=1.0, batch_size=3, depth=3)
    found = Engine(target, drafter, settings).run(requests())
    plain = plain_texts(requests(), family, temperature=1.0, batch_size=3)
    assert {c.request.index: c.tokens for c in found} == plain


WEIGHED = [
    ("rejection", "chain"),
    ("specinfer", "tree"),
    ("specinfer", "dynamic"),
    ("block", "chain"),
    ("specinfer", "chain"),
]


# A rule sees nothing of a kind but its proposal: what differs between rules for one shape is held
# on drafts with and without logits.
@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "rule", "shape"),
    [(name, *case) for name in RECIPES for case in WEIGHED[:3]]
    + [(name, *case) for name in ("eagle3", "ngram") for case in WEIGHED[3:]],
)
def test_greedy_text_is_the_same_under_every_rule(name: str, rule: str, shape: str) -> None:
    assert texts(name, rule=rule, batch_size=2, **SHAPES[shape]) == plain_texts(requests())


class Recorder:
    """Temperature 1 with noise that follows from token and position, and a record of the logits
    shown for every position."""

    keeps_logits = True
    separate = False

    def __init__(self) -> None:
        self.shown: dict[tuple[int, int], list[Tensor]] = {}

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        for row in range(logits.shape[0]):
            for column, position in enumerate(positions[row].tolist()):
                self.shown.setdefault((row, position), []).append(logits[row, column].clone())
        ids = torch.arange(logits.shape[-1]) if token_ids is None else token_ids
        keyed = torch.sin(ids * 12.9898 + positions[..., None] * 78.233) * 43758.5453
        return logits.float().log_softmax(-1) - torch.log(
            -torch.log((keyed - keyed.floor()).clamp(1e-6, 1 - 1e-6))
        )

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self.scores(logits, positions, token_ids).argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float()


@pytest.mark.rotated
@pytest.mark.parametrize("shape", DRAFTS)
@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_what_drafts_were_drawn_from_is_what_the_rules_are_told(name: str, shape: str) -> None:
    """Rules that weigh drafts rely on `Proposal.logits`: each row must have been shown to the noise
    for just that position."""
    target = micro_target()
    drafter = build(name, target)
    seen = seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)])
    noise = Recorder()
    proposal = drafter.propose(drafter.start(seen, DRAFTS[shape], 32), noise)
    if proposal.logits is None:
        return  # certain drafts: the rules take them as such
    assert proposal.logits.shape[:2] == proposal.tokens.shape
    parents, depth = (value.expand(2, -1) for value in (proposal.tree.parents, proposal.tree.depth))
    for row, last in enumerate((7, 5)):
        for node in range(1, proposal.tokens.shape[1]):
            if proposal.limit is not None and depth[row, node] > proposal.limit[row]:
                continue  # a dead node, which nobody judges
            drawn_from = proposal.logits[row, parents[row, node]]
            if (
                drawn_from.isfinite().sum() == 1
                and drawn_from.argmax() == proposal.tokens[row, node]
            ):
                continue  # a certain draft
            shown = noise.shown.get((row, last + int(depth[row, node])), [])
            assert any(torch.equal(drawn_from, logits) for logits in shown), (row, node)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", DRAFTS)
@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_steps_do_not_wait_for_the_host(name: str, shape: str) -> None:
    target, draft = micro_target(), DRAFTS[shape]
    drafter = build(name, target)
    state = drafter.start(seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)]), draft, 32)
    accepted = seen_states(target, drafter.needs, PAIR, [(7, 9), (5, 6)])
    with NoHost():
        first = drafter.propose(state, PlainNoise())
        after = drafter.commit(state, accepted)
        second = drafter.propose(after, PlainNoise())
    assert after is state, "the state must be updated in place"
    for proposal in (first, second):
        assert proposal.tokens.shape[0] == 2 and proposal.tokens.shape[1] <= draft.num_nodes
        assert proposal.tree.max_depth <= draft.max_depth
        assert proposal.confidence is None or proposal.confidence.shape == proposal.tokens.shape
    assert second.tokens[:, 0].tolist() == [PAIR[0][9], PAIR[1][6]]


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_refilled_row_drafts_like_a_fresh_one(name: str) -> None:
    target, tree = micro_target(), TokenTree.from_choices(TREE)
    drafter = build(name, target)
    state = drafter.start(seen_states(target, drafter.needs, PAIR, [(0, 9), (0, 6)]), tree, 32)
    untouched = drafter.propose(state, PlainNoise()).tokens[1].tolist()
    fresh = seen_states(target, drafter.needs, [PAIR[1]], [(0, 3)])
    write_rows(state, torch.tensor([0]), drafter.start(fresh, tree, 32))
    tokens = drafter.propose(state, PlainNoise()).tokens
    assert tokens[1].tolist() == untouched
    assert (
        tokens[0].tolist()
        == drafter.propose(drafter.start(fresh, tree, 32), PlainNoise()).tokens[0].tolist()
    )


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_checkpoint_is_loaded_completely_or_not_at_all(name: str, tmp_path: Path) -> None:
    target = micro_target()
    drafter = build(name, target)
    save_drafter(drafter, tmp_path, target.info)
    loaded = load_drafter(tmp_path, target.info, target.weights)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        save_file({key: value for key, value in tensors.items() if key != name}, path)
        with pytest.raises(UserError, match="missing tensors"):
            load_drafter(tmp_path, target.info, target.weights)
        if tensors[name].is_floating_point():
            save_file({**tensors, name: tensors[name].clone().fill_(float("nan"))}, path)
            with pytest.raises(UserError, match="not finite"):
                load_drafter(tmp_path, target.info, target.weights)
    save_file({**tensors, "stray": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"unknown tensors \['stray'\]"):
        load_drafter(tmp_path, target.info, target.weights)


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_weights_are_unset_until_initialised_and_the_same_for_a_seed(name: str) -> None:
    target = micro_target()
    kind, config = recipe(name)
    fresh = get_kind(kind).drafter_class(config, target.info)
    assert all(parameter.isnan().all() for parameter in fresh.parameters())
    one, two = (build(name, target, seed=3, shaken=0.0) for _ in range(2))
    for value, again in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(value, again)
        assert not value.is_floating_point() or bool(torch.isfinite(value).all())


# Training


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_loss_reaches_every_weight_and_nothing_of_the_target(name: str) -> None:
    target = micro_target()
    drafter = build(name, target)
    drafter.loss(packed_batch(target, drafter.needs, [PAIR])).loss_sum.backward()
    unreached = {
        weight
        for weight, parameter in drafter.named_parameters()
        if parameter.requires_grad
        and (parameter.grad is None or not bool(parameter.grad.abs().sum() > 0))
    }
    assert unreached == set(UNREACHED.get(name, ()))
    assert all(value.grad is None for value in target.model.parameters())


@pytest.mark.rotated
@pytest.mark.parametrize("order", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("name", TRAINED)
def test_packed_documents_do_not_see_each_other(name: str, order: int) -> None:
    """The loss of one document stays the same whatever stands in the other one of its row."""
    target = micro_target()
    drafter = build(name, target)
    found = []
    for change in (0, 1):
        documents = [list(document) for document in PAIR]
        other = documents[1 - order]
        documents[1 - order] = [(token + change) % 40 for token in other]
        batch = packed_batch(target, drafter.needs, [documents])
        batch.loss_mask &= batch.segments == order + 1
        output = drafter.loss(batch)
        found.append(output)
    torch.testing.assert_close(found[0].loss_sum, found[1].loss_sum, rtol=1e-10, atol=1e-10)
    assert found[0].loss_sum.item() > 0
    assert found[0].metrics.keys() == found[1].metrics.keys()


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_a_loss_draws_from_its_rows_seeds_alone(name: str) -> None:
    """Same seeds, same loss, whatever the global generator did; and rows may be dealt to processes
    in any way."""
    target = micro_target()
    drafter = build(name, target)
    batch = packed_batch(target, drafter.needs, [[PAIR[0]], [PAIR[1]]])
    batch.seeds = torch.tensor([11, 12])
    sums = []
    for _ in range(2):
        torch.rand(5)
        sums.append(drafter.loss(batch).loss_sum.detach())
    assert torch.equal(*sums)
    parts = []
    for row, seed in ((0, 11), (1, 12)):
        alone = packed_batch(target, drafter.needs, [[PAIR[0]], [PAIR[1]]])
        alone.loss_mask[1 - row] = False
        alone.seeds = torch.tensor([seed, 99] if row == 0 else [99, seed])
        parts.append(drafter.loss(alone).loss_sum.detach())
    torch.testing.assert_close(parts[0] + parts[1], sums[0])


@pytest.mark.parametrize("name", TRAINED)
def test_matrices_of_optimisers_map_states_and_are_no_tables_of_tokens(name: str) -> None:
    """`heads.nn.matrices`: all weights but vectors, tables over the vocabulary, and the few that
    are neither."""
    target = micro_target()
    drafter = build(name, target)
    sizes = {target.info.vocab_size, getattr(drafter.config, "draft_vocab_size", 0)}
    chosen = {id(weight) for weight in matrices(drafter)}
    assert chosen
    for weight, parameter in drafter.named_parameters():
        table = parameter.ndim > 1 and bool(sizes & set(parameter.shape))
        other = parameter.ndim < 2 or weight.endswith(
            (".mix", "base_kernel", "mask_hidden", "_bias", "_embedding")
        )
        assert (id(parameter) in chosen) == (not table and not other), weight


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_nothing_supervised_is_a_loss_of_zero(name: str) -> None:
    target = micro_target()
    drafter = build(name, target)
    output = drafter.loss(packed_batch(target, drafter.needs, [PAIR], prompt=99))
    output.loss_sum.backward()
    assert float(output.loss_sum) == 0
    assert all(int(count) == 0 for _, count in output.metrics.values())


@pytest.mark.rotated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_lower_precision_stays_close(name: str, dtype: torch.dtype) -> None:
    exact, rounded = micro_target(), micro_target(dtype)
    drafters = [build(name, target) for target in (exact, rounded)]
    drafters[1].load_state_dict(drafters[0].state_dict())
    losses = [
        drafter.loss(packed_batch(target, drafter.needs, [PAIR])).loss_sum.item()
        for drafter, target in zip(drafters, (exact, rounded), strict=True)
    ]
    assert losses[1] == pytest.approx(
        losses[0], rel={torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    )
    seen = seen_states(rounded, drafters[1].needs, PAIR, [(0, 7), (0, 5)])
    with torch.no_grad():
        state = drafters[1].start(seen, TokenTree.chain(3), 32)
        assert drafters[1].propose(state, PlainNoise()).tokens.shape == (2, 4)


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINED)
def test_a_micro_batch_can_be_learnt_by_heart(name: str) -> None:
    """The first drafted token that is learnt is right at four of five places after enough steps on
    two documents (chance: one in forty)."""
    target = micro_target(torch.float32)
    drafter = build(name, target, whole_vocabulary=True).train()
    batch = packed_batch(target, drafter.needs, [PAIR])
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0.01)
    best = 0.0
    for step in range(400):
        batch.progress = step / 400
        output = drafter.loss(batch)
        first = next(name for name in output.metrics if name.startswith("accuracy/depth"))
        correct, count = output.metrics[first]
        best = max(best, float(correct) / max(1, int(count)))
        if best >= 0.8:
            return
        optimizer.zero_grad()
        (output.loss_sum / max(1, int(count))).backward()
        optimizer.step()
    raise AssertionError(f"after 400 steps {best:.2f} of the first tokens are right")


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_training_computes_what_decoding_computes(name: str) -> None:
    target = micro_target()
    report = check_parity(target, build(name, target), LONG_PAIR, depth=4)
    assert report.compared > 0 and len(report.worst) == 4


# The rest of the contract


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_accounted_for(name: str) -> None:
    target = random_target()
    drafter = build(name, target)
    engine = Engine(target, drafter, DecodeConfig(depth=3, batch_size=2), capacity=64)
    list(engine.run(requests()[:1]))
    counted = engine.memory_bytes()["drafter"]
    own = (
        sum(t.numel() * t.element_size() for t in drafter.state_dict().values())
        if isinstance(drafter, torch.nn.Module)
        else 0
    )
    assert counted >= own
    assert counted < 4_000_000, "a micro drafter cannot need megabytes"


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
def test_the_stored_configuration_rebuilds_the_drafter(name: str, tmp_path: Path) -> None:
    target = random_target()
    drafter = build(name, target)
    save_drafter(drafter, tmp_path, target.info)
    assert read_config(tmp_path)["kind"] == recipe(name)[0]
    loaded = load_drafter(tmp_path, target.info, target.weights)
    assert loaded.needs == drafter.needs
    settings = DecodeConfig(depth=3, temperature=0.5)
    passes = [
        {c.request.index: c.passes for c in Engine(target, d, settings).run(requests()[:2])}
        for d in (drafter, loaded)
    ]
    assert passes[0] == passes[1]


@pytest.mark.parametrize(
    ("kind", "values"), [(kind, v) for kind, many in SENSELESS.items() for v in many]
)
def test_settings_that_make_no_sense_are_refused(kind: str, values: dict[str, Any]) -> None:
    """At the latest when the drafter is built and asked to draft, in one sentence that names a
    setting."""
    with pytest.raises(UserError, match=r"(head|decode|measure)\."):
        built_and_started(kind, values)


def built_and_started(kind: str, values: dict[str, Any]) -> None:
    target = micro_target()
    config = to_dataclass(get_kind(kind).config_class, values, "head")
    drafter = new_drafter(
        kind, config, target.info, target.weights, 0, torch.arange(target.info.vocab_size)
    )
    seen = seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)])
    drafter.start(seen, TokenTree.chain(4), 32)
