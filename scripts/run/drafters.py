"""Finds drafters: those that a run has trained, checkpoint folders from elsewhere, and head configs
that need no training."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import CONFIG_FILE as CHECKPOINT_FILE
from heads.api.checkpoint import WEIGHTS_FILE, load_drafter, new_drafter, read_config, weights_file
from heads.api.config import build
from heads.api.errors import UserError, missing_folder, suggest
from heads.api.reading import read_yaml_object, require_object
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.decode_file import DECODE_FILE, advice
from inference.decoding.draft_file import DRAFT_KEYS, read_draft
from inference.folders import is_temporary
from inference.hub.fetch import REVISION, fetch, is_published_name
from inference.integrity import CHECKED, require_unchanged
from inference.manifest import MANIFEST_FILE, file_sha256
from inference.report.model import REPORT_FILE, read_report
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.config.compose import conf_folders, options
from scripts.config.schema import Settings, plain
from scripts.config.stage_configs import RunConfig
from scripts.run.folder import CONFIG_FILE, missing_run, named_file, read_record, require_run
from scripts.run.folder import read_config as read_stage_config
from train.manifest import read_training

BEST = "best"
NO_DRAFTER = "none"
"""Value of chat.drafter and serve.drafter for plain decoding."""
ALL = "all"
"""Value of run.drafter for every trained drafter of the run."""
NO_DRAFT = ("sampled", "plain")
"""Options of `decode` that set no draft: drafters keep their own."""
SWEPT = "@"
"""Separates a row's name and its learning rate in the names of drafters that `loop.sweep`
trains."""


@dataclass(frozen=True)
class Found:
    """A drafter to load. `checkpoint` is its folder, or None for a drafter that needs no training
    and is configured by `values`."""

    name: str
    kind: str
    checkpoint: Path | None
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def folder(self) -> Path:
        """The checkpoint, for a drafter that is known to have one."""
        assert self.checkpoint is not None, f"'{self.name}' needs no training"
        return self.checkpoint

    @property
    def has_weights(self) -> bool:
        return self.checkpoint is not None and weights_file(self.checkpoint).is_file()

    @property
    def stage_folder(self) -> Path | None:
        """The train stage's folder around the checkpoint, if there is one."""
        folder = self.checkpoint.parent if self.checkpoint else None
        return folder if folder is not None and (folder / CONFIG_FILE).is_file() else None

    def trained_with(self, group: str) -> dict[str, Any]:
        """A group of the settings that it was trained with; empty if they are not available. Of
        `decode`, a checkpoint that stands alone has the draft."""
        folder = self.stage_folder
        if not folder:
            alone = group == "decode" and self.checkpoint is not None
            return read_draft(self.folder) if alone else {}
        return require_object(read_stage_config(folder).get(group) or {}, f"{group} in '{folder}'")


def list_trained(run: RunConfig) -> dict[str, Found]:
    """Name -> drafter for every training of a run, finished or not, that has a best checkpoint. A
    drafter that was trained jointly (`joint=lora`) is left out: it belongs to the target that its
    own training produced, not to the run's target."""
    return {
        name: item
        for name, item in checkpoints(run).items()
        if item.trained_with("joint").get("mode", "none") == "none"
    }


def checkpoints(run: RunConfig) -> dict[str, Found]:
    folders = sorted((run.directory / "train").glob(f"*/{BEST}/{CHECKPOINT_FILE}"))
    return {
        path.parents[1].name: at(path.parent)
        for path in folders
        if not is_temporary(path.parents[1].name)
    }


def best_of_sweeps(found: Mapping[str, Found]) -> list[Found]:
    """Of drafters named row@rate, the one whose training measured the best tau, under the row's
    name, unless another drafter has that name; all others unchanged. Unfinished trainings do not
    count."""
    kept: dict[str, Found] = {}
    best: dict[str, float] = {}
    for name, item in found.items():
        row, mark, _ = name.partition(SWEPT)
        if not mark:
            kept[name] = item
        elif (item.folder.parent / MANIFEST_FILE).is_file():
            tau = read_training(item.folder.parent)["best"]["tau"] or 0.0
            if tau > best.get(row, -1.0):
                best[row] = tau
                kept[f"{row}{SWEPT}"] = item if row in found else replace(item, name=row)
    return list(kept.values())


