"""Searches the layers of a target that draft best for the whole target (Draft & Verify, 2309.08168;
SWIFT, 2410.06916).

The value of a set of kept parts (whole layers, or attention and MLP of a layer separately) is the
ideal speedup: tau / (1 + gamma c), with gamma drafted tokens and c the cost of one drafted token as
a share of the target's. tau is measured by decoding, which takes seconds per set, and there are 2^U
sets. So the search learns from its trials with a Bayesian linear model of what each part, and each
pair of neighbours, adds to the log of a drafted token's acceptance. The model proposes the most
promising set among the neighbours of the best ones, by a draw from its posterior (Thompson
sampling). Every `GREEDY_EVERY`-th trial uses the model's mean instead of a draw.

    parts, head_cost = parts_of(target)
    config = SearchConfig(evaluations=60, depth=4, fixed_cost=head_cost)
    best = search_layers(parts, evaluate, config).best

Legend: U parts, E trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le, Lt
from numpy.typing import NDArray

from heads.api.config import Depth, Seed, UnitInterval, config
from heads.api.errors import UserError
from inference.measure import metrics
from inference.target.model import TargetModel

OBJECTIVES = ("speedup", "tau")
GREEDY_EVERY = 3
ELITE = 4
"""Best sets whose neighbours are considered."""
RANDOM_SHARE = 0.25
"""Share of the trials that are random sets, at the start: without them the model has too little
data on most parts."""
PRIOR, NOISE = 0.5, 0.1
"""Standard deviations of the model's weights, and of the linear model's error, in logs of the
acceptance."""
LEAST = 1e-2
"""Acceptance below which sets are equally bad."""


@dataclass(frozen=True, order=True)
class SkippablePart:
    """A part that can be left out: a layer (0-based), or its "attention" or "mlp". cost: its share
    of the target's cost of one token; the LM head, which cannot be skipped, is not part of it."""

    layer: int
    what: str
    cost: float

    @property
    def attends(self) -> bool:
        return self.what != "mlp"


Chosen = tuple[bool, ...]
"""Which of the parts are kept, in their order."""
Evaluate = Callable[[Chosen], float]
"""tau of decoding with the kept parts."""


@config("search")
@dataclass(frozen=True)
class SearchConfig:
    """The length of the search, and the draft to search for."""

    evaluations: Annotated[int, Ge(4), Le(1_000_000)] = 48
    """Number of sets to try (>= 4)."""
    depth: Depth = 4
    """Tokens drafted per pass: gamma (>= 1)."""
    fixed_cost: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the target's cost per token that every drafted token has whatever is left out: that
    of its LM head (0 to below 1)."""
    most_cost: UnitInterval = 1.0
    """Largest cost of a drafted token to try, as a share of the target's cost of a token."""
    objective: Literal["speedup", "tau"] = "speedup"
    """speedup: tau / (1 + gamma c); or tau: the most accepted tokens within `most_cost`."""
    seed: Seed = 0
    """Seed of the search."""


@dataclass(frozen=True)
class Trial:
    """A set that was tried: its parts, their share c of the target's cost, tau, tau / (1 + gamma
    c), and the value of the objective."""

    kept: Chosen
    cost: float
    tau: float
    speedup: float
    value: float


@dataclass(frozen=True)
class SearchResult:
    """All trials in their order."""

    parts: tuple[SkippablePart, ...]
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        return max(self.trials, key=lambda trial: trial.value)


def parts_of(
    target: TargetModel, sublayers: bool = False
) -> tuple[tuple[SkippablePart, ...], float]:
    """The parts of a target and the fixed cost (its LM head), as shares of the weights that
    decoding one token reads. sublayers: attention and MLP of a layer can be left out separately."""
    state, both = target.weights.state, ("attention", "mlp")
    wanted = both if sublayers else ("layer",)
    layers = range(target.info.num_layers)
    sizes = {(layer, what): 0 for layer in layers for what in wanted}
    for name in state:
        number, _, rest = name.partition(".layers.")[2].partition(".")
        if number.isdigit() and rest:
            what = both["attn" not in rest and "attention" not in rest] if sublayers else "layer"
            sizes[int(number), what] += state[name].numel()
    head = target.weights.lm_head.numel()
    total = sum(sizes.values()) + head
    parts = (SkippablePart(layer, what, size / total) for (layer, what), size in sizes.items())
    return tuple(parts), head / total


