"""The `vllm serve` command line of a server that leaves states for a training."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from train.features.config import FeaturesConfig
from train.features.engine_client import model_words

GPU_CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}
CPU_CONNECTOR = {
    "kv_connector": "CpuStatesConnector",
    "kv_connector_module_path": "train.features.vllm.connector",
}
"""Headstart's connector, for an engine without CUDA: see connector.py."""


def layers_of(config: FeaturesConfig, needs: FeatureSpec, info: TargetInfo) -> tuple[int, ...]:
    """The layers whose states a server leaves, ascending: those that are read, and the last one,
    from which the last hidden state follows and by which every document is checked."""
    return config.layers or tuple(sorted({*needs.taps, info.num_layers}))


def serve_command(
    config: FeaturesConfig,
    info: TargetInfo,
    layers: tuple[int, ...],
    dtype: str,
    length: int,
    cpu: bool = False,
) -> str:
    """The command that starts a server for documents of at most `length` tokens. dtype: of the
    target, such as `float32`; cpu: the engine has no CUDA."""
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
    }
    transfer = {
        **(CPU_CONNECTOR if cpu else GPU_CONNECTOR),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": config.states},
    }
    # one position after the document: vLLM answers with a token
    longest = length + 1
    words = ["vllm", "serve", *model_words(info)]
    words += ["--dtype", dtype, "--max-model-len", str(longest), "--no-enable-prefix-caching"]
    words += ["--speculative-config", json.dumps(speculative)]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    command = shlex.join(words)
    if config.token():
        command += f' --api-key "${config.token_variable}"'
    if longest > info.max_position_embeddings:
        command = f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {command}"
    if cpu:
        command = f"PYTHONPATH={shlex.quote(str(Path(__file__).parents[3]))} {command}"
    return command
