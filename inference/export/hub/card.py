"""The model card of a drafter: front matter for the Hub, then the numbers of report.json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from heads.api.errors import UserError
from inference.decoding.decode_file import Tuned
from inference.decoding.rules import names
from inference.decoding.rules.names import LOSSY, TEXT, promise, rule_text
from inference.export.hub.config import PushConfig
from inference.export.layouts.folder import ExportNotes
from inference.report import claims, markdown
from inference.report.model import REPORT_FILE, DrafterResult, DraftFacts, Report
from inference.report.quoting import code, escape, fence, one_line
from inference.target.settings import loading_text

LIBRARY = "headstart"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
ENVIRONMENT.globals |= {
    "claims": claims,
    "markdown": markdown,
    "promises": names,
    "lines": "\n".join,
    "loading_text": loading_text,
}
ENVIRONMENT.filters |= {
    "text": escape,
    "code": code,
    "fence": fence,
    "literal": lambda text: json.dumps(one_line(text), ensure_ascii=False),
    "shell": lambda text: shlex.quote(one_line(text)),
}
TEMPLATE = ENVIRONMENT.get_template("card.md.j2")


@dataclass(frozen=True)
class Training:
    """How a drafter was trained.

    tokens: positions of answers seen; seconds: of the whole run; revision: of Headstart's git;
    tau_measured: whether the best checkpoint was chosen by its measured tau; start: None for fresh
    weights.
    """

    steps: int
    tokens: int
    seconds: float
    revision: str
    tau_measured: bool = True
    start: Start | None = None

    @property
    def starts(self) -> list[Start]:
        """What it continued, then what that continued, and so on."""
        if self.start is None:
            return []
        before = self.start.training
        return [self.start, *(before.starts if before else [])]


@dataclass(frozen=True)
class Start:
    """The drafter that a training continued. name: on the Hub, or of its folder; training: its own,
    where that is known."""

    name: str
    training: Training | None = None


def report_file(number: int) -> str:
    """The name of a Hub folder's report; they are numbered from 1."""
    return REPORT_FILE if number == 1 else REPORT_FILE.replace(".", f"_{number}.")


def select_measured(report: Report, weights_sha256: str, source: str = "the report") -> Report:
    """The report with only the drafters of these weights; raises `UserError` without any."""
    found = [one for one in report.drafters if one.draft.weights_sha256 == weights_sha256]
    if not found:
        others = ", ".join(one.name for one in report.drafters) or "nothing"
        raise UserError(
            f"{source} did not measure this drafter: no entry has weights_sha256 "
            f"{weights_sha256[:12]}... (it measured: {others}). The weights have changed since, or "
            "it is another drafter's report. Run `headstart measure` again."
        )
    return report.only(found)


