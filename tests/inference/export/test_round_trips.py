"""A drafter that is exported and imported is the same to the last bit; its folder computes what it
computes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.config import ENGINES
from inference.export.engine_folder import custom_class, serve
from inference.export.importing import import_folder
from inference.export.layouts.base import Target, Written
from inference.export.layouts.dflash import place_scale
from inference.export.layouts.folder import Folder
from inference.export.layouts.registry import ROUTES, Route
from inference.target.model import TargetModel
from tests.inference.export.ground import (
    EXPORTS,
    LLAMA3,
    VARIANTS,
    WAYS,
    load_target,
    same,
    save,
    save_target,
    target_config,
    tensors,
    write,
)
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import save_random_target
from tests.oracle.compare import forward_gap


@pytest.mark.rotated
@pytest.mark.parametrize(("name", "engine"), EXPORTS, ids=[" to ".join(pair) for pair in EXPORTS])
def test_an_export_is_right_and_comes_back_to_the_bit(
    target: TargetModel, tmp_path: Path, name: str, engine: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    facts = write(target, mine, tmp_path / "out", engine)
    import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    same(tensors(tmp_path / "back"), tensors(mine))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (mine / "config.json").read_text()
    )
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    assert found.faults == []
    assert found.layout == facts.layout
    assert forward_gap(tmp_path / "out", target, mine) < 1e-4


@pytest.mark.parametrize("name", ["dflash_token", "distilled_layers", "dspark"])
def test_scaled_rotary_positions_of_the_target_are_followed(tmp_path: Path, name: str) -> None:
    scaled = load_target(save_target(tmp_path / "target", rope_parameters=LLAMA3))
    mine = save(scaled, name, tmp_path / "mine")
    write(scaled, mine, tmp_path / "out", "vllm")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["rope_parameters"] == LLAMA3
    assert forward_gap(tmp_path / "out", scaled, mine) < 1e-4


def test_other_rotary_positions_than_the_targets_are_not_imported(tmp_path: Path) -> None:
    """With them the layers would rotate otherwise than they learnt."""
    scaled = load_target(save_target(tmp_path / "target", rope_parameters=LLAMA3))
    write(scaled, save(scaled, "dflash", tmp_path / "mine"), tmp_path / "out", "vllm")
    import_folder(Folder.read(tmp_path / "out"), scaled, tmp_path / "same")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    (tmp_path / "out" / "headstart_export.json").unlink()  # as a folder from elsewhere
    yarn = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 32
    for rope in ({"rope_type": "default", "rope_theta": 20000.0}, {**LLAMA3, "factor": 8.0}, yarn):
        path.write_text(json.dumps({**config, "rope_parameters": rope}))
        with pytest.raises(UserError, match="rotates by other frequencies"):
            import_folder(Folder.read(tmp_path / "out"), scaled, tmp_path / "other")


def test_an_mtp_block_is_for_vllm_only_where_the_target_rotates_as_it_does(tmp_path: Path) -> None:
    """vLLM rotates the block as the target's layers, whatever its folder says."""
    scaled = load_target(save_target(tmp_path / "target", rope_parameters=LLAMA3))
    mine = save(scaled, "fastmtp", tmp_path / "mine")
    with pytest.raises(UserError, match="rotates the layer as the target's"):
        write(scaled, mine, tmp_path / "vllm", "vllm")
    write(scaled, mine, tmp_path / "sglang", "sglang")


