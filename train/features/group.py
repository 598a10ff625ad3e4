"""Features from other processes of the same launch: the last ones run the target, the others train.

The trainers form a separate group for gradients. Each communicates with one target process, point
to point over gloo, and requests steps ahead of time. A message is a header [4] int64 (operation,
rows, positions, status). In a request, it is followed by tokens, positions and segments [3, b, T]
int32. The answer is one run of bytes whose layout both sides know.

Answers go from the target's device to the trainer's (`features.transport=device`, NCCL between
GPUs), or over gloo through the memory of both hosts (`host`). A transfer between devices is first
announced over gloo, and the trainer receives it when it needs it. So a receiving kernel never waits
for a computation of the other side; only a sending one may.

Legend: b rows, T positions, N real tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.model import TargetModel
from inference.target.settings import loading_text
from train.config import TrainingJob
from train.data.loader import PackedBatch
from train.distributed import JOIN_TIMEOUT, World
from train.features.base import FeatureTarget
from train.features.config import FeaturesConfig
from train.features.fetch import Coming
from train.features.remote import wire
from train.features.remote.wire import Ask, key_of
from train.features.store.batches import Content, Form
from train.features.store.codec import parts_of
from train.features.store.layout import LAST, TOP, precision_of
from train.manifest import TrainManifest, read_training
from train.stopping import StopRequest

HELLO, ROWS, BYE = 0, 1, 2
HEADER_TAG, ROWS_TAG, ANSWER_TAG = 1, 2, 3
TEXT_BYTES = 8192


@dataclass(frozen=True)
class Division:
    """The roles of `size` processes, of which the last `targets` run the target."""

    size: int
    targets: int

    @property
    def trainers(self) -> int:
        return self.size - self.targets

    def target_of(self, trainer: int) -> int:
        """The rank of the target process that a trainer asks."""
        return self.trainers + trainer % self.targets

    def trainers_of(self, rank: int) -> list[int]:
        return [trainer for trainer in range(self.trainers) if self.target_of(trainer) == rank]


def run_in_group(
    job: TrainingJob, world: World, train: Callable[[World], TrainManifest]
) -> TrainManifest:
    """Train (with the given world) in the first processes and run the target in the last ones;
    returns the manifest in all. Raises `UserError` if processes cannot be divided like this."""
    division = divide(job, world)
    ranks = list(range(division.trainers))
    group = dist.new_group(ranks, timeout=JOIN_TIMEOUT)
    _links[:] = [Link.open(job.features.transport, world, division)]
    if world.rank in ranks:
        own = replace(world, size=division.trainers, group=group, helpers=division.targets)
        finished = False
        try:
            manifest = train(own)
            finished = True
        finally:
            with nullcontext() if finished else suppress(RuntimeError):
                send_header(BYE, division.target_of(world.rank), status=int(not finished))
        return manifest
    target = TargetModel.load(job.target)
    with StopRequest() as request:  # trainers get the signal too; they save, then send BYE
        try:
            key = key_of(
                target.info,
                precision_of(job.engine.dtype, target.dtype),
                loading_text(job.target.unusual),
            )
            complete = serve(target, job.engine.dtype, key, division.trainers_of(world.rank))
        except RuntimeError:
            if not request.number:
                raise
            complete = False  # a trainer left without a message: it had not begun to train
    if not complete:
        raise SystemExit(0)  # the trainers report why they ended
    return read_training(job.out)


@dataclass(frozen=True)
class Link:
    """The connections between the processes of a launch: `host` carries headers, requests and
    answers through CPU memory; `device` carries answers from one device's memory to the other's, or
    is None. here: this process's device."""

    host: dist.ProcessGroup
    device: dist.ProcessGroup | None
    division: Division
    here: torch.device

    @classmethod
    def open(cls, transport: str, world: World, division: Division) -> Link:
        """Collective: all processes of the launch."""
        everyone = list(range(world.size))
        host = dist.new_group(everyone, backend="gloo", timeout=JOIN_TIMEOUT)
        if transport == "auto":
            # processes that share a GPU, or have none, cannot use NCCL
            here = f"{gethostname()} {world.device}"
            places: list[str] = [""] * world.size
            dist.all_gather_object(places, here, group=host)
            direct = world.device.type == "cuda" and len({*places}) == world.size
            transport = "device" if direct and dist.is_nccl_available() else "host"
        if transport == "host":
            return cls(host, None, division, world.device)
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        device = dist.new_group(everyone, backend=backend, timeout=JOIN_TIMEOUT)
        link = cls(host, device, division, world.device)
        link._connect(world.rank)
        return link

    def _connect(self, rank: int) -> None:
        """Send a byte from every target process to each of its trainers. NCCL connects a pair at
        its first transfer, which could otherwise wait for an answer on its way to another trainer,
        and that one, in the exchange of gradients, for this pair."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.here)
        if rank < self.division.trainers:
            dist.recv(byte, self.division.target_of(rank), group=self.device)
        for trainer in self.division.trainers_of(rank):
            dist.send(byte, trainer, group=self.device)


_links: list[Link] = []
"""The link of this launch; empty unless features.mode=group."""


def divide(job: TrainingJob, world: World) -> Division:
    """The processes' roles; raises `UserError` if they cannot be divided like this."""
    division = Division(world.size, job.features.targets)
    if division.trainers < 1 or division.trainers < division.targets:
        raise UserError(
            f"features.mode=group: of {world.size} processes, features.targets={division.targets} "
            f"run the target, which leaves {max(0, division.trainers)} to train; at least as many "
            "must train. Start more processes (torchrun --nproc-per-node=...), or lower "
            "features.targets."
        )
    if job.engine.target_sharding != "none":
        raise UserError(
            f"features.mode=group: engine.target_sharding={job.engine.target_sharding} divides "
            "the target among all processes of the launch, but here some of them run it and the "
            "others train. Set engine.target_sharding=none, or use features.mode=remote."
        )
    if job.engine.name != "torch":
        raise UserError(
            "features.mode=group needs engine=torch: DeepSpeed takes every process of a launch "
            "for a trainer, so it would wait for the target's processes. With DeepSpeed use "
            "features.mode=remote with servers of their own."
        )
    return division


