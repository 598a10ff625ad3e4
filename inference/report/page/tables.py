"""Which tables the page has; every chart has one with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference.metrics import GAP, PHASES
from inference.report.model import Costs, DrafterResult, DraftStates, Report
from inference.report.page.charts import TERMS
from inference.report.page.figures import calibrations, losses
from inference.report.page.formats import interval, number, percent, percent_with_interval
from inference.report.page.gather import Course, Page, Run

STATES = [
    "Drafts tested", "Accepted", "1 − TV", "1 − TV, own distributions", "Outside the vocabulary",
]  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table. The first cell of every row is its header; `texts` columns are aligned left."""

    caption: str
    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    texts: int = 1


def domains(run: Run) -> Table:
    """Speedup, tau and TAR by domain."""
    rows = []
    for drafter in run.drafters:
        known = run.report.domain_intervals(drafter.name)
        for name, cell in drafter.domains.items():
            rows.append(
                [
                    drafter.name,
                    name,
                    f"{number(cell.speedup)}×",
                    interval(known[name]) if name in known else "",
                    number(cell.tau),
                    interval(cell.tau_ci95),
                    percent(cell.tar),
                ]
            )
    header = ["Drafter", "Domain", "Speedup", "95% interval", "τ", "95% interval", "TAR"]
    return Table("Speedup and τ by domain", header, rows, texts=2)


def depths(run: Run) -> Table:
    """Acceptance by depth."""
    rows = []
    for drafter in sorted(run.drafters, key=lambda drafter: -drafter.tau):
        found = drafter.acceptance
        pairs = zip(found.unconditional, found.conditional, strict=True)
        rows.append([drafter.name, *(f"{percent(beta)} ({percent(alpha)})" for beta, alpha in pairs)])
    width = max(map(len, rows), default=1)
    rows = [row + [""] * (width - len(row)) for row in rows]
    header = ["Drafter", *(f"Depth {i}" for i in range(1, width))]
    return Table("Acceptance by depth (given the depth before)", header, rows)


def costs(block: Costs) -> Table:
    """Milliseconds of every measured call."""
    curves = block.rows()
    sizes = sorted({nodes for curve in curves for nodes in curve.ms})
    rows = [
        [
            "verification" if curve.name == "verify" else curve.name,
            curve.rows,
            curve.length,
            *(number(curve.ms[nodes]) if nodes in curve.ms else "" for nodes in sizes),
        ]
        for curve in curves
    ]
    header = ["Call", "Rows", "Cached", *sizes]
    return Table("Milliseconds per call, medians, by nodes", header, rows)


def steps(run: Run) -> Table:
    """Time by phase and memory."""
    gaps = any(drafter.step_ms.gap is not None for drafter in run.drafters)
    phases = [*PHASES, GAP] if gaps else list(PHASES)
    rows = []
    for drafter in run.drafters:
        times, memory = dict(drafter.step_ms.items()), drafter.memory_bytes
        rows.append(
            [
                drafter.name,
                *(number(times.get(phase, 0.0)) for phase in phases),
                *(number(size / 1e6, 1) for size in (memory.target, memory.drafter, memory.kv)),
            ]
        )
    header = ["Drafter", *phases, "target MB", "drafter MB", "KV MB"]
    return Table("Milliseconds per verification by phase, and megabytes", header, rows)


# ---- where the speed goes ------------------------------------------------------------------------


def terms(run: Run) -> Table:
    """Every factor with its interval."""
    rows = []
    for name, arm in losses(run).items():
        for group, part in {"all": arm, **arm.domains}.items():
            factors = [f"{number(term.factor)} ({interval(term.ci95)})" for term in part.terms]
            rows.append([name, group, number(part.ceiling), *factors, f"{number(part.speedup)}×"])
    caption = "Factors from the ceiling to the speedup, with 95% intervals"
    header = ["Drafter", "Domain", "ceiling", *TERMS.values(), "speedup"]
    return Table(caption, header, rows, texts=2)


def _states(row: DraftStates) -> list[Any]:
    """The cells that all tables of drafter errors have."""
    return [
        row.tested,
        percent_with_interval(row.accepted, row.accepted_ci95),
        percent_with_interval(row.overlap, row.overlap_ci95),
        percent_with_interval(row.own_overlap, row.own_overlap_ci95),
        percent_with_interval(row.missed, row.missed_ci95),
    ]


def _ece(found: Any) -> str:
    """An expected calibration error with its interval, as far as a report has them."""
    if found is None:
        return "-"
    if found.ece_ci95 is None:
        return percent(found.ece, 1)
    return percent_with_interval(found.ece, found.ece_ci95)


