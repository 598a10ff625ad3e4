"""What is refused before weights are read, quantisation, and how weights reach drafters."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import inference.target.quantization as quantization
from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.kernels.packed_linear import supported
from inference.target.loading import (
    RECURRENT,
    REFUSED,
    TargetConfig,
    checked_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    require_supported,
)
from inference.target.model import TargetModel
from inference.target.quantization import NAMES, dense_weight, quantization_settings
from inference.target.shared import shared_weights
from scripts.tools.common import ROOT
from tests.inference.target.list_families import PAGE, SECTION, TESTED, UNTESTED, families, table
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import (
    ALL_FAMILIES,
    INDEXED_FAMILIES,
    RECURRENT_FAMILIES,
    SMALL,
    VOCAB,
    random_model,
    random_target,
    save_random_target,
)
from train.generate.target_facts import TargetFacts
from train.target.parts import load_parts

CPU = torch.device("cpu")
GENERATION_CONFIG = "generation_config.json"
NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
"""Of the one family whose usual settings are none that it allows."""


def refusal(name: str, config: Any) -> str:
    with pytest.raises(UserError, match="cannot be a target") as caught:
        require_supported(name, config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and name in message
    return message


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_families_exist_and_are_refused_by_name(family: str) -> None:
    """A name that transformers does not know would be a typing error that refuses nothing."""
    assert family in CONFIG_MAPPING
    needed = {"text_config": NO_LAYER_INPUTS} if family == "gemma4_assistant" else {}
    message = refusal("some/model", CONFIG_MAPPING[family](**needed))
    assert f"({family})" in message


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("inkling_text", {}, "recurrent layers are code of their own"),
        ("xlstm", {}, "recurrent layers are code of their own"),
        ("bert", {"is_decoder": True}, "an encoder"),
        ("hrm_text", {}, "not one list"),
        (
            "llama",
            {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
            "recurrent layers are code of their own",
        ),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("falcon", {"alibi": False}, "code of its own"),
        ("bloom", {}, "ALiBi"),
        ("t5", {}, "encoder-decoder"),
        ("deepseek_v4", {}, "chooses keys"),
    ],
)
def test_the_sentence_says_why(family: str, settings: dict[str, Any], reason: str) -> None:
    assert reason in refusal("some/model", AutoConfig.for_model(family, **settings))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_families_that_work_are_not_refused(family: str) -> None:
    require_supported("some/model", random_model(family).config)


@pytest.mark.parametrize("family", ["inkling_text", "xlstm", "bloom"])
def test_no_weights_are_needed_to_refuse(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match=f"{family}.*cannot be a target"):
        load_model(TargetConfig(path=str(tmp_path), device="cpu"))


def test_a_target_that_leaves_the_range_of_its_dtype_is_refused(tmp_path: Path) -> None:
    folder = save_random_target(tmp_path, tiny_tokenizer("marked"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = TargetConfig(path=str(folder), device="cpu")
    assert TargetModel.load(config).dtype == torch.float32
    with pytest.raises(UserError, match=r"no finite numbers in float16: .* target\.dtype=bfloat16"):
        TargetModel.load(replace(config, dtype="float16"))


@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_families_with_an_indexer_that_work_are_not_refused(family: str) -> None:
    require_supported("some/model", random_model(family).config)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_families_with_recurrent_layers_that_work_are_not_refused(family: str) -> None:
    require_supported("some/model", random_model(family, recurrent=True).config)


def test_every_other_stateful_family_of_transformers_is_refused() -> None:
    """The table is held against the library: a family that a new version adds shows here."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    slipped = []
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        one = model_class[0] if isinstance(model_class, tuple) else model_class
        if getattr(one, "_is_stateful", False):
            config = config_class()
            try:
                require_supported(config_class.model_type, config)
            except UserError:
                continue
            if config.get_text_config().model_type not in RECURRENT:
                slipped.append(config_class.model_type)
    assert not slipped


def test_the_page_lists_every_family_of_transformers() -> None:
    states = families()
    assert TESTED in states.values() and set(REFUSED) & set(states)
    assert not [name for name in RECURRENT if states.get(name, TESTED) != TESTED]
    if version("transformers") in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        assert UNTESTED not in states.values(), "each is tested, or refused with a reason"
        assert SECTION.write(PAGE, table(), check=True) == 0, "run list_families"


# Quantisation


