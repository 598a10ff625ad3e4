"""Gives a model's recurrent layers functions that support trees.

In most families, functions with fixed names do all mixing along the sequence of such a layer, and
the forward method finds them among its module's globals. Each layer gets a copy of that method with
other globals, in which these names refer to Headstart's functions. Projections, gates, norms and
experts do not change, and neither does any other model of the process. Classes whose mixing is
their own code get other methods, one class at a time.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from inference.target.recurrent.convolution import convolution
from inference.target.recurrent.convolved_projection import convolved_projection
from inference.target.recurrent.delta_rule import delta_rule
from inference.target.recurrent.gated_linear import recurrent_block
from inference.target.recurrent.lightning import lightning_attention
from inference.target.recurrent.mamba1 import mamba1
from inference.target.recurrent.mamba2 import mamba2

Globals = dict[str, Any]


def _plain(
    name: str, make: Callable[[Callable[..., Any], int], Callable[..., Any]]
) -> Callable[[Globals, int], Callable[..., Any]]:
    return lambda names, mixer: make(names[name], mixer)


def _delta(name: str) -> Callable[[Globals, int], Callable[..., Any]]:
    return lambda names, mixer: delta_rule(names[name], mixer, names["l2norm"])


REPLACED: dict[str, Callable[[Globals, int], Callable[..., Any]]] = {
    "causal_conv1d_fn": _plain("causal_conv1d_fn", convolution),
    "torch_chunk_gated_delta_rule": _delta("torch_chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta("chunk_kimi_delta_attention"),
    "mamba2_chunk_scan": _plain("mamba2_chunk_scan", mamba2),
    "mamba_selective_scan": _plain("mamba_selective_scan", mamba1),
}
"""Names in the library's modules, and functions that make the replacements from a module's
globals."""
OF_CLASSES: dict[str, Callable[[nn.Module, int], None]] = {
    "MiniMaxLightningAttention": lightning_attention,
    "RecurrentGemmaRecurrentBlock": recurrent_block,
    "ZayaCCAProjection": convolved_projection,
}
"""Classes whose mixing is their own code, and functions that replace their methods."""
_MARK = "headstart_mixer"


def install(model: nn.Module) -> int:
    """Replace the functions of every recurrent layer of `model`; returns the number of these
    layers. A second call changes nothing."""
    found = 0
    for module in model.modules():
        if not hasattr(module, _MARK):
            if not _replace(module, found):
                continue
            setattr(module, _MARK, found)
        found += 1
    return found


def _replace(module: nn.Module, number: int) -> bool:
    """Replace the functions of mixer `number`; returns False if the module is not a mixer."""
    if type(module).__name__ in OF_CLASSES:
        OF_CLASSES[type(module).__name__](module, number)
        return True
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    names = getattr(forward, "__globals__", {})
    used = [name for name in REPLACED if code and name in code.co_names and name in names]
    if used:
        ours = {name: REPLACED[name](names, number) for name in used}
        module.forward = _with_globals(forward, {**names, **ours}, module)
    return bool(used)


def is_mixer(module: nn.Module) -> bool:
    """Whether `install` has replaced functions of this module."""
    return hasattr(module, _MARK)


def _with_globals(
    forward: types.FunctionType, names: Globals, module: nn.Module
) -> types.MethodType:
    """The method `forward` of `module`, with other globals."""
    own = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(own, module)
