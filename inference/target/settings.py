"""Settings of a text config, whose names differ between families, and of loading a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Loading = dict[str, str | bool]
"""The settings, besides revision and dtype, that change what a target computes, by name, where they
differ from the defaults; see `inference.target.loading.TargetConfig.unusual`."""


def loading_text(loading: Mapping[str, str | bool]) -> str:
    """Settings of loading as text, such as `quantization=bnb-4bit`; empty for the defaults."""
    return ", ".join(f"{name}={value}" for name, value in loading.items()).lower()


def first_setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that a config has; the first layer's value if layers differ."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers raises it for settings that differ between layers
            value = getattr(config.per_layer_config[0], name, None)
        if value is not None:
            return value
    return default


def logit_factors(config: Any) -> tuple[float, float]:
    """What a target's logits are multiplied by, and what they are divided by."""
    scale, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    return float(scale or 1.0), float(divisor or 1.0)


def logit_cap(config: Any) -> float | None:
    """The soft cap on a target's logits; None if it has none."""
    names = ("final_logit_softcapping", "logits_soft_cap")
    return next((float(cap) for name in names if (cap := getattr(config, name, None))), None)
