"""Writes assets/prompts/structured: prompts of the domain `json`, with the JSON schema that their
answers must follow, for bench=structured.

    python -m scripts.assets.structured
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inference.manifest import write_bytes

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"
COUNT = 32
"""Prompts in the file: the first ones of assets/prompts/json.jsonl."""


def text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def strict(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties, in this order."""
    named = {"properties": properties, "required": list(properties)}
    return {"type": "object", **named, "additionalProperties": False}


def several(item: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "Give the signature": strict(
        name=text(40),
        parameters=several(strict(name=text(30), required={"type": "boolean"}), 4),
        returns=text(30),
    ),
    "Return JSON": strict(name=text(60), summary=text(120), parameters=several(text(30), 6)),
    "Describe this function": strict(
        kind={"enum": ["function", "method", "property"]},
        name=text(40),
        number_of_parameters={"type": "integer", "minimum": 0, "maximum": 20},
        documented={"type": "boolean"},
    ),
}
"""Beginning of a prompt -> the constraint on its answer."""


def rows() -> list[dict[str, Any]]:
    """The rows of the file."""
    lines = (PROMPTS / "json.jsonl").read_text(encoding="utf-8").splitlines()[:COUNT]
    found = []
    for row in map(json.loads, lines):
        asked = row["messages"][0]["content"]
        schema = next(schema for begin, schema in SCHEMAS.items() if asked.startswith(begin))
        name = row["id"].replace("-json-", "-structured-")
        found.append({**row, "id": name, "domain": "structured", "json_schema": schema})
    return found


def main() -> None:
    """Write the file."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    write_bytes(PROMPTS / "structured" / "structured.jsonl", content.encode())


if __name__ == "__main__":
    main()
