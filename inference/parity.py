"""Proof that a drafter computes in training what it computes in decoding.

The same documents go through the training path (`train_logits` on one packed row) and through the
decoding path (`start`, then `propose` and `commit` over the documents' own tokens, a ragged batch,
runs of varying length); the logits must agree at every depth and position. Training runs this
before the first step and after the last, because a mismatch shows nowhere else: training accuracy
looks fine and the served acceptance is near zero.

Legend: B rows (documents), T positions, n taps, H hidden, V' draft vocabulary, K depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetWeights
from heads.api.tree import TokenTree

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest difference of two logits, as a share of the largest magnitude in their row (at least 1),
by the target's dtype.
"""


class ParityError(UserError):
    """Training and decoding disagree: the drafter would be trained for something it is not asked
    when it serves.
    """


@dataclass(frozen=True)
class ParityReport:
    """compared: (row, position, depth) triples whose logits were compared; worst: largest relative
    difference per depth 1..K.

    Without comparable logits (a kind without weights) both are empty: compared 0, worst ().
    """

    compared: int
    worst: tuple[float, ...]
    tolerance: float


class FeatureSource(Protocol):
    """What parity asks of a target; `inference.target.model.TargetModel` has it."""

    weights: TargetWeights
    device: torch.device
    dtype: torch.dtype

    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]: ...


@torch.no_grad()
def check_parity(
    target: FeatureSource,
    drafter: Any,
    tokens: list[list[int]],
    depth: int,
    tolerance: float | None = None,
) -> ParityReport:
    """Compare both paths of `drafter` at depths 1..`depth` along the given documents (each at least
    depth + 4 tokens long).

    tolerance: largest relative difference allowed; by default according to the target's dtype
    (`TOLERANCES`). Raises `ParityError` naming the first depth and position that disagree, with
    both values.
    """
    tolerance = TOLERANCES[target.dtype] if tolerance is None else tolerance
    if not isinstance(drafter, TrainableDrafter):
        return ParityReport(0, (), tolerance)
    short = [index for index, document in enumerate(tokens) if len(document) < depth + 4]
    if short or not tokens:
        raise UserError(
            f"the parity check at depth {depth} needs documents of at least {depth + 4} tokens; "
            f"too short: documents {short} of {len(tokens)}."
        )
    was_training = drafter.training
    drafter.eval()
    try:
        # Decoding first: a drafter that cannot draft so deep says so in its `start`.
        decoded = _decoding_path(target, drafter, tokens, depth)
        return _compare(
            drafter, _training_path(target, drafter, tokens, depth), decoded, depth, tolerance
        )
    finally:
        drafter.train(was_training)


def _training_path(
    target: FeatureSource, drafter: TrainableDrafter, tokens: list[list[int]], depth: int
) -> list[list[Tensor]]:
    """Logits [T_b, V'] per document and depth: result[b][k - 1]. All documents are packed into one
    row."""
    device = target.device
    packed = torch.tensor([[token for document in tokens for token in document]], device=device)
    positions = torch.cat([torch.arange(len(document), device=device) for document in tokens])[None]
    numbers = torch.arange(1, len(tokens) + 1, dtype=torch.int32)
    segments = numbers.repeat_interleave(torch.tensor([len(document) for document in tokens])).to(
        device
    )[None]
    taps, last_hidden = target.features(packed, positions, segments, drafter.needs)
    mask = torch.ones_like(packed, dtype=torch.bool)
    batch = TrainBatch(packed, positions, segments, mask, taps, last_hidden, target.weights.logits)
    per_depth = drafter.train_logits(batch, depth)
    assert len(per_depth) == depth, f"train_logits gave {len(per_depth)} depths, asked for {depth}"
    found, first = [], 0
    for document in tokens:
        found.append([logits[0, first : first + len(document)] for logits in per_depth])
        first += len(document)
    return found


@dataclass
class _Sighting:
    """Logits [V'] that decoding used for row `row`, last seen position `position`, at `depth`."""

    row: int
    position: int
    depth: int
    logits: Tensor


class _ForcedNoise:
    """Noise under which the documents' own tokens win; it keeps the logits it is asked about.

    A token outside a reduced draft vocabulary cannot be forced: what lies deeper in that proposal
    follows another token and is not kept.
    """

    keeps_logits = False

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens
        self.last_seen: list[int] = []
        self.asked: dict[tuple[int, int], Tensor] = {}
        self.forced: set[tuple[int, int]] = set()

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        ids = (
            torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
        )
        scores = logits.float().log_softmax(-1)
        for row, wanted in enumerate(positions.tolist()):
            for column, position in enumerate(wanted):
                self.asked.setdefault((row, position), logits[row, column].clone())
                if position < len(self.tokens[row]):
                    is_true = ids == self.tokens[row][position]
                    scores[row, column] += 1e6 * is_true
                    if bool(is_true.any()):
                        self.forced.add((row, position))
        return scores

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self.scores(logits, positions, token_ids).argmax(-1)

    def sightings(self, depth: int) -> list[_Sighting]:
        """What was asked since `last_seen` was set, as far as the true tokens could be forced."""
        found = []
        for row, last in enumerate(self.last_seen):
            for k in range(1, depth + 1):
                logits = self.asked.get((row, last + k + 1))
                if logits is None:
                    raise ParityError(
                        f"parity: document {row}, position {last}: the drafter chose no token at "
                        f"depth {k} (absolute position {last + k + 1}) of {depth}; positions of "
                        "drafted tokens are off."
                    )
                if not bool(torch.isfinite(logits).all()):
                    raise ParityError(
                        f"parity: document {row}, position {last}: logits of depth {k} not finite."
                    )
                found.append(_Sighting(row, last, k, logits))
                if (row, last + k + 1) not in self.forced:
                    break
        self.asked.clear()
        return found


