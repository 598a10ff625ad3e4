"""`decode.yaml` in a checkpoint: the tuned drafts by batch size and temperature.

A file is valid for the checkpoint's weights, one revision of the target and way of loading it
(quantised or as it is), and one type of device (`Tuned.objection`). Decoding without a configured
draft uses the nearest row (`Tuned.row`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, get_args

import yaml

from heads.api.checkpoint import weights_file
from heads.api.config import require_one_of
from heads.api.errors import UserError
from heads.api.reading import read_yaml_object
from inference.decoding.draft import NONE, Draft, DraftSettings
from inference.decoding.rules.names import RULES
from inference.manifest import checkpoint_hash, write_bytes
from inference.target.hardware import Device
from inference.target.settings import Loading, loading_text

logger = logging.getLogger(__name__)

FORMAT = 1
DECODE_FILE = "decode.yaml"
Number = Literal[
    "predicted_tokens_per_second",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "tau",
]
NUMBERS: tuple[Number, ...] = get_args(Number)
"""The numbers of a row, without the interval of its speedup."""


class Tuning(TypedDict):
    """The result of tuning for one batch size and temperature, as `inference.tune.tuner` reports
    it."""

    batch_size: int
    temperature: float
    draft: DraftSettings
    chain: DraftSettings
    """The best chain, or none, for engines that verify only chains."""
    least_probability: float | None
    """Of a token of this chain, for engines that end it there; None if it is not known."""
    rule: str
    """The acceptance rule, one of `inference.decoding.rules.names.RULES`."""
    predicted_tokens_per_second: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    """Of plain decoding."""
    speedup: float
    speedup_ci95: list[float]
    tau: float


@dataclass(frozen=True)
class TunedRow:
    """The draft for one batch size and temperature, and its measured numbers."""

    batch_size: int
    temperature: float
    draft: Draft
    chain: Draft
    rule: str
    """The acceptance rule of the measurement."""
    numbers: Mapping[str, float]
    """By the names of `NUMBERS`."""
    speedup_ci95: tuple[float, float]
    least_probability: float | None = None
    """Of a token of the chain, for engines that end it there; None if it is not known."""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> TunedRow:
        """From a row of the file. Those of earlier versions have no chain; then it has the draft's
        depth."""
        where, draft = (int(row["batch_size"]), float(row["temperature"])), Draft.read(row["draft"])
        chain = Draft.read(row["chain"]) if "chain" in row else draft.as_chain
        low, high = row["speedup_ci95"][:2]
        rule = str(row.get("rule", "match"))
        require_one_of("rule", rule, RULES)
        numbers: dict[str, float] = {name: float(row[name]) for name in NUMBERS}
        least = row.get("least_probability")
        least = None if least is None else float(least)
        return cls(*where, draft, chain, rule, numbers, (float(low), float(high)), least)

    @property
    def conditions(self) -> str:
        """The conditions that the draft was chosen for, as text."""
        rule = "" if self.temperature == 0 else f", rule {self.rule}"
        return f"batch size {self.batch_size}, temperature {self.temperature:g}{rule}"


class TunedTarget(TypedDict):
    """The target that a checkpoint was tuned for."""

    id: str
    revision: str
    loading: NotRequired[Loading]
    """Unusual settings of its loading."""


@dataclass(frozen=True)
class Tuned:
    """The content of a decode.yaml."""

    target: TunedTarget
    device: Device
    weights_sha256: str
    """Of the checkpoint's weights file."""
    rows: tuple[TunedRow, ...]

    @property
    def loading(self) -> Loading:
        """The unusual settings of the target's loading."""
        return self.target.get("loading", {})

    def row(self, batch: int, temperature: float) -> TunedRow | None:
        """The row nearest in batch size (as a ratio), among those nearest in temperature.

        A greedy row is never used for sampling, nor the reverse; None if no row is left.
        """
        fitting = [row for row in self.rows if (row.temperature == 0) == (temperature == 0)]
        if not fitting:
            return None
        nearest = min(abs(row.temperature - temperature) for row in fitting)
        close = [row for row in fitting if abs(row.temperature - temperature) == nearest]
        return min(close, key=lambda row: abs(math.log(row.batch_size) - math.log(batch)))

    def objection(self, folder: Path, revision: str, loading: Loading, device_kind: str) -> str:
        """Why the file must not be used for the checkpoint in `folder`; empty if it may."""
        if self.target["revision"] != revision:
            return f"it was tuned on revision {self.target['revision']} of the target"
        if self.loading != loading:
            then, now = (loading_text(one) or "the defaults" for one in (self.loading, loading))
            return f"it was tuned on the target loaded with {then}, here it is loaded with {now}"
        if checkpoint_hash(folder) not in ("", self.weights_sha256):
            return "the weights have changed since it was tuned"
        if self.device["kind"] != device_kind:
            return f"it was tuned on {self.device['kind']}"
        return ""


HEADLINE = "# How to draft with this checkpoint, measured on this machine: "


def require_tuned(folder: Path) -> None:
    """Raise `UserError` if `folder`/decode.yaml exists but was not written by tuning."""
    path = folder / DECODE_FILE
    if path.is_file() and not path.read_bytes().startswith(HEADLINE.encode()):
        raise UserError(
            f"'{path}' was not written by `headstart tune` and is not replaced. Move it away."
        )


