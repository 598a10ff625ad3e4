"""The target's attention: one function for training features, prefill and tree verification.

It is registered with transformers' `AttentionInterface` without a mask function, so that models
build no dense mask. The `AttentionPlan` of the running forward pass says which keys are visible. If
the tree attention kernel runs, the plan gives it the tree's bits; otherwise it builds a mask.
Sliding windows are tested by position, not by slot, because tree nodes of one depth share a
position. Soft-capping (Gemma 2) and attention sinks (GPT-OSS) use the plain path. Layers with an
indexer additionally pass the keys that each query may see (`indexed.py`). Layers that attend in
chunks, or that scale queries by their position (Llama 4), are marked beforehand (`mark_layers`), as
they do not pass either setting to the attention function.

A compiled layer gets no cache. There, writing keys and values and attending is one opaque operation
(`attend_in_cache`). It finds the layer by a number on the host, so that all layers share one
compiled graph (inference/decoding/execution/layers.py).

Legend: B rows, N queries, S keys, D head size, h key/value heads, G query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from heads.nn.attention import additive
from heads.nn.packing import Document
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.causal import Attend, Sight, causal_attention, packed_attention
from inference.target.exact import is_exact, node_by_node

NAME = "headstart"


@dataclass
class AttentionPlan:
    """The keys that the queries of one forward pass may see.

    allowed [B|1, N, S] bool, or None if plain causality suffices (`causal`: the queries are the
    last N positions) or every key is visible. documents: places of the documents of packed rows,
    each of which is causal; None: every row is one document. query_positions [B|1, N],
    key_positions [B|1, S] int64: for sliding windows only. nodes: the queries are tree nodes over
    the whole cache, for the kernel, which takes lengths [B] int64, words [1|B, N, W] int32 and
    depth [1|B, N] int64 instead of everything else. cache, modules: the cache that compiled layers
    write to, and their attention modules by number.
    """

    allowed: Tensor | None
    causal: bool
    query_positions: Tensor
    key_positions: Tensor
    nodes: tuple[Tensor, Tensor, Tensor] | None = None
    documents: tuple[Document, ...] | None = None
    cache: Any = None
    modules: Mapping[int, nn.Module] = field(default_factory=dict)
    _bias: dict[Any, Tensor | None] = field(default_factory=dict)

    def bias(
        self,
        window: int | None,
        groups: int,
        dtype: torch.dtype,
        chosen: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor | None:
        """Additive mask [B|1, 1, G*N, S] for packed queries; None if not needed. It is built once,
        except for layers that restrict it further by `chosen` [B, N, S] bool."""
        key = (window, chunk, groups, dtype)
        if chosen is None and key in self._bias:
            return self._bias[key]
        allowed = self.allowed_within(window, chunk)
        if chosen is not None:
            allowed = chosen if allowed is None else allowed & chosen
        bias = None if allowed is None else additive(allowed, dtype)
        bias = None if bias is None else bias[:, None].repeat(1, 1, groups, 1)
        if chosen is None:
            self._bias[key] = bias
        return bias

    def allowed_within(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """`allowed` with causality, the window and the chunk made explicit if they matter."""
        queries, keys = self.query_positions[:, :, None], self.key_positions[:, None, :]
        allowed = self.allowed
        if allowed is None and (self.causal or window is not None or chunk is not None):
            allowed = keys <= queries
        if window is not None and allowed is not None:
            allowed = allowed & (keys > queries - window)
        if chunk is not None and allowed is not None:
            allowed = allowed & (keys // chunk == queries // chunk)
        return allowed


_PLAN: ContextVar[AttentionPlan] = ContextVar("headstart_attention_plan")


@contextmanager
def attention_plan(plan: AttentionPlan) -> Any:
    """Within the block, the registered attention function follows `plan`."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@dataclass(frozen=True)