def drafter_errors(run: Run) -> list[Table]:
    """By domain and depth, by position, by temperature; then the trees."""
    arms = losses(run).items()
    by_depth = [
        [name, group, depth, *_states(level)]
        for name, arm in arms
        for group, levels in arm.depths.items()
        for depth, level in enumerate(levels, start=1)
    ]
    by_position = [[name, at.label, *_states(at)] for name, arm in arms for at in arm.positions]
    by_temperature = [
        [
            name,
            f"{at.temperature:g}",
            number(at.tau),
            interval(at.tau_ci95),
            *_states(at),
            _ece(at),
        ]
        for name, arm in arms
        for at in arm.temperatures
    ]
    trees = [
        [
            name,
            arm.tree.nodes,
            number(arm.tree.own),
            number(arm.tree.best),
            ", ".join("·".join(str(rank + 1) for rank in path) for path in arm.tree.choices),
        ]
        for name, arm in arms
    ]
    return [
        Table(
            "Drafter error by domain and depth",
            ["Drafter", "Domain", "Depth", *STATES],
            by_depth,
            texts=2,
        ),
        Table(
            "Drafter error by place in the answer",
            ["Drafter", "Tokens", *STATES],
            by_position,
            texts=2,
        ),
        Table(
            "The sample by temperature",
            ["Drafter", "Temperature", "τ", "95% interval", *STATES, "ECE"],
            by_temperature,
        ),
        Table(
            "This draft's τ and that of the best tree of the same size, under the sample's "
            "acceptance by rank",
            ["Drafter", "Nodes", "This draft", "Best tree", "Its paths, by rank of the candidates"],
            trees,
        ),
    ]


def calibration(run: Run) -> list[Table]:
    """ECE by domain and position; accepted share by confidence."""
    found, groups, shares = calibrations(run), [], []
    for name, arm in losses(run).items():
        if name not in found:
            continue
        groups.append([name, "all", _ece(found[name])])
        groups += [[name, domain, _ece(part.calibration)] for domain, part in arm.domains.items()]
        groups += [[name, f"tokens {at.label}", _ece(at.calibration)] for at in arm.positions]
        shares += [
            [name, percent(cell.confidence), percent(cell.accepted), cell.count]
            for cell in found[name].bins
            if cell.count
        ]
    caption = "Calibration by domain and by place in the answer"
    return [
        Table(caption, ["Drafter", "Drafts", "ECE"], groups, texts=2),
        Table(
            "Accepted share by confidence",
            ["Drafter", "Confidence", "Accepted", "Drafts"],
            shares,
        ),
    ]


# ---- of the whole page ---------------------------------------------------------------------------


def courses(shown: Sequence[Course], unit: str) -> Table:
    """tau over trainings or rounds."""
    rows = [
        [
            one.name,
            f"{point.at:g}",
            number(point.tau),
            interval((point.low, point.high)),
            "best" if point.best else "",
        ]
        for one in shown
        for point in one.points
    ]
    return Table(f"τ by {unit.lower()}", ["Drafter", unit, "τ", "95% interval", ""], rows)


def comparison(page: Page) -> Table:
    """Every drafter in all measurements."""
    measured = [{drafter.name: drafter for drafter in run.drafters} for run in page.runs]
    names = dict.fromkeys(name for drafters in measured for name in drafters)
    rows = [[name, *(_summary(drafters.get(name)) for drafters in measured)] for name in names]
    header = ["Drafter", *(run.label for run in page.runs)]
    return Table("Draft, speedup and τ by measurement", header, rows)


def _summary(drafter: DrafterResult | None) -> str:
    if drafter is None:
        return "–"
    return f"{drafter.draft.label}: {number(drafter.speedup)}×, τ {number(drafter.tau)}"


def facts(report: Report) -> dict[str, str]:
    """Under which conditions a measurement was made; empty where the report does not tell."""
    target, device, settings = report.target, report.device, report.settings
    return {
        "Target": f"{target.id}, {target.parameters:,} parameters, {target.dtype}",
        "Revision": target.revision,
        "Device": f"{device.name} ({device.kind}, {device.threads} threads)",
        "Settings": f"temperature {settings.temperature:g}, up to {settings.max_new_tokens} new "
        f"tokens, batch size {settings.batch_size}, rule {settings.rule_text}, {settings.prompts} "
        f"prompts, seed {settings.seed}",
        "Command": report.command or "",
        "Versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
