"""A relay in front of a real vLLM server: what it samples is what was asked and what was answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.vllm_server import VllmServer
from tests.inference.server.test_relay import relayed, streamed_lines

pytestmark = [pytest.mark.serve, pytest.mark.slow]

NEW = 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_samples_are_what_vllm_read_and_answered(
    server: VllmServer, tiny_target: Path, tmp_path: Path, chat: bool, stream: bool
) -> None:
    target = TargetModel.load(TargetConfig(str(tiny_target), device="cpu"))
    engine = Engine(target, None, DecodeConfig(shape="none", max_new_tokens=NEW))
    questions = [f"What is a {thing}?" for thing in ("list", "tuple", "queue", "thread")]
    with relayed(engine, server.address, tmp_path / "traffic") as relay:
        texts = [ask(relay.base, question, chat, stream) for question in questions]
        rows = relay.samples(len(questions))
    own = engine.generate(
        questions if chat else [target.tokenizer.encode(question) for question in questions]
    )
    assert [answer.text for answer in own] == texts
    for row, answer in zip(rows, own, strict=True):
        begin = row["prompt_length"]
        assert row["tokens"][:begin] == list(answer.completion.request.tokens)
        assert row["tokens"][begin:] == list(answer.completion.tokens)
        assert row["finish"] == answer.completion.finish and row["temperature"] == 0.0


def ask(base: str, question: str, chat: bool, stream: bool) -> str:
    """The text of a greedy answer, as a client reads it."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"model": "tiny", "max_tokens": NEW, "temperature": 0, "stream": stream}
    body |= {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    answer = httpx.post(base + path, json=body, timeout=120)
    parts = streamed_lines(answer.text) if stream else [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    name = "delta" if stream else "message"
    return "".join((one[name].get("content") or "") if chat else one["text"] for one in choices)
