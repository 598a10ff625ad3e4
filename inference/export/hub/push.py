"""Pushes a drafter's Hub folder in one commit.

A dry run is the default: it builds the folder and prints what would happen. A push refuses a
drafter without a measured report, or whose report measured other weights. All files become visible
in the same commit: a failure before it leaves the repository as it was, and repeating the push is
safe. Large files that have arrived are not sent again. Tokens come from the environment or the
Hub's own login and are passed to huggingface_hub only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
from rich.console import Console
from rich.table import Table

from heads.api.errors import UserError
from inference.export.hub.config import PushConfig
from inference.export.hub.exchange import Exchange, explain_errors, hub_address, transfer_for
from inference.export.hub.folder import Sources, build_folder, check_folder


@dataclass
class PushResult:
    """The built folder, its files with their sizes in bytes, and the commit's address.

    The address is empty after a dry run.
    """

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    url: str = ""


def push(
    config: PushConfig, sources: Sources, out: Path, *, console: Console | None = None
) -> PushResult:
    """Build the Hub folder in `out` and, unless `config.dry_run`, upload it.

    The address comes from HF_ENDPOINT, the token from HF_TOKEN or `hf auth login`. Raises
    `UserError` for a missing or wrong token, missing rights, a missing repository, and a connection
    that broke.
    """
    console = console or Console()
    if not config.repo:
        raise UserError(
            "push.repo is not set: give the repository as 'user/name'. The card names it, even in "
            "a dry run."
        )
    folder = build_folder(sources, out, config)
    result = PushResult(folder, check_folder(folder))
    endpoint = hub_address()
    _show(config, result, endpoint, console)
    if config.dry_run:
        console.print("Dry run: nothing was sent. Push with push.dry_run=false.")
        return result
    result.url = upload(config, folder, endpoint)
    console.print(f"Pushed: {result.url}", soft_wrap=True)
    if config.collection:
        console.print(f"In the collection {collect(config, endpoint)}", soft_wrap=True)
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
    absent = (
        f"created ({visibility}) if it does not exist"
        if config.create
        else "not created: it must exist"
    )
    console.print(
        f"Repository {config.repo} at {endpoint}: {absent}; all files in one commit.",
        soft_wrap=True,
    )
    if config.collection:
        console.print(
            f"Then it is added to {_owner(config)}'s collection '{config.collection}'.",
            soft_wrap=True,
        )


def _owner(config: PushConfig) -> str:
    return config.repo.split("/")[0]


def upload(config: PushConfig, folder: Path, endpoint: str) -> str:
    """Send a checked folder to the Hub in one commit and return the commit's address."""
    files = check_folder(folder)
    token = require_token("write")
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="headstart")
    with explain_errors(_exchange(config, endpoint, token)), transfer_for(endpoint):
        if config.create:
            api.create_repo(config.repo, private=config.private, exist_ok=True)
        # create_commit rather than upload_folder: the latter may split a push into several commits
        operations = [
            huggingface_hub.CommitOperationAdd(name, str(folder / name)) for name in files
        ]
        commit = api.create_commit(config.repo, operations, commit_message=config.message)
    return str(commit.commit_url)


def collect(config: PushConfig, endpoint: str) -> str:
    """Put the pushed repository into the collection of that title; returns its identifier.

    The title is looked up among the user's collections: the Hub itself takes equal titles several
    times.
    """
    token = require_token("write")
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="headstart")
    kept = (
        f"'{config.repo}' is pushed and stays; only the collection lacks it. Push again: nothing "
        "is sent twice."
    )
    with explain_errors(_exchange(config, endpoint, token, kept)):
        known = (
            found.slug
            for found in api.list_collections(owner=_owner(config))
            if found.title == config.collection
        )
        slug = next(known, None)
        if slug is None:
            made = api.create_collection(
                config.collection, namespace=_owner(config), private=config.private, exists_ok=True
            )
            slug = made.slug
        api.add_collection_item(slug, config.repo, "model", exists_ok=True)
    return slug


def _exchange(config: PushConfig, endpoint: str, token: str, kept: str = "") -> Exchange:
    kept = kept or (
        "Nothing was published: files appear in one commit at the end. Push again; what has "
        "arrived is not sent twice."
    )
    missing = "Create it, or push with push.create=true."
    return Exchange(config.repo, endpoint, token, "push.repo", "push", "write", missing, kept)


def require_token(rights: str) -> str:
    """The Hub token of the environment or of the Hub's own login."""
    token = huggingface_hub.get_token()
    if not token:
        raise UserError(
            "there is no Hub access token. Run `hf auth login`, or set HF_TOKEN to a token with "
            f"{rights} access."
        )
    return token
