"""Which drafters can be exported to which engine: the table behind `headstart export` and
docs/serving.md.

A drafter is looked up by its method, the result of `Kind.export_method`: the kind's name or, for
block drafters, the published method that its options amount to. An entry is a layout with its
writer, or a sentence with the reason why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError
from inference.export.config import ENGINES
from inference.export.layouts import (
    adapter,
    causal,
    dflash,
    eagle,
    eagle3,
    gguf,
    medusa,
    mtp,
    native,
    speculators,
)
from inference.export.layouts.base import Layout, Writer

_ALL = (
    *(eagle.LAYOUT, mtp.LAYOUT, native.LAYOUT, medusa.LAYOUT, causal.LAYOUT, adapter.LAYOUT),
    *eagle3.LAYOUTS,
    *dflash.LAYOUTS,
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ALL}
"""Layouts by name. `speculators-<name>` is the layout <name> as the library speculators wraps
it."""


@dataclass(frozen=True)
class Route:
    """How a method reaches an engine: the layout's name and its writer."""

    layout: str
    write: Writer


Ways = dict[str, Route | str]
"""Engine -> its route, or the reason why there is none."""

_STATES = "its assisted generation takes language models; this one reads the target's inner states"
_FORCED = "it drafts what a grammar forces, and engines have grammars of their own"
_LOOKUP = "it has no weights, and engines have a lookup of their own"
_SELF = "it drafts with layers of the target itself, which no engine runs apart from the rest"
_LOOP = "it needs a decoding loop of its own, which no engine has"
_HEADS = "no engine runs heads that depend on each other; train head=medusa or head=eagle3 for one"
_BLOCKS = "no engine has it; train head=dflash, dflash2, lilicorr, dspark or domino for one"
_OWN = "`headstart serve` serves it"


def _nowhere(reason: str) -> Ways:
    return dict.fromkeys(ENGINES, f"{reason}; {_OWN}")


def _block(name: str, **others: Route | str) -> Ways:
    gguf_file = Route("gguf-dflash", gguf.write)
    found: Ways = {engine: Route(name, dflash.write) for engine in ("vllm", "sglang")}
    found["speculators"] = Route(f"speculators-{name}", speculators.write_block)
    found["transformers"] = "it has an assistant class for plain DFlash alone"
    found["llama.cpp"] = gguf_file if name in ("dflash", "dspark") else _NO_BLOCKS
    return found | others


_NO_BLOCKS = "of block drafters, its DFlash and DSpark are written alone"
_NO_SUCH = "it has no architecture for it"
_EAGLE = Route("eagle", eagle.write)
_EAGLE3 = Route("eagle3", eagle3.write)
_MIMO = Route("mtp-mimo", mtp.write)
_NATIVE = Route("mtp-native", native.write)
_CAUSAL = Route("causal", causal.write)
_ALONE = "the library has no stand-alone drafters; vLLM serves the folder for vllm"
_DOMINO = "it has no Domino; SGLang has"
_ASSISTANT = Route("dflash-assistant", dflash.write_assistant)


def _ways(*ways: Route | str) -> Ways:
    """The routes to vLLM, SGLang, speculators, transformers and llama.cpp."""
    return dict(zip(ENGINES, ways, strict=True))


