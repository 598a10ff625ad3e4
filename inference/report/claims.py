"""Rules for a report's claims: which speedups are claimed, what the headline says, and whether the
machine was quiet.

The same rules apply to every output: report.md, report.html, the model card and the terminal take
their sentences from here. A speedup is claimed only if its 95% interval excludes 1. If the interval
contains 1, "no difference shown" stands beside the number.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.report.model import DrafterResult, Interval, Repeats, Report, ServerMeasurement

NO_DIFFERENCE = "no difference shown"
IMPOSSIBLE = "not valid: above tau"
UNTAUGHT_TAU = 1.05
"""Practically no draft of a trained drafter with a lower tau is accepted."""
UNRELIABLE = (
    "Speeds and speedups of this measurement are not reliable; tau, acceptance and losslessness do "
    "not depend on time. Close other programs and measure again with run.overwrite=true."
)


@dataclass(frozen=True)
class Sentence:
    """A statement about a report. subject: the drafter's name, which `text` continues."""

    text: str
    subject: str = ""

    def __str__(self) -> str:
        return self.subject + self.text


def with_interval(value: float, interval: Interval | None) -> str:
    """ "2.31 [2.20, 2.43]", or "2.31" without an interval."""
    if interval is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def shows_difference(interval: Interval | None) -> bool:
    """Whether a ratio with this interval differs from 1. Without an interval, or with one of zero
    width, it is that of a single prompt, which shows nothing about other prompts."""
    low, high = interval or (1.0, 1.0)
    return low < high and (low > 1.0 or high < 1.0)


def verdict(interval: Interval | None, *, impossible: bool = False) -> str:
    """The remark beside a ratio that must not be claimed; empty for one that may be claimed."""
    if impossible:
        return IMPOSSIBLE
    return "" if shows_difference(interval) else NO_DIFFERENCE


def ratio_text(value: float, interval: Interval | None) -> str:
    """ "1.80 [1.70, 1.90]", or "1.40 [0.82, 2.31], no difference shown"."""
    return ", ".join(filter(None, (with_interval(value, interval), verdict(interval))))


def verdict_of(report: Report, drafter: DrafterResult) -> str:
    """`verdict` of a drafter's speedup."""
    impossible = report.repeats is not None and drafter.name in report.repeats.above_tau
    return verdict(drafter.speedup_ci95, impossible=impossible)


def speedup_text(report: Report, drafter: DrafterResult, separator: str = ", ") -> str:
    """A drafter's speedup with its interval and verdict, as tables show it."""
    value = with_interval(drafter.speedup, drafter.speedup_ci95)
    return separator.join(filter(None, (value, verdict_of(report, drafter))))


# Whether the machine was quiet


def disturbance(repeats: Repeats | None) -> str:
    """How a disturbed machine was detected, as a sentence; empty for a quiet one."""
    if repeats is None or not repeats.disturbed:
        return ""
    name, spread = repeats.largest
    reasons = []
    if spread > repeats.limit:
        limit = f"{100 * repeats.limit:.0f}%"
        reasons.append(f"the repeats of '{name}' differ by {100 * spread:.0f}% (limit {limit})")
    if repeats.above_tau:
        names = ", ".join(f"'{name}'" for name in repeats.above_tau)
        reasons.append(
            f"{names} measured a speedup above tau, which is impossible, so plain decoding was "
            "slowed down"
        )
    return f"The machine was disturbed: {'; '.join(reasons)}."


def repeats_text(repeats: Repeats) -> str:
    """How many repeats were measured and how much they differ, for the list of conditions."""
    kept, (name, spread) = len(repeats.kept), repeats.largest
    if not repeats.spread:
        return "1, so a disturbance of the machine would not have been noticed"
    text = f"{kept}, which differ"
    if repeats.measured > kept:
        text = f"{repeats.measured}, of which the {kept} fastest count, which differ"
    text += f" by at most {100 * spread:.0f}% ({name})"
    return f"{text}: the machine was disturbed" if repeats.disturbed else text


# The headline


def title(label: str, report: Report) -> str:
    """What distinguishes a measurement, and its name: "Temperature 1, 12 prompts (sampled)"."""
    settings = report.settings
    parts = [f"Temperature {settings.temperature:g}"]
    parts += [f"rule {settings.rule_text}"] if settings.rule != "match" else []
    return f"{', '.join([*parts, counted_prompts(report)])} ({label})"


def counted_prompts(report: Report) -> str:
    """ "12 prompts"."""
    count = report.settings.prompts
    return f"{count} prompt{'' if count == 1 else 's'}"


def summary(report: Report) -> list[Sentence]:
    """The headline of a report, one statement each: a disturbed machine, the fastest trained
    drafter, the fastest drafter if that is a different one, drafters that have not learned to
    draft."""
    found = []
    if disturbed := disturbance(report.repeats):
        found.append(Sentence(f"{disturbed} {UNRELIABLE}"))
    found += [_claim(report, one) for one in leaders(report)]
    if report.server is not None:
        found += _of_server(report.server)
    for one in report.ranked:
        if one.trained and one.tau < UNTAUGHT_TAU:
            words = (
                f" accepts practically no draft (tau {one.tau:.2f}): it has not learned to draft "
                "yet. A few training steps cannot teach it; train for longer."
            )
            found.append(Sentence(words, one.name))
    return found


def _of_server(server: ServerMeasurement) -> list[Sentence]:
    """The claims about a running server, by concurrent clients, and the caveat."""
    found, side = [], server.speculative
    for cell in side.overall():
        clients = f"{cell.concurrency} client{'' if cell.concurrency == 1 else 's'}"
        words = f" with {clients} ({cell.running:.1f} requests in progress on average): "
        words += f"{cell.tokens_per_second:.1f} tokens/s"
        if cell.tau is not None:
            words += f", tau {with_interval(cell.tau, cell.tau_ci95)}"
        if cell.speedup is not None:
            words += f", speedup {ratio_text(cell.speedup, cell.speedup_ci95)}"
        found.append(Sentence(f"{words}.", side.engine or side.url))
    return [*found, *([Sentence(side.caveat)] if side.caveat else [])]


def leaders(report: Report) -> list[DrafterResult]:
    """The fastest trained drafter, then the fastest of all if that is a different one."""
    first = report.ranked[:1]
    return first + [
        one
        for one in sorted(report.drafters, key=lambda one: -one.speedup)[:1]
        if one is not first[0]
    ]


def _claim(report: Report, drafter: DrafterResult) -> Sentence:
    """The claim about the speed of one of the `leaders`."""
    low, high = drafter.speedup_ci95
    target, temperature = report.target.label, f"at temperature {report.settings.temperature:g}"
    role = ", the fastest trained drafter" if drafter.trained else ", the fastest without training"
    role = role if len(report.drafters) > 1 else ""  # as on the card of a single drafter
    interval = f"95% interval {low:.2f} to {high:.2f}"
    times = f"{drafter.speedup:.2f} times"
    if words := verdict_of(report, drafter):
        speed = f"{words} against plain decoding {temperature} ({times} its speed, {interval})"
        return Sentence(f"{role}: {speed}{_taus(drafter)}", drafter.name)
    if high < 1.0:
        speed = f"is slower than plain decoding {temperature} ({times} its speed, {interval})"
    else:
        speed = f"makes {target} {times} as fast {temperature} ({interval})"
    return Sentence(f"{role}{',' if role else ''} {speed}{_taus(drafter)}", drafter.name)


def _taus(drafter: DrafterResult) -> str:
    return f", drafting {drafter.draft.words}: {drafter.tau:.2f} tokens per verification."
