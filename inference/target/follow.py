"""New weights for a loaded target, taken over in place: those of a policy in reinforcement
learning, or of a model that is fine-tuned while it serves.

They are given as a whole (a model, or its state dict) or as low-rank updates (LoRA, 2106.09685) of
the weights that the target had before the first update. Everything is checked before anything is
written, so a target has all of the new weights or keeps all of the old ones. References to the
weights (drafters that share them, merged projections, captured graphs) see the new values. Data
derived from the weights must be rebuilt; see `Engine.follow`.

Weights are [out, in] as `nn.Linear` holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.adapter import Updates, beyond_plain
from heads.api.errors import UserError
from inference.target.parallel import is_divided
from inference.target.shared import text_name

Weights = nn.Module | Mapping[str, Tensor] | Updates
"""A policy: the model (with LoRA layers of peft: their updates), its state dict, or updates."""
_BEFORE = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to the names of a model's weights."""
_PEFT = "base_model.model."
_DOWN, _UP = ".lora_A.{}.weight", ".lora_B.{}.weight"
_ADAPTER = re.compile(r"\.lora_\w+\.([^.]+)")
"""Finds the adapter that a weight of peft's layers belongs to."""
_SHOWN = 3
"""Most names in a message."""


class InPlace:
    """A loaded model that takes over new weights in place. base: for layers that low-rank updates
    have changed, their weights before the first update, in host memory."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.base: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Weights) -> None:
        """Take over weights. Raises `UserError` for weights that do not fit or are not finite, and
        for a model that cannot take any; it then keeps its weights."""
        _require_plain(self.model)
        given = _unwrapped(weights) if isinstance(weights, nn.Module) else weights
        own = {text_name(name): value for name, value in self.model.state_dict().items()}
        if isinstance(given, Updates):
            self._add(given, own)
        else:
            self._replace({text_name(name): value for name, value in given.items()}, own)

    def _replace(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Take over a whole state dict; for tied weights one name is enough."""
        if any("lora_" in name for name in given):
            raise UserError(
                "this state dict holds low-rank updates without their scale. Give the peft model "
                "itself, its saved folder through heads.api.adapter.read_updates, or `Updates` "
                "with rank and alpha."
            )
        tied = _tied(own)
        missing = [name for name in own if not any(other in given for other in tied[name])]
        unknown = [name for name in given if name not in own]
        shapes = [
            f"{name} {list(given[name].shape)} for {list(own[name].shape)}"
            for name in own
            if name in given and given[name].shape != own[name].shape
        ]
        found = {"missing": missing, "unknown": unknown, "of another shape": shapes}
        if missing or unknown or shapes:
            raise UserError(
                f"the new weights are not those of this target: {_shown(found)}. Give the whole "
                "state of a model of the same configuration; weights that are divided among "
                "processes (FSDP, ZeRO-3) have to be gathered first."
            )
        _require_whole(given)
        values = {name: value.detach() for name, value in given.items()}
        for name, value in values.items():
            _require_finite(name, value.to(own[name].dtype))
            one = next(other for other in tied[name] if other in values)
            if one != name and not torch.equal(value, values[one]):
                raise UserError(
                    f"{name} and {one} are one weight in this target, but two in the new weights. "
                    "Train with tied embeddings, or load the policy as a target of its own."
                )
        for name, value in values.items():
            own[name].copy_(value)
        self.base.clear()

    def _add(self, updates: Updates, own: Mapping[str, Tensor]) -> None:
        """Set the weights to the base with only `updates` added."""
        layers = {text_name(layer): pair for layer, pair in updates.layers.items()}
        base = {f"{layer}.weight": own.get(f"{layer}.weight") for layer in layers} | self.base
        given = replace(updates, layers=layers)
        given.require_fit({name: value for name, value in base.items() if value is not None})
        _require_whole({f"{layer} A": pair[0] for layer, pair in layers.items()})
        _require_whole({f"{layer} B": pair[1] for layer, pair in layers.items()})
        tied = _tied(own)
        shared = [layer for layer in layers if len(tied[f"{layer}.weight"]) > 1]
        if shared:
            both = " and ".join(tied[f"{shared[0]}.weight"])
            raise UserError(
                f"{both} are one weight in this target, so an update of layer '{shared[0]}' would "
                "change both. Leave the layer out of target_modules, or give the merged weights of "
                "a model whose embeddings are not tied."
            )

        def summed(layer: str, weight: Tensor) -> Tensor:
            """A layer's weight with its update, on the weight's device in the wider dtype."""
            down, up = (part.detach().to(weight.device) for part in layers[layer])
            name = f"{layer}.weight"
            return replace(updates, layers={layer: (down, up)}).merged({name: weight})[name]

        # one sum at a time, since it is in float32; all are checked before one is written
        for layer in layers:
            name = f"{layer}.weight"
            weight = self.base.get(name, own[name]).to(own[name].device)
            _require_finite(name, summed(layer, weight).to(own[name].dtype))
        for name, value in base.items():
            if name not in self.base and value is not None:
                self.base[name] = value.to("cpu", copy=True)
        for name, kept in self.base.items():
            layer, value = name.removesuffix(".weight"), kept.to(own[name].device)
            own[name].copy_(summed(layer, value) if layer in layers else value)


