"""The carrying layer: from the first step on every slot of a block holds the root's embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.nn.block.attention import View, attend_blocks
from heads.nn.block.carry import start_carrying
from heads.nn.block.layers import BlockLayer
from heads.nn.blocks import LayerShape, initialise_blocks
from heads.nn.rope import Rope

HIDDEN, SLOTS, CONTEXT = 128, 8, 40


def embeddings(count: int = 600) -> Tensor:
    """Small, with some directions used more than others, and a mean that is not zero."""
    generator = torch.Generator().manual_seed(0)
    used = torch.linspace(0.2, 2.0, HIDDEN)
    return 0.05 * (torch.randn(count, HIDDEN, generator=generator) * used + 0.4)


def carried(own_context: bool, roots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the started layer makes of blocks behind random contexts: (slots [R, b, H], mask
    embedding [H], the directions [g, D, H] that its value heads hold).
    """
    generator = torch.Generator().manual_seed(1)
    layer, mask = (
        BlockLayer(LayerShape(HIDDEN, 4, 2, 64, 96, 1e-6), own_context),
        torch.empty(HIDDEN),
    )
    initialise_blocks(layer, generator)
    table = embeddings()
    rope, count = Rope(64, 10000.0), len(roots)
    start_carrying(layer, mask, table, rope)
    features = F.rms_norm(torch.randn(count, CONTEXT, HIDDEN, generator=generator), (HIDDEN,))
    context = layer.self_attn.context(
        features, rope.at(torch.arange(CONTEXT).expand(count, -1), torch.float32)
    )
    last = torch.full((count, 1), CONTEXT - 1)
    view = View.of(
        torch.ones(count, CONTEXT, dtype=torch.int32), last, SLOTS, causal=False, flex=False
    )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part[:, None] for part in (query, key, value))
        return attend_blocks(query, context, (key, value), view).flatten(0, 1)

    slots = torch.cat([table[roots][:, None], mask.expand(count, SLOTS - 1, -1)], 1)
    places = CONTEXT + torch.arange(SLOTS).expand(count, -1)
    return (
        layer(slots, rope.at(places, torch.float32), attend),
        mask,
        layer.self_attn.v_proj.weight.view(2, 64, HIDDEN),
    )


@torch.no_grad()
def test_the_first_slot_holds_the_root_and_later_ones_a_part_of_it() -> None:
    """Contexts lie on either side by chance: the root wins because it is nearer."""
    roots = torch.arange(0, 600, 10)
    for own_context in (False, True):
        slots, mask, directions = carried(own_context, roots)
        words = embeddings()[roots]
        likeness = F.cosine_similarity(slots[:, 1] - mask, words, dim=-1)
        assert float((likeness > 0.95).float().mean()) > 0.95
        looked_for, before = ((slots - mask) @ part.T for part in directions)
        likeness = F.cosine_similarity(
            looked_for[:, 1:], (words @ directions[0].T)[:, None], dim=-1
        )
        assert float((likeness > 0.95).float().mean()) > 0.95
        likeness = F.cosine_similarity(
            before[:, 3:], (mask @ directions[1].T).expand_as(before[:, 3:]), dim=-1
        )
        # behind the first slot the one before is a mask
        assert float(likeness.abs().median()) > 0.9


@torch.no_grad()
def test_it_carries_as_much_as_an_embedding_weighs() -> None:
    roots = torch.arange(0, 600, 10)
    slots, mask, _ = carried(False, roots)
    sizes = (slots - mask)[:, 1].norm(dim=-1) / embeddings()[roots].norm(dim=-1)
    assert 0.8 < float(sizes.median()) < 1.25
    assert float(mask.norm() / embeddings().norm(dim=1).median()) < 0.6
