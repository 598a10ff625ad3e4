"""Drafters of other trainers, written by hand in each of their layouts, become checkpoints of ours;
broken ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.api.checkpoint import load_drafter, read_config
from heads.api.errors import UserError
from inference.export.config import ImportConfig
from inference.export.importing import import_folder, recognise
from inference.export.layouts.folder import ExportNotes, Folder, Receiver
from inference.target.model import TargetModel
from tests.inference.export.foreign import folder_of, sizes
from tests.inference.export.ground import drafter_of, same, save, tensors, write

H = 32
IDS = {"target_layer_ids": [0, 2, 3], "mask_token_id": 3}
"""Of a block drafter of three taps."""


def taken(target: TargetModel, folder: Folder, out: Path, layout: str) -> dict[str, Tensor]:
    """Import, load as any checkpoint is loaded, and give back the tensors."""
    assert recognise(folder) == layout
    import_folder(folder, target, out)
    drafter = load_drafter(out, target.info, target.weights)
    assert drafter.info == target.info
    return tensors(out)


def test_safeailab_eagle_1(target: TargetModel, tmp_path: Path) -> None:
    mine = dict(drafter_of(target, "eagle").state_dict())
    theirs = {**mine, "embed_tokens.weight": target.weights.embedding}
    config = sizes(target, architectures=["LlamaForCausalLM"], bias=False)
    same(
        taken(
            target,
            folder_of(tmp_path / "a", config, theirs, "pytorch_model.bin"),
            tmp_path / "out",
            "eagle",
        ),
        mine,
    )
    theirs["fc.bias"] = torch.zeros(H)
    same(taken(target, folder_of(tmp_path / "b", config, theirs), tmp_path / "out2", "eagle"), mine)
    theirs["fc.bias"] = torch.ones(H)
    taken(target, folder_of(tmp_path / "c", config, theirs), tmp_path / "biased", "eagle")
    assert read_config(tmp_path / "biased")["config"]["fc_bias"] is True
    theirs["embed_tokens.weight"] = target.weights.embedding + 1
    with pytest.raises(UserError, match="embedding of its own"):
        import_folder(folder_of(tmp_path / "d", config, theirs), target, tmp_path / "out3")
    assert not (tmp_path / "out3").exists()


@pytest.mark.parametrize("ids", ["none", "specforge"])
def test_safeailab_and_specforge_eagle_3(target: TargetModel, tmp_path: Path, ids: str) -> None:
    mine = dict(drafter_of(target, "eagle3_plain").state_dict())
    config = sizes(
        target, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, head_dim=16
    )
    wanted = [2, 3]  # what the engines read by default in six layers: 2, n // 2, n - 3
    if ids == "specforge":
        wanted = [1, 2, 5]
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 4],
            "use_aux_hidden_state": True,
        }
        mine["fc.weight"] = torch.randn(H, 3 * H)
    else:
        mine["fc.weight"] = torch.randn(H, 2 * H)
    found = taken(target, folder_of(tmp_path / "a", config, mine), tmp_path / "out", "eagle3")
    same(found, mine)
    stored = read_config(tmp_path / "out")["config"]
    assert stored["taps"] == wanted
    assert stored["post_norm_recurrence"] is False
    del mine["t2d"]  # some leave it out: it follows from d2t
    again = taken(target, folder_of(tmp_path / "b", config, mine), tmp_path / "out2", "eagle3")
    assert torch.equal(again["t2d"], found["t2d"])


def test_eagle_3_is_refused_for_what_would_ruin_it(target: TargetModel, tmp_path: Path) -> None:
    mine = dict(drafter_of(target, "eagle3_plain").state_dict())
    mine["fc.weight"] = torch.randn(H, 2 * H)
    good = sizes(target, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, head_dim=16)
    ids = "eagle_aux_hidden_state_layer_ids"

    def refused(match: str, config: dict[str, Any], found: dict[str, Tensor]) -> None:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(UserError, match=match):
            import_folder(folder_of(path, config, found), target, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(
        "has no d2t, which says which",
        good,
        {name: value for name, value in mine.items() if name != "d2t"},
    )
    refused("damaged", good, {**mine, "d2t": mine["d2t"] + torch.arange(40)})
    refused("t2d and d2t name different", good, {**mine, "t2d": ~mine["t2d"]})
    refused("which is not the same", {**good, ids: [2, 3], "eagle_config": {ids: [2, 3]}}, mine)
    refused("of another target", {**good, ids: [2, 30]}, mine)
    refused("another target's", {**good, "hidden_size": 64}, mine)
    refused("rope_theta 500000", {**good, "rope_theta": 500000.0}, mine)
    refused("scales its rotary", {**good, "rope_scaling": {"type": "linear", "factor": 2.0}}, mine)
    partial = "rotates a part of each head .partial_rotary_factor 0.5"
    refused(partial, {**good, "partial_rotary_factor": 0.5}, mine)
    rope = {"rope_type": "default", "rope_theta": target.info.rope_theta}
    refused(partial, {**good, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}, mine)
    refused("rms_norm_eps", {**good, "rms_norm_eps": 0.5}, mine)
    refused(
        "missing tensors \\['fc.weight'\\]",
        good,
        {name: value for name, value in mine.items() if name != "fc.weight"},
    )
    refused("unknown tensors \\['more'\\]", good, {**mine, "more": torch.zeros(1)})
    refused("has shape", good, {**mine, "norm.weight": torch.zeros(3)})
    refused("not finite", good, {**mine, "norm.weight": torch.full((H,), float("nan"))})
    refused("activation", {**good, "hidden_act": "gelu"}, mine)


def test_eagle_3_with_draft_tokens_in_any_order(target: TargetModel, tmp_path: Path) -> None:
    """Engines put the logits of a reduced vocabulary where d2t says, in whatever order."""
    mine = dict(drafter_of(target, "eagle3_plain").state_dict())
    ids = "eagle_aux_hidden_state_layer_ids"
    config = sizes(target, draft_vocab_size=40, head_dim=16, **{ids: [1, 3, 5]})
    order, place = torch.randperm(40, generator=torch.Generator().manual_seed(2)), torch.arange(40)
    tokens = (mine["d2t"] + place)[order]
    theirs = {**mine, "d2t": tokens - place, "lm_head.weight": mine["lm_head.weight"][order]}
    found = taken(target, folder_of(tmp_path / "a", config, theirs), tmp_path / "a-out", "eagle3")
    same(found, mine)
    del theirs["t2d"]
    found = taken(target, folder_of(tmp_path / "b", config, theirs), tmp_path / "b-out", "eagle3")
    same(found, mine)
    for number, token in enumerate((int(tokens[1]), -1, target.info.vocab_size)):
        wrong = tokens.clone()
        wrong[0] = token
        folder = folder_of(tmp_path / f"wrong{number}", config, {**theirs, "d2t": wrong - place})
        with pytest.raises(UserError, match="the draft vocabulary is damaged"):
            import_folder(folder, target, tmp_path / "out")


@pytest.mark.parametrize(
    ("variant", "change", "words"),
    [
        ("eagle3_plain", {"num_hidden_layers": None}, "does not describe its drafter"),
        ("eagle3_plain", {"rope_parameters": None, "rope_theta": None}, "does not describe"),
        ("eagle3_plain", {"eagle_aux_hidden_state_layer_ids": "1,3,5"}, "does not describe"),
        ("dflash_token", {"num_hidden_layers": None}, "does not describe its drafter"),
        ("dflash_token", {"dflash_config": IDS | {"target_layer_ids": []}}, r"reads layers \[\]"),
        ("dflash_token", {"dflash_config": IDS | {"mask_token_id": -1}}, "names the mask token -1"),
        ("peagle", {"pard_token": 10**6, "mask_token_id": 10**6}, "names the mask token 1000000"),
        ("peagle", {"pard_token": -1, "mask_token_id": -1}, "names the mask token -1"),
        ("pard", {"pard_token": "x"}, "names the mask token 'x'"),
        ("pard", {"pard_token": -1}, "names the mask token -1"),
    ],
)
def test_a_malformed_config_is_refused_in_one_sentence(
    target: TargetModel, tmp_path: Path, variant: str, change: dict[str, Any], words: str
) -> None:
    write(target, save(target, variant, tmp_path / "mine"), tmp_path / "out", "vllm")
    (tmp_path / "out" / "headstart_export.json").unlink()
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words) as caught:
        import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    assert str(tmp_path / "out") in str(caught.value) and not (tmp_path / "back").exists()


def test_copies_of_a_target_are_known_in_any_number_format(target: TargetModel) -> None:
    """A target that is stored in one format may be loaded in another."""
    stored = target.weights.embedding.detach().to(torch.float16)
    formats = (torch.float32, torch.bfloat16, torch.float16)
    for loaded in formats:
        weights = replace(target.weights, embedding=stored.to(loaded))
        receiver = Receiver(target.info, weights)
        for copied in formats:
            theirs = stored.to(copied, copy=True)
            assert receiver.is_shared("embed_tokens.weight", theirs), (loaded, copied)
            theirs[3] += 1
            assert not receiver.is_shared("embed_tokens.weight", theirs), (loaded, copied)
            assert receiver.is_shared_but(3, theirs) and not receiver.is_shared_but(4, theirs)


def test_a_language_model_with_another_tokenizer_is_refused(
    target: TargetModel, tmp_path: Path
) -> None:
    write(target, save(target, "distilled", tmp_path / "mine"), tmp_path / "out", "vllm")
    (tmp_path / "out" / "headstart_export.json").unlink()
    weights, found = tmp_path / "out" / "model.safetensors", tensors(tmp_path / "out")
    # older checkpoints of Llama store the frequencies
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(found, weights)
    assert import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "same").notes == []
    path = tmp_path / "out" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    tokens = list(words.values())
    content["model"]["vocab"] = dict(zip(words, [*tokens[1:], tokens[0]], strict=True))
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="has another tokenizer than target"):
        import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    path.unlink()
    (note,) = import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "none").notes
    assert "has no tokenizer that can be read" in note


def test_speculators_eagle_3_without_layer_ids(target: TargetModel, tmp_path: Path) -> None:
    """The library and vLLM then read the same layers as for any other EAGLE-3."""
    mine = dict(drafter_of(target, "eagle3_plain").state_dict())
    mine["fc.weight"] = torch.randn(H, 2 * H)  # in six layers, 2, n // 2 and n - 3 are two
    theirs = {name.replace("midlayer.", "layers.0."): value for name, value in mine.items()}
    key = "eagle_aux_hidden_state_layer_ids"
    for number, named in enumerate(({}, {key: None})):
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": 40,
            "transformer_layer_config": sizes(target, head_dim=16),
            **named,
        }
        out = tmp_path / f"out{number}"
        folder = folder_of(tmp_path / f"in{number}", config, theirs)
        (note,) = import_folder(folder, target, out).notes
        assert key in note and "[2, 3]" in note
        assert read_config(out)["config"]["taps"] == [2, 3]
        same(tensors(out), mine)


class Elsewhere(Tensor):
    """A tensor as if on another device: only its copy on the CPU is compared with others."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is not torch.equal, "tensors of two devices are compared"
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(Tensor) if function is Tensor.cpu else found


