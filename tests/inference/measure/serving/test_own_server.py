"""`headstart serve` measured from outside: what its responses and its counters say is what its
engine did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.decoding.structured.constraint import Constraint
from inference.measure.config import BenchConfig, split_prompts
from inference.measure.datasets import Loaded
from inference.measure.prompts import Prompt, to_requests
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.run import measure_server
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.server.running import serving
from tests.inference.tokenizers import save_micro_target

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOKEN = "a-token-for-the-tests"
WORDS = ("add", "two", "numbers", "list", "items", "function", "hello", "bye")


@pytest.mark.parametrize("source", ["responses", "counters"])
def test_the_measurement_is_what_the_engine_did(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_SERVER_KEY", TOKEN)
    folder = save_micro_target(tmp_path / "micro")
    target = TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))
    kind = get_kind("distilled")
    config = kind.config_class(from_target_layers=(0, 1))
    drafter = new_drafter("distilled", config, target.info, target.weights, 0)
    decode = DecodeConfig(batch_size=2, depth=3, max_new_tokens=20)
    prompts = [
        Prompt(f"p{number}", "ab"[number % 2], messages=({"role": "user", "content": word},))
        for number, word in enumerate(WORDS)
    ]
    bench = BenchConfig(prompts="words", prompts_per_domain=3, warmup_prompts=1, repeats=1)
    settings = ServingConfig(acceptance=source, concurrency=(1, 2))  # type: ignore[arg-type]
    texts: dict[str, str] = {}
    with (
        serving(Engine(target, drafter, decode), token=TOKEN) as running,
        serving(Engine(target, None, DecodeConfig(batch_size=2)), token=TOKEN) as plain,
    ):
        asked = replace(
            bench, server=running.base, baseline_server=f"{plain.base}/v1", serving=settings
        )
        loaded = Loaded(prompts, "words", "")
        report = measure_server(asked, decode, loaded, tmp_path / "out", texts=texts)
    assert report.server is not None and report.server.lengths == "tokenizer"
    chosen, _ = split_prompts(bench, prompts)
    engine = Engine(target, drafter, replace(decode, batch_size=1))
    done = list(engine.run(to_requests(chosen, target.tokenizer, decode)))
    passes = sum(len(one.passes) for one in done)
    committed = sum(item.committed for one in done for item in one.passes)
    for cell in report.server.speculative.overall():
        assert cell.passes == passes
        assert cell.tau == pytest.approx(committed / passes)
        assert cell.tokens == committed + len(done)
        assert cell.identical == len(done) == cell.requests
    for one in done:
        kept = [token for token in one.tokens if token not in target.eos_token_ids]
        text = target.tokenizer.decode(kept, skip_special_tokens=True)
        assert texts[chosen[one.request.index].id] == text


def test_schemas_hold_and_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    folder = save_micro_target(tmp_path / "micro", positions=96)
    target = TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))
    drafter = load_drafter("ngram", target)
    decode = DecodeConfig(batch_size=2, depth=2, max_new_tokens=24)
    rows = [("a", "add"), ("b", "list"), ("long", "add two numbers " * 40), ("warm", "bye")]
    schema = Constraint.schema(SCHEMA)
    prompts = [
        Prompt(name, "own", messages=({"role": "user", "content": text},), constraint=schema)
        for name, text in rows
    ]
    texts: dict[str, str] = {}
    with serving(Engine(target, drafter, decode)) as running:
        for api in ("chat", "completions"):
            bench = BenchConfig(
                prompts="own",
                prompts_per_domain=4,
                repeats=1,
                server=running.base,
                serving=ServingConfig(api=api),  # type: ignore[arg-type]
            )
            report = measure_server(
                *(bench, decode, Loaded(prompts, "own", ""), tmp_path / api),
                tokenizer=target.tokenizer,
                texts=texts,
            )
            assert report.run.prompts["overlong"] == ["long"]
            assert set(texts) == {"a", "b"} and report.settings.prompts == 2
            for text in texts.values():
                assert set(json.loads(text)) == {"a"}
            texts.clear()
