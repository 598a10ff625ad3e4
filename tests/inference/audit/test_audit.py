"""The audit must excuse rounding, and nothing else: every other difference has to come out as a
mismatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from inference.audit import comparison
from inference.audit.comparison import AuditReport, Known, audit, flips_alone
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.structured.grammars import Grammars
from inference.decoding.structured.matcher import allows
from inference.target.loading import TargetConfig, describe, switch_attention
from inference.target.model import TargetModel
from tests.fakes import SometimesRight
from tests.inference.decoding.structured.parts import asked, structured_target
from tests.models import VOCAB, TokenIds, random_model, random_target

PROMPT = (5, 17, 40, 8, 63)
NEW = 16


def request(tokens: tuple[int, ...] = PROMPT, new: int = NEW) -> Request:
    return Request(0, tokens, seed=0x5EED, max_new_tokens=new)


def plain_answer(target: TargetModel, item: Request, temperature: float = 0.0) -> list[int]:
    config = DecodeConfig(shape="none", temperature=temperature)
    return next(iter(Engine(target, None, config).run([item]))).tokens


def endless_target(**options: Any) -> TargetModel:
    """A random target that never ends its answers, so that their length is known."""
    target = random_target(**options)
    target.eos_token_ids = ()
    return target


def check(
    target: TargetModel,
    plain: list[int],
    answer: list[int],
    sampling: SamplingSettings | None = None,
) -> AuditReport:
    return audit(target, [request()], [plain], [answer], sampling or SamplingSettings())


FAMILIES: dict[str, dict[str, Any]] = {
    "attention": {},
    "recurrent": {"family": "qwen3_5_text", "recurrent": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> TargetModel:
    return endless_target(**FAMILIES[request.param])


@pytest.fixture(scope="module", params=FAMILIES)
def tied(request: pytest.FixtureRequest) -> TargetModel:
    """A float32 target whose LM head gives every token and its neighbour (2k, 2k+1) the same
    logit."""
    model = random_model(**FAMILIES[request.param]).float()
    head = model.get_output_embeddings().weight.data
    head[1::2] = head[: VOCAB - 1 : 2]
    switch_attention(model)
    target = TargetModel(
        model, TokenIds(), describe(model, TokenIds(), TargetConfig(path="random/tied"))
    )
    target.eos_token_ids = ()
    return target


def test_identical_answers_need_no_explanation(target: TargetModel) -> None:
    answer = plain_answer(target, request())
    report = check(target, answer, list(answer))
    assert report.counts() == {"sequences": 1, "identical": 1, "near_ties": 0, "mismatches": 0}
    assert (report.tokens, report.flips, report.divergences) == (NEW, 0, [])


def test_answers_that_promise_no_equal_text_are_counted_without_a_pass_of_the_target(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_answer(target, request())
    other = [*plain[:3], (plain[3] + 1) % VOCAB, *plain[4:]]
    monkeypatch.setattr(target, "prefill", pytest.fail)
    items, answers = [request()] * 2, [list(plain), other]
    report = audit(target, items, [plain] * 2, answers, SamplingSettings(), examined=False)
    assert report.counts() == {"sequences": 2, "identical": 1, "near_ties": 0, "mismatches": 1}
    assert report.divergences == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 7, NEW - 1])
def test_a_wrong_token_is_a_mismatch_wherever_it_stands(
    target: TargetModel, place: int, temperature: float
) -> None:
    plain = plain_answer(target, request(), temperature)
    answer = [*plain[:place], (plain[place] + 1) % VOCAB, *plain[place + 1 :]]
    report = check(target, plain, answer, SamplingSettings(temperature=temperature))
    assert report.mismatches == 1
    found = report.divergences[0]
    assert (found.place, found.expected, found.found) == (place, plain[place], answer[place])
    assert found.margin > 1000 * found.tolerance > 0


def test_equal_scores_are_a_near_tie(tied: TargetModel) -> None:
    plain = plain_answer(tied, request())
    place = 6
    other = plain[place] ^ 1
    rest = plain_answer(tied, request((*PROMPT, *plain[:place], other), NEW - place - 1))
    report = check(tied, plain, [*plain[:place], other, *rest])
    assert (report.near_ties, report.mismatches, report.flips) == (1, 0, 1)
    assert report.divergences[0].margin == 0.0
    assert 0 < report.divergences[0].tolerance < 1e-3


@pytest.mark.parametrize("of_the_pair", [True, False])
def test_only_what_moves_the_two_tokens_margin_excuses_it(
    tied: TargetModel, monkeypatch: pytest.MonkeyPatch, of_the_pair: bool
) -> None:
    """A route that lies far from the others at one token excuses a decision between it and another
    token, and no other decision."""
    plain = plain_answer(tied, request())
    # far above the rounding of logits of about 3, which differs from CPU to CPU, and within the gap
    # that float32 explains
    place, moved, rounding = 6, 2e-4, 1e-5
    third = next(token for token in range(VOCAB) if token // 2 != plain[place] // 2)
    at_once = comparison._Replay._at_once
    verify = TargetModel.verify

    def one_lower(self: TargetModel, *given: Any, **more: Any) -> Any:
        # plain decoding prefers the token to its twin by a little
        logits, positions, seen = verify(self, *given, **more)
        logits[..., plain[place] ^ 1] -= moved / 2
        return logits, positions, seen

    def far(self: Any, place: int) -> torch.Tensor:
        logits = at_once(self, place)
        logits[plain[6] ^ 1] -= moved / 2
        logits[plain[6] ^ 1 if of_the_pair else third] += moved
        return logits

    monkeypatch.setattr(TargetModel, "verify", one_lower)
    monkeypatch.setattr(comparison._Replay, "_at_once", far)
    other = plain[place] ^ 1
    rest = plain_answer(tied, request((*PROMPT, *plain[:place], other), NEW - place - 1))
    report = check(tied, plain, [*plain[:place], other, *rest])
    first = report.found[0]
    assert first.margin == pytest.approx(moved / 2, abs=rounding)
    assert first.gap == pytest.approx(moved, abs=rounding)
    assert first.near_tie is of_the_pair


def test_flips_of_the_target_alone_are_those_between_its_passes(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [request(), request(PROMPT[:3])]
    plain = [plain_answer(target, item) for item in items]
    sampling = SamplingSettings()
    assert flips_alone(target, items, plain, sampling, 5) == (2 * NEW, 0)
    verify, several = TargetModel.verify, []

    def one_flip(self: TargetModel, cache: Any, tokens: Any, *rest: Any) -> Any:
        logits, positions, seen = verify(self, cache, tokens, *rest)
        several.append(tokens.shape[1])
        if len(several) == 2:
            best = logits[0, -1].argmax()
            logits[0, -1, best] = -100.0
        return logits, positions, seen

    monkeypatch.setattr(TargetModel, "verify", one_flip)
    assert flips_alone(target, items, plain, sampling, 5) == (2 * NEW, 1)
    assert several == [5, 5, 5] * 2


def test_a_wrong_token_behind_a_near_tie_is_still_a_mismatch(tied: TargetModel) -> None:
    plain = plain_answer(tied, request())
    place = 6
    other = plain[place] ^ 1
    rest = plain_answer(tied, request((*PROMPT, *plain[:place], other), NEW - place - 1))
    rest[3] = (rest[3] + 2) % VOCAB
    report = check(tied, plain, [*plain[:place], other, *rest])
    assert (report.near_ties, report.mismatches) == (0, 1)
    assert report.divergences[0].place == place + 4


def test_an_answer_that_ends_at_the_wrong_place_is_a_mismatch(target: TargetModel) -> None:
    plain = plain_answer(target, request())
    for answer in (plain[:-3], [*plain, 5], []):
        report = check(target, plain, answer)
        assert report.mismatches == 1
        assert "ended at the wrong place" in report.divergences[0].reason


def test_a_token_outside_the_filter_is_a_mismatch(target: TargetModel) -> None:
    sampling = SamplingSettings(temperature=1.0, top_k=1)
    plain = plain_answer(target, request())  # top-k 1 is greedy
    answer = [*plain[:-1], (plain[-1] + 1) % VOCAB]
    report = check(target, plain, answer, sampling)
    assert report.mismatches == 1
    assert report.divergences[0].margin == float("inf")


def test_bf16_answers_of_a_drafter_are_identical_or_near_ties() -> None:
    target = endless_target(dtype=torch.bfloat16)
    items = [Request(i, PROMPT[: i + 1], seed=i, max_new_tokens=48) for i in range(5)]
    plain = [plain_answer(target, item) for item in items]
    texts = {
        item.tokens: [*item.tokens, *answer] for item, answer in zip(items, plain, strict=True)
    }
    config = DecodeConfig(depth=6)
    drafted = {
        c.request.index: c.tokens
        for c in Engine(target, SometimesRight(texts, VOCAB), config).run(items)
    }
    report = audit(
        target, items, plain, [drafted[i] for i in range(5)], SamplingSettings(), width=7
    )
    assert report.sequences == 5
    assert report.mismatches == 0, report.divergences


def test_a_broken_verification_is_not_excused_by_the_gap_that_it_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes over several tokens see rotary positions one too far: text differs, and so do the
    routes."""
    target = endless_target()
    plain = plain_answer(target, request())
    verify = TargetModel.verify

    def broken(
        self: TargetModel, cache: Any, tokens: Any, tree: Any, lengths: Any, *rest: Any
    ) -> Any:
        return verify(self, cache, tokens, tree, lengths + (tokens.shape[1] > 1), *rest)

    monkeypatch.setattr(TargetModel, "verify", broken)
    drafter = SometimesRight({PROMPT: [*PROMPT, *plain]}, VOCAB)
    drafted = next(iter(Engine(target, drafter, DecodeConfig()).run([request()]))).tokens
    assert drafted != plain
    report = check(target, plain, drafted)
    assert report.mismatches == 1
    assert "more than rounding" in report.divergences[0].reason


