"""What to watch, against what, and how sure an alarm must be."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.config import OpenFraction, PositiveInt, Seed, Timeout, config
from heads.api.errors import UserError
from inference.folders import require_folder_name


@config("watch")
@dataclass(frozen=True)
class WatchConfig:
    """Settings of `headstart watch`. Fresh traffic is `records` or `metrics` if given, else answers
    decoded now."""

    drafter: str = ""
    """The drafter: its checkpoint folder, or its name in this run."""
    learn: bool = False
    """Make the reference: decode the prompts of `bench` with the target that the drafter was
    trained for, and write it to `reference` (empty: watch.json in the drafter's folder)."""
    reference: str = ""
    """Reference to compare with: a watch.json, a measurement's folder or its report.json; empty:
    the one in the drafter's folder."""
    records: str = ""
    """Folder of records that a server, a measurement or a generation wrote."""
    metrics: tuple[str, ...] = ()
    """Address of a running server (http://127.0.0.1:8000/metrics), or files with saved output of
    /metrics, oldest first, or folders of such files."""
    domain: str = ""
    """Domain of `metrics` from an engine that does not count by domain; empty: all domains of the
    reference together, in the shares that they have there."""
    window: PositiveInt = 256
    """Minimum number of verify passes between two reads of `metrics` that count as one
    observation."""
    every: Timeout = 15.0
    """Seconds between two reads of a running server's metrics."""
    seconds: Timeout = 3600.0
    """Maximum number of seconds that a running server is watched."""
    timeout: Timeout = 30.0
    """Seconds after which a read of a running server's metrics counts as failed."""
    patience: Timeout = 600.0
    """Seconds that a running server may show no counters, as while it restarts, before the watch
    ends."""
    key_variable: str = "HEADSTART_SERVER_KEY"
    """Environment variable with the running server's key, if it needs one."""
    system: str = ""
    """System prompt to put before every prompt that is decoded now."""
    name: str = "watch"
    """Folder of this watch below <root>/<name>/."""
    max_prompts: PositiveInt = 400
    """Maximum number of prompts to decode."""
    tolerance: OpenFraction = 0.05
    """Share of the accepted drafted tokens per pass (tau - 1) that may be lost without an alarm."""
    alarm_rate: OpenFraction = 0.01
    """Probability of ever raising an alarm while nothing has changed, over all domains and any
    number of reads together."""
    stop: bool = True
    """Stop decoding at the first alarm. Off: decode all prompts, for the narrowest intervals."""
    seed: Seed = 0
    """Seed of the order in which prompts are decoded."""

    def __post_init__(self) -> None:
        require_folder_name("watch.name", self.name)
        if self.records and self.metrics:
            raise UserError(
                "watch.records and watch.metrics are both given; watch one of them at a time."
            )
        if self.learn and (self.records or self.metrics):
            raise UserError(
                "watch.learn decodes prompts itself: leave watch.records and watch.metrics out."
            )
        if self.running and len(self.metrics) > 1:
            raise UserError(
                "watch.metrics names an address and something else; watch one server at a time."
            )
        if self.domain and not self.metrics:
            raise UserError("watch.domain is the domain of watch.metrics, which is not given.")
        if self.system and (self.records or self.metrics):
            raise UserError(
                "watch.system is for prompts that are decoded now; those of watch.records and "
                "watch.metrics are answered already."
            )

    @property
    def running(self) -> str:
        """The address among `metrics`, empty for files."""
        return next((one for one in self.metrics if "://" in one), "")
