"""Checks that a drafter computes the same in training and in decoding.

The same documents go through the training path (`train_logits` on one packed row) and through the
decoding path (`start`, then `propose` and `commit` over the documents' own tokens, a ragged batch,
runs of varying length); the logits must agree at every depth and position. Training runs this check
before the first step and after the last, because a mismatch is visible nowhere else: training
accuracy looks fine, and the served acceptance is near zero.

Legend: B rows (documents), T positions, n taps, H hidden, V' draft vocabulary, K depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.api.batch import TrainBatch
from heads.api.drafter import TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.target.model import TargetModel

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest difference of logits, as a share of their row's largest magnitude (at least 1)."""


Documents = list[list[int]]
Features = list[tuple[Tensor | None, Tensor | None]]
"""Of each document: taps [T_b, n, H] and last_hidden [T_b, H]."""
Sightings = dict[tuple[int, int, int], Tensor]
"""Logits [V'] that decoding used at (depth, document, last seen position)."""


class ParityError(UserError):
    """Training and decoding disagree."""


@dataclass(frozen=True)
class ParityReport:
    """compared: (row, position, depth) triples whose logits were compared; worst: largest relative
    difference per depth 1..K.

    Without comparable logits (a kind without weights), compared is 0 and worst is ().
    """

    compared: int
    worst: tuple[float, ...]
    tolerance: float


@torch.no_grad()
def check_parity(target: TargetModel, drafter: Any, tokens: Documents, depth: int) -> ParityReport:
    """Compare both paths of `drafter` at depths 1..`depth` along the given documents (each at least
    depth + 4 tokens long).

    The target's dtype decides the largest relative difference allowed (`TOLERANCES`). Raises
    `ParityError`, which names the first depth and position that disagree, with both values.
    """
    tolerance = TOLERANCES[target.dtype]
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
        # Decoding first: a drafter that cannot draft that deep raises in its `start`.
        decoded = _decoding_path(target, drafter, tokens, depth)
        trained = _training_path(target, drafter, tokens, depth)
        return _compare(drafter, trained, decoded, depth, tolerance)
    finally:
        drafter.train(was_training)


