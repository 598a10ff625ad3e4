"""How answers are sampled, and where: by our decoder, servers, or vLLM in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from heads.api.config import NonNegativeInt, Rows, Seconds, Timeout, config
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.rules.names import TEXT, promise
from inference.decoding.structured.constraint import ANY_OBJECT, Constraint


@config("sampling")
@dataclass(frozen=True)
class SamplingConfig(DecodeConfig):
    """A decode configuration for answers, and the backend that decodes."""

    backend: Literal["own", "server", "vllm"] = "own"
    """own: the bundled decoder; server: the servers in `server`; vllm: vLLM in this process (it
    must be installed here)."""
    server: str | tuple[str, ...] = ""
    """Address of a server (http://host:8000), or a list of several that share the work. Setting it
    chooses backend server."""
    protocol: Literal["auto", "openai", "sglang"] = "auto"
    """openai (vLLM: /v1/completions with token ids), sglang (/generate), or auto: the one that the
    server answers to."""
    served_model: str = ""
    """The model's name at the server; empty: the only one it serves."""
    key_variable: str = "HEADSTART_SERVER_KEY"
    """Environment variable with the server's key, if it needs one. The key itself is never written
    or logged."""
    concurrency: Rows = 64
    """Concurrent requests per server and process."""
    retries: NonNegativeInt = 8
    """How often a request is retried after a temporary error (429, 5xx, a broken connection, no
    answer in time)."""
    backoff: Seconds = 1.0
    """Seconds before the first retry; doubled each time, up to 60. A server's Retry-After takes
    precedence."""
    timeout: Timeout = 600.0
    """Seconds without an answer after which a request is retried."""
    patience: Seconds = 3600.0
    """Seconds without an answer from any server after which generation gives up, even if servers
    only report that they are busy."""
    states: str = ""
    """Backend server, vLLM with extract_hidden_states: folder in which the servers leave hidden
    states, as this machine sees it. They are kept with the responses, so that a training reads them
    without a second pass (features=responses). Empty: none are kept."""
    state_layers: tuple[NonNegativeInt, ...] = ()
    """Layers whose states these servers leave, ascending, including the target's last one."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Backend vllm: further arguments of `vllm.LLM`, such as {tensor_parallel_size: 8}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "server" and not self.servers:
            raise UserError(
                "sampling.backend is 'server', but sampling.server names none: http://host:8000."
            )
        if self.backend == "vllm" and self.servers:
            raise UserError("sampling.backend=vllm and sampling.server exclude each other.")
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                raise UserError(
                    f"sampling.server '{address}' is no address; it must begin with http:// or "
                    "https://."
                )
        self._refuse_own_settings()

        if self.states and (self.chosen_backend != "server" or self.protocol == "sglang"):
            raise UserError(
                "sampling.states keeps what vLLM servers leave: give their addresses as "
                "sampling.server, with sampling.protocol=openai."
            )

    def _refuse_own_settings(self) -> None:
        """Raise `UserError` for a setting of our own decoder that another backend would ignore."""
        if self.chosen_backend == "own":
            return
        given = {
            "bad_words": bool(self.bad_words),
            "shape": self.shape != "none",
            "structure": bool(self.structure),
        }
        if name := next((name for name, is_given in given.items() if is_given), ""):
            raise UserError(
                f"sampling.{name} is only known to our own decoder, so that the answers would not "
                f"follow it; given: {getattr(self, name)} with sampling.backend="
                f"{self.chosen_backend}. Leave it out (sampling.shape=none), or use "
                "sampling.backend=own."
            )

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses without a slash at the end."""
        given = (self.server,) if isinstance(self.server, str) else self.server
        return tuple(address.rstrip("/") for address in given if address)

    @property
    def chosen_backend(self) -> str:
        return "server" if self.servers else self.backend


def backend_of(decode: DecodeConfig) -> str:
    """The backend that decodes; a plain decode configuration means our own decoder."""
    return decode.chosen_backend if isinstance(decode, SamplingConfig) else "own"


def sampling_of(decode: DecodeConfig, drafts: bool) -> dict[str, object]:
    """The settings that decide the text, including the backend, because seeds differ there. drafts:
    whether a drafter drafts. Settings that earlier versions did not record are left out at their
    defaults. Raises `UserError` for a structure that cannot be read."""
    backend = backend_of(decode)
    settings = {
        **asdict(decode.sampling()),
        "max_new_tokens": decode.max_new_tokens,
        "seed": decode.seed,
        **({} if backend == "own" else {"backend": backend}),
        **({"state_layers": list(layers)} if (layers := kept_layers(decode)) else {}),
        **({"structure": _content_of(decode.structure)} if decode.structure else {}),
        **(_acceptance_of(decode) if drafts else {}),
    }
    if isinstance(decode, SamplingConfig) and backend == "vllm" and decode.vllm_arguments:
        settings["vllm_arguments"] = dict(decode.vllm_arguments)
    # in the form in which it is read back: lists, not tuples
    found: dict[str, object] = json.loads(json.dumps(settings))
    return found


def _content_of(structure: str) -> str:
    """What a `structure` stands for: of a file its kind and a hash, since paths may change."""
    constraint = Constraint.read(structure)
    if constraint is None or structure == ANY_OBJECT:
        return structure
    return f"{constraint.kind} {hashlib.sha256(constraint.text.encode()).hexdigest()[:32]}"


def _acceptance_of(decode: DecodeConfig) -> dict[str, object]:
    """The acceptance rule with its parameters, if it changes the text; empty otherwise."""
    rule = decode.acceptance
    if decode.shape == "none" or promise(rule, decode.temperature) == TEXT:
        return {}
    names = ("typical_epsilon", "typical_delta") if rule == "typical" else ()
    return {"acceptance": rule, **{name: getattr(decode, name) for name in names}}


def kept_layers(decode: DecodeConfig) -> tuple[int, ...]:
    """The layers whose states are kept with the responses."""
    return decode.state_layers if isinstance(decode, SamplingConfig) and decode.states else ()
