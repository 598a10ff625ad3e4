"""A trained estimate of whether a drafted token will be accepted (after SpecDec++, 2405.19715).

It is a logistic regression on features of the drafter's distributions at every level, fitted on
recorded passes of the same drafter. The features of a level depend on the distributions that it
and the levels above it were drawn from, never on the token drawn at the level itself; see
`inference.decoding.adaptive.lengths`.

Legend: B rows, D drafted tokens of a chain, V' draft vocabulary, F features.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import read_object

FEATURES = ("log_best", "margin", "entropy", "log_best_above", "depth")
FORMAT = 1


def level_features(logits: Tensor, temperature: float) -> Tensor:
    """Features [B, D, F] float32 of the logits [B, D, V'] that levels were drawn from (untempered
    at 0).

    The features are the log of the best probability, its distance to the second best, the entropy,
    the sum of the first feature over the levels above, and the depth.
    """
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    best = logs.topk(2, dim=-1).values
    first, second = best.unbind(-1)
    above = first.cumsum(1) - first
    depth = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float32)
    margin, depth = (first - second).clamp(max=20.0), depth.expand_as(above)
    return torch.stack([first, margin, entropy(logs), above.clamp(min=-20.0), depth], -1)


def entropy(logs: Tensor) -> Tensor:
    """Entropy in nats [...] of log-probabilities [..., V']."""
    return -(logs.exp() * torch.where(logs > float("-inf"), logs, 0.0)).sum(-1)


@dataclass
class AcceptanceHead:
    """A logistic regression: the logit of acceptance is weight [F] . features + bias []."""

    weight: Tensor
    bias: Tensor

    def chance(self, features: Tensor) -> Tensor:
        """Probability of acceptance [...] float32 for features [..., F]."""
        return (features @ self.weight + self.bias).sigmoid()

    def save(self, path: Path) -> None:
        """Write as JSON."""
        content = {
            "format": FORMAT,
            "features": list(FEATURES),
            "weight": self.weight.tolist(),
            "bias": float(self.bias),
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> AcceptanceHead:
        """Read a file written by `save`. Raises `UserError` if it is missing or invalid."""
        advice = "Fit one with scripts/tools/fit_acceptance.py."
        try:
            content = read_object(Path(path), advice)
            if content["format"] != FORMAT or tuple(content["features"]) != FEATURES:
                raise UserError(f"'{path}' was written by another version. Fit it again.")
            weight, bias = (torch.tensor(content[k], device=device) for k in ("weight", "bias"))
            if weight.shape != (len(FEATURES),) or not torch.isfinite(weight.sum() + bias):
                raise ValueError(f"{len(FEATURES)} finite weights and a bias are needed")
        except UserError as error:
            raise UserError(
                f"decode.adaptive_head: '{path}' is no acceptance head: {error}"
            ) from error
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"decode.adaptive_head: '{path}' is no acceptance head ({error!r}). {advice}"
            ) from error
        return cls(weight, bias)


@dataclass
class Recorded:
    """Drafted tokens that were tested: features [M, F], accepted [M] bool."""

    features: Tensor
    accepted: Tensor


def record(
    logits: Tensor, temperature: float, accepted: Tensor, tested: Tensor, active: Tensor
) -> Recorded:
    """Record the tested levels of a pass.

    logits [B, D, V']; accepted, tested (accepted plus rejected), active [B].
    """
    features = level_features(logits, temperature)
    level = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    used = (level <= tested[:, None]) & active[:, None]
    return Recorded(features[used], (level <= accepted[:, None])[used])


def fit(data: list[Recorded], refusal_weight: float = 1.0, decay: float = 1e-4) -> AcceptanceHead:
    """Fit a logistic regression by LBFGS in float64, with features scaled to unit variance.

    refusal_weight: weight of rejected tokens relative to accepted ones; 1 is calibrated, and a
    larger weight stops drafts earlier, as in SpecDec++. decay: weight decay. Raises `UserError` if
    only one outcome was recorded.
    """
    features = torch.cat([item.features for item in data]).double()
    accepted = torch.cat([item.accepted for item in data]).double()
    if not 0 < float(accepted.sum()) < len(accepted):
        raise UserError(
            "an acceptance head needs both accepted and refused drafts; record more passes."
        )
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    scaled = (features - mean) / scale
    weights = torch.where(accepted > 0, 1.0, refusal_weight).double()
    parameters = torch.zeros(features.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = scaled @ parameters[:-1] + parameters[-1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, accepted, weights)
        loss = loss + decay * parameters[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    weight = parameters.detach()[:-1] / scale
    return AcceptanceHead(weight.float(), (parameters.detach()[-1] - (weight * mean).sum()).float())
