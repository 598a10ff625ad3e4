"""What records say of tokens, against a walk over the passes themselves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from heads.api.config import LARGEST_DEPTH
from heads.api.errors import UserError
from inference.decoding.requests import Completion
from tests.train.feedback.recorded import decoded, name_of, target, tokens_of, write_records
from train.feedback.evidence import TokenEvidence, Verification, VerificationRecords, evidence_of
from train.feedback.weights import WeightTotals


def walked(one: Completion) -> TokenEvidence:
    """The same from the passes: token by token, each with the pass that committed it."""
    tokens, root = tokens_of(one), len(one.request.tokens)
    found = TokenEvidence.nothing(len(tokens))
    for record in one.passes:
        details = record.details
        assert details is not None
        found.passes += 1
        found.roots[root] = record.accepted + 1 if record.rejected else -1
        for place in range(1, record.committed + 1):
            at = root + place
            found.committed += 1
            if place <= record.accepted:
                assert tokens[at] == details.drafted[place - 1]
                log_q, log_p = details.log_q[place - 1], details.log_p[place - 1]
            elif record.rejected:
                assert tokens[at] == details.pick != details.drafted[place - 1]
                found.failed[at] = True
                log_q, log_p = details.pick_log_q, details.pick_log_p
            else:
                continue
            found.depth[at] = place
            found.chance[at] = 0.0 if log_q is None else min(1.0, math.exp(log_q - log_p))
        root += record.committed
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "quantized_self"])
def test_every_token_has_the_depth_and_chance_of_the_pass_that_tested_it(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    completions = decoded(kind, temperature)
    records = VerificationRecords(write_records(tmp_path, completions, kind), target().info)
    errors = 0
    for one in completions:
        assert len(records.of(name_of(one))) == len(one.passes)
        tokens = np.array(tokens_of(one), np.int32)
        found, wanted = evidence_of(tokens, records.of(name_of(one))), walked(one)
        for part in ("depth", "failed", "roots"):
            np.testing.assert_array_equal(getattr(found, part), getattr(wanted, part), part)
        np.testing.assert_allclose(found.chance, wanted.chance, rtol=1e-5)
        assert (found.passes, found.committed, found.unfit) == (wanted.passes, wanted.committed, 0)
        errors += int(found.failed.sum())
    assert errors, "nothing was ever refused"


def test_records_of_another_answer_to_the_same_prompt_say_nothing(tmp_path: Path) -> None:
    completions = decoded("eagle3")
    records = VerificationRecords(write_records(tmp_path, completions, "eagle3"), target().info)
    tokens = np.array(tokens_of(completions[0]), np.int32)
    tokens[len(completions[0].request.tokens) + 1 :] += 1
    found = evidence_of(tokens, records.of(name_of(completions[0])))
    assert found.passes == 0 and found.unfit == len(completions[0].passes)
    assert not found.failed.any() and not found.depth.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_that_weighs_has_used_up_the_chance_of_what_it_refused(temperature: float) -> None:
    row: Verification = {
        "position": 3,
        "drafted": [5],
        "accepted": 0,
        "error_depth": 1,
        "pick": 7,
        "log_q": [-0.1],
        "log_p": [-0.2],
        "pick_log_q": -1.0,
        "pick_log_p": -0.5,
        "temperature": temperature,
    }
    tokens = np.array([1, 1, 1, 1, 7, 1], np.int32)
    chances = {
        rule: float(evidence_of(tokens, [row], rule).chance[4]) for rule in ("match", "block")
    }
    assert chances["match"] == pytest.approx(np.exp(-0.5))
    assert chances["block"] == (0.0 if temperature > 0 else chances["match"])


def test_no_records_say_nothing(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "nowhere"):
        records = VerificationRecords(folder, target().info)
        assert records.of("x") == [] and records.files == []


def test_redacted_records_still_say_where_drafts_failed(tmp_path: Path) -> None:
    completions = decoded("eagle3")
    open_ = VerificationRecords(
        write_records(tmp_path / "open", completions, "eagle3"), target().info
    )
    hidden = VerificationRecords(
        write_records(tmp_path / "hidden", completions, "eagle3", redact=True), target().info
    )
    for one in completions:
        tokens = np.array(tokens_of(one), np.int32)
        a, b = (
            evidence_of(tokens, open_.of(name_of(one))),
            evidence_of(tokens, hidden.of(name_of(one))),
        )
        np.testing.assert_array_equal(a.failed, b.failed)
        np.testing.assert_array_equal(a.chance, b.chance)


def test_records_of_another_tokenizer_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    folder = write_records(tmp_path, decoded("eagle3"), "eagle3")
    facts = folder / "records.json"
    plain = facts.read_text()
    facts.write_text(plain.replace(target().info.tokenizer_hash, "another"))
    with pytest.raises(UserError, match="whose tokenizer differs from that of"):
        VerificationRecords(folder, target().info)
    facts.write_text(plain)
    shard = next(folder.glob("verifications-*.parquet"))
    pq.read_table(shard)
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged shard of verifications"):
        VerificationRecords(folder, target().info)


def test_drafts_of_the_largest_depth_are_counted() -> None:
    """`decode.depth` goes to 1,024. Here the last draft is refused."""
    found = TokenEvidence.nothing(LARGEST_DEPTH + 1)
    found.depth[1:] = np.arange(1, LARGEST_DEPTH + 1)
    found.failed[-1] = True
    found.roots[0] = LARGEST_DEPTH
    totals = WeightTotals()
    totals.add("code", found, np.ones(len(found.depth), bool))
    assert totals.deepest == LARGEST_DEPTH and totals.errors == 1
    assert totals.domains["code"].failed_roots[LARGEST_DEPTH] == 1
    assert totals.going_on()[1] == 1.0
