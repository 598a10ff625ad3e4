"""The stages of the command line: the summary of each, and the configuration groups that it reads.

The module is plain data and imports nothing heavy. A new stage needs one entry here and one module
in scripts/stages/ with `run(settings)`. A new group needs one attribute of
`scripts.config.schema.Settings`.
"""

from __future__ import annotations

from dataclasses import dataclass

EXTRA_VARIABLE = "HEADSTART_CONF"
"""Environment variable that names more folders (separated like PATH) with the user's groups and
recipes. They are searched after conf/. `--config-dir` adds one."""


@dataclass(frozen=True)
class Stage:
    """One stage: its summary for `--help` and the top-level configuration keys that it reads."""

    name: str
    summary: str
    groups: tuple[str, ...]
    code: str = ""
    """The module below scripts/stages/; empty: the stage's name."""
    short: tuple[tuple[str, str], ...] = ()
    """Short spellings of settings on the command line, (short, long), for keys of groups that the
    stage does not read."""
    alone: bool = False
    """Whether only the main process of a launch runs it."""
    continued: bool = False
    """Whether a scheduler's signal ends it with status 0 at any point; the same command continues
    it."""
    recorded: bool = False
    """Whether it can be asked if it is complete (`--complete`)."""

    @property
    def module(self) -> str:
        """The module with `run(settings)`, which returns the exit status or None for 0."""
        return f"scripts.stages.{self.code or self.root}"

    @property
    def root(self) -> str:
        """The stage's root config in conf/: its own file, or base.yaml if there is none."""
        return self.name.replace("-", "_")

    @property
    def common(self) -> tuple[str, ...]:
        """The keys that are set most often."""
        return join(COMMON[self.name])

    def expand_short(self, overrides: list[str]) -> list[str]:
        """The overrides with short spellings replaced; the long spelling wins if both are given."""
        names = dict(self.short)
        keys = {item.split("=", 1)[0] for item in overrides}
        found = []
        for item in overrides:
            key, equals, value = item.partition("=")
            if names.get(key) not in keys:
                found.append(f"{names.get(key, key)}{equals}{value}")
        return found


def join(*groups: str) -> tuple[str, ...]:
    """The names in space-separated texts, without duplicates."""
    return tuple(dict.fromkeys(" ".join(groups).split()))


EMBEDDED = "embedded"
"""The option of target, data and bench for the small target of this repository."""
GENERATE = "run target data sampling generate"
TRAIN = "run target head features engine optim schedule train decode joint"
MEASURE = "run target decode bench measure"

