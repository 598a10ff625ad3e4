"""The model card of a drafter: front matter for the Hub, then what was measured, read from report.json and
nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from heads.api.errors import UserError
from inference.decoding.decode_file import Tuned
from inference.decoding.rules.names import DISTRIBUTION, LOSSY, TEXT, promise, rule_text
from inference.report import DEFINITIONS, depth_table, domain_table, facts, main_table, promise_of
from inference.report_schema import arm_name

LIBRARY = "headstart"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    """What a card says besides measured numbers; given by the person who publishes."""

    repo: str
    """Where the drafter will be found: "user/name"."""
    license: str = ""
    """Identifier of the licence (apache-2.0, mit, llama3.1, ...); empty leaves it out."""
    base_model: str = ""
    """Hub id of the target; empty: the measured target's own id, if that is a Hub id."""
    tags: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    """Hub ids of the data sets that the prompts came from."""
    allow_mismatches: bool = False
    """Publish a drafter whose measured text was not always the target's; the card then opens with a
    warning.
    """


@dataclass(frozen=True)
class Engine:
    """An engine's folder in the repository. name: also the folder's; serve: the line that serves the target with it, where the
    folder lies under its own name.
    """

    name: str
    serve: str


@dataclass(frozen=True)
class Training:
    """How a drafter was trained. tokens: positions of answers seen; seconds: of the whole run; revision: of Headstart's git;
    tau_measured: whether tau was measured, and the best checkpoint chosen by it.
    """

    steps: int
    tokens: int
    seconds: float
    revision: str
    tau_measured: bool = True


def measured_entries(
    report: Mapping[str, Any], weights_sha256: str, source: str = "the report"
) -> list[dict[str, Any]]:
    """The entries of `drafters` that measured the weights with this hash; raises `UserError` when there are
    none.
    """
    found = [entry for entry in report["drafters"] if entry["draft"].get("weights_sha256") == weights_sha256]
    if not found:
        names = ", ".join(arm_name(entry) for entry in report["drafters"]) or "nothing"
        raise UserError(
            f"{source} did not measure this drafter: no entry has weights_sha256 {weights_sha256[:12]}... (it measured: "
            f"{names}). The weights have changed since, or it is another drafter's report. Run `headstart measure` again."
        )
    return found


def card(
    reports: Mapping[str, Mapping[str, Any]],
    weights_sha256: str,
    checkpoint: Mapping[str, Any],
    about: CardFacts,
    images: Sequence[str] = (),
    engines: Sequence[Engine] = (),
    training: Training | None = None,
    tuned: Tuned | None = None,
) -> str:
    """The text of README.md.

    reports: title -> report.json content; checkpoint: the drafter's config.json; images: names of the plots; tuned: what its
    decode.yaml says. Raises `UserError` when a report did not measure these weights, or measured text that was not the target's
    (unless `about.allow_mismatches`).
    """
    own = {}
    for title, report in reports.items():
        own[title] = {**report, "drafters": measured_entries(report, weights_sha256, title)}
    lossy = sorted({report["settings"]["rule"] for report in own.values() if promise_of(report["settings"]) == LOSSY})
    if lossy and not about.allow_mismatches:
        raise UserError(
            f"a report was measured with rule {', '.join(lossy)}, which is lossy, so this drafter is not published. Measure with "
            "decode.rule=match, or set push.allow_mismatches=true to publish it labelled as not lossless."
        )
    exact = [report for report in own.values() if promise_of(report["settings"]) == TEXT]
    wrong = sum(entry["lossless"]["mismatches"] for report in exact for entry in report["drafters"])
    if wrong and not about.allow_mismatches:
        raise UserError(
            f"{wrong} measured sequences differ from plain decoding (lossless.mismatches), so this drafter is not published. "
            "Find the cause (the report's run.arms.<name>.divergences say where), or set push.allow_mismatches=true to publish "
            "it labelled as not lossless."
        )
    first = next(iter(own.values()))
    lines = [front_matter(checkpoint, about), f"# {about.repo.split('/')[-1]}", ""]
    lines += _introduction(own, checkpoint, wrong)
    for title, report in own.items():
        lines += [f"## Measured: {title}", "", *facts(report), "", *main_table(report), ""]
        lines += ["Per domain: tau [interval], TAR, speedup", "", *domain_table(report), ""]
        lines += [
            "Acceptance by depth: share of passes (given the depth before)",
            "",
            *depth_table(report),
            "",
        ]
    for image in images:
        lines += [f"![{Path(image).stem.replace('_', ' ')}]({image})", ""]
    lines += [DEFINITIONS, "", "Every number on this page is from `report.json`, which lies beside it.", ""]
    lines += _how_to_draft(tuned)
    lines += _how_to_serve(engines, about.repo)
    lines += _limits(own, checkpoint)
    lines += _provenance(training, about)
    return "\n".join([*lines, *_how_to_load(first, checkpoint, about.repo)])


