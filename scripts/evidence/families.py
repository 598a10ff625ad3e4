"""The table of all families: `python -m scripts.evidence.families [RUN]` writes
families.{json,md,png}.

It measures nothing. It reads the run of `headstart loop experiment=families`: the trainings of
every row (if there are several learning rates, the one with the best tau on the validation prompts
counts) and four measurements of all rows on the same held-out prompts: chain and tree, at
temperature 0 and 1. The run may have measured only some rows; the page names those of the
experiment that are missing. --page writes only the page again, from families.json, after
scripts.evidence.throughput has measured. --keep keeps the rows of both tables that the run lacks,
so that a row can be added or measured again without the others (`headstart loop experiment=families
loop.only=[ROW] measure.kinds=[]`). Rows that were trained with another optimiser than most, or for
another number of steps or tokens a step, are marked.

A second table compares DARTree's trees with dynamic trees of as many nodes, for the kinds that
draft in one pass, if the run has both measurements:

    rows=dflash,jetspec,dspark,domino,dflash2,lilicorr,treeflash,dflare,medusa,pard,peagle
    for shape in dynamic dartree; do
      headstart measure experiment=families measure.name=$shape measure.kinds=[] \\
        measure.drafters=[$rows] bench.prompts_per_domain=2 decode.max_new_tokens=64 \\
        "measure.draft={shape: $shape, depth: 4, nodes: 26, width: 8}"
    done
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from heads.api.errors import UserError
from inference.decoding.rules.names import TEXT, promise
from inference.manifest import MANIFEST_FILE, read_manifest
from inference.report.claims import ratio_text
from inference.report.markdown import list_conditions, markdown_table
from inference.report.model import (
    DeviceFacts,
    DrafterResult,
    ReportSettings,
    TargetFacts,
    read_report,
)
from inference.report.plots import COLOURS, MARKERS, save_figure, tidy
from scripts.evidence.common import (
    FAMILIES,
    Facts,
    cell,
    keep_rows,
    read_json,
    settings_of,
    write_report,
)
from scripts.evidence.throughput import kept_rows
from scripts.run.drafters import SWEPT
from scripts.tools.common import REPORTS, command

COMMAND = "headstart loop experiment=families && python -m scripts.evidence.families"
MEASURES = {
    "chain": ("measure", "chain, T=0"),
    "tree": ("tree", "tree, T=0"),
    "sampled": ("sampled", "chain, T=1"),
    "sampled_tree": ("sampled_tree", "tree, T=1"),
}
"""Column -> (folder of the measurement, its title). Only the seconds of `chain` count."""
GROWN = {"dynamic": "dynamic tree", "dartree": "DARTree"}
"""Folder of a measurement of the kinds that draft in one pass -> its trees."""
COUNTED = ("draft", "tau", "tau_ci95", "tar", "acceptance", "lossless")
DOMAIN_COUNTED = ("tau", "tau_ci95", "tar")
SECONDS = ("tokens_per_second", "speedup", "speedup_ci95", "ideal_speedup", "step_ms")
ABOUT = (
    "Every row was trained on the same generated answers of the same target, at the learning rate "
    "that was best for its kind or a similar one in earlier trainings (docs/log.md; uno: "
    "untested); where a row was trained at several rates, the one whose tau on the validation "
    "prompts was best counts. Measured on other prompts, batch size 1. **tau**: committed tokens "
    "per verify pass, bonus included; at T=1 by the acceptance rule in the column's title, at T=0 "
    "all rules accept the same drafts. **TAR**: accepted drafted tokens per tested one, chain at "
    "T=0. **speedup**: against the same loop without a drafter, chain at T=0, same run. "
    "**efficiency**: speedup / (tau / (1 + draft time per pass / baseline time per pass)). "
    "Brackets: 95% bootstrap intervals over prompts. Rows without steps need no training. All "
    "columns but the first of tau: fewer and shorter answers (families.json has each column's "
    "settings)."
)
MARK = " *"
"""Behind the steps of a row that was trained otherwise than the others."""


def report(given: argparse.Namespace) -> None:
    """Write the report, its page and its picture; --page writes only the page, from the report."""
    if given.page:
        content = read_json(REPORTS / "families.json")
        write_report(REPORTS / "families", content, markdown(content))
        return
    content = collect(given.run) | {"experiment_rows": experiment_rows()}
    former = read_json(REPORTS / "families.json")
    grown, other = grown_trees(given.run), former.get("grown_trees", {})
    if given.keep:
        content, grown = keep(content, former), keep_grown(grown, other)
    content["grown_trees"] = grown or other
    mark_others(content["rows"])
    write_report(REPORTS / "families", content, markdown(content))
    bars = {}
    for row in by_tau(content):
        taus = {title: row["measured"][name]["tau"] for name, (_, title) in MEASURES.items()}
        bars[row["name"]] = {**taus, "speedup": row["measured"]["chain"]["speedup"]}
    draw(bars, REPORTS / "families.png")
    print(f"{len(content['rows'])} rows")


@mpl.rc_context({"text.parse_math": False})  # see `plot_all`
def draw(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """One PNG: for every drafter (row) a dot per measurement; tau left, speedup right.

    rows: drafter to a measurement's title to tau, and "speedup"; drawn from top to bottom.
    """
    names = list(rows)
    titles = [title for title in next(iter(rows.values())) if title != "speedup"]
    size = (11, 0.32 * len(names) + 1.6)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, width_ratios=(3, 1))
    places = range(len(names), 0, -1)
    for index, title in enumerate(titles):
        taus, colour = [rows[name][title] for name in names], COLOURS[index]
        left.plot(taus, places, linestyle="none", marker=MARKERS[index], color=colour, label=title)
    right.barh(places, [rows[name]["speedup"] for name in names], color=COLOURS[5], height=0.7)
    right.axvline(1.0, color="#555555", linewidth=1.0)
    left.set_yticks(list(places), names)
    left.set_xlabel("tau (committed tokens per verify pass)")
    right.set_xlabel("speedup, chain, T=0")
    for axes in (left, right):
        tidy(axes, "both")
    left.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    save_figure(figure, path)


def grown_trees(folder: Path) -> Facts:
    """DARTree beside dynamic trees; empty if a run lacks one of the two measurements. Raises
    `UserError` if they measured different drafters or with different settings."""
    paths = {shape: folder / shape / "report.json" for shape in GROWN}
    if not all(path.is_file() for path in paths.values()):
        return {}
    found = {shape: read_report(path) for shape, path in paths.items()}
    one, other = found.values()
    names = sorted(drafter.name for drafter in one.drafters)
    also = sorted(drafter.name for drafter in other.drafters)
    if names != also or one.settings != other.settings:
        raise UserError(
            f"{' and '.join(map(repr, map(str, paths.values())))} are of different drafters or "
            "settings, so they cannot be compared. Measure both with the commands in "
            "scripts/evidence/families.py."
        )
    rows = {
        name: {
            shape: measured_row(report.drafter(name), timed=False)
            for shape, report in found.items()
        }
        for name in names
    }
    return {"settings": one.settings.to_dict(), "device": one.device.to_dict(), "rows": rows}


def experiment_rows() -> list[str]:
    """The names of all rows that experiment=families trains or measures."""
    settings = settings_of("loop", "experiment=[families]")
    return [*dict.fromkeys([*settings.loop.sweep, *settings.measure.kinds])]


def collect(folder: Path, made_by: str = COMMAND) -> Facts:
    """The content of a report about the run that `made_by` makes in `folder`; raises `UserError` if
    a measurement is missing."""
    reports = {}
    for column, (name, title) in MEASURES.items():
        path = folder / name / "report.json"
        if not path.is_file():
            raise UserError(
                f"'{path}' ({title}) is missing. Run `{made_by}`; it continues where it ended."
            )
        reports[column] = read_report(path)
    chain = reports["chain"]
    return {
        "format": 1,
        "command": made_by,
        "target": chain.target.to_dict(),
        "device": chain.device.to_dict(),
        "settings": {column: found.settings.to_dict() for column, found in reports.items()},
        "baseline": {column: found.baseline.to_dict() for column, found in reports.items()},
        "git": chain.git or {},
        "rows": [
            {
                "name": one.name,
                "kind": one.kind,
                "parameters": one.parameters,
                "memory_bytes": one.memory_bytes.drafter,
                "trainings": trainings(folder, one.name),
                "measured": {
                    column: measured_row(found.drafter(one.name), column == "chain")
                    for column, found in reports.items()
                },
            }
            for one in chain.drafters
        ],
    }


def keep(content: Facts, former: Facts) -> Facts:
    """The content with the rows of a former report that it lacks (see `keep_rows`). A speedup is a
    ratio within one run; the baseline of the report is that of its latest run."""
    kept = keep_rows(content, former, "families.json")
    return {**content, "rows": [*content["rows"], *kept]}


def mark_others(rows: Sequence[Facts]) -> None:
    """Mark the trained rows that were not trained as most of them were."""
    trained = [row for row in rows if row["trainings"]]
    ways = Counter(trained_as(row) for row in trained)
    for row in trained:
        row["trained_otherwise"] = not alike(trained_as(row), ways.most_common(1)[0][0])


def keep_grown(grown: Facts, former: Facts) -> Facts:
    """The comparison with the rows of a former report's that it lacks, if both have the same
    settings."""
    if not grown or not former or grown["settings"] != former["settings"]:
        return grown
    return {**grown, "rows": {**former["rows"], **grown["rows"]}}


def trained_as(row: Facts) -> tuple[object, ...]:
    """What the trainings of all rows must share: steps, optimiser and tokens a step, the last two
    as far as they are known (reports of earlier versions do not have them)."""
    training = row["trainings"][0]
    return tuple(training.get(key) for key in ("steps", "optimiser", "tokens_per_step"))


def alike(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two results of `trained_as` agree in all that both know."""
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


