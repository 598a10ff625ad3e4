"""Whether a batch fits into memory, computed before anything is allocated.

A batch takes the target's cache (keys and values for every row and slot, recurrent states for every
row), the drafter's state, and the activations of one forward pass. The drafter's state is what
`Drafter.start` allocates. It is estimated by starting the drafter with few rows of few slots, and
scaling the result.

Legend: B rows, S slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape
from heads.kernels.dispatch import choose
from inference.kernels.reference.attention import workspace_bytes
from inference.kernels.reference.filters import FILTER_LOGITS
from inference.target.hardware import release_unused
from inference.target.kv_cache import CacheSizes

logger = logging.getLogger(__name__)
T = TypeVar("T")

GIB = 1 << 30
PROBED_SLOTS = (64, 192)
HEADROOM = 0.95
"""Share of the free memory that a plan may take."""
FILTER_KERNEL_BYTES = 8
"""Bytes per logit that a filter holds where its kernel runs: the tempered logits and the result, in
float32."""


class BatchMemoryError(UserError):
    """A batch that does not fit into the free memory. fits: the rows that would, possibly 0."""

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


def in_rows_that_fit(
    decoded: Callable[[int], T], rows: int, requests: int, setting: str
) -> tuple[T, int]:
    """`decoded(rows)`, with fewer rows if these do not fit into memory, and the rows it took.
    requests: how many are decoded; setting: what gives `rows`, for the warning. Raises
    `BatchMemoryError` if not even one row fits."""
    while True:
        try:
            return decoded(rows), rows
        except BatchMemoryError as error:
            taken = min(rows, requests)
            if taken <= 1:
                raise
            fewer = max(1, min(error.fits, taken - 1))
            logger.warning("decoding %d rows at a time, not %s=%d: %s", fewer, setting, rows, error)
            rows = fewer


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a batch of `rows` x `slots` will take in addition to the weights."""

    rows: int
    slots: int
    cache: int
    drafter: int
    activations: int

    @property
    def total(self) -> int:
        return self.cache + self.drafter + self.activations

    def require(self, free: int, device: torch.device) -> None:
        """Raise `BatchMemoryError`, with what to lower, if the plan does not fit into `free`
        bytes."""
        allowed = int(free * HEADROOM)
        if self.total <= allowed:
            return
        per_row = self.total // self.rows
        fits = allowed // per_row if per_row else 0
        advice = "not even one row fits: shorten the prompts or decode.max_new_tokens"
        advice = f"decode.batch_size={fits} would fit" if fits >= 1 else advice
        raise BatchMemoryError(
            f"a batch of {self.rows} rows of {self.slots} tokens needs {gib(self.total)} on "
            f"{device} (cache {gib(self.cache)}, drafter {gib(self.drafter)}, activations "
            f"{gib(self.activations)}), but {gib(free)} are free, of which {HEADROOM:.0%} may be "
            "used. Lower decode.batch_size, decode.max_new_tokens, decode.prefill_chunk or the "
            f"prompts' length; {advice}.",
            fits,
        )


def plan_memory(
    info: TargetInfo,
    dtype: torch.dtype,
    sizes: CacheSizes,
    rows: int,
    slots: int,
    nodes: int,
    drafter_state: int,
    widest: int,
    kernel: bool = False,
    sampling: int = 0,
    features: int = 0,
) -> MemoryPlan:
    """The plan for B rows of S slots.

    sizes: of the target's cache; drafter_state: bytes of the drafter's state for the whole batch;
    widest: most tokens of one prefill pass of one row; kernel: whether the tree attention kernel
    runs, which takes scratch memory; sampling: bytes per logit that picking a token takes
    (`picking_bytes`); features: elements of the longest prompt's features, its taps and last
    states, which are kept until the drafter has started. Activations are the features of all
    prompts and those of the widest pass: hidden states, MLP and attention of one layer, logits of
    all nodes, and the nodes' inputs to recurrent states.
    """
    size = torch.finfo(dtype).bits // 8
    cache = rows * (slots * sizes.slot + sizes.row)
    tokens = rows * max(widest, nodes)
    activations = tokens * (4 * info.hidden_size + 3 * info.intermediate_size) * size
    activations += rows * nodes * (info.vocab_size * (size + 4 + sampling) + sizes.node)
    activations += rows * features * size
    if kernel:
        activations += workspace_bytes(rows, info.num_attention_heads, nodes, info.head_dim, slots)
    return MemoryPlan(rows, slots, cache, drafter_state, activations)


def picking_bytes(reference: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes per logit that picking a token takes on `device`. reference: those of plain torch
    (`inference.decoding.sampling.distribution.pick_bytes`); dtype: the target's."""
    logits = torch.promote_types(dtype, torch.float32)
    kernel = choose(FILTER_LOGITS, device, logits).implementation == "triton"
    return min(reference, FILTER_KERNEL_BYTES) if kernel else reference


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if unknown."""
    if device.type == "cuda":
        release_unused()  # memory of graphs that are gone cannot be told from that of others
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved - _kept_for_graphs(device))
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.is_file():
        return None
    for line in table.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _group_limit())
    return None


def _kept_for_graphs(device: torch.device) -> int:
    """Bytes without tensors that torch keeps in pools of their own, which only captured graphs
    use."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    return sum(
        int(segment["total_size"] - segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _group_limit() -> int:
    """Bytes that this process's control group (container) still allows; huge without a limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text, taken = limit.read_text(encoding="ascii").strip(), used.read_text(encoding="ascii")
        return 1 << 62 if text == "max" else max(0, int(text) - int(taken))
    except (OSError, ValueError):
        return 1 << 62


def gib(count: int) -> str:
    """A number of bytes as readable text."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 100 else f"{count / (1 << 20):.1f} MiB"


@torch.no_grad()
def drafter_state_bytes(
    drafter: Any, tree: DraftShape, rows: int, slots: int, target: TargetInfo, like: Tensor
) -> int:
    """Bytes of the state of B rows of S slots, extrapolated from few rows of few slots.

    like: any tensor of the target's dtype on its device.
    """
    if drafter is None:
        return 0

    def probe(count: int, capacity: int) -> int:
        blank = blank_states(drafter, count, target, like)
        return tensor_bytes(drafter.start(blank, tree, capacity))

    few, many = PROBED_SLOTS
    small = probe(1, few)
    per_row = probe(2, few) - small  # memory that rows share is counted once
    per_slot = (probe(1, many) - small) / (many - few)
    return int(small - per_row + rows * (per_row + per_slot * max(0, slots - few)))


def blank_states(drafter: Any, rows: int, target: TargetInfo, like: Tensor) -> TargetStates:
    """Input for starting a drafter without a prompt: one token per row, zero states."""
    token = torch.zeros(rows, 1, dtype=torch.int64, device=like.device)
    hidden, taps = like.new_zeros(rows, 1, target.hidden_size), len(drafter.needs.taps)
    tapped = hidden[:, :, None].repeat(1, 1, taps, 1) if taps else None
    return TargetStates(token, token, token, token == 0, tapped, hidden)


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in a drafter's state, nested dataclasses and lists included."""
    if isinstance(state, Tensor):
        return state.nbytes
    if is_dataclass(state):
        return sum(tensor_bytes(getattr(state, item.name)) for item in fields(state))
    if isinstance(state, (list, tuple)):
        return sum(tensor_bytes(item) for item in state)
    return 0
