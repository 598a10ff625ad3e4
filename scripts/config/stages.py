"""The stages of the command line: what each does and which configuration groups it reads.

Plain data, nothing heavy imported. A new stage is one entry here and one module in scripts/stages/
with `run(settings)`; a group of its own is one attribute of `scripts.config.schema.Settings`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage: its summary for `--help` and the top-level configuration keys that it reads."""

    name: str
    summary: str
    groups: tuple[str, ...]
    code: str = ""
    """The module below scripts/stages/; empty: the stage's name."""
    short: tuple[tuple[str, str], ...] = ()
    """Short spellings of settings on the command line, (short, long), for groups that are not read.
    """
    continued: bool = False
    """A scheduler's signal ends it with status 0 wherever it is: the same command continues it."""
    recorded: bool = False
    """It can be asked whether it is complete (`--complete`)."""

    @property
    def module(self) -> str:
        """The module that runs it: `run(settings: Settings) -> int | None`, the exit status, None
        for 0."""
        return f"scripts.stages.{self.code or self.root}"

    @property
    def root(self) -> str:
        """The name of the stage's root in conf/, which is base.yaml for a stage that has none."""
        return self.name.replace("-", "_")

    def expand_short(self, overrides: list[str]) -> list[str]:
        """The overrides with short spellings replaced; the long one wins where both are given."""
        names = dict(self.short)
        keys = {item.split("=", 1)[0] for item in overrides}
        found = []
        for item in overrides:
            key, equals, value = item.partition("=")
            if key not in names:
                found.append(item)
            elif names[key] not in keys:
                found.append(f"{names[key]}{equals}{value}")
        return found


GENERATE = ("run", "target", "data", "sampling", "generate")
FEATURES = ("run", "target", "head", "features", "engine", "train")
TRAIN = (
    "run",
    "target",
    "head",
    "features",
    "engine",
    "optim",
    "schedule",
    "train",
    "decode",
    "joint",
)
MEASURE = ("run", "target", "decode", "bench", "measure")
OWN = ("head", "joint")
"""What a refresh takes from the old drafter."""
AUDIT = ("run", "target", "head", "decode", "bench", "audit")

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "generate",
            "let the target answer prompts; writes sharded answers and a manifest",
            GENERATE,
            continued=True,
            recorded=True,
        ),
        Stage(
            "features",
            "write the target's features for a training to disk, or serve them to trainings "
            "elsewhere",
            FEATURES,
            continued=True,
        ),
        Stage(
            "train",
            "train one drafter on the answers; keeps the checkpoint with the best measured tau",
            TRAIN,
            continued=True,
            recorded=True,
        ),
        Stage(
            "plan",
            "predict a training's memory, disk and hours without training (also: headstart train "
            "--plan)",
            (*TRAIN, "plan"),
        ),
        Stage(
            "measure",
            "decode held-out prompts with every drafter and without; writes report.json",
            MEASURE,
        ),
        Stage(
            "audit",
            "prove that drafters do not change the target's text; ends with status 1 if one does",
            AUDIT,
        ),
        Stage(
            "watch",
            "test whether a drafter still suits its target and traffic; ends with status 1 if it "
            "has gone stale",
            ("run", "target", "decode", "bench", "watch"),
        ),
        Stage(
            "refresh",
            "make a drafter fit a changed target again: the shortest training on its answers",
            tuple(
                name
                for name in dict.fromkeys((*GENERATE, *TRAIN, "bench", "refresh"))
                if name not in OWN
            ),
        ),
        Stage(
            "feedback",
            "make training data of records: what the drafter got wrong, and where, becomes weights "
            "and choices",
            ("run", "target", "feedback"),
        ),
        Stage(
            "tune",
            "choose draft length, tree and early stopping for this machine; writes decode.yaml "
            "into the checkpoint",
            ("run", "target", "decode", "tune"),
        ),
        Stage(
            "traffic",
            "simulate a server under given traffic: what speculation gains, per drafter and draft "
            "length",
            ("run", "target", "decode", "traffic"),
        ),
        Stage(
            "report", "render one or several report.json as markdown and plots", ("run", "report")
        ),
        Stage(
            "push",
            "build a Hub folder from a measured drafter and upload it (dry run by default)",
            ("run", "push"),
            code="publish.push",
        ),
        Stage(
            "pull",
            "fetch a drafter that was pushed, checked file by file",
            ("run", "pull"),
            code="publish.pull",
        ),
        Stage(
            "export",
            "write a trained drafter as a folder that vLLM, SGLang, speculators or transformers "
            "loads",
            ("run", "target", "export"),
            code="publish.export",
            short=(("head", "run.drafter"), ("engine", "export.engine")),
        ),
        Stage(
            "verify-export",
            "check an exported folder as its engine would load it, or by serving it",
            ("run", "target", "verify"),
            code="publish.verify_export",
        ),
        Stage(
            "import",
            "make a checkpoint of a drafter that somebody else trained",
            ("run", "target", "import"),
            code="publish.import_drafter",
        ),
        Stage(
            "chat",
            "talk to the target through a drafter in the terminal",
            ("run", "target", "decode", "chat"),
        ),
        Stage(
            "serve",
            "serve the target through a drafter: an OpenAI-compatible server with continuous "
            "batching",
            ("run", "target", "decode", "serve"),
        ),
        Stage(
            "loop",
            "generate, train every recipe, measure and report, skipping what is complete",
            tuple(dict.fromkeys((*GENERATE, *TRAIN, *MEASURE, "feedback", "report", "loop"))),
            code="loop.stage",
        ),
    )
}

OPTION_GROUPS = (
    "head",
    "target",
    "data",
    "features",
    "engine",
    "optim",
    "schedule",
    "joint",
    "decode",
    "bench",
    "run",
    "experiment",
    "debug",
)
"""Groups chosen by name (`group=option`); each is a folder under conf/."""

RECIPE_GROUPS = ("experiment", "debug")
"""Groups whose files set keys anywhere instead of filling a key of their own."""


GROUPS = tuple(dict.fromkeys(group for stage in STAGES.values() for group in stage.groups))
"""Every top-level configuration key."""
