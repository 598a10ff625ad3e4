"""The inner states of the target that a drafter reads.

Layer convention everywhere: tap `L` is the residual stream after L decoder layers; tap 0 is the
embedding output. The tap after the last layer is taken before the final norm; `last_hidden` is the
state after that norm, the LM head's input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from heads.api.errors import UserError


@dataclass(frozen=True)
class FeatureSpec:
    """The features of the target that a drafter reads, both in training and in decoding.

    taps: layer numbers in ascending order, 0 = embeddings, n = after all n layers, before the final
    norm. last_hidden: whether the post-final-norm state is read. logits: whether training compares
    with the target's full distribution (computed from `last_hidden` on demand). verified: whether
    `commit` also receives the target's picks at all verified nodes, accepted or not
    (`TargetStates.verified`). forced: whether the drafter gets the tokens that a row's grammar
    forces next (`heads.api.drafter.Guided`).
    """

    taps: tuple[int, ...] = ()
    last_hidden: bool = False
    logits: bool = False
    verified: bool = False
    forced: bool = False

    def __post_init__(self) -> None:
        if list(self.taps) != sorted(set(self.taps)):
            raise UserError(
                "head.taps must be ascending layer numbers without repetition; given: "
                f"{list(self.taps)}."
            )

    @property
    def drafts_from_states(self) -> bool:
        """Whether decoding needs inner states of the target, or tokens alone."""
        return bool(self.taps) or self.last_hidden

    def check(self, num_layers: int) -> None:
        """Raise `UserError` when a tap does not exist in a target of `num_layers` layers."""
        wrong = [tap for tap in self.taps if not 0 <= tap <= num_layers]
        if wrong:
            raise UserError(
                f"taps {wrong} do not exist: the target has {num_layers} layers, so taps 0 "
                f"(embeddings) to {num_layers} are allowed. Change head.taps."
            )


def union(specs: Iterable[FeatureSpec]) -> FeatureSpec:
    """The features that several drafters read together."""
    specs = tuple(specs)
    return FeatureSpec(
        taps=tuple(sorted({tap for spec in specs for tap in spec.taps})),
        last_hidden=any(spec.last_hidden for spec in specs),
        logits=any(spec.logits for spec in specs),
        verified=any(spec.verified for spec in specs),
        forced=any(spec.forced for spec in specs),
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high taps as the EAGLE-3 family reads them: 2, n//2, n-3.

    For targets of fewer than 7 layers: 1, n//2 and n-1, without repetition.
    """
    places = (
        (2, num_layers // 2, num_layers - 3)
        if num_layers >= 7
        else (1, num_layers // 2, num_layers - 1)
    )
    return tuple(sorted({max(place, 1) for place in places}))
