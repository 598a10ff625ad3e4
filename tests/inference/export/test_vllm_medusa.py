"""The Medusa proposer that vLLM loads: its drafts are our Medusa's, its rows those of the last
sampled tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from heads.nn.vocab import to_target_ids
from inference.export.vllm_medusa import MedusaProposer, last_rows
from inference.target.model import TargetModel
from tests.inference.export.ground import drafter_of, load_target, save, save_target, write


class Runner:
    """The part of vLLM's V1 runner that asks for drafts."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sample_hidden_states: Any,
        spec_decode_metadata: Any,
    ) -> Any:
        return self.drafter.propose(sampled_token_ids, [0], torch.zeros(1, 1), slot_mappings=None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type:
    """A vLLM whose runner is a fresh copy of `Runner`."""
    made = type(
        "GPUModelRunner", (Runner,), {"propose_draft_token_ids": Runner.propose_draft_token_ids}
    )
    name = "vllm.v1.worker.gpu_model_runner"
    for part in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(GPUModelRunner=made))  # type: ignore[arg-type]
    return made


def settings(folder: Path | None, tokens: int) -> Any:
    return SimpleNamespace(
        additional_config=None if folder is None else {"headstart_medusa": str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


@pytest.fixture
def folder(target: TargetModel, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name = getattr(request, "param", "medusa")
    write(target, save(target, name, tmp_path / "checkpoint"), tmp_path / "export", "vllm")
    return tmp_path / "export"


@pytest.mark.parametrize(
    ("folder", "name"),
    [(name, name) for name in ("medusa", "medusa_heads", "medusa_reduced")],
    indirect=["folder"],
)
def test_it_drafts_what_our_medusa_drafts(
    folder: Path, name: str, runner: type, target: TargetModel
) -> None:
    ours = drafter_of(target, name)
    heads = ours.config.num_heads
    proposer = MedusaProposer(settings(folder, heads))
    proposer.load_model(target.model)
    states = torch.randn(9, target.info.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        columns = ours._logits(ours._outputs(states, heads)).argmax(-1).T
    expected = to_target_ids(ours.d2t)[columns] if ours.reduced else columns
    assert torch.equal(proposer.draft(states), expected)
    metadata = SimpleNamespace(num_draft_tokens=[heads, 0, heads])
    # two taken of three; a prompt that was just read; one that is still being read
    sampled = [[7, 7], [5], []]
    rows = [1, heads + 1, heads + 2]
    found = runner(proposer).propose_draft_token_ids(
        None, sampled, states, spec_decode_metadata=metadata
    )
    assert found == [expected[rows[0]].tolist(), expected[rows[1]].tolist(), []]
    first = runner(proposer).propose_draft_token_ids(None, [[3], [4]], states[:2], None)
    assert first == expected[:2].tolist()
    again = MedusaProposer(settings(folder, heads))  # the runner is wrapped once
    again.load_model(target.model)
    assert (
        runner(again).propose_draft_token_ids(None, [[3]], states[:1], None)
        == expected[:1].tolist()
    )


def test_rows_are_those_of_the_last_sampled_tokens() -> None:
    assert last_rows([1, 1, 1], None) == [0, 1, 2]
    drafted, sampled = [3, 0, 3, 2], [4, 1, 1, 0]
    marks = [
        (request, place) for request, count in enumerate(drafted) for place in range(count + 1)
    ]
    expected = [marks.index((request, max(count - 1, 0))) for request, count in enumerate(sampled)]
    assert last_rows(sampled, drafted) == expected


def test_other_drafters_of_the_same_runner_are_left_alone(folder: Path, runner: type) -> None:
    MedusaProposer(settings(folder, 1))

    class Other:
        def propose(self, *_: Any, **__: Any) -> str:
            return "drafts"

    assert runner(Other()).propose_draft_token_ids(None, [[1]], None, None) == "drafts"


def test_what_cannot_work_is_said_at_the_start(
    folder: Path, runner: type, target: TargetModel
) -> None:
    with pytest.raises(ValueError, match="additional_config must name the exported Medusa folder"):
        MedusaProposer(settings(None, 1))
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 9, but .* has 3 heads"):
        MedusaProposer(settings(folder, 9))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        ValueError, match=r"is incomplete: it has no tensor 'blocks\.0\.layers\.2\.weight'"
    ):
        MedusaProposer(settings(folder, 3)).load_model(target.model)
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(ValueError, match="is no Medusa export"):
        MedusaProposer(settings(folder, 1))
    (folder / "config.json").write_text(json.dumps(config))
    runner.propose_draft_token_ids = lambda self, sampled: None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"in another way than 0\.32 does"):
        MedusaProposer(settings(folder, 1))
