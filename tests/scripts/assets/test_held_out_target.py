"""The target that is kept aside: its tokenizer, its text, its making."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.target.chat import render_conversation, render_prompt
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.assets import cpp_headers, held_out_target
from scripts.assets.held_out_target import PROMPTS
from scripts.assets.prepared import END_ID, assistant_mask, count_bytes, encode_dialogues

FUNCTION = """// aten::{name}.out(Tensor self, Scalar {name}_by, *, Tensor(a!) out) -> Tensor(a!)
inline at::Tensor & {name}_out(at::Tensor & out, at::Tensor & self, const at::Scalar & {name}_by) {{
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


def test_the_template_writes_what_training_reads() -> None:
    spec = dataclasses.replace(held_out_target.TOKENIZER, size=320)
    tokenizer = spec.train([FUNCTION.format(name=name) for name in ("alpha", "beta", "gamma")])
    assert tokenizer.convert_tokens_to_ids(list(spec.special)) == list(range(len(spec.special)))
    messages = [
        {"role": "user", "content": "int a;\n ü"},
        {"role": "assistant", "content": "  int b;"},
    ]
    ids, spans = render_conversation(tokenizer, messages)
    assert tokenizer.decode(ids) == "<text><ask>int a;\n ü</turn>\n<say>  int b;</turn>\n"
    stream = encode_dialogues(tokenizer, [messages])
    assert ids == stream.tolist()
    assert ids[: spans[0][0]] == render_prompt(tokenizer, messages[:1])
    assert np.flatnonzero(assistant_mask(stream)).tolist() == list(range(*spans[0]))
    text = "int a;\n ü  int b;" + 2 * "\n"
    assert sum(count_bytes(tokenizer)[index] for index in ids) == len(text.encode())


def test_operators_give_questions_and_keep_their_groups(include: Path) -> None:
    found = cpp_headers.operators(include)
    assert len(found) == 60
    assert {operator.group for operator in found} == {"train", "A", "B"}
    pairs = [pair for operator in found for pair in operator.pairs]
    assert {pair.domain for pair in pairs} == set(cpp_headers.DOMAINS)
    for pair in pairs:
        assert pair.answer not in pair.question()
        assert cpp_headers.MIN_ANSWER <= len(pair.answer) <= cpp_headers.MAX_ANSWER
    struct = next(pair for pair in pairs if pair.domain == "operator")
    assert "schema_str" not in struct.answer and struct.answer.endswith("};")
    assert struct.question().endswith("-> Tensor")
    assert cpp_headers.group_of("conv_tbc") == cpp_headers.group_of("_conv_tbc_backward")


def test_the_installed_torch_has_enough_of_them() -> None:
    pairs = cpp_headers.split_pairs(cpp_headers.operators())
    assert len(pairs["A"]) > PROMPTS["training"] + PROMPTS["validation"]
    assert len(pairs["B"]) > PROMPTS["measuring"]
    assert len(pairs["train"]) > 3000
    answers = {group: {pair.answer for pair in found} for group, found in pairs.items()}
    assert not answers["train"] & (answers["A"] | answers["B"]) and not answers["A"] & answers["B"]


def test_prompts_are_disjoint_and_few_per_header(include: Path, tmp_path: Path) -> None:
    pairs = cpp_headers.split_pairs(cpp_headers.operators(include))
    held_out_target.write_prompts(tmp_path, pairs, seed=0, **FEW)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.jsonl")}
    assert {"train.jsonl", "validation.jsonl"} < set(files)
    groups: dict[str, set[str]] = {}
    for name, path in files.items():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        sources = [line["source"] for line in lines]
        assert max(sources.count(source) for source in sources) <= cpp_headers.PER_OPERATOR
        groups.setdefault(name.partition("/")[0], set()).update(
            line["messages"][0]["content"] for line in lines
        )
    assert [len(groups[name]) for name in ("train.jsonl", "validation.jsonl", "measuring")] == [
        12,
        4,
        6,
    ]
    assert not groups["measuring"] & (groups["train.jsonl"] | groups["validation.jsonl"])
    with pytest.raises(UserError, match="prompts, 600 were asked for"):
        held_out_target.write_prompts(tmp_path, pairs, seed=0, **{**FEW, "measuring": 600})


def test_a_target_is_made_and_loads(
    include: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cpp_headers.operators(include)
    monkeypatch.setattr(cpp_headers, "operators", lambda: found)
    small = {
        **held_out_target.CONFIG,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 512,
    }
    folder = held_out_target.make(tmp_path, 3, FEW, small)
    target = TargetModel.load(TargetConfig(str(folder), dtype="float32", device="cpu"))
    info = target.info
    assert (info.model_type, info.hidden_size, info.num_layers) == ("qwen3", 16, 2)
    assert list(target.eos_token_ids) == [END_ID]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    held_out_target.make(tmp_path, 3, FEW, small)  # everything stands already
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
