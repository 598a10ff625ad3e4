"""Other people's loops on our prompts: the same texts, honest clocks, and a drafter that
transformers and vLLM can load.
"""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.distilled import Config as DistilledConfig
from heads.medusa import Config as MedusaConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.structured.constraint import Constraint
from inference.measure.baselines import BaselinesConfig, make_peers, write_llama
from inference.measure.config import BenchConfig
from inference.measure.prompts import Prompt, to_requests
from inference.measure.run import measure
from inference.report.model import read_report
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import save_random_target

DECODE = DecodeConfig(depth=3, max_new_tokens=24)
TRANSFORMERS = ("generate", "assisted", "assisted_constant", "prompt_lookup")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = save_random_target(tmp_path_factory.mktemp("target"), tiny_tokenizer("marked"))
    return TargetModel.load(TargetConfig(str(folder), device="cpu"))


def distilled(target: TargetModel, **config: Any) -> Any:
    return new_drafter("distilled", DistilledConfig(**config), target.info, target.weights, seed=2)


@pytest.fixture(scope="module")
def arms(target: TargetModel) -> list[Arm]:
    medusa = new_drafter("medusa", MedusaConfig(num_heads=3), target.info, target.weights, seed=0)
    return [
        Arm("medusa", medusa, DECODE),
        Arm("small", distilled(target, from_target_layers=(0, 1)), DECODE),
    ]


def prompts() -> list[Prompt]:
    texts = [
        "def add(a, b):",
        "What is a list?",
        "Hello!",
        "Write a function that adds two numbers.",
    ]
    return [
        Prompt(f"p{n}", "x", messages=({"role": "user", "content": t},))
        for n, t in enumerate(texts)
    ]


def test_every_loop_gives_our_text_and_accounts_for_every_token(
    target: TargetModel, arms: list[Arm]
) -> None:
    peers = make_peers(BaselinesConfig(transformers=TRANSFORMERS, lookup_tokens=4), target, arms)
    assert [peer.name for peer in peers] == [f"transformers_{mode}" for mode in TRANSFORMERS]
    assert peers[1].options["assistant_model"] is peers[2].options["assistant_model"]  # loaded once
    several = dict.fromkeys(TRANSFORMERS, False)
    for request in to_requests(prompts(), target.tokenizer, DECODE):
        ours = next(iter(Engine(target, None, DECODE).run([request]))).tokens
        for mode, peer in zip(TRANSFORMERS, peers, strict=True):
            tokens, passes, seconds = peer.answer(request)
            steps = [committed for _, committed, _ in passes]
            assert tokens == ours, mode
            first = len(tokens) - sum(steps)  # tokens of the step that ends prefill
            assert 1 <= first <= 21
            assert first == 1 or mode != "generate"
            assert seconds["prefill"] > 0 < seconds["other"]
            several[mode] = several[mode] or max(steps) > 1
    assert not several["generate"] and several["assisted"] and several["assisted_constant"]