def named(given: str, known: Mapping[str, Found]) -> Found | None:
    """The drafter of that name, or the best one of the sweep's row of that name; None if there is
    neither."""
    if given in known:
        return known[given]
    row = {name: item for name, item in known.items() if name.partition(SWEPT)[0] == given}
    return next(iter(best_of_sweeps(row)), None)


def at(folder: Path) -> Found:
    """The drafter in the folder of a checkpoint or a train stage; raises `UserError` for any other
    folder."""
    checkpoint = folder / BEST if (folder / BEST / CHECKPOINT_FILE).is_file() else folder
    whole = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - a link has a name of its own
    kind = str(read_config(checkpoint)["kind"])
    return Found(whole.parent.name if checkpoint.name == BEST else whole.name, kind, checkpoint)


def name_of(given: str) -> str:
    """The name with which a drafter is measured that is given as for `find`; it may not exist
    yet."""
    if Path(given).is_dir():
        return at(Path(given)).name
    return Path(given.partition(REVISION)[0] if is_published_name(given) else given).name


def published(name: str) -> Found:
    """The drafter with that name on the Hub, fetched; raises `UserError` as `fetch` does."""
    repo = name.partition(REVISION)[0]
    return replace(at(fetch(name)), name=repo.rpartition("/")[2])


def find(given: str, run: RunConfig, heads: Mapping[str, Mapping[str, Any]] | None = None) -> Found:
    """Find a drafter by its name in `heads` or in this run (a sweep's row is its best drafter), by
    its folder, by its name on the Hub, or by a head config without training."""
    known = checkpoints(run)
    if heads and given in heads:
        return untrained(given, heads[given])
    if (own := named(given, known)) is not None:
        return own
    if Path(given).is_dir():
        return at(Path(given))
    recipes = untrained_recipes()
    if given in recipes:
        return untrained(given, {})
    if is_published_name(given):
        try:
            return published(given)
        except UserError as error:
            raise UserError(
                f"there is no drafter '{given}' in '{run.directory}', no checkpoint folder of that "
                f"name, and {error}"
            ) from error
    if len(Path(given).parts) > 1:
        raise UserError(f"{missing_folder(Path(given))} Give the folder of a drafter's checkpoint.")
    where = missing_run(run) or (
        f"there is no drafter '{given}' in '{run.directory}', and no checkpoint folder of that "
        f"name.{suggest(given, known)}"
    )
    raise UserError(
        f"{where} Head configs that need no training are given by name: {', '.join(recipes)}."
    )


def find_trained(key: str, given: str, run: RunConfig) -> Found:
    """The drafter named by the setting `key`; raises `UserError` unless it has trained weights."""
    if not given:
        raise UserError(
            f"{key} is missing: give the drafter's checkpoint folder, or its name in this run."
        )
    found = find(given, run)
    if not found.has_weights:
        raise UserError(
            f"{key}: '{given}' has no trained weights ({WEIGHTS_FILE}). Give a trained drafter's "
            "checkpoint folder, or its name in this run."
        )
    return found