def trainings(folder: Path, name: str) -> list[Facts]:
    """The trainings of a row in a run, the one with the best tau on the validation prompts
    first."""
    found = []
    for path in sorted((folder / "train").glob(f"{name}{SWEPT}*")):
        if (path / MANIFEST_FILE).is_file():
            manifest = read_manifest(path, "train")
            facts = {key: manifest[key] for key in ("steps", "tokens", "seconds")}
            settings = manifest.get("settings")
            if settings is not None:
                train = settings["train"]
                facts["precision"] = settings["engine"]["precision"]
                facts["optimiser"] = settings["optim"]["kind"]
                facts["tokens_per_step"] = train["global_batch"] * train["sequence_length"]
            best = {
                "validation_tau": manifest["best"]["tau"],
                "best_step": manifest["best"]["step"],
            }
            found.append({"rate": float(path.name.partition(SWEPT)[2]), **facts, **best})
    return sorted(found, key=lambda training: -(training["validation_tau"] or 0.0))


def measured_row(found: DrafterResult, timed: bool) -> Facts:
    """One drafter in one measurement; speeds only if they count (`timed`)."""
    entry = found.to_dict()
    domains = {
        name: {key: one[key] for key in DOMAIN_COUNTED} for name, one in entry["domains"].items()
    }
    kept = {key: entry[key] for key in (*COUNTED, *(SECONDS if timed else ()))}
    more = {"efficiency": found.efficiency} if timed else {}
    return {**kept, **more, "domains": domains}


