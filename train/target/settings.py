"""Settings of loading, besides revision and dtype, that change what a target computes."""

from __future__ import annotations

from inference.target.loading import TargetConfig


def unusual_loading(config: TargetConfig) -> dict[str, str | bool]:
    """Those settings that differ from the defaults, by name; earlier versions did not record
    them."""
    found: dict[str, str | bool] = {}
    if config.quantization not in ("auto", "none"):  # both load the files as they are
        found["quantization"] = config.quantization
    if config.long_context:
        found["long_context"] = True
    return found


def loading_of(config: TargetConfig) -> str:
    """`unusual_loading` as one string, such as `quantization=bnb-4bit`; empty for the defaults."""
    return ", ".join(f"{name}={value}" for name, value in unusual_loading(config).items()).lower()
