"""Every mistake that makes a served drafter useless without an error is found.

Those that files show are named by verify-export; the others change what an engine drafts, which the
oracle must see (and in use, verify.mode=live).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import Verdict, verify
from inference.export.layouts.folder import Folder
from inference.target.model import TargetModel
from tests.inference.export.ground import save, target_config, tensors, write
from tests.oracle import engine_forward
from tests.oracle.compare import forward_gap, places

Config = dict[str, Any]
Weights = dict[str, Tensor]


def planted(
    target: TargetModel,
    folder: Path,
    name: str,
    change: Callable[[Config, Weights], None],
    engine: str = "vllm",
    source: bool = True,
) -> Verdict:
    """The verdict on an export into which a fault was put; without `source` all notes of ours are
    gone, as in other people's."""
    mine = save(target, name, folder / "mine")
    write(target, mine, folder / "out", engine)
    config, found = (
        json.loads((folder / "out" / "config.json").read_text()),
        tensors(folder / "out"),
    )
    change(config, found)
    (folder / "out" / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in found.items()},
        folder / "out" / "model.safetensors",
    )
    notes = folder / "out" / "headstart_export.json"
    facts = json.loads(notes.read_text())
    facts["files"] = {}  # this check would see any change
    notes.write_text(json.dumps(facts))
    if not source:
        notes.unlink()
    return verify(VerifyConfig(str(folder / "out")), target_config(target), target)


def ids_off_by_one(config: Config, weights: Weights) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    config[key] = [layer + 1 for layer in config[key]]
    config["eagle_config"][key] = [layer + 1 for layer in config["eagle_config"][key]]


def only_nested(config: Config, weights: Weights) -> None:
    """SGLang's numbering alone, which vLLM's V1 runner takes for its own."""
    config.pop("eagle_aux_hidden_state_layer_ids")


def block_ids_off_by_one(config: Config, weights: Weights) -> None:
    config["dflash_config"]["target_layer_ids"] = [
        layer + 1 for layer in config["dflash_config"]["target_layer_ids"]
    ]


def no_d2t(config: Config, weights: Weights) -> None:
    del weights["d2t"]


def zero_d2t(config: Config, weights: Weights) -> None:
    weights["d2t"].zero_()


def absolute_d2t(config: Config, weights: Weights) -> None:
    weights["d2t"] += torch.arange(weights["d2t"].shape[0])


def d2t_of_repeats(config: Config, weights: Weights) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


def other_order(config: Config, weights: Weights) -> None:
    """The draft vocabulary from its end: d2t and the rows of the LM head."""
    place = torch.arange(weights["d2t"].shape[0])
    weights["d2t"] = (weights["d2t"] + place).flip(0) - place
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()


def map_of_repeats(config: Config, weights: Weights) -> None:
    weights["token_map"][1] = weights["token_map"][0]


def map_beyond(config: Config, weights: Weights) -> None:
    weights["token_map"] += config["vocab_size"] // 2


def map_unsaid(config: Config, weights: Weights) -> None:
    """vLLM reads token_map only for a truncated vocabulary."""
    config["truncated_vocab_size"] = config["vocab_size"]


def swapped_chunks(config: Config, weights: Weights) -> None:
    chunks = list(weights["fc.weight"].chunk(3, 1))
    chunks[0], chunks[2] = chunks[2], chunks[0]
    weights["fc.weight"] = torch.cat(chunks, 1)


def shifted_heads(config: Config, weights: Weights) -> None:
    names = [name for name in weights if name.startswith("blocks.")]
    moved = {
        f"blocks.{(int(n.split('.')[1]) + 1) % 3}.{n.split('.', 2)[2]}": weights.pop(n)
        for n in names
    }
    weights.update(moved)


def wrong_theta(config: Config, weights: Weights) -> None:
    config["rope_theta"] = 1e6
    config["rope_parameters"]["rope_theta"] = 1e6


def wrong_vocabulary(config: Config, weights: Weights) -> None:
    config["vocab_size"] += 64


def fewer_rows(config: Config, weights: Weights) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"][:-8]


def missing(config: Config, weights: Weights) -> None:
    del weights["midlayer.hidden_norm.weight"]
    weights["layers.0.hidden_norm.weight_"] = torch.zeros(1)


