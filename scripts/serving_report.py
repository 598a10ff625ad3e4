"""Exports drafters, checks the folders, serves them with vLLM, and writes what came out: docs/reports/serving.{json,md}.

    python -m scripts.serving_report --engine-python .venv-serve/bin/python --run outputs/families

--run: a run folder whose trainings are served (`headstart loop experiment=families` makes them; of a drafter that was trained at
several learning rates the one with the best tau on the validation prompts). --drafters: which of them. Two rows need no training:
ngram, the engine's own lookup, a control whose acceptance is not compared, since the two lookups differ; and Medusa through the
proposer that we ship (`inference/export/vllm_medusa.py`). --speculators: folders that vLLM's training library saved, served as they
are, imported and measured by our decoder, exported again and served again. --interpreted: drafters that vLLM's V1 runner does not
have; they are served by its V2 runner under Triton's interpreter, a few short answers at batch size 1. --merge keeps the rows of
the report that are not made anew; every row has the command that made it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from heads.api.checkpoint import load_drafter, new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.bench import device_facts, process_facts
from inference.export.check.config import LiveConfig, VerifyConfig
from inference.export.check.live import (
    LiveRow,
    Served,
    lines,
    live_check,
    make_requests,
    read_served,
)
from inference.export.check.verify import verify
from inference.export.config import ExportConfig
from inference.export.engine_folder import export, prepare
from inference.export.importing import import_folder
from inference.export.layouts.base import Target
from inference.export.layouts.folder import Folder
from inference.loading import TargetConfig
from inference.manifest import write_bytes, write_json
from inference.report_blocks import markdown_table
from inference.serving import LOOKUP, EngineProcess
from inference.target import TargetModel
from scripts.families import trainings

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reports"
NAMES = ("eagle", "eagle3", "eagle3_copied", "peagle", "fastmtp", "dflash", "medusa", "distilled", "pard")
FEW, SHORT, POSITIONS = 2, 24, 512
"""Prompts of each domain, new tokens and positions where every step takes a second."""
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
SHIPPED = "dflash (vLLM as shipped)"
NOT_COMPARED = {
    "ngram": "a control: the engine's lookup is not ours, so acceptance is not compared",
    SHIPPED: "with the engine's faulty CPU kernel of rms_norm; acceptance is not compared",
}
CUSTOM = "inference.export.vllm_medusa.MedusaProposer"
ABOUT = (
    "Every drafter was exported with `headstart export`, checked with `verify-export` and served by vLLM's CPU build beside the "
    "embedded target in float32, temperature 0. **identical**: answers that are the engine's own plain answers, token by token. "
    "**tau**: 1 + accepted drafts / drafting steps, the engine's definition, counted by the engine and by our decoder on the same "
    "prompts with the same chain. **equal steps**: answers in which both accepted the same number of tokens in every step. "
    "Positions: share of steps that accepted the i-th draft. tokens/s: the whole pass, prompts included, on a machine that was "
    "shared; a comparison of speeds it is not."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--run", type=Path, default=ROOT / "outputs" / "families")
    parser.add_argument("--drafters", nargs="*", default=list(NAMES))
    parser.add_argument("--speculators", nargs="*", type=Path, default=[])
    parser.add_argument("--interpreted", nargs="*", default=[])
    parser.add_argument("--target", default="assets/tiny-target")
    parser.add_argument("--prompts-per-domain", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--out", type=Path, default=REPORTS)
    parser.add_argument("--merge", action="store_true")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        report(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(given: argparse.Namespace) -> None:
    """Export, check, serve, write."""
    config = TargetConfig(path=given.target)
    target = TargetModel.load(config)
    with TemporaryDirectory(prefix="served") as scratch:
        rows, checks, settings = compared(given, config, target, Path(scratch))
    print("\n".join(lines(rows)))
    content = {
        "format": 1,
        "target": {"id": config.path, "revision": target.info.revision, "dtype": config.dtype},
        "device": device_facts(target.device),
        "settings": settings,
        **process_facts(),
        "python": platform.python_version(),
        "command": "python -m scripts.serving_report " + " ".join(spoken(given)),
    }
    content["rows"] = [described(row, checks.get(row.name, {}), content["command"]) for row in rows]
    path = given.out / "serving.json"
    if given.merge and path.is_file():
        content = merged(json.loads(path.read_text(encoding="utf-8")), content)
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    write_bytes(given.out / "serving.md", markdown(content).encode())


def spoken(given: argparse.Namespace) -> list[str]:
    """The command's arguments without this machine's paths."""
    extra = ["--speculators", *(folder.name for folder in given.speculators)] if given.speculators else []
    extra += ["--interpreted", *given.interpreted] if given.interpreted else []
    sizes = ["--prompts-per-domain", str(given.prompts_per_domain), "--max-new-tokens", str(given.max_new_tokens)]
    extra += ["--merge"] if given.merge else []
    return ["--engine-python", ".venv-serve/bin/python", "--run", "outputs/families", "--drafters", *given.drafters, *sizes, *extra]


def compared(
    given: argparse.Namespace, config: TargetConfig, target: TargetModel, scratch: Path
) -> tuple[list[LiveRow], dict[str, Any], dict[str, Any]]:
    """The rows, what the static check said about each name, and the settings."""
    live = LiveConfig(
        python=given.engine_python,
        prompts_per_domain=given.prompts_per_domain,
        max_new_tokens=given.max_new_tokens,
        batches=tuple(given.batches),
        seconds=3600.0,
    )
    served, checks = exported(given.run, given.drafters, config, target, scratch)
    for folder in given.speculators:
        more, found = of_speculators(folder, config, target, scratch)
        served, checks = [*served, *more], {**checks, **found}
    # vLLM's lookup leaves its process unable to start another engine with a drafter (numba, which it compiles with)
    served.sort(key=lambda item: item.kind == "ngram")
    requests = make_requests(live, target, max((item.depth for item in served), default=1))
    process = EngineProcess(live.python, live.seconds, environment={"PYTHONPATH": str(ROOT)})
    rows = live_check(target, served, requests, process, live.batches) if served else []
    if given.interpreted:
        slow, found = exported(given.run, given.interpreted, config, target, scratch)
        slow = [replace(item, name=f"{item.name} (V2 runner, interpreted)") for item in slow]
        brief = replace(live, prompts_per_domain=FEW, max_new_tokens=SHORT)
        few = make_requests(brief, target, max(item.depth for item in slow))
        short = [request for request in few if len(request.tokens) + SHORT < POSITIONS - SHORT]
        rows += live_check(target, slow, short, replace(process, environment=INTERPRETED), (1,), POSITIONS)
        checks |= {f"{name} (V2 runner, interpreted)": check for name, check in found.items()}
    settings = {
        "temperature": 0.0,
        "max_new_tokens": live.max_new_tokens,
        "prompts": len(requests),
        "batches": list(live.batches),
        "interpreted": {"max_new_tokens": SHORT, "prompts_per_domain": FEW},
    }
    return rows, checks, settings


# ---- what is served ----------------------------------------------------------------------------------------------------


def exported(
    run: Path, names: Sequence[str], config: TargetConfig, target: TargetModel, scratch: Path
) -> tuple[list[Served], dict[str, Any]]:
    """Every drafter that was asked for, exported, and what the static check said about it."""
    served: list[Served] = []
    checks: dict[str, Any] = {}
    for name in names:
        if name == "ngram":
            kind = get_kind("ngram")
            drafter = new_drafter("ngram", kind.config_class(), target.info, target.weights, seed=0)
            told = {"method": "ngram", "num_speculative_tokens": 4, **LOOKUP}
            served.append(Served("ngram", "ngram", drafter, None, told, compared=False))
            continue
        folder = scratch / name
        checks[name] = write(best(run, name), config, folder, target)
        served.append(replace(read_served(folder, target), name=name))
        if name == "dflash":
            served.insert(-1, replace(served[-1], name=SHIPPED, corrections=(), compared=False))
            checks[served[-2].name] = checks[name]
        if name == "medusa":
            native = served[-1]
            told = {**native.speculative, "method": "custom_class", "model": CUSTOM}
            where = {"headstart_medusa": str(folder)}
            served.append(replace(native, name="medusa (our proposer)", folder=None, speculative=told, additional=where))
            checks[served[-1].name] = checks[name]
    return served, checks


def best(run: Path, name: str) -> Path:
    """The checkpoint of a drafter's best training; raises `UserError` when it was not trained."""
    found = trainings(run, name)
    if not found:
        raise UserError(
            f"'{run}' holds no training of {name}. Run `headstart loop experiment=families`, or leave it out of --drafters."
        )
    rates = {f"{name}@{item['rate']:g}" for item in found[:1]}
    for folder in (run / "train").iterdir():
        if folder.name in rates:
            return folder / "best"
    raise UserError(f"'{run}' has lost the training {rates}.")


