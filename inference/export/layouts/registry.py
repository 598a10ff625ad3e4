"""Which drafter goes to which engine: the one table behind `headstart export`, its refusals and docs/serving.md.

A drafter is looked up by its method, which is its kind or, for block drafters, what its options make of it (`method_of`). An entry
is a writer, or the sentence that says why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heads.api.errors import UserError, suggest
from inference.export.layouts import causal, dflash, eagle, eagle3, medusa
from inference.export.layouts.base import Checkpoint, Options, Target, Written

ENGINES = ("vllm", "sglang", "speculators", "transformers")
"""What a drafter can be exported for. speculators: vLLM's library of drafters, whose folders vLLM serves by themselves."""


@dataclass(frozen=True)
class Route:
    """A way into an engine: the layout, by name and writer."""

    layout: str
    writer: Any


def _causal(engine: str) -> Route:
    return Route("causal", causal.write)


_NO_TRANSFORMERS = (
    "transformers' assisted generation takes language models; this one reads the target's inner states"
)
_NO_PARENT = "no engine has it; a chain of another block drafter is the nearest that one serves"
_LOOKUP = "it has no weights: engines have a lookup of their own"
_SELF = "it drafts with layers of the target, which no engine runs apart from the rest"
_OWN_LOOP = "it needs a decoding loop of its own, which no engine has; `headstart serve` runs it"
_HEADS = "no engine has sequentially dependent heads; train head=medusa or head=eagle3 for one"

ROUTES: dict[str, dict[str, Route | str]] = {
    "eagle": {
        "vllm": Route("eagle", eagle.write),
        "sglang": Route("eagle", eagle.write),
        "speculators": "the library has no EAGLE-1 since 0.6; vLLM serves the export for vllm",
        "transformers": _NO_TRANSFORMERS,
    },
    "eagle3": {
        "vllm": Route("eagle3", eagle3.write),
        "sglang": Route("eagle3", eagle3.write),
        "speculators": "not written yet",
        "transformers": _NO_TRANSFORMERS,
    },
    "peagle": {
        "vllm": Route("peagle", eagle3.write),
        "sglang": "SGLang has no P-EAGLE",
        "speculators": "not written yet",
        "transformers": _NO_TRANSFORMERS,
    },
    "dflash": {"vllm": Route("dflash", dflash.write), "sglang": Route("dflash", dflash.write)},
    "dflash2": {"vllm": Route("dflash2", dflash.write), "sglang": Route("dflash2", dflash.write)},
    "dspark": {"vllm": Route("dspark", dflash.write), "sglang": Route("dspark", dflash.write)},
    "domino": {"vllm": "vLLM has no Domino; SGLang has", "sglang": Route("domino", dflash.write)},
    "distilled": {engine: _causal(engine) for engine in ("vllm", "sglang", "transformers")},
    "pard": {"vllm": _causal("vllm")},
    "medusa": {"vllm": Route("medusa", medusa.write)},
}


def method_of(kind: str, config: Any) -> str:
    """The name that a drafter has in `ROUTES`."""
    return dflash.flavour(config) if kind == "dflash" else kind


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> tuple[str, Written]:
    """The layout's name and the folder of a drafter for an engine; raises `UserError` with the reason where there is no way."""
    if engine not in ENGINES:
        raise UserError(f"export.engine '{engine}' is unknown.{suggest(engine, ENGINES)}")
    method = method_of(checkpoint.kind, checkpoint.config)
    route = ROUTES.get(method, {}).get(engine, "no route")
    if isinstance(route, str):
        raise UserError(f"a {method} drafter cannot be exported for {engine}: {route}.")
    return route.layout, route.writer(checkpoint, target, options, engine)