def renamed_block(config: Config, weights: Weights) -> None:
    """Medusa under another name: vLLM loads nothing and says nothing."""
    weights["heads.0.linear.weight"] = weights.pop("blocks.0.layers.0.weight")


def misshapen(config: Config, weights: Weights) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :-32]


def mixed_formats(config: Config, weights: Weights) -> None:
    weights["norm.weight"] = weights["norm.weight"].to(torch.float16)


def float_map(config: Config, weights: Weights) -> None:
    weights["d2t"] = weights["d2t"].float()


def short_positions(config: Config, weights: Weights) -> None:
    config["max_position_embeddings"] = 64


def anchored(config: Config, weights: Weights) -> None:
    config["dflash_config"]["sample_from_anchor"] = True


def anchor_unsaid(config: Config, weights: Weights) -> None:
    del config["sample_from_anchor"]


def wrong_class(config: Config, weights: Weights) -> None:
    config["architectures"] = ["PeagleLlamaForCausalLM"]


def other_recurrence(config: Config, weights: Weights) -> None:
    config["norm_output"] = False


def other_eps(config: Config, weights: Weights) -> None:
    config["rms_norm_eps"] = 1e-3


def not_finite(config: Config, weights: Weights) -> None:
    weights["norm.weight"][0] = float("nan")


def no_bias(config: Config, weights: Weights) -> None:
    config["medusa_fc_bias"] = False


def retrained(config: Config, weights: Weights) -> None:
    weights["fc.weight"] += 0.5 * torch.randn(
        weights["fc.weight"].shape, generator=torch.Generator().manual_seed(0)
    )


FAULTS: list[tuple[Any, ...]] = [
    ("eagle3", ids_off_by_one, "layer ids: the engine captures the states after [2, 4, 5]"),
    ("dflash", block_ids_off_by_one, "layer ids: the engine captures"),
    ("eagle3", only_nested, "layer ids: the engine captures the states after [0, 2, 3]"),
    ("eagle3_plain", no_d2t, "d2t: missing"),
    ("eagle3_plain", zero_d2t, "d2t: all zero"),
    ("eagle", wrong_theta, "rope: rope_theta is 1000000.0"),
    ("distilled_layers", wrong_theta, "rope: rope_theta is 1000000.0"),
    ("distilled", wrong_vocabulary, "vocabulary: config.json says"),
    ("eagle3", wrong_vocabulary, "vocabulary: config.json says"),
    ("eagle3", fewer_rows, "vocabulary: 'lm_head.weight'"),
    ("eagle3", missing, "tensor: 'layers.0.hidden_norm.weight' is missing"),
    (
        "medusa",
        renamed_block,
        "'blocks.0.layers.0.weight' is missing (it keeps",
        "'heads.0.linear.weight' is none of this layout",
    ),
    ("eagle3", misshapen, "shape: 'fc.weight' is [32, 64]"),
    ("eagle3", mixed_formats, "dtype: the tensors mix torch.float16, torch.float32"),
    ("eagle3_plain", d2t_of_repeats, "d2t: names a token twice"),
    ("eagle3_plain", float_map, "dtype: 'd2t' is torch.float32"),
    ("eagle3", short_positions, "positions: they end at 64, the target's at 256"),
    ("dflash", anchored, "anchor: sample_from_anchor is true"),
    ("dspark", anchor_unsaid, "anchor: sample_from_anchor is not set"),
    ("peagle", wrong_class, "architecture: 'PeagleLlamaForCausalLM' is none"),
    ("eagle3", other_eps, "norm eps: rms_norm_eps is 0.001"),
    ("eagle3", not_finite, "tensor: 'norm.weight'"),
    ("medusa_reduced", map_of_repeats, "token_map: names a token twice"),
    ("medusa_reduced", map_beyond, "token_map: leads beyond the target's vocabulary"),
    ("medusa_reduced", map_unsaid, "'token_map' is none of", "vocabulary: 'lm_head.weight' is"),
    ("medusa", no_bias, "tensor: 'blocks.0.layers.0.bias' is none of this layout"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1].__name__}")
