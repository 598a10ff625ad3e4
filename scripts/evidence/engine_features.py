"""Compares features from vLLM with ours: `python -m scripts.evidence.engine_features` writes
docs/reports/engine_features.{json,md}.

For a target in float32 and in bfloat16, vLLM is started with the command that `headstart` gives
(one process at a time, `--python`: that of vLLM's environment). Then:

1. every layer's states, and the last hidden state, are compared with the target's own;
2. `headstart features features.source=vllm` writes a store for all heads;
3. each head is trained from that store and online, with the same seeds, and both sides' drafters
   decode the same held-out prompts;
4. training and decoding are compared for the drafters that were trained on the engine's features.

Stores, trainings and measurements are kept in `--work`; a rerun does only the missing steps.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.manifest import MANIFEST_FILE
from inference.parity import check_parity
from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell, family_overrides, run_on_target
from scripts.evidence.small_targets import (
    PLACES,
    Bench,
    chain,
    compared,
    earlier,
    options_of_bench,
    put_rows,
    save,
    some_of,
)
from scripts.evidence.vllm_server import VllmServer
from scripts.tools.common import ROOT, command, cpu_target
from train.data.pack import PackedData, parity_documents, read_documents
from train.features.config import FeaturesConfig
from train.features.document_target import document_target
from train.features.vllm.command import serve_command

HEADS = ("eagle3", "dspark")
PRECISIONS = {"float32": ("float32", "fp32"), "bfloat16": ("bfloat16", "bf16")}
"""target.dtype -> engine.precision and features.format."""
DEPTH, PARITY_DOCUMENTS = 4, 4
LENGTH = 512
"""train.sequence_length of experiment=families."""


def report(given: argparse.Namespace) -> None:
    """Measure the missing parts, and write the report after every dtype and head."""
    bench = Bench(PLACES["embedded"], given.work, given.threads, given.prompts)
    content = earlier(given.out)
    settings = {"documents": given.documents, "steps": given.steps}
    for dtype in given.dtypes:
        engine, layers = EngineRun(given, bench, dtype), content.setdefault("layers", {})
        known = layers.get(dtype, {}).get("documents") == given.documents
        if not (known and engine.stored):
            with engine.serving():
                if not known:
                    layers[dtype] = engine.differences()
                    save(given, content, settings, markdown)
                engine.write_store()
        for head in given.heads:
            row = {"dtype": dtype, "head": head, **trained(given, bench, engine, head)}
            put_rows(content, [row], ("dtype", "head"))
            save(given, content, settings, markdown)
    print("\n".join(markdown(content)))


class EngineRun:
    """vLLM with the target in `dtype`, and the files made from its states."""

    def __init__(self, given: argparse.Namespace, bench: Bench, dtype: str) -> None:
        self.given, self.place, self.dtype, self.threads = given, bench.place, dtype, bench.threads
        self.target = cpu_target(self.place.target, dtype)
        self.work = given.work / dtype
        self.store = self.work / "store"
        self.config = FeaturesConfig(
            states=str((self.work / "states").resolve()),
            layers=tuple(range(self.target.info.num_layers + 1)),
        )

    @property
    def stored(self) -> bool:
        return (self.store / MANIFEST_FILE).is_file()

    @property
    def command(self) -> str:
        """The command that starts such an engine."""
        return serve_command(
            self.config, self.target.info, self.config.layers, self.dtype, LENGTH, cpu=True
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """vLLM with this command, until the block ends. Raises `UserError` if it does not start."""
        python = self.given.python
        if not python.is_file():
            raise UserError(
                f"there is no {python}; make it with `make serve-env`, or give --python."
            )
        words = [os.path.expandvars(word) for word in shlex.split(self.command)]
        given = words[words.index("serve") + 1 :]
        self.work.mkdir(parents=True, exist_ok=True)
        server = VllmServer(str(python), Path(given[0]), self.work / "vllm.log", 16, given[1:])
        self.config = replace(self.config, servers=(server.address,))
        with server.running():
            yield

    def differences(self) -> Facts:
        """Name of a state -> its relative difference over all tokens of some documents, and the
        largest difference of one token; in bfloat16 also the target's own difference from itself in
        float32."""
        answers = read_documents(self.place.answers, self.target.info)
        documents = [
            tokens[:LENGTH].tolist() for tokens, _ in islice(answers, self.given.documents)
        ]
        needs = FeatureSpec(self.config.layers, last_hidden=True)
        engine = document_target(self.config, Path(), self.target, needs, LENGTH)
        try:
            theirs = states_of(engine.features, documents, needs)
        finally:
            engine.close()
        mine = states_of(self.target.features, documents, needs)
        found = {name: difference(theirs[name], mine[name]) for name in mine}
        if self.dtype != "float32":
            exact = states_of(cpu_target(self.place.target).features, documents, needs)
            for name, facts in found.items():
                facts["own_to_float32"] = difference(mine[name], exact[name])["relative"]
                facts["engine_to_float32"] = difference(theirs[name], exact[name])["relative"]
        counted = {"documents": self.given.documents, "tokens": sum(map(len, documents))}
        # without this machine's paths
        return {**counted, "states": found, "command": self.command.replace(str(ROOT), ".")}

    def write_store(self) -> None:
        """`headstart features`, for all heads."""
        if self.stored:
            return
        words = [*self.from_store(), f"head={self.given.heads[0]}"]
        words += [f"features.heads=[{','.join(self.given.heads[1:])}]"]
        words += [f"features.servers=[{self.config.servers[0]}]"]
        words += [f"features.states={self.config.states}"]
        words += [f"features.layers={list(self.config.layers)}".replace(" ", "")]
        words += [f"run.answers={self.place.answers}", f"run.threads={self.threads}"]
        run_on_target("features", self.place.target, self.work / "run", *words)

    def from_store(self) -> list[str]:
        """Settings of a training from the store, and of the store itself."""
        _, form = PRECISIONS[self.dtype]
        return [
            *self.precision(),
            *("features=store", "features.source=vllm", f"features.format={form}"),
            f"features.path={self.store.resolve()}",
        ]

    def precision(self) -> list[str]:
        """Settings of an online training."""
        precision, _ = PRECISIONS[self.dtype]
        return [f"target.dtype={self.dtype}", f"engine.precision={precision}"]


Run = Callable[[Tensor, Tensor, Tensor, FeatureSpec], tuple[Tensor | None, Tensor | None]]
"""`TargetModel.features`."""


def states_of(
    features: Run, documents: Sequence[Sequence[int]], needs: FeatureSpec
) -> dict[str, Tensor]:
    """`tap L` and `last hidden` -> the states [N, H] float32 of all documents, one a row."""
    rows = []
    for document in documents:
        tokens = torch.tensor([document])
        positions = torch.arange(len(document))[None]
        taps, last = features(tokens, positions, torch.ones_like(tokens).int(), needs)
        assert taps is not None
        assert last is not None
        rows.append(torch.cat([taps[0], last[0][:, None]], 1).float())  # [N, n + 1, H]
    states = torch.cat(rows)
    names = [*(f"tap {tap}" for tap in needs.taps), "last hidden"]
    return dict(zip(names, states.unbind(1), strict=True))


def difference(theirs: Tensor, mine: Tensor) -> Facts:
    """The difference of states [N, H], relative to ours over all tokens, and that of the token with
    the largest difference."""
    each = (theirs - mine).norm(dim=1) / mine.norm(dim=1)
    whole = (theirs - mine).norm() / mine.norm()
    return {"relative": float(whole), "largest": float(each.max())}


def trained(given: argparse.Namespace, bench: Bench, engine: EngineRun, head: str) -> Facts:
    """tau of drafters from the engine's features and from ours over all seeds, and the parity of
    the former."""
    steps = [f"train.max_steps={given.steps}"] if given.steps else []
    ways = {"vllm": engine.from_store(), "online": engine.precision()}
    sides: dict[str, list[Path]] = {}
    for way, words in ways.items():
        sides[way] = [
            bench.train(
                f"{head}-{engine.dtype}-{way}-{seed}",
                *(*family_overrides(head), *steps, f"run.seed={seed}", *words),
            )
            for seed in range(given.seeds)
        ]
    totals = {
        way: [bench.totals(path, "measured", bench.measuring, chain(DEPTH)) for path in paths]
        for way, paths in sides.items()
    }
    found = compared(totals["vllm"], totals["online"])
    found |= {"vllm": found.pop("ours"), "online": found.pop("theirs")}
    each = {
        way: [float(one.committed.sum() / one.passes.sum()) for one in several]
        for way, several in totals.items()
    }
    return {**found, "taus": each, "seeds": given.seeds, "parity": parity(bench, sides["vllm"][0])}


def parity(bench: Bench, checkpoint: Path) -> Facts:
    """The largest relative difference of a drafter's logits between training and decoding."""
    target = bench.model
    data = PackedData.from_manifest(bench.place.answers, target.info, LENGTH)
    documents = list(islice(parity_documents(data, DEPTH + 4), PARITY_DOCUMENTS))
    drafter = load_drafter(checkpoint, target.info, target.weights)
    made = check_parity(target, drafter, documents, DEPTH)
    return {"compared": made.compared, "worst": max(made.worst), "allowed": made.tolerance}