def base_model(checkpoint: Mapping[str, Any], about: CardFacts) -> str:
    """Hub id of the target, as far as it has one."""
    target: str = checkpoint["target"]["id"]
    return about.base_model or (target if HUB_ID.fullmatch(target) and not Path(target).exists() else "")


def front_matter(checkpoint: Mapping[str, Any], about: CardFacts) -> str:
    """The YAML block that the Hub reads."""
    base = base_model(checkpoint, about)
    kind = checkpoint["kind"]
    fields: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys([LIBRARY, "speculative-decoding", "draft-model", kind, *about.tags])),
    }
    if base:
        fields["base_model"] = base
    if about.license:
        fields["license"] = about.license
    if about.datasets:
        fields["datasets"] = list(about.datasets)
    return "---\n" + yaml.safe_dump(fields, sort_keys=False) + "---\n"


def _introduction(reports: Mapping[str, Mapping[str, Any]], checkpoint: Mapping[str, Any], wrong: int) -> list[str]:
    target, entry = checkpoint["target"], next(iter(reports.values()))["drafters"][0]
    used = {(report["settings"]["rule"], report["settings"]["temperature"]) for report in reports.values()}
    lines = [
        f"> **Not lossless.** Measured with rule {rule_text(rule, temperature)}, temperature {temperature:g}.\n"
        for rule, temperature in sorted(used)
        if promise(rule, temperature) == LOSSY
    ]
    if wrong:
        lines += [
            f"> **Not lossless.** {wrong} measured sequences differ from what the target gives without this drafter.",
            "",
        ]
    lines += [
        f"A drafter of kind `{checkpoint['kind']}` ({entry['parameters']:,} parameters of its own) for speculative decoding "
        f"of `{target['id']}`: it drafts the next tokens, the target verifies them all in one pass.",
        "",
        f"- target revision: `{target['revision']}`",
        f"- tokenizer hash: `{target['tokenizer_hash']}` (loading with another tokenizer is refused)",
        f"- weights sha256: `{entry['draft']['weights_sha256']}`",
        "",
    ]
    kept = {promise(rule, temperature) for rule, temperature in used}
    if kept == {DISTRIBUTION} or kept == {TEXT, DISTRIBUTION}:
        lines += [
            "Where a report names another rule than `match`, the measured text follows the target's distribution, but is not "
            "the text that plain decoding gives for the same seed.",
            "",
        ]
    if not wrong and kept == {TEXT}:
        lines += [
            "The text does not change: a draft is accepted only where it is the target's own pick, greedy or sampled with the "
            "same seed. The column *lossless* counts the measured answers that were token-identical to plain decoding; near "
            "ties are differences within the measured rounding of the number format.",
            "",
        ]
    return lines


def _how_to_draft(tuned: Tuned | None) -> list[str]:
    """What decode.yaml says, as a table."""
    if tuned is None:
        return []
    lines = [
        "## How to draft",
        "",
        f"Chosen by `headstart tune` on {tuned.device['name']} among drafts that it measured; `decode.yaml` lies beside this card.",
        "",
        "| batch size | temperature | draft | tokens/s | without | speedup |",
        "|---|---|---|---|---|---|",
    ]
    for row in tuned.rows:
        low, high = row.speedup_ci95
        label = "none: plain decoding is fastest" if row.draft.shape == "none" else row.draft.label
        numbers = row.numbers
        lines.append(
            f"| {row.batch_size} | {row.temperature:g} | {label} | {numbers['tokens_per_second']:.0f} | "
            f"{numbers['baseline_tokens_per_second']:.0f} | {numbers['speedup']:.2f} [{low:.2f}, {high:.2f}] |"
        )
    return [*lines, ""]


