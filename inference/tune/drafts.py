"""The drafts a tuner chooses among: plain decoding, chains, static and dynamic trees, chains that stop early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from heads.api.errors import UserError
from heads.api.tree import DraftShape
from inference.decoding.config import DecodeConfig
from inference.target.memory import drafter_state_bytes
from inference.target.model import TargetModel
from inference.tune.config import TuneConfig
from inference.tune.tree_search import search_tree

FAMILIES = ("none", "chain", "tree", "dynamic", "adaptive")
"""Drafts whose steps have the same operations beside the model's: what the fixed time of a step is measured for."""


@dataclass(frozen=True)
class Draft:
    """One way to draft: the settings of `DecodeConfig` that say so, under their names; 0 and () where they do not matter."""

    shape: str = "none"
    depth: int = 0
    choices: tuple[tuple[int, ...], ...] = ()
    nodes: int = 0
    width: int = 0
    adaptive: str = "none"
    adaptive_threshold: float = -1.0

    @property
    def family(self) -> str:
        """One of `FAMILIES`."""
        return "adaptive" if self.adaptive != "none" else self.shape

    @property
    def unstopped(self) -> Draft:
        """The same draft without early stopping: what is drafted, and what can be verified at most."""
        return replace(self, adaptive="none", adaptive_threshold=-1.0)

    @property
    def label(self) -> str:
        """For tables."""
        if self.shape == "none":
            return "none"
        if self.shape == "chain":
            stopped = f", {self.adaptive} {self.adaptive_threshold:g}" if self.adaptive != "none" else ""
            return f"chain {self.depth}{stopped}"
        return f"{self.shape} {self.size}, depth {self.depth}"

    @property
    def size(self) -> int:
        """Nodes of a verification at most, the root included."""
        return {"none": 1, "chain": self.depth + 1, "tree": len(self.choices) + 1}.get(self.shape, self.nodes)

    def settings(self) -> dict[str, Any]:
        """What `DecodeConfig` is to be told: the settings that matter for this shape alone."""
        if self.shape == "none":
            return {"shape": "none"}
        kept = {"chain": ("depth",), "tree": ("choices",), "dynamic": ("depth", "nodes", "width")}[self.shape]
        if self.adaptive != "none":
            kept = (*kept, "adaptive", "adaptive_threshold")
        return {"shape": self.shape, **{name: getattr(self, name) for name in kept}}

    def on(self, decode: DecodeConfig) -> DecodeConfig:
        """`decode` with this draft in place of its own."""
        bare = replace(decode, shape="none", choices=(), adaptive="none", adaptive_lengths=(), adaptive_costs=())
        return replace(bare, **self.settings())

    def plain(self) -> dict[str, Any]:
        """As YAML and JSON hold it."""
        found = self.settings()
        if "choices" in found:
            found["choices"] = [list(path) for path in self.choices]
        return found

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Draft:
        """Read back `plain`; raises `UserError` for settings that are none of a draft's, or that `DecodeConfig` refuses."""
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown or "shape" not in values:
            raise UserError(f"a draft has the settings {', '.join(known)}, shape among them; given: {dict(values)}.")
        given = dict(values)
        try:
            given["choices"] = tuple(tuple(int(rank) for rank in path) for path in given.get("choices", ()))
            draft = cls(**given)
            checked = draft.on(DecodeConfig())
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"this is no draft: {dict(values)} ({error}).") from error
        if draft.shape == "tree":
            draft = replace(draft, depth=checked.tree().max_depth)
        return draft

    def tree(self, decode: DecodeConfig, device: Any = "cpu") -> DraftShape:
        """The shape that drafters fill."""
        return self.on(decode).tree(device)


NONE = Draft()


def grid(
    config: TuneConfig, target: TargetModel, drafter: Any, accuracy: Sequence[Sequence[float]]
) -> tuple[list[Draft], dict[str, str]]:
    """All drafts to weigh, plain decoding first, and those left out: label -> why the drafter refused them.

    accuracy [D][R]: measured rates by depth and rank, which static trees are searched from; empty: no static trees.
    """
    wanted = [Draft("chain", depth) for depth in sorted(set(config.depths))]
    longest = 0
    kept, refused = [NONE], dict[str, str]()
    for nodes in sorted(set(config.nodes)):
        if accuracy and accuracy[0][0] > 0:
            found = search_tree(accuracy[: config.tree_depth], nodes)
            deepest = max(len(path) for path in found.choices)
            if deepest < len(found.choices):  # a chain is there already
                wanted.append(Draft("tree", deepest, found.choices))
        most = 1 + config.width + (config.tree_depth - 1) * config.width**2
        if nodes <= most:
            wanted.append(Draft("dynamic", min(config.tree_depth, nodes - 1), (), nodes, config.width))
    for draft in dict.fromkeys(wanted):
        why = refusal(target, drafter, draft)
        if why:
            refused[draft.label] = why
            continue
        kept.append(draft)
        longest = max(longest, draft.depth if draft.shape == "chain" else 0)
    if longest > 1 and not drafter.needs.verified:
        kept += [
            Draft("chain", longest, adaptive="confidence", adaptive_threshold=threshold)
            for threshold in sorted(set(config.thresholds))
        ]
    if len(kept) == 1:
        raise UserError(
            f"kind '{drafter.kind}' can draft none of the shapes to choose from: {next(iter(refused.values()))} "
            "Give shorter ones in tune.depths."
        )
    return kept, refused


def refusal(target: TargetModel, drafter: Any, draft: Draft) -> str:
    """Why `drafter` cannot fill a draft; empty when it can."""
    try:
        tree = draft.tree(DecodeConfig(), target.device)
        drafter_state_bytes(drafter, tree, 1, 64, target.info, target.weights.embedding)
    except UserError as error:
        return str(error)
    return ""


def deepest(config: TuneConfig, target: TargetModel, drafter: Any) -> int:
    """The longest chain of the grid that the drafter can draft, trees' levels included; at least 1."""
    asked = sorted({*config.depths, config.tree_depth}, reverse=True)
    return next((d for d in asked if not refusal(target, drafter, Draft("chain", d))), 1)


def described(draft: Draft) -> dict[str, Any]:
    """For reports: the label beside the settings."""
    return {"label": draft.label, **draft.plain()}


def same(draft: Draft, decode: DecodeConfig) -> bool:
    """Whether `decode` drafts like this."""
    return asdict(draft.on(decode)) == asdict(decode)
