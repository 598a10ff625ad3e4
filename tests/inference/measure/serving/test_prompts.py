"""What a running server is asked: answers by a schema are asked for and checked, prompts that do
not fit are left out, and a server with another tokenizer gets no token ids."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.structured.constraint import Constraint
from inference.engines.client import PROBE, Served
from inference.measure.config import BenchConfig
from inference.measure.datasets import Loaded
from inference.measure.prompts import Prompt
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.run import measure_server
from inference.measure.serving.structure import constraint_fields, opening
from inference.report.markdown import print_table
from inference.report.model import Report
from tests.inference.engines.stub import Stub, serving
from tests.inference.tokenizers import tiny_tokenizer

TOKENS = 16
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REFUSALS = (
    "This model's maximum context length is 64 tokens. However, your prompt contains 90 tokens.",
    "The decoder prompt (length 90) is longer than the maximum model length of 64.",
    "The input (90 tokens) is longer than the model's context length (64 tokens).",
    "request (90 tokens) exceeds the available context size (64 tokens), try increasing it",
    "this server has 64 positions per request; context_length_exceeded",
    "The sum of prompt length (90) and max_tokens (16) should not exceed max_seq_len (64)",
)


def said(text: str) -> Any:
    return ({"role": "user", "content": text},)


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(f"p{at}", "prose", messages=said(f"prose number {at}")) for at in range(count)]


def long(name: str = "long", characters: int = 300) -> Prompt:
    return Prompt(name, "prose", messages=said("prose and much more ".ljust(characters, "x")))


def measure(
    out: Path,
    stub: Stub,
    given: list[Prompt],
    plain: Stub | None = None,
    tokenizer: Any = None,
    contexts: tuple[int, ...] = (),
    decode: DecodeConfig | None = None,
    **settings: Any,
) -> Report:
    """Measures all of `given` but the last prompt, which warms up."""
    config = BenchConfig(
        prompts="stub",
        prompts_per_domain=len(given),
        warmup_prompts=1,
        repeats=2,
        contexts=contexts,
        server=stub.base,
        baseline_server=plain.base if plain else "",
        serving=ServingConfig(**{"timeout": 20.0, "backoff": 0.01, "retries": 2, **settings}),
    )
    decode = decode or DecodeConfig(max_new_tokens=TOKENS)
    return measure_server(config, decode, Loaded(given, "stub", ""), out, tokenizer=tokenizer)


# Structured output


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_json_schema_is_sent_and_only_with_its_prompt(api: str, tmp_path: Path) -> None:
    given = prompts()
    if api == "completions":
        given = [Prompt(one.id, "prose", text=f"prose number {one.id}") for one in given]
    given[1] = replace(given[1], constraint=Constraint.schema(SCHEMA))
    with serving() as stub:
        measure(tmp_path / "out", stub, given)
    probe, *asked = stub.bodies
    assert probe["response_format"] == FORMAT and probe["max_tokens"] == TOKENS
    formats = {
        str(one.get("messages") or one["prompt"]): one.get("response_format") for one in asked
    }
    assert len(formats) == 4 and [one for one in formats.values() if one] == [FORMAT]


def test_decode_structure_holds_for_every_prompt(tmp_path: Path) -> None:
    decode = DecodeConfig(max_new_tokens=TOKENS, structure="json")
    with serving() as stub:
        measure(tmp_path / "out", stub, prompts(), decode=decode)
    schemas = [one["response_format"]["json_schema"]["schema"] for one in stub.bodies]
    assert schemas and all(one == {"type": "object"} for one in schemas)


def test_a_server_that_ignores_the_schema_is_refused(tmp_path: Path) -> None:
    given = prompts()
    given[0] = Prompt("own", "prose", said("prose as JSON"), constraint=Constraint.schema(SCHEMA))
    with serving(obeys=False) as stub, pytest.raises(UserError, match="does not follow a JSON"):
        measure(tmp_path / "out", stub, given)
    assert len(stub.bodies) == 1


def test_every_engine_has_its_fields_or_is_refused() -> None:
    schema, regex = Constraint.schema(SCHEMA), Constraint("regex", "[ab]+")
    grammar = Constraint("grammar", 'root ::= "a"')
    for owner in ("", "vllm", "sglang", "headstart", "llamacpp"):
        fields = constraint_fields(schema, "chat", Served("m", owner=owner))
        assert fields == {"response_format": FORMAT}
    llama, other = Served("m", owner="llamacpp"), Served("m")
    assert constraint_fields(schema, "completions", llama) == {"json_schema": SCHEMA}
    for owner in ("vllm", "headstart"):
        fields = constraint_fields(regex, "chat", Served("m", owner=owner))
        assert fields == {"structured_outputs": {"regex": "[ab]+"}}
    fields = constraint_fields(grammar, "completions", Served("m", owner="sglang"))
    assert fields == {"ebnf": 'root ::= "a"'}
    for served in (llama, other):
        with pytest.raises(UserError, match=r"leave decode.structure out"):
            constraint_fields(grammar, "chat", served)
    assert opening(schema) == "{" and opening(regex) == "" and opening(None) == ""
    assert constraint_fields(Constraint.schema(True), "chat", other)["response_format"]


# Contexts


def test_contexts_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"bench.serving.api=completions does .*given: auto"):
        BenchConfig(server="http://127.0.0.1:1", contexts=(64,))


def test_contexts_put_other_prompts_before_each(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("chatml")
    with serving() as stub:
        report = measure(
            *(tmp_path / "out", stub, prompts(6)),
            tokenizer=tokenizer,
            contexts=(60, 120),
            api="completions",
        )
    measured = report.run.prompts["domains"]
    assert len(measured) == 10 and {name.split("@")[1] for name in measured} == {"60", "120"}
    lengths = {len(one["prompt"]) for one in stub.bodies}
    own = max(len(one.render(tokenizer)) for one in prompts(6))
    assert own < min(lengths) and 60 < max(lengths) <= 130


# Prompts that do not fit


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_prompt_that_is_refused_as_too_long_is_left_out(refusal: str, tmp_path: Path) -> None:
    given = [*prompts(3), long(), *prompts(8)[4:]]
    with (
        serving(longest=200, refusal=refusal) as stub,
        serving(longest=200, refusal=refusal, speculates=False) as plain,
    ):
        report = measure(tmp_path / "out", stub, given, plain, concurrency=(1, 3))
    assert report.server is not None
    assert report.run.prompts["overlong"] == ["long"]
    assert set(report.run.prompts["domains"]) == {"p0", "p1", "p2", "p4", "p5", "p6"}
    for cell in report.server.speculative.overall():
        assert cell.requests == cell.identical == 2 * 6
    # once at each server; afterwards it is known
    assert sum(len(str(one["messages"])) > 200 for one in stub.bodies) == 1
    assert "1 of 7 prompts were left out" in report.server.speculative.caveat


def test_the_report_and_the_console_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(longest=200) as stub:
        report = measure(tmp_path / "out", stub, [long(), *prompts()])
    print_table(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 prompts were left out" in shown and report.settings.prompts == 3


def test_only_the_other_server_refuses_it(tmp_path: Path) -> None:
    with serving() as stub, serving(longest=200, speculates=False) as plain:
        report = measure(tmp_path / "out", stub, [*prompts(), long(), long("warm", 5)], plain)
    assert report.server is not None and report.run.prompts["overlong"] == ["long"]
    (cell,) = report.server.speculative.overall()
    assert cell.requests == cell.identical == 2 * 4


def test_a_known_context_needs_no_refusal(tmp_path: Path) -> None:
    given = [*prompts(), long(characters=200), long("warm")]
    with serving(card={"max_model_len": 64}, counts=True) as stub:
        report = measure(tmp_path / "out", stub, given)
    # 50 tokens and an answer of 16
    assert report.run.prompts["overlong"] == ["long"] and report.run.warmup_prompts == 1
    assert all(len(str(one["messages"])) < 150 for one in stub.bodies)
    assert report.server is not None
    assert "the server's context of 64 tokens" in report.server.speculative.caveat


def test_an_event_may_say_it_too(tmp_path: Path) -> None:
    with serving(faults=deque([None, "error"])) as stub:
        report = measure(tmp_path / "out", stub, prompts())
    assert report.run.prompts["overlong"] == ["p0"]


def test_a_conversation_ends_at_a_turn_that_is_too_long(tmp_path: Path) -> None:
    turns = ("prose again", "prose ".ljust(300, "y"), "prose at last")
    talk = Prompt("talk", "prose", messages=said("prose to begin with"), turns=turns)
    with serving(longest=200) as stub:
        report = measure(tmp_path / "out", stub, [talk, *prompts()])
    assert report.run.prompts["overlong"] == ["talk/3"]
    assert {"talk", "talk/2"} < set(report.run.prompts["domains"])


def test_a_conversation_goes_on_behind_the_answer_that_it_had(tmp_path: Path) -> None:
    """A measurement that is continued asks the same prompts, whatever the server would answer."""
    talk = Prompt("talk", "prose", messages=said("prose to begin with"), turns=("prose again",))
    with serving(faults=deque([None, None, None, *[503] * 3])) as stub:
        with pytest.raises(UserError, match="repeat the command to continue"):
            measure(tmp_path / "out", stub, [talk, *prompts()])
        stub.text, asked = "y", len(stub.bodies)
        report = measure(tmp_path / "out", stub, [talk, *prompts()])
    again = stub.bodies[asked:]
    # all but the window that was measured, and the warm-up
    assert len(again) == 2 * 5 - 1 + 1 and "talk/2" in report.run.prompts["domains"]
    behind = {one["messages"][1]["content"] for one in again if len(one["messages"]) > 1}
    assert behind == {"x" * TOKENS}


def test_all_servers_answer_the_turns(tmp_path: Path) -> None:
    """Otherwise the first one alone has the conversations in its prefix cache."""
    talk = Prompt("talk", "prose", messages=said("prose to begin with"), turns=("prose again",))
    with serving() as stub, serving(speculates=False) as plain:
        measure(tmp_path / "out", stub, [talk, *prompts()], plain)
    assert len(stub.bodies) == len(plain.bodies)


def test_nothing_fits(tmp_path: Path) -> None:
    with serving(longest=4) as stub, pytest.raises(UserError, match="no prompt fits"):
        measure(tmp_path / "out", stub, prompts())
    with (
        serving(card={"max_model_len": 16}, counts=True) as stub,
        pytest.raises(UserError, match=r"the context of 16 tokens of http.*Shorten the prompts"),
    ):
        measure(tmp_path / "out", stub, prompts())
    assert stub.bodies == []


def test_other_refusals_stay_errors(tmp_path: Path) -> None:
    refusal = "'temperature' is not a parameter"
    with (
        serving(longest=200, refusal=refusal) as stub,
        pytest.raises(UserError, match="status 400"),
    ):
        measure(tmp_path / "out", stub, [long(), *prompts()])


# The tokenizer


def test_token_ids_go_only_to_a_server_with_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("chatml")
    mine = tokenizer.encode(PROBE, add_special_tokens=False)
    given = {"tokenizer": tokenizer, "api": "completions"}
    with (
        serving(tokenize=deque([{"tokens": [1, 2, 3]}])) as stub,
        pytest.raises(UserError, match=r"has another tokenizer: .*; set target.path to the model"),
    ):
        measure(tmp_path / "out", stub, prompts(), **given)
    assert stub.bodies == []
    # llama.cpp reads the text from another field
    for answers in ([{"tokens": mine}], [{"tokens": []}, {"tokens": mine}]):
        with serving(tokenize=deque(answers)) as stub:
            assert measure(tmp_path / "out", stub, prompts(), **given).server is not None