def markdown(content: Facts) -> list[str]:
    """The lines of the page: the table, with the training speeds of throughput.json, and the
    learning rates that were tried."""
    rows = by_tau(content)
    throughput = kept_rows(read_json(REPORTS / "throughput.json"))
    speeds = {row["name"]: row["tokens_per_second"] for row in throughput}
    domains = sorted(rows[0]["measured"]["chain"]["domains"])
    header = ["drafter", "parameters", "steps", "training tokens/s"]
    header += titles(content)
    header += [*(f"TAR {name}" for name in domains), "speedup", "efficiency", "lossless"]
    lines = [table_row(row, content["settings"], speeds.get(row["name"])) for row in rows]
    tried = []
    for row in rows:
        ordered = sorted(row["trainings"], key=lambda training: training["rate"])
        taus = ", ".join(f"{found['rate']:g}: {found['validation_tau']:.2f}" for found in ordered)
        if taus:
            tried.append([row["name"], taus])
    return [
        "# Every family on the same data",
        "",
        f"Written by `{content['command']}` from [families.json](families.json). {ABOUT} "
        f"{speed_text(throughput)}",
        "",
        *conditions(content),
        "",
        *markdown_table(header, lines),
        *kept_line(rows),
        *missing_line(content),
        "",
        "![tau and speedup by family](families.png)",
        "",
        *grown_lines(content.get("grown_trees", {})),
        "Learning rates of the trainings, and the tau of each on the validation prompts (chain of "
        "4, T=0):",
        "",
        *markdown_table(["row", "rate: tau"], tried),
        "",
    ]


def grown_lines(found: Facts) -> list[str]:
    """The table of DARTree beside dynamic trees; none without these measurements."""
    if not found:
        return []
    header = ["drafter", *(f"tau, {title}" for title in GROWN.values())]
    ordered = sorted(found["rows"].items(), key=lambda item: -item[1]["dartree"]["tau"])
    lines = [
        [name, *(cell(row[shape]["tau"], row[shape]["tau_ci95"]) for shape in GROWN)]
        for name, row in ordered
    ]
    draft = ordered[0][1]["dartree"]["draft"]
    return [
        "## Trees grown from one drafting pass",
        "",
        f"DARTree (2608.13524, `decode=dartree`) beside dynamic trees, both of {draft['nodes']} "
        f"nodes and depth {draft['depth']}, for the kinds that draft all depths in one pass; "
        f"temperature 0, {found['settings']['prompts']} prompts. Measured by the two commands in "
        "scripts/evidence/families.py.",
        "",
        *markdown_table(header, lines),
        "",
    ]


