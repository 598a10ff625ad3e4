"""Adapters per domain: low-rank updates of one base, trained on one domain's answers and kept
apart."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from heads.api.checkpoint import load_drafter, read_config
from heads.api.errors import UserError
from inference.integrity import require_unchanged
from inference.manifest import checkpoint_hash, file_entry, write_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train.micro_run import prepare, settings
from train.data.pack import PackedData
from train.features.config import FeaturesConfig
from train.features.store.writer import StoreJob, write_features
from train.refresh import RefreshConfig, merge_updates
from train.run import train
from train.state import read_snapshot

HEAD = {"from_target_layers": (0, 1)}
DOMAINS = ("chat", "code")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and prompts of two domains in turns, and a base in place/base/best."""
    folder = prepare(tmp_path_factory.mktemp("domains"))
    answers = folder / "answers"
    table = pq.read_table(answers / "shard.parquet")
    rows = table.to_pylist()
    for row in rows:
        row["domain"] = DOMAINS[row["index"] % 2]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), answers / "shard.parquet")
    target = TargetModel.load(TargetConfig(str(folder / "target")))
    shards = [file_entry(answers, "shard.parquet", rows=len(rows))]
    content = {"target": target.info.to_dict(), "counts": {}, "shards": shards}
    write_manifest(answers, "generate", content)
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for number, prompt in enumerate(prompts):
        prompt["domain"] = DOMAINS[number % 2]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    train(
        out=folder / "base",
        **settings(folder, kind="distilled", head=HEAD, max_steps=4, eval_every=4, lr=1e-4),
    )
    return folder


def adapted(place: Path, out: Path, domain: str = "code", **options: Any) -> dict[str, Any]:
    base = options.pop("base", place / "base" / "best")
    refresh = RefreshConfig(str(base), lora_rank=2, adapter=True)
    changes = {"max_steps": 6, "lr": 5e-3, "refresh": refresh, "domains": (domain,)} | options
    return dict(train(out=out, **settings(place, kind="distilled", head=HEAD, **changes)))


def loaded(place: Path, folder: Path) -> dict[str, torch.Tensor]:
    target = TargetModel.load(TargetConfig(str(place / "target"), dtype="float32", device="cpu"))
    state: dict[str, torch.Tensor] = load_drafter(folder, target.info, target.weights).state_dict()
    return state


def test_each_domain_has_an_adapter_of_one_base(place: Path, tmp_path: Path) -> None:
    """It is small, is what was measured to the bit, and says what it was made of."""
    base = place / "base" / "best"
    whole, found = load_file(base / "model.safetensors"), {}
    for domain in DOMAINS:
        out = tmp_path / domain
        manifest = adapted(place, out, domain, eval_every=0)
        names = ["adapter_config.json", "adapter_model.safetensors", "config.json"]
        assert sorted(path.name for path in (out / "best").iterdir()) == names
        assert [entry["file"] for entry in manifest["files"]] == [f"best/{name}" for name in names]
        assert manifest["adapter"] == {
            "base": str(base),
            "base_sha256": checkpoint_hash(base),
            "rank": 2,
            "alpha": 4.0,
        }
        assert manifest["data"]["domains"] == [domain]
        require_unchanged(out / "best")
        size = (out / "best" / "adapter_model.safetensors").stat().st_size
        assert size < (base / "model.safetensors").stat().st_size / 3
        state = read_snapshot(out / "checkpoints" / "step_00000006").weights()
        config = RefreshConfig(str(base), lora_rank=2, adapter=True)
        measured, found[domain] = merge_updates(state, config), loaded(place, out / "best")
        for name, value in measured.items():
            assert torch.equal(found[domain][name], value), name
            assert value.dim() == 2 or torch.equal(value, whole[name].float()), name
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found["code"][layer], found["chat"][layer])
    assert not torch.equal(found["code"][layer], whole[layer])


def test_an_adapter_continues_bit_for_bit(
    place: Path, tmp_path: Path, stopping: AbstractContextManager[None]
) -> None:
    shutil.copytree(place / "base" / "best", tmp_path / "base")
    options = {"max_steps": 8, "eval_every": 4, "base": tmp_path / "base"}
    adapted(place, tmp_path / "whole", **options)
    with stopping:
        adapted(place, tmp_path / "halves", **options)
    file = tmp_path / "base" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4] + bytes(4))
    with pytest.raises(UserError, match="state of another training: base was"):
        adapted(place, tmp_path / "halves", **options)
    file.write_bytes(content)
    adapted(place, tmp_path / "halves", **options)
    for name in ("adapter_model.safetensors", "adapter_config.json", "config.json"):
        one, two = (tmp_path / half / "best" / name for half in ("whole", "halves"))
        assert one.read_bytes() == two.read_bytes(), name


