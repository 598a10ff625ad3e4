"""Every causal LM family of the installed transformers: tested as a target, refused and why, or
neither.

    python -m tests.inference.target.list_families     writes the list into docs/targets.md
"""

from __future__ import annotations

from collections import defaultdict

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from heads.api.errors import UserError
from inference.target.loading import LOADING, READ_ALONE, REFUSED, require_supported
from scripts.tools.common import ROOT, Section
from tests.models import (
    ALL_FAMILIES,
    COMPOSITE_FAMILIES,
    INDEXED_FAMILIES,
    RECURRENT_FAMILIES,
    SIZED_FAMILIES,
)

PAGE = ROOT / "docs" / "targets.md"
SECTION = Section("families", "tests/inference/target/list_families.py")
TESTED, UNTESTED = "tested", "not tested"
TESTED_FAMILIES = {
    *ALL_FAMILIES,
    *SIZED_FAMILIES,
    *RECURRENT_FAMILIES,
    *INDEXED_FAMILIES,
    *COMPOSITE_FAMILIES,
    *READ_ALONE,
}


def families() -> dict[str, str]:
    """model_type -> `TESTED`, `UNTESTED`, or why it is refused."""
    found = {}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = config_class.model_type
        if name in TESTED_FAMILIES:
            found[name] = TESTED
        else:
            found[name] = REFUSED.get(name) or objection(config_class)
    return dict(sorted(found.items()))


def objection(config_class: type) -> str:
    """Why a family with its default settings is refused; `UNTESTED` for one that is not."""
    try:
        config = config_class()
    except LOADING:  # some have no defaults
        return UNTESTED
    try:
        require_supported("", config)
    except UserError as error:
        return str(error).split("cannot be a target: ")[1].split(". Use a")[0]
    return UNTESTED


def table() -> str:
    """The list as markdown."""
    by_state = defaultdict(list)
    for name, state in families().items():
        by_state[state].append(f"`{name}`")
    tested, untested = (len(by_state[state]) for state in (TESTED, UNTESTED))
    total = sum(map(len, by_state.values()))
    refused = {state: names for state, names in by_state.items() if state not in (TESTED, UNTESTED)}
    lines = [
        "",
        f"Of {total} families of causal LMs in the installed transformers, {tested} are tested, "
        f"{sum(map(len, refused.values()))} are refused by name, and {untested} are neither. The "
        "check at loading decides about families that are neither.",
        "",
        f"Tested: {', '.join(by_state[TESTED])}.",
        "",
        *(f"* Refused, because {why}: {', '.join(names)}." for why, names in refused.items()),
        "",
        *([f"Neither: {', '.join(by_state[UNTESTED])}.", ""] if untested else []),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    SECTION.write(PAGE, table())
