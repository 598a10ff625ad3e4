"""The making of the embedded target: tokenizer, template, corpus separation, training loop, export,
prompts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from heads.api.errors import UserError
from inference.manifest import file_sha256
from scripts.assets import python_sources, tiny_target
from scripts.assets.conversations import pairs_of
from scripts.assets.export import check_weights, export, render_card
from scripts.assets.prepared import (
    BOS_ID,
    END_ID,
    PAD_ID,
    Stream,
    assistant_mask,
    count_bytes,
    encode_dialogues,
    load_manifest,
    load_stream,
)
from scripts.assets.python_sources import Document, package_group, stdlib_group, topic_group
from scripts.assets.tiny_target import TOKENIZER, prepare
from scripts.assets.training import Intervals, Trainer, TrainSettings, build_model, resized

MODULE = '''"""Tools for {name}: they count, join and report what was found in {name} files.

Every function here is small and stands on its own, so that a test can read it."""


class {name}Reader:
    """Read {name} files line by line and keep those asked for, in the order they stand in."""

    def keep(self, lines, wanted):
        """Return the lines of {name} whose first word is in `wanted`, without trailing blanks."""
        result = []
        for line in lines:
            words = line.split()
            if words and words[0] in wanted:
                result.append(line.rstrip() + "{name}")
        return result


def total_{name}(values, start=0):
    """Return the sum of all {name} values that are not None, beginning with `start`."""
    total = start
    for index_{name}, value in enumerate(values):
        if value is not None:
            total += value * len("{name}")
    return total
'''


def module(name: str, source: str, group: str) -> Document:
    return Document(source, f"{name}.py", "python", group, MODULE.format(name=name))


def sized(size: int) -> Any:
    return dataclasses.replace(TOKENIZER, size=size)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [module(f"alpha{chr(97 + i)}", "open", "train") for i in range(20)]
    documents += [module(f"beta{chr(97 + i)}", "heldA", "A") for i in range(6)]
    documents += [module(f"gamma{chr(97 + i)}", "heldB", "B") for i in range(6)]
    documents.append(
        Document("open", "copied.py", "python", "train", documents[-1].text + "\nx = 1\n")
    )
    out = tmp_path_factory.mktemp("prepared")
    prepare(documents, out, out / "pairs", workers=1, spec=sized(400))
    return out


@pytest.fixture(scope="module")
def wrapped(prepared: Path):
    return AutoTokenizer.from_pretrained(prepared / "tokenizer")


@pytest.fixture(scope="module")
def small() -> PreTrainedTokenizerFast:
    return sized(350).train([MODULE.format(name="word")] * 3)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80))
def test_every_text_survives_the_tokenizer(small: PreTrainedTokenizerFast, text: str) -> None:
    ids = small.encode(text, add_special_tokens=False)
    assert small.decode(ids, skip_special_tokens=False) == text
    if not python_sources.SPECIAL.search(text):
        sizes = count_bytes(small)
        assert sum(sizes[index] for index in ids) == len(text.encode())


def test_digits_stand_alone_and_indentation_is_one_token(small: PreTrainedTokenizerFast) -> None:
    assert small.tokenize("2024") == ["2", "0", "2", "4"]
    assert "ĊĠĠĠĠĠĠĠĠ" in small.tokenize("x\n        total")


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?\n"},
    {"role": "assistant", "content": "return 1\n\n  é"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": " 2"},
]


def test_template_text_is_golden(wrapped) -> None:
    text = wrapped.apply_chat_template(CONVERSATION, tokenize=False)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>One?\n<|end|><|assistant|>return 1\n\n  é<|end|>"
        "<|user|>Two?<|end|><|assistant|> 2<|end|>"
    )
    prompt = wrapped.apply_chat_template(
        CONVERSATION[:2], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|bos|><|system|>Be brief.<|end|><|user|>One?\n<|end|><|assistant|>"


def test_template_marks_exactly_what_the_assistant_says(wrapped) -> None:
    out = wrapped.apply_chat_template(
        CONVERSATION, return_assistant_tokens_mask=True, return_dict=True
    )
    spans, open_span = [], False
    for index, marked in zip(out["input_ids"], out["assistant_masks"], strict=True):
        if marked and not open_span:
            spans.append([])
        if marked:
            spans[-1].append(index)
        open_span = bool(marked)
    assert [wrapped.decode(span) for span in spans] == ["return 1\n\n  é<|end|>", " 2<|end|>"]


def test_template_refuses_other_roles(wrapped) -> None:
    with pytest.raises(Exception, match="system, user and assistant"):
        wrapped.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_training_stream_is_what_the_template_renders(wrapped) -> None:
    out = wrapped.apply_chat_template(
        CONVERSATION, return_assistant_tokens_mask=True, return_dict=True
    )
    ids = encode_dialogues(wrapped, [CONVERSATION, CONVERSATION])
    assert ids.tolist() == out["input_ids"] * 2
    assert assistant_mask(ids).astype(int).tolist() == out["assistant_masks"] * 2


def test_held_out_text_never_reaches_the_training_streams(prepared: Path, wrapped) -> None:
    manifest = load_manifest(prepared)
    for name in ("raw", "chat"):
        text = wrapped.decode(load_stream(prepared, manifest, name).tolist())
        assert "alphaa" in text
        assert "beta" not in text and "gamma" not in text
    assert "gamma" in wrapped.decode(load_stream(prepared, manifest, "heldout-raw").tolist())
    assert manifest["dropped_for_overlap"] == ["open/copied.py"]
    assert not set(manifest["heldout"]["A"]["documents"]) & set(
        manifest["heldout"]["B"]["documents"]
    )


def test_preparing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    documents = [
        module("alpha", "open", "train"),
        module("beta", "a", "A"),
        module("gamma", "b", "B"),
    ]
    for folder in ("one", "two"):
        prepare(
            documents, tmp_path / folder, tmp_path / folder / "pairs", workers=1, spec=sized(350)
        )
    for file in sorted((tmp_path / "one").rglob("*")):
        if file.is_file():
            assert (
                file.read_bytes()
                == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes()
            ), file


def test_groups_take_a_modules_tests_and_parts_along() -> None:
    assert stdlib_group("json/decoder.py") == stdlib_group("test/test_json/test_decode.py") == "A"
    assert stdlib_group("heapq.py") == stdlib_group("test/test_heapq.py") == "B"
    assert stdlib_group("asyncio/events.py") == "train"
    assert package_group("more-itertools") == package_group("more_itertools") == "B"


def test_pairs_hold_signature_docstring_and_body() -> None:
    pairs = {(pair.domain, pair.name): pair for pair in pairs_of(module("alpha", "open", "train"))}
    code = pairs["code", "alphaReader.keep"]
    assert code.shown.startswith(
        'class alphaReader:\n    def keep(self, lines, wanted):\n        """Return the lines'
    )
    assert code.answer.startswith(
        "result = []\nfor line in lines:\n    words"
    ) and code.answer.endswith("return result")
    assert pairs["explain", "total_alpha"].shown == "def total_alpha(values, start=0):"
    assert pairs["explain", "total_alpha"].answer.startswith("Return the sum of all alpha values")
    assert pairs["reference", "the module alpha"].answer.startswith("Tools for alpha")


