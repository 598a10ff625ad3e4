"""One decoder layer of a model family, built by transformers' own class.

The differences between families' layers (gates, norms on query and key heads, partial rotations,
latent keys, experts) stay in the library's code. The layer is that of a model of one layer with the
target's settings. It passes its queries, keys and values to the attention function of the running
drafter.

Legend: B rows, T positions, H hidden, h query heads, g key/value heads, D and E numbers per key and
value, S slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.blocks import Attend
from heads.nn.matrices import set_matrix, set_vectors
from heads.nn.native import experts
from heads.nn.rope import Rope, Rotation

ATTENTION = "headstart_drafter"
"""The attention function that such layers call, by its name in transformers."""
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
    "num_mtp_layers": 0,
}
"""Changes to a family's settings, if it has them: one layer, of the type of a model's last one."""
SMALL_VOCABULARY = {
    "vocab_size": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Settings of the embedding, which the block shares with the target and does not build."""
_ATTEND: ContextVar[Attend] = ContextVar("headstart_drafter_attention")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Make layers pass their queries, keys and values to `attend`."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def hand_over(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query [B, h, T, D], key [B, g, T, D], value [B, g, T,
    E] -> [B, T, h, E]. Raises `UserError` for kinds of scores that drafters do not support."""
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if odd:
        raise UserError(
            f"the target's layers have {', '.join(odd)} in their attention, which a block of its "
            "family cannot have here. Choose another kind with head=, for instance eagle3."
        )
    if scaling is not None:  # `Attend` divides by the root of D itself
        query = query * (scaling * query.shape[-1] ** 0.5)
    attended = _ATTEND.get()(*(part.transpose(1, 2) for part in (query, key, value)))
    return attended.unflatten(-1, (query.shape[1], -1)), None


@dataclass(frozen=True)
class Family:
    """Parts of a model of one layer. layer: a transformers decoder layer; norm: the final one, as a
    pattern of the family's norms; rope: rotations as its layers take them."""

    layer: nn.Module
    norm: nn.Module
    rope: FamilyRope

    @classmethod
    def build(cls, settings: Mapping[str, Any], seed: int | None = None) -> Family:
        """The parts for a model's settings; raises `UserError` if there are none.

        seed: draws weights as the family does; None: the parts have no values, and are on torch's
        present default device.
        """
        where = torch.get_default_device()
        if seed is not None:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return cls._of(_model(settings))
        with torch.device("meta"):
            found = cls._of(_model(settings))
        for part in (found.layer, found.norm):
            _require_plain(part)
            _allocate(part, where)
            _set_roles(part)
        return found

    @classmethod
    def _of(cls, model: Any) -> Family:
        decoder = model.get_decoder()
        layers: Any = getattr(decoder, "layers", None)
        rotary = getattr(decoder, "rotary_emb", None)
        usual = layers is not None and _takes_rotations(layers[0])
        if usual and rotary is not None:
            with torch.device("cpu"):
                rotary = type(rotary)(model.config)
            if _gives_cos_and_sin(rotary):
                return cls(layers[0], decoder.norm, FamilyRope(rotary))
        raise UserError(
            f"layers of a {model.config.model_type} model have no rotary positions of one sort, "
            "and MTP blocks are built of layers that have. Choose another kind with head=, for "
            "instance head=fastmtp."
        )


def _takes_rotations(layer: nn.Module) -> bool:
    """Whether a layer takes rotations as an argument, by name or passed through."""
    arguments = inspect.signature(layer.forward).parameters
    handed_on = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in arguments.values())
    return "position_embeddings" in arguments or handed_on


def _gives_cos_and_sin(rotary: nn.Module) -> bool:
    """Whether a rotary module returns cos and sin for positions alone: not per type of layer, and
    not as complex numbers."""
    try:
        found = rotary(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64))
    except TypeError:
        return False
    return isinstance(found, tuple) and len(found) == 2


