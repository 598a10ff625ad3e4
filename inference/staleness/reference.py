"""The reference for a drafter's acceptance: the answers of an earlier measurement, or a card's
figures.

`watch.json`, in a drafter's folder or elsewhere, names the target, the drafter and the decoding
settings. For every answer it has the drafted tokens accepted in its first passes. `headstart watch
watch.learn=true` writes it from fresh prompts; the records of a measurement (records.jsonl next to
report.json) give the same. A report.json without records, as in a Hub folder, gives only tau and
its interval, so its evidence is treated as normal (`evidence.Sums`).

Legend: D depth of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from heads.api.config import build
from heads.api.errors import UserError, suggest
from heads.api.reading import read_object
from inference.decoding.draft import DraftSettings
from inference.decoding.draft_file import DRAFT_KEYS
from inference.decoding.rules.names import TEXT
from inference.decoding.sampling.distribution import SamplingSettings
from inference.manifest import write_json
from inference.measure.answers import FINAL_FILE, read_records
from inference.measure.turns import is_further_turn
from inference.report.model import read_report
from inference.staleness.evidence import Bets, Grid, RatioEvidence, Sums

FORMAT = 1
WRITTEN: dict[str, Callable[[Any], Any]] = {
    "target": dict,
    "drafter": dict,
    "draft": dict,
    "depth": int,
    "temperature": float,
    "tokens": int,
    "system": str,
}
"""The keys of watch.json besides the answers, and the type of each."""
SAMPLING = tuple(one.name for one in fields(SamplingSettings) if one.name != "temperature")
"""The further settings of sampling, under the key `sampling`."""
WATCH_FILE, REPORT_FILE = "watch.json", "report.json"
MIXED = "mixed"
"""The domain of counters without domains."""
NO_DOMAIN = "none"
"""The domain of requests that name none, as `headstart serve` counts and records them."""
LEAST_ANSWERS = 8
"""Fewest answers that a watched domain must have."""


@dataclass
class DomainAnswers:
    """The answers of one domain: for each, the drafted tokens accepted in its first passes."""

    answers: list[list[int]] = field(default_factory=list)

    def pairs(self) -> list[tuple[int, int]]:
        """(accepted drafted tokens, passes) of each answer."""
        return [(sum(answer), len(answer)) for answer in self.answers]

    @property
    def acceptance(self) -> float:
        return sum(map(sum, self.answers)) / max(1, sum(map(len, self.answers)))

    def by_depth(self, depth: int) -> list[float]:
        """beta: the share of passes in which each depth was accepted."""
        kept = np.array([count for answer in self.answers for count in answer])
        return [float((kept >= level).sum() / max(1, len(kept))) for level in range(1, depth + 1)]


def passes_within(tokens: int, depth: int) -> int:
    """The passes that an answer of this many tokens always has, however good its drafts are. Its
    first token needs no pass."""
    return max(1, (tokens - 1) // (depth + 1))


def first_passes(accepted: Iterable[int], depth: int, most: int) -> list[int]:
    """The first `most` passes of an answer, as the drafted tokens accepted in each. Raises
    `UserError` for more than `depth` tokens."""
    kept = list(islice(accepted, most))
    if kept and max(kept) > depth:
        raise UserError(
            f"a pass accepted {max(kept)} drafted tokens, but the reference was measured with "
            f"drafts {depth} deep. Watch with the reference's draft, or make a new reference with "
            "watch.learn=true."
        )
    return kept


@dataclass(frozen=True)
class Reference:
    """See the module. draft: the settings of its shape; system: the system prompt of the answers;
    figures: domain -> (acceptance, its standard error), for a card without answers, for which
    `tallies` is empty; sampling: the values of `SAMPLING`, empty if they are not known."""

    target: dict[str, str]
    drafter: dict[str, str]
    draft: DraftSettings
    temperature: float
    tokens: int
    tallies: dict[str, DomainAnswers]
    depth: int
    source: str
    system: str = ""
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)
    passes: int = 0
    """Verify passes behind the figures, all domains together."""
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return passes_within(self.tokens, self.depth)

    @property
    def domains(self) -> list[str]:
        tallies = self.tallies.items()
        enough = {name for name, tally in tallies if len(tally.answers) >= LEAST_ANSWERS}
        return sorted({*self.figures, *enough})

    @property
    def grid(self) -> Grid:
        return Grid(self.depth)

    def evidence(self) -> dict[str, RatioEvidence]:
        """Domain -> evidence; raises `UserError` if no domain has enough answers."""
        if not self.domains:
            raise UserError(
                f"'{self.source}' has no domain with {LEAST_ANSWERS} answers or more, so nothing "
                "can be compared. Make a reference with watch.learn=true and more prompts."
            )
        grid = self.grid
        if self.figures:
            share = self.passes / len(self.figures)
            return {
                name: Sums(grid, value * share, share, error * error * share, share)
                for name, (value, error) in self.figures.items()
            }
        return {name: Bets(grid, self.most, self.tallies[name].pairs()) for name in self.domains}

    def spread(self, domain: str) -> float:
        """Variance of a sum of (a - r n) over answers per verify pass in it, r being the domain's
        acceptance."""
        if self.figures:
            return self.figures[domain][1] ** 2 * self.passes / len(self.figures)
        accepted, passes = np.array(self.tallies[domain].pairs(), dtype=np.float64).T
        excess = accepted - accepted.sum() / passes.sum() * passes
        return float(excess.var(ddof=1) * len(passes) / passes.sum())

    def for_counters(self, domain: str) -> Reference:
        """The reference for counters without domains: of one domain or, if none is given, of all
        together. Raises `UserError` for a domain that the reference does not have."""
        if domain and domain not in self.domains:
            raise UserError(
                f"watch.domain: '{self.source}' has no domain '{domain}'."
                f"{suggest(domain, self.domains)}"
            )
        names = [domain] if domain else self.domains
        name = domain or (names[0] if len(names) == 1 else MIXED)
        if self.figures:
            values, errors = np.array([self.figures[one] for one in names]).T
            error = float(np.sqrt((errors**2).sum()) / len(names))
            passes = self.passes * len(names) // len(self.figures)
            return replace(self, figures={name: (float(values.mean()), error)}, passes=passes)
        answers = [answer for one in names for answer in self.tallies[one].answers]
        return replace(self, tallies={name: DomainAnswers(answers)})

    @property
    def shown(self) -> str:
        """How its answers were decoded, in words."""
        draft = f"{self.draft['shape']} of {self.depth}"
        more = "".join(f", {name} {value}" for name, value in self.sampled_with.items())
        return f"{draft}, temperature {self.temperature:g}{more}, {self.tokens} tokens"

    @property
    def sampled_with(self) -> dict[str, Any]:
        """The settings of `sampling` that are in use."""
        off = SamplingSettings()
        return {name: one for name, one in self.sampling.items() if one != getattr(off, name)}

    def summary(self) -> str:
        """Lines about all domains that can be compared."""
        return "\n".join(
            f"{name}: {len(tally.answers)} answers, {tally.acceptance:.2f} drafted tokens accepted "
            "per pass"
            for name, tally in ((name, self.tallies[name]) for name in self.domains)
        )

    # Files

    def write(self, path: Path) -> None:
        """Write watch.json; only for references with answers."""
        assert not self.figures, "a card's figures are read from the card"
        tallies = {name: vars(tally) for name, tally in sorted(self.tallies.items())}
        facts = {name: getattr(self, name) for name in WRITTEN}
        facts |= {"sampling": self.sampling} if self.sampling else {}
        write_json(path, {"format": FORMAT, "stage": "watch", **facts, "domains": tallies})

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Read watch.json; raises `UserError` for any other content."""
        try:
            content = read_object(path, "")
            if content["stage"] != "watch" or content["format"] != FORMAT:
                raise KeyError("format")
            domains = content["domains"].items()
            values: dict[str, Any] = {name: kind(content[name]) for name, kind in WRITTEN.items()}
            tallies = {str(name): DomainAnswers(**lists) for name, lists in domains}
            sampling = read_sampling(dict(content.get("sampling", {})), f"'{path}': sampling")
            found = cls(**values, tallies=tallies, source=str(path), sampling=sampling)
            require_counts(found)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"'{path}' is not a reference of format {FORMAT} ({error!r}). Make one with "
                "`headstart watch watch.learn=true`."
            ) from error
        return found