def test_windows_stay_inside_the_stream_and_prefer_document_starts() -> None:
    ids = np.full(5000, 9, dtype="<u2")
    ids[::700] = BOS_ID
    stream = Stream(ids, 64, torch.device("cpu"))
    windows = stream.windows(500, torch.Generator().manual_seed(0))
    assert windows.shape == (500, 65)
    assert (windows[:, 0] == BOS_ID).float().mean() > 0.4


MICRO = {
    **tiny_target.CONFIG,
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}


def trainer(
    prepared: Path, state: Path, call: float | None = None, start: Any = None, **changes: Any
) -> Trainer:
    """A training of six steps; `call=0.0`: it leaves after the first one."""
    given = TrainSettings(
        **{
            "steps": 6,
            "length": 32,
            "micro_tokens": 128,
            "batch_tokens": 256,
            "lr": 1e-2,
            **changes,
        }
    )
    return Trainer(
        prepared,
        state,
        state / "out",
        given,
        MICRO,
        torch.device("cpu"),
        intervals=Intervals(call=call),
        start=start,
    )


def test_resumed_training_is_bit_equal(prepared: Path, tmp_path: Path) -> None:
    assert trainer(prepared, tmp_path / "whole").run()
    assert not trainer(prepared, tmp_path / "parts", call=0.0).run()
    assert trainer(prepared, tmp_path / "parts").run()
    whole, parts = (
        load_file(tmp_path / name / "out" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    both = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "parts")
    ]
    assert all(
        torch.equal(both[0]["model"][name], both[1]["model"][name]) for name in both[0]["model"]
    )
    log = json.loads((tmp_path / "parts" / "out" / "training.json").read_text())
    assert log["finished"] and log["tokens_seen"] == 6 * 256 and len(log["calls"]) == 2


