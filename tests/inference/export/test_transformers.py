"""What transformers itself makes of an export: assisted generation with a distilled drafter, and
its DFlash assistant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from heads.api.checkpoint import load_drafter
from inference.target.model import TargetModel
from tests.inference.export.ground import save, write
from tests.oracle.compare import difference, ours, places

PROMPT = [[5, 9, 11, 7, 30, 12]]


@pytest.fixture(scope="module")
def plain(exported_target: Path):
    """The target as transformers loads it by itself."""
    return AutoModelForCausalLM.from_pretrained(exported_target, dtype=torch.float32).eval()


def generate(model, **more) -> list[int]:
    tokens = torch.tensor(PROMPT)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
        **more,
    )
    return out[0].tolist()


@pytest.mark.parametrize(
    "name",
    ["distilled", "distilled_shared", "distilled_tied", "distilled_qwen3", "distilled_scaled"],
)
def test_a_distilled_drafter_assists_and_computes_the_same(
    plain, target: TargetModel, tmp_path: Path, name: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "out", "transformers" if name == "distilled" else "vllm")
    assistant, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    if name == "distilled":
        assert "nearly tied" in (tmp_path / "out" / "headstart_export.json").read_text()
    drafter = load_drafter(mine, target.info, target.weights)
    for place in places(target, 3, 2):
        chain, rows = ours(drafter, place, 2)
        tokens = torch.cat([place.context.tokens, chain[:1]])
        with torch.no_grad():
            theirs = assistant.eval()(tokens[None]).logits[0, -2:]
        assert difference(rows, theirs) < 1e-4
    assert generate(plain, assistant_model=assistant) == generate(plain)


def test_the_dflash_assistant_of_transformers_drafts_what_ours_drafts(
    plain, target: TargetModel, tmp_path: Path
) -> None:
    pytest.importorskip("transformers.models.muse_glimmer_assistant")
    mine = save(target, "dflash_token", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "transformers")
    assistant, report = AutoModel.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert type(assistant).__name__ == "MuseGlimmerAssistantModel"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    drafter, assistant = load_drafter(mine, target.info, target.weights), assistant.eval()
    layers, size = assistant.config.target_layer_ids, assistant.config.block_size
    for place in places(target, 3, size - 1):
        context = place.context
        block = torch.cat(
            [context.tokens[-1:], torch.full((size - 1,), assistant.config.mask_token_id)]
        )
        states = torch.cat([context.states[layer + 1] for layer in layers], -1)
        with torch.no_grad():
            out = assistant(
                noise_embeds=context.embedding[block][None], context_hidden_states=states[None]
            )
        theirs = context.logits(out.last_hidden_state[0, 1:])
        chain, rows = ours(drafter, place, size - 1)
        assert difference(rows, theirs) < 1e-4
        assert torch.equal(theirs.argmax(-1), chain)
    assert generate(plain, assistant_model=assistant, speculation_type="dflash") == generate(plain)
