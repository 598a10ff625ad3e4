"""Where a training's features come from: `features.*`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from heads.api.config import (
    Count,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    Rows,
    Size,
    Timeout,
    config,
)
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from inference.manifest import MANIFEST_FILE, file_sha256
from train.features.store.batches import Form
from train.features.store.codec import check_format
from train.features.store.layout import Identity


@config("features")
@dataclass(frozen=True)
class FeaturesConfig:
    """How features reach the trainer, and how they are stored or served."""

    mode: Literal["online", "store", "remote", "group", "vllm", "sglang", "responses"] = "online"
    """online: the frozen target runs in the training process. store: `headstart features` has
    written them or is writing them. remote: feature servers compute them. group: some processes of
    the same launch compute them. vllm: vLLM servers compute them and leave them as files.
    sglang: SGLang servers compute the last hidden state and return it in their answers. responses:
    servers computed them while they generated the responses, and they were stored with these
    (sampling.states)."""
    source: Literal["target", "vllm", "sglang", "responses"] = "target"
    """store, `headstart features`: what computes the features. target: the process that writes or
    serves them; vllm, sglang: the servers of that engine in features.servers; responses: the
    servers that generated the responses. For a training, set the source of its store."""
    trainer_target: Literal["whole", "parts"] = "whole"
    """All modes but online: the part of the target that a trainer holds. whole: all of it, so that
    checkpoints are chosen by decoding with them. parts: only embedding and LM head (and the final
    norm for vllm and responses), and layers only if a head asks for their weights; nothing is
    decoded then (train.eval_every=0, train.parity=false)."""
    path: str = ""
    """store: folder of the store; empty: features/<format> next to the folder of the answers, or
    features/<source>_<format> if features.source is not target."""
    format: str = "bf16"
    """All modes but online: format in which states are stored or sent (for vllm, sglang and
    responses: sent to the training step): bf16, fp32, fp8, int8 or int4 (docs/features.md)."""
    top_logits: Size = 0
    """Number of the target's largest logits to keep in place of its last hidden state; 0: keep the
    last hidden state, from which all logits follow exactly. For kinds that read it only for the
    target's distribution."""
    heads: tuple[str, ...] = ()
    """`headstart features`: further heads (names of conf/head) that the store serves besides
    `head`; with features.serve=true the heads of trainings that share a pass of the target."""
    shard_mib: Annotated[float, Ge(0.001), Le(1e6)] = 256.0
    """store: approximate size of one file in MiB."""
    quota_gib: NonNegativeFloat = 0.0
    """store: maximum size of the whole store in GiB, checked before the first byte; 0: as much as
    the disk has room for."""
    verify: bool = False
    """`headstart features`: compare all checksums first, and write damaged shards again."""
    wait_seconds: Timeout = 300.0
    """store: seconds that training waits for a row while the writers of the store make no
    progress."""
    ahead: Count = 2
    """All modes but online: number of steps for which features are fetched ahead."""
    servers: tuple[str, ...] = ()
    """remote, vllm, sglang: addresses of the servers, as http://host:port or https://host:port;
    requests go to each in turn."""
    states: str = "/dev/shm/headstart-states"
    """vllm: folder in which the servers leave states, as this machine sees it. Files are deleted
    after they are read."""
    layers: tuple[NonNegativeInt, ...] = ()
    """vllm: layers whose states the servers leave, ascending, including the target's last one;
    empty: those that the heads read and the last one."""
    concurrency: Count = 16
    """vllm, sglang: number of documents that a process requests from each server at once; for vllm
    features.states holds at most as many files."""
    ssl_cafile: str = ""
    """remote, vllm, sglang: PEM file of the authorities that verify https servers; empty: the
    system's."""
    token_variable: str = "HEADSTART_FEATURES_TOKEN"
    """remote, vllm, sglang: environment variable with the token that servers require."""
    timeout_seconds: Timeout = 60.0
    """remote, vllm, sglang, group: seconds to wait for one answer."""
    retries: Count = 5
    """remote, vllm, sglang: how often a request is retried, each time with the next server and
    after a longer pause."""
    serve: bool = False
    """`headstart features`: serve features instead of writing a store."""
    host: str = "127.0.0.1"
    """serve: address to listen on. Any address but loopback needs a token."""
    port: Port = 8765
    """serve: port to listen on; 0: any free one, which is printed."""
    shared_gib: NonNegativeFloat = 2.0
    """serve: maximum GiB of answers that are kept for other trainings that request the same rows;
    0: none."""
    ssl_certfile: str = ""
    """serve: PEM file of a certificate with its chain; the server then speaks https. Empty:
    http."""
    ssl_keyfile: str = ""
    """serve: PEM file of the certificate's private key, unencrypted; empty: features.ssl_certfile
    contains it."""
    targets: Rows = 1
    """group: number of processes of the launch, the last ones, that run the target for the
    others."""
    transport: Literal["auto", "device", "host"] = "auto"
    """group: path of the answers. device: from the target's device to the trainer's (NCCL between
    GPUs). host: through the memory of both hosts (gloo). auto: device if every process has a
    separate GPU."""

    def __post_init__(self) -> None:
        check_format(self.format)
        if self.mode == "remote" and not self.servers:
            raise UserError(
                "features.mode=remote needs features.servers, for instance "
                "[http://10.0.0.5:8765]. Start one with `headstart features features.serve=true`."
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise UserError(
                "features.layers must be ascending layer numbers without repetition; given: "
                f"{list(self.layers)}."
            )

    def token(self) -> str:
        """The token in the environment variable, empty if there is none; raises `UserError` for one
        that no header can carry."""
        value = os.environ.get(self.token_variable, "").strip()
        if not (value.isascii() and value.isprintable()):
            raise UserError(
                f"the token in the environment variable {self.token_variable} must consist of "
                "printable ASCII characters. `openssl rand -hex 24` makes one."
            )
        return value

    def require_returned(self, needs: FeatureSpec) -> None:
        """Raise `UserError` for features that SGLang servers do not return."""
        if "sglang" in (self.mode, self.source) and needs.taps:
            raise UserError(
                "SGLang servers return only the target's last hidden state, but the heads read "
                f"its layers {list(needs.taps)}: use features=vllm, or features.source=vllm for a "
                "store."
            )

    def form(self, info: TargetInfo) -> Form:
        """How states are stored or sent; raises `UserError` if that many logits cannot be
        distinguished from a hidden state."""
        top = self.top_logits
        if top and (top >= info.vocab_size or 2 * top + 1 == info.hidden_size):
            raise UserError(
                f"features.top_logits={top} cannot be used here: it must be below the vocabulary "
                f"of {info.vocab_size}, and 2 x {top} + 1 must not be the hidden size "
                f"{info.hidden_size}. Take one less."
            )
        return Form(self.format, info.hidden_size, info.vocab_size, top)

    def identity(
        self,
        needs: FeatureSpec,
        info: TargetInfo,
        answers: Path,
        length: int,
        precision: str,
        domains: tuple[str, ...] = (),
        loading: str = "",
    ) -> Identity:
        """The identity of a store that serves `needs` on answers (of `domains`; empty: all) in rows
        of `length` tokens. loading: see `inference.target.settings.loading_text`. Raises
        `UserError` for features that the source does not have."""
        self.require_returned(needs)
        last = needs.last_hidden or needs.logits
        top = self.top_logits if last else 0
        trained = (file_sha256(answers / MANIFEST_FILE), length, info.revision, info.tokenizer_hash)
        form = (precision, self.format, top)
        return Identity(*trained, *form, needs.taps, last, domains, self.source, loading)

    def folder(self, answers: Path) -> Path:
        """The store's folder for the answers in `answers`."""
        name = self.format if self.source == "target" else f"{self.source}_{self.format}"
        return Path(self.path) if self.path else answers.parent / "features" / name
