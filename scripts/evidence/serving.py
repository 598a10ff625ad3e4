"""Exports, checks and serves drafters with vLLM: writes docs/reports/serving.{json,md}.

    python -m scripts.evidence.serving --engine-python .venv-serve/bin/python --run outputs/families

--run: a run whose trainings are served (`headstart loop experiment=families`; of several learning
rates the one with the best tau on the validation prompts). --drafters: which of them. Two rows need
no training: ngram, the engine's own lookup, a control whose acceptance is not compared, since the
two lookups differ; and Medusa through the proposer that Headstart ships
(inference/export/vllm_medusa.py). --speculators: folders that vLLM's training library saved. They
are served unchanged, imported and measured by our decoder, exported again and served again.
--interpreted: drafters that vLLM's V1 runner lacks; its V2 runner serves them under Triton's
interpreter, with a few short answers at batch size 1. --merge keeps the report's other rows; every
row has the command that made it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from heads.api.checkpoint import load_drafter, new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.export.check import live
from inference.export.check.config import LiveConfig, VerifyConfig
from inference.export.check.live import LiveRow, Served
from inference.export.check.verify import verify
from inference.export.config import Engine, ExportConfig
from inference.export.engine_folder import export, prepare
from inference.export.importing import import_folder
from inference.export.layouts.base import Target
from inference.export.layouts.folder import Folder
from inference.folders import copy_plain
from inference.measure.config import process_facts
from inference.measure.prompts import load_prompts
from inference.measure.vllm_process import LOOKUP, EngineProcess
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.common import FAMILIES, Facts, read_json, write_report
from scripts.evidence.families import trainings
from scripts.run.drafters import SWEPT
from scripts.tools.common import PROMPTS, REPORTS, ROOT, command

NAMES = "eagle eagle3 eagle3_copied peagle fastmtp dflash medusa distilled pard".split()
FEW, SHORT, POSITIONS = 2, 24, 512
"""Prompts of each domain, new tokens and positions for runs in which every step takes a second."""
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
SUFFIX = " (V2 runner, interpreted)"
SHIPPED = "dflash (vLLM as shipped)"
NOT_COMPARED = {
    "ngram": "a control: the engine's lookup is not ours, so acceptance is not compared",
    SHIPPED: "with the engine's faulty CPU kernel of rms_norm; acceptance is not compared",
}
CUSTOM = "inference.export.vllm_medusa.MedusaProposer"
ABOUT = (
    "Every drafter was exported with `headstart export`, checked with `verify-export` and served "
    "by vLLM's CPU build beside the embedded target in float32, temperature 0. **identical**: "
    "answers that are the engine's own plain answers, token by token. **tau**: 1 + accepted "
    "drafts / drafting steps, the engine's definition, counted by the engine and by our decoder "
    "on the same prompts with the same chain. **equal steps**: answers in which both accepted "
    "the same number of tokens in every step. Positions: share of steps that accepted the i-th "
    "draft. tokens/s: the whole pass, prompts included, on a machine that was shared; a "
    "comparison of speeds it is not."
)


def report(given: argparse.Namespace) -> None:
    """Export, check and serve the drafters, and write the report."""
    config = TargetConfig(path=given.target)
    target = TargetModel.load(config)
    with TemporaryDirectory(prefix="served") as scratch:
        bench = Bench(config, target, Path(scratch))
        rows, settings = serve_all(given, bench)
    print("\n".join(live.lines(rows)))
    fresh = [
        {**row.to_dict(), **bench.checks.get(row.name, {}), "command": given.command}
        for row in rows
    ]
    content: Facts = {
        "format": 1,
        "target": {"id": config.path, "revision": target.info.revision, "dtype": config.dtype_name},
        "device": device_facts(target.device),
        "settings": settings,
        **process_facts(),
        "python": platform.python_version(),
        "command": given.command,
        "rows": fresh,
    }
    before = read_json(given.out / "serving.json")
    if given.merge and before:  # existing rows are renewed in place; new rows follow them
        require_same(given.out / "serving", before, content)
        names, former = {row["name"] for row in fresh}, {"command": before["command"]}
        kept = [former | row for row in before["rows"] if row["name"] not in names]
        content = {**before, "rows": [*kept, *fresh]}
    write_report(given.out / "serving", content, markdown(content))


def require_same(out: Path, before: Facts, content: Facts) -> None:
    """Raise `UserError` if the rows of a former report are of another target or other settings."""
    for key in ("target", "settings"):
        if before[key] != content[key]:
            raise UserError(
                f"--merge: the rows of '{out}.json' have {key} {before[key]}, the new ones "
                f"{content[key]}. Rows of different {key} do not stand in one table: give the same "
                "options, or another --out."
            )


def serve_all(given: argparse.Namespace, bench: Bench) -> tuple[list[LiveRow], Facts]:
    """The rows, and the settings that all of them share except the interpreted ones."""
    config = LiveConfig(
        python=given.engine_python,
        prompts_per_domain=given.prompts_per_domain,
        max_new_tokens=given.max_new_tokens,
        batches=(1, 8),
        seconds=3600.0,
    )
    target = bench.target
    served = [item for name in given.drafters for item in bench.export(given.run, name)]
    served += [item for folder in given.speculators for item in bench.from_speculators(folder)]
    # after vLLM's lookup, the same process cannot start another engine with a drafter (because of
    # numba)
    served.sort(key=lambda item: item.kind == "ngram")
    prompts = load_prompts(PROMPTS)
    most = max((item.depth for item in served), default=1)
    requests = live.make_requests(config, prompts, target, most)
    process = EngineProcess(config.python, config.seconds, environment={"PYTHONPATH": str(ROOT)})
    rows = live.live_check(target, served, requests, process, config.batches) if served else []
    if given.interpreted:
        slow = [
            item for name in given.interpreted for item in bench.export(given.run, name, SUFFIX)
        ]
        brief = replace(config, prompts_per_domain=FEW, max_new_tokens=SHORT)
        few = live.make_requests(brief, prompts, target, max(item.depth for item in slow))
        short = [item for item in few if len(item.tokens) + SHORT < POSITIONS - SHORT]
        interpreter = replace(process, environment=INTERPRETED)
        rows += live.live_check(target, slow, short, interpreter, (1,), POSITIONS)
    return rows, {
        "temperature": 0.0,
        "max_new_tokens": config.max_new_tokens,
        "prompts": len(requests),
        "batches": list(config.batches),
        "interpreted": {"max_new_tokens": SHORT, "prompts_per_domain": FEW},
    }


@dataclass
class Bench:
    """The target, a folder for exports, and the static check's verdict on each of them, by row."""

    config: TargetConfig
    target: TargetModel
    scratch: Path
    checks: dict[str, Facts] = field(default_factory=dict)

    def export(self, folder: Path, name: str, suffix: str = "") -> list[Served]:
        """The rows of a drafter from the run `folder`, exported and checked."""
        target, label = self.target, name + suffix
        if name == "ngram":
            config = get_kind("ngram").config_class()
            drafter = new_drafter("ngram", config, target.info, target.weights, seed=0)
            method = {"method": "ngram", "num_speculative_tokens": 4, **LOOKUP}
            return [Served("ngram", "ngram", drafter, None, method, compared=False)]
        out = self.scratch / (f"{name}-interpreted" if suffix else name)
        verdict = self.write(best(folder, name), out)
        native = replace(live.read_served(out, target), name=label)
        found = [native]
        if name == "dflash":
            found.insert(0, replace(native, name=SHIPPED, corrections=(), compared=False))
        if name == "medusa":
            method = {**native.speculative, "method": "custom_class", "model": CUSTOM}
            ours = replace(native, name="medusa (our proposer)", folder=None, speculative=method)
            found.append(replace(ours, additional={"headstart_medusa": str(out)}))
        self.checks |= {item.name: verdict for item in found}
        return found

    def write(self, checkpoint: Path, out: Path, engine: Engine = "vllm") -> Facts:
        """Export a checkpoint; returns the static check's verdict."""
        read = prepare(checkpoint, engine)
        options = ExportConfig(engine=engine, out=str(out))
        export(options, read, Target.of(self.config, read.info), out)
        return self.check(out)

    def check(self, out: Path) -> Facts:
        verdict = verify(VerifyConfig(dir=str(out)), self.config, self.target)
        return {"layout": verdict.layout, "static_faults": verdict.faults}

    def saved(self, source: Path, name: str) -> tuple[Served, Path]:
        """A folder that the library saved, served unchanged as the row `name`, and our import of
        it, a checkpoint."""
        target = self.target
        folder = self.scratch / f"saved-{source.name}"
        copy_plain(source, folder)
        found = Folder.read(folder)
        checkpoint = self.scratch / f"imported-{source.name}"
        import_folder(found, target, checkpoint)
        drafter = load_drafter(checkpoint, target.info, target.weights)
        proposal = found.config["speculators_config"]["proposal_methods"][0]
        kind = str(found.config["speculators_model_type"])
        tokens = proposal["speculative_tokens"]
        method = {"method": kind, "num_speculative_tokens": tokens}
        if kind == "peagle":
            method |= {"method": "eagle3", "parallel_drafting": True}
        corrections = ("grouped_rms_norm",) if drafter.kind == "dflash" else ()
        self.checks[name] = self.check(folder)
        return Served(name, kind, drafter, folder, method, corrections=corrections), checkpoint

    def from_speculators(self, source: Path) -> list[Served]:
        """A folder that the library saved: served unchanged, compared with our import of it.

        Also our export of that import, in the library's layout and in vLLM's.
        """
        name = f"speculators 0.9.0, {source.name}"
        first, checkpoint = self.saved(source, name)
        served = [first]
        for engine in ("speculators", "vllm"):
            again = self.scratch / f"again-{engine}-{source.name}"
            label = f"{name}, exported again for {engine}"
            self.checks[label] = self.write(checkpoint, again, engine)
            served.append(replace(live.read_served(again, self.target), name=label))
        return served