def test_training_lowers_the_held_out_loss(prepared: Path, tmp_path: Path) -> None:
    run = trainer(prepared, tmp_path, steps=40, lr=2e-2)
    run.evaluate()
    run.run()
    first, last = run.log["evaluations"][0], run.log["evaluations"][-1]
    assert last["code_bits_per_byte"] < 0.95 * first["code_bits_per_byte"]
    assert last["chat_loss"] < first["chat_loss"]


def test_a_deeper_model_begins_with_what_the_shallower_one_computes() -> None:
    torch.manual_seed(3)
    shallow = build_model(MICRO)
    deep = build_model({**MICRO, "num_hidden_layers": 5})
    grown = resized(dict(shallow.named_parameters()), 5)
    assert grown.keys() == dict(deep.named_parameters()).keys()
    before = deep(torch.arange(40)[None]).logits
    deep.load_state_dict(grown, strict=False)
    after, wanted = (model(torch.arange(40)[None]).logits for model in (deep, shallow))
    assert torch.allclose(after, wanted, atol=1e-5) and not torch.allclose(
        before, wanted, atol=1e-2
    )
    kept = resized(grown, 3)
    for name, value in grown.items():
        head, _, rest = name.partition(".layers.")
        number, _, tail = rest.partition(".")
        if rest and int(number) in (0, 2, 4):
            assert torch.equal(kept[f"{head}.layers.{int(number) // 2}.{tail}"], value)


def test_a_training_starts_from_given_weights(prepared: Path, tmp_path: Path) -> None:
    first = trainer(prepared, tmp_path / "first", steps=2)
    first.run()
    weights = {name: value.detach().clone() for name, value in first.model.named_parameters()}
    second = trainer(prepared, tmp_path / "second", start=weights)
    assert all(torch.equal(weights[name], value) for name, value in second.model.named_parameters())


def test_other_settings_are_refused_on_resume(prepared: Path, tmp_path: Path) -> None:
    trainer(prepared, tmp_path, call=0.0).run()
    with pytest.raises(UserError, match=r"lr: 0\.01 then, 0\.5 now"):
        trainer(prepared, tmp_path, lr=0.5)


def test_a_budget_is_one_of_seconds_and_steps() -> None:
    with pytest.raises(UserError, match="one of --seconds and --steps"):
        TrainSettings()
    run = TrainSettings(seconds=100.0)
    assert run.rate(run.used(7, 100.0)) == pytest.approx(0.0)
    assert run.rate(run.used(7, 1.0)) == pytest.approx(run.lr)


