"""A first draft layer that starts by carrying the root's embedding to the slots of the block.

After the root, a block consists of equal mask embeddings, which carry no information. Slots first
have to learn to look at the root; until then they can learn nothing else. Here the first layer does
this from the start, using only the weights of an ordinary layer. Equal queries and keys score by
their distance alone, through their rotations:

* Half of the key/value heads look for the root: their keys read one direction on which nearly all
  embeddings lie on one side (least squares over the vocabulary; their mean would leave the frequent
  ones out), and the norm of key heads keeps only the side. The mask embedding starts on the other
  side, so the nearest key that counts is the root's.
* The other half (all heads if there is only one) look at the slot before. So the first drafted slot
  holds the whole root and the later ones a part of it. If all were equal, the deeper depths, which
  are hard to predict, would spoil the first.
* Values are the leading principal directions of the embeddings, as many as the value heads hold,
  and the output matrix turns them back, at the embeddings' own size. The MLP starts at zero.

Legend: V vocabulary, H hidden, g key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.nn import init
from heads.nn.block.layers import BlockLayer
from heads.nn.rope import Rope, rotate

SHARPNESS = 24.0
"""Factor on scores: the seventh token before a slot must beat the eighth."""
MASK_SIZE = 0.5
"""Length of the mask embedding as a share of the embeddings': the root outweighs it."""


@torch.no_grad()
def start_carrying(layer: BlockLayer, mask: Tensor | None, embedding: Tensor, rope: Rope) -> None:
    """Set `layer`, and the mask embedding [H] where it is learned, from the target's embeddings [V,
    H]. rope: of the layer's heads.

    Assumes that `layer` holds random values (its MLP's inner matrices keep them).
    """
    rows = embedding.detach().float()
    size = rows.square().mean(1).sqrt().median()  # per element
    normed = F.rms_norm(rows, rows.shape[-1:])
    moments = normed.T @ normed / rows.shape[0]  # [H, H]
    ridge = 1e-3 * moments.diagonal().mean() * torch.eye(rows.shape[1], device=rows.device)
    side = F.normalize(torch.linalg.solve(moments + ridge, normed.mean(0)), dim=0)
    # The directions that tokens use, the least used first: that one distinguishes the mask from
    # them.
    spread = torch.linalg.eigh(moments).eigenvectors
    quiet = F.normalize(spread[:, 0] - (spread[:, 0] @ side) * side, dim=0)
    attention = layer.self_attn
    size_of = attention.head_dim
    heads, kv_heads = (p.out_features // size_of for p in (attention.q_proj, attention.k_proj))
    constant = torch.zeros(size_of, device=rows.device)
    # Without the pairs that turn fastest: within a block their scores rise again with the distance.
    constant[size_of // 16 : size_of // 2] = 1.0
    init.constant(layer.input_layernorm.weight, 1.0)
    both = side + 2.0 * quiet  # tokens and masks are on one side of this
    whole = torch.zeros_like(constant)
    whole[: size_of // 2] = 1.0
    one_back = rope.at(torch.full((1, 1), -1, device=rows.device), whole.dtype)
    turned = rotate(whole[None, None, None], one_back).flatten()
    groups = heads // kv_heads
    before = max(1, kv_heads // 2)  # heads that look at the slot before; the others for the root
    near = kv_heads - before
    for_root = torch.outer(constant.repeat(near), side)
    init.copy(
        attention.k_proj.weight, torch.cat([for_root, torch.outer(whole.repeat(before), both)])
    )
    asked = torch.cat([constant.repeat(near * groups), turned.repeat(before * groups)])
    init.copy(attention.q_proj.weight, torch.outer(asked, both))
    for norm in (attention.q_norm, attention.k_norm):
        assert norm is not None
        init.constant(norm.weight, SHARPNESS**0.5)
    leading = spread.flip(1)[:, : kv_heads * size_of]  # [H, g * D]
    held = torch.zeros(rows.shape[1], kv_heads * size_of, device=rows.device)
    held[:, : leading.shape[1]] = leading
    init.copy(attention.v_proj.weight, held.T)
    # a group's heads share it
    back = held.unflatten(1, (kv_heads, 1, -1)).expand(-1, -1, groups, -1) / groups
    init.copy(attention.o_proj.weight, size * back.flatten(1))
    for name in "kv":
        own = getattr(attention, f"context_{name}_proj")
        if own is not None:
            init.copy(own.weight, getattr(attention, f"{name}_proj").weight)
    init.constant(layer.mlp.down_proj.weight, 0.0)
    if mask is not None:
        direction = F.normalize(quiet - 0.5 * side, dim=0)
        init.copy(mask, MASK_SIZE * size * rows.shape[1] ** 0.5 * direction)
