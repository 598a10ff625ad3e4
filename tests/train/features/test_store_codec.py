"""Stored states come back as exactly as their format promises, and weigh what the size function
says."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from train.features.store.batches import Form, packed_top, top_of, top_word
from train.features.store.codec import (
    FORMATS,
    FP8_MAX,
    GROUP,
    bytes_per_token,
    decode,
    encode,
    slot_bytes,
)

INFO = TargetInfo("t", "r", "llama", "h", 512, 256, 8, 4, 2, 64, 512, 1e-5, 1e4, 2048, 1)


def states(count: int = 37, hidden: int = 100, seed: int = 0) -> Tensor:
    """States of very different sizes, with outliers and a zero row, as residual streams have
    them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, hidden, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    made[1, 7] = 4e3
    made[2] = 0.0
    return made


def through_disk(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(load(save(parts)))


@pytest.mark.parametrize("hidden", [32, 100, 256])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_state_weighs_what_the_size_function_says(fmt: str, hidden: int) -> None:
    parts = encode(states(hidden=hidden), fmt)
    size = sum(part.numel() * part.element_size() for part in parts.values())
    assert size == 37 * slot_bytes(hidden, fmt)


def test_exact_formats_are_exact() -> None:
    made = states()
    assert torch.equal(decode(through_disk(encode(made, "fp32")), "fp32", 100, torch.float32), made)
    rounded = made.bfloat16()
    assert torch.equal(
        decode(through_disk(encode(rounded, "bf16")), "bf16", 100, torch.bfloat16), rounded
    )


def test_int8_errs_by_at_most_half_a_step_and_a_rounded_scale() -> None:
    made = states()
    back = decode(through_disk(encode(made, "int8")), "int8", 100, torch.float32)
    step = made.abs().amax(1, keepdim=True) / 127
    # The scale is a bfloat16: at most 1/256 smaller than wanted, so the largest value may be cut by
    # half a percent.
    assert bool(((back - made).abs() <= 0.51 * step + made.abs() / 256 + 1e-30).all())
    assert torch.equal(back[2], made[2])


def test_fp8_errs_by_at_most_a_sixteenth_of_each_value() -> None:
    made = states()
    back = decode(through_disk(encode(made, "fp8")), "fp8", 100, torch.float32)
    # subnormal numbers of e4m3 are so far apart
    smallest = made.abs().amax(1, keepdim=True) / FP8_MAX * 2**-9
    assert bool(((back - made).abs() <= made.abs() / 16 + smallest + made.abs() / 256).all())


def test_int4_is_what_a_slow_search_over_scales_finds() -> None:
    made = states(count=5, hidden=64)
    back = decode(through_disk(encode(made, "int4")), "int4", 64, torch.float32)
    for row in range(5):
        for start in (0, 32):
            group = made[row, start : start + GROUP]
            errors = []
            for shrink in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
                scale = float((group.abs().max() * shrink / 7).bfloat16()) or 1.0
                slow = torch.tensor(
                    [max(-8, min(7, round(float(v) / scale))) * scale for v in group]
                )
                errors.append(float((slow - group).square().sum()))
            found = float((back[row, start : start + GROUP] - group).square().sum())
            assert found <= min(errors) * (1 + 1e-3) + 1e-12


def test_int8_is_near_half_and_int4_below_a_third_of_bf16() -> None:
    needs = FeatureSpec((2, 4, 6), last_hidden=True, logits=True)
    whole = bytes_per_token(needs, INFO, "bf16")
    assert whole == 4 * 256 * 2
    assert bytes_per_token(needs, INFO, "int8") / whole <= 0.52
    assert bytes_per_token(needs, INFO, "fp8") / whole <= 0.52
    assert bytes_per_token(needs, INFO, "int4") / whole <= 0.30
    assert bytes_per_token(needs, INFO, "fp32") == 2 * whole
    # logits follow from the last hidden state
    assert bytes_per_token(FeatureSpec(logits=True), INFO, "bf16") == 512
    assert bytes_per_token(needs, INFO, "bf16", top_logits=8) == 3 * 512 + 8 * 6 + 4


def test_an_unknown_format_is_named_with_what_there_is() -> None:
    with pytest.raises(UserError, match=r"features\.format 'int3' is unknown\..*int4"):
        encode(states(), "int3")


def test_the_largest_logits_give_the_distribution_back() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = (
        torch.randn(2, 6, 16, generator=generator),
        torch.randn(50, 16, generator=generator),
    )
    places = torch.ones(2, 6, dtype=torch.bool)
    places[1, 4:] = False
    parts = top_of(hidden[places], 20, lambda rows: rows @ head.T)
    row = packed_top(through_disk(parts), places)
    found = top_word(Form("bf16", 16, 50, 20))(row[0])  # [6, 50]
    true = (hidden[0] @ head.T).log_softmax(-1)
    # Exact where stored; elsewhere the remaining mass, spread evenly; the logsumexp is the true
    # one.
    top = true.topk(20).indices
    assert torch.allclose(found.log_softmax(-1).gather(1, top), true.gather(1, top), atol=4e-3)
    assert torch.allclose(found.logsumexp(-1), (hidden[0] @ head.T).logsumexp(-1), atol=4e-3)
    left = 1 - true.exp().gather(1, top).sum(-1)
    rest = found.softmax(-1).scatter(1, top, 0.0)
    assert torch.allclose(rest.sum(-1), left, atol=4e-3)
    with pytest.raises(UserError, match=r"features\.top_logits=0"):
        top_word(Form("bf16", 16, 50, 20))(hidden[0])
