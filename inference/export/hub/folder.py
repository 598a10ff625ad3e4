"""The Hub folder of a drafter: its checkpoint, reports, plots and card, and its engines' folders.

    README.md config.json model.safetensors report.json *.png   read by `headstart pull`
    vllm/ sglang/ speculators/ transformers/                    exports, each loadable by its engine
    manifest.json                                               SHA-256 of every other file; last

The folder is complete or absent. It requires a report that measured exactly these weights. Of the
reports it holds what concerns them and plain decoding, and no file names folders of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from heads.api.adapter import ADAPTER_CONFIG
from heads.api.checkpoint import ADAPTER_KEY, CONFIG_FILE, WEIGHTS_FILE, read_config
from heads.api.errors import UserError
from heads.api.reading import read_object
from inference import manifest
from inference.decoding.decode_file import DECODE_FILE, change_values, read_current
from inference.export.engine_folder import custom_class, serve
from inference.export.hub.card import (
    Start,
    Training,
    base_model,
    card,
    report_file,
    select_measured,
)
from inference.export.hub.config import PushConfig
from inference.export.hub.private import find_secret, hide, hide_command, last_part
from inference.export.layouts.folder import ExportNotes
from inference.export.stitching import INDEX
from inference.folders import EXPORT_FILE, copy_plain, plain_files, replace_folder
from inference.integrity import require_unchanged
from inference.manifest import MANIFEST_FILE, file_sha256, read_manifest_as
from inference.report.model import REPORT_FILE, Report, parse_report, read_report, write_report
from inference.target.settings import loading_text

CARD_FILE = "README.md"
STAGE = "push"


class Best(TypedDict):
    """The best evaluation in a training's manifest."""

    tau: float | None


class Revision(TypedDict, total=False):
    """The revision of the code in a training's manifest."""

    revision: str


class Provenance(TypedDict, total=False):
    """The command and environment in a training's manifest."""

    git: Revision


class Trained(TypedDict):
    """The parts of a training's manifest that a card shows."""

    steps: int
    tokens: int
    seconds: float
    best: Best
    head: NotRequired[dict[str, Any]]
    provenance: NotRequired[Provenance]


@dataclass(frozen=True)
class Sources:
    """The parts of a Hub folder. reports: report.json files; engines: engine -> folder that
    `headstart export` wrote."""

    checkpoint: Path
    reports: Sequence[Path]
    engines: Mapping[str, Path]


def build_folder(sources: Sources, out: Path, about: PushConfig) -> Path:
    """Write the Hub folder to `out` and return it; on an error nothing is written.

    Raises `UserError` for a kind without weights, a missing report, one of other weights, a drafter
    that was not lossless, or an engine's folder that was exported from other weights.
    """
    require_unchanged(sources.checkpoint)
    weights, description = sources.checkpoint / WEIGHTS_FILE, hide(read_config(sources.checkpoint))
    if ADAPTER_KEY in description:
        raise UserError(
            f"'{sources.checkpoint}' is an adapter, which drafts with its base only, and what is "
            "published has to draft by itself. Train it with train.refresh.adapter=false, which "
            "merges both."
        )
    if not weights.is_file():
        raise UserError(
            f"'{sources.checkpoint}' has no {WEIGHTS_FILE}: kind '{description['kind']}' has no "
            "weights, there is nothing to push."
        )
    if not sources.reports:
        raise UserError(
            f"'{sources.checkpoint}' has no measured report. Run `headstart measure`, then push "
            "with its report.json."
        )
    digest, target = file_sha256(weights), description["target"]
    loaded = name_reports([read_report(path) for path in sources.reports])
    for title, report in loaded.items():
        measured = report.target
        if measured.revision != target["revision"]:
            raise UserError(
                f"the report '{title}' was measured with target '{measured.id}' (revision "
                f"{measured.revision}), but the drafter belongs to '{target['id']}' (revision "
                f"{target['revision']}). Measure it with its own target."
            )
    own = {
        title: parse_report(hide(select_measured(report, digest, title).to_dict()), title)
        for title, report in loaded.items()
    }
    address = base_model(description, about) or target["id"]
    exports = {
        name: read_export(name, folder, digest, address)
        for name, folder in sorted(sources.engines.items())
    }
    from inference.report.plots import plot_all  # matplotlib takes a second to import

    with replace_folder(out, STAGE, "push") as fresh:
        images = [path.name for path in plot_all(own, fresh)]
        tuned, training = read_current(sources.checkpoint), read_training(sources.checkpoint)
        text = card(own, digest, description, about, images, exports, training, tuned)
        for name in (WEIGHTS_FILE, CONFIG_FILE, *((DECODE_FILE,) if tuned else ())):
            copy_plain(sources.checkpoint / name, fresh / name)
        hide_in(fresh / CONFIG_FILE)
        if tuned:
            change_values(fresh / DECODE_FILE, hide_command, hide)
        for number, report in enumerate(own.values(), 1):
            write_report(report, fresh / report_file(number))
        for name, notes in exports.items():
            for file in packed_files(sources.engines[name], notes):
                copy_plain(sources.engines[name] / file, fresh / name / file)
            for file in (CONFIG_FILE, ADAPTER_CONFIG):  # speculators and peft name the target there
                hide_in(fresh / name / file, notes)
            manifest.write_json(fresh / name / EXPORT_FILE, hide(asdict(notes)))
        (fresh / CARD_FILE).write_text(text, encoding="utf-8")
        files = [manifest.file_entry(fresh, name) for name in sorted(plain_files(fresh))]
        facts = {"kind": description["kind"], "repo": about.repo, "files": files}
        manifest.write_manifest(fresh, STAGE, facts)
        check_folder(fresh)
    return out


