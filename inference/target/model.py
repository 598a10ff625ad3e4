"""The target model: a Hugging Face causal LM with Headstart's attention, cache and taps.

Training features (`features`) and decoding (`prefill`, `verify`) use the same forward pass and the
same taps, so a drafter sees in serving exactly what it saw in training. Any decoder-only model with
standard attention works unpatched. Loading ends with a self-check against the model's own forward
pass; a model that fails it is refused.

Legend: B rows, R rows being prefilled, N nodes, T positions, H hidden, V vocabulary, n taps, S
slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from heads.api.tree import TokenTree
from heads.kernels.dispatch import choose
from heads.nn.packing import documents, within_documents
from inference.kernels.packed_linear import pack_linears
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target import loading
from inference.target.attention import AttentionPlan, attention_plan, mark_layers
from inference.target.exact import ExactHead, exactly, install_exact
from inference.target.follow import InPlace, Weights
from inference.target.indexed import IndexedCache, masks
from inference.target.kv_cache import CacheSizes, KVCache, LayerShape
from inference.target.padding import of_like_length
from inference.target.recurrent.cache import RecurrentCache
from inference.target.recurrent.install import install
from inference.target.recurrent.passes import PackedPass, Pass, PromptPass, TreePass, running
from inference.target.recurrent.states import Key, StateShape
from inference.target.settings import Loading
from inference.target.shared import shared_weights
from inference.target.taps import Joined, Seen, Taps, find_decoder, find_final_norm, find_layers

CHECKED_LENGTHS = (8, 300)
"""Tokens of the self-check's texts. The second text is longer than a piece in which the attention
kernel reads a cache; it is for targets that decode with the kernel."""
CHECKED_BEHIND = 4
"""Tokens of such a text that are verified: a tree's root and two of its branch, one of a chain."""


