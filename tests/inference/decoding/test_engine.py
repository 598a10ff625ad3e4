"""The engine: running ahead of the host, cancellation, text in and out, settings per call, memory
planned beforehand."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import inference.decoding.engine as engine_module
import inference.target.padding as padding_module
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.kernels.dispatch import VARIABLE
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.decoding.sampling.distribution import SamplingSettings, pick_bytes, shape_logits
from inference.decoding.sampling.row_settings import RowSettings
from inference.target.memory import picking_bytes, plan_memory
from inference.target.model import TargetModel
from tests.fakes import SometimesRight
from tests.heads.kernels.devices import ON_CPU
from tests.inference.decoding.test_lossless import TREE, decode, prompts, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.tokenizers import save_micro_target
from tests.models import VOCAB, random_target


def fake(target: TargetModel, plain: dict[int, Completion]) -> SometimesRight:
    known = {c.request.tokens: [*c.request.tokens, *c.tokens] for c in plain.values()}
    return SometimesRight(known, VOCAB)


def texts(completions: dict[int, Completion]) -> dict[int, list[int]]:
    return {index: completion.tokens for index, completion in completions.items()}


# Steps ahead of the host


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_reading_late_changes_neither_text_nor_passes(lag: int, batch_size: int) -> None:
    target, items = random_target(), requests(5)
    plain = decode(target, None, DecodeConfig(), items)
    for shape in ({}, {"shape": "tree", "choices": TREE}):
        prompt, late = (
            decode(
                target,
                fake(target, plain),
                DecodeConfig(batch_size=batch_size, lag=steps, **shape),
                items,  # type: ignore[arg-type]
            )
            for steps in (0, lag)
        )
        assert texts(late) == texts(prompt) == texts(plain)
        if (
            batch_size == 1
        ):  # the fake's errors come from one generator: the first request meets the same ones
            assert late[0].passes == prompt[0].passes


def test_no_steps_are_launched_once_every_row_must_have_ended() -> None:
    target = random_target()
    engine = Engine(target, None, DecodeConfig(lag=3))
    (completion,) = engine.run([Request(0, prompts(1)[0], 1, 9)])
    assert engine.clock.passes == len(completion.passes)


def test_the_first_token_is_processed_behind_the_last_of_its_prompt() -> None:
    """Forbidding the token that plain decoding puts behind a prompt changes that answer alone."""
    target, items = random_target(), requests(4)
    plain = texts(decode(target, None, DecodeConfig(batch_size=4), items))
    words = tuple((item.tokens[-1], plain[item.index][0]) for item in items)
    for word in words:
        config = DecodeConfig(batch_size=4, bad_words=(word,))
        found = texts(decode(target, None, config, items))
        for other in items:
            same = (other.tokens[-1], plain[other.index][0]) != word
            assert (found[other.index][0] == plain[other.index][0]) == same


# Cancellation


@pytest.mark.parametrize("lag", [0, 2])
def test_cancelled_requests_end_and_the_others_do_not_notice(lag: int) -> None:
    target, items = random_target(), requests(5, new=20)
    plain = decode(target, None, DecodeConfig(), items)
    engine = Engine(target, drafter_of("distilled", target), DecodeConfig(batch_size=2, lag=lag))

    def stop(request: Request, tokens: list[int], record: Any) -> None:
        counts[request.index] += len(tokens)
        if request.index == 1 and counts[1] >= 3:
            engine.cancel(1)
            engine.cancel(4)  # still waiting

    counts = dict.fromkeys(range(5), 0)
    found = {c.request.index: c for c in engine.run(items, stop)}
    assert set(found) == set(range(5))
    for index in (0, 2, 3):
        assert found[index].tokens == plain[index].tokens
    assert found[1].finish == "cancelled"
    assert found[1].tokens == plain[1].tokens[: len(found[1].tokens)]
    assert 3 <= len(found[1].tokens) < len(plain[1].tokens)
    assert found[4].finish == "cancelled" and not found[4].tokens


def test_an_abandoned_run_leaves_the_engine_usable() -> None:
    target, items = random_target(), requests(3)
    engine = Engine(target, drafter_of("eagle3", target), DecodeConfig(batch_size=2))
    plain = texts({c.request.index: c for c in Engine(target).run(items)})
    run = engine.run(items)
    next(run)
    run.close()
    assert texts({c.request.index: c for c in engine.run(items)}) == plain
    engine.cancel(0)  # nothing runs: ignored
    assert texts({c.request.index: c for c in engine.run(items)}) == plain


def test_an_engine_and_its_copies_decode_one_run_at_a_time(micro: Path) -> None:
    engine = Engine.load(micro, "ngram", DecodeConfig(max_new_tokens=12))
    whole = engine.generate("Hello")[0].text
    pieces = []
    for piece in engine.stream("Hello", max_new_tokens=11):
        with pytest.raises(UserError, match="decodes one run at a time"):
            engine.generate("Why?", max_new_tokens=4)
        with pytest.raises(UserError, match="cannot change while requests run"):
            engine.follow({})
        pieces.append(piece)
    assert pieces and whole.startswith("".join(pieces).rstrip("\ufffd"))
    assert engine.generate("Hello")[0].text == whole  # the run has ended


@pytest.mark.parametrize("way", ["closed", "collected", "failed"])
def test_a_run_that_is_left_makes_room_for_the_next(way: str) -> None:
    engine, items = Engine(random_target()), requests(2)

    def fail(*given: Any) -> None:
        raise RuntimeError("seen")

    if way == "failed":
        with pytest.raises(RuntimeError, match="seen"):
            list(engine.run(items, fail))
    else:
        run = engine.run(items, yield_steps=True)
        next(run)
        with pytest.raises(UserError, match="decodes one run at a time"):
            next(engine.run(items))
        if way == "closed":
            run.close()
        else:
            del run
    assert len(list(engine.run(items))) == 2


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    engine = Engine(random_target())
    for token in (VOCAB, -1):
        with pytest.raises(UserError, match=f"go from 0 to {VOCAB - 1}; the prompt has {token}"):
            list(engine.run([Request(0, (5, token), 1, 4)]))


# Limits and seeds belong to requests


def test_every_request_has_its_own_limit_and_seed() -> None:
    target = random_target()
    prompt = prompts(1)[0]
    items = [
        Request(i, prompt, seed, limit)
        for i, (seed, limit) in enumerate([(1, 5), (1, 17), (2, 17), (1, 1)])
    ]
    config = DecodeConfig(temperature=1.0, batch_size=4)
    found = texts(decode(target, drafter_of("medusa", target), config, items))
    assert found[1][:5] == found[0] and found[3] == found[0][:1]
    assert found[2] != found[1]


# Text


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("micro"))


def test_load_generate_and_stream_agree(micro: Path) -> None:
    engine = Engine.load(micro, "ngram", DecodeConfig(max_new_tokens=12))
    plain = Engine.load(engine.target, None, DecodeConfig(max_new_tokens=12))
    asked = ["What is a list?", [{"role": "user", "content": "Why?"}], [5, 6, 7]]
    answers = engine.generate(asked)  # type: ignore[arg-type]
    assert [a.text for a in answers] == [a.text for a in plain.generate(asked)]  # type: ignore[arg-type]
    assert "".join(engine.stream("What is a list?")) == answers[0].text
    assert all(answer.tau >= 1 for answer in answers)


def test_settings_of_one_call(micro: Path) -> None:
    engine = Engine.load(micro, None, DecodeConfig(max_new_tokens=12))
    short = engine.generate(["Hello"], max_new_tokens=3)[0]
    assert len(short.completion.tokens) <= 3
    one, two, again = (
        engine.generate(["Hello"], seeds=[seed], temperature=1.0)[0].completion.tokens
        for seed in (1, 2, 1)
    )
    assert one == again != two
    with pytest.raises(UserError, match="as many seeds"):
        engine.generate(["Hello"], seeds=[1, 2])
    with pytest.raises(UserError, match="temperature"):
        engine.generate(["Hello"], temperature=-1.0)


def test_leaving_a_stream_early_stops_decoding(micro: Path) -> None:
    engine = Engine.load(micro, None, DecodeConfig(max_new_tokens=60))
    stream = engine.stream("Hello")
    next(stream)
    stream.close()
    assert engine.clock.passes < 59


def test_a_wrong_head_is_named(micro: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint folder 'nowhere'"):
        Engine.load(micro, "nowhere")


# Long prompts


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_prompts_read_in_chunks_give_the_same_text(family: str, chunk: int) -> None:
    target, items = random_target(family), requests(4)
    for kind in ("eagle3", "medusa"):
        whole, parts = (
            decode(
                target,
                drafter_of(kind, target),
                DecodeConfig(prefill_chunk=size, batch_size=2),
                items,
            )
            for size in (2048, chunk)
        )
        assert texts(parts) == texts(whole)
        assert {i: c.passes for i, c in parts.items()} == {i: c.passes for i, c in whole.items()}


@pytest.mark.parametrize("padding", [0, 3, 12])
def test_prompts_of_different_lengths_are_read_apart(
    monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    """However a batch's prompts are divided, the text is that of reading all of them together."""
    target, items = random_target(), requests(5)
    for kind in ("eagle3", "distilled"):
        found = []
        for allowed in (10_000, padding):
            monkeypatch.setattr(padding_module, "PADDING", allowed)
            drafter = drafter_of(kind, target)
            done = decode(target, drafter, DecodeConfig(batch_size=5), items)
            found.append({index: done[index] for index in sorted(done)})
        assert texts(found[1]) == texts(found[0])
        assert [each.passes for each in found[1].values()] == [
            each.passes for each in found[0].values()
        ]