def _how_to_serve(engines: Sequence[Engine], repo: str) -> list[str]:
    """Two lines per engine: fetch its folder, start it."""
    lines = ["## How to serve", ""] if engines else []
    for engine in engines:
        fetch = f"hf download {repo} --include '{engine.name}/*' --local-dir ."
        language = "python" if engine.name == "transformers" else "bash"
        if language == "python":
            fetch = f"# {fetch}"
        lines += [f"{engine.name}:", "", f"```{language}", fetch, engine.serve, "```", ""]
    return lines


def _limits(reports: Mapping[str, Mapping[str, Any]], checkpoint: Mapping[str, Any]) -> list[str]:
    """What the numbers do not say."""
    target = checkpoint["target"]["id"]
    domains = sorted({domain for report in reports.values() for domain in report["drafters"][0]["domains"]})
    batches = sorted({report["settings"]["batch_size"] for report in reports.values()})
    slowest = min(
        ((name, values["tau"]) for report in reports.values() for name, values in report["drafters"][0]["domains"].items()),
        key=lambda pair: pair[1],
        default=None,
    )
    lines = [
        "## Limits",
        "",
        f"- It drafts for `{target}` at the revision above. A fine-tuned, merged or quantised target agrees with it less often: "
        "measure.",
        f"- Measured on {', '.join(domains) or 'one set of prompts'} at batch size {', '.join(map(str, batches))}, on the devices "
        "above. Other text, longer context, larger batches and other machines give other numbers; speculation can lose at large "
        "batches.",
    ]
    if slowest is not None and len(domains) > 1:
        lines.append(f"- It helps least on *{slowest[0]}* (tau {slowest[1]:.2f}).")
    return [*lines, ""]


def _provenance(training: Training | None, about: CardFacts) -> list[str]:
    """Where it comes from, as far as that is on record."""
    lines = ["## Where it comes from", ""]
    if training is not None:
        lines.append(
            f"Trained with Headstart{f' at revision `{training.revision[:12]}`' if training.revision else ''}: "
            f"{training.steps:,} steps, {training.tokens:,} tokens, {training.seconds / 3600:.2f} hours; "
            f"the {'checkpoint with the best measured tau on validation prompts' if training.tau_measured else 'last checkpoint'} "
            "was kept."
        )
    if about.datasets:
        lines.append(f"Prompts from {', '.join(f'`{name}`' for name in about.datasets)}.")
    return [*lines, ""] if len(lines) > 2 else []


def _how_to_load(report: Mapping[str, Any], checkpoint: Mapping[str, Any], repo: str) -> list[str]:
    """A code block that decodes with the draft that was measured."""
    draft = report["drafters"][0]["draft"]
    rule = report["settings"]["rule"]
    shape = f'shape="{draft["shape"]}", depth={draft["depth"]}'
    if draft["shape"] == "tree":
        shape = f'shape="tree", choices={_nested_tuple(draft.get("choices", []))}'
    if rule != "match":
        shape += f', rule="{rule}"'
    return [
        "## How to load",
        "",
        "```python",
        "from pathlib import Path",
        "",
        "from heads.api.checkpoint import load_drafter",
        "from huggingface_hub import snapshot_download",
        "from inference.target.chat import render_prompt",
        "from inference.decoding.engine import DecodeConfig, Engine, Request",
        "from inference.target.model import TargetConfig, TargetModel",
        "",
        f'target = TargetModel.load(TargetConfig(path="{checkpoint["target"]["id"]}"))',
        f'drafter = load_drafter(Path(snapshot_download("{repo}")), target.info, target.weights)',
        f"engine = Engine(target, drafter, DecodeConfig({shape}))",
        'prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Write a haiku about queues."}])',
        "for answer in engine.run([Request(0, tuple(prompt), seed=0, max_new_tokens=128)]):",
        "    print(target.tokenizer.decode(answer.tokens))",
        "```",
        "",
    ]


def _nested_tuple(choices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(path) for path in choices)