def test_an_embedding_is_compared_with_that_of_a_target_on_another_device(
    target: TargetModel,
) -> None:
    own = target.weights.embedding
    elsewhere = replace(target.weights, embedding=own.detach().clone().as_subclass(Elsewhere))
    receiver, theirs = Receiver(target.info, elsewhere), own.detach().clone()
    assert receiver.is_shared("embed_tokens.weight", theirs)
    theirs[3] += 1
    assert receiver.is_shared_but(3, theirs) and not receiver.is_shared_but(4, theirs)


def test_z_lab_dflash(target: TargetModel, tmp_path: Path) -> None:
    mine = dict(drafter_of(target, "dflash_token").state_dict())
    config = sizes(
        target,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=3,
        block_size=5,
        num_target_layers=6,
        layer_types=["full_attention"] * 3,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
    )
    same(taken(target, folder_of(tmp_path / "a", config, mine), tmp_path / "out", "dflash"), mine)
    stored = read_config(tmp_path / "out")["config"]
    assert (stored["taps"], stored["mask_token_id"], stored["in_block"]) == (
        [1, 3, 4],
        3,
        "bidirectional",
    )
    swa = {**config, "layer_types": ["sliding_attention"] * 3, "sliding_window": 256}
    taken(target, folder_of(tmp_path / "b", swa, mine), tmp_path / "out2", "dflash")
    assert (
        read_config(tmp_path / "out2")["config"]["in_block"] == "causal"
    )  # windows as long as any text: causal, nothing else
    with pytest.raises(UserError, match="see 16 tokens"):
        import_folder(
            folder_of(tmp_path / "c", {**swa, "sliding_window": 16}, mine),
            target,
            tmp_path / "out3",
        )
    mixed = {**swa, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(UserError, match="mixes sliding and full"):
        import_folder(folder_of(tmp_path / "d", mixed, mine), target, tmp_path / "out3")


def test_deepspec_dspark(target: TargetModel, tmp_path: Path) -> None:
    for number, variant in enumerate(("dspark_gated", "dspark_rnn")):
        mine = dict(drafter_of(target, variant).state_dict())
        config = sizes(
            target,
            architectures=["Qwen3DSparkModel"],
            model_type="qwen3",
            num_hidden_layers=3,
            block_size=5,
            mask_token_id=3,
            target_layer_ids=[0, 2, 3],
            num_target_layers=6,
            markov_rank=6,
            markov_head_type=variant.removeprefix("dspark_"),
            enable_confidence_head=False,
        )
        same(
            taken(
                target,
                folder_of(tmp_path / f"a{number}", config, mine),
                tmp_path / f"out{number}",
                "dflash",
            ),
            mine,
        )
        assert (
            read_config(tmp_path / f"out{number}")["config"]["sample_from_anchor"] is True
        )  # DeepSpec's, where nothing is said


def test_legacy_medusa(target: TargetModel, tmp_path: Path) -> None:
    mine = dict(drafter_of(target, "medusa_heads").state_dict())
    old = {
        f"{i}.0.linear.{part}": mine[f"residual_{part}"][0, i]
        for i in range(2)
        for part in ("weight", "bias")
    }
    heads = {f"{i}.1.weight": mine["lm_heads"][i] for i in range(2)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    same(
        taken(
            target,
            folder_of(tmp_path / "v1", config, old | heads, "medusa_lm_head.pt"),
            tmp_path / "a",
            "medusa",
        ),
        mine,
    )
    del mine["lm_heads"]
    v2 = {**config, "version": "2"}
    same(
        taken(
            target,
            folder_of(tmp_path / "v2", v2, old, "medusa_lm_head.safetensors"),
            tmp_path / "b",
            "medusa",
        ),
        mine,
    )
    assert read_config(tmp_path / "b")["config"]["own_lm_head"] is False
    prefixed = {f"medusa_heads.{name}": value for name, value in old.items()}
    same(taken(target, folder_of(tmp_path / "v3", v2, prefixed), tmp_path / "c", "medusa"), mine)
    with pytest.raises(UserError, match="names 3 heads, the weights hold 2"):
        import_folder(
            folder_of(tmp_path / "d", {**v2, "medusa_num_heads": 3}, old), target, tmp_path / "e"
        )


@pytest.mark.parametrize("whole", [True, False])
def test_medusa_with_a_token_map_in_any_order(
    target: TargetModel, tmp_path: Path, whole: bool
) -> None:
    """vLLM's truncated vocabulary: LM heads of all tokens, or of those in `token_map` alone."""
    mine = dict(drafter_of(target, "medusa_heads").state_dict())
    size, ids = target.info.vocab_size, torch.tensor([50, 3, 17, 4])
    rows = slice(None) if whole else ids
    theirs = {
        f"blocks.{i}.layers.0.{part}": mine[f"residual_{part}"][0, i]
        for i in range(2)
        for part in ("weight", "bias")
    }
    theirs |= {f"lm_heads.{i}.weight": mine["lm_heads"][i][rows] for i in range(2)}
    config = {"architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 1}
    folder = folder_of(tmp_path / "in", config, {**theirs, "token_map": ids})
    found = taken(target, folder, tmp_path / "out", "medusa")
    kept = [3, 4, 17, 50]
    assert (found["d2t"] + torch.arange(4)).tolist() == kept
    assert found["t2d"].nonzero().flatten().tolist() == kept
    assert torch.equal(found["lm_heads"], mine["lm_heads"][:, kept])
    assert read_config(tmp_path / "out")["config"]["draft_vocab_size"] == 4
    cut = {**theirs, "token_map": ids, "lm_heads.0.weight": torch.zeros(3, H)}
    with pytest.raises(UserError, match=r"'lm_heads.0.weight' has shape \[3, 32\]"):
        import_folder(folder_of(tmp_path / "cut", config, cut), target, tmp_path / "x")
    for number, bad in enumerate(([], [3, 3], [-1, 2], [1, size], list(range(size)))):
        broken = {**theirs, "token_map": torch.tensor(bad)}
        with pytest.raises(UserError, match="token_map must hold fewer than"):
            import_folder(
                folder_of(tmp_path / f"bad{number}", config, broken), target, tmp_path / "x"
            )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_language_models(target: TargetModel, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    size = target.info.vocab_size - 24 if family == "qwen2" else target.info.vocab_size
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        family,
        vocab_size=size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=family == "qwen3",
        sliding_window=None,
        rope_theta=7000.0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)  # transformers starts them at zero
    model.save_pretrained(tmp_path / "model")
    taken(target, Folder.read(tmp_path / "model"), tmp_path / "out", "causal")
    drafter = load_drafter(tmp_path / "out", target.info, target.weights)
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    from heads.api.batch import TrainBatch

    segments, mask = (
        torch.ones_like(tokens, dtype=torch.int32),
        torch.ones_like(tokens, dtype=torch.bool),
    )
    batch = TrainBatch(tokens, torch.arange(5)[None], segments, mask, None, None, None)
    with torch.no_grad():
        found = drafter.logits(drafter.sequence(batch))
        wanted = model(tokens).logits
    torch.testing.assert_close(found[..., :size], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["eagle", "eagle3_plain", "peagle", "dflash", "dspark", "medusa", "distilled_qwen2", "fastmtp"],
)
def test_what_is_imported_is_exported_as_it_was(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    write(target, save(target, name, tmp_path / "mine"), tmp_path / "theirs", "vllm")
    (tmp_path / "theirs" / "headstart_export.json").unlink()  # as if somebody else had written it
    import_folder(Folder.read(tmp_path / "theirs"), target, tmp_path / "ours")
    token = json.loads((tmp_path / "theirs" / "config.json").read_text())
    mask = (token.get("dflash_config") or token).get("mask_token_id", -1)
    write(target, tmp_path / "ours", tmp_path / "again", "vllm", mask_token_id=mask)
    same(tensors(tmp_path / "again"), tensors(tmp_path / "theirs"))
    left, right = (
        json.loads((tmp_path / part / "config.json").read_text()) for part in ("again", "theirs")
    )
    assert left == right


def test_folders_that_are_no_drafters(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        Folder.read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        Folder.read(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not readable as JSON"):
        Folder.read(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="in place of keys"):
        Folder.read(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no weights"):
        Folder.read(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(UserError, match="cut off or damaged"):
        Folder.read(tmp_path / "empty")
    folder = folder_of(tmp_path / "strange", {"architectures": ["Strange"]}, {"a": torch.zeros(1)})
    with pytest.raises(UserError, match="of no layout that we read"):
        import_folder(folder, target, tmp_path / "out")
    with pytest.raises(UserError, match=r"import\.layout 'eagel'.*Did you mean 'eagle'"):
        ImportConfig(layout="eagel")


class Harmful:
    """Would run when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="Nothing in it was executed"):
        Folder.read(tmp_path)
    assert "executed" not in capsys.readouterr().out
    torch.save(["a list"], tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="table of tensors"):
        Folder.read(tmp_path)


def test_notes_of_other_versions_are_read(tmp_path: Path) -> None:
    old = {"format": 1, "kind": "eagle3", "engine": "sglang", "taps": [1, 3], "of_later": 1}
    (tmp_path / "headstart_export.json").write_text(json.dumps(old))
    notes = ExportNotes.read(tmp_path)
    assert (notes.kind, notes.engine, notes.taps, notes.files) == ("eagle3", "sglang", [1, 3], {})
    (tmp_path / "headstart_export.json").write_text(json.dumps({**old, "taps": "1, 3"}))
    with pytest.raises(UserError, match="taps must be a list, it is a str"):
        ExportNotes.read(tmp_path)
