"""Computes tau, TAR, acceptance by depth, speedup and their intervals from the outcomes of verify
passes. All divisions are in this file.

Definitions (docs/vocabulary.md repeats them for users). Every mean is a ratio of sums over prompts,
never a mean of ratios.

- tau = committed tokens / verify passes. The bonus counts; tokens cut at end-of-text do not, nor
  does the token from prefill.
- beta_i = share of passes in which depth i was accepted; alpha_i = beta_i / beta_(i-1) with beta_0
  = 1 (0 where beta_(i-1) is 0).
- TAR = accepted drafted tokens / (accepted + the refusals that ended a pass); 0 when nothing was
  drafted.
- speedup = tokens per second / those of the same loop without a drafter, over the same prompts,
  prefill excluded.
- ideal speedup = tau / (1 + gamma c): the speedup if verifying N nodes cost as much as verifying
  one and only drafting took extra time. gamma c is measured as draft seconds per pass / baseline
  seconds per pass, so a head that drafts all depths in one go (gamma = 1) and one that drafts level
  by level need no separate treatment.
- efficiency = speedup / ideal speedup.

Intervals are 95% bootstrap percentiles over prompts: the passes of one prompt depend on one
another, prompts do not. The turns of a conversation, and a prompt at several lengths, are one unit.

Legend: P prompts, D deepest drafted level, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heads.api.errors import UserError
from inference.decoding.requests import PassRecord

RESAMPLES = 2000
PHASES = ("draft", "verify", "commit", "other")
"""The parts of decode time, as the engine's clock names them; prefill is reported apart."""
GAP = "gap"
"""The time between steps, where a clock can measure it (CUDA); part of decode time as well."""
CLOCK = (*PHASES, GAP, "prefill")
FIRST_BIN = 512
"""Contexts of fewer tokens share a bin; every further bin ends at twice the one before."""
TIMING_NOISE = 0.03
"""How far a speedup may exceed tau through the clock's noise on a quiet machine."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """The outcome of decoding one prompt once: its passes and its time by phase."""

    prompt: str
    """Prompt id. Repeats of a prompt are summed; intervals resample prompts."""
    domain: str
    passes: Sequence[PassRecord]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds per phase (`PHASES`, "prefill"); empty where nothing is timed."""
    unit: str = ""
    """What intervals resample, if several prompts depend on one another (`Prompt.unit`); empty: the
    prompt."""


