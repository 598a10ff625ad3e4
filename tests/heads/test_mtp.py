"""Multi-token prediction: own blocks and the recursed one against their definitions, drafting with
committed columns alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.tree import DynamicShape, TokenTree
from heads.mtp import Config, Drafter, MtpBlock
from inference.parity import check_parity
from tests.heads.explicit import (
    CHOICES,
    DOCUMENTS,
    PACKED,
    Rows,
    attend,
    behind_attention,
    check_paths_of_a_tree,
    check_pieces_equal_the_whole,
    project,
    rms,
    shake_norms,
)
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states

FORMS = [{"shared": False}, {"shared": True, "beta": 0.6}]


def make(target: MicroTarget, **options: object) -> Drafter:
    config = Config(**{"depths": 3, **options})
    drafter = new_drafter("mtp", config, target.info, target.weights, seed=0)
    shake_norms(drafter)
    return drafter.eval()


def joined(drafter: Drafter, block: MtpBlock, token: int, state: Tensor) -> Tensor:
    embedded = rms(block.pre_fc_norm_embedding.weight, drafter.target.embedding[token])
    return block.fc.weight @ torch.cat([embedded, rms(block.pre_fc_norm_hidden.weight, state)])


def output_of(block: MtpBlock, residual: Tensor, position: int, seen: Rows) -> Tensor:
    """Normalised output of one row; its own keys and values are appended to `seen`."""
    layer = block.layer
    query, key, value = project(
        layer.self_attn, rms(layer.input_layernorm.weight, residual), position
    )
    seen.append((key, value))
    x = behind_attention(layer, residual, attend(layer.self_attn, query, seen))
    return rms(block.norm.weight, x)


def explicit(drafter: Drafter, document: list[int], true: Tensor) -> dict[tuple[int, int], Tensor]:
    """h^k at row s, for own blocks and for a shared one."""
    return (explicit_shared if drafter.config.shared else explicit_own)(drafter, document, true)


def explicit_own(
    drafter: Drafter, document: list[int], true: Tensor
) -> dict[tuple[int, int], Tensor]:
    """Block by block over its rows: row s of block k reads h^{k-1}_s and the token at s+k. Blocks
    behind the first have rows from -(k-1) on, the first of which reads zeros.
    """
    states = {(0, s): true[s] for s in range(len(document))}
    for k, block in enumerate(drafter.blocks, start=1):
        seen: Rows = []
        for s in range(1 - k, len(document) - k):
            state = states.get((k - 1, s), torch.zeros_like(true[0]))
            states[k, s] = output_of(block, joined(drafter, block, document[s + k], state), s, seen)
    return {(k, s): value for (k, s), value in states.items() if k > 0 and s >= 0}


def explicit_shared(
    drafter: Drafter, document: list[int], true: Tensor
) -> dict[tuple[int, int], Tensor]:
    """Row by row: the true rows up to s, then the block's own chain behind them."""
    block, context, found = drafter.blocks[0], [], {}
    for s in range(len(document) - 1):
        state, chain = true[s], list(context)
        for k in range(1, drafter.config.depths + 1):
            if s + k >= len(document):
                break
            state = output_of(
                block, joined(drafter, block, document[s + k], state), s + k - 1, chain
            )
            found[k, s] = state
            if k == 1:
                context.append(chain[-1])
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("soft", [True, False])
def test_outputs_and_loss_equal_the_definition(target: MicroTarget, form: dict, soft: bool) -> None:
    drafter = make(target, soft_labels=soft, **form)
    needs = make(target, soft_labels=True, **form).needs
    batch = packed_batch(target, needs, PACKED)
    outputs = drafter.chain.unroll(batch, 3)
    beta, expected, count = drafter.config.beta, torch.zeros((), dtype=torch.float64), [0] * 3
    weights = torch.tensor([beta**k for k in range(3)]).double()
    for row, documents in enumerate(PACKED):
        first = 0
        for document in documents:
            true = batch.last_hidden[row, first : first + len(document)]
            for (k, s), value in explicit(drafter, document, true).items():
                torch.testing.assert_close(
                    outputs[k - 1][row, first + s], value, rtol=1e-5, atol=1e-5
                )
                if not 2 <= s + k + 1 < len(document):
                    continue
                log_q = target.weights.logits(value).log_softmax(-1)
                wanted = target.weights.logits(true[s + k]).softmax(-1)
                loss = -(wanted * log_q).sum() if soft else -log_q[document[s + k + 1]]
                expected += weights[k - 1] / weights.sum() * loss
                count[k - 1] += 1
            first += len(document)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert [int(output.metrics[f"loss/depth{k}"][1]) for k in (1, 2, 3)] == count