def _decoding_path(
    target: FeatureSource, drafter: Any, tokens: list[list[int]], depth: int
) -> list[_Sighting]:
    """Walk over the ends of all documents as a ragged batch, committing runs of 1 to depth + 1
    tokens."""
    features = _document_features(target, drafter, tokens)
    walk = min(len(document) for document in tokens) - 3
    seen = [len(document) - 1 - walk for document in tokens]  # positions seen so far; at least 2
    noise, tree = _ForcedNoise(tokens), TokenTree.chain(depth, target.device)
    spans = [(0, end) for end in seen]
    state = drafter.start(
        _states(target, tokens, features, spans, max(seen)),
        tree,
        max(len(d) for d in tokens) + depth + 1,
    )
    sightings: list[_Sighting] = []
    round_ = 0
    while True:
        noise.last_seen = [end - 1 for end in seen]
        proposal = drafter.propose(state, noise)
        sightings += noise.sightings(depth)
        _check_tokens(proposal.tokens.tolist(), tokens, noise)
        runs = [1 + (round_ + row) % (depth + 1) for row in range(len(tokens))]
        round_ += 1
        if any(
            end + run >= len(document)
            for end, run, document in zip(seen, runs, tokens, strict=True)
        ):
            return sightings
        spans = [(end, end + run) for end, run in zip(seen, runs, strict=True)]
        state = drafter.commit(state, _states(target, tokens, features, spans, depth + 1))
        seen = [end for _, end in spans]


def _check_tokens(drafted: list[list[int]], tokens: list[list[int]], noise: _ForcedNoise) -> None:
    for row, nodes in enumerate(drafted):
        for place, token in enumerate(nodes):
            position = noise.last_seen[row] + 1 + place
            if place > 0 and (row, position) not in noise.forced:
                break
            if position < len(tokens[row]) and token != tokens[row][position]:
                raise ParityError(
                    f"parity: document {row}, position {noise.last_seen[row]}: node {place} "
                    f"carries {token}, but the root or the forced choice there is "
                    f"{tokens[row][position]}."
                )


def _document_features(
    target: FeatureSource, drafter: TrainableDrafter, tokens: list[list[int]]
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Each document alone through the target: taps [T_b, n, H] and last_hidden [T_b, H]."""
    found = []
    for document in tokens:
        ids = torch.tensor([document], device=target.device)
        positions = torch.arange(len(document), device=target.device)[None]
        taps, last = target.features(
            ids, positions, torch.ones_like(ids, dtype=torch.int32), drafter.needs
        )
        found.append((None if taps is None else taps[0], None if last is None else last[0]))
    return found


def _states(
    target: FeatureSource,
    tokens: list[list[int]],
    features: list[tuple[Tensor | None, Tensor | None]],
    spans: list[tuple[int, int]],
    width: int,
) -> TargetStates:
    """The runs [first, end) of all documents, padded to `width` with each run's last entry (its
    states must not be used).
    """
    at = [[min(first + i, end - 1) for i in range(width)] for first, end in spans]

    def stack(values: list[Tensor | None]) -> Tensor | None:
        picked = [
            value[places] for value, places in zip(values, at, strict=True) if value is not None
        ]
        return torch.stack(picked) if picked else None

    def ints(rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=target.device)

    return TargetStates(
        tokens=ints(
            [[document[i] for i in places] for document, places in zip(tokens, at, strict=True)]
        ),
        next_tokens=ints(
            [[document[i + 1] for i in places] for document, places in zip(tokens, at, strict=True)]
        ),
        positions=ints([[first + i for i in range(width)] for first, _ in spans]),
        valid=ints([[int(first + i < end) for i in range(width)] for first, end in spans]).bool(),
        taps=stack([taps for taps, _ in features]),
        last_hidden=stack([last for _, last in features]),
    )


def _compare(
    drafter: TrainableDrafter,
    trained: list[list[Tensor]],
    decoded: list[_Sighting],
    depth: int,
    tolerance: float,
) -> ParityReport:
    worst = [0.0] * depth
    for sighting in sorted(decoded, key=lambda item: (item.depth, item.row, item.position)):
        expected = trained[sighting.row][sighting.depth - 1][sighting.position].double()
        found = sighting.logits.double()
        scale = max(1.0, float(expected.abs().max()))
        gaps = (expected - found).abs() / scale
        gap = float(gaps.max())
        if not gap <= tolerance:  # also when it is not a number
            column = int(gaps.argmax())
            raise ParityError(
                f"parity: kind '{drafter.kind}' disagrees with itself at depth {sighting.depth}, "
                f"position {sighting.position} of document {sighting.row}: logit {column} is "
                f"{float(expected[column]):.6g} in training and {float(found[column]):.6g} in "
                f"decoding (relative difference {gap:.3g}, allowed {tolerance:.3g}). The drafter "
                "would be trained for something it is not asked when it serves."
            )
        worst[sighting.depth - 1] = max(worst[sighting.depth - 1], gap)
    return ParityReport(len(decoded), tuple(worst), tolerance)
