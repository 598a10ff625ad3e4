"""`headstart watch` from the command line: a drafter that is always right on its own target, and
what it is worth on another."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.engines.client import PROBE
from inference.manifest import checkpoint_hash
from inference.measure.prompts import load_prompts, to_requests
from inference.report.model import write_report
from inference.staleness.comparison import Comparison, read_recorded
from inference.staleness.reference import Reference
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.verifications import VerificationLog, record_facts
from scripts.cli import main
from scripts.run.folder import StageFolder, open_folder
from scripts.stages import watch
from tests.inference.engines.stub import serving
from tests.inference.example_report import example_report
from tests.scripts.pairs import save_pair

WORDS = ("add", "two", "numbers", "list", "items", "function", "sequence", "hello", "bye", "return")
TOKENS = 24


def write_prompts(path: Path, count: int, start: int = 0) -> None:
    rows = []
    for number in range(start, start + count):
        text = (
            " ".join(WORDS[(number * step + 7 * step) % len(WORDS)] for step in (1, 3, 7))
            + f" {number}"
        )
        rows.append({"id": f"p{number}", "domain": ("code", "prose")[number % 2], "prompt": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of targets with a drafter (`save_pair`), and prompts."""
    folder = tmp_path_factory.mktemp("place")
    save_pair(folder, 0.5)
    write_prompts(folder / "reference.jsonl", 160)
    write_prompts(folder / "fresh.jsonl", 160, start=1000)
    return folder


def load(path: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(path=str(path), dtype="float32", device="cpu"))


def command(place: Path, target: str, prompts: str, *more: str) -> list[str]:
    return [
        "watch",
        f"target.path={place / target}",
        "target.device=cpu",
        "bench=jsonl",
        f"bench.prompts={place / prompts}",
        "bench.domains=[]",
        f"watch.drafter={place / 'drafter'}",
        f"decode.max_new_tokens={TOKENS}",
        *more,
    ]


@pytest.fixture(scope="module")
def learnt(place: Path) -> Path:
    path = place / "reference.json"
    given = ["watch.learn=true", f"watch.reference={path}", f"run.root={place}"]
    assert main(command(place, "target", "reference.jsonl", *given)) == 0
    return path


@pytest.fixture
def reference(learnt: Path, in_folder: Path) -> Path:
    """The reference, and an empty working directory."""
    return learnt


def drift(name: str = "watch") -> dict[str, object]:
    content = json.loads(Path(f"outputs/default/{name}/staleness.json").read_text())
    assert isinstance(content, dict)
    return content


