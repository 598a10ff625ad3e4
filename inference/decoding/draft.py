"""One way to draft, as chosen by the tuner and stored in decode.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Required, TypedDict

from heads.api.errors import UserError
from heads.api.tree import DraftShape
from inference.decoding.config import DecodeConfig


class DraftSettings(TypedDict, total=False):
    """The settings of a `Draft` that matter for its shape."""

    shape: Required[str]
    depth: int
    choices: list[list[int]]
    nodes: int
    width: int
    candidates: int
    depth_penalty: float
    adaptive: str
    adaptive_threshold: float


@dataclass(frozen=True)
class Draft:
    """One way to draft, by `DecodeConfig`'s names; settings that do not matter are 0 or ()."""

    shape: str = "none"
    depth: int = 0
    choices: tuple[tuple[int, ...], ...] = ()
    nodes: int = 0
    width: int = 0
    candidates: int = 0
    depth_penalty: float = 0.0
    adaptive: str = "none"
    adaptive_threshold: float = -1.0

    @property
    def family(self) -> str:
        """The shape, or "adaptive": the steps of a family have the same operations and so the same
        fixed time."""
        return "adaptive" if self.adaptive != "none" else self.shape

    @property
    def unstopped(self) -> Draft:
        """The same draft without early stopping: the most that is drafted and verified."""
        return replace(self, adaptive="none", adaptive_threshold=-1.0)

    @property
    def as_chain(self) -> Draft:
        """A chain of the same depth, without early stopping; plain decoding stays as it is."""
        return NONE if self.shape == "none" else Draft("chain", self.depth)

    @property
    def label(self) -> str:
        """A short name for tables."""
        if self.adaptive != "none":
            return f"chain {self.depth}, {self.adaptive} {self.adaptive_threshold:g}"
        sized = f"{self.shape} {self.size}, depth {self.depth}"
        if self.shape == "dartree":
            return f"{sized}, penalty {self.depth_penalty:g}"
        return {"none": "none", "chain": f"chain {self.depth}"}.get(self.shape, sized)

    @property
    def size(self) -> int:
        """Most nodes of a verification, the root included."""
        sizes = {"none": 1, "chain": self.depth + 1, "tree": len(self.choices) + 1}
        return sizes.get(self.shape, self.nodes)

    def on(self, decode: DecodeConfig) -> DecodeConfig:
        """`decode` with its draft replaced by this one."""
        own = {name: getattr(self, name) for name in self.plain()}
        bare = {"choices": (), "adaptive": "none", "adaptive_lengths": (), "adaptive_costs": ()}
        ahead = decode.ahead and self.family == "chain"
        return replace(decode, **{**bare, **own}, ahead=ahead)

    def plain(self) -> DraftSettings:
        """The settings that matter for the shape, as YAML and JSON hold them."""
        found: DraftSettings = {"shape": self.shape}
        if self.shape in ("chain", "dynamic", "dartree"):
            found["depth"] = self.depth
        if self.shape == "tree":
            found["choices"] = [list(path) for path in self.choices]
        if self.shape in ("dynamic", "dartree"):
            found |= {"nodes": self.nodes, "width": self.width}
        if self.shape == "dartree":
            found |= {"candidates": self.candidates, "depth_penalty": self.depth_penalty}
        if self.adaptive != "none":
            found |= {"adaptive": self.adaptive, "adaptive_threshold": self.adaptive_threshold}
        return found

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Draft:
        """Read the result of `plain`; raises `UserError` for unknown or invalid settings."""
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown or "shape" not in values:
            raise UserError(
                f"a draft has the settings {', '.join(known)}, shape among them; given: "
                f"{dict(values)}."
            )
        try:
            choices = tuple(tuple(map(int, path)) for path in values.get("choices", ()))
            draft = cls(**{**values, "choices": choices})
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
