"""vLLM's connector of hidden states for engines without CUDA.

    PYTHONPATH=<this repository, or a folder with a copy of this file> vllm serve <target> ... \\
      --kv-transfer-config '{"kv_connector": "CpuStatesConnector", "kv_connector_module_path":
      "train.features.vllm.connector", ...}'

`ExampleHiddenStatesConnector` (vLLM 0.32) copies states through CUDA streams and pinned memory. In
an engine without these, it ends the engine at its first request. This connector differs only in the
copy: files, locks and answers are the same.

It imports nothing of Headstart, so a copy of this one file suffices (then
`"kv_connector_module_path": "connector"`).

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
try:
    vllm: Any = importlib.import_module(MODULE)
    Base: Any = vllm.ExampleHiddenStatesConnector
except ImportError:  # outside vLLM's environment
    Base = object


class Copied:
    """The object that vLLM asks whether a copy has ended: here, it always has."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStatesConnector(Base):
    """See the module. vLLM calls `_submit_async_write` once for every finished request."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy the states [N, L, H] of a request out of the cache, and pass them to the threads
        that write files. The lock file exists and has been held since the request began."""
        if not self._is_tp_rank_zero:
            return
        tokens = pending.token_ids
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        states = vllm.extract_from_kv_cache(self._kv_cache, slots.flatten(), len(tokens))
        content = {"hidden_states": states.contiguous(), "token_ids": tokens.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock, copied = self._lock_fds.pop(pending.req_id, None), Copied()
        future = self._executor.submit(self._write_tensors, content, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
