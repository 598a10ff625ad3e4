"""Asking a real server from several clients: what is left is asked, and what fails is counted."""

from __future__ import annotations

from pathlib import Path

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from scripts.evidence.served import Ask, ask_all, read_answers
from scripts.tools.common import cpu_target
from tests.inference.server.running import MODEL, serving
from tests.inference.tokenizers import save_micro_target


def test_a_server_is_asked_for_what_is_left(tmp_path: Path) -> None:
    target = cpu_target(save_micro_target(tmp_path / "target"))
    asked = [Ask(n, (10 + n, 17, 12), 8, store=n % 2 == 0) for n in range(7)]
    asked.append(Ask(7, tuple(range(10, 200)), 8, store=True))  # longer than the target's positions
    out = tmp_path / "answers.jsonl"
    decode = DecodeConfig(batch_size=2, max_new_tokens=16, temperature=0.0)
    with serving(Engine(target, None, decode)) as running:
        ask_all(f"{running.base}/v1", MODEL, asked[:3], clients=2, seconds=0.1, out=out)
        with out.open("a") as file:
            file.write('{"number": 3, "at"')  # as a kill leaves it
        assert [one.number for one in read_answers(out)] == [0, 1, 2]
        ask_all(f"{running.base}/v1", MODEL, asked[3:], clients=3, seconds=0.0, out=out)
    found = read_answers(out)
    assert [one.number for one in found] == list(range(8))
    assert "400" in found[7].failure and not any(one.failure for one in found[:7])
    plain = Engine(target, None, decode).generate([ask.prompt for ask in asked[:7]])
    for one, answer in zip(found, plain, strict=False):
        assert one.tokens == tuple(answer.completion.tokens)[:8] and one.at > 0
