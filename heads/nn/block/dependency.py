"""Dependencies: how a block drafter's slots depend on the tokens before them.

The backbone gives every slot k a state h_k and base logits U_k, which are independent of the tokens
drafted in between. A dependency adds the effect of the drafted prefix; x_0 is the root, x_{k-1} the
parent of the token at depth k:

* markov (DSpark, 2607.05147): U_k + W2 W1[x_{k-1}]; gated: W1[x] weighed by sigmoid(G [h_k;
  W1[x]]); rnn: a gated state over W1[x_0] .. W1[x_{k-1}] and the h.
* gru (Domino, 3.4): U_k + V SiLU(W [h_k; GRU over the embeddings of x_0 .. x_{k-1}]), from the
  second depth on.
* selector (DFlash 2, 3.8): among the best of U_k, U_k(b) + <A[x_{k-1}] * P h_k, B[b]>.
* parent (TreeFlash, 3.7): the logits of h_k + SwiGLU([norm(emb(x_{k-1})); norm(h_k)]).
* lilicorr (2608.20530): scores of neighbouring candidates, computed once for the whole block
  (heads/nn/block/lattice.py); the carry is the scores after x_{k-1}.

Each of the others reads tokens into a carry (`read`), which is cheap, and turns a carry into logits
(`logits`), which costs a vocabulary. Training reads along the true tokens, drafting level by level
along every path of a tree; both use the same two functions. Parameter names are those of serving
engines, if these have the dependency (vLLM and SGLang).

Legend: M blocks, P nodes, K depths, H hidden, V vocabulary, r rank, C size of the carry; `...` is
[M, K] in training and [B, P] in drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.errors import UserError, suggest
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init
from heads.nn.block.lattice import Correlator, CorrelatorConfig, Lattice, correlate
from heads.nn.blocks import RMSNorm
from heads.nn.matrices import set_matrix

OUTSIDE = 8.0
"""How far a token that is no candidate of the selector is put below its base logit."""
FADE = 1.0
"""A token fades out over this many logits below the worst candidate. With a sharp edge, the
rounding of bfloat16 would decide which tokens are candidates, and training and drafting would
disagree there."""

Embed = Callable[[Tensor], Tensor]
"""Tokens [...] -> the target's embeddings [..., H]."""


class Dependency:
    """The interface, and the drafter without any dependency.

    modules: the trained parts by name, which the drafter registers. size: C. needs_base: whether
    `logits` uses the base logits U_k. raw: whether its input states come from before the final
    norm. first: the first depth it changes. recurrent: whether a carry depends on the one before.
    whole: whether it reads all slots of a block at once (`lattice`).
    """

    size = 0
    needs_base = True
    raw = False
    first = 1
    recurrent = False
    whole = False

    def __init__(self, rank: int, info: TargetInfo) -> None:
        self.rank, self.info = rank, info
        self.modules: dict[str, nn.Module] = {}
        if rank < 1:
            raise UserError(f"head.dependency_rank must be at least 1; given {rank}.")

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Start without any effect: the first logits are the base logits."""

    def read(self, tokens: Tensor, states: Tensor, carry: Tensor, embed: Embed) -> Tensor:
        """Parents x_{k-1} [...], states h_k [..., H], carry [..., C] of k - 1 -> that of k."""
        return carry

    def lattice(self, base: Tensor, states: Tensor, anchor: Tensor, embed: Embed) -> Lattice | None:
        """For dependencies that are `whole`: base logits [M, K, V], normed states [M, K, H] and the
        fused feature of the last committed position [M, H] -> candidates and their scores, which
        give the carries instead of `read`, and the logits instead of `logits`."""
        return None

    def logits(self, base: Tensor | None, states: Tensor, carry: Tensor, project: Embed) -> Tensor:
        """Base logits [..., V] (None where `needs_base` is False), states h_k and the carry, all of
        depth k -> its logits [..., V].

        project: maps states (before or after the final norm, see `raw`) to the target's logits.
        """
        assert base is not None
        return base

    def added(
        self, columns: Tensor, base: Tensor, states: Tensor, carry: Tensor, project: Embed
    ) -> Tensor:
        """What `logits` adds to the base logits of a few tokens, for drafting [B, P, k].

        columns [B, k] int64; base [B, 1, V] of their slot, states [B, P, H], carry [B, P, C].
        Dependencies that can read their tables only at these tokens override it.
        """
        logits = self.logits(base, states, carry, project)
        few = columns[:, None].expand(-1, logits.shape[1], -1)
        return logits.gather(-1, few).float() - base.gather(-1, columns[:, None]).float()

    def teaches(self, base: Tensor | None, labels: Tensor) -> Tensor | None:
        """Where [R] it can learn from `labels` [R] with base logits [R, V]; None: everywhere."""
        return None

    def hint(self, tokens: Tensor) -> Tensor | None:
        """The confidence head's input from the parents [...] besides h_k: [..., r], or None."""
        return None

    def unroll(self, tokens: Tensor, states: Tensor, embed: Embed) -> Tensor:
        """Carries [M, K, C] along true parents [M, K] with states [M, K, H]."""
        if not self.recurrent:
            carry = states.new_zeros(*tokens.shape, self.size)
            return self.read(tokens, states, carry, embed)
        carry, found = states.new_zeros(tokens.shape[0], self.size), []
        for depth in range(tokens.shape[1]):
            carry = self.read(tokens[:, depth], states[:, depth], carry, embed).to(states.dtype)
            found.append(carry)
        return torch.stack(found, 1)


