"""Documents' states from the servers of an inference engine, as far as the engines have it in
common.

Before its first document, and again after a failure, since it may have been restarted, a server is
checked: its length and, if the trainer holds the whole target, its states of a short text. Every
document is checked by the token that the server adds to it: the document's last state, through the
target's LM head, must give that token the log-probability that the server reports. This finds
states of another text, another model or another layer.

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import torch
from pydantic import AliasPath, BaseModel, Field, ValidationError
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import UNKNOWN_REVISION, TargetInfo
from inference.engines.client import PROBE
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.last_state import agrees
from train.features.servers import Address, BusyError, FailureError, Servers

MOST_AROUND, TOKEN_BYTES = 1 << 20, 256
"""Bytes that an answer may have besides its tokens, and per token."""
LONGEST_LOOK = 10.0
"""Seconds for a server's list of models, which also a busy one answers at once."""
LAYER_GAP = 0.1
"""Largest relative difference of a layer's states to the target's own."""
Model = TypeVar("Model", bound=BaseModel)


class Listed(BaseModel):
    """The part of /v1/models that is read: the first entry is the model that all others adapt."""

    name: Annotated[str, Field(validation_alias=AliasPath("data", 0, "id"))]
    longest: Annotated[int, Field(validation_alias=AliasPath("data", 0, "max_model_len"))]