def write(checkpoint: Path, config: TargetConfig, folder: Path, target: TargetModel, engine: str = "vllm") -> dict[str, Any]:
    """Export a checkpoint, and what the static check says about the folder."""
    read = prepare(checkpoint, engine)
    export(ExportConfig(engine=engine, out=str(folder)), read, Target.of(config, read.info), folder)
    return checked(folder, config, target)


def checked(folder: Path, config: TargetConfig, target: TargetModel) -> dict[str, Any]:
    """The static check's verdict."""
    verdict = verify(VerifyConfig(dir=str(folder)), config, target)
    return {"layout": verdict.layout, "static_faults": verdict.faults}


def of_speculators(
    source: Path, config: TargetConfig, target: TargetModel, scratch: Path
) -> tuple[list[Served], dict[str, Any]]:
    """A folder that the library saved: as it is, compared with our import of it; and our export of that import, in its layout and
    in vLLM's.
    """
    name = f"speculators 0.9.0, {source.name}"
    folder = scratch / f"saved-{source.name}"
    shutil.copytree(source, folder)
    found = Folder.read(folder)
    checkpoint = scratch / f"imported-{source.name}"
    import_folder(found, target, checkpoint)
    drafter = load_drafter(checkpoint, target.info, target.weights)
    proposal = found.config["speculators_config"]["proposal_methods"][0]
    method = str(found.config["speculators_model_type"])
    told: dict[str, Any] = {"method": method, "num_speculative_tokens": proposal["speculative_tokens"]}
    if method == "peagle":
        told |= {"method": "eagle3", "parallel_drafting": True}
    corrections = ("grouped_rms_norm",) if drafter.kind == "dflash" else ()
    served = [Served(name, method, drafter, folder, told, corrections=corrections)]
    checks = {name: checked(folder, config, target)}
    for engine in ("speculators", "vllm"):
        again = scratch / f"again-{engine}-{source.name}"
        label = f"{name}, exported again for {engine}"
        checks[label] = write(checkpoint, config, again, target, engine)
        served.append(replace(read_served(again, target), name=label))
    return served, checks


