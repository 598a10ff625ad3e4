"""vLLM servers that leave hidden states, and what is asked of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from heads.api.target_info import TargetInfo
from scripts.evidence.vllm_server import VllmServer
from train.features.config import FeaturesConfig
from train.features.vllm.command import serve_command

LENGTH, SERVED, LAYERS = 64, 120, (0, 1, 2)
"""Tokens of a row, tokens that a server takes, and the layers whose states it leaves."""
HEAD: dict[str, Any] = {"taps": (0, 1), "ttt_steps": 2}
"""An EAGLE-3 head that reads some of these layers."""


def states_server(
    python: str, place: Path, info: TargetInfo, name: str, rows: int = 4, token: str = ""
) -> VllmServer:
    """vLLM as the printed command starts it, with the target in `place`/target and the files in
    `place`/states. name: of its log; rows: requests that are computed together; token: its key."""
    config = FeaturesConfig(states=str(place / "states"), token_variable="HEADSTART_NO_TOKEN")
    words = shlex.split(serve_command(config, info, LAYERS, "float32", SERVED, cpu=True))
    more = [*words[words.index("serve") + 2 :], *(("--api-key", token) if token else ())]
    return VllmServer(python, place / "target", place / f"{name}.txt", rows, more)


def features_of(*servers: VllmServer, states: Path, **more: Any) -> FeaturesConfig:
    """`features=vllm` with these servers, which may take long to start."""
    given = {"format": "fp32", "retries": 60, **more}
    addresses = tuple(server.address for server in servers)
    return FeaturesConfig(mode="vllm", servers=addresses, states=str(states), **given)
