"""Adapters: what peft makes of an exported Uno drafter, and which adapters can be read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.folders import EXPORT_FILE
from inference.target.model import TargetModel
from tests.inference.export.ground import save, target_config, write


def plain(target: TargetModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(target.info.id, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["uno", "uno_attention"])
@torch.no_grad()
def test_peft_loads_every_tensor_and_the_target_stays_as_it_is(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    """That its logits are those of our drafts: tests of round trips (`forward_gap`)."""
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "out", "sglang")
    tokens = torch.tensor([[5, 9, 11, 7, 30, 12]])
    expected = plain(target)(tokens).logits
    model: Any = PeftModel.from_pretrained(plain(target), str(tmp_path / "out")).eval()
    with model.disable_adapter():
        assert torch.equal(model(tokens).logits, expected)
    assert not torch.allclose(model(tokens).logits, expected)
    drafter = load_drafter(mine, target.info, target.weights)
    loaded = {
        key.replace("base_model.model.model.", "").replace(".default.weight", ""): value
        for key, value in model.state_dict().items()
        if "lora_" in key
    }
    assert set(loaded) == set(drafter.state_dict())
    assert all(torch.equal(value, loaded[key]) for key, value in drafter.state_dict().items())


def test_the_serve_command_switches_the_adapter_on_for_drafts(
    target: TargetModel, tmp_path: Path
) -> None:
    mine = save(target, "uno_attention", tmp_path / "mine")
    facts = write(target, mine, tmp_path / "out", "sglang", tokens=6)
    assert "--speculative-algorithm UNO" in facts.serve
    assert f"--uno-lora-path {tmp_path / 'out'} " in facts.serve
    assert facts.serve.endswith("--speculative-num-draft-tokens 6")
    assert "first 40 tokens" in facts.notes[0]


def saved_by_peft(target: TargetModel, folder: Path, **settings: Any) -> Path:
    """A folder that peft wrote, as the trainers of published adapters do."""
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    get_peft_model(plain(target), config).save_pretrained(str(folder))
    return folder


def test_an_adapter_that_peft_wrote_is_imported(target: TargetModel, tmp_path: Path) -> None:
    folder = saved_by_peft(
        target, tmp_path / "theirs", r=4, lora_alpha=64, target_modules=["v_proj", "gate_proj"]
    )
    found = import_folder(Folder.read(folder), target, tmp_path / "mine")
    assert found.kind == "uno" and "taken for an Uno adapter" in found.notes[0]
    drafter = load_drafter(tmp_path / "mine", target.info, target.weights)
    assert (drafter.config.rank, drafter.config.alpha) == (4, 64.0)
    assert drafter.config.modules == ("v_proj", "gate_proj")
    theirs = Folder.read(folder).tensors
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, theirs[f"base_model.model.model.{name}.weight"])
    assert verify(VerifyConfig(str(folder)), target_config(target), target).faults == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"layers_to_transform": [0, 1]}, "layers_to_transform"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules"),
    ],
)
def test_other_adapters_are_refused_by_name(
    target: TargetModel, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    values = {"r": 4, "target_modules": ["q_proj"], **settings}
    folder = saved_by_peft(target, tmp_path / "theirs", **values)
    with pytest.raises(UserError, match=rf"the adapter's {named} cannot be a drafter's"):
        import_folder(Folder.read(folder), target, tmp_path / "mine")


def test_a_folder_of_another_rank_than_it_says_is_found_out(
    target: TargetModel, tmp_path: Path
) -> None:
    mine = save(target, "uno", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "sglang")
    path = tmp_path / "out" / "adapter_config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described | {"r": 5}))
    faults = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults
    assert any(fault.startswith("shape: ") for fault in faults)
    with pytest.raises(UserError, match="was changed or damaged"):
        import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    (tmp_path / "out" / EXPORT_FILE).unlink()
    with pytest.raises(UserError, match="has shape"):
        import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
