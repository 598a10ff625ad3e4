"""The block convolution by its definition, and as the identity it starts from."""

from __future__ import annotations

import pytest
import torch

from heads.api.errors import UserError
from heads.nn.block.conv import TAPS, BlockConv


def test_convolution_equals_its_definition_and_stays_within_the_block() -> None:
    generator = torch.Generator().manual_seed(0)
    conv = BlockConv(12, 4).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    states, output = torch.randn(
        2, 3, 5, 12, generator=generator, dtype=torch.float64
    )  # two times [3 blocks, 5 slots, 12]
    mixed, kernel = conv.before(states)
    after = conv.after(output, kernel)
    delta = (states @ conv.kernel_projection.weight.T).view(3, 5, 2, TAPS, 3)
    for block in range(3):
        for slot in range(5):
            for channel in range(12):
                for side, (inputs, found) in enumerate(((states, mixed), (output, after))):
                    expected = sum(
                        (
                            conv.base_kernel[side, tap, channel]
                            + delta[block, slot, side, tap, channel // 4]
                        )
                        * inputs[block, slot - tap, channel]
                        for tap in range(TAPS)
                        if slot >= tap
                    )
                    torch.testing.assert_close(found[block, slot, channel], expected)


def test_it_starts_as_the_identity() -> None:
    conv = BlockConv(8, 2)
    conv.initialise()
    states = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    mixed, kernel = conv.before(states)
    assert torch.equal(mixed, states) and torch.equal(conv.after(states, kernel), states)


def test_groups_must_divide_the_hidden_size() -> None:
    with pytest.raises(UserError, match="conv_group_size must divide the hidden size 8; given 3"):
        BlockConv(8, 3)
