"""GGUF files: their numbers are the drafter's, the checks see faults, llama.cpp computes what the
drafter computes, and what it lacks is refused."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.layouts.gguf import FILE, frequency_divisors, interleave, public_name
from inference.target.model import TargetModel
from tests.inference.export.ground import (
    LLAMA3,
    load_target,
    save,
    save_target,
    target_config,
    tensors,
    write,
)

gguf = pytest.importorskip("gguf")

ENGINE = "llama.cpp"
VARIANTS: dict[str, str] = {
    "distilled": "llama",
    "distilled_tied": "llama",
    "distilled_shared": "llama",
    "distilled_scaled": "llama",
    "distilled_qwen2": "qwen2",
    "distilled_wide_heads": "llama",
    "eagle3_llama_cpp": "eagle3",
    "dflash": "dflash",
    "dflash_token": "dflash",
    "jetspec": "dflash",
    "dspark": "dflash",
    "dspark_shifted": "dflash",
}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Keys and tensors by the package's own reader, without our code."""
    reader = gguf.GGUFReader(folder / FILE)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    found = {item.name: torch.from_numpy(item.data.copy()) for item in reader.tensors}
    return keys, found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_is_right_and_complete(target: TargetModel, tmp_path: Path, name: str) -> None:
    mine = save(target, name, tmp_path / "mine")
    facts = write(target, mine, tmp_path / "out", ENGINE)
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    assert found.faults == []
    keys, numbers = read(tmp_path / "out")
    architecture = VARIANTS[name]
    assert keys["general.architecture"] == architecture
    assert keys[f"{architecture}.vocab_size"] == len(keys["tokenizer.ggml.tokens"])
    words = target.tokenizer.get_vocab()
    assert all(keys["tokenizer.ggml.tokens"][place] == token for token, place in words.items())
    assert facts.serve.startswith("llama-server -m TARGET.gguf -md ")
    own = tensors(mine)
    if "fc.weight" in own:
        assert torch.equal(numbers["fc.weight"], own["fc.weight"])
        assert keys[f"{architecture}.target_layers"] == facts.taps
    assert "t2d" not in numbers


def test_queries_and_keys_are_interleaved() -> None:
    rows = torch.arange(16).view(16, 1)  # two heads of eight
    expected = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert interleave(rows, 2).flatten().tolist() == expected


def test_frequencies_are_divided_as_transformers_does() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=LLAMA3,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = torch.tensor([LLAMA3["rope_theta"] ** (-2 * i / 32) for i in range(16)])
    assert torch.allclose(plain / frequency_divisors(LLAMA3, 32), theirs, rtol=1e-5)


def test_a_reduced_vocabulary_is_stored_as_target_ids(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "eagle3_llama_cpp", tmp_path / "mine")
    write(target, mine, tmp_path / "out", ENGINE)
    own, (_, numbers) = tensors(mine), read(tmp_path / "out")
    assert numbers["d2t"].dtype == torch.int64
    assert torch.equal(numbers["d2t"], own["d2t"] + torch.arange(len(own["d2t"])))


def test_a_learned_mask_is_a_row_of_an_own_embedding(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "dflash", tmp_path / "mine")
    write(target, mine, tmp_path / "out", ENGINE)
    keys, numbers = read(tmp_path / "out")
    token = keys["tokenizer.ggml.mask_token_id"]
    embedding = target.weights.embedding
    assert torch.equal(numbers["token_embd.weight"][token], tensors(mine)["mask_embedding"])
    rest = torch.arange(len(embedding)) != token
    assert torch.equal(numbers["token_embd.weight"][rest], embedding[rest])
    assert torch.equal(numbers["output.weight"], target.weights.lm_head)


def test_a_scale_of_the_targets_logits_is_named(tmp_path: Path) -> None:
    """Of block drafters, llama.cpp applies it to DFlash 2 alone."""
    folder = save_target(tmp_path / "target")
    target = load_target(folder)
    named = "the engine leaves out the scale (0.25) of the target's logits"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "logits_scaling": 4.0}))
    for name, noted in (("dspark", True), ("dflash", False)):
        mine = save(target, name, tmp_path / name)
        facts = write(target, mine, tmp_path / f"{name}-out", ENGINE)
        assert any(named in note for note in facts.notes) == noted
    facts = write(target, tmp_path / "dspark", tmp_path / "vllm", "vllm")
    assert not any("of the target's logits" in note for note in facts.notes)


