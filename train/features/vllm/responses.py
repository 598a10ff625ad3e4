"""States that servers left while they generated the responses (`sampling.states`): no second pass.

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.model import TargetModel
from train.data.answers import read_answers
from train.data.pack import weighted_documents
from train.data.packed_file import signed_window
from train.data.states import ResponseStatesFile, digest, path_of
from train.features.last_state import agrees, gap

HOW = (
    "Generate with sampling.states and sampling.state_layers, or use another features.mode or "
    "features.source."
)


class ResponseStates:
    """The states of the documents in the folder `responses` (of `domains`; empty: all), of which
    the first `longest` tokens are used. Raises `UserError` if none were kept, or not those that are
    needed, or if a training reads a document from a later token on."""

    def __init__(
        self,
        responses: Path,
        target: TargetModel,
        needs: FeatureSpec,
        longest: int,
        domains: Sequence[str],
    ) -> None:
        self.responses, self.target = responses, target
        manifest = read_answers(responses)
        facts = manifest.get("states")
        if facts is None:
            raise UserError(f"no hidden states were kept with the responses '{responses}'. {HOW}")
        if facts["missing"]:
            raise UserError(
                f"{facts['missing']} documents of '{responses}' are without hidden states. {HOW}"
            )
        self.layers = tuple(facts["layers"])
        missing = sorted({*needs.taps, target.info.num_layers} - {*self.layers})
        if missing:
            raise UserError(
                f"'{responses}' has the states of the layers {list(self.layers)}, and {missing} "
                f"are needed: the taps that the heads read, and the target's last layer. {HOW}"
            )
        shards = [responses / entry["file"] for entry in manifest["shards"]]
        self._names: dict[str, str] = {}
        late: list[int] = []
        for tokens, spans, _ in weighted_documents(shards, target.info, domains=domains):
            self._names[digest(tokens[:longest])] = digest(tokens)
            window = signed_window(tokens, spans, longest)
            if window is not None and window[1] > 0:
                late.append(min(start for start, end in spans if start < end))
        if late:
            raise UserError(
                f"{len(late)} documents of '{responses}' have no response within their first "
                f"{longest} tokens (train.sequence_length), so that a training reads each from a "
                "later token on, without the text before it, which the kept states depend on. Set "
                f"train.sequence_length={max(late) + 2} or more, leave such prompts out when "
                "generating (data.max_prompt_tokens), or use another features.mode or "
                "features.source."
            )

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The states [N, L, H] of a document on the CPU. The server never read a document's last
        token, which predicts nothing: its state is zero. Raises `UserError` for a file that is
        damaged, or of another target."""
        name = self._names.get(digest(tokens))
        if name is None:
            raise UserError(
                f"a document is none of those in '{self.responses}', whose hidden states were "
                "kept. Rows that change on the way (train.on_policy) need features=online, remote, "
                "vllm or sglang."
            )
        path = path_of(self.responses, name)
        found = ResponseStatesFile(path)
        self._check(path, found, tokens)
        states = found.states[: len(tokens)]
        if len(states) == len(tokens):
            return states
        return torch.cat([states, torch.zeros_like(states[:1])])

    def _check(self, path: Path, found: ResponseStatesFile, tokens: Sequence[int]) -> None:
        """Raise `UserError` for another document's states, or another target's."""
        shape = (len(self.layers), self.target.info.hidden_size)
        if found.tokens[: len(tokens)] != list(tokens) or found.states.shape[1:] != shape:
            raise UserError(
                f"'{path}' does not hold the states [tokens, {shape[0]}, {shape[1]}] of its "
                "document. Generate the responses again (run.overwrite=true)."
            )
        if found.states.dtype != self.target.dtype:
            raise UserError(
                f"the hidden states in '{self.responses}' are "
                f"{str(found.states.dtype).removeprefix('torch.')}, but target.dtype is "
                f"{str(self.target.dtype).removeprefix('torch.')}. Set target.dtype to theirs."
            )
        off = gap(self.target, found.states[-1, -1], found.tokens[-1], found.logprob)
        if not agrees(self.target, off):
            raise UserError(
                f"'{path}' gives its last token another log-probability than the server did (by "
                f"{off:.2g}): the server ran another model, or its last layer is another."
            )

    def close(self) -> None:
        """Nothing to close."""
