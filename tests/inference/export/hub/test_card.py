"""The model card says what the report says, and its code block runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.medusa import Config as MedusaConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.rules.names import DISTRIBUTION, LOSSY, RULES, TEXT, promise
from inference.export.hub.card import card, draft_code
from inference.export.hub.config import PushConfig
from inference.export.layouts.folder import ExportNotes
from inference.measure.config import BenchConfig
from inference.measure.prompts import Prompt
from inference.measure.run import draft_details, measure
from inference.report.model import DraftFacts, parse_report
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.export.hub.example_folder import CONFIG, build, report_of
from tests.inference.export.hub.stand_in import HubStandIn, loopback_hub
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import save_random_target

hub = pytest.fixture(loopback_hub)
DIGEST = "d" * 64
ABOUT = PushConfig("someone/eagle3-for-target", license="apache-2.0", tags=("code",))


def written(
    report: dict[str, Any] | None = None, about: PushConfig = ABOUT, **config: Any
) -> tuple[dict[str, Any], str]:
    """(front matter, text) of a card."""
    text = card(
        {"greedy": parse_report(report or report_of(DIGEST))},
        DIGEST,
        {**CONFIG, **config},
        about,
        ["speedup.png"],
    )
    _, matter, body = text.split("---\n", 2)
    return yaml.safe_load(matter), body


@pytest.mark.parametrize("shape", ["dynamic", "dartree"])
def test_the_code_drafts_the_measured_number_of_nodes(shape: str) -> None:
    facts = DraftFacts(shape=shape, depth=6, nodes=26, weights_sha256=DIGEST)
    assert draft_code(facts, "match") == f'shape="{shape}", depth=6, nodes=26'


@pytest.mark.parametrize(
    ("decode", "label"),
    [
        (DecodeConfig(shape="dynamic", nodes=26, width=5), "dynamic 4 (26 nodes)"),
        (
            DecodeConfig(shape="dartree", nodes=26, width=12, candidates=32, depth_penalty=0.5),
            "dartree 4 (26 nodes)",
        ),
        (DecodeConfig(depth=8, adaptive="confidence"), "chain 8 (confidence 0.3)"),
        (
            DecodeConfig(depth=2, adaptive="throughput", adaptive_lengths=(0, 2)),
            "chain 2 (throughput; lengths 0, 2)",
        ),
    ],
)
def test_the_code_is_the_measured_draft(decode: DecodeConfig, label: str) -> None:
    tree = decode.tree()
    sizes: dict[str, Any] = {"depth": tree.max_depth, "nodes": tree.num_nodes}
    facts = DraftFacts(shape=decode.shape, **sizes, **draft_details(decode))
    assert facts.label == label
    again = eval(f"DecodeConfig({draft_code(facts, 'match')})", {"DecodeConfig": DecodeConfig})
    assert again.adaptive_settings() == decode.adaptive_settings()
    assert replace(again, adaptive_threshold=decode.adaptive_threshold) == decode


def test_what_a_card_quotes_is_text() -> None:
    hostile = "x` <img src=y onerror=alert(1)> |\n# z"
    about = PushConfig("someone/a", datasets=(hostile,), base_model=hostile)
    matter, body = written(about=about, kind=hostile, target={**CONFIG["target"], "id": hostile})
    assert matter["base_model"] == hostile
    assert "\n# z" not in body
    blocks = re.sub(r"(?s)^```.*?^```$", "", body, flags=re.MULTILINE)
    spans = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", blocks)
    assert "<img" not in spans and "onerror" in body


def test_a_command_does_not_end_its_block() -> None:
    hostile = "vllm serve x\n```\n<img src=y onerror=alert(1)>\n````"
    report = {"greedy": parse_report(report_of(DIGEST))}
    engines = {"vllm": ExportNotes(serve=hostile)}
    text = card(report, DIGEST, CONFIG, PushConfig("someone/a"), engines=engines)
    (block,) = re.findall(r"(?s)^(`{5}bash\n.*?^`{5}$)", text, flags=re.MULTILINE)
    assert hostile in block and text.count("<img") == 1


def test_how_the_measured_target_was_loaded_is_said() -> None:
    assert "quantization" not in written()[1]
    loaded = report_of(DIGEST, target={"loading": {"quantization": "torchao-int8"}})
    text = written(loaded)[1]
    assert "makes someone/target-1b (quantization=torchao-int8) 1.80 times as fast" in text
    assert "parameters, float32, quantization=torchao-int8, revision" in text


def test_what_an_export_notes_stands_beside_its_command() -> None:
    report, note = {"greedy": parse_report(report_of(DIGEST))}, "weights are nvfp4 | all"
    notes = ExportNotes(serve="vllm serve x", notes=[note])
    text = card(report, DIGEST, CONFIG, PushConfig("someone/a"), engines={"vllm": notes})
    assert text.split("vllm serve x\n```\n\n")[1].startswith(r"- weights are nvfp4 \| all")
    assert "weights in `model.safetensors`, unquantised; no engine below was measured" in text
    assert "unquantised" not in written()[1]


def test_a_card_has_the_command_of_every_version_of_the_engine() -> None:
    report = {"greedy": parse_report(report_of(DIGEST))}
    notes = ExportNotes(serve="vllm serve x", serve_as_custom_class="PYTHONPATH=vllm vllm serve x")
    text = card(report, DIGEST, CONFIG, PushConfig("someone/a"), engines={"vllm": notes})
    old, new = text.split("\nvllm, up to version 0.32:\n\n```bash\n")[1].split(
        "\nvllm, from version 0.33 on, with the same files:\n\n```bash\n"
    )
    assert old.splitlines()[1:] == ["vllm serve x", "```"]
    assert new.splitlines()[:2] == ["PYTHONPATH=vllm vllm serve x", "```"]
    plain = card(report, DIGEST, CONFIG, ABOUT, engines={"vllm": ExportNotes(serve="vllm serve x")})
    assert "\nvllm:\n" in plain and "version 0.3" not in plain


def test_the_reports_that_the_numbers_are_from_are_named() -> None:
    one = parse_report(report_of(DIGEST))
    assert "Every measured number above is from `report.json`, beside this card." in written()[1]
    text = card({"greedy": one, "sampled": one}, DIGEST, CONFIG, ABOUT)
    assert "above is from `report.json`, `report_2.json`, beside this card." in text


def test_a_weak_domain_is_named_where_its_report_shows_one() -> None:
    assert "tau is lower on" not in written()[1], "its interval overlaps with that of all prompts"
    weak = {"tau": 2.2, "tau_ci95": [2.0, 2.5], "tar": 0.6, "speedup": 1.5}
    shown = report_of(DIGEST, {"domains": {"explain": weak}})
    text = written(shown)[1]
    assert "- tau is lower on *explain* (2.20 [2.00, 2.50]) than on all prompts (2.75 [2" in text
    single = report_of(DIGEST, {"domains": {"explain": weak | {"tau_ci95": [2.2, 2.2]}}})
    assert "tau is lower on" not in written(single)[1]
    elsewhere = report_of(DIGEST, {"tau": 9.0, "tau_ci95": [2.8, 9.5]}, device={"name": "Other"})
    reports = {"here": parse_report(report_of(DIGEST)), "there": parse_report(elsewhere)}
    both = card(reports, DIGEST, CONFIG, ABOUT)
    assert [line[-9:] for line in both.splitlines() if "tau is lower on" in line] == ["; there)."]


def test_front_matter() -> None:
    matter, _ = written()
    assert matter == {
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["headstart", "speculative-decoding", "draft-model", "eagle3", "code"],
        "base_model": "someone/target-1b",
        "license": "apache-2.0",
    }


def test_a_licence_is_never_made_up_and_a_local_target_is_no_hub_id(tmp_path: Path) -> None:
    matter, _ = written(
        about=PushConfig("someone/x"), target={**CONFIG["target"], "id": str(tmp_path)}
    )
    assert "license" not in matter and "base_model" not in matter
    matter, _ = written(
        about=PushConfig("someone/x", base_model="meta/llama"),
        target={**CONFIG["target"], "id": str(tmp_path)},
    )
    assert matter["base_model"] == "meta/llama"


def test_numbers_are_the_reports() -> None:
    _, text = written()
    assert "| eagle3 | chain 4 | 2.75 [2.60, 2.90] | 0.72 | 900.0 | 1.80 [1.70, 1.90] |" in text
    assert "| eagle3 | 3.00 [2.80, 3.20], 0.75, 2.00x | 2.50 [2.30, 2.70], 0.69, 1.60x |" in text
    assert "| eagle3 | 0.70 (0.70) | 0.50 (0.71) | 0.35 (0.70) | 0.20 (0.57) |" in text
    assert "ngram" not in text  # other drafters of the same report stay out
    assert "- command: `headstart measure`" in text
    assert "![speedup](speedup.png)" in text
    assert CONFIG["target"]["tokenizer_hash"] in text and DIGEST in text
    digits = set(re.findall(r"\d+\.\d+", text))
    changed = written(report_of(DIGEST, {"tau": 2.22, "tau_ci95": [2.11, 2.33]}))[1]
    assert set(re.findall(r"\d+\.\d+", changed)) - digits == {"2.22", "2.11", "2.33"}


def test_a_gain_is_claimed_only_where_the_measurement_shows_one() -> None:
    target = CONFIG["target"]["id"]
    claim = f"**eagle3** makes {target} 1.80 times as fast at"
    assert claim in written()[1]
    uncertain = report_of(DIGEST, {"speedup": 1.4, "speedup_ci95": [0.82, 2.31]})
    text = written(uncertain)[1]
    assert "no difference shown against plain decoding at temperature 0 (1.40 times" in text
    assert "| 1.40 [0.82, 2.31], no difference shown |" in text
    assert "times as fast" not in text


def test_a_disturbed_machine_is_said() -> None:
    report = report_of(DIGEST)
    repeats = {"measured": 4, "kept": [0, 2], "limit": 0.1, "above_tau": []}
    report["repeats"] = {**repeats, "spread": {"baseline": 0.02, "eagle3": 0.34}}
    text = written(report)[1]
    assert "**The machine was disturbed: the repeats of 'eagle3' differ by 34%" in text
    report["repeats"]["spread"]["eagle3"] = 0.04
    text = written(report)[1]
    assert "The machine was disturbed" not in text
    assert "- repeats: 4, of which the 2 fastest count, which differ by at most 4% (eagle3)" in text


def test_the_statement_on_losslessness_follows_the_measurement() -> None:
    assert "The text does not change" in written()[1]
    wrong = report_of(DIGEST, {"lossless": {"identical": 60, "mismatches": 4}})
    with pytest.raises(UserError, match="4 measured sequences differ from plain decoding"):
        written(wrong)
    labelled = written(wrong, PushConfig("someone/x", allow_mismatches=True))[1]
    assert "**Not lossless.** 4 measured sequences" in labelled
    assert "60/64, 4 MISMATCHES" in labelled
    assert "The text does not change" not in labelled


@pytest.mark.parametrize("rule", RULES)
def test_the_card_states_what_the_measured_rule_promises(rule: str) -> None:
    """Lossy: refused, or labelled. Distribution kept: the other texts are no mismatches, and the
    card claims no more."""
    counts = {"identical": 0, "mismatches": 64} if rule != "match" else {}
    report = report_of(DIGEST, {"lossless": counts})
    report["settings"] |= {"rule": rule, "temperature": 1.0}
    kept = promise(rule, 1.0)
    if kept == LOSSY:
        with pytest.raises(UserError, match=f"measured with rule {rule}, which is lossy"):
            written(report)
    text = written(report, PushConfig("someone/x", allow_mismatches=kept == LOSSY))[1]
    assert ("**Not lossless.**" in text) == (kept == LOSSY)
    assert ("The text does not change" in text) == (kept == TEXT)
    assert ("but is not the text that plain decoding gives" in text) == (kept == DISTRIBUTION)
    assert ("MISMATCH" in text) is False
    assert (f'rule="{rule}"' in text) == (rule != "match")
    assert f"rule `{rule}`" in text


def test_a_report_that_lacks_the_drafter_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"greedy did not measure this drafter.*it measured: eagle3, ngram"
    ):
        written(report_of("e" * 64))


def test_the_code_on_the_card_runs(
    tmp_path: Path,
    hub: HubStandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a real measurement: push folder, card, and the card's own lines, which fetch the drafter
    from a stand-in of the Hub."""
    path = save_random_target(tmp_path / "target", tiny_tokenizer("marked"))
    target = TargetModel.load(TargetConfig(path=str(path)))
    drafter = new_drafter("medusa", MedusaConfig(num_heads=2), target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "best", target.info)
    tree = DecodeConfig(shape="tree", choices=((0,), (1,), (0, 0)), max_new_tokens=8)
    prompts = [Prompt(str(i), "x", tokens=(5, 6, 7 + i)) for i in range(3)]
    arm = Arm("medusa", drafter, tree, str(tmp_path / "best"))
    measure(BenchConfig(warmup_prompts=1, repeats=1), target, [arm], prompts, tmp_path / "measured")
    folder = build(
        tmp_path / "best",
        [tmp_path / "measured"],
        tmp_path / "hub",
        PushConfig(repo="someone/medusa", base_model=str(path)),
    )
    text = (folder / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    assert 'DecodeConfig(shape="tree", choices=((0,), (1,), (0, 0)))' in code
    hub.repos["someone/medusa"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    assert names["answer"].completion.tokens and names["engine"].drafter.kind == "medusa"
    assert capsys.readouterr().out.strip()
