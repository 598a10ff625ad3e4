"""Builds a drafter's Hub folder from its checkpoint and its measured reports, and pushes it in one commit.

A dry run is the default: it builds the folder and says what would happen. A push refuses a drafter without a
measured report, or whose report measured other weights. All files become visible in the same commit, the last
request of the push: whatever breaks before leaves the repository as it was, and repeating the push is safe.
Tokens come from the environment or the Hub's own login, are handed to huggingface_hub and to nobody else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_config
from heads.api.errors import UserError
from inference.export.card import CardFacts, card, measured_entries
from inference.manifest import file_sha256
from inference.report_schema import read_report

CARD_FILE, REPORT_FILE = "README.md", "report.json"
OFFICIAL = "https://huggingface.co"
REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class PushConfig:
    """Where a drafter is published and what its card says."""

    repo: str = ""
    """Repository on the Hub, "user/name"."""
    license: str = ""
    """Identifier of the licence (apache-2.0, mit, ...); yours to choose. Empty: the card names none."""
    base_model: str = ""
    """Hub id of the target; empty: the id it was loaded by, if that is a Hub id."""
    tags: tuple[str, ...] = ()
    """Tags beside the ones that the card has anyway."""
    private: bool = True
    """Visibility of a repository that the push creates; an existing one keeps its own."""
    create: bool = True
    """Create the repository when it does not exist."""
    dry_run: bool = True
    """Build the folder and say what would happen, without any connection."""
    allow_mismatches: bool = False
    """Publish although measured text differed from the target's; the card then opens with a warning."""
    message: str = "Upload drafter with its measured report"
    """Commit message."""

    def __post_init__(self) -> None:
        if self.repo and not REPO_NAME.fullmatch(self.repo):
            raise UserError(f"push.repo must look like 'user/name'; given: '{self.repo}'.")

    def card_facts(self) -> CardFacts:
        return CardFacts(self.repo, self.license, self.base_model, self.tags, self.allow_mismatches)