def settings(name: str, own: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    return quantization_settings(name, own, dtype, CPU)


def test_plain_checkpoints_load_plainly() -> None:
    assert settings("none") is None and settings("auto") is None


@pytest.mark.parametrize(
    ("name", "pip"),
    [
        ("bnb-4bit", "bitsandbytes"),
        ("bnb-8bit", "bitsandbytes"),
        ("torchao-int8", "torchao"),
        ("torchao-int4", "torchao"),
    ],
)
def test_a_missing_library_is_named_with_its_pip_name(
    monkeypatch: pytest.MonkeyPatch, name: str, pip: str
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"{name} needs .*pip install {pip}"):
        settings(name)


@pytest.mark.parametrize(("method", "pip"), [("gptq", "gptqmodel"), ("awq", "gptqmodel")])
def test_a_quantised_checkpoint_names_the_library_it_needs(
    monkeypatch: pytest.MonkeyPatch, method: str, pip: str
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"quantised with {method} needs .*pip install {pip}"):
        settings("auto", {"quant_method": method})


@pytest.mark.parametrize("installed", [False, True])
def test_fp8_names_the_library_that_multiplies_it(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only on devices that multiply fp8: on others transformers dequantises the weights."""
    there = {"accelerate", "kernels"} if installed else {"accelerate"}
    monkeypatch.setattr(quantization, "find_spec", lambda module: module in there or None)
    capability = {"cuda:0": (8, 9), "cuda:1": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[str(device)])
    files = {"quant_method": "fp8"}
    cases = (("fp8", None, "target.quantization=fp8"), ("auto", files, "a target quantised with"))
    for name, own, what in cases:
        if installed:
            quantization_settings(name, own, torch.bfloat16, torch.device("cuda:0"))
            continue
        with pytest.raises(UserError, match=rf"{what}.* needs .*pip install '.*\[kernels\]'"):
            quantization_settings(name, own, torch.bfloat16, torch.device("cuda:0"))
    for device in ("cuda:1", "cpu"):
        assert quantization_settings("auto", files, torch.bfloat16, torch.device(device)) is None
    plain = {**files, "dequantize": True}
    assert quantization_settings("auto", plain, torch.bfloat16, torch.device("cuda:0")) is None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_a_quantised_checkpoint_is_not_quantised_again(name: str) -> None:
    with pytest.raises(UserError, match=r"quantised already \(fp8\).*target.quantization=auto"):
        settings(name, {"quant_method": "fp8"})


def test_what_a_device_cannot_do_is_said() -> None:
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        settings("fp8")
    with pytest.raises(UserError, match="Did you mean 'bnb-4bit'"):
        settings("bnb-4bits")


def test_bitsandbytes_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda module: object())
    four, eight = settings("bnb-4bit"), settings("bnb-8bit")
    assert (
        four.load_in_4bit
        and four.bnb_4bit_compute_dtype is torch.bfloat16
        and four.bnb_4bit_quant_type == "nf4"
    )
    assert eight.load_in_8bit and not eight.load_in_4bit


def test_a_missing_library_ends_the_load_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda module: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        load_model(TargetConfig(path=str(tmp_path), device="cpu", quantization="bnb-8bit"))


def test_quantised_weights_are_read_back_or_refused() -> None:
    packed = torch.zeros(8, 1, dtype=torch.uint8)
    with pytest.raises(
        UserError, match="LM head is quantised in a layout that cannot be read back"
    ):
        dense_weight(packed, 4, 4, "LM head")
    weight = torch.nn.Parameter(torch.randn(4, 4))
    found = dense_weight(weight, 4, 4, "LM head")
    assert (
        torch.equal(found, weight)
        and not found.requires_grad
        and found.data_ptr() == weight.data_ptr()
    )


@pytest.mark.skipif(quantization.find_spec("torchao") is None, reason="needs torchao")
def test_a_torchao_target_decodes_losslessly(tmp_path: Path) -> None:
    from inference.decoding.config import DecodeConfig
    from tests.fakes import SometimesRight
    from tests.inference.decoding.test_lossless import SHAPES, answers, decode, requests

    folder = save_random_target(
        tmp_path / "m", tiny_tokenizer("plain"), hidden_size=64, intermediate_size=128
    )
    target = TargetModel.load(
        TargetConfig(path=str(folder), device="cpu", quantization="torchao-int8")
    )
    linears = [m for m in target.model.modules() if isinstance(m, torch.nn.Linear)]
    quantised = [m for m in linears if "torchao" in type(m.weight).__module__]
    assert len(quantised) == len(linears) - 1  # all but the head
    assert not any("forward" in m.__dict__ for m in quantised)
    items = requests(3)
    for temperature in (0.0, 1.0):
        plain = decode(target, None, DecodeConfig(temperature=temperature), items)
        for shape in SHAPES.values():
            config = DecodeConfig(temperature=temperature, batch_size=2, **shape)  # type: ignore[arg-type]
            found = decode(target, SometimesRight(answers(plain), VOCAB), config, items)
            assert {i: c.tokens for i, c in found.items()} == {
                i: c.tokens for i, c in plain.items()
            }


@pytest.mark.skipif(not supported(), reason="packed products need oneDNN")
def test_weights_that_are_no_plain_parameters_are_not_packed() -> None:
    from inference.kernels.packed_linear import pack_linears

    class Other(torch.Tensor):
        """Stands for a quantised weight or a slice of a split one."""

    # small ones are left alone where packing does not pay
    plain, other = (torch.nn.Linear(1024, 1024) for _ in range(2))
    other.weight = torch.nn.Parameter(torch.randn(1024, 1024).as_subclass(Other))
    pack_linears(torch.nn.ModuleList([plain, other]))
    assert "forward" in plain.__dict__ and "forward" not in other.__dict__


# What drafters are given


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_shared_weights_are_the_models_own_memory(family: str) -> None:
    model = random_model(family)
    weights = shared_weights(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert weights.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert weights.lm_head.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert (weights.lm_head is weights.embedding) == tied
    for name, value in model.named_parameters():
        assert (
            weights.state[name].data_ptr() == value.data_ptr()
            and not weights.state[name].requires_grad
        )
    assert len(weights.state) == len(list(model.parameters()))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "offset"), [("llama", 0.0), ("qwen3", 0.0), ("gemma2", 1.0), ("gemma3_text", 1.0)]
)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "mtp", "dflash"])
def test_drafters_start_with_the_targets_final_norm(family: str, offset: float, kind: str) -> None:
    """Whatever the target's norm adds to its weights."""
    target = random_target(family)
    drafter = new_drafter(kind, get_kind(kind).config_class(), target.info, target.weights, 0)
    assert target.weights.norm_offset == offset
    norm = drafter.blocks[0].norm if kind == "mtp" else drafter.norm
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert target.final_norm is not None
    torch.testing.assert_close(norm(states).float(), target.final_norm(states).float())


def test_a_norm_with_a_bias_adds_nothing() -> None:
    weights = shared_weights(random_model("gpt2"))
    assert weights.norm_offset == 0.0 and weights.final_norm() is None


def test_targets_loaded_by_several_threads_at_once_leave_the_library_as_it_was(
    tmp_path: Path,
) -> None:
    path = save_random_target(tmp_path, tiny_tokenizer("marked"))
    config = TargetConfig(str(path), device="cpu")
    loaded: list[Any] = []
    threads = [threading.Thread(target=lambda: loaded.append(load_model(config))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tied = type(loaded[0])(
        CONFIG_MAPPING["llama"](**{**SMALL, "vocab_size": VOCAB, "tie_word_embeddings": True})
    )
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len({id(model) for model in [*loaded, load_model(config)]}) == 5


def test_a_target_knows_its_unusual_settings(tmp_path: Path) -> None:
    assert TargetConfig("x").unusual == TargetConfig("x", quantization="none").unusual == {}
    assert TargetConfig("x", quantization="bnb-4bit").unusual == {"quantization": "bnb-4bit"}
    save_random_target(tmp_path, tiny_tokenizer("plain"))
    config = TargetConfig(path=str(tmp_path), device="cpu", long_context=True)
    assert TargetModel.load(config).loading == {"long_context": True}


def test_an_automatic_dtype_is_float32_on_a_cpu() -> None:
    assert TargetConfig("x", dtype="auto", device="cpu").dtype_name == "float32"
    assert TargetConfig("x", dtype="bfloat16", device="cpu").dtype_name == "bfloat16"
    with pytest.raises(UserError, match=r"target\.dtype 'bf16' is unknown"):
        checked_config(TargetConfig("x", dtype="bf16"))


def test_a_target_without_a_generation_config_says_nothing_of_it(tmp_path: Path) -> None:
    save_random_target(tmp_path, tiny_tokenizer("plain"))
    (tmp_path / GENERATION_CONFIG).unlink(missing_ok=True)
    assert load_generation_config(TargetConfig(path=str(tmp_path))) is None


def test_its_end_of_text_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    save_random_target(tmp_path, tiny_tokenizer("plain"))
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": [3, 7]}))
    config = TargetConfig(path=str(tmp_path))
    assert load_model(config).generation_config.eos_token_id == [3, 7]
    assert set(TargetFacts.load(config).eos_token_ids) >= {3, 7}


def test_a_generation_config_that_cannot_be_read_is_no_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it answers would end elsewhere, and nothing would say so."""
    save_random_target(tmp_path, tiny_tokenizer("plain"))
    (tmp_path / GENERATION_CONFIG).write_text('{"eos_token_id": ')
    config = TargetConfig(path=str(tmp_path))
    for load in (load_model, TargetFacts.load, load_parts):
        with pytest.raises(UserError, match=r"generation config .* cannot be read"):
            load(config)

    def no_descriptors(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError as error:
            raise OSError("Can't load the configuration") from error

    monkeypatch.setattr(GenerationConfig, "from_pretrained", no_descriptors)
    with pytest.raises(UserError, match=r"generation config .* cannot be read"):
        load_generation_config(config)


DAMAGED = {
    "tokenizer.json": [b'{"version": "1.0", "model": {"type": "Nonsense"}}', b"[" * 100_000],
    "tokenizer_config.json": [b"[]", b'{"tokenizer_class": 5}', b"[" * 100_000],
    GENERATION_CONFIG: [b"[" * 100_000, b'{"watermarking_config": 5}'],
}


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name, contents in DAMAGED.items() for content in contents],
    ids=lambda value: str(value)[:30],
)
def test_a_damaged_file_beside_the_weights_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes
) -> None:
    save_random_target(tmp_path, tiny_tokenizer("plain"))
    (tmp_path / name).write_bytes(content)
    config = TargetConfig(str(tmp_path), device="cpu")
    read = load_generation_config if name == GENERATION_CONFIG else load_tokenizer
    with pytest.raises(UserError, match=r"no readable tokenizer|generation config of target"):
        read(config)