def _model(settings: Mapping[str, Any]) -> Any:
    # heavy, and only drafters of this sort need it
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, hand_over)
    experts.register()
    values = {key: value for key, value in settings.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(settings["model_type"], **values | SMALL_VOCABULARY)
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, experts_implementation=experts.EXPERTS
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"head.layer does not describe a layer of a family that transformers has: {error}. It "
            "holds the settings of the target's config.json; leave it out to take them from there."
        ) from error


def _allocate(part: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a part on a device, without values. (`nn.Module.to_empty` does not
    work for the fake tensors of a plan.)"""
    for module in part.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    own = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(made, tensor.requires_grad) if own else made


def _set_roles(part: nn.Module) -> None:
    """Tell optimisers the roles of the weights that the family holds itself, outside of torch's
    modules: routers and stacked experts [E, out, in] are matrices, their biases are vectors."""
    for module in part.modules():
        if type(module).__module__.startswith("torch."):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                set_vectors(weight)
            elif weight.ndim >= 2:
                set_matrix(weight, True)


def _require_plain(part: nn.Module) -> None:
    """Raise `UserError` for a layer with buffers that no checkpoint holds."""
    kept = part.state_dict()
    lost = [name for name, _ in part.named_buffers() if name not in kept]
    if lost:
        raise UserError(
            f"layers of the target's family compute with {lost[:3]}, which no checkpoint holds. "
            "Choose another kind with head=, for instance eagle3."
        )


def sizes_of(info: TargetInfo) -> dict[str, Any]:
    """The layer's settings from a target's facts: sizes and the base of its rotations."""
    names = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps max_position_embeddings"
    )
    rope = {"rope_type": "default", "rope_theta": info.rope_theta}
    sizes = {name: getattr(info, name) for name in names.split()}
    return {**sizes, "num_hidden_layers": 1, "rope_parameters": rope}


def layer_settings(info: TargetInfo) -> dict[str, Any]:
    """The settings of a one-layer model of the family of a target, from its folder or the Hub;
    raises `UserError` if there is no readable config.json."""
    # as above
    from transformers import AutoConfig

    revision = None if Path(info.id).is_dir() else info.revision
    try:
        config = AutoConfig.from_pretrained(info.id, revision=revision).get_text_config()
    except Exception as error:  # a damaged file may raise anything
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"the settings of the target's layers cannot be read from '{info.id}': "
            f"{first[0][:200]}. Give them as head.layer={{model_type: ..., ...}}."
        ) from error
    return one_layer(config)


def one_layer(config: Any) -> dict[str, Any]:
    """The same from a transformers config."""
    # all settings, because the library's defaults also define a layer
    values = {key: value for key, value in config.to_dict().items() if _is_setting(key)}
    values["model_type"] = config.model_type
    for name, value in ONE_LAYER.items():
        if hasattr(config, name):
            values[name] = value
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:  # the type of the last layer
        values["mlp_layer_types"] = [kinds[-1]]
    return values


def _is_setting(key: str) -> bool:
    """Whether a key of config.json defines a layer."""
    about = "architectures dtype torch_dtype transformers_version use_cache quantization_config"
    return not key.startswith("_") and key not in about.split()


class FamilyRope(Rope):
    """Rotations of a family's own rotary module, as cos and sin of the numbers it rotates."""

    def __init__(self, rotary: Any) -> None:
        super().__init__(0, 1.0)
        self._rotary = rotary

    def _angles(self, positions: Tensor) -> Tensor:
        """[B, T] or [S] -> [.., 2, D]."""
        self._rotary.to(positions.device)
        flat = positions if positions.ndim == 2 else positions[None]
        like = torch.zeros(1, dtype=torch.float32, device=positions.device)
        cosine, sine = self._rotary(like, flat)
        found = torch.stack([cosine, sine], -2)
        return found if positions.ndim == 2 else found[0]

    @staticmethod
    def embeddings(rotation: Rotation) -> tuple[Tensor, Tensor]:
        """A rotation [B, T, 1, D] in the form of transformers' layers: cos and sin [B, T, D]."""
        cosine, sine = rotation
        return cosine[:, :, 0], sine[:, :, 0]