@dataclass
class PushResult:
    """The built folder, its files with their sizes in bytes, and the commit's address (empty after a dry run)."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    url: str = ""


def build_folder(checkpoint: Path, reports: Sequence[Path], out: Path, config: PushConfig) -> Path:
    """Write the Hub folder of the drafter in `checkpoint` to `out` and return it.

    It holds the weights, config.json (with the target's tokenizer hash), the reports, their plots and the card. `out` is
    complete or absent: it is built beside and renamed. Raises `UserError` for a kind without weights, a missing report,
    one of other weights, or a drafter that was not lossless.
    """
    if not config.repo:
        raise UserError(
            "push.repo is not set: give the repository as 'user/name'. The card names it, even in a dry run."
        )
    description = read_config(checkpoint)
    weights = checkpoint / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(
            f"'{checkpoint}' has no {WEIGHTS_FILE}: kind '{description['kind']}' has no weights, there is nothing to push."
        )
    if not reports:
        raise UserError(
            f"'{checkpoint}' has no measured report. Run `headstart measure`, then push with its report.json."
        )
    digest = file_sha256(weights)
    loaded = _titled([read_report(path) for path in reports])
    for title, report in loaded.items():
        _check_target(title, report, description["target"])
    own = {
        title: {**report, "drafters": measured_entries(report, digest, title)}
        for title, report in loaded.items()
    }
    from inference.plots import plot_all  # matplotlib takes a second to import

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    text = card(
        loaded, digest, description, config.card_facts(), [path.name for path in plot_all(own, partial)]
    )
    shutil.copyfile(weights, partial / WEIGHTS_FILE)
    shutil.copyfile(checkpoint / CONFIG_FILE, partial / CONFIG_FILE)
    for number, report in enumerate(loaded.values(), 1):
        name = REPORT_FILE if number == 1 else f"report_{number}.json"
        (partial / name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (partial / CARD_FILE).write_text(text, encoding="utf-8")
    check_folder(partial)
    _replace(partial, out)
    return out


def _check_target(title: str, report: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Refuse a report that was measured with another target than the drafter's own."""
    if report["target"]["revision"] != target["revision"]:
        raise UserError(
            f"the report '{title}' was measured with target '{report['target']['id']}' (revision "
            f"{report['target']['revision']}), but the drafter belongs to '{target['id']}' (revision {target['revision']}). "
            "Measure it with its own target."
        )


def _titled(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Reports under a title that says how they were measured; equal titles are numbered."""
    named: dict[str, dict[str, Any]] = {}
    for report in reports:
        title = f"temperature {report['settings']['temperature']:g}, {report['device']['name']}"
        named[title if title not in named else f"{title} ({len(named) + 1})"] = dict(report)
    return named


def _replace(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`, replacing only a folder that was built here."""
    if out.exists():
        ours = out.is_dir() and all((out / name).is_file() for name in (CARD_FILE, REPORT_FILE, WEIGHTS_FILE))
        if not ours and any(out.iterdir() if out.is_dir() else [out]):
            raise UserError(
                f"'{out}' exists and is not a Hub folder of ours; it is left alone. Choose another folder."
            )
        shutil.rmtree(out)
    os.replace(partial, out)


def check_folder(folder: Path) -> dict[str, int]:
    """Files of a Hub folder with their sizes, or `UserError` when it must not leave: it needs weights, card and a report
    that measured exactly these weights, and no file may hold an access token."""
    for name in (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, REPORT_FILE):
        if not (folder / name).is_file():
            what = "a measured report (report.json)" if name == REPORT_FILE else name
            raise UserError(
                f"'{folder}' is not pushed: it lacks {what}. Build the folder with `headstart push`."
            )
    digest = file_sha256(folder / WEIGHTS_FILE)
    for path in sorted(folder.glob("report*.json")):
        measured_entries(read_report(path), digest, f"'{path}'")
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            raise UserError(f"'{path}' is not a plain file; a Hub folder holds nothing else. Remove it.")
        if path.suffix in (".json", ".md") and SECRET.search(path.read_text(encoding="utf-8")):
            raise UserError(
                f"'{path}' holds what looks like a Hub access token. Revoke it, and measure without it on the command line."
            )
        files[path.name] = path.stat().st_size
    return files


def push(
    config: PushConfig,
    checkpoint: Path,
    reports: Sequence[Path],
    out: Path,
    *,
    console: Console | None = None,
) -> PushResult:
    """Build the Hub folder in `out` and, unless `config.dry_run`, upload it.

    The address comes from HF_ENDPOINT, the token from HF_TOKEN or `hf auth login`. Raises `UserError` for everything that
    a person can correct: no or a wrong token, missing rights, a missing repository, a connection that broke.
    """
    console = console or Console()
    folder = build_folder(checkpoint, reports, out, config)
    result = PushResult(folder, check_folder(folder))
    endpoint = os.environ.get("HF_ENDPOINT", OFFICIAL).rstrip("/")
    _show(config, result, endpoint, console)
    if config.dry_run:
        console.print("Dry run: nothing was sent. Push with push.dry_run=false.")
        return result
    result.url = upload(config, folder, endpoint)
    console.print(f"Pushed: {result.url}", soft_wrap=True)
    return result


def _show(config: PushConfig, result: PushResult, endpoint: str, console: Console) -> None:
    """What is in the folder and what a push does with it."""
    console.print(f"Hub folder: {result.folder}", soft_wrap=True)
    table = Table()
    table.add_column("file", no_wrap=True)
    table.add_column("bytes", justify="right")
    for name, size in result.files.items():
        table.add_row(name, f"{size:,}")
    table.add_row("total", f"{sum(result.files.values()):,}", style="bold")
    console.print(table)
    visibility = "private" if config.private else "public"
    absent = f"created ({visibility}) if it does not exist" if config.create else "not created: it must exist"
    console.print(
        f"Repository {config.repo} at {endpoint}: {absent}; all files in one commit.", soft_wrap=True
    )


def upload(config: PushConfig, folder: Path, endpoint: str) -> str:
    """Send a checked folder to the Hub in one commit and return the commit's address."""
    import huggingface_hub

    files = check_folder(folder)
    token = huggingface_hub.get_token()
    if not token:
        raise UserError(
            "there is no Hub access token. Run `hf auth login`, or set HF_TOKEN to a token with write access."
        )
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="headstart")
    with _explained(config.repo, endpoint, token), _transfer_for(endpoint):
        if config.create:
            api.create_repo(config.repo, private=config.private, exist_ok=True)
        # create_commit rather than upload_folder: the latter may split a push into several commits
        operations = [huggingface_hub.CommitOperationAdd(name, str(folder / name)) for name in files]
        commit = api.create_commit(config.repo, operations, commit_message=config.message)
    return str(commit.commit_url)


@contextmanager
def _transfer_for(endpoint: str) -> Iterator[None]:
    """Xet transfer only with the Hub itself: mirrors and private hubs all speak Git LFS, few speak Xet."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = before or endpoint != OFFICIAL
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextmanager
def _explained(repo: str, endpoint: str, token: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a `UserError` that says what to do, and never shows the token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    again = "Nothing was published: files appear in one commit at the end. Push again; what has arrived is not sent twice."
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError("huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to push.") from error
    except HFValidationError as error:
        raise UserError(f"push.repo '{repo}' is not a name that the Hub accepts: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{endpoint} does not answer like a Hub (no JSON). Check HF_ENDPOINT. {again}"
        ) from error
    except (HfHubHTTPError, HTTPError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and not isinstance(
            error, HfHubHTTPError
        ):  # such as a card that it cannot read
            raise UserError(f"{endpoint} refused the push: {_hide(error, token)}. {again}") from None
        chain = list(_chain(error))
        answered = next((item for item in chain if _status(item)), None)
        if answered is not None:
            said = _said(answered, token)
            raise UserError(_explain(_status(answered), repo, endpoint, said, again)) from None
        broken = next((item for item in chain if isinstance(item, (HTTPError, OSError))), None)
        if broken is not None:
            what = f"{type(broken).__name__}: {_hide(broken, token)}"
            raise UserError(f"the connection to {endpoint} broke ({what}). {again}") from None
        raise UserError(f"{endpoint} refused the push: {_hide(error, token)}. {again}") from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it: uploads wrap what the connection raised."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _status(error: BaseException) -> int:
    """The HTTP status that an error came with; 0 where nobody answered."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _hide(error: BaseException, token: str) -> str:
    """An error's text on one line, without the token."""
    return " ".join(str(error).replace(token, "***").split())


def _said(error: BaseException, token: str) -> str:
    """What the server gave as its reason, in brackets; empty where it gave none."""
    reason = getattr(error, "server_message", None)
    return f" ({' '.join(str(reason).replace(token, '***').split())})" if reason else ""


def _explain(status: int, repo: str, endpoint: str, said: str, again: str) -> str:
    """One sentence or two about an HTTP status that the Hub answered with."""
    if status == 401:
        return (
            f"{endpoint} does not accept the access token{said}. It is wrong or has expired: run `hf auth login` or set "
            "HF_TOKEN to a valid token with write access. Nothing was published."
        )
    if status == 403:
        return (
            f"the access token may not write to '{repo}'{said}. Use a token with write access to it, or a repository "
            "under your own name. Nothing was published."
        )
    if status == 404:
        advice = "Create it, or push with push.create=true."
        return f"there is no repository '{repo}' at {endpoint}{said}. {advice} Nothing was published."
    if status in (409, 412):
        return f"'{repo}' was changed by someone else during the push{said}. {again}"
    if status == 429:
        return f"{endpoint} limits how often it is asked{said}. Wait a few minutes. {again}"
    if status >= 500:
        return f"{endpoint} failed with HTTP {status}{said}: the fault is on its side. {again}"
    return f"{endpoint} refused the push with HTTP {status}{said}. Nothing was published."