class LayerMarks:
    """Settings of an attention layer that it does not pass to the attention function. chunk: a
    query sees only keys of its own chunk of this many positions; tuning: floor_scale and
    attn_scale, by which queries grow with their position (2501.19399): 1 + attn_scale * log(1 +
    floor((position + 1) / floor_scale))."""

    chunk: int | None = None
    tuning: tuple[float, float] | None = None

    def scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries [B, h, N, D] at positions [B|1, N], scaled by `tuning`."""
        if self.tuning is None:
            return query
        floor, scale = self.tuning
        factor = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)


NO_MARKS = LayerMarks()
MARKS = "headstart_marks"
NUMBER = "headstart_number"
"""An attention module's number in its compiled layer: an int64 tensor on the host. A plain number
would be a constant of the compiled graph, and every layer would need a separate graph."""


def mark_layers(model: Any, config: Any) -> bool:
    """Mark the layers of a text model that attend in chunks or tune their queries. The tuning of
    marked layers is turned off, as they count positions from the beginning of a pass. Returns
    whether any layer attends in chunks."""
    kinds, chunked = getattr(config, "layer_types", None) or (), False
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if number is None or not hasattr(module, "attn_temperature_tuning"):
            continue
        if hasattr(module, MARKS):  # a second target of the same model
            chunked = chunked or getattr(module, MARKS).chunk is not None
            continue
        chunk = config.attention_chunk_size if kinds[number] == "chunked_attention" else None
        tuning = None
        if module.attn_temperature_tuning and not module.use_rope:
            tuning = float(module.floor_scale), float(module.attn_scale)
            module.attn_temperature_tuning = False
        setattr(module, MARKS, LayerMarks(chunk, tuning))
        chunked = chunked or chunk is not None
    return chunked


def planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, h*G, N, D], key, value [B, h, S, D] ->
    [B, N, h*G, D].

    indices [B, N, K] int32: the keys that an indexer lets each query see. If it has as many entries
    as there are keys, or is None, all keys are visible.
    """
    if torch.compiler.is_dynamo_compiling():
        number = getattr(module, NUMBER)
        return attend_in_cache(
            number, query, key, value, scaling, sliding_window, softcap, s_aux
        ), None
    # a model that adds its own scores, which the plan lacks (an indexer's mask is the plan's)
    if attention_mask is not None and indices is None:
        raise RuntimeError("the model gives its attention a mask of its own")
    plan = _PLAN.get()
    batch, heads, nodes, size = query.shape
    marks: LayerMarks = getattr(module, MARKS, NO_MARKS)
    query = marks.scaled(query, plan.query_positions)
    chunk = marks.chunk if marks.chunk is not None and key.shape[2] > marks.chunk else None
    chosen = None
    if indices is not None and indices.shape[-1] < key.shape[2]:
        chosen = torch.zeros(batch, nodes, key.shape[2], dtype=torch.bool, device=key.device)
        chosen = chosen.scatter(-1, indices.long(), True)
    if plan.nodes is not None:
        scale = size**-0.5 if scaling is None else scaling
        limits = {"window": sliding_window, "softcap": softcap, "sinks": s_aux}
        limits |= {"scaling": scale, "invariant": is_exact()}
        return TREE_ATTENTION(query, key, value, *plan.nodes, **limits), None
    key_heads = key.shape[1]
    groups = heads // key_heads
    shaped: Attend | None = None
    if softcap is not None or s_aux is not None:
        # torch's attention does not support these scores
        shaped = partial(_written_out, scaling=scaling, softcap=softcap, sinks=s_aux, groups=groups)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # queries of one group become extra rows, so that no key or value is copied
        rows, count = query.shape[0], query.shape[2]
        packed = query.reshape(rows, key_heads, groups * count, size)
        if shaped is not None:
            out = shaped(packed, key, value, bias)
        else:
            out = scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scaling)
        out = out.reshape(rows, heads, count, value.shape[-1])
        return out.transpose(1, 2).contiguous()

    if is_exact():
        allowed = plan.allowed_within(sliding_window, chunk)
        if chosen is not None:
            allowed = chosen if allowed is None else allowed & chosen
        return node_by_node(partial(attend, bias=None), query, key, value, allowed), None
    if plan.causal and chosen is None:
        sight = Sight(sliding_window, marks.chunk)
        given = query, key, value, sight, shaped
        if plan.documents is not None:
            return packed_attention(*given, plan.documents, scaling), None
        return causal_attention(*given, scaling=scaling), None
    return attend(
        query, key, value, plan.bias(sliding_window, groups, query.dtype, chosen, chunk)
    ), None


@torch.library.custom_op("headstart::attend_in_cache", mutates_args=())
def attend_in_cache(
    number: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write new keys [B, h, N, D] and values of layer `number` to the running plan's cache, and
    attend to the cache's keys: `planned_attention` -> [B, N, h*G, D]."""
    plan, layer = _PLAN.get(), int(number)
    keys, values = plan.cache.update(key, value, layer)
    limits: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
    module = plan.modules[layer]
    return planned_attention(module, query, keys, values, None, scaling, **limits)[0]


@attend_in_cache.register_fake
def _(number: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[-1])


def _written_out(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    groups: int,
) -> Tensor:
    """Attention of packed queries [B, h, G*N, D], keys [B, h, S, D] -> [B, h, G*N, Dv]."""
    batch, key_heads, rows, size = packed.shape
    scores = packed @ key.transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # a sink is a learned extra score per query head that takes weight but has no value
        sink = sinks.reshape(1, key_heads, groups, 1, 1).expand(batch, -1, -1, rows // groups, 1)
        sink = sink.reshape(batch, key_heads, rows, 1).to(scores.dtype)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


AttentionInterface.register(NAME, planned_attention)
