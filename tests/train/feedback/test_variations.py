"""Variations: prompts of the embedded target's own, in its chat template, begun as given ones and
never given ones again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.manifest import write_manifest
from inference.target.chat import render_prompt
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import save_micro_target
from train.data.answers import PartWriter, StoredAnswer, merge_parts
from train.feedback.config import FeedbackConfig
from train.feedback.variations import Frame, write_variations

ROOT = Path(__file__).resolve().parents[3]
TEXTS = (
    "Tell me about assignment in Python.",
    "Implement `add`.\n\ndef add(a, b):",
    'What does the documentation of stdlib say about "the module cgi"?',
)
CONFIG = FeedbackConfig(variations=4, variation_tokens=40, variation_begin=3)


@cache
def target() -> TargetModel:
    return TargetModel.load(
        TargetConfig(path=str(ROOT / "assets" / "tiny-target"), dtype="float32", device="cpu")
    )


def answered(folder: Path, model: TargetModel, prompts: list[list[int]]) -> Path:
    """Two tokens of an answer to each prompt, as `headstart generate` leaves them."""
    with PartWriter(folder, 100, 1000) as writer:
        for number, prompt in enumerate(prompts):
            tokens = (*prompt, 7, 8)
            writer.add(
                StoredAnswer(
                    f"row-{number}",
                    number,
                    f"domain-{number}",
                    tokens,
                    ((len(prompt), len(tokens)),),
                    "length",
                    1,
                )
            )
    merged = merge_parts(folder, len(prompts), shard_rows=10)
    facts = {
        "round": 0,
        "target": model.info.to_dict(),
        "sampling": {},
        "data": {},
        "counts": {},
        "shards": merged.shards,
    }
    write_manifest(folder, "generate", facts)
    return folder


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    prompts = [
        render_prompt(target().tokenizer, [{"role": "user", "content": text}]) for text in TEXTS
    ]
    return answered(tmp_path / "generate", target(), prompts)


def written(answers: Path, out: Path, seed: int = 5, **more: Any) -> list[dict[str, Any]]:
    count = write_variations(target(), [(answers, answers / "records")], out, CONFIG, seed, **more)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert count == len(lines)
    return lines


def test_a_prompt_is_taken_apart_as_the_template_put_it_together() -> None:
    tokenizer = target().tokenizer
    frame = Frame.of(tokenizer)
    for text in TEXTS:
        prompt = render_prompt(tokenizer, [{"role": "user", "content": text}])
        assert tokenizer.decode(frame.text_of(prompt)) == text
        assert [*frame.head, *frame.text_of(prompt), *frame.tail] == prompt
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert frame.text_of(render_prompt(tokenizer, turns)) == []
    assert frame.text_of([5, 6, 7]) == []


def test_the_target_writes_prompts_that_begin_like_given_ones(
    answers: Path, tmp_path: Path
) -> None:
    found = written(answers, tmp_path / "out")
    frame, tokenizer = Frame.of(target().tokenizer), target().tokenizer
    given = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert 3 <= len(found) <= 12 and len({tuple(item["tokens"]) for item in found}) == len(found)
    for item in found:
        text = frame.text_of(item["tokens"])
        source = given[int(item["domain"].removeprefix("domain-"))]
        assert text and text != source and text[0] == source[0]
        assert (
            render_prompt(tokenizer, [{"role": "user", "content": tokenizer.decode(text)}])
            == item["tokens"]
        )


@pytest.mark.slow
def test_each_is_what_the_target_writes_alone(answers: Path, tmp_path: Path) -> None:
    """Batched as here, and one at a time with the same seed, from the same begin."""
    import random

    found, frame = written(answers, tmp_path / "out"), Frame.of(target().tokenizer)
    texts = [
        frame.text_of(render_prompt(target().tokenizer, [{"role": "user", "content": text}]))
        for text in TEXTS
    ]
    draw, alone = random.Random("variations 5"), {}
    chosen = draw.choices(range(3), [1.0, 1.0, 1.0], k=12)
    for number, place in enumerate(chosen):
        start = (*frame.head, *texts[place][: draw.randint(1, 3)])
        decode = DecodeConfig(shape="none", temperature=0.8, batch_size=1, max_new_tokens=40)
        done = next(
            iter(Engine(target(), None, decode).run([Request(0, start, draw.getrandbits(63), 40)]))
        )
        if done.finish == "stop":
            text = target().tokenizer.decode([*start[len(frame.head) :], *done.tokens[:-1]])
            alone[f"variation-5-{number}"] = render_prompt(
                target().tokenizer, [{"role": "user", "content": text}]
            )
    assert {item["id"]: item["tokens"] for item in found}.items() <= alone.items()
    repeated = len(alone) - len({tuple(tokens) for tokens in alone.values()})
    assert len(found) >= len(alone) - repeated - len(TEXTS)


def test_the_same_seed_writes_the_same_and_known_ones_are_not_written_again(
    answers: Path, tmp_path: Path
) -> None:
    first, again = written(answers, tmp_path / "first"), written(answers, tmp_path / "again")
    assert first == again
    assert written(answers, tmp_path / "later", known=[tmp_path / "first"]) == []
    other = written(answers, tmp_path / "other", seed=6)
    assert {tuple(item["tokens"]) for item in other} != {tuple(item["tokens"]) for item in first}


class InterruptedRunError(Exception):
    """A kill, after some texts."""


def interrupt(answers: Path, out: Path, seed: int = 5) -> set[int]:
    """Begin to write variations, and end after five texts; returns their numbers."""
    real = Engine.run

    def until_the_sixth(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
        for number, done in enumerate(real(engine, requests)):
            if number == 5:
                raise InterruptedRunError
            yield done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", until_the_sixth)
        with pytest.raises(InterruptedRunError):
            written(answers, out, seed)
    assert not out.exists()
    lines = out.with_suffix(".partial.jsonl").read_text().splitlines()[1:]
    return {json.loads(line)["number"] for line in lines}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the texts that the target is asked for."""
    real, found = Engine.run, list[int]()

    def counted(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
        found.extend(one.index for one in requests)
        return real(engine, requests)

    monkeypatch.setattr(Engine, "run", counted)
    return found


def test_an_interrupted_command_continues(
    answers: Path, tmp_path: Path, asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text is kept as soon as it is complete; the result is that of a command left alone."""
    whole = written(answers, tmp_path / "whole.jsonl")
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.partial.jsonl"
    kept = interrupt(answers, out)
    assert len(kept) == 5
    with partial.open("a", encoding="utf-8") as file:
        file.write('{"number": 0, "tok')  # killed in the middle of a line
    asked.clear()
    capsys.readouterr()
    assert written(answers, out) == whole
    assert sorted([*asked, *kept]) == [*range(12)]
    assert "12/12" in capsys.readouterr().out  # the progress counts what was kept
    assert not partial.exists()


def test_texts_of_another_command_are_not_taken(
    answers: Path, tmp_path: Path, asked: list[int]
) -> None:
    out = tmp_path / "out.jsonl"
    interrupt(answers, out, seed=6)
    asked.clear()
    assert written(answers, out) == written(answers, tmp_path / "alone.jsonl")
    assert sorted(asked) == sorted([*range(12)] * 2)


def test_a_changed_file_of_unfinished_texts_is_refused(answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    interrupt(answers, out)
    partial = out.with_suffix(".partial.jsonl")
    partial.write_text(partial.read_text().replace('"finish"', '"end"'))
    with pytest.raises(UserError, match=r"'.*out.partial.jsonl' is damaged.*Delete the file"):
        written(answers, out)


def test_without_a_single_users_text_it_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = answered(tmp_path / "generate", target(), [[5, 6, 7]])
    assert written(answers, tmp_path / "out") == []
    assert "none of the prompts is a single user's text" in caplog.text


def test_without_a_template_it_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = TargetModel.load(
        TargetConfig(path=str(save_micro_target(tmp_path / "target", "plain")), device="cpu")
    )
    prompt = render_prompt(model.tokenizer, [{"role": "user", "content": "Write a b and c."}])
    folder = answered(tmp_path / "generate", model, [prompt])
    assert write_variations(model, [(folder, folder / "records")], tmp_path / "out", CONFIG, 0) == 0
    assert "the target writes no variations" in caplog.text and (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"variations": -1},
        {"variation_begin": 0},
        {"variation_tokens": 0},
        {"variation_temperature": 0.0},
    ],
)
def test_settings_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"feedback\.{next(iter(wrong))} must "):
        FeedbackConfig(**wrong)