def test_a_wrong_baseline_is_not_excused_by_a_right_answer(target: TargetModel) -> None:
    right = plain_answer(target, request())
    report = check(target, [*right[:5], (right[5] + 1) % VOCAB, *right[6:]], right)
    assert (report.mismatches, report.near_ties) == (1, 0)
    assert report.divergences[0].margin < 0


PENALTY = SamplingSettings(repetition_penalty=1.6)


def step_by_step(
    target: TargetModel, sampling: SamplingSettings, forget: bool = False
) -> list[int]:
    """Greedy decoding by hand: one pass over the whole text per token, transformers' own processor
    on it.

    forget: what a decoder would do that penalises the prompt's tokens only.
    """
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    text = torch.tensor([PROMPT])
    for _ in range(NEW):
        logits = target.weights.logits(target.last_states(text)[:, -1])
        logits = processor(text[:, : len(PROMPT)] if forget else text, logits)
        text = torch.cat([text, logits.argmax(-1)[:, None]], 1)
    return text[0, len(PROMPT) :].tolist()


def test_scores_are_those_after_the_processors() -> None:
    """The replay of a right answer must agree with it at every place, and one planted error must
    stand alone."""
    target = endless_target()
    right = step_by_step(target, PENALTY)
    assert right != plain_answer(target, request()) and right != step_by_step(
        target, PENALTY, forget=True
    )
    place = 9
    wrong = [*right[:place], (right[place] + 1) % VOCAB, *right[place + 1 :]]
    # every later token is replayed behind the right text
    report = check(target, wrong, right, PENALTY)
    assert (report.flips, report.mismatches) == (1, 1)
    without = check(
        target, wrong, right
    )  # negative control: a replay without the penalty disagrees elsewhere
    assert without.flips > 1