@pytest.mark.parametrize(
    "config",
    [
        {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"num_layers": 1, "tie_embeddings": True},
        {"num_layers": 1, "share_embeddings": True},
        {"from_target_layers": (0, 2)},
        {"num_layers": 2, "qk_norm": True},
        {"num_layers": 2, "attention_bias": True},
        {"num_layers": 2, "rope_theta": 500.0, "rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    ],
    ids=["small", "tied", "shared", "layers", "norms", "biases", "scaled"],
)
def test_a_distilled_drafter_is_the_llama_that_transformers_loads(
    target: TargetModel, config: dict[str, Any], tmp_path: Path
) -> None:
    drafter = distilled(target, **config)
    with torch.no_grad():  # fresh norms are one and fresh biases zero
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias") or "_norm" in name:
                parameter += torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(3)
                )
    model = AutoModelForCausalLM.from_pretrained(write_llama(drafter, target, tmp_path))
    text = torch.tensor([target.tokenizer("What is a list? def add").input_ids])
    length = text.shape[1]
    tree, place = TokenTree.chain(4), torch.arange(length - 1)[None]
    valid = torch.ones(1, length - 1, dtype=torch.bool)
    state = drafter.start(TargetStates(text[:, :-1], text[:, 1:], place, valid), tree, length + 8)
    noise = SharedNoise(
        SamplingSettings(), torch.zeros(1, dtype=torch.int64), target.info.vocab_size
    )
    ours = drafter.propose(state, noise).tokens[0, 1:].tolist()
    theirs = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert theirs[0, length:].tolist() == ours


def test_a_measurement_with_baselines_reports_them(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    config = BenchConfig(
        prompts_per_domain=3,
        repeats=2,
        retries=0,
        warmup_prompts=1,
        baselines=BaselinesConfig(transformers=("generate", "assisted"), assistant="small"),
    )
    measure(config, target, arms, prompts(), tmp_path, console=Console(quiet=True))
    report = read_report(tmp_path).to_dict()
    block = report["baselines"]
    assert set(block) == {
        "baseline",
        "medusa",
        "small",
        "transformers_generate",
        "transformers_assisted",
    }
    for numbers in block.values():
        assert (numbers["sequences"], numbers["identical"], numbers["interleaved"]) == (6, 6, True)
        low, high = numbers["tokens_per_second_ci95"]
        assert low <= numbers["tokens_per_second"] <= high
        assert numbers["end_to_end_tokens_per_second"] < 1.2 * numbers["tokens_per_second"]
    assert (block["baseline"]["ratio"], block["baseline"]["ratio_ci95"]) == (1.0, [1.0, 1.0])
    assert block["baseline"]["tokens_per_second"] == report["baseline"]["tokens_per_second"]
    assert block["transformers_generate"]["tau"] == 1.0 < block["transformers_assisted"]["tau"]
    assert block["small"]["tau"] == next(
        e["tau"] for e in report["drafters"] if e["draft"]["name"] == "small"
    )
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 6 * 5  # peers are on record too, so an interruption loses nothing


def test_what_cannot_be_compared_is_refused(target: TargetModel, arms: list[Arm]) -> None:
    wanted = BaselinesConfig(transformers=("assisted",))
    with pytest.raises(
        UserError, match=r"drafter of kind distilled; asked for: 'any', measured and able: none"
    ):
        make_peers(wanted, target, arms[:1])
    with pytest.raises(UserError, match="asked for: 'big', measured and able: small"):
        make_peers(replace(wanted, assistant="big"), target, arms)
    warm = replace(arms[0], decode=replace(DECODE, temperature=1.0))
    with pytest.raises(UserError, match=r"need decode\.temperature=0; given: 1\.0"):
        make_peers(wanted, target, [warm])
    with pytest.raises(
        UserError, match=r"bench\.baselines\.transformers\[\d\] 'asisted' is unknown"
    ):
        BaselinesConfig(transformers=("asisted",))
    with pytest.raises(UserError, match=r"bench\.baselines\.lookup_tokens must lie in \[1, 1024\]"):
        BaselinesConfig(lookup_tokens=0)


def test_the_sampling_settings_in_a_targets_files_are_not_used(
    arms: list[Arm], tmp_path: Path
) -> None:
    folder = save_random_target(tmp_path / "own", tiny_tokenizer("marked"))
    settings = folder / "generation_config.json"
    own = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps({**own, "repetition_penalty": 3.0, "suppress_tokens": [5, 6]}))
    target = TargetModel.load(TargetConfig(str(folder), device="cpu"))
    (peer,) = make_peers(BaselinesConfig(transformers=("generate",)), target, arms)
    for request in to_requests(prompts(), target.tokenizer, DECODE):
        assert peer.answer(request)[0] == next(Engine(target, None, DECODE).run([request])).tokens


@pytest.mark.parametrize("wanted", [{"transformers": ("generate",)}, {"vllm_python": "python"}])
def test_settings_that_other_loops_do_not_take_are_refused(
    target: TargetModel, arms: list[Arm], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BaselinesConfig(**wanted)
    for name, value in (("repetition_penalty", 1.2), ("logit_bias", ((5, 1.0),))):
        arm = replace(arms[0], decode=replace(DECODE, **{name: value}))
        with pytest.raises(UserError, match=f"do not take decode.{name}, and"):
            make_peers(config, target, [arm])
    follows = Request(0, (5,), 1, 4, constraint=Constraint("regex", "a"))
    with pytest.raises(UserError, match="do not take json_schema of prompts, and"):
        make_peers(config, target, arms, [follows])
    monkeypatch.setattr(target, "loading", {"quantization": "bnb-4bit"})
    with pytest.raises(UserError, match=r"do not take target\.quantization, and"):
        make_peers(config, target, arms)


# VLLM: the adapter, against a package that answers as vLLM does

STAND_IN = '''
"""Answers like vLLM: reads the request's prompts, gives known texts, keeps counters."""
import json, os
from types import SimpleNamespace as Made

ANSWERS = {tuple(k): v for k, v in json.load(open(os.environ["STAND_IN_ANSWERS"]))}


class SamplingParams:
    def __init__(self, temperature, max_tokens, detokenize, output_kind):
        assert temperature == 0.0 and output_kind == "deltas"
        self.longest = max_tokens


class LLM:
    def __init__(self, **settings):
        assert "TRITON_INTERPRET" not in os.environ, "it would interpret its own kernels"
        self.settings, self.drafts, self.running = settings, 0, {}
        self.llm_engine = self
        spec = settings["speculative_config"]
        if spec and spec["method"] == "draft_model":
            from pathlib import Path
            assert (Path(spec["model"]) / "model.safetensors").is_file()
            assert (Path(spec["model"]) / "tokenizer.json").is_file()
            if spec["num_speculative_tokens"] > 8:
                raise RuntimeError("too many tokens for this engine")

    def add_request(self, name, prompt, sampling):
        assert len(self.running) < self.settings["max_num_seqs"]
        tokens = ANSWERS.get(tuple(prompt["prompt_token_ids"]), [7, 7])[:sampling.longest]
        self.running[name] = [tokens[:1], tokens[1:]] if tokens[1:] else [tokens]

    def step(self):
        stats = Made(first_token_ts=10.0, last_token_ts=10.0 + 0.5)
        found = []
        for name, left in list(self.running.items()):
            new = left.pop(0)
            if not left:
                del self.running[name]
                self.drafts += 2
            found.append(Made(request_id=name, outputs=[Made(token_ids=new)], finished=not left, metrics=stats))
        return found

    def get_metrics(self):
        if not self.settings["speculative_config"]:
            return []
        name = "vllm:spec_decode_num_"
        pairs = {"drafts": 1, "draft_tokens": 4, "accepted_tokens": 3}
        return [Made(name=name + key, value=factor * self.drafts) for key, factor in pairs.items()]
'''


@pytest.fixture
def stand_in(target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python in whose environment `vllm` is the stand-in above; knows the plain answers."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    kinds = "class RequestOutputKind:\n    DELTA = 'deltas'\n"
    (package / "sampling_params.py").write_text(kinds, encoding="utf-8")
    info = tmp_path / "site" / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n", encoding="utf-8"
    )
    requests: list[Request] = to_requests(prompts(), target.tokenizer, DECODE)
    found = [[list(c.request.tokens), c.tokens] for c in Engine(target, None, DECODE).run(requests)]
    found[-1][1] = [*found[-1][1][:-1], 0]  # one answer differs in its last token
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setenv("STAND_IN_ANSWERS", str(answers))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nPYTHONPATH='{tmp_path / 'site'}' exec '{sys.executable}' \"$@\"\n",
        encoding="utf-8",
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def test_vllm_is_measured_in_its_own_process(
    target: TargetModel, arms: list[Arm], stand_in: str, tmp_path: Path
) -> None:
    baselines = BaselinesConfig(vllm_python=stand_in)
    config = BenchConfig(
        prompts_per_domain=4, repeats=2, retries=0, warmup_prompts=1, baselines=baselines
    )
    measure(config, target, arms, prompts(), tmp_path / "out", console=Console(quiet=True))
    block = read_report(tmp_path / "out").to_dict()["baselines"]
    assert {"vllm_plain", "vllm_ngram", "vllm_draft_model", "baseline", "medusa", "small"} == set(
        block
    )
    ours = [
        r
        for r in (tmp_path / "out" / "records.jsonl").read_text().splitlines()
        if '"baseline"' in r
    ]
    decoded = sum(len(json.loads(line)["tokens"]) - 1 for line in ours)
    measured = [json.loads(line)["prompt"] for line in ours]
    for name in ("vllm_plain", "vllm_ngram", "vllm_draft_model"):
        numbers = block[name]
        assert (numbers["version"], numbers["interleaved"], numbers["sequences"]) == (
            "9.9",
            False,
            6,
        )
        assert numbers["tokens_per_second"] == pytest.approx(decoded / (6 * 0.5))
        assert numbers["tau"] == (1.0 if name == "vllm_plain" else 4.0)
        assert numbers["ratio"] == pytest.approx(
            numbers["tokens_per_second"] / block["baseline"]["tokens_per_second"]
        )
        assert numbers["identical"] == 6 - measured.count("p3")


def test_vllms_failures_are_quoted(
    target: TargetModel,
    arms: list[Arm],
    stand_in: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def run(baselines: BaselinesConfig, decode: DecodeConfig = DECODE) -> None:
        config = BenchConfig(
            prompts_per_domain=2, repeats=1, compare_noise=False, baselines=baselines
        )
        contestants = [replace(arm, decode=decode) for arm in arms]
        measure(
            config, target, contestants, prompts(), tmp_path / "out", console=Console(quiet=True)
        )

    with pytest.raises(
        UserError, match=r"vLLM \(draft_model\) failed: .*too many tokens for this engine"
    ):
        run(BaselinesConfig(vllm_python=stand_in, vllm=("draft_model",), vllm_drafted=9))
    with pytest.raises(UserError, match=r"vllm_python '.*no-python' cannot be run"):
        run(BaselinesConfig(vllm_python=str(tmp_path / "no-python"), vllm=("plain",)))
    with pytest.raises(UserError, match=r"vllm_python is compared token by token"):
        run(BaselinesConfig(vllm_python=stand_in), replace(DECODE, temperature=1.0))