class TargetModel:
    """A loaded target, from `TargetModel.load(config)`; frozen, in eval mode."""

    def __init__(self, model: Any, tokenizer: Any, info: TargetInfo) -> None:
        self.model, self.tokenizer, self.info = model, tokenizer, info
        self.decoder = find_decoder(model)
        self.taps = Taps(find_layers(self.decoder, info.num_layers))
        self.final_norm = find_final_norm(self.decoder, self.taps.layers)
        self.weights = shared_weights(model)
        self.loading: Loading = getattr(model, "headstart_loading", {})
        self.device, self.dtype = self.weights.embedding.device, self.weights.embedding.dtype
        # sums over parts of the inputs stay in float32: this reduces the differences between passes
        # of different widths, at no measurable cost for few rows
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        generation = model.generation_config
        self.eos_token_ids = loading.end_tokens(generation and generation.eos_token_id, tokenizer)
        # for this warning about padding, some models (GPT-2) read the tokens on the host in every
        # pass
        self.decoder.warn_if_padding_and_no_attention_mask = lambda *args, **kwargs: None
        # of the layers, once a cache has their keys
        self._cache_shapes: tuple[LayerShape | None, ...] | None = None
        self._state_shapes: dict[Key, StateShape] = {}
        self.recurrent = install(model) > 0
        config = model.config.get_text_config()
        self.indexed = config.model_type in loading.INDEXED
        # attention blocks; a layer may have two
        self._cached_layers = int(config.num_hidden_layers)
        self._masked = mark_layers(model, config) or self.indexed
        self._cache_name = loading.cache_argument(self.decoder)
        self._uses_cache = config.model_type not in loading.WITHOUT_USE_CACHE
        self._head = ExactHead(self.weights.logits, model.get_output_embeddings())
        self.exact = self._prepared = False
        """Whether verifications compute token by token, see `computing`."""
        self._last_position = _last_learned_position(model, info)
        self._in_place = InPlace(model)
        self.version = 0
        """How often the weights have changed, see `follow`."""
        self._revision = info.revision
        self.compiled_attention: dict[int, nn.Module] | None = None
        """Attention modules of compiled layers, by their number in the cache; empty if layers
        cannot be compiled, None before compilation was tried."""
        self.drafters_after_merge: WeakSet[Any] | None = None
        """Drafters that refer to weights where merging has moved them (inference/target/merged.py);
        None before it has."""
        pack_linears(model)

    @classmethod
    def load(cls, config: loading.TargetConfig, model: Any = None) -> TargetModel:
        """Load a target, switch it to Headstart's attention and run the self-check. Raises
        `UserError` if the model cannot be a target.

        model: a model that the caller has loaded already (train/target/sharding.py).
        """
        model = loading.load_model(config) if model is None else model
        tokenizer = loading.load_tokenizer(config)
        references = [_own_logits(model, CHECKED_LENGTHS[0])]
        if _runs_kernel(references[0][1]):
            references.append(_own_logits(model, CHECKED_LENGTHS[1]))
        loading.switch_attention(model)
        target = cls(model, tokenizer, loading.describe(model, tokenizer, config))
        if loading.is_recurrent(model.config.get_text_config()) and not target.recurrent:
            raise UserError(
                f"'{config.path}' ({target.info.model_type}) cannot be a target with transformers "
                f"{transformers.__version__}: its recurrent layers do not call the functions that "
                "verify trees of drafts. Install transformers 5.23."
            )
        for reference in references:
            target._check_against(*reference)
        return target

    def follow(self, weights: Weights) -> None:
        """Take over new weights in place (inference/target/follow.py): a model or state dict of
        the same configuration, or low-rank updates of the loaded weights. `info.revision` then
        differs. If it raises `UserError`, the target keeps its old weights.

        Drafters that derived data from the old weights must follow: see `Engine.follow`.
        """
        self._in_place.take(weights)
        self.version += 1
        # files written from now on must not name the revision that was loaded
        self.info = replace(self.info, revision=f"{self._revision}+{self.version}")

    @contextmanager
    def computing(self, exact: bool) -> Iterator[None]:
        """Within the block, passes compute as `decode.exact` says (inference/target/exact.py).
        Raises `UserError` for a target that does not support it."""
        if exact and (self.recurrent or self.indexed):
            more = "recurrent layers" if self.recurrent else "an indexer"
            raise UserError(
                "decode.exact=true needs a target with attention alone; "
                f"{self.info.model_type} has {more}. Leave out decode.exact."
            )
        if exact and self.compiled_attention:
            raise UserError(
                "decode.exact=true needs a target whose layers are not compiled, but another "
                "engine with decode.compile=true has compiled those of this one. Load it once more."
            )
        if exact and not self._prepared:
            install_exact(self.model)
            self._prepared = True
        before, self.exact = self.exact, exact
        try:
            yield
        finally:
            self.exact = before

    @property
    def lengths_on_device(self) -> bool:
        """Whether decoding verifies with lengths that only the device knows (`verify`): on a GPU,
        where the host runs ahead, and if the attention kernel runs."""
        return self.device.type == "cuda" or _runs_kernel(self.weights.embedding)

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured as a graph: not with transformers' loop over experts,
        which float64 needs, since it asks the device which of them have tokens."""
        config = self.model.config.get_text_config()
        if getattr(config, "_experts_implementation", None) != "eager":
            return True
        # what transformers gives every class of experts whose implementation can be chosen
        return not any(hasattr(module, "_apply_gate") for module in self.model.modules())

    # Forward passes

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        cache: KVCache | None,
        taps: tuple[int, ...],
        now: Pass | None,
    ) -> Seen:
        self.taps.want(taps)
        more: dict[str, Any] = {self._cache_name: cache}
        if self.indexed:
            more["attention_mask"] = masks(plan)
        plan.cache, plan.modules = cache, self.compiled_attention or {}
        with attention_plan(plan), running(now):
            out = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                use_cache=cache is not None and self._uses_cache,
                return_dict=True,
                **more,
            )
        # some families keep the residual stream in float32 (Mamba)
        return self.taps.read(out.last_hidden_state.to(self.dtype))

    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features of packed sequences: taps [B, T, n, H], last_hidden [B, T, H], as needed.

        tokens, positions [B, T] int64; segments [B, T] int32: attention is causal within equal
        numbers.
        """
        with torch.no_grad():
            return self.differentiable_features(tokens, positions, segments, needs)

    def differentiable_features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]:
        """`features` with their autograd graph, for training that changes the target
        (train/joint)."""
        plan = AttentionPlan(None, True, positions, positions)
        if not bool((segments == segments[:, :1]).all()):
            if self.indexed:  # the indexer's scores need a mask
                allowed = within_documents(segments)[:, 0]
                plan = AttentionPlan(allowed, False, positions, positions)
            else:
                plan.documents = documents(segments, positions)
        now = PackedPass.of(segments) if self.recurrent else None
        seen = self._run(tokens, positions, plan, None, needs.taps, now)
        return seen.taps, (seen.last_hidden if needs.last_hidden or needs.logits else None)

    def last_states(self, texts: Tensor) -> Tensor:
        """The last hidden states [B, T, H] of whole texts [B, T] int64; see `features`."""
        positions = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        segments = torch.ones_like(texts, dtype=torch.int32)
        _, last = self.features(texts, positions, segments, FeatureSpec(last_hidden=True))
        assert last is not None
        return last

    def cache_sizes(self) -> CacheSizes:
        """The sizes of a cache; reads one token if none was read before."""
        if self._cache_shapes is None:
            token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            rows, lengths = token[0], token[0] + 1
            with torch.no_grad():
                features, cache = Joined(1, 1), self.new_cache(1, 1)
                self._read_together(cache, rows, token, lengths, FeatureSpec(), 0, features)
        assert self._cache_shapes is not None
        states = self._state_shapes.values()
        return CacheSizes(
            slot=sum(shape.bytes for shape in self._cache_shapes if shape is not None),
            row=sum(shape.bytes for shape in states),
            node=sum(shape.node_bytes for shape in states),
        )

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` slots."""
        layers, shapes = self._cached_layers, self._cache_shapes
        if self.recurrent:
            return RecurrentCache(layers, rows, capacity, shapes, self._state_shapes)
        if self.indexed:
            return IndexedCache(layers, rows, capacity, shapes)
        return KVCache(layers, rows, capacity, shapes)

    @torch.no_grad()
    def prefill(
        self,
        cache: KVCache,
        rows: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        needs: FeatureSpec,
        chunk: int = 0,
    ) -> tuple[Tensor, Seen]:
        """Read prompts into cache rows: tokens [R, T] right-padded, lengths [R], rows [R]. Returns
        the logits [R, V] after each prompt's last token, and the features at every prompt position.
        Prompts of similar length are read together. Features after a prompt's end are meaningless.

        chunk: most tokens of one pass, which bounds attention's memory; 0: all at once.
        """
        known, features = lengths.tolist(), Joined(*tokens.shape)
        groups = [[row] for row in range(len(known))] if self.exact else of_like_length(known)
        if len(groups) == 1:
            logits = self._read_together(cache, rows, tokens, lengths, needs, chunk, features)
            return logits, features.seen
        found = None
        for places in groups:
            group = torch.tensor(places, device=tokens.device)
            own, part = lengths[group], tokens[group, : known[places[0]]]
            some = self._read_together(cache, rows[group], part, own, needs, chunk, features, group)
            found = some.new_zeros(len(rows), some.shape[1]) if found is None else found
            found[group] = some
        assert found is not None, "a prefill needs a prompt"
        return found, features.seen

    def _read_together(
        self,
        cache: KVCache,
        rows: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        needs: FeatureSpec,
        chunk: int,
        features: Joined,
        group: Tensor | None = None,
    ) -> Tensor:
        """Read prompts that are padded to the longest -> the logits [R, V] after their last tokens.
        group: their places among the rows of `features`; None: they are all of them."""
        total = tokens.shape[1]
        cache.writer.mode, cache.writer.rows = "prefill", rows
        for offset in range(0, total, chunk or total):
            part = tokens[:, offset : offset + (chunk or total)]
            keys = torch.arange(offset + part.shape[1], device=tokens.device)
            keys = keys.expand(tokens.shape[0], -1)
            positions = keys[:, offset:]
            cache.writer.offset = offset
            plan = AttentionPlan(None, True, positions, keys)
            now = None
            if isinstance(cache, RecurrentCache):
                valid = positions < lengths[:, None]
                now = PromptPass(cache.states, rows, valid, fresh=offset == 0)
            features.put(group, offset, self._run(part, positions, plan, cache, needs.taps, now))
        cache.writer.offset = 0
        self._cache_shapes = cache.shapes()
        if isinstance(cache, RecurrentCache):
            self._state_shapes = cache.states.shapes()
        places = torch.arange(tokens.shape[0], device=tokens.device) if group is None else group
        return self.weights.logits(features.seen.last_hidden[places, lengths - 1])

    @torch.no_grad()
    def verify(
        self,
        cache: KVCache,
        tokens: Tensor,
        tree: TokenTree,
        lengths: Tensor,
        longest: int | None,
        needs: FeatureSpec,
        exact: bool = True,
    ) -> tuple[Tensor, Tensor, Seen]:
        """One pass over the drafted nodes of every row.

        tokens [B, N], lengths [B] committed tokens in the cache, longest: their maximum if the host
        knows it (or an upper bound of it, then not `exact`), None if only the device knows. Node i
        goes to slot lengths+i and has position lengths+depth[i]. Returns logits [B, N, V], the
        nodes' positions [B, N] and the features.
        """
        nodes = tokens.shape[1]
        positions = lengths[:, None] + tree.depth
        writer = cache.writer
        writer.mode, writer.bound = "verify", cache.capacity if longest is None else longest + nodes
        if tokens.shape[0] == 1 and longest is not None and exact:
            writer.start = longest
            plan = _single_row_plan(tree, positions, longest)
        else:
            writer.start = None
            writer.slots = lengths[:, None] + torch.arange(nodes, device=tokens.device)
            plan = self._device_plan(tree, positions, lengths, writer.bound)
        now = TreePass(cache.states, tree) if isinstance(cache, RecurrentCache) else None
        last, places = self._last_position, positions
        if last is not None:  # nodes behind it are never committed
            places = positions.clamp(max=last)
        with exactly(self.exact):
            seen = self._run(tokens, places, plan, cache, needs.taps, now)
            return self._head(seen.last_hidden), positions, seen

    def _device_plan(
        self, tree: TokenTree, positions: Tensor, lengths: Tensor, bound: int
    ) -> AttentionPlan:
        """The plan for lengths on the device: bits for the kernel, or a mask, which indexers and
        chunks need."""
        kernel = choose(TREE_ATTENTION, self.device, self.dtype).implementation != "reference"
        if kernel and not self._masked:
            nodes = lengths, tree.words(), tree.depth
            return AttentionPlan(None, False, positions, positions, nodes)
        return _ragged_plan(tree, positions, lengths, bound)

    # Self-check

    def _check_against(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare prefill and verification, called as in decoding, with the model's own logits
        [1, T, V]."""
        prompt = tokens.shape[1] - CHECKED_BEHIND
        try:
            found = self._logits_of_steps(tokens, prompt)
        except (TypeError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            raise UserError(
                f"'{self.info.id}' ({self.info.model_type}) cannot be a target: its forward pass "
                f"does not take our cache and attention ({type(error).__name__}: {error}). Models "
                "with standard softmax attention are supported."
            ) from error
        wanted = expected[:, prompt - 1 :].float()
        if not bool(wanted.isfinite().all()):
            raise UserError(
                f"'{self.info.id}' gives logits that are no finite numbers in "
                f"{str(self.dtype).removeprefix('torch.')}: its weights are damaged, or its states "
                "leave the range of the dtype. Use target.dtype=bfloat16 or float32."
            )
        gap = float((found - wanted).abs().max())
        if not gap <= rounding(wanted, self.dtype):
            raise UserError(
                f"'{self.info.id}' ({self.info.model_type}) cannot be a target: verified logits "
                f"differ from its own by {gap:.3g} behind {prompt} tokens (ALiBi or other "
                "non-standard attention). Use a model with standard softmax attention."
            )

    def _logits_of_steps(self, tokens: Tensor, prompt: int) -> Tensor:
        """Logits [1, T-P+1, V] in float32 at the tokens [1, T] from the P-th on, read as a prompt
        of P tokens, a tree and a chain. Rejected branches of the tree hold other tokens, so that
        remains of them in a cache or a state would change the chain's logits."""
        size, needs, device = tokens.shape[1], FeatureSpec(), tokens.device
        cache, row = self.new_cache(1, size + 4), torch.tensor([0], device=device)
        first, _ = self.prefill(cache, row, tokens[:, :prompt], row + prompt, needs)

        def verify(drafted: Tensor, tree: TokenTree, length: int) -> Tensor:
            longest = None if self.lengths_on_device else length
            return self.verify(cache, drafted, tree, row + length, longest, needs)[0]

        parents, right = torch.tensor([[0, 0, 0, 1, 2]], device=device), [0, 2, 4]
        tree, path = TokenTree.from_parents(parents, 2), torch.tensor([right], device=device)
        wrong = tokens[:, : tree.num_nodes].clone()
        wrong[:, right] = tokens[:, prompt : prompt + 3]
        branches = verify(wrong, tree, prompt)
        cache.commit(tree, row + prompt, path, row + 2, row + 3)
        rest = tokens[:, prompt + 3 :]
        last = verify(rest, TokenTree.chain(rest.shape[1] - 1, device), prompt + 3)
        return torch.cat([first[:, None], branches[:, right], last], 1).float()


def rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """The largest difference from `logits` that a target computing in `dtype` may have if it
    computes the same in another way."""
    share = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    return share * max(float(logits.abs().max()), 1.0)


def _single_row_plan(tree: TokenTree, positions: Tensor, length: int) -> AttentionPlan:
    """One row, read exactly up to its last node: only the tree's part needs a mask."""
    key_positions = torch.arange(length, device=positions.device)[None]
    key_positions = torch.cat([key_positions, positions], 1)
    if tree.num_nodes == 1:
        return AttentionPlan(None, False, positions, key_positions)
    prefix = tree.ancestors.new_ones(1, tree.num_nodes, length)
    return AttentionPlan(torch.cat([prefix, tree.ancestors], 2), False, positions, key_positions)


def _ragged_plan(tree: TokenTree, positions: Tensor, lengths: Tensor, bound: int) -> AttentionPlan:
    """Rows of different lengths: slot s is committed (s < length), a node, or beyond."""
    rows, nodes = positions.shape
    slots = torch.arange(bound, device=positions.device)
    # [B, S]: which node a slot holds; negative for committed tokens
    node = slots[None] - lengths[:, None]
    clamped = node.clamp(0, nodes - 1)
    held = clamped[:, None, :].expand(-1, nodes, -1)
    in_tree = tree.ancestors.expand(rows, -1, -1).gather(2, held)
    in_tree = in_tree & ((node >= 0) & (node < nodes))[:, None, :]
    key_positions = torch.where(node < 0, slots[None], positions.gather(1, clamped))
    return AttentionPlan(in_tree | (node < 0)[:, None, :], False, positions, key_positions)


def _last_learned_position(model: Any, info: TargetInfo) -> int | None:
    """The last position of a model that learned a vector for each, as GPT-2; None for others."""
    longest = info.max_position_embeddings
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    # OPT's table has two rows more
    return longest - 1 if any(longest <= size <= longest + 2 for size in sizes) else None


def _own_logits(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """`length` tokens, at most the model's positions, and the unchanged model's logits at them."""
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", length))
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(1, length + 1, device=model.device) * 37 % vocab)[None]
    with torch.no_grad():
        return tokens, model(input_ids=tokens, use_cache=False).logits


def _runs_kernel(some: Tensor) -> bool:
    """Whether attention for the device and dtype of `some` runs as a Triton kernel."""
    return choose(TREE_ATTENTION, some.device, some.dtype).implementation == "triton"
