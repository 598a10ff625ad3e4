"""A micro target for drafter tests: a random Llama of Hugging Face in float64, its features, and a
Noise that is told what wins.

Legend: B rows, T positions, H hidden, V vocabulary, n taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from heads.api.batch import TrainBatch
from heads.api.drafter import TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights


@dataclass
class MicroTarget:
    """What drafters are told of a target, computed by plain transformers calls, one document at a
    time."""

    model: LlamaForCausalLM
    info: TargetInfo
    weights: TargetWeights
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @contextmanager
    def last_state(self) -> Iterator[list[Tensor]]:
        """Collect the input of the final norm: the state [1, T, H] after the last layer."""
        found: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(
            lambda _, given: found.append(*given)
        )
        with hook:
            yield found

    @torch.no_grad()
    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]:
        """taps [B, T, n, H] and last_hidden [B, T, H]; padding (segment 0) stays zero."""
        batch, length, hidden = *tokens.shape, self.info.hidden_size
        taps = torch.zeros(batch, length, len(needs.taps), hidden, dtype=self.dtype)
        last = torch.zeros(batch, length, hidden, dtype=self.dtype)
        for row in range(batch):
            for segment in sorted(set(segments[row].tolist()) - {0}):
                at = (segments[row] == segment).nonzero().squeeze(1)
                with self.last_state() as last_state:
                    out = self.model.model(
                        input_ids=tokens[row, at][None], output_hidden_states=True
                    )
                # its last entry is the state after the final norm
                states = (*out.hidden_states[:-1], *last_state)
                for index, tap in enumerate(needs.taps):
                    taps[row, at, index] = states[tap][0]
                last[row, at] = out.last_hidden_state[0]
        return (taps if needs.taps else None), (last if needs.last_hidden or needs.logits else None)


def micro_target(
    dtype: torch.dtype = torch.float64,
    vocab: int = 41,
    hidden: int = 16,
    layers: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
) -> MicroTarget:
    """A random target; the same one every time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    info = TargetInfo(
        id="micro",
        revision="r1",
        model_type="llama",
        tokenizer_hash="t1",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=24,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=10000.0,
        max_position_embeddings=512,
        parameters=sum(p.numel() for p in model.parameters()),
    )
    weights = TargetWeights(
        model.model.embed_tokens.weight,
        model.lm_head.weight,
        model.lm_head,
        dict(model.state_dict()),
    )
    return MicroTarget(model, info, weights, dtype)


def packed_batch(
    target: MicroTarget, needs: FeatureSpec, rows: list[list[list[int]]], prompt: int = 2
) -> TrainBatch:
    """A training batch from rows of documents; the first `prompt` tokens of each are not
    supervised."""
    width = max(sum(len(document) for document in row) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, mask = torch.zeros_like(tokens), torch.zeros(len(rows), width, dtype=torch.bool)
    segments = torch.zeros(len(rows), width, dtype=torch.int32)
    for index, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row):
            span = slice(at, at + len(document))
            tokens[index, span] = torch.tensor(document)
            positions[index, span] = torch.arange(len(document))
            segments[index, span] = number + 1
            mask[index, at + prompt : at + len(document)] = True
            at += len(document)
    taps, last = target.features(tokens, positions, segments, needs)
    logits = target.weights.logits if needs.logits else None
    return TrainBatch(tokens, positions, segments, mask, taps, last, logits)


def seen_states(
    target: MicroTarget,
    needs: FeatureSpec,
    documents: list[list[int]],
    spans: list[tuple[int, int]],
) -> TargetStates:
    """States of positions [first, end) of each document, right-padded with nonsense; documents must
    reach one token further.
    """
    width = max(end - first for first, end in spans)
    batch = packed_batch(target, needs, [[document] for document in documents])

    def rows(values: Tensor, shift: int = 0) -> Tensor:
        out = values.new_full((len(spans), width, *values.shape[2:]), 3)
        for index, (first, end) in enumerate(spans):
            out[index, : end - first] = values[index, first + shift : end + shift]
        return out

    valid = torch.tensor([[i < end - first for i in range(width)] for first, end in spans])
    return TargetStates(
        tokens=rows(batch.tokens),
        next_tokens=rows(batch.tokens, 1),
        positions=rows(batch.positions),
        valid=valid,
        taps=None if batch.taps is None else rows(batch.taps),
        last_hidden=None if batch.last_hidden is None else rows(batch.last_hidden),
    )


class ForcedNoise:
    """Makes chosen tokens win and remembers the logits it was shown: logits[(row, position)] ->
    [V']."""

    keeps_logits = False
    separate = False

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents
        self.logits: dict[tuple[int, int], Tensor] = {}

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        ids = torch.arange(logits.shape[-1]) if token_ids is None else token_ids
        out = logits.float().log_softmax(-1)
        for row in range(logits.shape[0]):
            for column, position in enumerate(positions[row].tolist()):
                self.logits.setdefault((row, position), logits[row, column].clone())
                if position < len(self.documents[row]):
                    out[row, column] += 1e4 * (ids == self.documents[row][position])
        return out

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self.scores(logits, positions, token_ids).argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float()


class PlainNoise:
    """Temperature 0 without any noise."""

    keeps_logits = False
    separate = False

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return logits.float().log_softmax(-1)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return logits.argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float()
