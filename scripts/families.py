"""The table of all families: `python -m scripts.families [run folder]` writes docs/reports/families.{json,md,png}.

It measures nothing. It reads what `headstart loop experiment=families` left: the trainings of every row (at the
learning rate whose tau on the validation prompts was best) and four measurements of all rows on the same held-out
prompts: chain and tree, at temperature 0 and 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE, read_manifest, write_bytes
from inference.report.markdown import list_conditions, markdown_table
from inference.report.model import DeviceFacts, ReportSettings, TargetFacts, read_report
from scripts.drafters import SWEPT

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reports"
RUN = ROOT / "outputs" / "families"
MEASURES = {
    "chain": ("measure", "chain, T=0"),
    "tree": ("tree", "tree, T=0"),
    "sampled": ("sampled", "chain, T=1"),
    "sampled_tree": ("sampled_tree", "tree, T=1"),
}
"""Column -> (folder of the measurement, its title)."""
TIMED = "chain"
"""The column whose seconds count: the others may be taken beside other work."""
COUNTED = ("draft", "tau", "tau_ci95", "tar", "acceptance", "lossless")
DOMAIN_COUNTED = ("tau", "tau_ci95", "tar")
SECONDS = ("tokens_per_second", "speedup", "speedup_ci95", "ideal_speedup", "step_ms")
ABOUT = (
    "Every row was trained on the same generated answers of the same target; the learning rate is the one"
    " whose tau on the validation prompts was best, out of those tried. Measured on other prompts, batch "
    "size 1. **tau**: committed tokens per verify pass, bonus included. **TAR**: accepted drafted tokens "
    "per tested one, chain at T=0. **speedup**: against the same loop without a drafter, chain at T=0, "
    "same run. **efficiency**: speedup / (tau / (1 + draft time per pass / baseline time per pass)). "
    "Brackets: 95% bootstrap intervals over prompts. Rows without steps need no training. "
    "Training tokens/s: throughput.json, the same rows on a quiet machine. T=1: fewer and shorter answers (families.json has "
    "each column's settings)."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the three files; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    run = Path(given[0]) if given else RUN
    try:
        content = collect(run)
        REPORTS.mkdir(parents=True, exist_ok=True)
        write_bytes(REPORTS / "families.json", (json.dumps(content, indent=1) + "\n").encode())
        write_bytes(REPORTS / "families.md", markdown(content).encode())
        plot(content, REPORTS / "families.png")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(content['rows'])} rows")
    return 0


def collect(run: Path) -> dict[str, Any]:
    """families.json's content; raises `UserError` when a measurement is missing."""
    reports = {}
    for column, (folder, title) in MEASURES.items():
        path = run / folder / "report.json"
        if not path.is_file():
            raise UserError(
                f"'{path}' ({title}) is missing. Run `headstart loop experiment=families`; it continues where it ended."
            )
        reports[column] = read_report(path)
    entries = {
        column: {
            one.name: one.to_dict() | {"efficiency": one.efficiency} for one in report.drafters
        }
        for column, report in reports.items()
    }
    main_report, speeds = reports["chain"], training_speeds()
    return {
        "format": 1,
        "command": "headstart loop experiment=families && python -m scripts.families",
        "target": main_report.target.to_dict(),
        "device": main_report.device.to_dict(),
        "settings": {column: report.settings.to_dict() for column, report in reports.items()},
        "baseline": {column: report.baseline.to_dict() for column, report in reports.items()},
        "git": main_report.git or {},
        "rows": [
            row(name, entries, trainings(run, name)) | {"training_tokens_per_second": speeds.get(name)}
            for name in entries["chain"]
        ],
    }


