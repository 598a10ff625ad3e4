"""Sets of answers: nested, made once, flattest first, continued from few prompts and from refused
tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE, file_sha256
from scripts.evidence import answer_sets
from scripts.evidence.answer_sets import AnswerSets, flatness, rows_in, write_set
from scripts.evidence.small_targets import Bench, Place
from tests.scripts.evidence.places import micro_place
from train.data.answers import read_answers
from train.data.pack import PackedData
from train.feedback.build import read_lines

POOL = 36


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return micro_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def sets(place: Place, tmp_path_factory: pytest.TempPathFactory) -> AnswerSets:
    bench = Bench(place, tmp_path_factory.mktemp("work"), 1, 2)
    return AnswerSets(bench, POOL)


def names(sets: AnswerSets, answers: Path) -> list[str]:
    return [row["id"] for row in sets.rows(answers)]


def test_sets_nest_in_one_mixture_of_given_and_written_prompts(sets: AnswerSets) -> None:
    small, large = names(sets, sets.first(12)), names(sets, sets.first(POOL))
    assert len(small) == 12
    assert large[:12] == small
    assert len(set(large)) == POOL
    own = [name for name in large if name.startswith("train")]
    assert 0 < len(own) <= 24
    assert any(name.startswith("variation") for name in small)
    prompts = [tuple(line["tokens"]) for line in read_lines([sets.prompts_of(sets.first(POOL))])]
    assert len(set(prompts)) == POOL


def test_a_set_is_trained_on_like_any_answers(sets: AnswerSets) -> None:
    answers = sets.first(12)
    data = PackedData.from_manifest(answers, sets.info, 1024)
    assert data.report.documents == 12
    counts = read_answers(answers)["counts"]
    assert counts["done"] == 12
    assert counts["tokens"] == int(data.supervised.sum())


def test_what_is_made_is_not_made_again(sets: AnswerSets, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sets.first(POOL)
    before = file_sha256(first / MANIFEST_FILE)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    again = AnswerSets(sets.bench, POOL)
    for name in ("run_on_target", "write_variations", "write_set"):
        monkeypatch.setattr(answer_sets, name, refuse)
    assert again.first(POOL) == first
    assert file_sha256(first / MANIFEST_FILE) == before
    with pytest.raises(AssertionError, match="made again"):
        again.first(POOL - 1)


def test_a_set_beyond_the_pool_continues_it_with_prompts_that_the_target_writes_next(
    sets: AnswerSets,
) -> None:
    whole = names(sets, sets.first(POOL))
    larger = names(sets, sets.first(POOL + 6))
    assert larger[:POOL] == whole and len(set(larger)) == POOL + 6
    further = read_lines([sets.prompts_of(sets.first(POOL + 6))])
    prompts = [tuple(line["tokens"]) for line in further]
    assert len(set(prompts)) == POOL + 6
    assert all(name.startswith("variation") for name in larger[POOL:])


def test_prompts_of_the_target_that_no_pool_has_come_after_it(
    sets: AnswerSets, tmp_path: Path
) -> None:
    """With a pool smaller than the target's own prompts, the others come next."""
    few = AnswerSets(Bench(sets.bench.place, tmp_path, 1, 2), 4)
    own = [line["id"] for line in few.ordered(4)]
    assert len(own) == 9 and all(name.startswith("train") for name in own)  # 5 with a spare one
    assert own[:5] == [line["id"] for line in few.ordered(0)]


def test_fewer_answers_than_are_needed_are_told(sets: AnswerSets) -> None:
    with pytest.raises(UserError, match=rf"12 different prompts .* and {POOL} answers are needed"):
        answer_sets.at_least(POOL, sets.first(12))


def test_a_target_that_writes_no_new_prompts_is_told(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(target: object, pairs: object, out: Path, *_: object) -> int:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
        return 0

    monkeypatch.setattr(answer_sets, "write_variations", nothing)
    with pytest.raises(UserError, match=r"0 prompts are written from .* 14 are needed"):
        AnswerSets(Bench(place, tmp_path, 1, 2), POOL).first(1)


@pytest.mark.parametrize("most", [4096, 100, 1])
def test_flatness_is_the_mean_cosine_with_the_uniform_distribution(
    sets: AnswerSets, place: Place, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Against transformers' own pass over each document, and torch's cosine, token by token; in
    batches of any size."""
    monkeypatch.setattr(answer_sets, "BATCH_TOKENS", most)
    model = AutoModelForCausalLM.from_pretrained(place.target, dtype=torch.float32).eval()
    rows = list(sets.rows(sets.first(12)))
    expected = []
    for row in rows:
        with torch.no_grad():
            chances = model(torch.tensor([row["tokens"]])).logits[0].softmax(-1)
        flat = torch.ones(chances.shape[-1])
        places = [at - 1 for low, high in row["spans"] for at in range(low, high)]
        found = [torch.cosine_similarity(chances[at], flat, dim=0).item() for at in places]
        expected.append(np.mean(found))
    found = flatness(sets.bench.model, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(set(np.round(found, 6))) > 6


def test_the_flattest_documents_are_kept_in_their_order(sets: AnswerSets) -> None:
    whole = sets.first(12)
    rows = list(sets.rows(whole))
    flat = flatness(sets.bench.model, rows)
    kept = names(sets, sets.flattest(whole, 5))
    worst = sorted(flat)[-5]
    assert kept == [row["id"] for row, value in zip(rows, flat, strict=True) if value >= worst]


def test_prompts_are_written_from_a_few(sets: AnswerSets) -> None:
    few = sets.first(3)
    found = names(sets, sets.from_few(3, 10))
    assert len(found) == 10
    assert found[:3] == names(sets, few)
    assert all(name.startswith("variation") for name in found[3:])


def test_shards_hold_no_more_rows_than_they_may(
    sets: AnswerSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_sets, "SHARD_ROWS", 5)
    source = sets.first(12)
    write_set(tmp_path / "set", sets.rows(source), source)
    assert [entry["rows"] for entry in read_answers(tmp_path / "set")["shards"]] == [5, 5, 2]
    assert names(sets, tmp_path / "set") == names(sets, source)
    assert rows_in(tmp_path / "set") == 12