# ---- what is written ---------------------------------------------------------------------------------------------------


def described(row: LiveRow, check: Mapping[str, Any], command: str) -> dict[str, Any]:
    """A row of serving.json."""
    return {**row.to_dict(), **check, "command": command}


def merged(before: dict[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The report before, with its rows renewed and the new ones behind them."""
    names = {row["name"] for row in fresh["rows"]}
    kept = [{"command": before["command"], **row} for row in before["rows"] if row["name"] not in names]
    return {**before, "rows": [*kept, *fresh["rows"]]}


def markdown(content: Mapping[str, Any]) -> str:
    """The table."""
    table, notes = [], []
    for row in content["rows"]:
        if "tau_engine" not in row:
            table.append([row["name"], str(row["batch"]), "-", "-", "-", "-", "-", "-", "; ".join(row["problems"])])
            continue
        rate = row["tokens_per_second"]
        table.append(
            [
                row["name"],
                str(row["batch"]),
                f"{row['identical']}/{row['sequences']}" + (f" ({row['near_ties']} near ties)" if row["near_ties"] else ""),
                f"{row['tau_engine']:.3f}",
                f"{row['tau_ours']:.3f}",
                f"{row['difference']:+.2%}",
                f"{row['answers_with_equal_steps']}/{row['sequences']}",
                f"{rate['engine']:.0f} ({rate['engine_plain']:.0f})",
                "; ".join([*row["problems"], *row["corrected"], *filter(None, [NOT_COMPARED.get(row["name"])])]),
            ]
        )
        if row["batch"] == content["settings"]["batches"][0]:
            for who in ("engine", "ours"):
                notes.append([row["name"], who, *(f"{share:.3f}" for share in row["positions"][who])])
    head = ["drafter", "batch", "identical", "tau, engine", "tau, ours", "difference", "equal steps", "tokens/s (plain)", "notes"]
    most = max((len(line) for line in notes), default=2)
    padded = [line + [""] * (most - len(line)) for line in notes]
    settings = content["settings"]
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(row["command"] for row in content["rows"]))
    made = f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} new tokens. Made by\n\n{commands}"
    return "\n".join(
        [
            f"# Exports, served\n\n{ABOUT}\n\n{content['rows'][0]['engine']}; {made}\n",
            *markdown_table(head, table),
            "\n## Acceptance by position\n",
            *markdown_table(["drafter", "", *map(str, range(1, most - 1))], padded),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
