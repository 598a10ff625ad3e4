"""The target: taps, features and tree verification against the model's own forward pass; what
cannot be one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.kernels.planted import (
    blind_to_branches,
    one_piece_lost,
    run_in_its_place,
    wrong_scale,
)
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import FAMILIES, VOCAB, random_model, random_target, save_random_target

NEEDS = FeatureSpec(taps=(0, 1, 3), last_hidden=True)


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Equal up to the float32 norms and rotary tables that float64 models keep."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_last_hidden_are_the_models_own_states(family: str) -> None:
    tokens = ids(12)
    model = random_model(family)
    caught: dict[str, torch.Tensor] = {}
    base = getattr(model, model.base_model_prefix)
    layers = next(m for m in base.modules() if isinstance(m, torch.nn.ModuleList))
    layers[2].register_forward_hook(
        lambda m, a, out: caught.update(last=out[0] if isinstance(out, tuple) else out)
    )
    states = base(input_ids=tokens, output_hidden_states=True, use_cache=False)
    target = random_target(family)
    positions = torch.arange(12)[None]
    taps, last = target.features(tokens, positions, torch.ones_like(tokens), NEEDS)
    assert taps is not None and last is not None
    assert_close(taps[:, :, 0], states.hidden_states[0])
    assert_close(taps[:, :, 1], states.hidden_states[1])
    assert_close(taps[:, :, 2], caught["last"])
    assert_close(last, states.last_hidden_state)
    assert_close(target.weights.logits(last), model(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    target = random_target(family)
    first, second = ids(13, 1), ids(11, 2)
    packed = torch.cat([first, second, torch.zeros(1, 4, dtype=torch.int64)], 1)
    positions = torch.cat([torch.arange(13), torch.arange(11), torch.arange(4)])[None]
    segments = torch.tensor([[1] * 13 + [2] * 11 + [0] * 4])
    taps, last = target.features(packed, positions, segments, NEEDS)
    assert taps is not None and last is not None
    for tokens, span in ((first, slice(0, 13)), (second, slice(13, 24))):
        length = tokens.shape[1]
        alone_taps, alone = target.features(
            tokens, torch.arange(length)[None], torch.ones_like(tokens), NEEDS
        )
        assert_close(last[:, span], alone)
        assert_close(taps[:, span], alone_taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tree_node_gets_the_logits_of_its_own_path(family: str) -> None:
    target, model = random_target(family), random_model(family)
    prompt, nodes = ids(14, 3), 9
    parents = [0, 0, 0, 1, 1, 2, 3, 3, 5]
    tree = TokenTree.from_parents(torch.tensor([parents]), 3)
    tokens = ids(nodes, 4)
    cache = target.new_cache(1, 40)
    lengths = torch.tensor([14])
    target.prefill(cache, torch.tensor([0]), prompt, lengths, NEEDS)
    logits, positions, seen = target.verify(cache, tokens, tree, lengths, 14, NEEDS)
    assert seen.taps is not None
    for node in range(nodes):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        text = torch.cat([prompt, tokens[:, path]], 1)
        assert_close(logits[0, node], model(input_ids=text, use_cache=False).logits[0, -1])
        assert int(positions[0, node]) == 14 + len(path) - 1
        plain, _ = target.features(
            text, torch.arange(text.shape[1])[None], torch.ones_like(text), NEEDS
        )
        assert plain is not None
        assert_close(seen.taps[0, node], plain[0, -1])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer("plain")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2", "phi"])
def test_a_saved_model_of_any_family_loads_by_path(
    tmp_path: Path, tokenizer: Any, family: str
) -> None:
    folder = save_random_target(tmp_path / family, tokenizer, family)
    target = TargetModel.load(TargetConfig(path=str(folder), device="cpu"))
    assert target.info.model_type == family and target.info.vocab_size == len(tokenizer)
    assert target.info.revision.startswith("sha256:")
    assert target.eos_token_ids == (tokenizer.eos_token_id,)


def test_other_weights_are_another_revision(tmp_path: Path, tokenizer: Any) -> None:
    revisions = set()
    for seed in (1, 2):
        folder = save_random_target(tmp_path / str(seed), tokenizer, seed=seed)
        revisions.add(TargetModel.load(TargetConfig(path=str(folder), device="cpu")).info.revision)
    assert len(revisions) == 2


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4, "hidden_size": 32}),
        (
            "gpt_neo",
            {
                "num_layers": 2,
                "num_heads": 4,
                "hidden_size": 32,
                "attention_types": [[["global"], 2]],
            },
        ),
        (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        ),
    ],
)
def test_models_without_standard_attention_are_refused_in_one_sentence(
    tmp_path: Path, tokenizer: Any, family: str, settings: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    with pytest.raises(UserError, match="cannot be a target") as caught:
        TargetModel.load(TargetConfig(path=str(tmp_path / family), device="cpu"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "./nowhere"}, "does not exist"),
        ({"path": ""}, "is empty"),
        ({"path": "no-owner-such-model"}, "cannot be loaded"),
        ({"dtype": "float31"}, "Did you mean 'float32'"),
        ({"device": "gpu"}, "is not a device"),
    ],
)
def test_bad_targets_end_in_a_clear_error(
    tmp_path: Path, tokenizer: Any, change: dict[str, str], message: str
) -> None:
    folder = save_random_target(tmp_path / "fine", tokenizer)
    with pytest.raises(UserError, match=message):
        TargetModel.load(TargetConfig(**{"path": str(folder), "device": "cpu", **change}))  # type: ignore[arg-type]


def test_a_truncated_weight_file_and_missing_weights_are_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    folder = save_random_target(tmp_path / "cut", tokenizer)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded"):
        TargetModel.load(TargetConfig(path=str(folder), device="cpu"))


@pytest.mark.parametrize("fault", [None, one_piece_lost, wrong_scale, blind_to_branches])
def test_a_target_that_decodes_through_the_kernel_is_checked_through_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    folder = save_random_target(tmp_path / "target", tokenizer, max_position_embeddings=512)
    called = []

    def attention(*given: Any, **more: Any) -> Tensor:
        called.append(given[0].shape[2])
        return (fault or TREE_ATTENTION.reference)(*given, **more)

    run_in_its_place(monkeypatch, attention)
    config = TargetConfig(path=str(folder), device="cpu", dtype="float32")
    if fault is None:
        assert TargetModel.load(config).lengths_on_device
        assert sorted(set(called)) == [1, 5]
        return
    with pytest.raises(UserError, match="verified logits differ from its own") as caught:
        TargetModel.load(config)
    assert f"behind {296 if fault is one_piece_lost else 4} tokens" in str(caught.value)


def test_products_in_16_bits_are_not_summed_in_16_bits() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    random_target()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
