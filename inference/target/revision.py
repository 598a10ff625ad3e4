"""Identifies a target's weights: by a Hub commit, or a hash of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from heads.api.target_info import UNKNOWN_REVISION

_SAMPLE_BYTES, _SAMPLE_EVERY, _HASH_WHOLE_BELOW = 1 << 16, 1 << 24, 1 << 28


def revision_of(path: str, revision: str | None) -> str:
    """The Hub commit, or a hash of a folder's weights (files above 256 MiB are sampled)."""
    folder = Path(path)
    if not folder.is_dir():
        return hub_commit(path, revision) or revision or UNKNOWN_REVISION
    digest = hashlib.sha256()
    for file_path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        size = file_path.stat().st_size
        digest.update(f"{file_path.name}:{size}".encode())
        with file_path.open("rb") as file:
            if size <= _HASH_WHOLE_BELOW:
                digest.update(file.read())
                continue
            for offset in range(0, size, _SAMPLE_EVERY):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return "sha256:" + digest.hexdigest()[:32]


def hub_commit(path: str, revision: str | None) -> str | None:
    """The commit of a Hub id's config in the local cache; None if it is not cached."""
    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # not a valid name of a repository
        return None
    return Path(found).parent.name if isinstance(found, str) else None
