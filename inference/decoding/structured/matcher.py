"""An answer's place in its grammar: which tokens may follow at every node of a draft, and which
must follow.

The grammar is walked on the host. A draft's masks are computed depth first: a node's token is
accepted, its children are visited, and the token is rolled back. After every walk, the place is
again that of the committed text.

Legend: N nodes, W = V / 32 words of 32 tokens each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heads.api.errors import UserError


class DeadEndError(UserError):
    """A token was committed that the grammar does not allow, so nothing can follow."""


class Matcher:
    """See the module. grammar: an xgrammar `GrammarMatcher`; ends: end-of-text tokens; tokens: the
    token of every text."""

    def __init__(self, grammar: Any, ends: Sequence[int], tokens: Mapping[bytes, int]) -> None:
        self._grammar, self._ends, self._tokens = grammar, frozenset(ends), tokens
        self._longest = max(map(len, tokens), default=0)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance past committed tokens, which the masks have allowed; raises `DeadEndError` if the
        grammar does not."""
        for token in tokens:
            if not self._grammar.accept_token(token):
                raise DeadEndError(
                    f"token {token} was committed where the grammar does not allow it: the grammar "
                    "allows no token of this target there, sampling settings forbid every one that "
                    "it allows, or the target's logits are not finite."
                )

    def masks(
        self, words: Tensor, tokens: Sequence[int], children: Sequence[Sequence[int]]
    ) -> None:
        """Write the tokens allowed after every node to words [N, W] int32 on the CPU: bit t % 32 of
        word t // 32 stands for token t.

        tokens [N], children [N]: the nodes of a draft, the root first, whose token is committed.
        All tokens are allowed after nodes that the grammar does not reach, as no rule keeps such
        nodes, and after end of text, as nothing follows it.
        """
        words.fill_(-1)
        self._visit(0, words, tokens, children)

    def _visit(
        self, node: int, words: Tensor, tokens: Sequence[int], children: Sequence[Sequence[int]]
    ) -> None:
        self._grammar.fill_next_token_bitmask(words, node)
        for child in children[node]:
            token = tokens[child]
            if token in self._ends or not allows(words[node], token):
                continue
            if self._grammar.accept_token(token):
                self._visit(child, words, tokens, children)
                self._grammar.rollback(1)

    def path(self, words: Tensor) -> list[int]:
        """Walk the forced text token by token: write the tokens allowed after the committed text
        and after every token of the walk to words [D, W] int32 on the CPU, whose other rows stay as
        they are; returns the walked tokens, fewer than D."""
        walked: list[int] = []
        forced = self.forced(len(words) - 1)
        for place, own in enumerate(words):
            self._grammar.fill_next_token_bitmask(words, place)
            if place == len(forced) or not allows(own, forced[place]):
                break
            if not self._grammar.accept_token(forced[place]):
                break
            walked.append(forced[place])
        if walked:
            self._grammar.rollback(len(walked))
        return walked

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell the text that must follow, with the longest token at each
        place. The answer may spell the same text with other tokens."""
        try:
            rest = self._grammar.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # it begins or ends within a character
            rest = bytes(error.object)
        found: list[int] = []
        while rest and len(found) < most:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._tokens), 0)
            if not size:
                break
            found.append(self._tokens[rest[:size]])
            rest = rest[size:]
        return found


def allows(words: Tensor, token: int) -> bool:
    """Whether a mask [W] int32 has the bit of `token`."""
    return bool((int(words[token // 32]) >> (token % 32)) & 1)