def write_tuned(
    folder: Path,
    weights_sha256: str,
    target: TunedTarget,
    device: Device,
    rows: Sequence[Tuning],
    command: str,
) -> Path:
    """Write `folder`/decode.yaml atomically, replacing an earlier one, and return its path.

    weights_sha256: of the weights file that was tuned; rows: as `inference.tune.tuner.Tuner.tune`
    returns them. Raises `UserError` if another file has that name, or if the weights in the folder
    have changed since.
    """
    require_tuned(folder)
    if checkpoint_hash(folder) != weights_sha256:
        raise UserError(
            f"'{weights_file(folder)}' was replaced while it was tuned; {DECODE_FILE} is not "
            "written. Run `headstart tune` again once its training has ended."
        )
    content = {
        "format": FORMAT,
        "target": dict(target),
        "device": dict(device),
        "weights_sha256": weights_sha256,
        "rows": [
            {
                "batch_size": row["batch_size"],
                "temperature": row["temperature"],
                "draft": dict(row["draft"]),
                "chain": dict(row["chain"]),
                "least_probability": row["least_probability"],
                "rule": row["rule"],
                **{name: round(float(row[name]), 4) for name in NUMBERS},
                "speedup_ci95": [round(float(bound), 4) for bound in row["speedup_ci95"]],
            }
            for row in rows
        ],
    }
    path = folder / DECODE_FILE
    _write(path, command, content)
    return path


def _write(path: Path, command: str, content: Any) -> None:
    text = f"{HEADLINE}{command}\n"
    text += yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    write_bytes(path, text.encode("utf-8"))


def change_values(
    path: Path, of_command: Callable[[str], str], of_content: Callable[[Any], Any]
) -> None:
    """Replace the command in a readable decode.yaml, and its content, by what two functions return
    for them."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    _write(path, of_command(first.removeprefix(HEADLINE)), of_content(read_yaml_object(path, "")))


def read_tuned(folder: Path) -> Tuned | None:
    """The content of `folder`/decode.yaml, or None. Raises `UserError` for an invalid file."""
    path = folder / DECODE_FILE
    if not path.exists():
        return None
    try:
        content = read_yaml_object(path, "")
        if content["format"] != FORMAT:
            raise UserError(
                f"format {content['format']!r} is not known; this version reads format {FORMAT}"
            )
        rows = tuple(TunedRow.read(row) for row in content["rows"])
        of, on = content["target"], content["device"]
        target: TunedTarget = {"id": str(of["id"]), "revision": str(of["revision"])}
        if "loading" in of:
            target["loading"] = dict(of["loading"])
        device: Device = {"kind": on["kind"], "name": on["name"], "threads": on["threads"]}
        return Tuned(target, device, str(content["weights_sha256"]), rows)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise UserError(
            f"'{path}' is not readable ({error}). Write it again with `headstart tune`, or delete "
            "it."
        ) from error


@dataclass(frozen=True)
class Advice:
    """The draft to decode with (None: the configured one), and a line for the log."""

    draft: Draft | None
    line: str


def advice(
    folder: Path, revision: str, device: Device, batch: int, temperature: float, *, loading: Loading
) -> Advice | None:
    """How to draft with the checkpoint in `folder`, by its decode.yaml; None if it has none.

    revision, loading: of the target (`TargetModel.loading`); device: as
    `inference.target.hardware.device_facts` returns it.
    """
    tuned = read_tuned(folder)
    if tuned is None:
        return None
    why = tuned.objection(folder, revision, loading, str(device["kind"]))
    row = None if why else tuned.row(batch, temperature)
    if row is None:
        sort = "greedy decoding" if temperature == 0 else "sampling"
        why = why or f"it has no row for {sort}"
        return Advice(None, f"{DECODE_FILE} is not used: {why} (`headstart tune` writes it anew)")
    name, speedup = device["name"], row.numbers["speedup"]
    chosen = f"{row.draft.label}, chosen at {row.conditions} (speedup {speedup:.2f})"
    if row.draft == NONE:
        chosen = f"no speculation, which was fastest at {row.conditions}"
    elsewhere = "" if tuned.device["name"] == name else f", tuned on {tuned.device['name']}"
    return Advice(row.draft, f"{DECODE_FILE}: {chosen}{elsewhere}")


def read_current(folder: Path) -> Tuned | None:
    """Like `read_tuned`, but None, with a warning, if the weights have changed since."""
    tuned = read_tuned(folder)
    if tuned is not None and checkpoint_hash(folder) != tuned.weights_sha256:
        why = "the weights have changed since it was tuned (`headstart tune` writes it anew)"
        logger.warning("%s is left out: %s", folder / DECODE_FILE, why)
        return None
    return tuned


def draft_length(folder: Path) -> int:
    """Drafted tokens per step for a serving engine that takes one number.

    It is the length of the best chain in the greedy row with the smallest batch in which a chain is
    faster. It is 0 if there is no decode.yaml, if no row has such a chain, or if it is of other
    weights.
    """
    tuned = read_current(folder)
    rows = [row for row in (tuned.rows if tuned else ()) if row.chain != NONE]
    first = min(rows, key=lambda row: (row.temperature > 0, row.batch_size), default=None)
    return 0 if first is None else first.chain.depth
