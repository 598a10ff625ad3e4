"""One recorded generation, which the tests of feedback and of branches read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.feedback.recorded import KIND, decoded, write_answers, write_records


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """(answers, records) of one generation."""
    completions = decoded(KIND)
    answers = write_answers(tmp_path / "generate", completions)
    return answers, write_records(answers / "records", completions, KIND)