ROUTES: dict[str, Ways] = {
    "eagle": _ways(
        _EAGLE,
        _EAGLE,
        "the library has no EAGLE-1; vLLM serves the folder for vllm",
        _STATES,
        _NO_SUCH,
    ),
    "eagle3": _ways(
        _EAGLE3,
        _EAGLE3,
        Route("speculators-eagle3", speculators.write_eagle3),
        _STATES,
        Route("gguf-eagle3", gguf.write),
    ),
    "peagle": _ways(
        Route("peagle", eagle3.write),
        "it has no P-EAGLE; vLLM has",
        Route("speculators-peagle", speculators.write_eagle3),
        _STATES,
        _NO_SUCH,
    ),
    "specvocab": _nowhere(
        "no engine computes an LM head for a shortlist of tokens; train with head.shortlist=0, or "
        "head.draft_vocab_size for a fixed part"
    ),
    "mtp": _ways(
        _MIMO,
        _MIMO,
        "its MTP layers have norms on query and key heads, ours have none",
        "it builds MTP blocks from the target's own layer class, for families that come with them",
        "it reads MTP blocks in their target's own file",
    ),
    "native_mtp": _ways(
        _NATIVE,
        _NATIVE,
        "vLLM serves the folder for vllm, and a checkpoint with the block in it (export.stitch)",
        "it takes the block out of the target's checkpoint: export for vllm with export.stitch",
        "it reads MTP blocks in their target's own file: convert what export.stitch writes",
    ),
    "dflash": _block("dflash", transformers=_ASSISTANT),
    "dflash2": _block("dflash2"),
    "dspark": _block("dspark"),
    "domino": _block("domino", vllm=_DOMINO, speculators=_DOMINO),
    "lilicorr": _block("lilicorr", speculators="the library has no LiLiCorr; vLLM and SGLang have"),
    "dflare": _nowhere(f"a mixture of taps per layer: {_BLOCKS}"),
    "treeflash": _nowhere(f"states conditioned on the parent: {_BLOCKS}"),
    "mixed": _nowhere(f"parts of several block drafters: {_BLOCKS}"),
    "distilled": _ways(_CAUSAL, _CAUSAL, _ALONE, _CAUSAL, Route("gguf-causal", gguf.write)),
    "pard": _ways(
        _CAUSAL,
        "its stand-alone drafters are autoregressive, without mask tokens; vLLM has them",
        _ALONE,
        "it asks its assistant for one token at a time, and a PARD drafter's later tokens need "
        "mask tokens",
        "its draft models are autoregressive, without mask tokens; vLLM has them",
    ),
    "medusa": _ways(
        Route("medusa", medusa.write),
        "it has no Medusa; vLLM up to 0.32 has, and later ones run it as a custom class",
        "the library has no Medusa; vLLM serves the folder for vllm",
        _STATES,
        _NO_SUCH,
    ),
    "uno": _ways(
        "its Uno is not released; SGLang has one",
        Route("adapter", adapter.write),
        "the library has no adapters of the target; SGLang serves the folder for sglang",
        "its assisted generation takes language models; this one is an adapter of the target",
        "its adapters change the target, which drafts with none",
    ),
    "hydra_heads": _nowhere(_HEADS),
    **dict.fromkeys(("early_exit", "quantized_self"), _nowhere(_SELF)),
    **dict.fromkeys(("cascade", "jacobi", "lookahead"), _nowhere(_LOOP)),
    **dict.fromkeys(("ngram", "suffix"), _nowhere(_LOOKUP)),
    "jump_forward": _nowhere(_FORCED),
}
"""Method -> engine -> the route, or the reason why there is none."""


def find_route(method: str, engine: str) -> Route:
    """The route of a method to an engine; raises `UserError` with the reason if there is none."""
    found = ROUTES.get(method, {}).get(engine, f"no layout is known for it; {_OWN}")
    if isinstance(found, str):
        raise UserError(f"a drafter of method '{method}' cannot be exported for {engine}: {found}.")
    return found


def markdown() -> str:
    """The routes as a table for docs/serving.md, and the reasons where there is none."""
    lines = ["| method | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    reasons: dict[str, dict[str, None]] = {}
    for method, ways in ROUTES.items():
        cells = [method]
        for engine in ENGINES:
            found = ways[engine]
            cells.append(found.layout if isinstance(found, Route) else "no")
            if isinstance(found, str):
                reason = found if _OWN in found else f"{engine}: {found}"
                reasons.setdefault(reason, {})[method] = None
        lines.append(f"| {' | '.join(cells)} |")
    why = [f"* {', '.join(methods)}: {reason}." for reason, methods in reasons.items()]
    return "\n".join([*lines, "", *why])