def test_a_file_names_no_folder_of_this_machine(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = save(target, "distilled", tmp_path / "mine")
    write(target, mine, tmp_path / "out", ENGINE)
    keys, _ = read(tmp_path / "out")
    name = Path(target.info.id).name
    assert keys["general.name"] == f"distilled drafter for {name}" and "/" not in name
    assert public_name("someone/target-1b") == "someone/target-1b"
    for local in ("../", "./", "a/b/", str(tmp_path)):
        assert public_name(f"{local}/target-1b") == "target-1b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "target-1b").mkdir(parents=True)
    assert public_name("someone/target-1b") == "target-1b", "a folder"


def test_formats_of_numbers(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "distilled", tmp_path / "mine")
    write(target, mine, tmp_path / "out", ENGINE, dtype="bfloat16")
    kinds = {
        item.name: item.tensor_type.name
        for item in gguf.GGUFReader(tmp_path / "out" / FILE).tensors
    }
    assert kinds["output_norm.weight"] == "F32" and kinds["blk.0.attn_q.weight"] == "BF16"
    assert verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle3", "EAGLE-3 has no norm per tapped layer"),
        ("eagle3_other", "EAGLE-3 passes on the state before the last norm"),
        ("eagle3_taps", r"last layer \(tap 6\), which vLLM alone gives"),
        ("dflash_last", r"last layer \(tap 6\), which vLLM alone gives"),
        ("peagle", "no architecture"),
        ("medusa", "no architecture"),
        ("dflash2", "DFlash and DSpark are written alone"),
        ("dspark_gated", r"^llama\.cpp cannot run this drafter: its DSpark has no 'gated' table"),
        ("distilled_qwen3", "Qwen3 layers have no biases"),
        ("pard", "without mask tokens"),
    ],
)
def test_what_llama_cpp_lacks_is_refused(
    target: TargetModel, tmp_path: Path, name: str, message: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    with pytest.raises(UserError, match=message):
        write(target, mine, tmp_path / "out", ENGINE)
    assert not (tmp_path / "out").exists()


def test_faults_are_named(target: TargetModel, tmp_path: Path) -> None:
    """Files written by the package with one thing wrong."""
    mine = save(target, "eagle3_llama_cpp", tmp_path / "mine")
    write(target, mine, tmp_path / "out", ENGINE)
    keys, numbers = read(tmp_path / "out")
    wrong = {
        "layer ids": ({"eagle3.target_layers": [1, 3, 60]}, {}),
        "shape": ({}, {"fc.weight": numbers["fc.weight"][:, :-1].clone()}),
        "tensor": ({}, {"output_norm.weight": None}),
        "rope": ({"eagle3.rope.freq_base": 123.0}, {}),
        "tokenizer": ({"tokenizer.ggml.tokens": keys["tokenizer.ggml.tokens"][::-1]}, {}),
    }
    for fault, (other_keys, other_numbers) in wrong.items():
        from inference.export.gguf_file import add_key

        writer = gguf.GGUFWriter(tmp_path / "out" / FILE, "eagle3")
        for name, value in {**keys, **other_keys}.items():
            if not name.startswith(("GGUF.", "general.architecture")):
                add_key(writer, name, value)
        for name, value in {**numbers, **other_numbers}.items():
            if value is not None:
                writer.add_tensor(name, value.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults
        assert any(each.startswith(f"{fault}:") for each in found), (fault, found)
        assert any(each.startswith("files:") for each in found)
    (tmp_path / "out" / FILE).write_bytes(b"GGUF and nothing more")
    with pytest.raises(UserError, match="no readable GGUF file"):
        verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)


def llama_cpp() -> tuple[Any, Any]:
    """llama.cpp's C interface by a package that brings it, and cffi's: llama-cpp-py-sync, or
    llama-cpp-cffi. Skips without one that loads here."""
    with suppress(ImportError, RuntimeError):
        bindings = importlib.import_module("llama_cpp_py_sync._cffi_bindings")
        return bindings.get_lib(), bindings.get_ffi()
    module = pytest.importorskip("llama._llama_cpp_cpu")
    return module.lib, module.ffi


def greedy(file: Path, prompt: list[int], count: int) -> list[int]:
    """llama.cpp's tokens with the largest logit, one at a time, with a float32 cache."""
    lib, ffi = llama_cpp()
    lib.llama_backend_init()
    loading, running = lib.llama_model_default_params(), lib.llama_context_default_params()
    loading.n_gpu_layers = 0
    running.n_ctx, running.n_threads, running.n_threads_batch = 128, 1, 1
    running.type_k = running.type_v = 0
    model = lib.llama_model_load_from_file(str(file).encode(), loading)
    assert model != ffi.NULL, "llama.cpp refuses the file"
    context = lib.llama_init_from_model(model, running)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    found, tokens = list[int](), prompt
    for _ in range(count):
        given = ffi.new("int32_t[]", tokens)
        assert lib.llama_decode(context, lib.llama_batch_get_one(given, len(tokens))) == 0
        logits = torch.tensor(ffi.unpack(lib.llama_get_logits_ith(context, -1), size))
        tokens = [int(logits.argmax())]
        found += tokens
    lib.llama_free(context)
    lib.llama_model_free(model)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "distilled_layers",
        pytest.param("distilled_tied", marks=pytest.mark.slow),
        pytest.param("distilled_qwen2", marks=pytest.mark.slow),
    ],
)
def test_llama_cpp_writes_the_same_text(tmp_path: Path, name: str) -> None:
    """A distilled drafter in llama.cpp, against transformers on the folder for transformers."""
    llama_cpp()
    target = load_target(save_target(tmp_path / "target", rope_parameters=LLAMA3))
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "gguf", ENGINE)
    write(target, mine, tmp_path / "out", "transformers")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found, prompt = list(range(7, 19)), list(range(7, 19))
    for _ in range(24):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    assert len(set(found[12:])) > 2, "a text that says something"
    assert greedy(tmp_path / "gguf" / FILE, prompt, 24) == found[12:]
