"""The small language model behind `distilled` and `pard`: as a reader, in the families it knows,
and from other models' folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.api.checkpoint import load_drafter, new_drafter, read_config, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import Rotary
from heads.api.tree import TokenTree
from heads.distilled import Config, Drafter
from heads.nn.small_lm.config import scaled_frequencies
from tests.heads.explicit import DOCUMENTS
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states
from tests.models import random_target

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make(target: MicroTarget, **options: object) -> Drafter:
    return new_drafter("distilled", Config(**options), target.info, target.weights, seed=0).eval()


# Reading


def slow(drafter: Drafter, target: MicroTarget, document: list[int]) -> Tensor:
    """Logits [T, V] of the token after each of a whole document."""
    return drafter.logits(drafter.sequence(packed_batch(target, drafter.needs, [[document]])))[0]


@torch.no_grad()
def test_reading_equals_the_whole_sequence(target: MicroTarget) -> None:
    """In two pieces, with another offset per row, with a refused reading replaced, and gone after
    the next commit."""
    drafter = make(target)
    ends = (8, 5)
    state = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, e) for e in ends]),
        TokenTree.chain(6),
        32,
    )
    drafts = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    expected = [
        slow(drafter, target, DOCUMENTS[row][: ends[row] + 1] + drafts[row].tolist())[ends[row] :]
        for row in range(2)
    ]
    root = drafter.root_logits(state)
    for row in range(2):
        torch.testing.assert_close(root[row], expected[row][0])
    drafter.read(state, drafts.flip(1), torch.tensor([0, 0]))  # is replaced below
    first = drafter.read(state, drafts[:, :2], torch.tensor([0, 0]))
    second = drafter.read(
        state, torch.stack([drafts[0, 2:4], drafts[1, 1:3]]), torch.tensor([2, 1])
    )
    for row, offset in ((0, 2), (1, 1)):
        torch.testing.assert_close(first[row], expected[row][1:3])
        torch.testing.assert_close(second[row], expected[row][1 + offset : 3 + offset])
    accepted = seen_states(target, drafter.needs, DOCUMENTS[:2], [(8, 11), (5, 6)])
    root = drafter.root_logits(drafter.commit(state, accepted))
    for row, end in ((0, 12), (1, 7)):
        torch.testing.assert_close(root[row], slow(drafter, target, DOCUMENTS[row][:end])[-1])


@torch.no_grad()
def test_reading_does_not_disturb_drafting(target: MicroTarget) -> None:
    drafter = make(target, from_target_layers=(0, 3))
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    plain = drafter.propose(drafter.start(seen, TokenTree.chain(4), 32), PlainNoise()).tokens
    state = drafter.start(seen, TokenTree.chain(4), 32)
    drafter.read(state, torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([0, 0]))
    assert torch.equal(drafter.propose(state, PlainNoise()).tokens, plain)


# Families


def other_model(config: PreTrainedConfig, seed: int = 3) -> Any:
    """A random model whose norms and biases take part."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def as_target(target: MicroTarget, model: Any, rotary: bool = True) -> MicroTarget:
    """A micro target of another family."""
    config = model.config
    info = replace(
        target.info,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
    )
    weights = replace(
        target.weights,
        embedding=model.model.embed_tokens.weight,
        lm_head=model.lm_head.weight,
        logits=model.lm_head,
        state=dict(model.state_dict()),
        rotary=Rotary(model.model.rotary_emb.inv_freq.float()) if rotary else None,
    )
    return MicroTarget(model, info, weights, torch.float64)


FAMILIES = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500000.0, **SCALING}),
}


