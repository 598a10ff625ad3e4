"""A target's layers compiled for verification: `decode.compile=true` on a GPU.

The parts of a layer before and after its attention (norms, projections, rotation, MLP) are about
forty small operations; compiled, they are a few. One compiled layer serves all layers: it gets no
cache, and one opaque operation, which finds its layer at run time, writes keys and values and
attends (`inference.target.attention.attend_in_cache`). Prefill keeps the plain layers, since its
shapes change with every prompt. Taps are not compiled, as their hooks belong to the layers' calls.

Projections of the same states are merged first (`inference.target.merged`). The halves that rotary
embeddings concatenate are computed where they are used.

Two checks compare a verification with that of the plain layers. Before merging, layers traced
without a cache as an argument must give the same logits, bit for bit; families whose layers need
their cache fail it. Afterwards the merged and compiled layers must give them up to rounding, as far
as the self-check of a target allows. If one of the checks fails, all layers stay plain. Both verify
as many rows and nodes as decoding will, so that the second one compiles what the first step runs.
Layers with recurrent states, indexers, or keys of another layer are not compiled.

Legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.kernels.packed_linear import unpacked_linears
from inference.target.attention import NUMBER
from inference.target.kv_cache import KVCache
from inference.target.merged import merge, separate
from inference.target.model import TargetModel, rounding
from inference.target.recurrent.install import is_mixer

MOST_GRAPHS = 128
"""Compiled shapes of a layer: draft lengths times numbers of rows. Dynamo's own limit is 8."""
logger = logging.getLogger(__name__)


def compile_layers(
    target: TargetModel, rows: int = 1, nodes: int = 3, backend: str = "inductor"
) -> bool:
    """Compile every decoder layer for verification, once; equal layers share a graph. Returns
    whether they are compiled; if not, a warning gives the reason. A cache selects whether it runs
    through compiled layers (`SlotWriter.compiled`), so another engine of the same target need not.

    rows, nodes: of the verifications by which layers are checked, best those of decoding; backend:
    of `torch.compile`.
    """
    if target.compiled_attention is not None:
        return bool(target.compiled_attention)
    target.compiled_attention = _attention_modules(target) or {}
    reason = "not every layer is one attention over the cache"
    if target.compiled_attention:
        reason = _compile(target, rows, nodes, backend)
    if reason:
        target.compiled_attention = {}
        logger.warning("decode.compile leaves the layers of this target as they are: %s.", reason)
    return not reason


def has_merged(target: TargetModel) -> bool:
    """Whether `compile_layers` has merged projections of this target. Steps that were captured
    before read weights that have been freed."""
    return target.drafters_after_merge is not None


def _compile(target: TargetModel, rows: int, nodes: int, backend: str) -> str:
    """Merge and compile all layers; returns why they are not compiled, or an empty text. Merged
    weights stay where they are."""
    assert target.compiled_attention is not None
    for number, module in target.compiled_attention.items():
        setattr(module, NUMBER, torch.tensor(number))
    with unpacked_linears(target.decoder):  # as they are traced
        plain = _verified(target, rows, nodes, compiled=False)
    _give(target, "eager")
    reason = _difference(target, plain, rows, 0.0, "without a cache")
    _take_back(target)
    if reason:
        return reason
    for layer in target.taps.layers:
        merge(layer)
    target.drafters_after_merge = WeakSet()
    _give(target, backend)
    allowed = rounding(plain, target.dtype)
    reason = _difference(target, plain, rows, allowed, f"merged and compiled by {backend}")
    if reason:
        _take_back(target)
        for layer in target.taps.layers:
            separate(layer)
    return reason


def _attention_modules(target: TargetModel) -> dict[int, nn.Module] | None:
    """The attention module of every layer by its number. None if a layer has another kind of mixer,
    or not exactly one module with its number."""
    found: dict[int, nn.Module] = {}
    for number, layer in enumerate(target.taps.layers):
        modules = list(layer.modules())
        if target.indexed or any(map(is_mixer, modules)) or "forward" in layer.__dict__:
            return None
        # the first is the layer itself, which also has the number in some families
        own = [module for module in modules[1:] if getattr(module, "layer_idx", None) == number]
        if len(own) != 1:
            return None
        found[number] = own[0]
    return found


def _difference(target: TargetModel, plain: Tensor, rows: int, allowed: float, how: str) -> str:
    """Why layers changed by `_give` do not verify like the plain ones, whose logits are `plain`
    [N, V]; empty if they do. allowed: the largest difference; how: what was changed, in words."""
    try:
        found = _verified(target, rows, plain.shape[0], compiled=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        return f"they do not run {how} ({': '.join(lines[:2])})"
    gap = float((found - plain).abs().max())
    if gap <= allowed:
        return ""
    return f"{how}, they change logits by {gap:.3g} ({allowed:.3g} is allowed)"


def _verified(target: TargetModel, rows: int, nodes: int, compiled: bool) -> Tensor:
    """Logits [N, V] of the last of some rows: a root and its branches after a small prompt, as
    decoding verifies them."""
    device, prompt = target.device, 4
    tokens = torch.arange(1, 1 + rows * (prompt + nodes), device=device)
    tokens = (tokens % target.info.vocab_size).view(rows, -1)
    tree = TokenTree.from_parents(torch.zeros(1, nodes, dtype=torch.int64, device=device), 1)
    cache, index = target.new_cache(rows, prompt + nodes + 1), torch.arange(rows, device=device)
    lengths, needs, cache.writer.compiled = torch.full_like(index, prompt), FeatureSpec(), compiled
    target.prefill(cache, index, tokens[:, :prompt], lengths, needs)
    longest = None if target.lengths_on_device else prompt
    logits = target.verify(cache, tokens[:, prompt:], tree, lengths, longest, needs)[0]
    return logits[-1].clone()  # those of all rows may take gigabytes


def _give(target: TargetModel, backend: str) -> None:
    """Let every layer verify through a graph compiled by `backend`."""
    # hasattr: earlier versions of torch use the other name
    limit = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )
    setattr(torch._dynamo.config, limit, max(MOST_GRAPHS, getattr(torch._dynamo.config, limit)))
    for layer in target.taps.layers:
        layer.forward = _compiled_for_verification(layer.forward, backend)


def _take_back(target: TargetModel) -> None:
    """Undo `_give`."""
    for layer in target.taps.layers:
        del layer.forward


def _compiled_for_verification(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    options: Any = {"force_pointwise_cat": True} if backend == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(
        forward, dynamic=False, fullgraph=True, backend=backend, options=options
    )

    def choose_forward(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((value for value in given if isinstance(value, KVCache)), None)
        if cache is None or cache.writer.mode != "verify" or not cache.writer.compiled:
            return forward(*args, **kwargs)
        # by any name: "past_key_values", "layer_past"
        args = tuple(None if value is cache else value for value in args)
        return compiled(*args, **{k: None if v is cache else v for k, v in kwargs.items()})

    return choose_forward