def card(
    reports: Mapping[str, Report],
    weights_sha256: str,
    checkpoint: Mapping[str, Any],
    about: PushConfig,
    images: Sequence[str] = (),
    engines: Mapping[str, ExportNotes] | None = None,
    training: Training | None = None,
    tuned: Tuned | None = None,
) -> str:
    """The text of README.md, from `card.md.j2`.

    reports: by title; checkpoint: the drafter's config.json; images: names of the plots; engines:
    name of an engine, and of its folder -> the notes of the export; tuned: the content of its
    decode.yaml. Raises `UserError` if a report did not measure these weights. Unless
    `about.allow_mismatches` is set, it is also raised if a report decoded with a lossy rule or
    measured text that was not the target's.
    """
    own = {
        title: select_measured(report, weights_sha256, title) for title, report in reports.items()
    }
    settings = [report.settings for report in own.values()]
    used = sorted({(each.rule, each.temperature) for each in settings})
    lossy = sorted({each.rule for each in settings if each.promise == LOSSY})
    if lossy and not about.allow_mismatches:
        raise UserError(
            f"a report was measured with rule {', '.join(lossy)}, which is lossy, so this drafter "
            "is not published. Measure with decode.rule=match, or set push.allow_mismatches=true "
            "to publish it labelled as not lossless."
        )
    exact = [report for report in own.values() if report.settings.promise == TEXT]
    wrong = sum(one.lossless.mismatches for report in exact for one in report.drafters)
    if wrong and not about.allow_mismatches:
        raise UserError(
            f"{wrong} measured sequences differ from plain decoding (lossless.mismatches), so this "
            "drafter is not published. Find the cause (the report's run.arms.<name>.divergences "
            "say where), or set push.allow_mismatches=true to publish it labelled as not lossless."
        )
    firsts = [report.drafters[0] for report in own.values()]
    draft = firsts[0].draft
    return TEMPLATE.render(
        front=front_matter(checkpoint, about),
        name=about.repo.split("/")[-1],
        repo=about.repo,
        base=base_model(checkpoint, about),
        datasets=about.datasets,
        kind=checkpoint["kind"],
        target=checkpoint["target"],
        parameters=f"{firsts[0].parameters:,}",
        draft=draft,
        arguments=draft_code(draft, settings[0].rule),
        wrong=wrong,
        rules=[(rule_text(*pair), pair[1], promise(*pair)) for pair in used],
        kept=sorted({promise(*pair) for pair in used}),
        reports=own,
        files=[report_file(number) for number in range(1, len(own) + 1)],
        images={image: Path(image).stem.replace("_", " ") for image in images},
        engines=engines or {},
        training=training,
        tuned=tuned,
        domains=sorted({name for one in firsts for name in one.domains}),
        weakest={title: weakest(one) for title, one in zip(own, firsts, strict=True)},
        batches=sorted({each.batch_size for each in settings}),
    )


def weakest(drafter: DrafterResult) -> str:
    """The domain with the lowest tau, if its interval lies below that of all prompts; otherwise
    empty. An interval of a single prompt shows nothing."""
    name = min(drafter.domains, key=lambda name: drafter.domains[name].tau, default="")
    low, high = drafter.domains[name].tau_ci95 if name else (0.0, 0.0)
    return name if low < high < drafter.tau_ci95[0] else ""


def base_model(checkpoint: Mapping[str, Any], about: PushConfig) -> str:
    """Hub id of the target; empty if it has no Hub id."""
    target: str = checkpoint["target"]["id"]
    own = target if HUB_ID.fullmatch(target) and not Path(target).exists() else ""
    return about.base_model or own


def front_matter(checkpoint: Mapping[str, Any], about: PushConfig) -> str:
    """The YAML that the Hub reads."""
    tags = [LIBRARY, "speculative-decoding", "draft-model", checkpoint["kind"], *about.tags]
    fields: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }
    optional = {
        "base_model": base_model(checkpoint, about),
        "license": about.license,
        "datasets": list(about.datasets),
    }
    fields |= {name: value for name, value in optional.items() if value}
    return yaml.safe_dump(fields, sort_keys=False)


def draft_code(draft: DraftFacts, rule: str) -> str:
    """The arguments of a `DecodeConfig` with the draft and the rule of the measurement."""
    found: dict[str, Any] = {"shape": draft.shape, "depth": draft.depth}
    if draft.shape in ("dynamic", "dartree"):
        found["nodes"] = draft.nodes
    if draft.shape == "tree":
        found = {"shape": "tree", "choices": tuple(map(tuple, draft.choices or []))}
    # adaptive_head is left out, a file that is not published
    more = ("width", "candidates", "depth_penalty", "adaptive", "adaptive_threshold")
    found |= {name: getattr(draft, name) for name in more}
    lists = ("adaptive_lengths", "adaptive_costs")
    found |= {name: tuple(getattr(draft, name) or ()) or None for name in lists}
    found["rule"] = None if rule == "match" else rule
    given = {name: value for name, value in found.items() if value is not None}
    return ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in given.items()
    )