def test_a_penalty_that_forgets_the_answer_is_a_mismatch(target: TargetModel) -> None:
    right, wrong = step_by_step(target, PENALTY), step_by_step(target, PENALTY, forget=True)
    report = check(target, right, wrong, PENALTY)
    assert report.mismatches == 1
    assert report.flips == len(report.found) > 1


def test_what_was_examined_is_not_examined_again(target: TargetModel) -> None:
    plain = plain_answer(target, request())
    wrong = [*plain[:-1], (plain[-1] + 1) % VOCAB]
    known: Known = {}
    first = audit(target, [request()], [plain], [wrong], SamplingSettings(), known=known)
    assert len(known) == 1
    known[next(iter(known))][0] = replace(first.divergences[0], reason="seen before")
    again = audit(target, [request()], [plain], [wrong], SamplingSettings(), known=known)
    assert again.divergences[0].reason == "seen before"


def test_repeats_of_a_prompt_count_each(target: TargetModel) -> None:
    plain = plain_answer(target, request())
    wrong = [*plain[:-1], (plain[-1] + 1) % VOCAB]
    report = audit(target, [request()] * 3, [plain] * 3, [wrong, plain, wrong], SamplingSettings())
    assert report.counts() == {"sequences": 3, "identical": 1, "near_ties": 0, "mismatches": 2}


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_replay_reads_the_prompt_in_the_chunks_of_decoding(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`decode.exact` promises the bits of every pass, and a prompt's depend on the chunks in which
    it is read."""
    target = endless_target(dtype=torch.bfloat16, hidden_size=64, num_hidden_layers=3)
    decode = DecodeConfig(shape="none", exact=True)
    decode = decode if chunk is None else replace(decode, prefill_chunk=chunk)
    item = request(tuple(3 + 7 * place % (VOCAB - 3) for place in range(40)))
    read: list[tuple[int, torch.Tensor]] = []
    prefill = TargetModel.prefill

    def noted(self: TargetModel, *given: Any) -> Any:
        found = prefill(self, *given)
        read.append((given[5], found[0]))
        return found

    monkeypatch.setattr(TargetModel, "prefill", noted)
    (done,) = Engine(target, None, decode).run([item])
    wrong = [*done.tokens[:5], (done.tokens[5] + 1) % VOCAB, *done.tokens[6:]]
    more = {} if chunk is None else {"chunk": chunk}
    sampling = decode.sampling()
    flips_alone(target, [item], [done.tokens], sampling, 4, exact=True, **more)
    audit(target, [item], [done.tokens], [wrong], sampling, exact=True, **more)
    assert [length for length, _ in read] == [decode.prefill_chunk] * 3
    assert all(torch.equal(logits, read[0][1]) for _, logits in read)
    if chunk is not None:  # the control: otherwise these bits differ
        flips_alone(target, [item], [done.tokens], sampling, 4, exact=True)
        assert not torch.equal(read[-1][1], read[0][1])


def test_a_replay_keeps_the_requests_grammar() -> None:
    """Tokens that the grammar forces are no flips, and one that it forbids is a mismatch."""
    target = structured_target()
    (item,) = asked(["regex"], new=24)
    answer = next(Engine(target, None, DecodeConfig(shape="none")).run([item])).tokens
    greedy = SamplingSettings()
    assert flips_alone(target, [item], [answer], greedy, width=4) == (len(answer), 0)
    free = flips_alone(target, [replace(item, constraint=None)], [answer], greedy, width=4)
    assert free[1] > 0, "the grammar forces nothing here"
    words = torch.zeros(1, -(-target.info.vocab_size // 32), dtype=torch.int32)
    assert item.constraint is not None
    Grammars.of(target).matcher(item.constraint).masks(words, [0], [[]])
    wrong = next(token for token in range(3, target.info.vocab_size) if not allows(words[0], token))
    report = audit(target, [item], [answer], [[wrong, *answer[1:]]], greedy)
    assert report.mismatches == 1