def test_a_fault_of_files_is_named(
    target: TargetModel, tmp_path: Path, fault: tuple[Any, ...]
) -> None:
    name, change, *words = fault
    found = planted(target, tmp_path, name, change)
    for wanted in words:
        assert any(wanted in said for said in found.faults), found.faults


DRAFTED = [
    ("eagle3", ids_off_by_one),
    ("dflash", block_ids_off_by_one),
    ("eagle3_plain", zero_d2t),
    ("eagle3_plain", absolute_d2t),
    ("eagle3", swapped_chunks),
    ("dflash", swapped_chunks),
    ("medusa", shifted_heads),
    ("eagle", wrong_theta),
    ("eagle3", other_recurrence),
    ("eagle3", retrained),
]


@pytest.mark.parametrize(("name", "change"), DRAFTED, ids=[f"{n}-{c.__name__}" for n, c in DRAFTED])
def test_a_fault_of_drafts_is_seen_by_the_oracle(
    target: TargetModel, tmp_path: Path, name: str, change: Callable[[Config, Weights], None]
) -> None:
    planted(target, tmp_path, name, change)
    assert forward_gap(tmp_path / "out", target, tmp_path / "mine") > 0.02


def test_a_drafter_of_all_the_targets_layers_drafts_what_the_target_says(
    target: TargetModel, tmp_path: Path
) -> None:
    config = get_kind("distilled").config_class(
        from_target_layers=tuple(range(target.info.num_layers))
    )
    whole = new_drafter("distilled", config, target.info, target.weights, 0)
    save_drafter(whole, tmp_path / "whole", target.info)
    write(target, tmp_path / "whole", tmp_path / "out", "vllm")
    folder = Folder.read(tmp_path / "out")
    for place in places(target, 8, 3):
        rows = engine_forward.run(folder, "causal", place.context, place.following, 3)
        assert torch.equal(rows.argmax(-1), place.following)


@pytest.mark.parametrize(
    "name", ["eagle3", "dflash_token", "medusa", "distilled", "dspark_shifted"]
)
def test_a_sound_folder_of_another_trainer_has_no_fault(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    found = planted(target, tmp_path, name, lambda config, weights: None, source=False)
    assert found.faults == []
    assert any("not compared with a checkpoint" in note for note in found.notes)


def test_a_draft_vocabulary_in_another_order_is_no_fault(
    target: TargetModel, tmp_path: Path
) -> None:
    found = planted(target, tmp_path, "eagle3_plain", other_order, source=False)
    assert found.faults == []


def test_a_changed_file_is_seen(target: TargetModel, tmp_path: Path) -> None:
    write(target, save(target, "eagle", tmp_path / "mine"), tmp_path / "out", "vllm")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text() + "\n")
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    assert found.faults == ["files: 'config.json' has changed since the export"]


def test_layers_that_both_engines_read_differently_are_told(
    target: TargetModel, tmp_path: Path
) -> None:
    def change(config: Config, weights: Weights) -> None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(
            config["eagle_aux_hidden_state_layer_ids"]
        )

    found = planted(target, tmp_path, "eagle3", change)
    assert any("SGLang reads [1, 3, 4] (one more)" in fault for fault in found.faults)
    found = planted(target, tmp_path / "sglang", "eagle3", change, engine="sglang")
    assert any(
        "after [2, 4, 5] layers, the drafter was trained on [1, 3, 4]" in fault
        for fault in found.faults
    )


def test_a_state_that_an_engine_does_not_give_is_told(target: TargetModel, tmp_path: Path) -> None:
    def change(config: Config, weights: Weights) -> None:
        config["dflash_config"]["target_layer_ids"] = [0, 2, 5]

    found = planted(target, tmp_path, "dflash_token", change, engine="sglang")
    assert any("after the target's last layer (tap 6)" in fault for fault in found.faults)


def test_a_medusa_without_a_head_per_depth_is_told_before_anything_is_served(
    target: TargetModel, tmp_path: Path
) -> None:
    write(target, save(target, "medusa", tmp_path / "mine"), tmp_path / "out", "vllm")
    notes = tmp_path / "out" / "headstart_export.json"
    facts = json.loads(notes.read_text())
    facts["speculative_config"]["num_speculative_tokens"] = 4
    notes.write_text(json.dumps(facts))
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    assert "drafts: 4 tokens are asked of 3 heads" in found.faults
