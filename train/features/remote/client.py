"""The trainer's client of feature servers: requests go to each in turn and are retried
elsewhere."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load, save

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.reading import parse_json, refusing, require_object
from heads.api.target_info import TargetInfo
from heads.api.tensors import BROKEN
from train.data.loader import PackedBatch
from train.features.config import FeaturesConfig
from train.features.remote import wire
from train.features.servers import Address, FailureError, Servers
from train.features.store.batches import Content
from train.features.store.layout import things_of

LARGEST_IDENTITY = 1 << 20
"""Largest size in bytes of a server's identity."""
MOST_AROUND, VALUE_BYTES = 1 << 20, 16
"""Bytes that an answer may have besides its values (names, scales), and for each of them: more than
any format needs."""
USUAL = "the usual one"
"""The name in errors of a target that is loaded with the defaults."""
ADVICE = "Is it a feature server?"


class RemoteClient:
    """Features from the servers of `config`, each of which is first asked for its identity; safe to
    use from several threads. Raises `UserError` if none answers, or if one runs another target,
    tokenizer or precision, or loads the target in another way (`loading`)."""

    def __init__(
        self,
        config: FeaturesConfig,
        info: TargetInfo,
        precision: str,
        loading: str,
        needs: FeatureSpec,
    ) -> None:
        self.info, self.precision, self.loading = info, precision, loading
        form = config.form(info)
        ask = wire.Ask.of(needs, form).to_json()
        headers = {wire.KEY_HEADER: wire.key_of(info, precision, loading), wire.ASK_HEADER: ask}
        self.servers = Servers(config, "feature server", headers)
        widest = max(info.hidden_size, form.top_logits)
        self.position_bytes = (len(needs.taps) + 1) * widest * VALUE_BYTES
        self.stop = self.servers.stop
        self.servers.greet(
            self._greet,
            "Start one with `headstart features features.serve=true`, and name it in "
            "features.servers.",
        )

    def _greet(self, server: Address) -> None:
        """Ask a server for its identity; raises `UserError` for another target."""
        said = self.servers.request(server, "GET", "/identity", most=LARGEST_IDENTITY)
        self._require_same(server, identity_of(said))

    def _require_same(self, server: Address, answer: dict[str, Any]) -> None:
        """Raise `UserError` if a server does not run this training's target."""
        theirs = answer["target"]
        pairs = [
            ("protocol", wire.FORMAT, answer.get("format")),
            ("target revision", self.info.revision, theirs.get("revision")),
            ("tokenizer", self.info.tokenizer_hash, theirs.get("tokenizer_hash")),
            ("precision", self.precision, answer.get("precision")),
            ("way of loading", self.loading or USUAL, answer.get("loading") or USUAL),
        ]
        for name, mine, other in pairs:
            if mine != other:
                raise UserError(
                    f"the feature server {server} does not fit this training: its {name} "
                    f"is {other}, but {mine} is needed. Start it with the training's settings of "
                    "the target and engine.precision."
                )

    def fetch(self, packed: PackedBatch) -> Content:
        """Features of a batch from one server after another; raises `UserError` if all fail."""
        body = save({name: getattr(packed, name).int().contiguous() for name in wire.ROWS})
        most = MOST_AROUND + packed.tokens.numel() * self.position_bytes

        def ask(server: Address) -> Content:
            answer = self.servers.request(server, "POST", "/features", body, most=most)
            return content_of(answer)

        return self.servers.in_turn(ask)


def identity_of(content: bytes) -> dict[str, Any]:
    """The facts of a server's identity; raises `FailureError` for another kind of answer."""
    try:
        facts = require_object(parse_json(content, "the answer", ADVICE), "the answer", ADVICE)
        return {**facts, "target": require_object(facts.get("target"), "'target'", ADVICE)}
    except UserError as error:
        raise FailureError(str(error)) from error


def content_of(answer: bytes) -> Content:
    """The features in an answer; raises `FailureError` if it was cut or holds others."""
    try:
        with refusing("the answer", ADVICE, *BROKEN):
            return things_of(load(answer))
    except UserError as error:
        raise FailureError(str(error)) from error
