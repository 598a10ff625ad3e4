"""`headstart report`: writes markdown, plots and a page (report.html) from one or several
report.json, side by side."""

from __future__ import annotations

from pathlib import Path

from heads.api.errors import UserError
from inference.folders import stage_of
from inference.manifest import write_bytes
from inference.report.markdown import HEADLINE, labels, print_table, render
from inference.report.model import PLOTS, REPORT_FILE, read_report
from inference.report.page.render import FILE as PAGE_FILE
from inference.report.page.render import write_page
from inference.writers import only_writer
from scripts.config.schema import Settings
from scripts.config.stage_configs import RunConfig
from scripts.run.folder import require_run
from scripts.run.process import console, say_what_debug_means, shown


def run(settings: Settings) -> None:
    """Render the report; print its tables and the paths of the written files."""
    reports = [Path(item) for item in settings.report.reports] or measurements(settings.run)
    out = Path(settings.report.out or settings.run.directory)
    main = reports[0] / REPORT_FILE if reports[0].is_dir() else reports[0]
    with only_writer(out, ".report.writer.json"):
        write(settings, reports, main, out)


def write(settings: Settings, reports: list[Path], main: Path, out: Path) -> None:
    """Write the report of `reports`, of which `main` is the first, to `out`; print it."""
    require_report_folder(out, main)
    text = render(reports, out)
    page = write_page(list(zip(labels(reports), reports, strict=True)), out, settings.run.directory)
    if main.resolve() != (out / REPORT_FILE).resolve():
        write_bytes(out / REPORT_FILE, main.read_bytes())
    for path in reports:
        print_table(read_report(path), console())
    say_what_debug_means(settings)
    for written in (out / REPORT_FILE, text, page, *sorted(out.glob("*.png"))):
        print(shown(written), flush=True)


def require_report_folder(out: Path, main: Path) -> None:
    """Raise `UserError` if `main` would replace another measurement or file in `out`."""
    text = out / "report.md"
    if text.is_file() and not text.read_bytes().startswith(HEADLINE.encode()):
        raise UserError(
            f"'{text}' was not written by `headstart report` and is not replaced. Choose another "
            "report.out."
        )
    if main.resolve() != (out / REPORT_FILE).resolve() and stage_of(out):
        raise UserError(
            f"report.out: '{out}' was written by stage '{stage_of(out)}', whose {REPORT_FILE} "
            "would be replaced by another. Choose another folder."
        )
    if not text.is_file():
        written = [PAGE_FILE, *(f"{name}.png" for name in PLOTS)]
        written += [] if main.resolve() == (out / REPORT_FILE).resolve() else [REPORT_FILE]
        there = [name for name in written if (out / name).exists()]
        if there:
            raise UserError(
                f"report.out: '{out}' has no report.md of ours, but {', '.join(there)}, which "
                "would be replaced. Choose another report.out, or move them away."
            )


def measurements(run: RunConfig) -> list[Path]:
    """Folders of a run's measurements, `measure` first; raises `UserError` if there are none."""
    folders = sorted(path.parent for path in run.directory.glob(f"*/{REPORT_FILE}"))
    if not folders:
        require_run(run, "Or set report.reports.")
        raise UserError(
            f"'{run.directory}' holds no measurement. Run `headstart measure run.name={run.name}` "
            "first, or set report.reports."
        )
    return sorted(folders, key=lambda folder: folder.name != "measure")