def hide_in(path: Path, notes: ExportNotes | None = None) -> None:
    """`hide` the values of a JSON file, if it exists. notes: of the export that lists the file."""
    content = read_object(path) if path.is_file() else {}
    if hide(content) != content:
        manifest.write_json(path, hide(content))
        if notes and notes.files:
            notes.files[path.name] = file_sha256(path)


def read_export(name: str, folder: Path, digest: str, target: str) -> ExportNotes:
    """The notes of an engine's folder, with their paths in the repository.

    target: as the serve command names it. Raises `UserError` for a folder without notes, one of
    weights other than `digest`, or one that contains the whole target.
    """
    notes = ExportNotes.read(folder)
    found = notes.source.get("sha256", "")
    if not found or not notes.speculative_config:
        raise UserError(
            f"'{folder}' is no folder of `headstart export`: its {EXPORT_FILE} is missing or "
            "incomplete. Export the drafter again."
        )
    if found != digest:
        raise UserError(
            f"'{folder}' was exported from other weights ({found[:12]}...) than the drafter that "
            f"is pushed ({digest[:12]}...). Run `headstart export` again."
        )
    if INDEX in notes.files:  # only `stitch` writes one
        raise UserError(
            f"'{folder}' contains the whole target (export.stitch=true), which is not published as "
            "a part of the drafter. Replace it by the block alone (`headstart export` with "
            "export.stitch=false export.overwrite=true), or move it out of the run's export folder."
        )
    asked, place = notes.speculative_config, Path(name)
    command = serve(notes.engine, target, place, asked, notes.decode_settings)
    custom = custom_class(target, place, asked) if notes.serve_as_custom_class else ""
    source = {"checkpoint": "..", "sha256": found}
    return replace(
        notes, source=source, serve=command, serve_as_custom_class=custom, notes=hide(notes.notes)
    )


def read_training(checkpoint: Path, later: Sequence[Path] = ()) -> Training | None:
    """How the drafter was trained, from the manifest of the training that wrote `checkpoint`. None
    for a checkpoint outside a training's folder. later: folders of trainings that continued it."""
    folder = checkpoint.parent
    if not (folder / MANIFEST_FILE).is_file():
        return None
    record = read_manifest_as(Trained, folder, "train")
    revision = str(record.get("provenance", {}).get("git", {}).get("revision", ""))
    measured = record["best"]["tau"] is not None
    numbers = record["steps"], record["tokens"], record["seconds"]
    begin = (record.get("head", {}).get("refresh") or {}).get("init_from")
    start = read_start(Path(str(begin)), [*later, folder.resolve()]) if begin else None
    return Training(*numbers, revision, measured, start)


def read_start(checkpoint: Path, later: Sequence[Path]) -> Start:
    """The drafter that the last of the trainings in `later` continued."""
    try:
        known = checkpoint.parent.resolve() not in later
        return Start(name_start(checkpoint), read_training(checkpoint, later) if known else None)
    except UserError:  # of another stage, or changed since
        return Start(last_part(str(checkpoint)))


def name_start(checkpoint: Path) -> str:
    """The Hub name of a checkpoint, or the last part of its path that tells something; of an
    imported one, that of its source."""
    path = checkpoint / MANIFEST_FILE
    record = read_object(path) if path.is_file() else {}
    if record.get("stage") == STAGE:
        return str(record.get("repo"))
    place = Path(str(record.get("source") or checkpoint))
    cached = [part.split("--") for part in place.parts if part.startswith("models--")]
    return "/".join(cached[0][1:]) if cached else last_part(str(place).removesuffix("/best"))


def name_reports(reports: Sequence[Report]) -> dict[str, Report]:
    """Reports by a title that names their conditions; equal titles are numbered."""
    named: dict[str, Report] = {}
    for report in reports:
        parts = f"temperature {report.settings.temperature:g}", report.device.name
        title = ", ".join(filter(None, (*parts, loading_text(report.target.loading))))
        named[title if title not in named else f"{title} ({len(named) + 1})"] = report
    return named


def check_folder(folder: Path) -> dict[str, int]:
    """The files of a Hub folder with their sizes in bytes; raises `UserError` if it must not be
    published.

    It needs weights, a card, a report that measured exactly these weights, and files as its
    manifest lists them. No file may contain a credential.
    """
    for name in (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, REPORT_FILE, MANIFEST_FILE):
        if not (folder / name).is_file():
            what = "a measured report (report.json)" if name == REPORT_FILE else name
            raise UserError(
                f"'{folder}' is not pushed: it lacks {what}. Build it with `headstart push`."
            )
    digest = file_sha256(folder / WEIGHTS_FILE)
    for path in sorted(folder.glob("report*.json")):
        select_measured(read_report(path), digest, f"'{path}'")
    files = {}
    for name in sorted(plain_files(folder)):
        path = folder / name
        if secret := find_secret(path):
            raise UserError(
                f"'{path}' holds what looks like {secret}. Revoke it, and measure without it on "
                "the command line."
            )
        files[name] = path.stat().st_size
    manifest.verify_listed(folder, STAGE, files)
    return files


def packed_files(folder: Path, notes: ExportNotes) -> list[str]:
    """The published files of an engine's folder: those that the export lists, unchanged. Raises
    `UserError` for links, changed files, and files that the export did not write."""
    found, wanted = plain_files(folder), notes.files
    for name in found if wanted else ():
        if name == EXPORT_FILE:
            continue
        if name not in wanted:
            raise UserError(
                f"'{folder / name}' was not written by `headstart export`, so it is not published. "
                "Move it away, or export the drafter again into another folder."
            )
        manifest.verify_file(folder, {"file": name, "sha256": wanted[name]})
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise UserError(
            f"'{folder}' lacks {missing[0]}, which was exported. Export the drafter again."
        )
    return found
