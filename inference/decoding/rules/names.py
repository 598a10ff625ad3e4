"""The rules' names and promises about the text. It does not import torch, for code that prints
reports."""

from __future__ import annotations

TEXT, DISTRIBUTION, LOSSY = "text", "distribution", "lossy"
PROMISES = {
    "match": TEXT,
    "rejection": DISTRIBUTION,
    "block": DISTRIBUTION,
    "specinfer": DISTRIBUTION,
    "traversal": DISTRIBUTION,
    "typical": LOSSY,
}
"""What a rule keeps above temperature 0: the target's text for the seed, its distribution, or
neither."""
RULES = tuple(PROMISES)
AUTO = "auto"
"""The setting that selects `best_rule`."""
LOSSLESS = tuple(name for name, kept in PROMISES.items() if kept != LOSSY)
CHAINS_ONLY = ("rejection", "block")


def best_rule(shape: str, temperature: float) -> str:
    """The rule that accepts most drafts of a shape (chain, tree, dynamic, dartree, none) and keeps
    the target's distribution (docs/reports/rules.md). At temperature 0 all of these rules accept
    the same drafts.

    A tree that is chosen during drafting has no distribution to weigh its nodes by. Its drafts are
    certain under the other rules, while `match` drafts with the same noise as the target.
    """
    if temperature == 0:
        return "match"
    return {"chain": "block", "tree": "traversal"}.get(shape, "match")


def sampling_rule(rule: str, shape: str) -> str:
    """The rule for requests of any temperature: auto selects the best one above 0, which decides
    like match at 0."""
    return best_rule(shape, 1.0) if rule == AUTO else rule


def promise(rule: str, temperature: float) -> str:
    """What `rule` keeps: TEXT (any known rule at temperature 0), DISTRIBUTION, or LOSSY (also for
    unknown rules)."""
    if rule not in PROMISES:
        return LOSSY
    return TEXT if temperature == 0 else PROMISES[rule]


def rule_text(rule: str, temperature: float) -> str:
    """The rule's name for readers, with what it does not promise in brackets."""
    kept = promise(rule, temperature)
    if kept == LOSSY:
        return f"{rule} (LOSSY: the text does not follow the target's distribution)"
    if kept == DISTRIBUTION:
        return f"{rule} (the target's distribution, not its text for the seed)"
    return rule if PROMISES[rule] != LOSSY else f"{rule} (lossy above temperature 0)"