class MarkovTables(nn.Module):
    """W1 and W2 as engines name them, and the projection of the gated and the recurrent variant."""

    def __init__(self, vocab: int, rank: int, hidden: int, variant: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        set_matrix(self.markov_w2.weight, False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if variant == "gated" else None
        self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank) if variant == "rnn" else None


class Markov(Dependency):
    """A low-rank table of which token follows which (DSpark)."""

    def __init__(self, rank: int, info: TargetInfo, variant: str) -> None:
        super().__init__(rank, info)
        self.recurrent = variant == "rnn"
        self.size = 2 * rank if self.recurrent else rank
        self.tables = MarkovTables(info.vocab_size, rank, info.hidden_size, variant)
        self.modules = {"markov_head": self.tables}

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """W1 from the target's embeddings, so that similar tokens learn alike; W2 zero."""
        tables = self.tables
        init.copy(tables.markov_w1.weight, project_rows(weights.embedding, self.rank, generator))
        init.constant(tables.markov_w2.weight, 0.0)
        for part in (tables.gate_proj, tables.joint_proj):
            if part is not None:
                init.normal(part.weight, part.in_features**-0.5, generator)
                init.constant(part.bias, 0.0)

    def read(self, tokens: Tensor, states: Tensor, carry: Tensor, embed: Embed) -> Tensor:
        tables = self.tables
        words: Tensor = tables.markov_w1(tokens)
        if tables.gate_proj is not None:
            return tables.gate_proj(torch.cat([states, words], -1)).sigmoid() * words
        if tables.joint_proj is None:
            return words
        memory = carry[..., : self.rank]
        gate, fresh, out = tables.joint_proj(torch.cat([memory, words, states], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return torch.cat([gate * memory + (1 - gate) * fresh.tanh(), out.tanh()], -1)

    def logits(self, base: Tensor | None, states: Tensor, carry: Tensor, project: Embed) -> Tensor:
        assert base is not None
        return base + self.tables.markov_w2(carry[..., -self.rank :])

    def added(
        self, columns: Tensor, base: Tensor, states: Tensor, carry: Tensor, project: Embed
    ) -> Tensor:
        return carry[..., -self.rank :] @ self.tables.markov_w2.weight[columns].mT

    def hint(self, tokens: Tensor) -> Tensor | None:
        return cast(Tensor, self.tables.markov_w1(tokens))


class PrefixGRU(nn.Module):
    """One recurrent cell without biases, under the names of torch's GRU: r, z, n as there."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            set_matrix(weight, True)

    def forward(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """inputs [..., H], memory [..., C] -> the next memory [..., C]."""
        reset, update, fresh = F.linear(inputs, self.weight_ih_l0).chunk(3, -1)
        old_reset, old_update, old_fresh = F.linear(memory, self.weight_hh_l0).chunk(3, -1)
        update = (update + old_update).sigmoid()
        fresh = (fresh + (reset + old_reset).sigmoid() * old_fresh).tanh()
        return (1 - update) * fresh + update * memory


class Gru(Dependency):
    """A GRU over the drafted prefix corrects the base logits through a low rank (Domino)."""

    first = 2
    recurrent = True

    def __init__(self, rank: int, info: TargetInfo) -> None:
        super().__init__(rank, info)
        self.size = rank
        self.cell = PrefixGRU(info.hidden_size, rank)
        logits = nn.Linear(rank, info.vocab_size, bias=False)
        set_matrix(logits.weight, False)
        into = nn.Linear(info.hidden_size + rank, rank, bias=False)
        self.correct = nn.Sequential(into, nn.SiLU(), logits)
        self.modules = {"prefix_gru": self.cell, "embed_proj": self.correct}

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        # Embeddings are not normalised: their size decides how strongly they drive the gates.
        size = float(weights.embedding.float().square().mean().sqrt()) * self.info.hidden_size**0.5
        init.normal(self.cell.weight_ih_l0, 1.0 / max(size, 1e-6), generator)
        init.normal(self.cell.weight_hh_l0, self.size**-0.5, generator)
        into, out = self.correct[0], self.correct[2]
        assert isinstance(into, nn.Linear) and isinstance(out, nn.Linear)
        init.normal(into.weight, into.in_features**-0.5, generator)
        init.constant(out.weight, 0.0)

    def read(self, tokens: Tensor, states: Tensor, carry: Tensor, embed: Embed) -> Tensor:
        return cast(Tensor, self.cell(embed(tokens), carry))

    def logits(self, base: Tensor | None, states: Tensor, carry: Tensor, project: Embed) -> Tensor:
        assert base is not None
        return base + self.correct(torch.cat([states, carry], -1))

    def added(
        self, columns: Tensor, base: Tensor, states: Tensor, carry: Tensor, project: Embed
    ) -> Tensor:
        into, activation, out = self.correct
        inner: Tensor = activation(into(torch.cat([states, carry], -1)))
        return inner @ cast(nn.Linear, out).weight[columns].mT


class CandidateSelector(nn.Module):
    """The codebooks A and B and the projection P, as engines name them."""

    def __init__(self, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)


class Selector(Dependency):
    """Scores which of the best base tokens follows the parent (DFlash 2's path selector)."""

    def __init__(self, rank: int, info: TargetInfo, top_k: int) -> None:
        super().__init__(rank, info)
        require_candidates(top_k)
        self.size, self.top_k = rank, min(top_k, info.vocab_size)
        self.tables = CandidateSelector(info.vocab_size, rank, info.hidden_size)
        self.modules = {"candidate_selector": self.tables}

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        tables = self.tables
        rows = project_rows(weights.embedding, self.rank, generator)
        init.copy(tables.predecessor_codebook, rows)
        init.constant(tables.successor_codebook, 0.0)
        init.normal(tables.hidden_projection.weight, self.info.hidden_size**-0.5, generator)

    def read(self, tokens: Tensor, states: Tensor, carry: Tensor, embed: Embed) -> Tensor:
        tables = self.tables
        return F.embedding(tokens, tables.predecessor_codebook) * tables.hidden_projection(states)

    def logits(self, base: Tensor | None, states: Tensor, carry: Tensor, project: Embed) -> Tensor:
        assert base is not None
        share, scores = self.candidates(base), F.linear(carry, self.tables.successor_codebook)
        return base + share * scores - OUTSIDE * (1 - share)

    def added(
        self, columns: Tensor, base: Tensor, states: Tensor, carry: Tensor, project: Embed
    ) -> Tensor:
        share = self.candidates(base).gather(-1, columns[:, None])  # [B, 1, k]
        scores = carry @ self.tables.successor_codebook[columns].mT
        return share * scores - OUTSIDE * (1 - share)

    def teaches(self, base: Tensor | None, labels: Tensor) -> Tensor | None:
        """Where the right token is among the candidates; elsewhere no order of them is right."""
        assert base is not None
        return self.candidates(base).gather(-1, labels[:, None])[:, 0] > 0

    def candidates(self, base: Tensor) -> Tensor:
        """Base logits [..., V] -> how far each token is a candidate: 1 for the best `top_k`, 0 for
        the rest, in between near the limit."""
        worst = base.detach().topk(self.top_k, -1).values[..., -1:]
        return (1 - (worst - base.detach()) / FADE).clamp(0, 1)


class ParentMixer(nn.Module):
    """SwiGLU over [norm(embedding of the parent); h], whose output starts at zero."""

    def __init__(self, info: TargetInfo, width: int) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.gate_proj = nn.Linear(2 * info.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(2 * info.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, info.hidden_size, bias=False)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """States before the final norm and embeddings, both [..., H] -> [..., H]."""
        both = torch.cat([self.embedding_norm(embedded), F.rms_norm(states, states.shape[-1:])], -1)
        out: Tensor = states + self.down_proj(F.silu(self.gate_proj(both)) * self.up_proj(both))
        return out


class Parent(Dependency):
    """The parent changes the slot's state before the LM head reads it (TreeFlash)."""

    needs_base = False
    raw = True

    def __init__(self, rank: int, info: TargetInfo) -> None:
        super().__init__(rank, info)
        self.size = info.hidden_size
        self.mixer = ParentMixer(info, rank)
        self.modules = {"parent_mixer": self.mixer}

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        mixer = self.mixer
        init.constant(mixer.embedding_norm.weight, 1.0)
        for part in (mixer.gate_proj, mixer.up_proj):
            init.normal(part.weight, part.in_features**-0.5, generator)
        init.constant(mixer.down_proj.weight, 0.0)

    def read(self, tokens: Tensor, states: Tensor, carry: Tensor, embed: Embed) -> Tensor:
        return cast(Tensor, self.mixer(states, embed(tokens)))

    def logits(self, base: Tensor | None, states: Tensor, carry: Tensor, project: Embed) -> Tensor:
        return project(carry)


class Correlated(Dependency):
    """A lattice of the best base tokens of all slots, scored in one pass (LiLiCorr)."""

    whole = True

    def __init__(
        self, rank: int, info: TargetInfo, top_k: int, slots: int, config: CorrelatorConfig
    ) -> None:
        super().__init__(rank, info)
        require_candidates(top_k)
        self.size = min(top_k, info.vocab_size)
        self.correlator = Correlator(config, info, slots, self.size, rank)
        self.modules = {"lilicorr": self.correlator}

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        self.correlator.initialise(generator)

    def lattice(self, base: Tensor, states: Tensor, anchor: Tensor, embed: Embed) -> Lattice | None:
        return correlate(self.correlator, base, states, anchor, embed, self.size)


NAMES = ("none", "markov", "gated", "rnn", "gru", "selector", "parent", "lilicorr")


def build_dependency(
    name: str,
    rank: int,
    top_k: int,
    info: TargetInfo,
    slots: int = 0,
    correlator: CorrelatorConfig | None = None,
) -> Dependency:
    """The dependency of that name; raises `UserError` for another one. slots: those that draft."""
    if name not in NAMES:
        raise UserError(f"head.dependency '{name}' is unknown.{suggest(name, NAMES)}")
    if name == "none":
        return Dependency(1, info)
    if name == "selector":
        return Selector(rank, info, top_k)
    if name == "lilicorr":
        return Correlated(rank, info, top_k, slots, correlator or CorrelatorConfig())
    plain: dict[str, type[Dependency]] = {"gru": Gru, "parent": Parent}
    return plain[name](rank, info) if name in plain else Markov(rank, info, name)


def require_candidates(top_k: int) -> None:
    """Raise `UserError` if a slot would have no candidate."""
    if top_k < 1:
        raise UserError(f"head.selector_top_k must be at least 1; given {top_k}.")


def project_rows(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Rows [V, H] as [V, size] float32: normalised, turned at random."""
    normed = F.rms_norm(rows.detach().float(), rows.shape[-1:])
    turn = torch.empty(rows.shape[1], size).normal_(0.0, rows.shape[1] ** -0.5, generator=generator)
    return normed @ turn.to(normed.device)
