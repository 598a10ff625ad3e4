"""The target that is kept aside: its model, tokenizer and text, and the report that judges by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.api.errors import UserError
from inference.target.chat import render_conversation, render_prompt
from scripts.held_out_target import corpus, making
from scripts.held_out_target import tokenizer as tokens
from scripts.held_out_target.model import HeldOutShape, TinyQwen3
from scripts.tiny_target import vocabulary
from scripts.tiny_target.data import assistant_mask

FUNCTION = """// aten::{name}.out(Tensor self, Scalar {name}_by, *, Tensor(a!) out) -> Tensor(a!)
inline at::Tensor & {name}_out(at::Tensor & out, const at::Tensor & self, const at::Scalar & {name}_by) {{
    return at::_ops::{name}_out::call(self, {name}_by, out);
}}
// aten::{name}(Tensor self, Scalar {name}_by) -> Tensor
inline at::Tensor {name}(const at::Tensor & self, const at::Scalar & {name}_by) {{
    return at::_ops::{name}::call(self, {name}_by);
}}
"""
STRUCT = """struct TORCH_API {name} {{
  using schema = at::Tensor (const at::Tensor &, const at::Scalar &);
  using ptr_schema = schema*;
  static constexpr const char* schema_str = "{name}(Tensor self, Scalar {name}_by) -> Tensor";
  static at::Tensor call(const at::Tensor & self, const at::Scalar & {name}_by);
}};
"""
NATIVE = "TORCH_API at::Tensor {name}(const at::Tensor & self, const at::Scalar & {name}_by=1);\n"


FEW = {"training": 12, "validation": 4, "measuring": 6}


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ops")
    for number in range(60):
        name = "".join(chr(97 + digit) for digit in (number % 26, number // 26, number * 7 % 26))
        for ending, text in ((".h", FUNCTION), ("_ops.h", STRUCT), ("_native.h", NATIVE)):
            (root / f"{name}{ending}").write_text("#pragma once\n\n" + text.format(name=name))
    return root


def test_the_module_computes_what_transformers_does() -> None:
    shape = HeldOutShape(
        vocabulary=50, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=40, positions=32
    )
    model = TinyQwen3(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, mean=0.1, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    config = AutoConfig.for_model(**shape.config())
    other = AutoModelForCausalLM.from_config(config).float().eval()
    missing, unknown = other.load_state_dict(model.state_dict(), strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}  # tied
    ids = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), other(ids).logits, atol=2e-4, rtol=1e-4)


def test_the_template_writes_what_training_read() -> None:
    tokenizer = tokens.train_tokenizer(
        [FUNCTION.format(name=name) for name in ("alpha", "beta", "gamma")], vocabulary=320
    )
    wrapped = tokens.wrap(tokenizer)
    assert [wrapped.convert_tokens_to_ids(token) for token in tokens.SPECIAL] == list(
        range(len(tokens.SPECIAL))
    )
    assert (tokens.SPECIAL[vocabulary.BOS_ID], tokens.SPECIAL[vocabulary.END_ID]) == (tokens.BOS, tokens.END)
    messages = [{"role": "user", "content": "int a;\n ü"}, {"role": "assistant", "content": "  int b;"}]
    ids, spans = render_conversation(wrapped, messages)
    assert wrapped.decode(ids) == tokens.conversation("int a;\n ü", "  int b;")
    assert ids == making.encode(tokenizer, [tokens.conversation("int a;\n ü", "  int b;")]).tolist()
    assert ids[: spans[0][0]] == render_prompt(wrapped, messages[:1])
    supervised = assistant_mask(making.encode(tokenizer, [tokens.conversation("int a;\n ü", "  int b;")]))
    assert [i for i, inside in enumerate(supervised) if inside] == list(range(spans[0][0], spans[0][1]))
    assert (
        sum(tokens.token_bytes(tokenizer)[index] for index in ids) == len("int a;\n ü  int b;".encode()) + 2
    )  # two line breaks


def test_operators_give_questions_and_keep_their_groups(include: Path) -> None:
    found = corpus.operators(include)
    assert len(found) == 60
    assert {operator.group for operator in found} == {"train", "A", "B"}
    rows = [row for operator in found for row in corpus.rows_of(operator)]
    assert {row["domain"] for row in rows} == set(corpus.DOMAINS)
    for row in rows:
        assert row["answer"] not in row["asked"]
        assert corpus.MIN_ANSWER <= len(row["answer"]) <= corpus.MAX_ANSWER
    struct = next(row for row in rows if row["domain"] == "operator")
    assert "schema_str" not in struct["answer"] and struct["answer"].endswith("};")
    assert struct["asked"].endswith("-> Tensor")
    assert corpus.group_of("conv_tbc") == corpus.group_of("_conv_tbc_backward")


def test_the_installed_torch_has_enough_of_them() -> None:
    rows = dict.fromkeys(("train", "A", "B"), 0)
    for operator in corpus.operators():
        rows[operator.group] += len(corpus.rows_of(operator))
    assert rows["A"] > making.PROMPTS["training"] + making.PROMPTS["validation"]
    assert rows["B"] > making.PROMPTS["measuring"]
    assert rows["train"] > 3000


def test_prompts_are_disjoint_and_few_per_header(include: Path, tmp_path: Path) -> None:
    found = corpus.operators(include)
    rows: dict[str, list[corpus.Row]] = {"train": [], "A": [], "B": []}
    for document in found:
        rows[document.group] += corpus.rows_of(document)
    making.write_prompts(tmp_path, rows, seed=0, training=12, validation=4, measuring=6)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.jsonl")}
    assert {"train.jsonl", "validation.jsonl"} < set(files)
    groups: dict[str, set[str]] = {}
    for name, path in files.items():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        sources = [line["source"] for line in lines]
        assert max(sources.count(source) for source in sources) <= making.PER_DOCUMENT
        groups.setdefault(name.partition("/")[0], set()).update(
            line["messages"][0]["content"] for line in lines
        )
    assert [len(groups[name]) for name in ("train.jsonl", "validation.jsonl", "measuring")] == [12, 4, 6]
    assert not groups["measuring"] & (groups["train.jsonl"] | groups["validation.jsonl"])
    with pytest.raises(UserError, match="install a torch"):
        making.write_prompts(tmp_path, rows, seed=0, training=12, validation=4, measuring=600)


def test_a_target_is_made_and_loads(include: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = corpus.operators(include)
    monkeypatch.setattr(corpus, "operators", lambda: found)
    small = HeldOutShape(
        vocabulary=2048, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, positions=512
    )
    monkeypatch.setattr(making, "HeldOutShape", lambda: small)
    making.prepare(tmp_path / "data", FEW)
    making.train(tmp_path / "data", tmp_path / "state", steps=3)
    making.export(tmp_path / "data", tmp_path / "state", tmp_path / "target")
    from inference.target.loading import TargetConfig
    from inference.target.model import TargetModel

    target = TargetModel.load(TargetConfig(str(tmp_path / "target"), dtype="float32", device="cpu"))
    assert (target.info.model_type, target.info.hidden_size, target.info.num_layers) == ("qwen3", 16, 2)
    assert target.eos_token_ids == (vocabulary.END_ID,) or list(target.eos_token_ids) == [vocabulary.END_ID]
    before = (tmp_path / "target" / "model.safetensors").stat().st_mtime_ns
    making.make(tmp_path, 3, FEW)  # everything stands already
    assert (tmp_path / "target" / "model.safetensors").stat().st_mtime_ns == before
