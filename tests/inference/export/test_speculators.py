"""What vLLM's library `speculators` itself saves is imported, and what we export for it arrives
whole in its own classes.

The library lives in an environment of its own: name its Python in HEADSTART_SPECULATORS, or these
tests are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.api.checkpoint import load_drafter, read_config
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.target.model import TargetModel
from tests.inference.export.ground import save, target_config, tensors, write
from tests.oracle.compare import forward_gap

PYTHON = os.environ.get("HEADSTART_SPECULATORS") or (
    sys.executable if find_spec("speculators") else ""
)
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="speculators is not installed; name its Python in HEADSTART_SPECULATORS"
)
WORKER = Path(__file__).with_name("speculators_worker.py")
BLOCK = {"aux_hidden_state_layer_ids": [1, 3, 4], "mask_token_id": 3, "block_size": 5}
TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
SAVED: dict[str, dict[str, Any]] = {
    "eagle3": {
        "kind": "eagle3",
        "family": "llama",
        "layers": 1,
        "tokens": 3,
        "draft_vocab_size": 40,
        "head": True,
        "values": TAPS,
    },
    "eagle3_default": {
        "kind": "eagle3",
        "family": "llama",
        "layers": 1,
        "tokens": 3,
        "values": {
            **TAPS,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
        },
    },
    "eagle3_qwen3": {
        "kind": "eagle3",
        "family": "qwen3",
        "layers": 1,
        "tokens": 3,
        "draft_vocab_size": 40,
        "head": True,
        "values": {**TAPS, "fc_norm": True, "norm_output": True},
    },
    "peagle": {
        "kind": "peagle",
        "family": "qwen3",
        "layers": 2,
        "tokens": 4,
        "values": {**TAPS, "mask_token_id": 3, "norm_before_residual": True},
    },
    "dflash": {"kind": "dflash", "family": "qwen3", "layers": 2, "tokens": 4, "values": BLOCK},
    "dflash2": {
        "kind": "dflash2",
        "family": "qwen3",
        "layers": 2,
        "tokens": 4,
        "values": {**BLOCK, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    },
    "dspark": {
        "kind": "dspark",
        "family": "qwen3",
        "layers": 2,
        "tokens": 5,
        "values": {**BLOCK, "markov_rank": 6},
    },
}


def work(folder: Path, **job: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [PYTHON, str(WORKER), str(folder / "job.json")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", SAVED)
def test_what_the_library_saves_is_imported_and_computes_what_its_layout_says(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    job = SAVED[name]
    work(tmp_path, do="save", target=target.info.id, out=str(tmp_path / "saved"), **job)
    folder = Folder.read(tmp_path / "saved")
    import_folder(folder, target, tmp_path / "ours")
    assert load_drafter(tmp_path / "ours", target.info, target.weights).needs.taps == (1, 3, 4)
    # vLLM runs their full layers causally as saved; see `layouts.speculators`
    if name != "dflash" and name != "dspark":
        assert forward_gap(tmp_path / "saved", target, tmp_path / "ours") < 1e-4
    write(target, tmp_path / "ours", tmp_path / "again", "speculators", mask_token_id=3)
    assert verify(VerifyConfig(str(tmp_path / "again")), target_config(target), target).faults == []
    back, saved = tensors(tmp_path / "again"), folder.tensors
    shared = {"embed_tokens.weight", "lm_head.weight"}
    assert set(saved) - shared <= set(back)
    for tensor, value in saved.items():
        if tensor in back:
            assert torch.equal(back[tensor].to(value.dtype), value), tensor
    kind = read_config(tmp_path / "ours")["kind"]
    assert kind == ("dflash" if job["kind"].startswith("d") else job["kind"])


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3_plain", "peagle", "dflash_token", "dspark_shifted", "dflash2_token"]
)
def test_what_is_exported_arrives_whole_in_the_librarys_classes(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    write(target, save(target, name, tmp_path / "mine"), tmp_path / "out", "speculators")
    work(tmp_path, do="load", given=str(tmp_path / "out"), out=str(tmp_path / "loaded"))
    arrived, given = (
        load_file(str(tmp_path / "loaded" / "model.safetensors")),
        tensors(tmp_path / "out"),
    )
    # what the library takes from the target
    shared = ("verifier", "embed_tokens", "lm_head", "d2t", "t2d")
    assert {tensor for tensor in arrived if not tensor.startswith(shared)} <= set(given)
    for tensor, value in given.items():
        assert torch.equal(arrived[tensor].to(value.dtype), value), tensor
