"""A reader: a folder of one's own, an environment with nothing in it but `headstart`, and a shell.

Readers are small: commands that a page prints for hours of work are called with `debug=fast` behind
what is printed. Nothing else is changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.newcomer.pages import ROOT

MINUTES = 30
"""For one script, on a machine where other programs run."""
SMALL = """
headstart() {
  case " $* " in *" debug="* | *" -"*) command headstart "$@"; return ;; esac
  case "$1" in
    generate | train | measure | loop | chat | tune) command headstart "$@" debug=fast ;;
    *) command headstart "$@" ;;
  esac
}
"""
TOPICS = ("a list", "an iterator", "a decorator", "a thread", "a socket", "a regular expression")
ASKED = {"support": "What is {}, and when do I need it?", "code": "Write a function around {}."}


@dataclass(frozen=True)
class Reader:
    """Somebody who works in `home` with the `headstart` of the folder `programs`."""

    home: Path
    programs: Path
    more: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""

    def environment(self) -> dict[str, str]:
        """No variable of the process that runs the tests, but for where programs are."""
        return {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **self.more,
        }

    def run(self, script: str, status: int = 0, *, small: bool = True) -> str:
        """What a shell says that runs this script to the end, or to the first failing command; the
        exit status must be the given one, without a traceback and without noise of libraries."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", (SMALL if small else "") + script],
            cwd=self.home,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * MINUTES,
        )
        told = f"status {done.returncode} of\n{script}\n{done.stdout[-5000:]}"
        assert done.returncode == status, told
        for noise in ("Traceback (most recent call last)", "Loading weights", "UserWarning"):
            assert noise not in done.stdout, told
        return done.stdout

    def json(self, path: str) -> Any:
        """What a file below `home` holds."""
        return json.loads((self.home / path).read_text(encoding="utf-8"))

    def prompts(self, path: str) -> set[str]:
        """What users ask in a file of conversations below `home`."""
        rows = map(json.loads, (self.home / path).read_text(encoding="utf-8").splitlines())
        return {row["messages"][0]["content"] for row in rows}


def programs_of(python: str | Path, folder: Path) -> Path:
    """A folder with a `headstart` that is this repository's, run by this Python."""
    folder.mkdir(parents=True)
    program = folder / "headstart"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{python}" -P -m headstart "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    return folder


def reader_in(folder: Path) -> Reader:
    """A reader with an empty home below a folder."""
    (folder / "home").mkdir()
    return Reader(folder / "home", programs_of(sys.executable, folder / "programs"))


def give_model(home: Path) -> Path:
    """`my/model`, as pages call a model of one's own: the embedded target, in another place."""
    (home / "my").mkdir()
    (home / "my" / "model").symlink_to(ROOT / "assets" / "tiny-target")
    return home / "my" / "model"


def give_files(home: Path, script: str) -> None:
    """The files of one's own that a script names (data.path, bench.prompts, train.prompts ...): each
    with other conversations."""
    for path in dict.fromkeys(re.findall(r"[\w/.-]+\.(?:jsonl|json|txt|parquet)\b", script)):
        file = home / path
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".parquet":
                write_tokens(file)
            else:
                write_chats(file, "" if file.stem == "prompts" else f" ({file.stem})")


def write_chats(file: Path, ending: str = "") -> None:
    """Twelve prompts (as many as `debug=fast` reads) of two domains: OpenAI messages with two more columns, or one per line."""
    asked = [
        (domain, words.format(topic) + ending)
        for topic in TOPICS
        for domain, words in ASKED.items()
    ]
    if file.suffix == ".txt":
        file.write_text("".join(f"{words}\n" for _, words in asked), encoding="utf-8")
        return
    rows = [
        {"messages": [{"role": "user", "content": words}], "domain": domain, "ticket": n}
        for n, (domain, words) in enumerate(asked)
    ]
    text = json.dumps(rows) if file.suffix == ".json" else "\n".join(map(json.dumps, rows)) + "\n"
    file.write_text(text, encoding="utf-8")


def write_tokens(file: Path) -> None:
    """Twelve conversations in the form that other trainers prepare: `input_ids`, and a `loss_mask`
    that is 1 at each token of the answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny-target")
    ids, masks = [], []
    for n, topic in enumerate((*TOPICS, *(f"{topic} of mine" for topic in TOPICS))):
        talk = [{"role": "user", "content": ASKED["support"].format(topic)}]
        prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        head = tokenizer.encode(prompt, add_special_tokens=False)
        words = f"Number {n}: {topic} has {n % 7} parts."
        answer = tokenizer.encode(words, add_special_tokens=False)
        ids.append(head + answer)
        masks.append([0] * len(head) + [1] * len(answer))
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks}), file)