@pytest.mark.parametrize("name", ["eagle3_plain", "dflash", "medusa"])
def test_a_shorter_format_is_near_and_says_so(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    kinds = {value.dtype for value in tensors(tmp_path / "out").values()}
    assert kinds <= {torch.bfloat16, torch.int64, torch.bool}
    assert verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults == []
    assert 0.0 < forward_gap(tmp_path / "out", target, mine) < 0.1


def test_every_kind_and_engine_has_a_way_or_a_reason(target: TargetModel) -> None:
    block = {"dflash", "dflash2", "dspark", "domino", "lilicorr", "dflare", "treeflash", "mixed"}
    assert (set(ROUTES) - block - {"specvocab"}) | {"dflash"} == set(kind_names())
    for method, ways in ROUTES.items():
        assert set(ways) == set(ENGINES), method
        for way in ways.values():
            assert isinstance(way, Route) or len(way) > 20
    # Every way is walked by a test above, those of a target's own block in test_native_mtp.py, GGUF
    # files in test_gguf.py.
    walked = {(method_of(name), engine) for name, engine in EXPORTS}
    walked |= {("native_mtp", engine) for engine in ("vllm", "sglang")}
    walked |= {(method, "llama.cpp") for method in ("distilled", "eagle3", "dflash", "dspark")}
    there = {
        (method, engine)
        for method, ways in ROUTES.items()
        for engine, way in ways.items()
        if isinstance(way, Route)
    }
    assert walked == there


def method_of(name: str) -> str:
    kind, values = get_kind(VARIANTS[name][0]), VARIANTS[name][1]
    return kind.export_method(kind.config_class(**values))


REFUSED = {
    ("eagle3_taps", "sglang"): r"last layer \(tap 6\), which vLLM alone gives",
    ("dflash_last", "sglang"): r"last layer \(tap 6\), which vLLM alone gives",
    ("dflash_last", "transformers"): r"last layer \(tap 6\), which vLLM alone gives",
    ("dflash", "sglang"): "head.mask_token_id",
    ("dflash", "speculators"): "head.mask_token_id",
    ("dflash", "transformers"): "head.mask_token_id",
    ("jetspec", "sglang"): "in_block=bidirectional",
    ("dspark_gated", "vllm"): "head.dependency=markov",
    ("dspark_shifted", "sglang"): "head.sample_from_anchor=true",
    ("domino", "vllm"): "SGLang has",
    ("lilicorr", "speculators"): "vLLM and SGLang have",
    ("peagle", "sglang"): "no P-EAGLE",
    ("pard", "transformers"): "mask tokens",
    ("pard", "sglang"): "mask tokens",
    ("medusa", "sglang"): "no Medusa",
    ("uno", "vllm"): "not released; SGLang has",
    ("uno", "transformers"): "adapter of the target",
    ("uno_mask", "sglang"): "head.slots=noise",
    ("medusa_reduced_heads", "vllm"): "head.own_lm_head=false",
    ("eagle", "transformers"): "inner states",
    ("fastmtp", "speculators"): "norms on query",
    ("fastmtp_wide", "vllm"): r"intermediate_size 96 instead of \d+",
    ("eagle_bias", "vllm"): "head.fc_bias=false",
    ("eagle3_other", "sglang"): "head.norm_before_residual=false",
    ("eagle3_shortlist", "vllm"): "head.shortlist=0",
    ("peagle_shortlist", "vllm"): "head.shortlist=0",
}


@pytest.mark.parametrize(("name", "engine"), REFUSED, ids=[" to ".join(pair) for pair in REFUSED])
def test_what_an_engine_cannot_run_is_refused_with_the_reason(
    target: TargetModel, tmp_path: Path, name: str, engine: str
) -> None:
    assert engine not in WAYS[name]
    mine = save(target, name, tmp_path / "mine")
    with pytest.raises(UserError, match=REFUSED[name, engine]):
        write(target, mine, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


def test_vllm_is_told_the_number_of_mtp_blocks(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "fastmtp", tmp_path / "mine")
    facts = write(target, mine, tmp_path / "vllm", "vllm")
    assert facts.hf_overrides == {"num_nextn_predict_layers": 1}
    assert """--hf-overrides '{"num_nextn_predict_layers": 1}'""" in facts.serve
    assert write(target, mine, tmp_path / "sglang", "sglang").hf_overrides == {}


@pytest.mark.parametrize("name", ["eagle3_plain", "eagle3_other", "peagle"])
def test_vllm_finds_in_the_librarys_folder_what_it_reads_beside_the_layers_keys(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "vllm", "vllm")
    write(target, mine, tmp_path / "library", "speculators")
    own = json.loads((tmp_path / "vllm" / "config.json").read_text())
    layer = json.loads((tmp_path / "library" / "config.json").read_text())
    found = layer["transformer_layer_config"]
    for key in ("num_aux_hidden_states", "fc_norm", "norm_output"):
        assert found[key] == own[key]


@pytest.mark.parametrize(
    ("method", "place", "key"),
    [("dspark", "", "logit_scale"), ("dflash2", "dflash_config", "output_multiplier")],
)
def test_the_scale_of_the_targets_logits_goes_along(method: str, place: str, key: str) -> None:
    written, target = Written({"dflash_config": {}}, {}, {}), SimpleNamespace()
    target.described = SimpleNamespace(logits_scaling=4.0, final_logit_softcapping=30.0)
    place_scale(written, target, method)  # type: ignore[arg-type]
    found = written.config[place] if place else written.config
    assert found[key] == 0.25
    if method == "dflash2":
        assert found["final_logit_softcapping"] == 30.0 and not written.notes
    else:
        assert "leaves out the cap (30)" in written.notes[0]
    other = Written({"dflash_config": {}}, {}, {})
    place_scale(other, target, "lilicorr")  # type: ignore[arg-type]
    assert "scale (0.25) and the cap (30)" in other.notes[0]


def test_the_library_has_no_scale_of_the_targets_logits_and_a_note_says_so(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    target, path = load_target(folder), folder / "config.json"
    mine = save(target, "dflash2_token", tmp_path / "mine")
    said = "the engine leaves out the scale (0.25) and the cap (30) of the target's logits"
    plain = write(target, mine, tmp_path / "plain", "speculators")
    assert not any("of the target's logits" in note for note in plain.notes)
    factors = {"logits_scaling": 4.0, "final_logit_softcapping": 30.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **factors}))
    facts = write(target, mine, tmp_path / "out", "speculators")
    assert any(said in note for note in facts.notes)
    assert "output_multiplier" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_a_shell_reads_any_path_in_a_command(engine: str) -> None:
    path, out = "my models/o'neil", Path("out $1/o'neil")
    told = {"method": "eagle3", "num_speculative_tokens": 4}
    words = shlex.split(serve(engine, path, out, told))
    if engine == "vllm":
        given = words.pop()
        assert json.loads(given) == {**told, "model": str(out)}
    else:
        assert str(out) in [word.removesuffix("/drafter.gguf") for word in words]
    assert (path in words) == (engine != "llama.cpp"), words


def test_a_command_for_a_custom_class_and_code_hold_any_path() -> None:
    path, out = "my models/o'neil", Path("out $1/o'neil")
    told = {"method": "medusa", "num_speculative_tokens": 4}
    words = shlex.split(custom_class(path, out, told))
    assert words[:4] == [f"PYTHONPATH={out}", "vllm", "serve", path]
    assert json.loads(words[-1]) == {"headstart_medusa": str(out)}
    assert f"from_pretrained({str(out)!r})" in serve("transformers", path, out, told)


def random_family(folder: Path, family: str, **changes: Any) -> TargetModel:
    return load_target(save_random_target(folder, tiny_tokenizer("marked"), family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("cohere", {"logit_scale": 0.3}, "the scale of its logits (0.3)"),
        ("granite", {"logits_scaling": 4.0, "tie_word_embeddings": False}, "logits (0.25)"),
    ],
)
def test_a_copy_of_the_targets_head_holds_the_scale_of_its_logits(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    target = random_family(tmp_path / "target", family, **changes)
    mine = save(target, "distilled_shared", tmp_path / "mine")
    facts = write(target, mine, tmp_path / "out", "vllm")
    assert said in facts.notes[0]
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert forward_gap(tmp_path / "out", target, mine) < 1e-4
    import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    same(tensors(tmp_path / "back"), tensors(mine))


def test_what_a_copy_of_the_targets_head_cannot_hold_is_told_or_refused(tmp_path: Path) -> None:
    capped = random_family(tmp_path / "capped", "gemma2", final_logit_softcapping=30.0)
    mine = save(capped, "distilled_shared", tmp_path / "mine")
    facts = write(capped, mine, tmp_path / "out", "vllm")
    assert "leaves out the soft cap (30)" in facts.notes[1]
    biased = random_family(tmp_path / "biased", "phi")
    mine = save(biased, "distilled_shared", tmp_path / "other")
    with pytest.raises(UserError, match=r"has a bias.*head\.share_embeddings=false"):
        write(biased, mine, tmp_path / "refused", "vllm")


def test_the_layers_of_a_target_of_two_blocks_are_counted_as_in_training(tmp_path: Path) -> None:
    target = random_family(tmp_path / "target", "longcat_flash")
    facts = Target.of(target_config(target), target.info)
    assert facts.described.num_hidden_layers != target.info.num_layers


def test_an_unused_token_lies_behind_the_last_id_even_if_ids_have_gaps() -> None:
    target: Any = SimpleNamespace(described=SimpleNamespace(vocab_size=12))
    target.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "<|user|>": 9})
    assert Target.unused_token(target, -1) == 10


