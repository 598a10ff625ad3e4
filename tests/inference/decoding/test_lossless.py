"""The first invariant: decoding with any drafter gives the very tokens of decoding without one."""

from __future__ import annotations

import pytest
import torch

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, AlwaysWrong, Fake, RandomTokens, SometimesRight
from tests.models import FAMILIES, VOCAB, plain_texts, random_model, random_target

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0))
SHAPES = {"chain": {"shape": "chain", "depth": 4}, "tree": {"shape": "tree", "choices": TREE}}


def prompts(count: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
        for length in (11, 1, 6, 14, 3)[:count]
    ]


def requests(count: int = 3, new: int = 24) -> list[Request]:
    return [
        Request(i, prompt, seed=(i + 1) * 0x1234567_89AB, max_new_tokens=new)
        for i, prompt in enumerate(prompts(count))
    ]


def decode(
    target: TargetModel, drafter: Fake | None, config: DecodeConfig, items: list[Request]
) -> dict[int, Completion]:
    return {c.request.index: c for c in Engine(target, drafter, config).run(items)}


def answers(plain: dict[int, Completion]) -> dict[tuple[int, ...], list[int]]:
    return {c.request.tokens: list(c.request.tokens) + c.tokens for c in plain.values()}


def whole(items: list[Request], plain: dict[int, list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> prompt and answer."""
    return {item.tokens: [*item.tokens, *plain[item.index]] for item in items}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_the_models_own_greedy_loop(family: str) -> None:
    model = random_model(family)
    expected = []
    for prompt in prompts():
        text = torch.tensor([prompt])
        for _ in range(24):
            logits = model(input_ids=text, use_cache=False).logits[0, -1]
            text = torch.cat([text, logits.argmax()[None, None]], 1)
        expected.append(text[0, len(prompt) :].tolist())
    found = decode(
        random_target(family), None, DecodeConfig(batch_size=2, max_new_tokens=24), requests()
    )
    for index, tokens in enumerate(expected):
        cut = tokens.index(2) + 1 if 2 in tokens else len(tokens)
        assert found[index].tokens == tokens[:cut]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_is_lossless_for_chains_and_trees_in_a_ragged_batch(
    family: str, shape: str
) -> None:
    target = random_target(family)
    items = requests(4)
    plain = plain_texts(items, family)
    for kind in (AlwaysRight, SometimesRight):
        config = DecodeConfig(batch_size=3, **SHAPES[shape])  # type: ignore[arg-type]
        found = decode(target, kind(whole(items, plain), VOCAB), config, items)
        assert {i: c.tokens for i, c in found.items()} == plain
    passes = sum(len(c.passes) for c in found.values())
    assert passes < sum(len(tokens) - 1 for tokens in plain.values())  # drafts were accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [AlwaysRight, AlwaysWrong, SometimesRight, RandomTokens])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_same_seed_same_text(
    temperature: float, drafter: type[Fake], shape: str, batch_size: int
) -> None:
    target = random_target()
    items = requests(5)
    shaping = {"temperature": temperature, "top_p": 0.95, "top_k": 40, "min_p": 0.001}
    plain = plain_texts(items, **shaping)
    config = DecodeConfig(batch_size=batch_size, **shaping, **SHAPES[shape])  # type: ignore[arg-type]
    found = decode(target, drafter(whole(items, plain), VOCAB), config, items)
    assert {i: c.tokens for i, c in found.items()} == plain


def test_another_seed_gives_another_text_and_the_batch_does_not_matter() -> None:
    target = random_target()
    config = DecodeConfig(temperature=1.0)
    one = decode(target, None, config, requests(3))
    batched = decode(target, None, DecodeConfig(temperature=1.0, batch_size=3), requests(3))
    other = decode(
        target,
        None,
        config,
        [Request(r.index, r.tokens, r.seed + 1, r.max_new_tokens) for r in requests(3)],
    )
    assert {i: c.tokens for i, c in one.items()} == {i: c.tokens for i, c in batched.items()}
    assert {i: c.tokens for i, c in one.items()} != {i: c.tokens for i, c in other.items()}


def test_pass_records_of_an_always_right_and_an_always_wrong_drafter() -> None:
    target = random_target()
    items = requests(1, new=21)
    plain = decode(target, None, DecodeConfig(), items)
    right = decode(target, AlwaysRight(answers(plain), VOCAB), DecodeConfig(depth=4), items)[0]
    wrong = decode(target, AlwaysWrong(answers(plain), VOCAB), DecodeConfig(depth=4), items)[0]
    assert [(p.accepted, p.committed, p.rejected) for p in right.passes] == [(4, 5, False)] * 4
    assert {(p.accepted, p.committed, p.rejected) for p in wrong.passes} == {(0, 1, True)}
    for completion in (right, wrong):
        assert len(completion.tokens) == 1 + sum(p.committed for p in completion.passes) == 21


def test_end_of_text_inside_an_accepted_path_cuts_the_answer_there() -> None:
    target = random_target()
    items = requests(2, new=30)
    plain = decode(target, None, DecodeConfig(), items)
    for index, end in ((0, plain[0].tokens[7]), (1, plain[1].tokens[4])):
        stopping = random_target()
        stopping.eos_token_ids = (end,)
        expected = plain[index].tokens[: plain[index].tokens.index(end) + 1]
        for shape in SHAPES.values():
            config = DecodeConfig(batch_size=2, **shape)  # type: ignore[arg-type]
            found = decode(stopping, AlwaysRight(answers(plain), VOCAB), config, items)[index]
            assert found.tokens == expected and found.finish == "stop"
            assert len(found.tokens) == 1 + sum(p.committed for p in found.passes)
            assert all(p.accepted <= p.committed for p in found.passes)
