"""Weights of tokens in the loss, from the evidence of records.

An error at depth d costs the tokens that would have followed: with a_j the share of tests at depth
j that were passed, a draft that is right at d continues for

    v_d = 1 + a_{d+1} + a_{d+1} a_{d+2} + ...

tokens up to the deepest level (the token itself included). A token whose draft was rejected at
depth d weighs 1 + error_weight (1 - c) v_d / v_1, c being the chance min(1, q / p) that rejection
sampling would have kept it; all others weigh 1. Likewise, a root weighs 1 + root_weight v_d / v_1
if its draft failed at depth d. The loss of a domain is its share of the traffic times (1 / tau - 1
/ best tau that drafts of this length can have); the domain weighs by that over its share of the
supervised tokens.

Every weight is then divided by the mean over all supervised tokens, so that the loss keeps its
scale. These means follow from sums of one pass over the records (`WeightTotals`); no weight is held
in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heads.api.config import LARGEST_DEPTH
from heads.api.errors import UserError
from train.feedback.config import FeedbackConfig
from train.feedback.evidence import TokenEvidence

DEEPEST = LARGEST_DEPTH + 2
"""More than the depth of any drafted chain or tree, and than the level behind it."""


def _by_depth() -> NDArray[np.float64]:
    return np.zeros(DEEPEST)


@dataclass
class DomainTally:
    """Sums over a domain's documents. supervised: tokens; passes, committed: of verifications;
    missing [DEEPEST]: sum of 1 - chance over supervised errors by depth; failed_roots [DEEPEST]:
    roots before a supervised token by error depth."""

    supervised: int = 0
    passes: int = 0
    committed: int = 0
    missing: NDArray[np.float64] = field(default_factory=_by_depth)
    failed_roots: NDArray[np.float64] = field(default_factory=_by_depth)


@dataclass
class WeightTotals:
    """Sums over all documents. tested, passed [DEEPEST]: tokens by depth."""

    domains: dict[str, DomainTally] = field(default_factory=lambda: defaultdict(DomainTally))
    tested: NDArray[np.float64] = field(default_factory=_by_depth)
    passed: NDArray[np.float64] = field(default_factory=_by_depth)
    unfit: int = 0
    errors: int = 0

    def add(self, domain: str, found: TokenEvidence, supervised: NDArray[np.bool_]) -> None:
        """Add one document; supervised [N] bool: as in the training."""
        at = self.domains[domain]
        at.supervised += int(supervised.sum())
        at.passes += found.passes
        at.committed += found.committed
        self.unfit += found.unfit
        self.errors += int(found.failed.sum())
        tested = found.depth > 0
        np.add.at(self.tested, found.depth[tested], 1.0)
        np.add.at(self.passed, found.depth[tested & ~found.failed], 1.0)
        wrong = found.failed & supervised
        np.add.at(at.missing, found.depth[wrong], 1.0 - found.chance[wrong])
        roots = (found.roots > 0) & supervised
        np.add.at(at.failed_roots, found.roots[roots], 1.0)

    @property
    def deepest(self) -> int:
        """The deepest level that was tested; 0 without records."""
        places = np.flatnonzero(self.tested)
        return int(places[-1]) if len(places) else 0

    def going_on(self) -> NDArray[np.float64]:
        """v_d / v_1 [DEEPEST] by depth; 0 if nothing was tested."""
        found = _by_depth()
        shares = np.divide(self.passed, self.tested, out=_by_depth(), where=self.tested > 0)
        for depth in range(self.deepest, 0, -1):
            found[depth] = 1.0 + shares[depth + 1] * found[depth + 1]
        return found / found[1] if self.deepest else found


@dataclass(frozen=True)
class Weighing:
    """The computation of weights from the totals. cost [DEEPEST]: v_d / v_1; factors: domain ->
    factor."""

    config: FeedbackConfig
    cost: NDArray[np.float64]
    factors: Mapping[str, float]
    token_mean: float
    root_mean: float

    @classmethod
    def of(cls, config: FeedbackConfig, tally: WeightTotals) -> Weighing:
        """The weighing that gives tokens and roots a mean of 1 over all supervised tokens."""
        cost, factors, domains = tally.going_on(), domain_factors(config, tally), tally.domains
        plain = cls(config, cost, factors, 1.0, 1.0)
        tokens = max(1, sum(one.supervised for one in domains.values()))
        weight = sum(one.supervised * plain.domain_mean(name, one) for name, one in domains.items())
        roots = sum(
            one.supervised + config.root_weight * float(one.failed_roots @ cost)
            for one in domains.values()
        )
        return cls(config, cost, factors, weight / tokens or 1.0, roots / tokens or 1.0)

    def domain_mean(self, domain: str, tally: DomainTally) -> float:
        error = self.config.error_weight if self.config.token_weights else 0.0
        heavier = 1.0 + error * float(tally.missing @ self.cost) / max(1, tally.supervised)
        return self.factors[domain] * heavier / self.token_mean

    def tokens(self, domain: str, found: TokenEvidence) -> NDArray[np.float32]:
        """Weights [N] of a document's tokens."""
        weights = np.ones(len(found.depth))
        if self.config.token_weights:
            missing = np.where(found.failed, 1.0 - found.chance, 0.0)
            weights += self.config.error_weight * missing * self.cost[found.depth]
        return (weights * (self.factors[domain] / self.token_mean)).astype(np.float32)

    def roots(self, found: TokenEvidence) -> NDArray[np.float32]:
        """Weights [N] of the drafts that begin at a document's tokens."""
        weights = 1.0 + self.config.root_weight * self.cost[np.maximum(found.roots, 0)]
        return (weights / self.root_mean).astype(np.float32)


