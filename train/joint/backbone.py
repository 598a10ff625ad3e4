"""The target's layers with low-rank updates (LoRA): trained, switched off, or merged to measure.

Merging replaces the weights' memory and restores the former memory afterwards, so that a training
continues bit for bit. Meanwhile, readers of the target's named tensors see the merged ones. Weights
are [out, in] as `nn.Linear` holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.nn import init
from inference.kernels.packed_linear import packed_linears
from inference.target.model import TargetModel
from inference.target.taps import find_layers
from train.joint.config import JointConfig
from train.lora import ADAPTER, inject


class Backbone:
    """A loaded target with trainable updates of its layers, which start at zero. parameters: name
    -> float32 weight of an update. Raises `UserError` if LoRA cannot be merged again (quantised or
    split weights), or if `joint.modules` names no layer."""

    def __init__(self, target: TargetModel, config: JointConfig, seed: int) -> None:
        self.target, self.config = target, config
        # Packed copies of weights would not follow a merge.
        for part in target.model.modules():
            part.__dict__.pop("forward", None) if type(part) is nn.Linear else None
        names = self._choose()
        inject(target.model, names, config.rank, config.alpha, "joint=lora")
        target.model.eval()
        self.layers = {name: target.model.get_submodule(name) for name in names}
        self.parameters = self._initialise(torch.Generator().manual_seed(seed))

    def _choose(self) -> list[str]:
        target, wanted = self.target, self.config.modules
        inside = {
            id(part)
            for part in find_layers(target.decoder, target.info.num_layers).modules()
            # quantised ones too, and GPT-2's transposed one
            if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
        }
        linears = {name: p for name, p in target.model.named_modules() if id(p) in inside}
        last = {name: name.split(".")[-1] for name in linears}
        chosen = {name: p for name, p in linears.items() if not wanted or last[name] in wanted}
        if not chosen:
            known = sorted(set(last.values()))
            raise UserError(
                f"joint.modules {list(wanted)} names no linear layer of the target. It has: "
                f"{', '.join(known)}."
            )
        for name, part in chosen.items():
            weight = getattr(part, "weight", None)
            if type(weight) is not nn.Parameter or not weight.is_floating_point():
                raise UserError(
                    f"the target's '{name}' is quantised or split, so updates of it cannot be "
                    "merged. Train jointly with target.quantization=none and "
                    "target.tensor_parallel=false."
                )
        return list(chosen)

    def _initialise(self, generator: torch.Generator) -> dict[str, nn.Parameter]:
        """A with the variance of peft's uniform one, B zero; equal on every device."""
        found: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            down.data, up.data = down.data.float(), up.data.float()
            init.normal(down, (3 * down.shape[1]) ** -0.5, generator)
            init.constant(up, 0.0)
            found |= {f"{name}.lora_A": down, f"{name}.lora_B": up}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the present updates; names and shapes as in `parameters`."""
        assert set(tensors) == set(self.parameters), "updates of another training"
        for name, value in tensors.items():
            init.copy(self.parameters[name], value)

    @contextmanager
    def original(self) -> Iterator[None]:
        """The target without its updates."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The target as it would be saved now: updates added to weights, in its own dtype."""
        kept = {name: layer.base_layer.weight.data for name, layer in self.layers.items()}
        self.merge()
        try:
            with packed_linears(self.target.model):
                yield
        finally:
            for name, data in kept.items():
                self.layers[name].base_layer.weight.data = data
            self._switch(True)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the updates to the weights and switch them off."""
        for layer in self.layers.values():
            weight = layer.base_layer.weight
            weight.data = (weight.data.float() + layer.get_delta_weight(ADAPTER)).to(weight.dtype)
        self._switch(False)

    def strip(self) -> None:
        """Remove the updates from the model, which keeps its weights as they are."""
        for name, layer in self.layers.items():
            parent, _, own = name.rpartition(".")
            setattr(self.target.model.get_submodule(parent), own, layer.base_layer)

    def _switch(self, on: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(on)