def _unwrapped(model: nn.Module) -> Mapping[str, Tensor] | Updates:
    """A model's state by plain names, or the updates of its peft layers."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        for prefix in _BEFORE:
            name = name.removeprefix(prefix)
        state[name] = value
    configs: Any = getattr(getattr(model, "module", model), "peft_config", None)
    if not configs or not any("lora_" in name for name in state):
        return state
    inner = getattr(model, "module", model)
    active = next(iter(configs)) if len(configs) == 1 else getattr(inner, "active_adapter", None)
    if not isinstance(active, str) or active not in configs:
        raise UserError(
            f"one adapter of a peft model is followed; active are {active}, of "
            f"{', '.join(configs)}. Activate one with set_adapter."
        )
    return _peft_updates(state, configs, active)


def _peft_updates(state: Mapping[str, Tensor], configs: Mapping[str, Any], adapter: str) -> Updates:
    """The updates of a peft model's adapter. Raises `UserError` if they are more than one low-rank
    product per layer."""
    config, others = configs[adapter], {*configs} - {adapter}
    named = {name: _ADAPTER.search(name) for name in state}
    state = {
        name: state[name] for name, found in named.items() if not found or found[1] not in others
    }
    down, up = _DOWN.format(adapter), _UP.format(adapter)
    layers = [name.removesuffix(down) for name in state if name.endswith(down)]
    parts = {f"{layer}{end}" for layer in layers for end in (down, up)}
    more = beyond_plain(vars(config))
    more += [name for name in state if "lora_" in name and name not in parts]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or more or getattr(config, "bias", "none") != "none":
        raise UserError(
            f"of peft's adapters plain LoRA is followed, one low-rank product per layer; this one "
            f"is {kind} with {', '.join(more[:_SHOWN]) or 'biases'}. Give the state dict of its "
            "merged model (merge_and_unload of a copy)."
        )
    pairs = {
        layer.removeprefix(_PEFT): (state[layer + down], state[layer + up]) for layer in layers
    }
    return Updates(int(config.r), float(config.lora_alpha), pairs)


def _require_plain(model: nn.Module) -> None:
    """Raise `UserError` for a model whose weights cannot be written directly."""
    weights = dict(model.named_parameters())
    if any(is_divided(value) for value in weights.values()):
        raise UserError(
            "a target that is split over processes cannot take new weights in place. Load it with "
            "target.tensor_parallel=false."
        )
    odd = [name for name, value in weights.items() if type(value) is not nn.Parameter]
    config: Any = getattr(model, "config", None)
    if odd or getattr(config, "quantization_config", None) is not None:
        raise UserError(
            "a quantised target cannot take new weights in place: they would have to be quantised "
            "anew. Load it with target.quantization=none."
        )


def _require_whole(given: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for weights of which every process has a part: gathering them here would
    wait for processes that may not follow."""
    divided = [name for name, value in given.items() if is_divided(value)]
    if divided:
        raise UserError(
            f"the new weight '{divided[0]}' is divided among processes (FSDP, tensor parallelism). "
            "Gather the weights first, for instance with full_tensor() in all processes."
        )


def _require_finite(name: str, value: Tensor) -> None:
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise UserError(
            f"the new weight '{name}' holds values that are not finite. The target keeps its old "
            "weights; look at the step that made these."
        )


def _tied(own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For every name, all names of the same weight, in order."""
    groups: dict[Any, list[str]] = {}
    for name, value in own.items():
        place = value.data_ptr() if value.numel() else name
        groups.setdefault((place, value.shape, value.stride()), []).append(name)
    return {name: group for group in groups.values() for name in group}


def _shown(found: Mapping[str, Sequence[str]]) -> str:
    """A description of the wrong names, by what is wrong with them."""
    parts = []
    for what, names in found.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts += [f"{', '.join(names[:_SHOWN])}{more}: {what}"] if names else []
    return "; ".join(parts)
