"""Pages for tests: reports by hand with every block and hostile text everywhere, and a reader of
the HTML that comes out."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from inference.measure.breakdown.transcripts import write_transcripts
from inference.report.model import write_report
from tests.inference.example_report import BLOCKS, example_report

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`& "
    "\u202eabc\u0000\u2028\ud800 ]]> <!-- {{x}}"
)
"""What a prompt, a name or a path may hold at worst. The lone half of a pair and the control
characters cannot even be written."""
TERMS = (
    "ends",
    "vocabulary",
    "drafter",
    "coupling",
    "candidates",
    "shape",
    "sample",
    "widening",
    "drafting",
    "commit",
    "host",
    "clock",
)


def states(tested: int) -> dict[str, Any]:
    """A row of the tables of states."""
    names = ("accepted", "overlap", "own_overlap", "missed")
    return {"tested": tested} | {
        k: v for n in names for k, v in ((n, 0.5), (f"{n}_ci95", [0.4, 0.6]))
    }


def lost(names: tuple[str, ...]) -> dict[str, Any]:
    """A block `lost` by hand."""
    terms = [
        {"name": name, "factor": 0.9 if i % 3 else 1.05, "ci95": [0.85, 1.1]}
        for i, name in enumerate(TERMS)
    ]
    part = {"ceiling": 5.0, "speedup": 1.8, "tau": 2.75, "terms": terms}
    arm = {
        **part,
        "widening": 1.4,
        "domains": {"code": part, "explain": part},
        "depths": {
            group: [states(9), states(7), states(4), states(0)]
            for group in ("all", "code", "explain")
        },
        "positions": [{"first": 1, "end": 17, **states(9)}, {"first": 257, "end": 0, **states(3)}],
        "temperatures": [
            {"temperature": 0.0, "tau": 2.0, "tau_ci95": [1.9, 2.1], "ece": 0.1, **states(9)}
        ],
        "tree": {"nodes": 5, "own": 2.7, "best": 2.9, "choices": [[0], [1], [0, 0]]},
        "calibration": {
            "estimate": "probability",
            "ece": 0.1,
            "ece_ci95": [0.05, 0.2],
            "bins": [{"count": i, "confidence": i / 10, "accepted": i / 12} for i in range(10)],
        },
    }
    return {"prompts": 4, "arms": {name: copy.deepcopy(arm) for name in names}}


def answer(arm: str, prompt: str, words: str = "x") -> dict[str, Any]:
    """A transcript by hand: one token of every sort."""
    sides = {"target": [[words, 0.75], ["b", 0.25]], "draft": [["b", 0.5], [words, 0.5]]}
    empty: dict[str, Any] = {"target": [], "draft": []}
    tokens = [
        {"id": 1, "text": words, "by": "first", "depth": 0, "pass": 0, **empty},
        {"id": 2, "text": "if", "by": "drafted", "depth": 1, "pass": 1, **sides},
        {"id": 3, "text": "\n", "by": "drafted", "depth": 2, "pass": 1, **sides},
        {"id": 4, "text": words, "by": "corrected", "depth": 3, "pass": 1, **sides},
        {"id": 5, "text": " a", "by": "bonus", "depth": 1, "pass": 2, **sides, "draft": []},
    ]
    return {
        "arm": arm,
        "prompt": prompt,
        "domain": words,
        "temperature": 0.0,
        "question": words,
        "finish": "stop",
        "tokens": tokens,
    }


def folder(root: Path, words: str) -> Path:
    """A run's folder: a measurement with every block and transcripts, another one, a training,
    rounds; `words` as every text."""
    second = {
        "kind": "medusa",
        "draft": {"name": words, "shape": "tree", "nodes": 12},
        "speedup": 0.7,
        "tau": 1.4,
    }
    blocks = {**copy.deepcopy(BLOCKS), "lost": lost(("eagle3", words))}
    curve = [{**point, "nodes": n} for n in (1, 2, 4, 8) for point in BLOCKS["costs"]["verify"][:1]]
    blocks["costs"] = {
        **blocks["costs"],
        "verify": [*curve, {**curve[0], "nodes": 5}],
        "draft": {words: curve[1:]},
    }
    report = {
        **example_report({}, second, target={"id": words}, device={"name": words}, command=words),
        **blocks,
    }
    report["drafters"][0]["domains"] = {words: report["drafters"][0]["domains"]["code"]}
    write_report(clean(report), root / "measure" / "report.json")
    write_transcripts(
        root / "measure", "t", 2, clean([answer(name, words, words) for name in ("eagle3", words)])
    )
    write_report(
        clean(example_report(settings={"temperature": 1.0})), root / "sampled" / "report.json"
    )
    log = [
        {"step": n, "tau": 2 + n / 100, "tau_ci95": [1.9, 3.0], "best": True} for n in (10, 20, 30)
    ]
    path = root / "train" / "eagle3 & co" / "log.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in [{"step": 1, "loss": 3.0}, *log])
        + '{"step": 40, "ta'
    )
    rounds = [{"measured": {"prompts": 4, **line}, "rises": True} for line in log]
    (root / "loop.json").write_text(
        json.dumps(clean({"kind": words, "rounds": rounds, "best": {"round": 1}}))
    )
    return root


def clean(value: Any) -> Any:
    """The same without halves of pairs, which no file in UTF-8 can hold."""
    return json.loads(json.dumps(value).replace("\\ud800", ""))


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in its order. Collects what the tests ask
    about."""

    VOID = frozenset({"meta", "link", "br", "hr", "input", "col", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for tag in self.open[-1:]:
            self.text.setdefault(tag, []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