# The page


def markdown(content: Facts) -> list[str]:
    """The lines of engine_features.md."""
    settings = content["settings"]
    lines = [
        "# Features from vLLM against ours",
        "",
        "The embedded target in vLLM on a CPU (`ExampleHiddenStatesConnector`'s files, written by "
        "`train.features.vllm.connector`), against the same target here. Made by "
        f"`{content['command']}`; all figures: engine_features.json.",
        "",
        "## States",
        "",
        "**relative**: norm of the difference over the norm of our states, all tokens together; "
        "**largest**: of the token where it is largest. In bfloat16, both sides' distance to our "
        "float32 states stands beside it.",
        "",
    ]
    for dtype, found in content.get("layers", {}).items():
        further = ("own_to_float32", "engine_to_float32") if dtype != "float32" else ()
        header = ["state", "relative", "largest", *(name.replace("_", " ") for name in further)]
        rows = [
            [name, *(f"{facts[key]:.1e}" for key in ("relative", "largest", *further))]
            for name, facts in found["states"].items()
        ]
        lines += [f"### {dtype}, {found['tokens']:,} tokens", "", *markdown_table(header, rows), ""]
    lines += [
        "## Drafters",
        "",
        f"The same training from both, {settings['prompts']} held-out prompts, chains of {DEPTH} "
        "at temperature 0, intervals: 95% bootstrap over prompts and seeds. **ratio**: of "
        "(tau - 1), vLLM's features over ours. **parity**: largest relative difference of logits "
        "between training and decoding, and what is allowed.",
        "",
    ]
    header = ["head", "target", "seeds", "tau, vLLM", "tau, ours", "ratio", "parity"]
    rows = [
        [
            *(row["head"], row["dtype"], str(row["seeds"])),
            *(cell(row[side]["tau"], row[side]["tau_ci95"]) for side in ("vllm", "online")),
            cell(row["ratio"], row["ratio_ci95"]),
            f"{row['parity']['worst']:.0e} ({row['parity']['allowed']:.0e})",
        ]
        for row in content.get("rows", [])
    ]
    return [*lines, *markdown_table(header, rows), ""]


main = command(
    report,
    python=(ROOT / ".venv-serve" / "bin" / "python", "of vLLM's environment"),
    heads=some_of(HEADS),
    dtypes=some_of([*PRECISIONS]),
    seeds=(4, "trainings of each head from either side"),
    steps=(0, "of a training; 0: as experiment=families"),
    documents=(64, "whose states are compared"),
    **options_of_bench("engine_features"),
)

if __name__ == "__main__":
    sys.exit(main())