COMMON = {
    "generate": (
        "run.name target.path data.path data.limit sampling.temperature sampling.max_new_tokens "
        "sampling.batch_size generate.answers run.overwrite"
    ),
    "features": "run.name features.format features.quota_gib features.serve train.sequence_length",
    "train": (
        "run.name run.drafter head.kind target.path optim.lr train.epochs train.max_steps "
        "train.global_batch train.micro_batch train.sequence_length train.eval_every "
        "train.prompts engine.name train.tracker.wandb run.overwrite"
    ),
    "plan": (
        "plan.gpu plan.count plan.tokens plan.measured train.sequence_length train.micro_batch "
        "train.global_batch train.epochs"
    ),
    "measure": (
        "run.name measure.drafters measure.kinds target.path bench.prompts "
        "bench.prompts_per_domain bench.repeats decode.temperature decode.max_new_tokens"
    ),
    "audit": "run.name audit.drafters audit.kinds audit.checks audit.temperatures audit.batch_size",
    "watch": "watch.drafter watch.learn watch.records watch.tolerance watch.alarm_rate",
    "refresh": "refresh.drafter refresh.prompts refresh.old_target refresh.until target.path",
    "feedback": (
        "run.name feedback.records feedback.answers feedback.token_weights feedback.hard_prompts"
    ),
    "tune": "run.name tune.drafter tune.batches tune.temperatures tune.depths",
    "traffic": "run.name traffic.file traffic.drafters traffic.depths traffic.rows",
    "report": "run.name report.reports report.out",
    "push": "run.name run.drafter push.repo push.license push.dry_run",
    "pull": "pull.repo pull.revision pull.out",
    "export": "run.name run.drafter export.engine export.checkpoint export.out",
    "verify-export": "verify.dir verify.mode verify.source",
    "import": "run.name run.drafter import.source target.path",
    "chat": (
        "run.name chat.drafter chat.system decode.temperature decode.max_new_tokens target.path"
    ),
    "learn": (
        "run.name learn.server learn.drafter learn.folder learn.least_tokens learn.trial_share "
        "learn.cycles"
    ),
    "serve": "run.name serve.drafter serve.host serve.port serve.token_file target.path",
    "loop": (
        "run.name head.kind target.path data.path data.limit bench.prompts optim.lr "
        "train.epochs train.max_steps loop.recipes loop.rounds loop.launch run.overwrite"
    ),
}
"""Stage -> the keys that are set most often, which `--help` shows first."""

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "generate",
            "let the target answer prompts; writes sharded responses and a manifest",
            join(GENERATE),
            continued=True,
            recorded=True,
        ),
        Stage(
            "features",
            "write the target's features for a training to disk, or serve them to trainings "
            "elsewhere",
            join("run target head features engine train"),
            continued=True,
        ),
        Stage(
            "train",
            "train one drafter on the responses; keeps the checkpoint with the best measured tau",
            join(TRAIN),
            continued=True,
            recorded=True,
        ),
        Stage(
            "plan",
            "predict a training's memory, disk and hours without training (also: headstart train "
            "--plan)",
            join(TRAIN, "data sampling plan"),
        ),
        Stage(
            "measure",
            "decode held-out prompts with every drafter and without; writes report.json",
            join(MEASURE),
            alone=True,  # other processes would disturb the clock
        ),
        Stage(
            "audit",
            "prove that drafters do not change the target's text; ends with status 1 if one does",
            join("run target head decode bench audit"),
            alone=True,
        ),
        Stage(
            "watch",
            "test whether a drafter still suits its target and traffic; ends with status 1 if it "
            "has gone stale",
            join("run target decode bench watch"),
            alone=True,
        ),
        Stage(
            "refresh",
            "make a drafter fit a changed target again: the shortest training on its responses",
            # head and joint are those of the old drafter
            join(GENERATE, "features engine optim schedule train decode bench refresh"),
            code="refresh.stage",
        ),
        Stage(
            "feedback",
            "make training data of records: what the drafter got wrong, and where, becomes weights "
            "and choices",
            join("run target feedback"),
        ),
        Stage(
            "tune",
            "choose draft length, tree and early stopping for this machine; writes decode.yaml "
            "into the checkpoint",
            join("run target decode tune"),
            alone=True,
        ),
        Stage(
            "traffic",
            "simulate a server under given traffic: what speculation gains, per drafter and draft "
            "length",
            join("run target decode traffic"),
            alone=True,
        ),
        Stage(
            "report", "render one or several report.json as markdown and plots", join("run report")
        ),
        Stage(
            "push",
            "build a Hub folder from a measured drafter and upload it (dry run by default)",
            join("run push"),
            code="publish.push",
            alone=True,
        ),
        Stage(
            "pull",
            "fetch a drafter that was pushed, checked file by file",
            join("run pull"),
            code="publish.pull",
            alone=True,
        ),
        Stage(
            "export",
            "write a trained drafter as a folder that vLLM, SGLang, speculators or transformers "
            "loads",
            join("run target export"),
            code="publish.export",
            short=(("head", "run.drafter"), ("engine", "export.engine")),
            alone=True,
        ),
        Stage(
            "verify-export",
            "check an exported folder as its engine would load it, or by serving it",
            join("run target bench verify"),
            code="publish.verify_export",
            alone=True,
        ),
        Stage(
            "import",
            "make a checkpoint of a drafter of another trainer",
            join("run target import"),
            code="publish.import_drafter",
            alone=True,
        ),
        Stage(
            "chat",
            "talk to the target through a drafter in the terminal",
            join("run target decode chat"),
        ),
        Stage(
            "serve",
            "serve the target through a drafter: an OpenAI-compatible server with continuous "
            "batching",
            join("run target decode serve"),
        ),
        Stage(
            "learn",
            "learn from a running server's traffic: refresh its drafter, compare the candidate "
            "within the server, take it if it is better",
            join("run target features feedback engine optim schedule train decode export learn"),
            alone=True,
            continued=True,
        ),
        Stage(
            "loop",
            "generate, train every recipe, measure and report, skipping what is complete",
            join(GENERATE, TRAIN, MEASURE, "feedback report loop"),
            code="loop.stage",
        ),
    )
}

OPTION_GROUPS = join(
    "head target data features engine optim schedule joint decode bench run experiment debug"
)
"""Groups of which an option is chosen by name (`group=option`); each is a folder in conf/."""

RECIPE_GROUPS = ("experiment", "debug")
"""Groups whose files set keys anywhere, instead of filling a key of the same name."""


GROUPS = tuple(dict.fromkeys(group for stage in STAGES.values() for group in stage.groups))
"""Every top-level configuration key."""