def untrained(name: str, values: Mapping[str, Any]) -> Found:
    """A drafter that needs no training, from plain values. `recipe` names the head config that they
    change (default: `name`); `kind` starts from the kind's own defaults instead. Raises `UserError`
    for a drafter that has to be trained."""
    rest = dict(values)
    recipe = rest.pop("recipe", None) or (None if "kind" in rest else name)
    if recipe is not None:
        if recipe not in options("head"):
            raise UserError(
                f"measure.heads.{name}: there is no head config '{recipe}'."
                f"{suggest(recipe, options('head'))}"
            )
        files = (folder / "head" / f"{recipe}.yaml" for folder in conf_folders())
        file = next((path for path in files if path.is_file()), None)
        # a kind from another package needs no file
        own = {"kind": recipe} if file is None else read_yaml_object(file)
        rest = own | rest
    kind = get_kind(str(rest.pop("kind")))
    if kind.needs_training(build(kind.config_class, rest, f"measure.heads.{name}")):
        raise UserError(
            f"'{name}' (kind '{kind.name}') has to be trained before it drafts: `headstart train "
            f"head={recipe or kind.name}`."
        )
    return Found(name, kind.name, None, rest)


def untrained_recipes() -> list[str]:
    """The head configs whose drafters work without training and without further settings."""
    found = []
    for recipe in options("head"):
        with suppress(UserError):
            found.append(untrained(recipe, {}).name)
    return found


def load(found: Found, target: TargetModel, values: Mapping[str, Any] | None = None) -> Any:
    """Load the drafter. values: changes to the configuration of a drafter without a checkpoint."""
    if found.checkpoint is not None:
        require_unchanged(found.checkpoint)
        return load_drafter(found.checkpoint, target.info, target.weights)
    merged = {**found.values, **(values or {})}
    config: Any = build(get_kind(found.kind).config_class, merged, f"head ({found.kind})")
    return new_drafter(found.kind, config, target.info, target.weights, seed=0)


def draft_settings(
    found: Found, decode: DecodeConfig, changes: Mapping[str, Any] | None = None
) -> DecodeConfig:
    """`decode` with the draft (`DRAFT_KEYS`) that it was trained for, then `changes`."""
    stored, changes = found.trained_with("decode"), changes or {}
    for key in changes:
        if key not in DRAFT_KEYS:
            raise UserError(
                f"measure.drafts.{found.name}.{key}: a draft has no such key."
                f"{suggest(str(key), DRAFT_KEYS)}"
            )
    own = {key: stored[key] for key in DRAFT_KEYS if key in stored}
    return build(DecodeConfig, {**plain(decode), **own, **changes}, "decode")


def decode_settings(
    found: Found,
    settings: Settings,
    target: TargetModel,
    batch: int,
    changes: Mapping[str, Any] | None = None,
) -> DecodeConfig:
    """How to decode with a drafter in batches of `batch` rows.

    The draft is the requested one (`changes`, or decode.<key> on the command line), else the one in
    the checkpoint's decode.yaml, which is printed, else the one that it was trained for. Shape
    none: decode.yaml advises against drafting.
    """
    asked = {**asked_draft(settings), **(changes or {})}
    own = draft_settings(found, settings.decode, asked)
    if asked or settings.decode.adaptive_settings().active or found.checkpoint is None:
        return own
    device, loading = device_facts(target.device), target.loading
    revision, temperature = target.info.revision, own.temperature
    advised = advice(found.checkpoint, revision, device, batch, temperature, loading=loading)
    if advised is None:
        return own
    print(f"{found.name}: {advised.line}", file=sys.stderr, flush=True)
    return own if advised.draft is None else advised.draft.on(own)


def asked_draft(settings: Settings) -> dict[str, Any]:
    """The requested part of the draft, as decode.<key> or by an option that sets a draft."""
    decode = settings.decode
    drafts = decode.shape != "none" and settings.choices.get("decode") not in NO_DRAFT
    whole = settings.given("decode") and drafts
    named = [key for key in DRAFT_KEYS if whole or settings.given(f"decode.{key}")]
    return {key: getattr(decode, key) for key in named}