def test_a_signal_saves_and_the_rest_is_bit_equal(prepared: Path, tmp_path: Path) -> None:
    assert trainer(prepared, tmp_path / "whole").run()
    stopped = trainer(prepared, tmp_path / "parts")
    compute, calls = stopped.compute, iter(range(1000))

    def interrupted(ids: torch.Tensor):
        if next(calls) == 5:  # the warm-up, two steps of two micro-batches
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(ids)

    stopped.compute = interrupted
    before = signal.getsignal(signal.SIGTERM)
    assert not stopped.run()
    assert stopped.step == 3 and signal.getsignal(signal.SIGTERM) is before
    left = json.loads((tmp_path / "parts" / "out" / "training.json").read_text())
    assert not left["finished"] and left["steps"] == left["evaluations"][-1]["step"] == 3
    assert trainer(prepared, tmp_path / "parts").run()
    whole, parts = (
        load_file(tmp_path / name / "out" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.fixture(scope="module")
def exported(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    trainer(prepared, folder / "run", steps=20).run()
    export(prepared, folder / "run" / "out", folder / "target")
    return folder / "target"


def test_export_loads_under_transformers(exported: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        exported, dtype="float32", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = AutoTokenizer.from_pretrained(exported)("total += value", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=5)
    assert answer.shape[1] <= ids.shape[1] + 5
    stops = model.generation_config
    assert (stops.eos_token_id, stops.pad_token_id, stops.bos_token_id) == (END_ID, PAD_ID, BOS_ID)


def test_exported_weights_are_the_trained_ones(prepared: Path, tmp_path: Path) -> None:
    run = trainer(prepared, tmp_path / "run", steps=3)
    run.run()
    export(prepared, tmp_path / "run" / "out", tmp_path / "target", with_card=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="bfloat16")
    trained = dict(run.model.named_parameters())
    loaded = dict(model.named_parameters())
    assert loaded.keys() == trained.keys()
    for name, parameter in trained.items():
        assert torch.equal(loaded[name], parameter.to(torch.bfloat16)), name
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_card_reads_its_figures_from_the_record(exported: Path) -> None:
    text, record = (
        (exported / "README.md").read_text(),
        json.loads((exported / "training.json").read_text()),
    )
    last = record["evaluations"][-1]
    assert f"| tokens seen | {20 * 256:,} |" in text
    for name in ("code", "chat"):
        assert (
            f"| 20 | {name} | {last[f'{name}_bits_per_byte']:.3f} | {last[f'{name}_loss']:.3f} |"
            in text
        )
    assert (
        f"A Llama of {AutoModelForCausalLM.from_pretrained(exported).num_parameters():,} parameters"
        in text
    )
    assert "used up its budget, and" in text
    record["finished"] = False
    assert "was ended before its budget" in render_card("tiny-target", record, EMPTY_MANIFEST, 1)


EMPTY_MANIFEST = {
    "python": "3",
    "sources": {},
    "pairs": {"train": {}},
    "dropped_for_overlap": [],
    "heldout": {group: {"packages": [], "stdlib": []} for group in "AB"},
    "streams": {name: {"tokens": 0} for name in ("raw", "chat")},
}


def test_export_refuses_what_does_not_belong_together(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(UserError, match=r"training\.json does not exist"):
        export(prepared, tmp_path, tmp_path / "target")
    trainer(prepared, tmp_path, call=0.0).run()
    run, path = tmp_path / "out", tmp_path / "out" / "training.json"
    record = json.loads(path.read_text())

    def refused(message: str, **changes) -> None:
        path.write_text(json.dumps({**record, **changes}))
        with pytest.raises(UserError, match=message):
            export(prepared, run, tmp_path / "target")

    refused("no held-out figures for its last step", steps=9)
    refused(
        "not trained with the tokenizer", settings={**record["settings"], "tokenizer_sha256": "0"}
    )
    larger = {**record["settings"]["config"], "hidden_size": 64}
    refused(
        r"its configuration's tensors as finite bfloat16 values",
        settings={**record["settings"], "config": larger},
    )
    monkeypatch.setattr("scripts.assets.export.MAX_WEIGHT_BYTES", 1000)
    refused("1,000 are allowed")
    monkeypatch.undo()
    weights = load_file(run / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, run / "model.safetensors")
    refused(r"finite bfloat16 values; model\.norm\.weight \(1 in all\)")
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_the_commands_make_a_target(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tiny_target, "CONFIG", MICRO)
    data, state, out = (["--data", str(prepared)], tmp_path / "run", tmp_path / "target")
    sizes = ["--length", "32", "--batch-tokens", "128", "--device", "cpu", "--no-compile"]
    train = ["train", *data, "--state", str(state), "--steps", "2", *sizes]
    monkeypatch.setattr("sys.argv", ["tiny_target.py", *train])
    assert tiny_target.main(train) == 0
    record = json.loads((state / "training.json").read_text())
    assert record["settings"]["lr"] == TrainSettings.lr and record["tokens_seen"] == 2 * 128
    words = f"train --data {prepared.name} --state run --steps 2"
    assert record["calls"][0]["command"].startswith(f"python -m scripts.assets.tiny_target {words}")
    assert tiny_target.main(["export", *data, "--run", str(state), "--out", str(out)]) == 0
    weights = ["--weights", str(out / "model.safetensors"), "--device", "cpu"]
    capsys.readouterr()
    assert tiny_target.main(["evaluate", *data, *weights]) == 0
    figures = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(figures["chat_loss"]) == pytest.approx(
        record["evaluations"][-1]["chat_loss"], rel=0.02
    )
    chosen = ["--pairs", str(prepared / "pairs"), "--out", str(out), "--measuring", "900"]
    assert tiny_target.main(["prompts", *chosen]) == 2
    assert "900 were asked for" in capsys.readouterr().err


ASSETS = Path(__file__).resolve().parents[3] / "assets"
SHIPPED = ASSETS / "tiny-target"
MEASURED = ("code", "explain", "reference", "summarise", "rewrite", "json")


def shipped_prompts(name: str) -> list[dict]:
    return [
        json.loads(line) for line in (ASSETS / "prompts" / f"{name}.jsonl").read_text().splitlines()
    ]


def test_shipped_prompts_are_distinct_and_apart() -> None:
    measuring = [row for domain in MEASURED for row in shipped_prompts(domain)]
    training = shipped_prompts("training/train") + shipped_prompts("training/validation")
    assert len(measuring) == len(MEASURED) * 96 and len(training) == 1536
    asked = [{row["messages"][0]["content"] for row in rows} for rows in (measuring, training)]
    assert len(asked[0]) == len(measuring) and len(asked[1]) == len(training)
    assert not asked[0] & asked[1]
    modules = [{row["source"].split("::")[0] for row in rows} for rows in (measuring, training)]
    assert not modules[0] & modules[1]
    for module_path in modules[0] | modules[1]:
        source, _, path = module_path.partition("/")
        wanted = "B" if module_path in modules[0] else "A"
        of_source = {"stdlib": stdlib_group(path), "topics": topic_group(path)}
        group = of_source.get(source, package_group(source))
        assert group == wanted, module_path


def test_shipped_template_marks_byte_for_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    answers = ["return 1\n\n  é", "    yield 'ü' \t\n", "x"]
    turns = [{"role": "system", "content": "Be brief."}]
    for number, answer in enumerate(answers):
        turns += [
            {"role": "user", "content": f"What is {number}?\n"},
            {"role": "assistant", "content": answer},
        ]
    out = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    marked = [i for i, mark in zip(out["input_ids"], out["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "".join(answer + "<|end|>" for answer in answers)
    assert out["input_ids"] == encode_dialogues(tokenizer, [turns]).tolist()
    assert tokenizer.get_chat_template() == TOKENIZER.template
    assert (
        len(tokenizer) == 4096
        and tokenizer.eos_token_id == END_ID
        and tokenizer.padding_side == "left"
    )


@pytest.mark.parametrize("name", ["tiny-target", "tiny-hybrid"])
def test_shipped_target_is_what_its_record_says(name: str) -> None:
    folder = ASSETS / name
    assert (folder / "model.safetensors").stat().st_size <= 32_000_000
    record = json.loads((folder / "training.json").read_text())
    tokenizer = file_sha256(folder / "tokenizer.json")
    assert record["settings"]["tokenizer_sha256"] == tokenizer
    assert tokenizer == file_sha256(SHIPPED / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    assert config == {"tiny-target": tiny_target.CONFIG, "tiny-hybrid": tiny_target.HYBRID}[name]
    check_weights(folder / "model.safetensors", config)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (
        model.dtype == torch.bfloat16
        and not report["missing_keys"]
        and not report["unexpected_keys"]
    )
    for file in folder.iterdir():
        if file.suffix in (".json", ".md"):
            assert not any(
                place in file.read_text() for place in ("/work", "/tmp", "/root", "/home")
            ), file
