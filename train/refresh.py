"""Refreshing a drafter: training continues from a finished checkpoint, for the same target or for
one that has changed since.

When a target is fine-tuned, quantised or asked to think aloud, its drafter no longer matches it and
acceptance falls. A short training on the target's new answers restores it. With `lora_rank`, only
low-rank updates of the drafter's linear layers are trained (LoRA, 2106.09685, through peft). This
needs less optimiser state and keeps the weights close to the start. Updates are merged whenever
weights leave the training, so the result is an ordinary checkpoint of the same kind. With
`adapter`, checkpoints hold the updates alone.

Weights are [out, in] as `nn.Linear` holds them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.adapter import Updates
from heads.api.batch import TrainBatch
from heads.api.checkpoint import (
    ADAPTER_KEY,
    build_config,
    load_start_weights,
    new_drafter,
    read_config,
)
from heads.api.config import Size, Weight, config
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import init
from heads.nn.matrices import is_table, set_matrix
from inference.integrity import require_unchanged
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from train.lora import ADAPTER, inject

logger = logging.getLogger(__name__)
LoadTarget = Callable[[TargetConfig], TargetModel]

_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


@config("train.refresh")
@dataclass(frozen=True)
class RefreshConfig:
    """The start of a training, and how much of the drafter it may change."""

    init_from: str = ""
    """Checkpoint folder of a drafter of the same sizes whose weights the training starts from;
    empty: a new drafter. It must be of the same kind, or of one that the kind can start from
    (eagle3 from eagle and peagle, peagle from eagle3). Parts that one of the two lacks (a block
    drafter's dependency, convolutions, confidence) start untrained or are left out."""
    other_target: bool = False
    """Accept a drafter of another target with the same tokenizer and sizes, such as the one from
    which the target was fine-tuned."""
    old_target: str = ""
    """Folder or Hub id of the target that `init_from` was trained for. If given, the changes of the
    target since then are added to the drafter first (`carry`). Use it for drafters that begin as
    copies of the target's layers."""
    lora_rank: Size = 0
    """Rank of updates of linear layers, which are then the only weights trained; 0: train all
    weights."""
    lora_alpha: Weight = 0.0
    """The updates are multiplied by lora_alpha / lora_rank; 0: lora_alpha is twice the rank."""
    adapter: bool = False
    """Store the updates separately: checkpoints hold only them, in peft's layout, and name
    `init_from`, the base that they are added to at loading. One base can then serve several domains
    (train.domains), each with a small adapter."""

    def __post_init__(self) -> None:
        if self.adapter and (not self.lora_rank or self.old_target):
            raise UserError(
                "train.refresh.adapter keeps low-rank updates of the drafter in "
                "train.refresh.init_from, as it is: set train.refresh.lora_rank to their rank, "
                "such as 8, and leave train.refresh.old_target, which changes that drafter, out."
            )
        if not self.init_from and (self.lora_rank or self.other_target or self.old_target):
            raise UserError(
                "train.refresh.lora_rank, train.refresh.other_target and "
                "train.refresh.old_target are for trainings that start from a drafter: give its "
                "folder as train.refresh.init_from."
            )

    @property
    def alpha(self) -> float:
        return self.lora_alpha or 2.0 * self.lora_rank


def prepare_start(
    drafter: TrainableDrafter,
    config: RefreshConfig,
    info: TargetInfo,
    seed: int,
    target: TargetConfig,
    load: LoadTarget = TargetModel.load,
) -> None:
    """Give a fresh float32 drafter the weights that the training starts from: those of the
    checkpoint, with low-rank updates if configured. target, load: the settings and the function
    that loaded the training's own target; an old target is loaded in the same way."""
    if not config.init_from:
        return
    fresh = {name: value.clone() for name, value in drafter.state_dict().items()}
    load_start(drafter, Path(config.init_from), info, config.other_target, whole=config.adapter)
    if config.old_target:
        carry(drafter, fresh, replace(target, path=config.old_target, revision=None), seed, load)
        if not config.adapter:
            drafter.follow(drafter.target)  # a frozen LM head is the new target's, as it was before
    if config.lora_rank:
        add_updates(drafter, config, seed)


def load_start(
    drafter: TrainableDrafter,
    folder: Path,
    info: TargetInfo,
    other_target: bool,
    *,
    whole: bool = False,
) -> None:
    """Fill `drafter` from a checkpoint and log what carries over; raises `UserError` for a kind
    that it cannot start from, and for another target. whole: the checkpoint must be the drafter
    itself, without parts that differ, and must not be an adapter."""
    content = read_config(folder)
    if whole and ADAPTER_KEY in content:
        raise UserError(
            f"train.refresh.init_from: '{folder}' is an adapter itself, and an adapter's base is a "
            f"whole drafter. Give its base, '{content[ADAPTER_KEY].get('base')}', or set "
            "train.refresh.adapter=false, which merges both."
        )
    kind = content["kind"]
    trained = _require_usable(drafter, folder, kind, content["config"])
    theirs = TargetInfo.from_dict(content["target"])
    if other_target:
        theirs.require_same_sizes(info)
    else:
        try:
            theirs.require_same(info)
        except UserError as error:
            raise UserError(
                f"train.refresh.init_from: {error} If this target is a changed version of that "
                "one, set train.refresh.other_target=true."
            ) from error
    mine, known = asdict(drafter.config), asdict(trained)
    changed = [name for name, value in mine.items() if name in known and known[name] != value]
    theirs_were = " ".join(
        f"head.{name}={json.dumps(known[name], separators=(',', ':'))}" for name in changed
    )
    require_unchanged(folder)
    try:
        started = load_start_weights(drafter, folder)
    except UserError as error:
        if not theirs_were:
            raise
        raise UserError(
            f"train.refresh.init_from: {error} The drafter was made with other settings; to go on "
            f"with it, give them: {theirs_were}"
        ) from error
    if whole and not started.is_whole:
        parts = [*started.fitted, *started.fresh, *started.unused][:4]
        settings = f" Give its settings: {theirs_were}" if theirs_were else ""
        raise UserError(
            f"train.refresh.adapter: an adapter changes no parts of its base, but '{folder}' was "
            f"made with others than are to be trained ({', '.join(parts)}).{settings}"
        )
    if other_target and not whole:
        drafter.follow(drafter.target)  # a frozen LM head is the new target's
    if kind != drafter.kind or not started.is_whole:
        came = "" if kind == drafter.kind else f", of kind {kind} (here {drafter.kind})"
        logger.warning("of the drafter in '%s'%s: %s", folder, came, started)
    if changed:
        logger.warning(
            "the drafter in '%s' was made with other values of head.%s (%s); its weights are used "
            "with the new ones",
            folder,
            ", head.".join(changed),
            theirs_were,
        )


def _require_usable(
    drafter: TrainableDrafter, folder: Path, kind: str, values: dict[str, Any]
) -> Any:
    """The configuration of a checkpoint of `kind`; raises `UserError` if `drafter` cannot start
    from one of that kind or of that configuration."""
    if kind not in (drafter.kind, *drafter.starts_from):
        allowed = ", ".join([drafter.kind, *drafter.starts_from])
        raise UserError(
            f"train.refresh.init_from: '{folder}' is a drafter of kind '{kind}', but kind "
            f"'{drafter.kind}' is to be trained, which starts from checkpoints of kind {allowed}. "
            f"Use head={kind}, or another folder."
        )
    config = build_config(kind, values)
    if kind == drafter.kind:
        try:
            drafter.require_start(config)
        except UserError as error:
            raise UserError(f"train.refresh.init_from: '{folder}': {error}") from error
    return config


@torch.no_grad()
def carry(
    drafter: TrainableDrafter,
    fresh: Mapping[str, Tensor],
    old_target: TargetConfig,
    seed: int,
    load: LoadTarget,
) -> None:
    """Add to a loaded drafter the difference between two fresh drafters of the same seed: that of
    the new target minus that of the old one.

    Random weights are equal in both and cancel; weights copied from the target change as the target
    did (the arithmetic of task vectors, 2212.04089). fresh: state of the new target's fresh
    drafter. Raises `UserError` for a target of other sizes and for drafters with a draft vocabulary
    of their own.
    """
    state = drafter.state_dict()
    if state.keys() & {"d2t", "t2d"}:
        raise UserError(
            "train.refresh.old_target is not for drafters with a vocabulary of their own: its "
            "rows are not those of the target. Leave it out."
        )
    original = load(old_target)
    original.info.require_same_sizes(drafter.info)
    old = new_drafter(drafter.kind, drafter.config, original.info, original.weights, seed)
    before = old.float().state_dict()
    for name, value in state.items():
        if value.is_floating_point():
            value += fresh[name] - before[name].to(value.device)


def add_updates(drafter: TrainableDrafter, config: RefreshConfig, seed: int) -> None:
    """Freeze the drafter and add trainable low-rank updates to the linear layers that it trains.
    The updates start at zero; `seed` fixes their random factors."""
    layers = [item for item in drafter.named_modules() if type(item[1]) is nn.Linear]
    names = [name for name, part in layers if part.weight.requires_grad]
    tables = {name for name, part in layers if is_table(part.weight)}
    if not names:
        raise UserError(
            f"train.refresh.lora_rank={config.lora_rank}, but kind '{drafter.kind}' has no linear "
            "layers of its own. Use train.refresh.lora_rank=0 to train all its weights."
        )
    drafter.requires_grad_(False)
    inject(drafter, names, config.lora_rank, config.alpha, "train.refresh.lora_rank")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith(_DOWN):
            init.normal(parameter, (3 * parameter.shape[1]) ** -0.5, generator)
        elif name.endswith(_UP):
            init.constant(parameter, 0.0)
            if name.removesuffix(_UP) in tables:  # it has a row per token as well
                set_matrix(parameter, False)


def require_reached(drafter: TrainableDrafter, loss: Tensor) -> None:
    """Raise `UserError` if a low-rank update has no effect on `loss`; leaves no gradients behind.
    Without this check, a kind that reads a layer's weight without calling the layer would train
    fewer updates than configured."""
    loss.backward()
    updates = [item for item in drafter.named_parameters() if item[0].endswith(_UP)]
    unreached = [name.removesuffix(_UP) for name, update in updates if update.grad is None]
    drafter.zero_grad(set_to_none=True)
    if unreached:
        raise UserError(
            f"train.refresh.lora_rank: kind '{drafter.kind}' computes with the weights of "
            f"{unreached[:3]} directly, so updates of them have no effect. Use "
            "train.refresh.lora_rank=0 to train all its weights."
        )


def updates_of(state: Mapping[str, Tensor], config: RefreshConfig) -> Updates:
    """The low-rank updates in a drafter's `state_dict`, by the plain name of their layer."""
    layers = [name.removesuffix(_UP) for name in state if name.endswith(_UP)]
    found = {layer: (state[layer + _DOWN], state[layer + _UP]) for layer in layers}
    return Updates(config.lora_rank, config.alpha, found)


def merge_updates(state: Mapping[str, Tensor], config: RefreshConfig) -> dict[str, Tensor]:
    """A drafter's `state_dict` with its low-rank updates merged and with plain names."""
    plain = {
        name.replace(_BASE, "."): value
        for name, value in state.items()
        if not name.endswith((_DOWN, _UP))
    }
    return updates_of(state, config).merged(plain)


def trial_loss(
    drafter: TrainableDrafter, batch: TrainBatch, device_type: str, bfloat16: bool
) -> Tensor:
    with torch.autocast(device_type, torch.bfloat16, enabled=bfloat16):
        return drafter.loss(batch).loss_sum