def read_sampling(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of `SAMPLING` among settings that were written; empty if there are none. Raises
    `UserError` for invalid ones."""
    if not given:
        return {}
    found = build(SamplingSettings, given, where)
    return {name: getattr(found, name) for name in SAMPLING}


def require_counts(reference: Reference) -> None:
    """Raise `ValueError` for counts that a drafter of this depth cannot have."""
    for name, tally in reference.tallies.items():
        for answer in tally.answers:
            fitting = all(0 <= count <= reference.depth for count in answer)
            if len(answer) > reference.most or not fitting:
                raise ValueError(f"domain {name}: an answer's passes accepted {answer}")
        if not any(tally.answers):
            raise ValueError(f"domain {name} has no passes")


def find_reference(given: str, drafter: Path, weights_sha256: str) -> Reference:
    """The reference of a drafter: the file or folder `given`, or else the one in its folder.
    Prefers single answers to figures. weights_sha256: of the drafter's weights. Raises `UserError`
    if there is no reference, or if it measured other weights."""
    place = Path(given) if given else drafter
    if given and not place.exists():
        raise UserError(f"watch.reference: there is no file or folder '{place}'.")
    folder = place if place.is_dir() else place.parent
    if place.is_file() and place.name not in (WATCH_FILE, REPORT_FILE):
        found = Reference.read(place)
    elif (folder / WATCH_FILE).is_file() and place.name != REPORT_FILE:
        found = Reference.read(folder / WATCH_FILE)
    elif (folder / REPORT_FILE).is_file():
        found = from_report(folder / REPORT_FILE, weights_sha256)
    else:
        raise UserError(
            f"there is nothing to compare with: '{place}' has neither {WATCH_FILE} nor "
            f"{REPORT_FILE}. Give a measurement's folder as watch.reference, or make a reference "
            "with the target that the drafter was trained for: watch.learn=true."
        )
    if found.drafter.get("weights_sha256") != weights_sha256:
        raise UserError(
            f"'{found.source}' was measured with another drafter than '{drafter}': their weights "
            "differ. Give this drafter's reference as watch.reference, or make one with "
            "watch.learn=true."
        )
    return found


def reference_path(given: str | Path) -> Path:
    """The file to write a reference to, in a folder or given directly. Raises `UserError` if a file
    other than a reference exists there, since it would be replaced."""
    path = Path(given)
    path = path / WATCH_FILE if path.is_dir() else path
    try:
        ours = not path.exists() or read_object(path).get("stage") == "watch"
    except UserError:
        ours = False
    if not ours:
        raise UserError(
            f"watch.reference: '{path}' is there and is no reference, so it is not replaced. Give "
            "another file, or remove it."
        )
    return path


def from_report(path: Path, weights_sha256: str) -> Reference:
    """The reference in a measurement's folder: its records, if they lie next to report.json,
    otherwise the report's figures."""
    report = read_report(path)
    found = [one for one in report.drafters if one.draft.weights_sha256 == weights_sha256]
    if not found:
        raise UserError(
            f"'{path}' did not measure this drafter: it measured "
            f"{', '.join(one.name for one in report.drafters)}. Give this "
            "drafter's report as watch.reference, or make a reference with watch.learn=true."
        )
    drafter, settings = found[0], report.settings
    if settings.promise != TEXT:
        raise UserError(
            f"'{path}' was measured with rule '{settings.rule}', which accepts other drafts than "
            "rule match. Measure with decode.rule=match, or make a reference with "
            "watch.learn=true."
        )
    if lengths := report.run.bench.get("contexts"):
        raise UserError(
            f"'{path}' was measured with bench.contexts={list(lengths)}: its prompts are behind "
            "others, which those of a watch are not. Measure without bench.contexts, or make a "
            "reference with watch.learn=true."
        )
    about = {"kind": drafter.kind, "weights_sha256": weights_sha256}
    sized = drafter.draft.shape in ("dynamic", "dartree")
    keys = [key for key in DRAFT_KEYS if sized or key != "nodes"]
    draft: Any = drafter.draft.model_dump(include=set(keys), exclude_unset=True)
    depth = drafter.draft.depth
    common = (report.target.to_dict(), about, draft, settings.temperature, settings.max_new_tokens)
    used = {name: one for name, one in report.run.sampling.items() if name in SAMPLING}
    sampling = read_sampling(used, f"'{path}': run.sampling")
    records = path.parent / FINAL_FILE
    if records.is_file():
        domains = report.run.prompts.get("domains", {})
        made = Reference(*common, {}, depth, str(records), sampling=sampling)
        made.tallies.update(tallies_of(records, drafter.name, depth, made.most, domains))
        if made.tallies:
            return made
    # passes whose bonus was cut off by the end of text
    cut = sum(drafter.acceptance.unconditional) - (drafter.tau - 1.0)
    figures = {
        name: (cell.tau - 1.0 + cut, (cell.tau_ci95[1] - cell.tau_ci95[0]) / (2 * 1.96))
        for name, cell in drafter.domains.items()
    }
    figures = {name: pair for name, pair in figures.items() if pair[0] > 0 and pair[1] > 0}
    repeats = len(report.repeats.kept) if report.repeats else 1  # repeats have the same passes
    passes = drafter.verify_passes // repeats
    made = Reference(*common, {}, depth, str(path), sampling=sampling)
    return replace(made, figures=figures, passes=passes)


def tallies_of(
    records: Path, arm: str, depth: int, most: int, domains: Mapping[str, str]
) -> dict[str, DomainAnswers]:
    """Domain -> answers of one arm in a measurement's records. Repeats of a prompt count once, and
    further turns of a conversation do not: a watch decodes first turns alone. Empty if `domains` is
    empty."""
    found: dict[str, DomainAnswers] = {}
    seen = {name for name in domains if is_further_turn(name, domains)}
    for record in read_records(records):
        if record.arm == arm and record.prompt in domains and record.prompt not in seen:
            seen.add(record.prompt)
            passes = first_passes((accepted for accepted, _, _ in record.passes), depth, most)
            found.setdefault(domains[record.prompt], DomainAnswers()).answers.append(passes)
    return found
