"""Medusa for vLLM: a proposer for versions that no longer have one (0.33 and later).

    PYTHONPATH=<this repository, or a folder with a copy of this file> vllm serve <target> \\
      --speculative-config '{"method": "custom_class", "model":
      "inference.export.vllm_medusa.MedusaProposer",
                             "num_speculative_tokens": 4}' \\
      --additional-config '{"headstart_medusa": "<folder that headstart export wrote>"}'

The file imports nothing from Headstart, so a copy of it suffices (then `"model":
"vllm_medusa.MedusaProposer"`). vLLM passes a custom class the sampled tokens but not the target's
hidden states, the only thing that Medusa reads. The runner's step that asks for drafts has them.
For runners with this drafter, that step is wrapped to pass them on. Only the V1 runner supports
custom classes (vLLM selects it for them automatically).

Head i (0-based) reads the post-final-norm state at the last accepted token's predecessor, position
t, and drafts token t+2+i.

Legend: B requests, R rows of states, K drafted tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SETTING = "headstart_medusa"
ARCHITECTURE = "MedusaModel"


class MedusaProposer:
    """The class that vLLM calls: `load_model` once, `propose` after every step."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises `ValueError` for settings that the folder does not allow."""
        folder = (vllm_config.additional_config or {}).get(SETTING)
        if not folder:
            raise ValueError(
                f'additional_config must name the exported Medusa folder: {{"{SETTING}": '
                '"<folder>"}. headstart export writes one.'
            )
        self.folder = Path(folder)
        self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.dtype = vllm_config.model_config.dtype
        if ARCHITECTURE not in self.config.get("architectures", []):
            raise ValueError(
                f"'{folder}' is no Medusa export: its architectures are "
                f"{self.config.get('architectures')}."
            )
        if self.tokens > self.config["num_heads"]:
            raise ValueError(
                f"num_speculative_tokens is {self.tokens}, but '{folder}' has "
                f"{self.config['num_heads']} heads."
            )
        self._states: Tensor | None = None
        self._drafted: list[int] | None = None
        pass_states_on()

    def load_model(self, target_model: Any) -> None:
        """Read the heads' weights onto the target's device; raises `ValueError` for a folder that
        lacks some."""
        from safetensors.torch import load_file

        device = next(target_model.parameters()).device
        found = {
            name: value.to(device=device, dtype=self.dtype if value.is_floating_point() else None)
            for name, value in load_file(str(self.folder / "model.safetensors")).items()
        }
        heads, layers = range(self.tokens), range(self.config["num_hidden_layers"])
        names = [[f"blocks.{head}.layers.{layer}" for layer in layers] for head in heads]
        shared = found.get("lm_head.weight")
        tokens = found.pop("token_map", None)
        # target ids of the LM heads' columns, where those are not all tokens
        self.columns = None if tokens is None else tokens.long()
        try:
            self.blocks = [
                [(found[f"{name}.weight"], found.get(f"{name}.bias")) for name in head]
                for head in names
            ]
            self.heads = [
                shared if shared is not None else found[f"lm_heads.{head}.weight"] for head in heads
            ]
        except KeyError as error:
            raise ValueError(f"'{self.folder}' is incomplete: it has no tensor {error}.") from error

    def see_target(self, states: Tensor, drafted: list[int] | None) -> None:
        """Receive the target's states [R, H] at all positions that it sampled at. drafted: how many
        drafts of each request were verified there (None: no request had any)."""
        self._states, self._drafted = states, drafted

    @torch.inference_mode()
    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """The drafts of every request; none for requests whose prompt is still being read."""
        assert self._states is not None, (
            "vLLM's runner asked for drafts before it had the target's states"
        )
        states, drafted = self._states, self._drafted
        self._states = None
        rows = last_rows([len(tokens) for tokens in sampled_token_ids], drafted)
        drafts = self.draft(states[torch.tensor(rows, device=states.device)]).tolist()
        return [
            line if tokens else [] for line, tokens in zip(drafts, sampled_token_ids, strict=True)
        ]

    def draft(self, states: Tensor) -> Tensor:
        """States [B, H] -> the most likely tokens [B, K] by the heads."""
        found = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            hidden = states.to(self.dtype)
            for weight, bias in blocks:
                hidden = hidden + F.silu(F.linear(hidden, weight, bias))
            found.append(F.linear(hidden, head).argmax(-1))
        drafts = torch.stack(found, dim=1)
        return drafts if self.columns is None else self.columns[drafts]

    def dummy_run(self, *_: Any, **__: Any) -> None:
        """vLLM's warm-up, which has nothing to do here."""


def last_rows(sampled: list[int], drafted: list[int] | None) -> list[int]:
    """The row of each request's last sampled token.

    sampled: how many tokens each request got (accepted drafts and the bonus; 0 while its prompt is
    read in parts). drafted: how many of its drafts were verified; each has a row, and there is one
    more row.
    """
    if drafted is None:
        return list(range(len(sampled)))
    rows, offset = [], 0
    for tokens, drafts in zip(sampled, drafted, strict=True):
        rows.append(offset + max(tokens - 1, 0))
        offset += drafts + 1
    return rows


def pass_states_on() -> None:
    """Make the V1 runner pass the states to its drafter before it asks for drafts; done once per
    process.

    Raises `RuntimeError` if the runner of this vLLM does not have that step.
    """
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    inner = getattr(runner, "propose_draft_token_ids", None)
    if getattr(inner, "shows_states", False):
        return
    wanted = {"sample_hidden_states", "spec_decode_metadata"}
    if inner is None or not wanted <= set(inspect.signature(inner).parameters):
        raise RuntimeError(
            "this vLLM hands the states that Medusa reads to its drafters in another way than "
            "0.32 does; serve another kind, or use `headstart serve`."
        )
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        show = getattr(self.drafter, "see_target", None)
        if show is not None:
            given = signature.bind(self, *args, **kwargs).arguments
            metadata = given["spec_decode_metadata"]
            show(
                given["sample_hidden_states"],
                None if metadata is None else list(metadata.num_draft_tokens),
            )
        return inner(self, *args, **kwargs)

    propose.shows_states = True  # type: ignore[attr-defined]
    runner.propose_draft_token_ids = propose
