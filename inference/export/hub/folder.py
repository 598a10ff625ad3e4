"""The Hub folder of a drafter: its checkpoint, reports, plots and card, and its engines' folders.

    README.md config.json model.safetensors report.json *.png   read by `headstart pull`
    vllm/ sglang/ speculators/ transformers/                    exports, each loadable by its engine
    manifest.json                                               SHA-256 of every other file; last

It is complete or absent, and needs a report that measured exactly these weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_config
from heads.api.errors import UserError
from inference import manifest
from inference.decoding.decode_file import DECODE_FILE, read_current
from inference.export.engine_folder import serve
from inference.export.hub.card import Training, base_model, card, select_measured
from inference.export.hub.config import PushConfig
from inference.export.layouts.folder import ExportNotes
from inference.folders import EXPORT_FILE, replace_folder
from inference.manifest import MANIFEST_FILE, file_sha256, read_manifest
from inference.report.model import Report, read_report, write_report

CARD_FILE, REPORT_FILE = "README.md", "report.json"
STAGE = "push"
TEXTS = (".json", ".md", ".jinja", ".txt", ".yaml")
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class Sources:
    """What a Hub folder is made of. reports: report.json files; engines: engine -> folder that
    `headstart export` wrote."""

    checkpoint: Path
    reports: Sequence[Path]
    engines: Mapping[str, Path]


def build_folder(sources: Sources, out: Path, about: PushConfig) -> Path:
    """Write the Hub folder to `out`, complete or not at all, and return it.

    Raises `UserError` for a kind without weights, a missing report, one of other weights, a drafter
    that was not lossless, or an engine's folder that was exported from other weights.
    """
    weights, description = sources.checkpoint / WEIGHTS_FILE, read_config(sources.checkpoint)
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
    own = {title: select_measured(report, digest, title) for title, report in loaded.items()}
    address = base_model(description, about) or target["id"]
    exports = {
        name: read_export(name, folder, digest, address)
        for name, folder in sorted(sources.engines.items())
    }
    from inference.report.plots import plot_all  # matplotlib takes a second to import

    with replace_folder(out, STAGE, "push") as fresh:
        images = [path.name for path in plot_all(own, fresh)]
        engines = {name: notes.serve for name, notes in exports.items()}
        tuned, training = read_current(sources.checkpoint), read_training(sources.checkpoint)
        text = card(loaded, digest, description, about, images, engines, training, tuned)
        for name in (WEIGHTS_FILE, CONFIG_FILE, *((DECODE_FILE,) if tuned else ())):
            shutil.copyfile(sources.checkpoint / name, fresh / name)
        for number, report in enumerate(loaded.values(), 1):
            name = REPORT_FILE if number == 1 else f"report_{number}.json"
            write_report(report, fresh / name)
        for name, notes in exports.items():
            shutil.copytree(sources.engines[name], fresh / name)
            manifest.write_json(fresh / name / EXPORT_FILE, asdict(notes))
        (fresh / CARD_FILE).write_text(text, encoding="utf-8")
        files = [manifest.file_entry(fresh, name) for name in sorted(plain_files(fresh))]
        facts = {"kind": description["kind"], "repo": about.repo, "files": files}
        manifest.write_manifest(fresh, STAGE, facts)
        check_folder(fresh)
    return out


def read_export(name: str, folder: Path, digest: str, target: str) -> ExportNotes:
    """The notes of an engine's folder, with paths as they are in the repository.

    target: as the serve command names it. Raises `UserError` for a folder without notes, or of
    other weights than `digest`.
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
    command = serve(name, target, Path(name), notes.speculative_config)
    return replace(notes, source={"checkpoint": "..", "sha256": found}, serve=command)


def read_training(checkpoint: Path) -> Training | None:
    """How the drafter was trained, from the manifest of the training that wrote `checkpoint`. None
    when it lies alone."""
    folder = checkpoint.parent
    if not (folder / MANIFEST_FILE).is_file():
        return None
    record = read_manifest(folder, "train")
    revision = str(record.get("provenance", {}).get("git", {}).get("revision", ""))
    measured = record["best"]["tau"] is not None
    return Training(record["steps"], record["tokens"], record["seconds"], revision, measured)


def name_reports(reports: Sequence[Report]) -> dict[str, Report]:
    """Reports under a title with their conditions; equal titles are numbered."""
    named: dict[str, Report] = {}
    for report in reports:
        title = f"temperature {report.settings.temperature:g}, {report.device.name}"
        named[title if title not in named else f"{title} ({len(named) + 1})"] = report
    return named


def check_folder(folder: Path) -> dict[str, int]:
    """Files of a Hub folder with their sizes in bytes, or `UserError` when it must not leave.

    It needs weights, card, a report that measured exactly these weights, and files as its manifest
    lists them; no file may hold an access token.
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
        if path.suffix in TEXTS and SECRET.search(path.read_text(encoding="utf-8")):
            raise UserError(
                f"'{path}' holds what looks like a Hub access token. Revoke it, and measure "
                "without it on the command line."
            )
        files[name] = path.stat().st_size
    manifest.verify_listed(folder, STAGE, files)
    return files


def plain_files(folder: Path) -> list[str]:
    """Relative paths of all files; raises `UserError` for a link or anything that is no file."""
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"'{path}' is not a plain file; a Hub folder holds nothing else. Remove it."
            )
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return names
