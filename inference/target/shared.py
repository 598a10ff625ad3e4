"""What drafters share of a target: its weights, whole and in floating point, and its LM head as a
function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from heads.api.errors import UserError
from heads.api.target_info import Rotary, TargetWeights
from inference.target import parallel
from inference.target.quantization import dense_weight
from inference.target.settings import first_setting, logit_cap, logit_factors


def shared_weights(model: Any) -> TargetWeights:
    """The target's weights for drafters: whole and in floating point."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    size = head_rows(model), config.hidden_size
    whole = dense_weight(parallel.gather_whole(embedding), *size, what="embedding")
    tied = head is embedding
    return TargetWeights(
        embedding=whole,
        lm_head=whole if tied else dense_weight(parallel.gather_whole(head), *size, what="LM head"),
        logits=head_function(model),
        state=parallel.GatheredState(
            {text_name(name): value for name, value in kept_tensors(model).items()}
        ),
        rotary=_rotary(model),
        windows=_windows(config),
        norm_offset=_norm_offset(model, config.hidden_size),
    )


def _norm_offset(model: Any, size: int) -> float:
    """What the final norm of a model adds to its weight: the norm of a state of ones with a weight
    of zeros. 0 for a norm of another name or with other parameters. `forward` is called on a copy
    of the module without its hooks, as the weights may be divided among processes."""
    norms = (norm for name, norm in model.named_modules() if text_name(name + ".") == "model.norm.")
    norm = next(norms, None)
    if norm is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return 0.0
    alone = copy.copy(norm)
    alone._parameters = {"weight": nn.Parameter(torch.zeros(size), requires_grad=False)}
    found = type(norm).forward(alone, torch.ones(1, size))
    # a plan computes without values, and copies none
    return 0.0 if isinstance(found, FakeTensor) else float(found.abs().mean().round())


def kept_tensors(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """A model's weights, and the buffers that checkpoints hold (a router's bias, for instance), by
    name. remove_duplicate: name tied weights once."""
    kept = model.state_dict().keys()
    buffers = ((name, value) for name, value in model.named_buffers() if name in kept)
    return dict((*model.named_parameters(remove_duplicate=remove_duplicate), *buffers))


def text_name(name: str) -> str:
    """A weight's name in a text model, from its name in a text or composite model, whose text part
    is one level deeper."""
    return name.replace("model.language_model.", "model.", 1)


def _windows(config: Any) -> tuple[int, ...]:
    """The sliding window of every layer, 0 for layers without one; empty if no layer has one."""
    size = first_setting(config, "sliding_window")
    if not size:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(int(size) if kind == "sliding_attention" else 0 for kind in kinds)


def _rotary(model: Any) -> Rotary | None:
    """A model's rotary frequencies if it has exactly one set, or None."""
    module = getattr(model.get_decoder(), "rotary_emb", None)
    frequencies = getattr(module, "inv_freq", None)
    if frequencies is None:
        return None
    return Rotary(frequencies.float(), float(getattr(module, "attention_scaling", 1.0)))


def head_rows(model: Any) -> int:
    """Rows of the LM head, also if its weight is packed."""
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or head.weight.shape[0])


def head_function(
    model: Any, product: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """A function from post-final-norm states [..., H] to logits [..., V], with the model's scaling
    and soft-capping.

    The head is frozen, but gradients pass through it to the states, as drafters that share it train
    through it. product: the multiplication with the head's weights; default: the head itself.
    Another one is used for a copy of the head on another device.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"a {model.config.model_type} model has no LM head and cannot be a target.")
    multiplied = head if product is None else product
    config = model.config.get_text_config()
    (multiply, divide), cap = logit_factors(config), logit_cap(config)

    def logits(last_hidden: Tensor) -> Tensor:
        out: Tensor = multiplied(last_hidden)
        if multiply != 1.0:
            out = out * multiply
        if divide != 1.0:
            out = out / divide
        return torch.tanh(out / cap) * cap if cap is not None else out

    return logits