def test_watch_says_fine_on_its_target_and_alarms_on_another(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = Reference.read(reference)
    assert learnt.domains == ["code", "prose"] and learnt.depth == 4 and learnt.tokens == TOKENS
    # a copy of the target is nearly always right; answers end in between
    assert learnt.tallies["code"].by_depth(4)[3] > 0.6
    given = f"watch.reference={reference}"
    assert main(command(place, "target", "fresh.jsonl", given, "watch.tolerance=0.4")) == 0
    content = drift()
    assert content["alarms"] == [] and content["verdict"] == "fine"
    assert content["test"] == {
        "tolerance": 0.4,
        "alarm_rate": 0.01,
        "guarantee": "exact",
        "unit": "answers",
        "tokens": TOKENS,
        "passes": 4,
        "temperature": 0.0,
        "draft": {"shape": "chain", "depth": 4, "choices": []},
    }
    capsys.readouterr()
    assert main(command(place, "changed", "fresh.jsonl", given, "watch.name=changed")) == 1
    content = drift("changed")
    assert content["verdict"] == "alarm" and content["alarm_after"] is not None
    shown = capsys.readouterr().out
    assert (
        "alarm: stale: refresh it" in shown
        and shown.splitlines()[-1] == "outputs/default/changed/staleness.json"
    )
    kept = Reference.read(Path("outputs/default/changed/watch.json"))
    # it stops at the alarm
    assert sum(len(tally.answers) for tally in kept.tallies.values()) == content["alarm_after"]


def test_fresh_answers_are_decoded_by_the_rule_of_references(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["decode.temperature=1", "decode.rule=auto", "watch.max_prompts=24"]
    learn = ["watch.learn=true", "watch.reference=auto.json"]
    assert main(command(place, "target", "reference.jsonl", *learn, *sampled)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "decodes by rule match, as references are made; decode.rule is 'auto'" in said
    assert not Path("auto.json").exists()
    content = json.loads(reference.read_text()) | {"temperature": 1.0}
    Path("sampled.json").write_text(json.dumps(content))
    given = ["watch.reference=sampled.json", "decode.rule=block"]
    assert main(command(place, "target", "fresh.jsonl", *given)) == 2
    assert "decode.rule is 'block'" in capsys.readouterr().err
    greedy = [f"watch.reference={reference}", "decode.rule=auto", "watch.max_prompts=12"]
    assert main(command(place, "target", "fresh.jsonl", *greedy)) in (0, 1)  # all accept the same


def test_fresh_answers_are_sampled_as_the_reference_was(
    place: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DecodeConfig] = []
    monkeypatch.setattr(
        Comparison, "add_decoded", lambda self, prompts, folder, target, decode: seen.append(decode)
    )
    content = json.loads(reference.read_text())
    assert content["sampling"]["top_p"] == 1.0
    content |= {"temperature": 1.0, "sampling": content["sampling"] | {"top_p": 0.5, "top_k": 3}}
    Path("sampled.json").write_text(json.dumps(content))
    assert Reference.read(Path("sampled.json")).shown.count("top_k 3, top_p 0.5") == 1
    del content["sampling"]  # as written earlier
    Path("earlier.json").write_text(json.dumps(content))
    for name in ("sampled", "earlier"):
        given = [f"watch.reference={name}.json", "decode.top_p=0.8"]
        assert main(command(place, "target", "fresh.jsonl", *given)) == 2  # nothing was decoded
    assert [(one.temperature, one.top_p, one.top_k) for one in seen] == [(1, 0.5, 3), (1, 0.8, 0)]


def test_a_system_prompt_stands_before_every_prompt(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"watch.reference={reference}", "watch.system='Be brief.'", "watch.max_prompts=12")
    assert main(command(place, "target", "fresh.jsonl", *more)) in (0, 1)
    assert drift()["target"]["system"] == "Be brief."  # type: ignore[index]
    Path("ids.jsonl").write_text('{"id": "a", "tokens": [5, 6]}\n')
    assert main([*command(place, "target", "fresh.jsonl", *more), "bench.prompts=ids.jsonl"]) == 2
    assert "no system prompt can be put before it" in capsys.readouterr().err


def test_records_are_watched_like_answers(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("target", "changed"):
        write_records(place, name, Path(name))
    given = [
        *command(
            place, "target", "fresh.jsonl", f"watch.reference={reference}", "watch.tolerance=0.4"
        )
    ]
    assert main([*given, "watch.records=target"]) == 0
    decoded = main([*given, "watch.name=decoded", "watch.stop=false"])
    assert decoded == 0
    mine, theirs = drift(), drift("decoded")
    assert mine["verdict"] == theirs["verdict"]
    # the same answers, whoever decoded them
    assert settled(mine["domains"]) == settled(theirs["domains"])
    assert main([*given, "watch.records=changed"]) == 1
    assert main([*given, "watch.records=nowhere"]) == 2
    assert "holds no records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (
            "drafter",
            "weights_sha256",
            "0" * 64,
            r"records of another drafter of kind 'distilled': its weights are 000000000000",
        ),
        (
            "draft",
            "shape",
            "tree",
            r"records of drafts with shape tree; the reference's had shape chain",
        ),
        ("draft", "nodes", 9, r"records of drafts with nodes 9; the reference's had nodes 5"),
        ("draft", "adaptive", "confidence", r"records of drafts with adaptive confidence"),
    ],
)
def test_records_of_another_draft_are_refused(
    place: Path,
    reference: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    key: str,
    value: Any,
    message: str,
) -> None:
    write_records(place, "target", Path("records"))
    path = Path("records/records.json")
    facts = json.loads(path.read_text())
    assert facts[part][key] not in ("", None, value)
    facts[part][key] = value
    path.write_text(json.dumps(facts))
    assert (
        main(
            command(
                place,
                "target",
                "fresh.jsonl",
                f"watch.reference={reference}",
                "watch.records=records",
            )
        )
        == 2
    )
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_sampled_records_of_another_rule_are_refused(place: Path, reference: Path) -> None:
    write_records(place, "target", Path("records"))
    path = Path("records/records.json")
    facts = json.loads(path.read_text())
    assert facts["rule"] == "match"
    known = Reference.read(reference)
    path.write_text(json.dumps({**facts, "rule": "block"}))
    assert read_recorded(path.parent, known), "at temperature 0 all rules accept the same"
    with pytest.raises(UserError, match="records by rule 'block'"):
        read_recorded(path.parent, replace(known, temperature=1.0))


def write_records(place: Path, name: str, folder: Path) -> None:
    """What a server with `place / name` would have written about the fresh prompts."""
    from heads.api.checkpoint import load_drafter

    target = load(place / name)
    drafter = load_drafter(place / "drafter", target.info, target.weights, changed_target=True)
    decode = DecodeConfig(max_new_tokens=TOKENS, batch_size=4)
    prompts = load_prompts(place / "fresh.jsonl")
    engine = Engine(target, drafter, decode, details=True)
    log = VerificationLog(
        folder, record_facts(engine, "drafter", checkpoint_hash(place / "drafter")), 10**8
    )
    for done in engine.run(to_requests(prompts, target.tokenizer, decode)):
        prompt = prompts[done.request.index]
        log.completion(prompt.id, prompt.domain, done, 0.0)
        log.sequence(
            prompt.id, prompt.domain, done.request.tokens, done.tokens, 0, 0.0, done.finish
        )
    log.flush()


def settled(value: object) -> object:
    """What does not depend on the order in which answers came: all but the highest evidence on the
    way, to six places."""
    if isinstance(value, dict):
        return {key: settled(part) for key, part in value.items() if key != "evidence"}
    if isinstance(value, list):
        return [settled(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


SCRAPE = """# HELP headstart_verify_passes_total Verifications, of one request each.
headstart_verify_passes_total{{domain="code"}} {passes}
headstart_accepted_drafts_total{{domain="code"}} {accepted}
headstart_tau{{domain="code"}} 3.1
"""


def test_counters_of_a_server_are_watched_as_totals(
    place: Path,
    reference: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[bool] = []

    def opened(*given: Any, **more: Any) -> StageFolder:
        folder = open_folder(*given, **more)
        held.append(folder.held is not None)
        return folder

    monkeypatch.setattr(watch, "open_folder", opened)
    rate = Reference.read(reference).tallies["code"].acceptance
    Path("scrapes").mkdir()
    # the server was started again in between
    for number, passes in enumerate((200, 900, 150, 800)):
        Path(f"scrapes/{number}.prom").write_text(
            SCRAPE.format(passes=passes, accepted=int(rate * passes))
        )
    given = command(
        place, "target", "fresh.jsonl", f"watch.reference={reference}", "watch.metrics=[scrapes]"
    )
    assert main(given) == 0
    content = drift()
    assert content["test"]["guarantee"] == "normal"  # type: ignore[index]
    assert content["domains"]["code"]["fresh"] == pytest.approx(rate, abs=0.02)  # type: ignore[index]
    Path("scrapes/9.prom").write_text(SCRAPE.format(passes=9000, accepted=int(0.4 * rate * 9000)))
    assert main(given) == 1
    assert held == [True, True], "a repeated watch writes like the first one"
    Path("other.txt").write_text("nothing_total 5\n")
    assert main([*given[:-1], "watch.metrics=[other.txt]"]) == 2
    assert "has no counters of a known engine" in capsys.readouterr().err


def test_a_running_server_is_named_and_compared_with_the_target(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = Reference.read(reference).tallies["code"].acceptance
    tokenizer = load(place / "target").tokenizer
    mine = tokenizer.encode(PROBE, add_special_tokens=False)
    given = ["watch", f"watch.drafter={place / 'drafter'}", f"watch.reference={reference}"]
    given += ["watch.every=0.02", "watch.seconds=1", "watch.window=100"]
    looks = count(1)

    def show() -> str:
        passes = 200 * next(looks)
        return SCRAPE.format(passes=passes, accepted=int(rate * passes))

    answers = deque([{"tokens": mine}, {"tokens": [3, *mine]}, {"tokens": [3, *mine]}])
    with serving(card={"root": str(place / "target")}, tokenize=answers) as stub:
        stub.show = show  # type: ignore[method-assign]
        given.append(f"watch.metrics=[{stub.base}]")
        assert main(given) == 0
        assert drift()["target"] == {"id": str(place / "target")}
        for more in ([], [f"target.path={place / 'changed'}"]):  # the reference's, the given one's
            assert main([*given, *more, "watch.name=other"]) == 2
            assert "has another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["away", "plain"])
def test_what_was_seen_of_a_server_that_goes_is_written(
    end: str, place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """away: it shows an error page; plain: it was started again without its drafter."""
    rate = Reference.read(reference).tallies["code"].acceptance
    given = ["watch", f"watch.drafter={place / 'drafter'}", f"watch.reference={reference}"]
    given += ["watch.every=0.01", "watch.seconds=60", "watch.window=100", "watch.patience=0.05"]
    given += ["watch.alarm_rate=0.2", "watch.stop=false"]

    def watch(name: str, share: float, windows: int) -> int:
        looks = count(1)

        def show() -> str:
            look = next(looks)
            if look <= windows + 1:
                return SCRAPE.format(passes=200 * look, accepted=int(share * rate * 200 * look))
            if end == "away":
                return "<html>[Back soon]</html>"
            return f'headstart_requests_total{{outcome="stop"}} {look}\n'

        with serving() as stub:
            stub.show = show  # type: ignore[method-assign]
            told = [f"watch.metrics=[{stub.base}/metrics]", f"watch.name={name}"]
            return main([*given, *told])

    words = {"away": "has shown no counters for", "plain": "was started again without speculation"}
    assert watch("calm", 1.0, 6) == 2
    content, said = drift("calm"), capsys.readouterr()
    assert content["domains"]["code"]["answers"] == 6 and content["alarms"] == []  # type: ignore[index]
    early = [one for one in content["remarks"] if one.startswith("The watch ended early.")]  # type: ignore[attr-defined]
    assert len(early) == 1 and words[end] in early[0] and early[0] in said.out
    assert words[end] in said.err
    assert "The result so far is in 'outputs/default/calm/staleness.json'." in said.err
    assert json.loads(Path("outputs/default/calm/run.json").read_text())["state"] == "running"
    assert watch("fallen", 0.2, 25) == 1  # the alarm is what counts
    assert drift("fallen")["alarms"] and len(drift("fallen")["remarks"]) == 2  # type: ignore[arg-type]
    assert watch("nothing", 1.0, 0) == 2
    assert not Path("outputs/default/nothing").exists()


def test_what_was_seen_until_ctrl_c_is_written(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    rate = Reference.read(reference).tallies["code"].acceptance
    given = ["watch", f"watch.drafter={place / 'drafter'}", f"watch.reference={reference}"]
    given += ["watch.every=0.01", "watch.seconds=120", "watch.window=100", "watch.stop=false"]
    # a shell starts what runs in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def watch(name: str, windows: int) -> int:
        looks = count(1)

        def show() -> str:
            look = next(looks)
            if look == windows + 1:
                os.kill(os.getpid(), signal.SIGINT)
            return SCRAPE.format(passes=200 * look, accepted=int(rate * 200 * look))

        with serving() as stub:
            stub.show = show  # type: ignore[method-assign]
            return main([*given, f"watch.metrics=[{stub.base}/metrics]", f"watch.name={name}"])

    assert watch("calm", 6) == 130
    content = drift("calm")
    assert content["domains"]["code"]["answers"] >= 5 and content["alarms"] == []  # type: ignore[index]
    assert "The watch ended early. It was interrupted." in content["remarks"]  # type: ignore[operator]
    assert "calm/staleness.json" in capsys.readouterr().out
    assert watch("nothing", 0) == 130 and not Path("outputs/default/nothing").exists()


VLLM_SCRAPE = """vllm:spec_decode_num_drafts_total{{engine="0"}} {passes}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
"""
BY_POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'


def test_counters_of_vllm_are_watched_window_by_window(place: Path, reference: Path) -> None:
    known = Reference.read(reference)
    rate = known.for_counters("").tallies["mixed"].acceptance

    def write(folder: str, share: float) -> str:
        Path(folder).mkdir()
        for number in range(1, 61):
            passes = 300 * number
            reached = share * rate / 4 * passes
            text = VLLM_SCRAPE.format(passes=passes, accepted=4 * reached)
            text += "".join(BY_POSITION.format(place=at, count=reached) for at in range(4))
            Path(f"{folder}/{number:03}.prom").write_text(text)
        return f"watch.metrics=[{folder}]"

    given = command(place, "target", "fresh.jsonl", f"watch.reference={reference}")
    assert main([*given, write("same", 1.0)]) == 0
    test = drift()["test"]
    assert isinstance(test, dict) and (test["unit"], test["guarantee"]) == ("windows", "exact")
    assert drift()["remarks"] == []
    assert main([*given, write("fallen", 0.4), "watch.name=fallen"]) == 1
    content = drift("fallen")
    assert content["alarms"] == ["mixed", "all"] and content["alarm_after"] < 60  # type: ignore[operator]
    mixed = content["domains"]["mixed"]  # type: ignore[index]
    assert mixed["by_depth"] == pytest.approx([0.4 * rate / 4] * 4)
    assert main([*given, "watch.metrics=[fallen]", "watch.domain=code", "watch.name=code"]) == 1
    assert main([*given, "watch.metrics=[fallen]", "watch.domain=poems"]) == 2


def test_the_gauge_of_sglang_has_no_guarantee(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = Reference.read(reference).for_counters("").tallies["mixed"].acceptance
    Path("gauge").mkdir()
    for number in range(1, 41):
        tokens = 2000 * number
        Path(f"gauge/{number:03}.prom").write_text(
            f"sglang:spec_accept_length {1 + rate}\nsglang:generation_tokens_total {tokens}\n"
        )
    given = command(place, "target", "fresh.jsonl", f"watch.reference={reference}")
    assert main([*given, "watch.metrics=[gauge]"]) == 0
    content, said = drift(), capsys.readouterr().out
    test, remarks = content["test"], content["remarks"]
    assert isinstance(test, dict) and (test["unit"], test["guarantee"]) == ("windows", "none")
    assert isinstance(remarks, list) and len(remarks) == 2
    assert all(one in said for one in ("which they are not", *remarks))
    assert "Depth unknown" in remarks[1]


def test_a_card_alone_is_a_reference_too(place: Path, in_folder: Path, reference: Path) -> None:
    known = Reference.read(reference)
    content = example_report()
    entry = content["drafters"][0]
    rates = {name: tally.acceptance for name, tally in known.tallies.items()}
    mean = sum(rates.values()) / 2
    entry["draft"] |= {
        "shape": "chain",
        "depth": 4,
        "nodes": 5,
        "weights_sha256": known.drafter["weights_sha256"],
    }
    entry |= {"tau": 1.0 + mean, "tau_ci95": [0.9 + mean, 1.1 + mean], "verify_passes": 600}
    entry["acceptance"] = {"unconditional": [mean / 4] * 4, "conditional": [1.0] * 4}
    entry["domains"] = {
        name: {
            "tau": 1.0 + rate,
            "tau_ci95": [0.85 + rate, 1.15 + rate],
            "tar": 0.8,
            "speedup": 1.5,
        }
        for name, rate in rates.items()
    }
    content["drafters"] = [entry]
    content["settings"] |= {"temperature": 0.0, "max_new_tokens": TOKENS}
    Path("card").mkdir()
    write_report(content, Path("card/report.json"))
    given = ("watch.reference=card", "watch.tolerance=0.2")
    assert main(command(place, "target", "fresh.jsonl", *given)) == 0
    assert drift()["test"]["guarantee"] == "normal"  # type: ignore[index]
    assert main(command(place, "changed", "fresh.jsonl", *given)) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["watch.drafter="], "watch.drafter is missing"),
        (["watch.drafter=nowhere"], "there is no drafter 'nowhere'"),
        (["watch.drafter=ngram"], "has no trained weights"),
        (["watch.reference=nowhere"], "there is no file or folder 'nowhere'"),
        (["watch.reference=."], "has neither watch.json nor report.json"),
        (["watch.reference=broken.json"], "is not a reference of format 1"),
        (["watch.tolerance=2"], "watch.tolerance must lie between 0 and 1"),
        (["watch.records=a", "watch.metrics=[b]"], "are both given"),
    ],
)
def test_what_cannot_be_watched_is_one_clear_error(
    place: Path, in_folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    Path("broken.json").write_text('{"format": 1, "stage": "watch"}')
    assert main([*command(place, "target", "fresh.jsonl"), *more]) == 2
    assert said in capsys.readouterr().err
    assert not Path("outputs/default/watch").exists()


def test_a_reference_of_another_drafter_or_of_other_domains_is_refused(
    place: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(reference.read_text())
    Path("other.json").write_text(
        json.dumps(content | {"drafter": {"kind": "distilled", "weights_sha256": "0"}})
    )
    assert main(command(place, "target", "fresh.jsonl", "watch.reference=other.json")) == 2
    assert "was measured with another drafter" in capsys.readouterr().err
    Path("poems.jsonl").write_text('{"id": "a", "domain": "poems", "prompt": "hello"}\n')
    given = command(place, "target", "fresh.jsonl", f"watch.reference={reference}")
    assert main([*given, "bench.prompts=poems.jsonl"]) == 2
    assert (
        "no fresh answer is of a domain that the reference knows (code, prose); found: 'poems'"
        in capsys.readouterr().err
    )
    content["domains"]["code"]["answers"][0] = [10**6]
    Path("wrong.json").write_text(json.dumps(content))
    assert main([*given[:-1], "watch.reference=wrong.json"]) == 2
    assert "is not a reference of format 1" in capsys.readouterr().err