# The trainers' end


@dataclass(frozen=True)
class Message:
    """Features in transfer. gloo cannot tell whether they have arrived. A target process answers
    until its trainers have left, so the trainer waits for them as for a computation."""

    result: Callable[[], Content]

    def wait(self, seconds: float) -> bool:
        """See `Coming`."""
        return True


class Arriving:
    """An answer of `size` bytes that `target` will send: the answer itself, or its announcement."""

    def __init__(self, link: Link, target: int, size: int) -> None:
        self.link, self.target, self.size = link, target, size
        self.answer: Tensor | None = None
        """The answer, once it was taken."""
        self._first = torch.empty(1 if link.device else size, dtype=torch.uint8)
        self._work: Any = dist.irecv(self._first, target, group=link.host, tag=ANSWER_TAG)

    def take(self, timeout: timedelta) -> Tensor:
        """The answer [size] uint8, in memory of the host or of this process's device; raises
        `RuntimeError` if it does not come in time. Between devices, answers of one target process
        have to be taken in the order of the requests, in which they are sent."""
        self._work.wait(timeout=timeout)
        if self.link.device is None:
            return self._first
        answer = torch.empty(self.size, dtype=torch.uint8, device=self.link.here)
        dist.recv(answer, self.target, group=self.link.device)
        return answer


class GroupSource:
    """Features from this launch's target process, after it has confirmed that it runs the same
    target."""

    def __init__(
        self,
        config: FeaturesConfig,
        target: FeatureTarget,
        precision: str,
        loading: str,
        needs: FeatureSpec,
    ) -> None:
        if not _links:
            raise UserError(
                "features.mode=group works within `headstart train` under torchrun only."
            )
        self.form, self.timeout = (
            config.form(target.info),
            timedelta(seconds=config.timeout_seconds),
        )
        self.link = _links[0]
        self.target = self.link.division.target_of(dist.get_rank())
        self.wish = Ask.of(needs, self.form)
        self._sent: list[tuple[Any, Tensor]] = []
        self._coming: list[Any] = []
        send_header(HELLO, self.target)
        send_body(f"{key_of(target.info, precision, loading)} {self.wish.to_json()}", self.target)
        answer = receive_body(self.target)  # waits while it loads
        if answer:
            raise UserError(f"the target's process (rank {self.target}) refuses: {answer}")

    def ask(self, packed: PackedBatch) -> Coming:
        """Send a request and prepare for its answer, both without waiting."""
        rows, length = packed.tokens.shape
        header = torch.tensor([ROWS, rows, length, 0])
        body = torch.stack([getattr(packed, name).int() for name in wire.ROWS])
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for part, tag in ((header, HEADER_TAG), (body, ROWS_TAG)):
            self._sent.append((dist.isend(part, self.target, group=self.link.host, tag=tag), part))
        count = int((packed.segments > 0).sum())
        parts = answer_parts(self.wish.taps, self.wish.last_hidden, self.form)
        arriving = Arriving(self.link, self.target, sum(size for *_, size in parts) * count)
        self._coming.append(arriving)

        def take() -> Content:
            try:
                buffer = self._take(arriving)
            except RuntimeError as error:
                raise UserError(
                    f"the target's process (rank {self.target}) has not sent features within "
                    f"{self.timeout.total_seconds():g} s ({str(error).splitlines()[0]}). Look at "
                    "its output, or raise features.timeout_seconds; this command continues from "
                    "its last saved state."
                ) from error
            return cut(buffer, parts, count)

        return Message(take)

    def _take(self, wanted: Arriving) -> Tensor:
        """An answer. Between devices, answers come in the order of the requests: earlier ones are
        received first, and kept until they are asked for."""
        while wanted.answer is None:
            first = self._coming[0] if self.link.device else wanted
            first.answer = first.take(self.timeout)
            self._coming.remove(first)
        answer, wanted.answer = wanted.answer, None
        return answer

    def close(self) -> None:
        """Take requested answers that are no longer needed, so that no transfer stays open."""
        with suppress(RuntimeError):  # of a target that is gone, nothing comes any more
            for arriving in self._coming:
                arriving.take(self.timeout)
        self._coming.clear()


