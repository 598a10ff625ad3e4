"""Training under DeepSpeed: ZeRO 0 to 3 behind the `TrainEngine` protocol. The only file that
imports deepspeed.

Three properties of DeepSpeed are handled only here. It averages gradients over processes; we add
them, so the loss is first multiplied by their number. It requires a process group and LOCAL_RANK
even for one process. It compiles C++ helpers at run time; the CPU's shared-memory helper is not
needed, and building it takes a compiler and half a minute, so it is switched off.

DeepSpeed's own checkpoints are pickles; ours are tensors. Weights are gathered and saved whole. The
optimiser's state is saved by weight (`train.engines.shards`); every process saves its own runs, so
that any world size and any stage can continue.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.nn.chunks import agreeing
from train.distributed import World, join_world
from train.engines import shards
from train.engines.base import EngineConfig, Objective, cpu_copies, fill_gradients
from train.engines.shards import AnyPart, StatePart
from train.muon import divide
from train.optim import OptimConfig, make_optimizer, set_rate

BUCKET_ELEMENTS = 50_000_000
"""Most gradient elements per reduction (200 MB in float32)."""
LIVE_BUCKETS = 20
"""ZeRO-3: how many buckets of weights may be whole at once."""


def import_deepspeed(device_type: str) -> Any:
    """Import deepspeed quietly and for this device; raises `UserError` if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device_type == "cuda" else "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"engine.name=deepspeed, but deepspeed cannot be imported ({error}). Use engine=torch, "
            "or install deepspeed, for which there is Linux only."
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device_type == "cpu":
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        names = [*ALL_OPS, "deepspeed_not_implemented"]
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(names, False)
    return deepspeed


def require_async_io(deepspeed: Any, path: str) -> None:
    """Raise `UserError` unless this machine can keep AdamW's state on disk."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise UserError(
            f"engine.offload_path is '{path}', but deepspeed cannot write there: its async_io "
            "operation needs a C++ compiler, ninja and libaio with its header (Debian, Ubuntu: "
            "apt install libaio-dev), or CFLAGS and LDFLAGS that point to them. Leave "
            "engine.offload_path empty to use CPU memory."
        )
    if not Path(path).is_dir():
        raise UserError(
            f"engine.offload_path '{path}' is no folder. Create it on a local disk, on every "
            "machine of the launch."
        )
    deepspeed.ops.__compatible_ops__["async_io"] = True


def make_settings(config: EngineConfig, clip: float, numel: int) -> dict[str, Any]:
    """DeepSpeed's configuration: it gets float32 weights and our step boundaries only."""
    bucket = min(numel + numel % 2, BUCKET_ELEMENTS)  # ZeRO 1 and 2 refuse an odd number
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if config.zero_stage == 3:
        # memory_efficient_linear replaces torch.nn.functional.linear for the whole process and
        # computes outside autocast.
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": LIVE_BUCKETS * bucket,
            "memory_efficient_linear": False,
        }
    if config.offload != "none":
        disk = {"device": "nvme", "nvme_path": config.offload_path}
        zero["offload_optimizer"] = disk if config.offload_path else {"device": "cpu"}
    if config.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        # bookkeeping only: batches never pass through DeepSpeed's loader
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip if config.zero_stage > 0 else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


