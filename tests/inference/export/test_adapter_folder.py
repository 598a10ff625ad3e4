"""An exported adapter: peft loads it onto its base, and the merged export computes the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from heads.api.adapter import Updates
from heads.api.checkpoint import load_drafter, save_adapter
from heads.api.errors import UserError
from inference.export.adapter_folder import export_adapter
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.config import ExportConfig
from inference.export.hub.config import PushConfig
from inference.export.hub.folder import Sources, build_folder
from inference.export.importing import import_folder
from inference.export.layouts.folder import ExportNotes, Folder
from inference.manifest import checkpoint_hash, file_sha256
from inference.target.model import TargetModel
from tests.inference.export.ground import drafter_of, save, target_config, tensors, write
from tests.oracle.compare import forward_gap

RANK = 3


def save_code(target: TargetModel, name: str, place: Path) -> Path:
    """A base in place/base, and an adapter of it in place/code."""
    drafter, generator = drafter_of(target, name), torch.Generator().manual_seed(9)
    save(target, name, place / "base")
    layers = {}
    for layer, part in drafter.named_modules():
        if type(part) is nn.Linear:
            sizes = (RANK, part.in_features), (part.out_features, RANK)
            down, up = (0.2 * torch.randn(size, generator=generator) for size in sizes)
            layers[layer] = (down, up)
    updates, digest = Updates(RANK, 6.0, layers), checkpoint_hash(place / "base")
    save_adapter(drafter, updates, place / "base", digest, place / "code")
    return place / "code"


@pytest.mark.parametrize("name", ["eagle3", "dspark", "distilled"])
def test_peft_merges_an_exported_adapter_as_we_do(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    from peft import PeftModel

    folder = save_code(target, name, tmp_path)
    notes = export_adapter(ExportConfig(), folder, tmp_path / "out")
    names = {"adapter_config.json", "adapter_model.safetensors", "headstart_export.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert notes.source["base_sha256"] == file_sha256(tmp_path / "base" / "model.safetensors")
    assert ExportNotes.read(tmp_path / "out").source == notes.source
    base = load_drafter(tmp_path / "base", target.info, target.weights)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out")).merge_and_unload()
    ours = load_drafter(folder, target.info, target.weights)
    assert set(theirs.state_dict()) == set(ours.state_dict())
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_peft_loads_a_language_models_adapter_onto_the_exported_base(
    target: TargetModel, tmp_path: Path
) -> None:
    """The merged export answers as they do together."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = save_code(target, "distilled", tmp_path)
    export_adapter(ExportConfig(), folder, tmp_path / "adapter")
    write(target, tmp_path / "base", tmp_path / "plain", "transformers")
    write(target, folder, tmp_path / "merged", "transformers", merge=True)
    models = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("plain", "merged")
    }
    tokens = torch.arange(12)[None] % target.info.vocab_size
    with torch.no_grad():
        plain, merged = (models[name](tokens).logits for name in ("plain", "merged"))
        adapted = PeftModel.from_pretrained(models["plain"], str(tmp_path / "adapter")).eval()
        both = adapted(tokens).logits
    torch.testing.assert_close(both, merged, rtol=1e-4, atol=1e-4)
    assert float((plain - merged).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_merged_export_is_a_drafter_of_its_own(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    """It is right for the engine, computes what the loaded adapter does, and comes back whole."""
    folder = save_code(target, name, tmp_path)
    notes = write(target, folder, tmp_path / "out", "vllm", merge=True)
    assert notes.source["sha256"] == checkpoint_hash(folder)
    assert notes.source["base"] == str(tmp_path / "base")
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    assert found.faults == [] and "not compared" not in " ".join(found.notes)
    assert forward_gap(tmp_path / "out", target, folder) < 1e-4
    import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    shutil.rmtree(tmp_path / "base")
    whole = load_drafter(tmp_path / "back", target.info, target.weights)
    assert {key: value.dtype for key, value in whole.state_dict().items()} == {
        key: value.dtype for key, value in tensors(tmp_path / "back").items()
    }


def test_an_export_of_a_changed_base_is_refused(target: TargetModel, tmp_path: Path) -> None:
    folder = save_code(target, "distilled", tmp_path)
    save(target, "distilled", tmp_path / "base", seed=2)
    with pytest.raises(UserError, match="weights are others by now"):
        export_adapter(ExportConfig(), folder, tmp_path / "out")
    with pytest.raises(UserError, match="weights are others by now"):
        write(target, folder, tmp_path / "out", "vllm", merge=True)
    assert not (tmp_path / "out").exists()


def test_an_exported_adapter_is_no_engines_folder(target: TargetModel, tmp_path: Path) -> None:
    folder, out = save_code(target, "distilled", tmp_path), tmp_path / "out"
    export_adapter(ExportConfig(dtype="bfloat16"), folder, out)
    with pytest.raises(UserError, match="is there already"):
        export_adapter(ExportConfig(), folder, out)
    export_adapter(ExportConfig(overwrite=True), folder, out)
    with pytest.raises(UserError, match=r"adapter in peft's layout.*export\.merge=true"):
        verify(VerifyConfig(str(out)), target_config(target), target)
    assert json.loads((out / "headstart_export.json").read_text())["layout"] == "adapter"


def test_an_adapter_is_not_published(target: TargetModel, tmp_path: Path) -> None:
    folder = save_code(target, "distilled", tmp_path)
    with pytest.raises(UserError, match=r"is an adapter.*train\.refresh\.adapter=false"):
        build_folder(Sources(folder, [], {}), tmp_path / "out", PushConfig(repo="user/name"))