@dataclass(frozen=True)
class PerPrompt:
    """Sums per prompt. Subclasses add arrays [P, ...] and dictionaries of arrays.

    units [P]: what intervals resample; by default every prompt is one.
    """

    prompts: list[str]
    domains: list[str]
    units: list[str] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        if not self.units:
            object.__setattr__(self, "units", list(self.prompts))

    def resampled(self, seed: int, resamples: int = RESAMPLES) -> Floats:
        """Bootstrap weights of the prompts [R, P]; those of one unit are drawn together."""
        place = {unit: row for row, unit in enumerate(dict.fromkeys(self.units))}
        drawn = resample_weights(len(place), seed, resamples)
        return drawn[:, [place[unit] for unit in self.units]]

    def take(self, rows: Sequence[int]) -> Self:
        """The sums of some prompts, in the order of `rows`."""
        index = np.asarray(rows, dtype=np.int64)

        def pick(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: item[index] for key, item in value.items()}
            return [value[i] for i in rows] if isinstance(value, list) else value[index]

        return type(self)(**{name: pick(value) for name, value in vars(self).items()})

    def domain_rows(self) -> dict[str, list[int]]:
        """Domain -> its rows, domains in alphabetical order."""
        return {
            name: [i for i, domain in enumerate(self.domains) if domain == name]
            for name in sorted(set(self.domains))
        }

    def context_rows(self, contexts: Mapping[str, int]) -> dict[tuple[int, int], list[int]]:
        """`context_bin` -> its rows, short contexts first; bins without a prompt are absent.

        contexts: tokens of each prompt by its id.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            found.setdefault(context_bin(contexts[prompt]), []).append(row)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Totals(PerPrompt):
    """Sums per prompt, in order of first appearance; everything below is a ratio of these.

    committed, passes, accepted, refused [P]; reached [P, D]: passes that accepted depth i+1;
    seconds: phase -> [P].
    """

    committed: Floats
    passes: Floats
    accepted: Floats
    refused: Floats
    reached: Floats
    seconds: dict[str, Floats]

    @classmethod
    def collect(cls, outcomes: Iterable[Outcome], depth: int) -> Totals:
        """Sum `outcomes` per prompt. depth: the deepest drafted level (0 without a drafter)."""
        rows: dict[str, tuple[str, str, Floats, Floats, dict[str, float]]] = {}
        for outcome in outcomes:
            names = outcome.domain, outcome.unit or outcome.prompt
            empty = (*names, np.zeros(4), np.zeros(depth), dict.fromkeys(CLOCK, 0.0))
            *_, counts, depths, seconds = rows.setdefault(outcome.prompt, empty)
            for record in outcome.passes:
                assert record.accepted <= depth, (
                    f"a pass accepted {record.accepted} tokens of a draft {depth} deep"
                )
                counts += (record.committed, 1, record.accepted, record.rejected)
                depths[: record.accepted] += 1
            for phase, value in outcome.seconds.items():
                seconds[phase] += value
        if not rows:
            raise UserError(
                "there is nothing to measure: no prompt was decoded. Give at least one prompt."
            )
        domains, units, counted, reached, clocks = zip(*rows.values(), strict=True)
        times = {phase: np.array([clock[phase] for clock in clocks]) for phase in CLOCK}
        committed, passes, accepted, refused = np.stack(counted).T
        sums = (committed, passes, accepted, refused, np.stack(reached), times)
        return cls(list(rows), list(domains), *sums, units=list(units))

    def spent(self, *phases: str) -> Floats:
        """Seconds per prompt [P] in some phases."""
        return sum((self.seconds[phase] for phase in phases), start=np.zeros(len(self.prompts)))

    @property
    def decode_seconds(self) -> Floats:
        """Decode time per prompt [P], prefill excluded."""
        return self.spent(*PHASES, GAP)

    def only(self, prompts: Sequence[str]) -> Totals:
        """Some of the prompts, in the given order."""
        place = {prompt: row for row, prompt in enumerate(self.prompts)}
        return self.take([place[prompt] for prompt in prompts])

    def like(self, other: Totals) -> Totals:
        """The same prompts as `other`, in its order, so that both can be resampled together."""
        assert set(self.prompts) == set(other.prompts), (
            "an arm and its baseline must have decoded the same prompts"
        )
        return self.only(other.prompts)


@dataclass(frozen=True)
class TauEstimate:
    """How well a drafter is accepted, without timing: what the trainer monitors."""

    tau: float
    ci95: tuple[float, float]
    tar: float
    unconditional: tuple[float, ...]
    """beta_i for i = 1 .. depth."""
    conditional: tuple[float, ...]
    """alpha_i for i = 1 .. depth."""
    tokens: int
    verify_passes: int


def context_bin(tokens: int) -> tuple[int, int]:
    """The bin [first, end) of a context: [0, 512), [512, 1024), [1024, 2048) and so on."""
    end = max(FIRST_BIN, 1 << tokens.bit_length())
    return (0 if end == FIRST_BIN else end // 2), end


def divide(numerator: float, denominator: float) -> float:
    """numerator / denominator as a plain float, 0 where the denominator is 0."""
    return float(numerator / denominator) if denominator else 0.0


def resample_weights(prompts: int, seed: int, resamples: int = RESAMPLES) -> Floats:
    """How often each prompt is drawn in each bootstrap resample [R, P]."""
    shares = np.full(prompts, 1.0 / prompts)
    drawn = np.random.default_rng(seed).multinomial(prompts, shares, size=resamples)
    return drawn.astype(np.float64)


def interval95(numerators: Floats, denominators: Floats) -> tuple[float, float]:
    """`middle95` of numerators / denominators [R]; resamples without any pass are left out."""
    defined = denominators > 0
    return middle95(numerators[defined] / denominators[defined])


def ratios(numerators: Floats, denominators: Floats) -> Floats:
    """numerators / denominators, entry by entry; 0 where a denominator is 0."""
    top, bottom = np.broadcast_arrays(numerators, denominators)
    return np.divide(top, bottom, out=np.zeros(top.shape), where=bottom != 0)


def middle95(values: Floats) -> tuple[float, float]:
    """2.5% and 97.5% percentiles of resampled values [R]."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def tau_estimate(totals: Totals, seed: int = 0) -> TauEstimate:
    """tau, TAR and acceptance by depth. Raises `UserError` when nothing was verified."""
    passes = totals.passes.sum()
    if passes == 0:
        raise UserError(
            "nothing was verified: every answer ended with its first token, so there is no "
            "accepted length to report. Give other prompts or a larger max_new_tokens."
        )
    weights = totals.resampled(seed)
    accepted = totals.accepted.sum()
    beta = [divide(reached, passes) for reached in totals.reached.sum(0)]
    alpha = [divide(here, before) for here, before in zip(beta, [1.0, *beta], strict=False)]
    return TauEstimate(
        tau=divide(totals.committed.sum(), passes),
        ci95=interval95(weights @ totals.committed, weights @ totals.passes),
        tar=divide(accepted, accepted + totals.refused.sum()),
        unconditional=tuple(beta),
        conditional=tuple(alpha),
        tokens=int(totals.committed.sum()),
        verify_passes=int(passes),
    )