def _training_path(
    target: TargetModel, drafter: TrainableDrafter, tokens: Documents, depth: int
) -> list[list[Tensor]]:
    """Logits [T_b, V'] per document and depth: result[b][k - 1]. All documents are packed into one
    row."""
    device, lengths = target.device, [len(document) for document in tokens]
    packed = torch.tensor([[token for document in tokens for token in document]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    numbers = torch.arange(1, len(tokens) + 1, dtype=torch.int32)
    segments = numbers.repeat_interleave(torch.tensor(lengths)).to(device)[None]
    taps, last_hidden = target.features(packed, positions, segments, drafter.needs)
    mask = torch.ones_like(packed, dtype=torch.bool)
    batch = TrainBatch(packed, positions, segments, mask, taps, last_hidden, target.weights.logits)
    per_depth = drafter.train_logits(batch, depth)
    assert len(per_depth) == depth, f"train_logits gave {len(per_depth)} depths, asked for {depth}"
    split = [logits[0].split(lengths) for logits in per_depth]
    return [list(document) for document in zip(*split, strict=True)]


@dataclass
class _ForcedNoise:
    """Noise that makes the documents' own tokens win. It keeps the logits that it is given.

    A token outside a reduced draft vocabulary cannot be forced. Deeper nodes of that proposal
    follow another token and are not kept.
    """

    tokens: Documents
    last_seen: list[int] = field(default_factory=list)
    asked: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    forced: set[tuple[int, int]] = field(default_factory=set)
    keeps_logits = False
    separate = False

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Scores [B, N, V'] float32 of logits [B, N, V'] for the nodes' positions [B, N] int64, the
        document's own token 1e6 above the others. Records the logits and the forced tokens.
        token_ids: [V'], the tokens of a draft vocabulary."""
        every = torch.arange(logits.shape[-1], device=logits.device)
        ids = every if token_ids is None else token_ids
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

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float()

    def sightings(self, depth: int) -> Sightings:
        """What was recorded since `last_seen` was set, up to the depth at which the true tokens
        could be forced."""
        found = {}
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
                found[k, row, last] = logits
                if (row, last + k + 1) not in self.forced:
                    break
        self.asked.clear()
        return found


def _decoding_path(target: TargetModel, drafter: Any, tokens: Documents, depth: int) -> Sightings:
    """Decode along all documents as a ragged batch, in runs of 1 to depth + 1 tokens."""
    features, lengths = _document_features(target, drafter, tokens), list(map(len, tokens))
    text = pad_sequence([torch.tensor(document) for document in tokens], batch_first=True)
    text = text.to(target.device)
    seen = [length - min(lengths) + 2 for length in lengths]  # positions seen so far
    noise, tree = _ForcedNoise(tokens), TokenTree.chain(depth, target.device)
    states = _states(text, features, [(0, end) for end in seen], max(seen))
    state = drafter.start(states, tree, max(lengths) + depth + 1)
    found: Sightings = {}
    for round_ in count():
        noise.last_seen = [end - 1 for end in seen]
        proposal = drafter.propose(state, noise)
        found |= noise.sightings(depth)
        _check_tokens(proposal.tokens.tolist(), tokens, noise)
        spans = [(end, end + 1 + (round_ + row) % (depth + 1)) for row, end in enumerate(seen)]
        seen = [end for _, end in spans]
        if any(end >= length for end, length in zip(seen, lengths, strict=True)):
            break
        state = drafter.commit(state, _states(text, features, spans, depth + 1))
    return found


def _check_tokens(drafted: list[list[int]], tokens: Documents, noise: _ForcedNoise) -> None:
    for row, nodes in enumerate(drafted):
        for place, token in enumerate(nodes):
            position = noise.last_seen[row] + 1 + place
            if place > 0 and (row, position) not in noise.forced:
                break
            if token != tokens[row][position]:
                raise ParityError(
                    f"parity: document {row}, position {noise.last_seen[row]}: node {place} "
                    f"carries {token}, but the root or the forced choice there is "
                    f"{tokens[row][position]}."
                )


def _document_features(
    target: TargetModel, drafter: TrainableDrafter, tokens: Documents
) -> Features:
    """The features of each document, computed with the target one document at a time."""
    found = []
    for document in tokens:
        ids = torch.tensor([document], device=target.device)
        positions = torch.arange(len(document), device=target.device)[None]
        segments = torch.ones_like(ids, dtype=torch.int32)
        taps, last = target.features(ids, positions, segments, drafter.needs)
        found.append((None if taps is None else taps[0], None if last is None else last[0]))
    return found


def _states(
    text: Tensor, features: Features, spans: list[tuple[int, int]], width: int
) -> TargetStates:
    """The runs [first, end) of all documents, padded to `width` with each run's last entry (its
    states must not be used). text [B, T]: all documents, padded."""
    first, end = torch.tensor(spans, device=text.device).T[..., None]  # [B, 1] each
    positions = first + torch.arange(width, device=text.device)
    at = torch.minimum(positions, end - 1)

    def stack(values: list[Tensor | None]) -> Tensor | None:
        picked = [value[row] for value, row in zip(values, at, strict=True) if value is not None]
        return torch.stack(picked) if picked else None

    return TargetStates(
        tokens=text.gather(1, at),
        next_tokens=text.gather(1, at + 1),
        positions=positions,
        valid=positions < end,
        taps=stack([taps for taps, _ in features]),
        last_hidden=stack([last for _, last in features]),
    )


def _compare(
    drafter: Any, trained: list[list[Tensor]], decoded: Sightings, depth: int, tolerance: float
) -> ParityReport:
    worst = [0.0] * depth
    for (k, row, position), logits in sorted(decoded.items(), key=lambda item: item[0]):
        expected, found = trained[row][k - 1][position].double(), logits.double()
        gaps = (expected - found).abs() / max(1.0, float(expected.abs().max()))
        gap = float(gaps.max())
        if not gap <= tolerance:  # also when it is not a number
            column = int(gaps.argmax())
            raise ParityError(
                f"parity: kind '{drafter.kind}' disagrees with itself at depth {k}, position "
                f"{position} of document {row}: logit {column} is {float(expected[column]):.6g} in "
                f"training and {float(found[column]):.6g} in decoding (relative difference "
                f"{gap:.3g}, allowed {tolerance:.3g}). The drafter would be trained for something "
                "it is not asked when it serves."
            )
        worst[k - 1] = max(worst[k - 1], gap)
    return ParityReport(len(decoded), tuple(worst), tolerance)