def test_a_short_training_does_not_shorten_the_drafts(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "eagle3", tmp_path / "mine")  # three unrolled steps
    facts = write(target, mine, tmp_path / "out", "vllm")
    assert facts.speculative_config["num_speculative_tokens"] == 4


def test_another_target_an_existing_folder_and_a_telling_path_are_refused(
    target: TargetModel, tmp_path: Path
) -> None:
    mine = save(target, "medusa", tmp_path / "mine")
    with pytest.raises(UserError, match="from which vLLM would conclude"):
        write(target, mine, tmp_path / "my-eagle3-heads", "vllm")
    write(target, mine, tmp_path / "out", "vllm")
    before = (tmp_path / "out" / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"export\.overwrite=true"):
        write(target, mine, tmp_path / "out", "vllm", tokens=2)
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    facts = write(target, mine, tmp_path / "out", "vllm", tokens=2, overwrite=True)
    assert facts.speculative_config["num_speculative_tokens"] == 2
    assert "--speculative-config" in facts.serve
    other = load_target(save_target(tmp_path / "other", seed=6))
    with pytest.raises(UserError, match="was trained for target"):
        write(other, mine, tmp_path / "out2", "vllm")
    with pytest.raises(UserError, match="3 heads"):
        write(target, mine, tmp_path / "out3", "vllm", tokens=4)


def test_the_mask_token_is_one_that_text_does_not_hold(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "peagle", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["pard_token"] == len(target.tokenizer)  # the first row behind the tokenizer's
    found = tensors(tmp_path / "out")["embed_tokens.weight"]
    own = target.weights.embedding
    rest = torch.arange(own.shape[0]) != described["pard_token"]
    assert torch.equal(found[rest], own[rest])
    assert torch.equal(found[described["pard_token"]], tensors(mine)["mask_embedding"])
    write(target, mine, tmp_path / "chosen", "vllm", mask_token_id=9)
    assert json.loads((tmp_path / "chosen" / "config.json").read_text())["pard_token"] == 9
    with pytest.raises(UserError, match="below the vocabulary"):
        write(target, mine, tmp_path / "none", "vllm", mask_token_id=10_000)