def test_fastmtp_weights_are_the_published_ones(target: MicroTarget) -> None:
    """0.51, 0.31 and 0.18 for three depths."""
    drafter = make(target, shared=True, beta=0.6)
    batch = packed_batch(target, drafter.needs, PACKED)
    output = drafter.loss(batch)
    parts = [float(output.metrics[f"loss/depth{k}"][0]) for k in (1, 2, 3)]
    expected = sum(w * part for w, part in zip((0.51, 0.31, 0.18), parts, strict=True))
    assert float(output.loss_sum) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_computes_what_training_did(target: MicroTarget, form: dict) -> None:
    assert check_parity(target, make(target, **form), DOCUMENTS, depth=3).compared > 12
    assert check_parity(target, make(target, **form), DOCUMENTS, depth=1).compared > 4


@pytest.mark.parametrize("form", FORMS)
def test_trees_and_pieces(target: MicroTarget, form: dict) -> None:
    """Rows as short as one token: the deeper blocks have no state to read yet."""
    drafter = make(target, **form)
    check_paths_of_a_tree(target, drafter, CHOICES, torch.arange(41))
    check_pieces_equal_the_whole(target, drafter, TokenTree.from_choices(CHOICES))


@torch.no_grad()
def test_blocks_beyond_the_draft_are_not_run(target: MicroTarget) -> None:
    drafter = make(target)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    state = drafter.start(seen, DynamicShape(4, 2, 2), 32)
    assert len(state.keys) == len(state.values) == state.output.shape[2] == 2
    assert drafter.propose(state, PlainNoise()).tokens.shape == (2, 4)


def test_own_blocks_draft_no_deeper_than_they_are(target: MicroTarget) -> None:
    drafter = make(target)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    with pytest.raises(UserError, match=r"decode.depth to 3 or less"):
        drafter.start(seen, TokenTree.chain(4), 32)
    recursed = make(target, shared=True, depths=1)
    assert check_parity(target, recursed, DOCUMENTS, depth=4).compared > 12


def test_weights_of_the_recursed_form_are_those_that_engines_load(target: MicroTarget) -> None:
    """The names that vLLM and SGLang load (docs/serving.md)."""
    layer = {f"mtp.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    layer |= {f"mtp.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    layer |= {
        f"mtp.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")
    }
    rest = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
    assert set(make(target, shared=True).state_dict()) == layer | {
        f"mtp.{name}.weight" for name in rest
    }
    own = make(target, shared=False).state_dict()
    assert len(own) == 3 * (len(layer) + len(rest)) and "mtp.2.fc.weight" in own


@pytest.mark.parametrize("form", FORMS)
def test_blocks_start_from_a_layer_of_the_target(target: MicroTarget, form: dict) -> None:
    drafter = new_drafter(
        "mtp", Config(depths=2, from_target_layer=3, **form), target.info, target.weights, 0
    )
    for block in drafter.blocks:
        for name in ("self_attn.k_proj", "mlp.down_proj", "input_layernorm"):
            expected = target.weights.state[f"model.layers.3.{name}.weight"]
            assert torch.equal(block.layer.get_submodule(name).weight, expected)
    with pytest.raises(UserError, match=r"head.from_target_layer=9 does not fit"):
        new_drafter("mtp", Config(from_target_layer=9, **form), target.info, target.weights, 0)