def search_layers(
    parts: Sequence[SkippablePart],
    evaluate: Evaluate,
    config: SearchConfig,
    first: Sequence[Chosen] = (),
) -> SearchResult:
    """Search the set of parts with the best speedup. It tries the sets in `first`, evenly spread
    layers and prefixes before others.

    Raises `UserError` if there are fewer than two parts, none with attention, or no set within the
    allowed cost.
    """
    if len(parts) < 2 or not any(part.attends for part in parts):
        raise UserError(
            f"there is nothing to search among {len(parts)} parts of the target's layers."
        )
    search = _Search(parts, evaluate, config, np.random.default_rng(config.seed), first)
    search.run()
    if not search.trials:
        raise UserError(
            f"no set of layers to start from costs at most {config.most_cost:g} of the target, of "
            f"which every drafted token pays {config.fixed_cost:.2f} for the LM head alone. Allow "
            "a larger cost."
        )
    return SearchResult(tuple(parts), tuple(search.trials.values()))


def ideal_speedup(tau: float, depth: int, cost: float) -> float:
    """tau / (1 + gamma c): the ideal speedup of drafting gamma tokens of cost c each."""
    return metrics.divide(tau, 1 + depth * cost)


@dataclass
class _Search:
    parts: Sequence[SkippablePart]
    evaluate: Evaluate
    config: SearchConfig
    rng: np.random.Generator
    first: Sequence[Chosen] = ()
    trials: dict[Chosen, Trial] = field(default_factory=dict)

    def run(self) -> None:
        """Try `config.evaluations` sets: starting sets, random ones, then those with the best
        expected value under the model."""
        trials, count = self.trials, self.config.evaluations
        for kept in self.seeds():
            if len(trials) < max(4, count // 2):
                self.attempt(kept)
        wanted = min(count, len(trials) + round(RANDOM_SHARE * count))
        for _ in range(20 * count):
            if len(trials) < wanted:
                self.attempt(self.random_set())
        while trials and len(trials) < count:
            pool = [kept for kept in self.pool() if self.cost(kept) <= self.config.most_cost]
            if not pool:
                break
            weights = self.posterior(drawn=len(trials) % GREEDY_EVERY != 0)
            logs = np.minimum(_features(pool) @ weights, 0.0)
            taus = accepted_length(np.exp(logs), self.config.depth)
            expected = [
                self.value(tau, self.cost(kept)) for tau, kept in zip(taus, pool, strict=True)
            ]
            self.attempt(pool[int(np.argmax(expected))])

    def attempt(self, kept: Chosen) -> None:
        """Evaluate a set if it is new, can draft, and does not cost too much."""
        cost = self.cost(kept)
        if kept not in self.trials and self.drafts(kept) and cost <= self.config.most_cost:
            tau = self.evaluate(kept)
            speedup = ideal_speedup(tau, self.config.depth, cost)
            self.trials[kept] = Trial(kept, cost, tau, speedup, self.value(tau, cost))

    def value(self, tau: float, cost: float) -> float:
        """The value that the search maximises."""
        depth = self.config.depth
        return float(tau) if self.config.objective == "tau" else ideal_speedup(tau, depth, cost)

    def drafts(self, kept: Chosen) -> bool:
        """Whether a set keeps some attention and leaves out at least one part."""
        pairs = zip(kept, self.parts, strict=True)
        return any(keep and part.attends for keep, part in pairs) and not all(kept)

    def cost(self, kept: Chosen) -> float:
        pairs = zip(kept, self.parts, strict=True)
        return self.config.fixed_cost + sum(part.cost for keep, part in pairs if keep)

    def seeds(self) -> list[Chosen]:
        """The starting sets: given sets; evenly spread layers, at several shares; only the first
        layers; single parts left out."""
        layers = max(part.layer for part in self.parts) + 1
        found: list[Chosen] = [*self.first]
        for share in (0.5, 0.75, 0.25):
            count = max(2, round(layers * share))
            spread = {round(place * (layers - 1) / (count - 1)) for place in range(count)}
            found.append(tuple(part.layer in spread for part in self.parts))
            found.append(tuple(part.layer < count for part in self.parts))
        found += [tuple(other is not part for other in self.parts) for part in self.parts]
        return list(dict.fromkeys(found))

    def pool(self) -> list[Chosen]:
        """Untried sets near the best ones: one part more or less, one exchanged, and random changes
        of two to four parts."""
        count, found = len(self.parts), dict[Chosen, None]()
        for trial in sorted(self.trials.values(), key=lambda trial: -trial.value)[:ELITE]:
            kept = [place for place, keep in enumerate(trial.kept) if keep]
            left = [place for place, keep in enumerate(trial.kept) if not keep]
            changes = [[place] for place in range(count)]
            changes += [[one, other] for one in kept for other in left]
            for _ in range(8):
                size = min(count, int(self.rng.integers(2, 5)))
                changes.append(list(self.rng.choice(count, size, False)))
            for change in changes:
                new = tuple(keep != (place in change) for place, keep in enumerate(trial.kept))
                if new not in self.trials and self.drafts(new):
                    found[new] = None
        return list(found)

    def random_set(self) -> Chosen:
        """A random set that uses up the allowed cost, or a random share of it if speed is the
        objective."""
        fixed = self.config.fixed_cost
        left = min(self.config.most_cost, 1.0) - fixed
        if self.config.objective == "speedup":
            left *= float(self.rng.uniform(0.2, 1.0))
        kept = [False] * len(self.parts)
        for place in self.rng.permutation(len(self.parts)):
            if self.parts[place].cost <= left + 1e-9:
                kept[place] = True
                left -= self.parts[place].cost
        return tuple(kept)

    def posterior(self, drawn: bool) -> NDArray[np.float64]:
        """Weights [2U] of the linear model of log acceptance: a draw from their posterior given the
        trials, or its mean."""
        depth = self.config.depth
        inputs = _features(list(self.trials))
        values = np.log([acceptance_of(trial.tau, depth) for trial in self.trials.values()])
        prior_mean = np.zeros(inputs.shape[1])
        prior_mean[-1] = values.mean()
        precision = inputs.T @ inputs / NOISE**2 + np.eye(inputs.shape[1]) / PRIOR**2
        covariance = np.linalg.inv(precision)
        mean = covariance @ (inputs.T @ values / NOISE**2 + prior_mean / PRIOR**2)
        spread = (covariance + covariance.T) / 2
        return np.asarray(self.rng.multivariate_normal(mean, spread) if drawn else mean)


def accepted_length(acceptance: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    """tau of chains of `depth` tokens if each is accepted with the same probability: 1 + a + ... +
    a^depth."""
    return np.sum([acceptance**power for power in range(depth + 1)], axis=0)


def acceptance_of(tau: float, depth: int) -> float:
    """The probability that gives this tau: the inverse of `accepted_length`, at least `LEAST`."""
    grid = np.linspace(LEAST, 1.0, 2000)
    return float(np.interp(tau, accepted_length(grid, depth), grid))


def _features(sets: Sequence[Chosen]) -> NDArray[np.float64]:
    """The model's inputs for E sets [E, 2U]: the kept parts, the pairs of neighbours that are both
    kept, and a constant."""
    bits = np.asarray(sets, dtype=np.float64)
    return np.concatenate([bits, bits[:, :-1] * bits[:, 1:], np.ones((len(bits), 1))], 1)
