"""Log-probabilities of answers and prompts are those of transformers' own forward pass over the whole
text, whatever drafted it; and end of text is held back for as long as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.decoding import logprobs
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.logprobs import MOST_TOP, Logprobs, TokenLogprobs
from inference.decoding.requests import Completion, Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.session import Session
from inference.decoding.structured.constraint import Constraint
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import save_micro_target

SHAPES: dict[str, dict[str, Any]] = {
    "none": {"shape": "none"},
    "chain": {"depth": 3},
    "dynamic": {"shape": "dynamic", "nodes": 8, "depth": 3, "width": 3},
}
SETTINGS = {
    "greedy": SamplingSettings(),
    "sampled": SamplingSettings(temperature=1.3, top_p=0.9, top_k=30),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def engine(target: TargetModel, shape: str, **changes: Any) -> Engine:
    drafter = None
    if shape != "none":
        config = get_kind("eagle3").config_class()
        drafter = new_drafter("eagle3", config, target.info, target.weights, 0)
    return Engine(target, drafter, DecodeConfig(batch_size=3, **SHAPES[shape], **changes))


def run(engine: Engine, requests: list[Request]) -> list[Completion]:
    """All requests in one session, by their index."""
    found = {}
    with Session(engine, 100) as session:
        for request in requests:
            session.add(request)
        while session.unfinished:
            found |= {item.request.index: item for item in session.step()}
    return [found[request.index] for request in requests]


def check(found: list[TokenLogprobs], logs: torch.Tensor, tokens: list[int], most: int) -> None:
    """Against logs [P, V], the log-softmax in the place of every token [P]."""
    assert [item.token for item in found] == tokens
    for item, row in zip(found, logs, strict=True):
        assert item.logprob == pytest.approx(float(row[item.token]), abs=1e-5)
        best = row.topk(most)
        assert [token for token, _ in item.top] == best.indices.tolist()
        assert [value for _, value in item.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def check_completion(completion: Completion, reference: Any, most: int) -> None:
    request = completion.request
    assert request.logprobs is not None
    text = [*request.tokens, *completion.tokens]
    with torch.no_grad():
        logs = reference(torch.tensor([text])).logits[0].log_softmax(-1)
    begin = len(request.tokens)
    check(request.logprobs.answer, logs[begin - 1 : -1], completion.tokens, most)
    if request.logprobs.of_prompt:
        check(request.logprobs.prompt, logs[: begin - 1], list(request.tokens[1:]), most)
    else:
        assert not request.logprobs.prompt


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_of_a_forward_pass_over_the_text(
    target: TargetModel, reference: Any, shape: str, settings: str
) -> None:
    """Four requests in three rows, beside some that ask for none or for other numbers."""
    asked = [Logprobs(0), Logprobs(MOST_TOP, of_prompt=True), None, Logprobs(3, of_prompt=True)]
    prompts = [(5, 6, 7), (9, 3, 1, 4, 8, 30, 31), (2,), (11,)]
    limits = [14, 9, 20, 1]
    requests = [
        Request(i, tokens, 7 + i, limit, SETTINGS[settings], logprobs=wanted)
        for i, (tokens, limit, wanted) in enumerate(zip(prompts, limits, asked, strict=True))
    ]
    completions = run(engine(target, shape), requests)
    without = run(engine(target, shape), [Request(9, (2,), 9, 20, SETTINGS[settings])])
    assert completions[2].tokens == without[0].tokens
    for completion, wanted in zip(completions, asked, strict=True):
        if wanted is not None:
            check_completion(completion, reference, wanted.most)


def test_processors_and_grammars_do_not_change_them(target: TargetModel, reference: Any) -> None:
    changes = {"repetition_penalty": 1.7, "logit_bias": ((5, 9.0),)}
    both = engine(target, "chain", **changes)
    asked = Request(0, (5, 6, 7), 1, 12, both.decode.sampling(), logprobs=Logprobs(2))
    check_completion(*run(both, [asked]), reference, 2)
    follows = Constraint("regex", "[ab]{6}")
    asked = Request(0, (5, 6, 7), 1, 12, None, constraint=follows, logprobs=Logprobs(2))
    check_completion(*run(engine(target, "dynamic"), [asked]), reference, 2)


def test_a_long_prompt_is_scored_in_pieces(
    target: TargetModel, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "PROMPT_PLACES", 16)
    tokens = tuple(3 + 7 * i % 40 for i in range(83))
    asked = Request(0, tokens, 1, 2, logprobs=Logprobs(1, of_prompt=True))
    (completion,) = run(engine(target, "chain", prefill_chunk=20), [asked])
    check_completion(completion, reference, 1)


def test_they_come_with_details_of_passes_and_outside_of_sessions(
    target: TargetModel, reference: Any
) -> None:
    both = Engine(target, engine(target, "chain").drafter, DecodeConfig(depth=3), details=True)
    (completion,) = both.run([Request(0, (5, 6, 7), 1, 12, logprobs=Logprobs(4))])
    check_completion(completion, reference, 4)
    for record in completion.passes:
        assert record.details is not None and len(record.details.drafted) == 3


@pytest.mark.slow
def test_compiled_steps_give_them(target: TargetModel, reference: Any) -> None:
    both = engine(target, "chain", compile=True)
    requests = [Request(0, (5, 6, 7), 1, 12, logprobs=Logprobs(4)), Request(1, (5, 6), 1, 9)]
    check_completion(run(both, requests)[0], reference, 4)


# End of text held back


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_end_of_text_is_held_back(target: TargetModel, shape: str, settings: str) -> None:
    """The text is that of a target which cannot end before that: with a drafter and without, beside
    requests that end when they want."""
    plain = run(engine(target, "none"), [Request(0, (5, 6, 7), 3, 30, SETTINGS[settings])])
    written = plain[0].tokens
    ends = (written[0], written[5])
    before = target.eos_token_ids
    target.eos_token_ids = ends
    try:
        both = engine(target, shape)
        requests = [
            Request(i, (5, 6, 7), 3, 30, SETTINGS[settings], min_tokens=least)
            for i, least in enumerate((0, 1, 8, 30))
        ]
        found = run(both, requests)
        if both.drafter is not None and settings == "greedy":
            slow = run(engine(target, "none"), requests)
            assert [item.tokens for item in found] == [item.tokens for item in slow]
    finally:
        target.eos_token_ids = before
    assert found[0].tokens == written[:1] and found[0].finish == "stop"
    for item in found[1:]:
        least = item.request.min_tokens
        assert not {*item.tokens[:least]} & {*ends}
        assert len(item.tokens) > least or item.finish == "length"
        assert item.finish == ("stop" if item.tokens[-1] in ends else "length")


def test_held_back_end_of_text_is_forbidden_and_nothing_else(
    target: TargetModel, reference: Any
) -> None:
    """Greedy tokens, one after the other, from transformers' logits without end of text."""
    first = run(engine(target, "none"), [Request(0, (5, 6, 7), 3, 1)])[0].tokens[0]
    before = target.eos_token_ids
    target.eos_token_ids = (first,)
    try:
        asked = Request(0, (5, 6, 7), 3, 9, min_tokens=9)
        (found,) = run(engine(target, "chain"), [asked])
    finally:
        target.eos_token_ids = before
    text = [5, 6, 7]
    for _ in range(9):
        logits = reference(torch.tensor([text])).logits[0, -1].clone()
        logits[first] = float("-inf")
        text.append(int(logits.argmax()))
    assert found.tokens == text[3:] and found.finish == "length"
