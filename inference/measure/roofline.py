"""How close a step comes to the memory bandwidth: the bytes that a step must move, over the
bandwidth measured on this device.

Decoding few tokens reads every weight once per step and computes little, so a step cannot be
shorter than its bytes over the bandwidth. Bytes: the target's weights without the embedding table
(a lookup) but with the LM head, the cached keys and values that attention reads, and the weights
that the drafter reads in all its passes, which are counted while it drafts. Bandwidth is probed on
the same device by a large copy and a large matrix-vector product; the faster one counts. For a
target with experts, the count includes the most experts that n tokens can reach, so its share is an
upper bound. Drafters' caches are small and left out.

Legend: n nodes of a verification, L cached tokens, T_step seconds of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference.decoding.arm import Arm
from inference.decoding.costs import Bench, interleave
from inference.measure.metrics import divide
from inference.report import model as schema
from inference.target.model import TargetModel

PROBE_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Size of a probe's operand, far larger than any cache."""
PROBE_REPEATS = 9
PACKED: torch.layout = torch._mkldnn  # type: ignore[attr-defined]
"""Layout of the tensors that `pack_linears` makes; only weights have it."""
LOOKUPS = ("embedding", "index_select", "gather", "index")
"""Operations that read only the requested rows."""


@torch.no_grad()
def probe_bandwidth(
    device: torch.device, dtype: torch.dtype, size: int = 0
) -> schema.BandwidthFacts:
    """Measure a device's bandwidth. size: bytes of each operand; 0: larger than the caches."""
    size = size or PROBE_BYTES.get(device.type, PROBE_BYTES["cpu"])
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    width = int((size // dtype.itemsize) ** 0.5)
    matrix = torch.ones(width, width, dtype=dtype, device=device)
    vector = torch.ones(1, width, dtype=dtype, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy.copy_(source),
        "gemv": lambda: F.linear(vector, matrix),
    }
    seconds = interleave(calls, device, PROBE_REPEATS, 2)
    copied = divide(2.0 * source.nbytes, min(seconds["copy"]))
    multiplied = divide(float(matrix.nbytes), min(seconds["gemv"]))
    return schema.BandwidthFacts(
        device=device.type,
        copy_bytes_per_second=copied,
        gemv_bytes_per_second=multiplied,
        used_bytes_per_second=max(copied, multiplied),
    )


# Bytes


@dataclass(frozen=True)
class TargetBytes:
    """Bytes of a target: `weights` that every step reads, `experts` that it reads in part (a token
    reaches the share `reached` of them), `kv_per_token` of cached text, `states` of recurrent
    layers."""

    weights: int
    experts: int
    kv_per_token: int
    states: int
    reached: float

    @classmethod
    def of(cls, target: TargetModel) -> TargetBytes:
        """Count the bytes of a loaded target."""
        embedding, head = target.weights.embedding, target.weights.lm_head
        named = dict(target.model.named_parameters())
        experts = sum(value.nbytes for name, value in named.items() if ".experts." in name)
        lookup = 0 if embedding.data_ptr() == head.data_ptr() else embedding.nbytes
        config = target.model.config.get_text_config()
        active = getattr(config, "num_experts_per_tok", 0) or 0
        total = getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0) or 0
        sizes = target.cache_sizes()
        return cls(
            weights=sum(value.nbytes for value in named.values()) - lookup - experts,
            experts=experts,
            kv_per_token=sizes.slot,
            states=sizes.row,
            reached=divide(active, total) or 1.0,  # unknown: all of them, which is the most
        )

    def step(self, nodes: int, length: float) -> int:
        """Bytes that verifying `nodes` nodes behind `length` cached tokens must read at least
        (experts: at most). States are read by the verification and by its commit, which writes
        them."""
        experts = self.experts * min(1.0, nodes * self.reached)
        return round(self.weights + experts + self.kv_per_token * length + 3 * self.states)


def drafter_bytes(target: TargetModel, arm: Arm, text: Sequence[int]) -> int:
    """Bytes of weights that one draft and one commit of an arm read, all its passes together."""
    shape = arm.decode.tree(target.device)
    bench = Bench(target, 1, min(len(text), 16), shape.max_depth + shape.num_nodes + 1, text)
    propose, commit = bench.step(arm, shape)
    weights = [target.weights.embedding, target.weights.lm_head, *target.weights.state.values()]
    if isinstance(arm.drafter, nn.Module):
        weights += [*arm.drafter.parameters(), *arm.drafter.buffers()]
    with torch.no_grad(), WeightReads(weights) as reads:
        propose()
        commit()
    return reads.bytes


class WeightReads(TorchDispatchMode):
    """Counts the bytes of given tensors, and of weights packed for the CPU, that operations read.

    Views read nothing; lookups read only their results.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {weight.untyped_storage().data_ptr() for weight in weights}
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if alias is not None and not alias.is_write:
            return out
        lookup = func._schema.name.split("::")[-1] in LOOKUPS
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, Tensor):
                continue
            if value.layout == PACKED:
                self.bytes += value.numel() * value.element_size()
            elif value.untyped_storage().data_ptr() in self.known:
                self.bytes += out.nbytes if lookup else value.nbytes
        return out


# The block


def roofline(
    target: TargetModel,
    arms: Sequence[Arm],
    baseline: schema.Baseline,
    drafters: Sequence[schema.DrafterResult],
    text: Sequence[int],
    lengths: Mapping[str, float],
) -> schema.Roofline:
    """The `roofline` block of report.json.

    text: token ids of real text. lengths: "baseline" and every arm -> mean cached tokens of its
    steps.
    """
    bandwidth = probe_bandwidth(target.device, target.dtype)
    size = TargetBytes.of(target)
    plain_bytes = size.step(1, lengths["baseline"])
    by_name = {arm.name: arm for arm in arms}
    entries = {}
    for drafter in drafters:
        name, times = drafter.name, dict(drafter.step_ms.items())
        own, step_ms = drafter_bytes(target, by_name[name], text), sum(times.values())
        moved = size.step(drafter.draft.nodes, lengths[name]) + own
        entries[name] = schema.RooflineDraft(
            bytes_per_step=moved,
            drafter_bytes=own,
            step_ms=step_ms,
            share=share_of(moved, step_ms, bandwidth),
            efficiency=drafter.efficiency,
            split=schema.PhaseValues(**{phase: divide(ms, step_ms) for phase, ms in times.items()}),
        )
    return schema.Roofline(
        bandwidth=bandwidth,
        target_bytes=size.weights,
        expert_bytes=size.experts,
        kv_bytes_per_token=size.kv_per_token,
        baseline=schema.RooflineStep(
            bytes_per_step=plain_bytes,
            step_ms=baseline.step_ms,
            share=share_of(plain_bytes, baseline.step_ms, bandwidth),
        ),
        arms=entries,
    )


def share_of(moved: int, step_ms: float, bandwidth: schema.BandwidthFacts) -> float:
    """Share of the bandwidth that a step reaches: bytes / (bandwidth * T_step)."""
    return divide(moved, bandwidth.used_bytes_per_second * step_ms / 1000.0)