def tokens_per_second(totals: Totals) -> float:
    """Committed tokens per decode second over all prompts."""
    return divide(totals.committed.sum(), totals.decode_seconds.sum())


def tokens_per_second_ci95(totals: Totals, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of `tokens_per_second` over prompts."""
    weights = totals.resampled(seed)
    if not totals.decode_seconds.any():
        return 0.0, 0.0
    return interval95(weights @ totals.committed, weights @ totals.decode_seconds)


def speedup(arm: Totals, baseline: Totals, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Ratio of both tokens/s over the same prompts, with a paired bootstrap interval."""
    arm = arm.like(baseline)
    weights = baseline.resampled(seed)
    fast = (weights @ arm.committed) * (weights @ baseline.decode_seconds)
    slow = (weights @ baseline.committed) * (weights @ arm.decode_seconds)
    if not slow.any():
        return 0.0, (0.0, 0.0)
    return divide(tokens_per_second(arm), tokens_per_second(baseline)), interval95(fast, slow)


@dataclass(frozen=True)
class Gain:
    """The gain of one drafter over another on the same prompts, with paired 95% intervals."""

    tau: float
    """Difference of tau."""
    tau_ci95: tuple[float, float]
    accepted: float
    """Accepted drafted tokens per pass (tau - 1) over the other's, less 1."""
    accepted_ci95: tuple[float, float]


def gain(new: Totals, old: Totals) -> Gain:
    """The gain of `new` over `old`. Raises `UserError` if one of them verified nothing."""
    new = new.like(old)
    here, before = tau_estimate(new), tau_estimate(old)
    weights = old.resampled(seed=0)
    passes = (weights @ new.passes, weights @ old.passes)
    drawn = (passes[0] > 0) & (passes[1] > 0)
    theirs, ours = (
        (weights @ arm.committed)[drawn] / count[drawn]
        for arm, count in zip((old, new), passes[::-1], strict=True)
    )
    difference, interval = here.tau - before.tau, middle95(ours - theirs)
    if before.tau <= 1.0:
        return Gain(difference, interval, 0.0, (0.0, 0.0))
    low, high = interval95(ours - 1.0, theirs - 1.0)
    share = divide(here.tau - 1.0, before.tau - 1.0)
    return Gain(difference, interval, share - 1.0, (low - 1.0, high - 1.0))


def ideal_speedup(arm: Totals, baseline: Totals) -> float:
    """tau / (1 + gamma c) with gamma c = draft seconds per pass / baseline seconds per pass."""
    draft = divide(arm.seconds["draft"].sum(), arm.passes.sum())
    step = divide(baseline.decode_seconds.sum(), baseline.passes.sum())
    return divide(divide(arm.committed.sum(), arm.passes.sum()), 1.0 + divide(draft, step))


def step_ms(totals: Totals) -> dict[str, float]:
    """Milliseconds per verify pass, by phase; the gap between steps only if it was measured."""
    phases = (*PHASES, GAP) if totals.seconds[GAP].any() else PHASES
    return {
        phase: 1000.0 * divide(totals.seconds[phase].sum(), totals.passes.sum()) for phase in phases
    }


def exceeds_tau(arm: Totals, baseline: Totals, seed: int = 0) -> bool:
    """Whether a speedup exceeds tau by more than the clock's noise. This is impossible on a quiet
    machine: a pass over several tokens is not cheaper than a pass over one, so something else
    slowed plain decoding down.

    Speedup / tau is baseline seconds per pass / the drafter's seconds per pass. The spread of tau
    cancels, so the interval of this quotient decides: its lower end must lie above 1.
    """
    arm = arm.like(baseline)
    weights = baseline.resampled(seed)
    tau = divide(arm.committed.sum(), arm.passes.sum())
    ratio = divide(tokens_per_second(arm), tokens_per_second(baseline))
    plain = (weights @ baseline.decode_seconds) * (weights @ arm.passes)
    drafted = (weights @ arm.decode_seconds) * (weights @ baseline.passes)
    return ratio > tau * (1.0 + TIMING_NOISE) and interval95(plain, drafted)[0] > 1.0


def fastest_repeats(seconds: Mapping[str, Mapping[int, float]], count: int) -> list[int]:
    """The `count` repeats in which all arms together took the least time, in ascending order.

    seconds: arm -> repeat -> decode seconds over all prompts. All arms take turns within a repeat,
    so the choice favours no arm.
    """
    repeats = sorted({repeat for arm in seconds.values() for repeat in arm})
    spent = {repeat: sum(arm[repeat] for arm in seconds.values()) for repeat in repeats}
    return sorted(sorted(repeats, key=spent.__getitem__)[:count])


def repeat_spread(seconds: Mapping[int, float], repeats: Sequence[int]) -> float:
    """The slowest of some repeats of one arm over the fastest, less 1. Repeats decode the same text
    with the same passes, so only the machine makes a difference. seconds: by repeat."""
    times = [seconds[repeat] for repeat in repeats]
    return max(0.0, divide(max(times), min(times)) - 1.0)


def summarise(
    arm: Totals, baseline: Totals, contexts: Mapping[str, int], seed: int = 0
) -> dict[str, Any]:
    """The measured numbers of one entry of `drafters` in report.json.

    contexts: tokens of each prompt by its id. The context of an answer is the one at its start. So
    each prompt is in one bin, and bins, like domains, are resampled over prompts.
    """
    arm = arm.like(baseline)
    estimate, (ratio, ratio_ci95) = tau_estimate(arm, seed), speedup(arm, baseline, seed)
    return {
        "tau": estimate.tau,
        "tau_ci95": list(estimate.ci95),
        "tokens": estimate.tokens,
        "verify_passes": estimate.verify_passes,
        "tar": estimate.tar,
        "acceptance": {
            "unconditional": list(estimate.unconditional),
            "conditional": list(estimate.conditional),
        },
        "domains": {
            name: _part(arm.take(rows), baseline.take(rows), seed)[0]
            for name, rows in arm.domain_rows().items()
        },
        "contexts": [
            _context(place, arm.take(rows), baseline.take(rows), seed)
            for place, rows in arm.context_rows(contexts).items()
        ],
        "tokens_per_second": tokens_per_second(arm),
        "speedup": ratio,
        "speedup_ci95": list(ratio_ci95),
        "ideal_speedup": ideal_speedup(arm, baseline),
        "step_ms": step_ms(arm),
    }


def _part(arm: Totals, baseline: Totals, seed: int) -> tuple[dict[str, Any], list[float]]:
    """The numbers for some of the prompts, with the 95% interval of their speedup."""
    if not arm.passes.sum():  # every answer of these prompts was a single token
        return {"tau": 0.0, "tau_ci95": [0.0, 0.0], "tar": 0.0, "speedup": 0.0}, [0.0, 0.0]
    estimate, (ratio, ratio_ci95) = tau_estimate(arm, seed), speedup(arm, baseline, seed)
    found = {"tau": estimate.tau, "tau_ci95": list(estimate.ci95), "tar": estimate.tar}
    return {**found, "speedup": ratio}, list(ratio_ci95)


def _context(place: tuple[int, int], arm: Totals, baseline: Totals, seed: int) -> dict[str, Any]:
    """One bin of contexts."""
    found, interval = _part(arm, baseline, seed)
    span = {"first": place[0], "end": place[1], "prompts": len(arm.prompts)}
    return {**span, **found, "speedup_ci95": interval}


def domain_speedup_ci95(
    arm: Totals, baseline: Totals, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Domain -> 95% interval of its speedup. The `domains` of report.json have no field for it."""
    arm = arm.like(baseline)
    return {
        name: speedup(arm.take(rows), baseline.take(rows), seed)[1]
        for name, rows in arm.domain_rows().items()
    }
