"""What was trained on is found again among the prompts to be measured, exactly and nearly."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from heads.api.errors import UserError
from inference.manifest import file_entry, write_manifest
from inference.measure.prompts import Prompt
from inference.target.chat import render_conversation
from scripts.config.compose import REPOSITORY
from tests.train.data.test_ingest import text
from train.data.answers import SHARD_SCHEMA
from train.data.dedup.leaks import find_leaks


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REPOSITORY / "assets" / "tiny-target")


def ask(*said):
    roles = ("user", "assistant")
    return tuple({"role": roles[at % 2], "content": one} for at, one in enumerate(said))


def answers(folder, rows, shards=1):
    """A folder of answers with rows (tokens, spans)."""
    (folder / "shards").mkdir(parents=True)
    entries = []
    for number in range(shards):
        own = [{"tokens": tokens, "spans": spans} for tokens, spans in rows[number::shards]]
        name = f"shards/shard-{number:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(own, schema=SHARD_SCHEMA), folder / name)
        entries.append(file_entry(folder, name, rows=len(own)))
    write_manifest(folder, "generate", {"target": {}, "counts": {}, "shards": entries})
    return folder


def trained(folder, tokenizer, *talks, shards=1):
    return answers(folder, [render_conversation(tokenizer, talk) for talk in talks], shards)


def test_exact_and_near_repeats_are_found_and_others_are_not(tmp_path, tokenizer):
    talks = [ask(text(number), "Yes.") for number in range(30)]
    talks += [ask("What is a list?", "A list."), ask("Hi", "Hello.", "And what is a tuple?", "So.")]
    folder = trained(tmp_path / "a", tokenizer, *talks, shards=2)
    words = text(3).split()
    prompts = {
        "same": ask(text(1)),
        "case": ask(text(2).upper() + "!"),
        "near": ask(" ".join(["another", *words[:-1]])),
        "new": ask(text(100)),
        "short": ask("what is a list"),
        "short and new": ask("What is a set?"),
        "second turn": ask("Hi", "Hello.", "And what is a tuple?"),
        "other talk": ask("Hey", "Hello.", "And what is a tuple, then?"),
        "system": ({"role": "system", "content": "Be kind."}, *ask("What is a list?")),
    }
    given = [Prompt(name, "x", messages=messages) for name, messages in prompts.items()]
    found = find_leaks(given, [folder], tokenizer)
    assert found.rows == 32
    assert found.exact == {"same", "case", "short", "second turn", "system"}
    assert found.near == {"near"}


def test_a_template_around_all_prompts_is_no_leak(tmp_path, tokenizer):
    template = text(0, 100)
    talks = [ask(f"{template} {text(number, 20)}", "Yes.") for number in range(1, 41)]
    folder = trained(tmp_path / "a", tokenizer, *talks)
    prompts = [
        Prompt("new", "x", messages=ask(f"{template} {text(100, 20)}")),
        Prompt("old", "x", messages=ask(f"{template} {text(7, 20)}")),
    ]
    assert find_leaks(prompts, [folder], tokenizer).all == {"old"}


def test_token_prompts_and_several_folders_are_compared(tmp_path, tokenizer):
    one, two = (ask(text(number), "Yes.") for number in (1, 2))
    folders = [trained(tmp_path / "a", tokenizer, one), trained(tmp_path / "b", tokenizer, two)]
    tokens, ((start, _),) = render_conversation(tokenizer, two)
    prompts = [Prompt("t", "x", tokens=tuple(tokens[:start])), Prompt("u", "x", tokens=(5, 6, 7))]
    found = find_leaks(prompts, folders, tokenizer)
    assert (found.rows, found.all) == (2, {"t"})


@pytest.mark.parametrize("share", [0.3, 0.98])
def test_a_cut_shard_is_named(tmp_path, tokenizer, share):
    folder = trained(tmp_path / "a", tokenizer, ask(text(1), "Yes."))
    (shard,) = (folder / "shards").iterdir()
    content = shard.read_bytes()
    shard.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"shard-00000.parquet' is damaged .*generate` again"):
        find_leaks([Prompt("p", "x", messages=ask(text(1)))], [folder], tokenizer)


def test_plain_text_that_was_learned_as_a_whole_is_found(tmp_path, tokenizer):
    content = text(1, 60)
    tokens = tokenizer(content).input_ids
    folder = answers(tmp_path / "a", [(tokens, [(1, len(tokens))])])
    given = [Prompt("old", "x", text=content[:200]), Prompt("new", "x", text=text(2, 60))]
    assert find_leaks(given, [folder], tokenizer).all == {"old"}