class EngineClient(ABC):
    """States from the servers of `config`; safe to use from several threads. longest: tokens of a
    document; reads: what of the target the servers give; command: starts a server that fits."""

    engine: ClassVar[str]
    port: ClassVar[int]
    """Where the engine listens by default."""
    spare: ClassVar[int]
    """Positions that the engine needs beyond a document."""
    layers: tuple[int, ...]

    def __init__(
        self,
        config: FeaturesConfig,
        target: TargetModel,
        longest: int,
        reads: FeatureSpec,
        command: str,
    ) -> None:
        self.config, self.target, self.longest = config, target, longest
        self.reads, self.command = reads, command
        if not config.servers:
            raise UserError(
                f"features.servers names no {self.engine} server. Start one:\n    {command}\nand "
                f'give its address, for instance "features.servers=[http://127.0.0.1:{self.port}]".'
            )
        json_body = {"Content-Type": "application/json"}
        self.servers = Servers(config, f"{self.engine} server", json_body)
        self._models: dict[Address, str] = {}
        """The model's name at servers that were checked."""
        self._looking = {server: threading.Lock() for server in self.servers.all}
        self._refused: dict[Address, tuple[float, FailureError]] = {}
        """The last look at a server that failed: when it ended (monotonic), and why."""
        self._text, self._tokens = self._probe()
        self._own: Tensor | None = None

    def _greet(self, whole: bool) -> None:
        """Check the servers; raises `UserError` if none answers, or if one does not fit the target.
        whole: whether `target` can run."""
        # once, here: threads check servers while others may run the target
        self._own = self._own_states() if whole else None
        self.servers.greet(self._model_of, f"Start one with\n    {self.command}")

    @abstractmethod
    def _ask(self, server: Address, model: str, tokens: Sequence[int]) -> Tensor:
        """The checked states [N, L, H] of a document from one server."""

    def _ask_probe(self, server: Address, model: str) -> Tensor:
        """The states of the probe, by which a server is checked."""
        return self._ask(server, model, self._tokens)

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The states [N, L, H] of a document on the CPU, in the target's dtype, from one server
        after another; raises `UserError` if all attempts fail."""

        def ask(server: Address) -> Tensor:
            try:
                return self._ask(server, self._model_of(server), tokens)
            except FailureError:
                self._models.pop(server, None)  # it may be another one when it answers again
                raise

        return self.servers.in_turn(ask)

    def close(self) -> None:
        """Make waiting requests give up."""
        self.servers.stop()

    def _model_of(self, server: Address) -> str:
        """The name of a server's model; raises `UserError` for one that does not fit. One thread
        looks at a server; those that come meanwhile share what it finds, also its failure, since
        a server that hangs would otherwise keep them waiting one after another."""
        came = time.monotonic()
        with self._looking[server]:
            if server in self._models:
                return self._models[server]
            ended, failure = self._refused.get(server, (-math.inf, None))
            if isinstance(failure, BusyError) and ended >= came:
                raise BusyError(str(failure), failure.wait) from failure
            if failure is not None and ended >= came:
                raise FailureError(str(failure)) from failure
            try:
                self._models[server] = self._look(server)
            except FailureError as error:
                self._refused[server] = time.monotonic(), error
                raise
            return self._models[server]

    def _look(self, server: Address) -> str:
        """Ask a server for its model, and for the states of a text."""
        content = self.servers.request(
            server, "GET", "/v1/models", most=MOST_AROUND, longest=LONGEST_LOOK
        )
        listed = self._read(Listed, content)
        if listed.longest - self.spare < self.longest:
            raise self._misfit(
                server,
                f"takes {listed.longest - self.spare} tokens and {self.spare} more, but documents "
                f"may have {self.longest} (train.sequence_length)",
            )
        states = self._ask_probe(server, listed.name)
        if self._own is not None:
            self._require_same_layers(server, self._own, states)
        return listed.name

    def _probe(self) -> tuple[str, list[int]]:
        """A text on which tokenizers disagree, no longer than documents, and its tokens."""
        encode = partial(self.target.tokenizer.encode, add_special_tokens=False)
        texts = (PROBE[:end] for end in range(len(PROBE), 0, -1))
        text = next(text for text in texts if len(encode(text)) <= self.longest)
        return text, encode(text)

    def _own_states(self) -> Tensor:
        """The target's own states [N, L, H] of the probe, on the CPU."""
        device = self.target.device
        tokens = torch.tensor(self._tokens, device=device)[None]
        positions = torch.arange(len(self._tokens), device=device)[None]
        segments = torch.ones_like(tokens, dtype=torch.int32)
        taps, last = self.target.features(tokens, positions, segments, self.reads)
        own = taps if last is None else last[:, :, None]
        assert own is not None
        return own[0].cpu()

    def _require_same_layers(self, server: Address, own: Tensor, states: Tensor) -> None:
        """Raise `UserError` if a server's states of the probe differ from the target's."""
        for layer, mine, theirs in zip(
            self.layers or (self.target.info.num_layers,),
            own.float().unbind(1),
            states.float().unbind(1),
            strict=True,
        ):
            gap = float((theirs - mine).norm() / mine.norm())
            if not gap <= LAYER_GAP:
                raise self._misfit(
                    server,
                    f"leaves states that differ from the target's at layer {layer} (by {gap:.0%}): "
                    "it runs other weights, or leaves other layers",
                )

    def _require_agreement(self, server: Address, gap: float) -> None:
        """Raise `UserError` for the distance between the log-probability of the server's token and
        that which follows from its states."""
        if not agrees(self.target, gap):
            raise self._misfit(
                server,
                f"gives a token another log-probability than its states do (by {gap:.2g}): it "
                "runs another model or dtype, or its last layer is another",
            )

    def _read(self, model: type[Model], content: bytes) -> Model:
        """An answer; raises `FailureError` if it is not in the engine's format."""
        try:
            return model.model_validate_json(content)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise FailureError(f"an answer that is none of {self.engine}'s ({reason})") from error

    def _misfit(self, server: Address, what: str) -> UserError:
        return UserError(
            f"the {self.engine} server {server} does not fit this training: it {what}. Start it "
            f"with\n    {self.command}"
        )


def model_words(info: TargetInfo) -> list[str]:
    """How a server's command line names the target."""
    path = Path(info.id)
    if path.is_dir():
        return [str(path.resolve())]
    revision = [] if info.revision == UNKNOWN_REVISION else ["--revision", info.revision]
    return [info.id, *revision]