def best(folder: Path, name: str) -> Path:
    """The checkpoint of a drafter's best training; raises `UserError` if it was not trained."""
    found = trainings(folder, name)
    if not found:
        raise UserError(
            f"'{folder}' holds no training of {name}. Run `headstart loop experiment=families`, "
            "or leave it out of --drafters."
        )
    rate = found[0]["rate"]
    return next(
        path / "best"
        for path in (folder / "train").glob(f"{name}{SWEPT}*")
        if float(path.name.partition(SWEPT)[2]) == rate
    )


HEADER = ["drafter", "batch", "identical", "tau, engine", "tau, ours", "difference", "equal steps"]
HEADER += ["tokens/s (plain)", "notes"]


def markdown(content: Facts) -> list[str]:
    """The lines of serving.md."""
    settings = content["settings"]
    table, positions = [], []
    for row in content["rows"]:
        name, batch, problems = row["name"], str(row["batch"]), row["problems"]
        if "tau_engine" not in row:
            table.append([name, batch, *["-"] * 6, "; ".join(problems)])
            continue
        rate, total = row["tokens_per_second"], row["sequences"]
        ties = f" ({row['near_ties']} near ties)" if row["near_ties"] else ""
        reason = [NOT_COMPARED[name]] if name in NOT_COMPARED else []
        table.append(
            [
                name,
                batch,
                f"{row['identical']}/{total}{ties}",
                f"{row['tau_engine']:.3f}",
                f"{row['tau_ours']:.3f}",
                f"{row['difference']:+.2%}",
                f"{row['answers_with_equal_steps']}/{total}",
                f"{rate['engine']:.0f} ({rate['engine_plain']:.0f})",
                "; ".join([*problems, *row["corrected"], *reason]),
            ]
        )
        if row["batch"] == settings["batches"][0]:
            for who in ("engine", "ours"):
                shares = [f"{share:.3f}" for share in row["positions"][who]]
                positions.append([name, who, *shares])
    most = max((len(line) for line in positions), default=2)
    padded = [line + [""] * (most - len(line)) for line in positions]
    commands = dict.fromkeys(f"    {row['command']}" for row in content["rows"])
    return [
        f"# Exports, served\n\n{ABOUT}\n\n{content['rows'][0]['engine']}; {settings['prompts']} "
        f"prompts, up to {settings['max_new_tokens']} new tokens. Made by\n",
        *commands,
        "",
        *markdown_table(HEADER, table),
        "\n## Acceptance by position\n",
        *markdown_table(["drafter", "", *map(str, range(1, most - 1))], padded),
        "",
    ]


main = command(
    report,
    engine_python={"required": True},
    run=FAMILIES,
    drafters={"nargs": "*", "default": NAMES},
    speculators={"nargs": "*", "type": Path, "default": []},
    interpreted={"nargs": "*", "default": []},
    target="assets/tiny-target",
    prompts_per_domain=8,
    max_new_tokens=128,
    out=REPORTS,
    merge=False,
)

if __name__ == "__main__":
    sys.exit(main())