@pytest.mark.parametrize("padding", [0, 7, 40, 10_000])
def test_groups_hold_every_prompt_once_and_little_padding(
    monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    monkeypatch.setattr(padding_module, "PADDING", padding)
    lengths = torch.randint(1, 60, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    groups = padding_module.of_like_length(lengths)
    assert sorted(place for group in groups for place in group) == list(range(50))
    sizes = [[lengths[place] for place in group] for group in groups]
    assert sum(sizes, []) == sorted(lengths, reverse=True)  # noqa: RUF017
    padded = [sum(size[0] - length for length in size) for size in sizes]
    assert max(padded) <= padding
    for size, after, room in zip(sizes, sizes[1:], padded, strict=False):
        assert room + size[0] - after[0] > padding


def test_what_cannot_fit_is_refused_before_it_is_read() -> None:
    target = random_target()
    with pytest.raises(
        UserError, match=r"needs 300 positions .290 of prompt., but target 'random/llama' has 256"
    ):
        next(Engine(target).run([Request(0, (5,) * 290, 1, 10)]))
    with pytest.raises(UserError, match="capacity 32"):
        next(Engine(target, capacity=32).run([Request(0, (5,) * 30, 1, 10)]))


# Memory


def test_the_plan_counts_what_is_then_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    target, items = random_target(), requests(4)
    plans: list[Any] = []

    def remember(*arguments: Any, **more: Any) -> Any:
        plans.append(plan_memory(*arguments, **more))
        return plans[-1]

    monkeypatch.setattr(engine_module, "plan_memory", remember)
    for kind in ("eagle3", "distilled", "ngram", "medusa"):
        engine = Engine(target, drafter_of(kind, target), DecodeConfig(batch_size=3))
        list(engine.run(items))
        assert plans[-1].cache + plans[-1].drafter == engine.memory_bytes()["kv"], kind


class Living(TorchDispatchMode):
    """The most bytes that storages made within the block hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self.held:
                    self.held[key] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, key, None)
        self.most = max(self.most, sum(self.held.values()))
        return out


def test_the_plan_counts_the_features_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    plans: list[tuple[Any, dict[str, Any]]] = []
    read: list[int] = []

    def remember(*arguments: Any, **more: Any) -> Any:
        plans.append((arguments, more))
        return plan_memory(*arguments, **more)

    prefill = target.prefill

    def noted(*arguments: Any) -> Any:
        logits, seen = prefill(*arguments)
        read.append(sum(states.nbytes for states in (seen.taps, seen.last_hidden)))
        return logits, seen

    monkeypatch.setattr(engine_module, "plan_memory", remember)
    engine = Engine(target, drafter_of("eagle3", target), DecodeConfig(batch_size=3))
    monkeypatch.setattr(target, "prefill", noted)
    list(engine.run(requests(3)))
    ((arguments, more),) = plans
    assert len(read) == 1
    without = plan_memory(*arguments, **{**more, "features": 0})
    assert read == [plan_memory(*arguments, **more).activations - without.activations]


@pytest.mark.parametrize("padding", [None, 8])
def test_features_of_prompts_are_held_once(
    padding: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many passes and groups of like length they are read in."""
    if padding is not None:
        monkeypatch.setattr(padding_module, "PADDING", padding)
    target, needs = random_target(), FeatureSpec(taps=(1, 2, 3))
    lengths, rows = torch.tensor([240, 200]), torch.arange(2)
    tokens = torch.randint(VOCAB, (2, 240), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(2, 240)
    whole, features = target.prefill(cache, rows, tokens, lengths, needs)
    assert features.taps is not None
    with Living() as living:
        found, seen = target.prefill(cache, rows, tokens, lengths, needs, chunk=8)
    with Living() as fewer:
        target.prefill(cache, rows, tokens, lengths, FeatureSpec(), chunk=8)
    assert living.most - fewer.most < 1.3 * features.taps.nbytes
    torch.testing.assert_close(found, whole)
    for row, length in enumerate(lengths.tolist()):
        assert seen.taps is not None
        torch.testing.assert_close(seen.taps[row, :length], features.taps[row, :length])
        torch.testing.assert_close(
            seen.last_hidden[row, :length], features.last_hidden[row, :length]
        )


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=ON_CPU)])
@pytest.mark.parametrize("own", [False, True])
def test_the_plan_counts_what_filters_take(
    own: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of the logits that a filtered pick makes: tempered, sorted and summed in plain
    torch; tempered and filtered by the kernel."""
    monkeypatch.setenv(VARIABLE, implementation)
    rows, nodes, vocab = 3, 5, 4096
    settings = SamplingSettings(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
    logits = torch.randn(rows, nodes, vocab)
    if own:
        held = RowSettings(rows, SamplingSettings(), vocab, torch.device("cpu"), True)
        held.put(range(rows), [settings] * rows)
        held.arrange(range(rows))
    with Living() as living:
        if own:
            held.filtered(held.at_temperature(logits))
        else:
            shape_logits(logits, settings)
    each = living.most / (rows * nodes * vocab)
    needed = pick_bytes(SamplingSettings() if own else settings, own)
    planned = picking_bytes(needed, torch.device("cpu"), torch.float32)
    assert planned / 2 < each <= 1.01 * planned  # the settings of rows are a few numbers
    assert pick_bytes(SamplingSettings()) == pick_bytes(SamplingSettings(temperature=1.0)) == 0
    assert picking_bytes(0, torch.device("cpu"), torch.float32) == 0
    # logits in float64 stay in it, for which there is no kernel
    assert picking_bytes(needed, torch.device("cpu"), torch.float64) == needed


@ON_CPU
def test_a_batch_is_planned_for_the_filter_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    target, given = random_target(dtype=torch.float32), []

    def noted(*parts: Any, sampling: int, **more: Any) -> Any:
        given.append(sampling)
        return plan_memory(*parts, sampling=sampling, **more)

    monkeypatch.setattr(engine_module, "plan_memory", noted)
    engine = Engine(target, None, DecodeConfig(shape="none", temperature=1.0, top_p=0.9))
    for implementation in ("reference", "triton"):
        monkeypatch.setenv(VARIABLE, implementation)
        engine.require_memory(2, 64, 8)
    assert given == [pick_bytes(engine.decode.sampling()), 8]


def test_a_batch_that_will_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    engine = Engine(target, drafter_of("eagle3", target), DecodeConfig(batch_size=4))
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 300_000)
    with pytest.raises(
        UserError,
        match=r"batch of 4 rows .* Lower decode.batch_size.*decode.batch_size=[1-3] would fit",
    ):
        next(engine.run(requests(4)))
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 6_000)
    with pytest.raises(UserError, match="not even one row fits"):
        next(engine.run(requests(4)))
    assert engine.memory_bytes()["kv"] == 0


def test_buffers_are_kept_between_runs() -> None:
    target = random_target()
    engine = Engine(target, drafter_of("distilled", target), DecodeConfig(batch_size=2))
    first = texts({c.request.index: c for c in engine.run(requests(4))})
    address = (
        engine._kept.lanes.rows.lengths.data_ptr(),
        engine._kept.lanes.state.keys[0].data_ptr(),
    )  # type: ignore[union-attr]
    assert texts({c.request.index: c for c in engine.run(requests(4))}) == first
    assert address == (
        engine._kept.lanes.rows.lengths.data_ptr(),
        engine._kept.lanes.state.keys[0].data_ptr(),
    )  # type: ignore[union-attr]


def test_a_long_answer_needs_no_gradient_memory() -> None:
    target = random_target()
    (completion,) = Engine(target, drafter_of("eagle3", target)).run([Request(0, (5, 6), 1, 40)])
    assert len(completion.tokens) <= 40 and not torch.is_inference_mode_enabled()


def test_calls_with_another_limit_share_the_buffers(micro: Path) -> None:
    engine = Engine.load(micro, None, DecodeConfig(batch_size=1, max_new_tokens=8))
    engine.generate(["Hello"], max_new_tokens=3)
    lanes = engine._kept.lanes
    assert lanes is not None
    engine.generate(["Hello"], max_new_tokens=2)
    assert engine._kept.lanes is lanes
    assert engine.memory_bytes()["kv"] == lanes.bytes() > 0