class DeepSpeedEngine:
    """A drafter under `deepspeed.initialize`; see `TrainEngine`."""

    def __init__(
        self, drafter: TrainableDrafter, config: EngineConfig, optim: OptimConfig, world: World
    ) -> None:
        self.deepspeed = import_deepspeed(world.device.type)
        if config.offload_path:
            require_async_io(self.deepspeed, config.offload_path)
        join_world(world.device, always=True)
        self.drafter, self.world, self.clip = drafter, world, optim.clip
        self.stage, self.sharded = config.zero_stage, config.sharded
        self.names = list(drafter.state_dict())
        trained = [p for p in drafter.parameters() if p.requires_grad]
        settings = make_settings(config, optim.clip, sum(p.numel() for p in trained))
        # DeepSpeed reads LOCAL_RANK while it works, and moves the drafter to the CUDA device of
        # that number; `close` removes it, since other code would take it as the sign of a launch.
        self._alone = "LOCAL_RANK" not in os.environ
        os.environ.setdefault("LOCAL_RANK", str(world.device.index or 0))
        self.engine, *_ = self.deepspeed.initialize(
            model=Objective(drafter, config, world.device.type),
            optimizer=make_optimizer(drafter, optim),
            config=settings,
            dist_init_required=False,
        )
        if optim.kind == "muon" and self.stage > 0:
            zero = self.engine.optimizer
            flats = zero.single_partition_of_fp32_groups
            pieces = [
                divide([tuple(p.shape) for p in group], flat.numel(), world.rank)
                for group, flat in zip(zero.round_robin_bit16_groups, flats, strict=True)
            ]
            self._adam().hold(pieces, world.add)

    def forward_backward(self, batch: TrainBatch, supervised: int, last: bool) -> LossOutput:
        """See `TrainEngine`. DeepSpeed divides by the number of processes, hence the factor."""
        self.engine.set_gradient_accumulation_boundary(last)
        alone = self.stage < 3 or self.world.size == 1
        with nullcontext() if alone else agreeing(self._largest):
            loss = self.engine(batch)
        self.engine.backward(loss * (self.world.size / supervised), scale_wrt_gas=False)
        return LossOutput(loss.detach(), self.engine.module.metrics)

    def _largest(self, count: int) -> int:
        """The largest number that a process gives. Collective."""
        counts = torch.zeros(self.world.size, dtype=torch.int64, device=self.world.device)
        counts[self.world.rank] = count
        return int(self.world.add(counts).max())

    def step(self, rate: float) -> float:
        """See `TrainEngine`. Stage 0 has no ZeRO optimiser and is clipped here; ZeRO 1 to 3 clip
        themselves."""
        set_rate(self.engine.optimizer, rate)
        norm = None
        if self.stage == 0:
            trained = self._named().values()
            fill_gradients(trained)
            norm = float(nn.utils.clip_grad_norm_(trained, self.clip or math.inf))
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return norm
        self.engine.step()
        return float(self.engine.get_global_grad_norm()) if norm is None else norm

    def weights(self) -> dict[str, Tensor]:
        """See `TrainEngine`. With ZeRO-3, one weight at a time is gathered, so only the main
        process holds all of them."""
        buffers = dict(self.drafter.named_buffers())
        parameters = dict(self.drafter.named_parameters(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for name in self.names:
            value = parameters.get(name, buffers.get(name))
            assert value is not None, f"'{name}' is neither a weight nor a buffer"
            gathered = self.stage == 3 and name in parameters
            with self.deepspeed.zero.GatheredParameters([value]) if gathered else nullcontext():
                if self.world.is_main:
                    found |= cpu_copies({name: value})
        return found

    def _spans(self) -> list[list[shards.Span]]:
        """The runs of weights that the optimiser updates here, by DeepSpeed's groups of weights."""
        zero, rank = self.engine.optimizer, self.world.rank
        if self.stage == 0:
            return [shards.whole_spans(self._named())]
        names = {id(p): name for name, p in self._named().items()}
        groups: list[list[shards.Span]] = []
        if self.stage == 3:
            flats = zero.fp32_partitioned_groups_flat
            for group, flat in zip(zero.fp16_groups, flats, strict=True):
                named = [(names[id(p)], tuple(p.ds_shape)) for p in group]
                pieces = [p.partition_numel() for p in group]
                groups.append(shards.piece_spans(named, pieces, rank, flat))
            return groups
        flats = zero.single_partition_of_fp32_groups
        for group, flat in zip(zero.round_robin_bit16_groups, flats, strict=True):
            named = [(names[id(p)], tuple(p.shape)) for p in group]
            offsets = [0, *accumulate(p.numel() for p in group[:-1])]
            groups.append(shards.slice_spans(named, offsets, rank * flat.numel(), flat))
        return groups

    @contextmanager
    def _in_memory(self, group: int, *, changed: bool) -> Iterator[None]:
        """The optimiser's state of a group in memory: read from disk, and written if `changed`."""
        zero = self.engine.optimizer
        if self.stage != 3 or not zero._swappable_optimizer_subgroup(group):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changed:
            zero._optimizer_states_and_gradient_swap_out(group)
        else:
            zero._release_swap_buffers(group)

    def _named(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}

    def _adam(self) -> Any:
        own = self.engine.optimizer
        return own if self.stage == 0 else own.optimizer

    def optimizer_state(self) -> StatePart:
        whole = StatePart()
        for group, spans in enumerate(self._spans()):
            with self._in_memory(group, changed=False):
                part = shards.collect(self._adam(), spans)
            whole.tensors |= part.tensors
            whole.runs |= part.runs
        return whole

    def load_optimizer_state(self, parts: Sequence[AnyPart]) -> None:
        whole = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._named().items()}
        for group, spans in enumerate(self._spans()):
            with self._in_memory(group, changed=True):
                shards.distribute(self._adam(), spans, whole, parts)

    def close(self) -> None:
        """See `TrainEngine`. The process group stays: DeepSpeed keeps its groups as long as the
        process lives."""
        self.engine.destroy()
        del self.engine
        gc.collect()
        if self._alone:
            os.environ.pop("LOCAL_RANK", None)