def preferred(run: RunConfig) -> tuple[str, str]:
    """The default drafter of a run for chat and serve, and a line with the reason: the fastest
    measured one, else the one with the highest tau in training."""
    known = list_trained(run)
    if not known:
        return NO_DRAFTER, f"no drafter: '{run.directory}' has trained none"
    report = run.directory / "measure" / REPORT_FILE
    found: dict[str, float] = {}
    word = "the highest measured speedup"
    if report.is_file():
        measured = {item.name: item.speedup for item in read_report(report).drafters}
        rows = [item.name for item in best_of_sweeps(known)]  # as a sweep's rows are measured
        found = {name: measured[name] for name in rows if name in measured}
    if not found:
        word = "the highest tau in training"
        done = {name: item.folder.parent for name, item in known.items()}
        manifests = {
            name: read_training(folder)
            for name, folder in done.items()
            if (folder / MANIFEST_FILE).is_file()
        }
        found = {name: one["best"]["tau"] or 0.0 for name, one in manifests.items()}
    if not found:
        return next(iter(known)), f"drafter: {next(iter(known))}, whose training has not finished"
    best = max(found, key=lambda name: found[name])
    if len(known) == 1:
        return best, f"drafter: {best}, the only one of '{run.directory}'"
    others = ", ".join(name for name in known if name != best)
    return best, f"drafter: {best}, with {word} ({found[best]:.2f}); also here: {others}"


def choose(run: RunConfig, *, several: bool = True) -> list[Found]:
    """The drafter named by run.drafter (of a sweep's row, the best), or the only one, or
    (`several`) with `all` every one, as they are measured. Raises `UserError` if the choice is
    ambiguous."""
    known = list_trained(run)
    if run.drafter and (own := named(run.drafter, known)) is not None:
        return [own]
    if not known:
        require_run(run)
        raise UserError(
            f"'{run.directory}' holds no trained drafter. Train one first, or choose another "
            "run.name."
        )
    if several and run.drafter == ALL:
        return best_of_sweeps(known) or list(known.values())
    if run.drafter:
        raise UserError(
            f"run.drafter: '{run.directory}' has trained no '{run.drafter}'."
            f"{suggest(run.drafter, known)}"
        )
    if len(known) > 1:
        raise UserError(
            f"'{run.directory}' has trained several drafters. Say which with run.drafter=<name>"
            f"{', or all' if several else ''}: {', '.join(known)}."
        )
    return list(known.values())


def answers_of(found: Found) -> list[Path] | None:
    """The folders of answers that a drafter, and the drafters that it started from, were trained
    on. None if that is unknown: it was trained elsewhere, or the folders are gone."""
    folder = found.stage_folder
    record = read_record(folder) if folder is not None else None
    if record is None:
        return None
    assert folder is not None, "it has a record"
    inputs = [named_file(name, folder) for name in record.inputs]
    manifests = [path for path in inputs if path.name == MANIFEST_FILE]
    if not manifests or not all(path.is_file() for path in manifests):
        return None
    before: list[Path] | None = []
    start = (found.trained_with("train").get("refresh") or {}).get("init_from") or ""
    if start:
        before = answers_of(at(Path(start))) if Path(start).is_dir() else None
    return None if before is None else [*before, *(path.parent for path in manifests)]


def described(found: Iterable[Found]) -> dict[str, Any]:
    """The drafters without a checkpoint, for a stage's record (`RunRecord.drafters`): name -> its
    kind, its configuration, and the hashes of the checkpoints that it consists of."""
    made = {}
    for item in found:
        if item.checkpoint is None:
            config = plain(build(get_kind(item.kind).config_class, item.values, item.name))
            parts = (part["checkpoint"] for part in config.get("parts", ()) if "checkpoint" in part)
            files = [Path(part) / name for part in parts for name in CHECKED]
            hashes = [file_sha256(file) for file in files if file.is_file()]
            made[item.name] = {"kind": item.kind, **config, "weights": hashes}
    return made


def weight_files(found: Iterable[Found]) -> list[Path]:
    """The files of checkpoints that make a measurement stale when they change."""
    return [
        file
        for item in found
        if item.checkpoint is not None
        for name in (*CHECKED, DECODE_FILE)
        if (file := item.checkpoint / name).is_file()
    ]