def test_only_the_answers_of_the_chosen_domains_are_packed(place: Path) -> None:
    target = TargetModel.load(TargetConfig(str(place / "target")))
    rows = pq.read_table(place / "answers" / "shard.parquet").to_pylist()
    for chosen in ((), ("code",), ("code", "chat"), ("chat",)):
        data = PackedData.from_manifest(place / "answers", target.info, 64, domains=chosen)
        documents = set()
        for index in range(len(data)):
            row = data.row(index)
            for segment in range(1, int(row.segments.max()) + 1):
                documents.add(tuple(row.tokens[row.segments == segment].tolist()))
        assert documents == {
            tuple(row["tokens"]) for row in rows if not chosen or row["domain"] in chosen
        }
    with pytest.raises(
        UserError, match=r"no answers of domain 'cod'.*'code'\? Allowed: chat, code"
    ):
        PackedData.from_manifest(place / "answers", target.info, 64, domains=("cod",))


def test_a_store_serves_the_domains_that_it_was_written_for(place: Path, tmp_path: Path) -> None:
    features = FeaturesConfig(mode="store", path=str(tmp_path / "store"), format="fp32")
    given = settings(place, kind="distilled", head=HEAD)
    job = StoreJob(
        heads=(("distilled", "distilled", given["head"]),),
        target=given["target"],
        answers=place / "answers",
        features=features,
        dtype=torch.float32,
        sequence_length=64,
        batch_rows=2,
        seed=0,
        domains=("code",),
    )
    write_features(job, say=lambda text: None)
    stored = {"mode": "store", "path": features.path, "format": "fp32"}
    adapted(place, tmp_path / "stored", features=stored)
    adapted(place, tmp_path / "online")
    one, two = (
        load_file(tmp_path / name / "best" / "adapter_model.safetensors")
        for name in ("stored", "online")
    )
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    with pytest.raises(UserError, match=r"other train\.domains"):
        adapted(place, tmp_path / "other", "chat", features=stored)


def test_tau_is_measured_on_the_domain(place: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = (place / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(line for line in lines if '"chat"' in line))
    with pytest.raises(UserError, match=r"none of the prompts .* is of code; .* are: chat"):
        adapted(place, tmp_path / "out", prompts=(str(prompts),))
    assert adapted(place, tmp_path / "chat", "chat", prompts=(str(prompts),))["best"]["tau"] >= 1


def test_what_is_no_base_is_refused(place: Path, tmp_path: Path) -> None:
    adapted(place, tmp_path / "code", max_steps=2, eval_every=0)
    adapter = tmp_path / "code" / "best"
    with pytest.raises(UserError, match=r"is an adapter itself.*Give its base, '.*base/best'"):
        adapted(place, tmp_path / "second", base=adapter)
    refresh = RefreshConfig(str(adapter), lora_rank=2)
    changes = {"max_steps": 2, "eval_every": 0, "refresh": refresh}
    train(
        out=tmp_path / "merged", **settings(place, kind="distilled", head=HEAD, **changes)
    )  # goes on from base and adapter together
    assert "adapter" not in read_config(tmp_path / "merged" / "best")
    for options in ({"init_from": "x"}, {"init_from": "x", "lora_rank": 2, "old_target": "y"}):
        with pytest.raises(UserError, match=r"train\.refresh\.adapter keeps low-rank updates"):
            RefreshConfig(**options, adapter=True)


def test_a_base_of_other_parts_is_refused(place: Path, tmp_path: Path) -> None:
    """They would begin anew, outside of the updates."""
    plain = {"block_size": 4, "taps": (0, 1)}
    run = {"kind": "dflash", "max_steps": 1, "eval_every": 0}
    train(out=tmp_path / "base", **settings(place, head=plain, **run))
    refresh = RefreshConfig(str(tmp_path / "base" / "best"), lora_rank=2, adapter=True)
    more = {**plain, "confidence": True}
    with pytest.raises(UserError, match=r"changes no parts of its base.*head\.confidence=false"):
        train(out=tmp_path / "more", **settings(place, head=more, refresh=refresh, **run))