def training_speeds() -> dict[str, float]:
    """Training tokens/s by row, of a quiet machine: `scripts.throughput`'s report; empty where that was not made."""
    path = REPORTS / "throughput.json"
    if not path.is_file():
        return {}
    return {row["name"]: row["tokens_per_second"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def trainings(run: Path, name: str) -> list[dict[str, Any]]:
    """The trainings of a row, best first: learning rate, steps, tokens, seconds, tau on the validation prompts."""
    found = []
    for folder in sorted((run / "train").glob(f"{name}{SWEPT}*")):
        if not (folder / MANIFEST_FILE).is_file():
            continue
        manifest = read_manifest(folder, "train")
        found.append(
            {
                "rate": float(folder.name.partition(SWEPT)[2]),
                "steps": manifest["steps"],
                "tokens": manifest["tokens"],
                "seconds": manifest["seconds"],
                "validation_tau": manifest["best"]["tau"],
                "best_step": manifest["best"]["step"],
            }
        )
    return sorted(found, key=lambda training: -(training["validation_tau"] or 0.0))


def row(name: str, entries: Mapping[str, Mapping[str, Any]], trained: list[dict[str, Any]]) -> dict[str, Any]:
    """One drafter over all measurements."""
    first = entries["chain"][name]
    measured = {}
    for column, arms in entries.items():
        entry = arms[name]
        measured[column] = {key: entry[key] for key in COUNTED} | {
            "domains": {name: {key: domain[key] for key in DOMAIN_COUNTED} for name, domain in entry["domains"].items()}
        }
        if column == TIMED:
            measured[column] |= {key: entry[key] for key in (*SECONDS, "efficiency")}
    return {
        "name": name,
        "kind": first["kind"],
        "parameters": first["parameters"],
        "memory_bytes": first["memory_bytes"]["drafter"],
        "trainings": trained,
        "measured": measured,
    }


def markdown(content: Mapping[str, Any]) -> str:
    """The table, and the rates that were tried."""
    rows = [table_row(row) for row in by_tau(content)]
    tried = [
        [
            row["name"],
            ", ".join(f"{t['rate']:g}: {t['validation_tau']:.2f}" for t in by_rate(row["trainings"])),
        ]
        for row in by_tau(content)
        if row["trainings"]
    ]
    command = content["command"]
    return "\n".join(
        [
            "# Every family on the same data",
            "",
            f"Written by `{command}` from [families.json](families.json). {ABOUT}",
            "",
            *setting_lines(content),
            "",
            *markdown_table(header(content), rows),
            "",
            "![tau and speedup by family](families.png)",
            "",
            "Learning rates tried, and the tau of each on the validation prompts (chain of 4, T=0):",
            "",
            *markdown_table(["row", "rate: tau"], tried),
            "",
        ]
    )


def setting_lines(content: Mapping[str, Any]) -> list[str]:
    """Target, device and prompts, as every report says it."""
    return list_conditions(
        TargetFacts(**content["target"]),
        DeviceFacts(**content["device"]),
        ReportSettings(**content["settings"]["chain"]),
        content["command"],
    )


def by_tau(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return sorted(content["rows"], key=lambda row: -row["measured"]["chain"]["tau"])


def by_rate(trained: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(trained, key=lambda training: training["rate"])


def domains(content: Mapping[str, Any]) -> list[str]:
    return sorted(content["rows"][0]["measured"]["chain"]["domains"])


def header(content: Mapping[str, Any]) -> list[str]:
    """The table's columns."""
    taus = [f"tau {title}" for _, title in MEASURES.values()]
    tars = [f"TAR {domain}" for domain in domains(content)]
    return [
        "drafter",
        "parameters",
        "steps",
        "training tokens/s",
        *taus,
        *tars,
        "speedup",
        "efficiency",
        "lossless",
    ]


def table_row(row: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    measured, trained = row["measured"], row["trainings"]
    chain = measured["chain"]
    taus = []
    for column in MEASURES:
        low, high = measured[column]["tau_ci95"]
        taus.append(f"{measured[column]['tau']:.2f} [{low:.2f}, {high:.2f}]")
    low, high = chain["speedup_ci95"]
    lossless = [sum(m["lossless"][key] for m in measured.values()) for key in ("identical", "sequences")]
    return [
        row["name"],
        f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] else "-",
        str(trained[0]["steps"]) if trained else "-",
        f"{row['training_tokens_per_second']:,.0f}" if row["training_tokens_per_second"] else "-",
        *taus,
        *(f"{chain['domains'][name]['tar']:.2f}" for name in sorted(chain["domains"])),
        f"{chain['speedup']:.2f} [{low:.2f}, {high:.2f}]",
        f"{100 * chain['efficiency']:.0f}%",
        f"{lossless[0]}/{lossless[1]}",
    ]


def plot(content: Mapping[str, Any], path: Path) -> None:
    """tau of chain and tree at both temperatures, and the speedup, one line of bars per drafter."""
    from inference.report.plots import families

    bars = {}
    for row in by_tau(content):
        taus = {title: row["measured"][column]["tau"] for column, (_, title) in MEASURES.items()}
        bars[row["name"]] = {**taus, "speedup": row["measured"]["chain"]["speedup"]}
    families(bars, path)


if __name__ == "__main__":
    sys.exit(main())
