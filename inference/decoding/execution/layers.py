"""A target's layers compiled for verification: `decode.compile=true` on a GPU.

The parts of a layer before and after its attention (norms, projections, rotation, MLP) are about
forty small operations; compiled, they are a few. One compiled layer serves all layers: it gets no
cache, and one opaque operation, which finds its layer at run time, writes keys and values and
attends (`inference.target.attention.attend_in_cache`). Prefill keeps the plain layers, since its
shapes change with every prompt. Taps are not compiled, as their hooks belong to the layers' calls.

Projections of the same states are merged first (`inference.target.merged`). The halves that rotary
embeddings concatenate are computed where they are used.

Before compiling, a trial checks that a family's layers compute the same without a cache as an
argument: a verification with layers traced in this way must give the logits of a plain one, bit for
bit. Layers with recurrent states, indexers, or keys of another layer are not compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.target.attention import NUMBER
from inference.target.kv_cache import KVCache
from inference.target.merged import merge
from inference.target.model import TargetModel
from inference.target.recurrent.install import is_mixer

MOST_GRAPHS = 128
"""Compiled shapes of a layer: draft lengths times numbers of rows. Dynamo's own limit is 8."""
logger = logging.getLogger(__name__)


def compile_layers(target: TargetModel, backend: str = "inductor") -> bool:
    """Compile every decoder layer for verification, once; equal layers share a graph. Returns
    whether they are compiled; if not, a warning gives the reason. A cache selects whether it runs
    through compiled layers (`SlotWriter.compiled`), so another engine of the same target need not.
    backend: of `torch.compile`."""
    if target.compiled_attention is not None:
        return bool(target.compiled_attention)
    modules, reason = _attention_modules(target), "not every layer is one attention over the cache"
    if modules is not None:
        for number, module in modules.items():
            setattr(module, NUMBER, torch.tensor(number))
        target.compiled_attention = modules
        reason = _difference(target)
        if not reason:
            for layer in target.taps.layers:
                merge(layer)
            _give(target, backend)
            return True
    target.compiled_attention = {}
    logger.warning("decode.compile leaves the layers of this target as they are: %s.", reason)
    return False


def has_merged(target: TargetModel) -> bool:
    """Whether `compile_layers` has merged projections of this target. Steps that were captured
    before read weights that have been freed."""
    return bool(target.compiled_attention)


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


def _difference(target: TargetModel) -> str:
    """Why verifying through layers without a cache differs from verifying with one; empty if it
    does not."""
    plain = _verified(target, compiled=False)
    try:
        with _given(target, "eager"):
            found = _verified(target, compiled=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        return f"they do not compile without a cache ({': '.join(lines[:2])})"
    return "" if torch.equal(plain, found) else "they compute something else without a cache"


def _verified(target: TargetModel, compiled: bool) -> Tensor:
    """Logits [1, N, V] of a small tree after a small prompt, as decoding verifies it."""
    device = target.device
    tokens = torch.arange(1, 8, device=device)[None] % target.info.vocab_size
    tree = TokenTree.from_parents(torch.tensor([[0, 0, 0]], device=device), 1)
    cache, row = target.new_cache(1, 8), torch.zeros(1, dtype=torch.int64, device=device)
    prompt, needs, cache.writer.compiled = 4, FeatureSpec(), compiled
    target.prefill(cache, row, tokens[:, :prompt], row + prompt, needs)
    longest = None if target.lengths_on_device else prompt
    return target.verify(cache, tokens[:, prompt:], tree, row + prompt, longest, needs)[0]


@contextmanager
def _given(target: TargetModel, backend: str) -> Iterator[None]:
    """The layers compiled by `backend` within the block."""
    _give(target, backend)
    try:
        yield
    finally:
        for layer in target.taps.layers:
            del layer.forward


def _give(target: TargetModel, backend: str) -> None:
    # hasattr: earlier versions of torch use the other name
    limit = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )
    setattr(torch._dynamo.config, limit, max(MOST_GRAPHS, getattr(torch._dynamo.config, limit)))
    for layer in target.taps.layers:
        layer.forward = _compiled_for_verification(layer.forward, backend)


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