def domain_factors(config: FeedbackConfig, tally: WeightTotals) -> dict[str, float]:
    """The factor of each domain's weights; raises `UserError` for unknown domains of traffic."""
    names = list(tally.domains)
    plain = dict.fromkeys(names, 1.0)
    if not config.domain_weights:
        return plain
    unknown = sorted(set(config.traffic) - set(names))
    if unknown:
        raise UserError(
            f"feedback.traffic names {unknown}; the answers have the domains {sorted(names)}."
        )
    total = sum(one.supervised for one in tally.domains.values())
    own = {name: one.supervised / max(1, total) for name, one in tally.domains.items()}
    shares = {name: config.traffic.get(name, 0.0) for name in names} if config.traffic else own
    everything = sum(shares.values())
    all_passes = sum(one.passes for one in tally.domains.values())
    all_tokens = sum(one.committed for one in tally.domains.values())
    factors = {}
    for name, one in tally.domains.items():
        passes, tokens = (one.passes, one.committed) if one.committed else (all_passes, all_tokens)
        per_token = passes / tokens if tokens else 1.0
        lost = max(0.0, per_token - 1.0 / (tally.deepest + 1)) * shares[name] / everything
        factors[name] = (lost / own[name]) ** config.domain_power if own[name] else 0.0
    lossless = not any(own[name] and factors[name] for name in names)
    return plain if lossless else factors


def replay_mask(
    found: TokenEvidence, supervised: NDArray[np.bool_], config: FeedbackConfig
) -> NDArray[np.bool_]:
    """The supervised tokens [N] that replay keeps: first errors, the drafts that they end from
    their roots on, and tokens nearby. (A block is drafted from its root, so a head that drafts
    blocks sees the error only if the root counts.) A document without records keeps all."""
    if not config.replay or not found.passes:
        return supervised
    near = np.zeros(len(supervised), dtype=bool)
    for at in np.flatnonzero(found.failed):
        before = max(config.replay_before, int(found.depth[at]))
        near[max(0, at - before) : at + config.replay_after + 1] = True
    return near & supervised