@pytest.mark.rotated
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_all_layers_of_a_target_of_any_family_are_the_target(
    target: MicroTarget, family: str
) -> None:
    """Norms of queries and keys, biases and Llama 3.1's rotary scaling included: nothing but
    rounding in between."""
    theirs = as_target(target, other_model(FAMILIES[family]()))
    drafter = make(theirs, from_target_layers=(0, 1))
    document = [*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]
    expected = theirs.model(torch.tensor([document])).logits[0]
    torch.testing.assert_close(slow(drafter, theirs, document), expected, rtol=1e-3, atol=1e-4)
    if family == "llama":
        without = make(as_target(target, theirs.model, rotary=False), from_target_layers=(0, 1))
        assert (slow(without, theirs, document) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        *((each, "only layers of llama") for each in ("granite", "smollm3", "ernie4_5", "helium")),
        *((each, "the latest 9 positions") for each in ("mistral", "qwen2")),
    ],
)
def test_layers_that_compute_something_else_are_not_copied(family: str, reason: str) -> None:
    """Their names and shapes are Llama's, but not their multipliers, rotations or windows."""
    target = random_target(family, dtype=torch.float32)
    last = target.info.num_layers - 1

    def start(kind: str, **settings: Any) -> Any:
        config = get_kind(kind).config_class(**settings)
        return new_drafter(kind, config, target.info, target.weights, seed=0)

    with pytest.raises(UserError, match=reason):
        start("distilled", from_target_layers=(last,))
    with pytest.raises(UserError, match=reason):
        start("eagle3", from_target_layer=last)
    with pytest.raises(UserError, match=reason):
        start("dflash", start_from="target")
    one, other = (start("dflash", start_from=name) for name in ("auto", "random"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_scaled_frequencies_are_those_of_transformers() -> None:
    config = LlamaConfig(
        **{**SIZES, "head_dim": 64}, rope_parameters={"rope_theta": 500000.0, **SCALING}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(
        scaled_frequencies(500000.0, 64, (8.0, 1.0, 4.0, 16.0)).inverse_frequencies, expected
    )


# From a folder


def write_model(folder: Path, model: Any, shards: int = 1) -> Path:
    """A folder as Hugging Face writes it, in one file or in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    tensors = {
        n: v.contiguous()
        for n, v in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {
        name: f"model-{index % shards + 1}.safetensors" for index, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.rotated
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocab", [41, 37, 44])
@torch.no_grad()
def test_a_smaller_model_drafts_as_itself(
    target: MicroTarget, tmp_path: Path, family: str, vocab: int
) -> None:
    """Its logits, with vocabulary rows trimmed or padded; and the checkpoint no longer needs the
    folder."""
    config = FAMILIES[family]()
    config.vocab_size, config.tie_word_embeddings = vocab, vocab == 41
    model = other_model(config)
    folder = write_model(tmp_path / "small", model, shards=1 if vocab == 41 else 2)
    drafter = make(target, from_model=str(folder), any_tokenizer=True)
    document = [token % 37 for token in (*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2])]
    found, expected = slow(drafter, target, document), model(torch.tensor([document])).logits[0]
    common = min(vocab, 41)
    torch.testing.assert_close(found[:, :common], expected[:, :common], rtol=1e-3, atol=1e-4)
    if vocab == 37:  # rows that the small model lacks say what the mean token says
        torch.testing.assert_close(found[:, 37:], found[:, :37].mean(1, keepdim=True).expand(-1, 4))
    save_drafter(drafter, tmp_path / "drafter", target.info)
    for path in folder.iterdir():
        path.unlink()
    loaded = load_drafter(tmp_path / "drafter", target.info, target.weights)
    torch.testing.assert_close(slow(loaded, target, document), found, rtol=0, atol=0)
    assert read_config(tmp_path / "drafter")["config"]["from_model"] == ""


@torch.no_grad()
def test_a_drafter_starts_from_a_drafter(target: MicroTarget, tmp_path: Path) -> None:
    first = make(target, from_target_layers=(1, 3), share_embeddings=True)
    first.model.norm.weight += 0.25
    save_drafter(first, tmp_path, target.info)
    second = make(target, from_model=str(tmp_path), reverse_kl=1.0)
    assert second.config.share_embeddings and second.config.from_target_layers == (1, 3)
    assert second.config.reverse_kl == 1.0
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


@torch.no_grad()
def test_a_drafter_of_another_target_starts_as_it_was_there(
    target: MicroTarget, tmp_path: Path
) -> None:
    """What followed its target, as sizes of 0 do, stays: rotary base and epsilon too."""
    facts = replace(target.info, id="other", revision="r2", rope_theta=200.0, rms_norm_eps=0.5)
    other = replace(target, info=facts)
    first = make(target)
    save_drafter(first, tmp_path / "fresh", target.info)
    second = make(other, from_model=str(tmp_path / "fresh"))
    found = slow(second, other, DOCUMENTS[0])
    torch.testing.assert_close(found, slow(first, target, DOCUMENTS[0]), rtol=0, atol=0)
    save_drafter(second, tmp_path / "second", other.info)
    loaded = load_drafter(tmp_path / "second", other.info, other.weights)
    torch.testing.assert_close(slow(loaded, other, DOCUMENTS[0]), found, rtol=0, atol=0)
    save_drafter(make(target, from_target_layers=(1, 3)), tmp_path / "copied", target.info)
    with pytest.raises(UserError, match="differs from 'other' in rms_norm_eps, rope_theta"):
        make(other, from_model=str(tmp_path / "copied"))


def test_folders_that_cannot_be_a_start_are_refused(target: MicroTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json.*hf download"):
        make(target, from_model=str(tmp_path))
    model = other_model(FAMILIES["llama"]())
    folder = write_model(tmp_path / "small", model)
    with pytest.raises(UserError, match=r"head\.num_layers was given too"):
        make(target, from_model=str(folder), num_layers=3)
    with pytest.raises(UserError, match="exclude each other"):
        Config(from_model=str(folder), from_target_layers=(0,))
    with pytest.raises(UserError, match=r"tokenizer.*any_tokenizer=true"):
        make(target, from_model=str(folder))
    values = model.config.to_dict()
    for change, message in (
        ({"model_type": "gpt2"}, "gpt2 model"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
        ({"intermediate_size": None}, "lacks a size"),
        ({"intermediate_size": 22}, r"shape \[20, 24\], expected \[22, 24\]"),
        ({"num_hidden_layers": 3}, r"layers\.2.*missing or unknown"),
        ({"num_hidden_layers": 1}, r"layers\.1.*missing or unknown"),
    ):
        (folder / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=message):
            make(target, from_model=str(folder), any_tokenizer=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../x.safetensors"}})
    )
    with pytest.raises(UserError, match="outside its folder"):
        make(target, from_model=str(folder), any_tokenizer=True)


def test_the_tokenizer_decides(target: MicroTarget, tmp_path: Path, repository: Path) -> None:
    """The embedded target's tokenizer, beside a small model: accepted for that target alone."""
    folder = write_model(tmp_path / "small", other_model(FAMILIES["llama"]()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((repository / "assets" / "tiny-target" / name).read_bytes())
    from transformers import AutoTokenizer

    from heads.api.target_info import tokenizer_hash

    same = tokenizer_hash(AutoTokenizer.from_pretrained(repository / "assets" / "tiny-target"))
    accepted = replace(target, info=replace(target.info, tokenizer_hash=same))
    assert make(accepted, from_model=str(folder)).shape.hidden_size == 24
    with pytest.raises(UserError, match="another tokenizer"):
        make(target, from_model=str(folder))


def test_llama_is_the_network(target: MicroTarget) -> None:
    """A fresh drafter with norms and biases of its own initialises every weight and learns through
    them."""
    drafter = make(target, qk_norm=True, attention_bias=True)
    output = drafter.train().loss(packed_batch(target, drafter.needs, [DOCUMENTS]))
    output.loss_sum.backward()
    assert all(
        float(parameter.grad.abs().sum()) > 0
        for name, parameter in drafter.named_parameters()
        if not name.endswith("k_proj.bias")
    )
