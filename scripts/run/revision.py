"""The revision of this repository's code, for records. It imports no package that a bare image
lacks."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from scripts.config.fields import REPOSITORY

LONGEST_DIFF = 200_000


def git_state() -> dict[str, Any]:
    """Revision and uncommitted difference of this repository; empty outside a repository. A
    difference of more than `LONGEST_DIFF` characters is cut; `diff_cut` records that."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # changed files may be of any encoding
            check=True,
            timeout=20,
        ).stdout

    if not (REPOSITORY / ".git").exists():
        return {}  # installed: a repository further up belongs to another project
    try:
        revision, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"revision": revision, "diff": diff[:LONGEST_DIFF], "diff_cut": len(diff) > LONGEST_DIFF}


def without_diff(git: Mapping[str, Any]) -> dict[str, Any]:
    """A `git_state` for records that need not hold the difference."""
    return {"revision": git["revision"], "changed": bool(git["diff"])} if git else {}