def titles(content: Facts) -> list[str]:
    """The titles of the columns of tau, with the acceptance rule above temperature 0."""
    found = []
    for name, (_, title) in MEASURES.items():
        used = content["settings"][name]
        rule = f" (rule {used['rule']})" if used["temperature"] > 0 else ""
        found.append(f"tau {title}{rule}")
    return found


def speed_text(rows: Sequence[Facts]) -> str:
    """Where the training speeds come from, and of how many rows a step was."""
    sizes = sorted({row["settings"].get("rows", 0) for row in rows})
    if not sizes:
        return ""
    of = " or ".join(map(str, sizes))
    return (
        f"Training tokens/s: throughput.json, online, {of} rows a step, on a quiet machine, with "
        "the defaults of the commit in that report."
    )


def missing_line(content: Facts) -> list[str]:
    """The rows of the experiment that were not measured."""
    measured = {row["name"] for row in content["rows"]}
    missing = [name for name in content.get("experiment_rows", []) if name not in measured]
    return ["", f"Not measured: {', '.join(missing)}."] if missing else []


def kept_line(rows: list[Facts]) -> list[str]:
    """The rows that were measured in earlier runs, by the speed of plain decoding in theirs, those
    that were trained otherwise, and those whose training had no bfloat16 instructions."""
    kept: dict[tuple[str, str], list[str]] = {}
    other = [row["name"] for row in rows if row.get("trained_otherwise")]
    for row in rows:
        if "device" in row:
            chain = row["measured"]["chain"]
            plain = f"{chain['tokens_per_second'] / chain['speedup']:.1f}"
            kept.setdefault((row["device"]["name"], plain), []).append(row["name"])
    lines = [
        line
        for (device, plain), names in kept.items()
        for line in (
            "",
            f"Measured in an earlier run ({device}), in which plain decoding reached {plain} "
            f"tokens/s: {', '.join(names)}.",
        )
    ]
    if other:
        told = f"{MARK.strip()} Trained otherwise (steps, optimiser or tokens a step), so that they"
        lines += ["", f"{told} do not compare with the other rows: {', '.join(other)}."]
    exact = [row["name"] for row in rows if in_float32(row)]
    if exact:
        lines += ["", f"Trained in float32, on a CPU without bfloat16: {', '.join(exact)}."]
    return lines


def in_float32(row: Facts) -> bool:
    """Whether a row was trained in float32, as far as it is known."""
    return any(one.get("precision") == "float32" for one in row["trainings"])


def conditions(content: Facts) -> list[str]:
    """The conditions of the chains' measurement."""
    return list_conditions(
        TargetFacts(**content["target"]),
        DeviceFacts(**content["device"]),
        ReportSettings(**content["settings"]["chain"]),
        content["command"],
    )


def by_tau(content: Facts) -> list[Facts]:
    """The rows by descending tau of a chain."""
    return sorted(content["rows"], key=lambda row: -row["measured"]["chain"]["tau"])


def table_row(row: Facts, settings: Facts, speed: float | None) -> list[str]:
    """One line of the table. settings: of every measurement; speed: training tokens per second."""
    measured, trained = row["measured"], row["trainings"]
    chain = measured["chain"]
    return [
        row["name"],
        f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] else "-",
        f"{trained[0]['steps']}{MARK if row.get('trained_otherwise') else ''}" if trained else "-",
        f"{speed:,.0f}" if speed else "-",
        *(cell(measured[name]["tau"], measured[name]["tau_ci95"]) for name in MEASURES),
        *(f"{chain['domains'][name]['tar']:.2f}" for name in sorted(chain["domains"])),
        ratio_text(chain["speedup"], chain["speedup_ci95"]),
        f"{100 * chain['efficiency']:.0f}%",
        lossless_text(measured, settings),
    ]


def lossless_text(measured: Facts, settings: Facts) -> str:
    """The identical texts, and their total, over a row's measurements whose rule promises the
    text."""
    same = [
        found["lossless"]
        for name, found in measured.items()
        if promise(settings[name]["rule"], settings[name]["temperature"]) == TEXT
    ]
    identical, sequences = (sum(one[key] for one in same) for key in ("identical", "sequences"))
    return f"{identical}/{sequences}"


main = command(
    report,
    run={"positional": True, "type": Path, "nargs": "?", "default": FAMILIES},
    page={"action": "store_true", "help": "write the page again, with throughput.json of today"},
    keep={"action": "store_true", "help": "keep the rows of the report that the run lacks"},
)

if __name__ == "__main__":
    sys.exit(main())