# The target's end


def serve(target: FeatureTarget, dtype: torch.dtype, key: str, trainers: list[int]) -> bool:
    """Answer requests until every trainer has sent BYE; returns whether all ended without failure.
    key: of this target, see `wire.key_of`."""
    link = _links[0]
    asks: dict[int, Ask] = {}
    ends: dict[int, int] = {}
    sending = Sending(link)
    while len(ends) < len(trainers):
        header = torch.zeros(4, dtype=torch.int64)
        trainer = dist.recv(header, src=None, group=link.host, tag=HEADER_TAG)
        operation, rows, length, status = header.tolist()
        if operation == BYE:
            ends[trainer] = status
        elif operation == HELLO:
            theirs, wish = receive_body(trainer).split(" ", 1)
            refusal = (
                "it runs another target, tokenizer or precision than the trainer, or loads the "
                "target with other settings."
            )
            send_body("" if theirs == key else refusal, trainer)
            asks[trainer] = Ask.from_json(wish, target.info)
        else:
            body = torch.empty(3, rows, length, dtype=torch.int32)
            dist.recv(body, src=trainer, group=link.host, tag=ROWS_TAG)
            ask, packed = asks[trainer], PackedBatch.unsupervised(*body)
            content, form = wire.compute(target, dtype, ask, packed)
            parts = answer_parts(ask.taps, ask.last_hidden, form)
            flat = [
                content[thing][part].contiguous().view(torch.uint8) for thing, part, *_ in parts
            ]
            sending.send(torch.cat([each.flatten() for each in flat]), trainer)
    return not any(ends.values())


class Sending:
    """Answers in transfer; those between devices are kept until they are taken."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, answer: Tensor, trainer: int) -> None:
        """Send bytes [S] on the target's device to a trainer; between devices, without waiting
        until the trainer takes them."""
        host = self.link.host
        if self.link.device is None:
            dist.send(answer.cpu(), trainer, group=host, tag=ANSWER_TAG)
            return
        self._under_way = [sent for sent in self._under_way if not sent[0].is_completed()]
        # announce first: the trainer receives only what is computed
        dist.send(torch.ones(1, dtype=torch.uint8), trainer, group=host, tag=ANSWER_TAG)
        self._under_way.append((dist.isend(answer, trainer, group=self.link.device), answer))


def answer_parts(
    taps: tuple[int, ...], last: bool, form: Form
) -> list[tuple[str, str, torch.dtype, int, int]]:
    """(thing, part, dtype, values per token, bytes per token) of an answer, in order."""
    state, count = parts_of(form.fmt, form.hidden), form.top_logits
    things = dict.fromkeys([f"tap.{tap}" for tap in taps], state)
    if last and count:
        pairs = {"values": (torch.float16, count), "ids": (torch.int32, count)}
        things[TOP] = {**pairs, "logsumexp": (torch.float32, 0)}
    elif last:
        things[LAST] = state
    return [
        (thing, part, dtype, width, max(1, width) * dtype.itemsize)
        for thing, parts in things.items()
        for part, (dtype, width) in parts.items()
    ]


def cut(buffer: Tensor, parts: list[tuple[str, str, torch.dtype, int, int]], count: int) -> Content:
    content: Content = {}
    start = 0
    for thing, part, dtype, width, size in parts:
        # a copy starts at a place that its dtype allows
        run = buffer[start : start + size * count].clone().view(dtype)
        content.setdefault(thing, {})[part] = run.view(count, width) if width else run
        start += size * count
    return content


def send_header(operation: int, rank: int, status: int = 0) -> None:
    dist.send(torch.tensor([operation, 0, 0, status]), rank, group=_links[0].host, tag=HEADER_TAG)


def send_body(text: str, rank: int) -> None:
    raw = text.encode()
    assert len(raw) <= TEXT_BYTES, f"{len(raw)} bytes of greeting"
    body = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    body[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    dist.send(body, rank, group=_links[0].host, tag=ROWS_TAG)


def receive_body(rank: int) -> str:
    body = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    dist.recv(body, src=rank, group=_links[0].host, tag=ROWS_TAG)
    return bytes(body.tolist()).rstrip(b"\0").decode()
