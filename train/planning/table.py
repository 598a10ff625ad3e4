"""A training's plan as a table."""

from __future__ import annotations

from rich.table import Table

from inference.target.memory import gib
from train.planning.plan import Plan


def plan_table(content: Plan) -> Table:
    """The plan as a table for the terminal."""
    found = Table(show_header=False, box=None, pad_edge=False)
    settings, memory, step = content["settings"], content["memory_bytes"], content["step_seconds"]
    fits = {True: "fits", False: "does NOT fit", None: ""}[content["fits"]]
    capacity = content["memory_capacity"]
    room = f" of {gib(int(capacity))}: {fits}" if capacity else ""
    target, drafter = content["target"], content["drafter"]
    found.add_row(
        "target",
        f"{target['path']}: {target['parameters']:,} weights, {target['active']:,} of the layers "
        "per token",
    )
    cache = target["cache"]
    states = f", {gib(cache['row'])} of states per row, {gib(cache['node'])} per drafted token"
    kept = f"{cache['slot'] / 1024:.1f} KiB per token{states if cache['row'] else ''}"
    found.add_row("  its cache in decoding", kept)
    found.add_row("drafter", f"{drafter['kind']}: {drafter['trained_weights']:,} trained weights")
    beside = content["target_process_bytes"]
    who = "trainer" if beside else "process"
    found.add_row(f"memory per {who}", f"{gib(memory['total'])}{room}")
    for name, count in memory.items():
        if name != "total" and count:
            found.add_row(f"  {name}", gib(count))
    if beside:
        found.add_row("memory per target process", gib(beside["total"]))
    disk = content["disk_bytes"]
    found.add_row("disk", f"states {gib(disk['states'])}, best {gib(disk['best'])}")
    stores = ", ".join(f"{fmt} {gib(count)}" for fmt, count in disk["feature_store"].items())
    found.add_row("  feature store, if any", stores)
    beforehand, reading = content["target_pass"], content["reading"]
    making = f"; making it: {beforehand['device_hours']:.3g} device-hours"
    once = making if settings["features"] == "store" else ""
    found.add_row("target runs", beforehand["where"] + once)
    if reading is not None:
        held = f"{settings['trainer_target']} (features.trainer_target)"
        found.add_row("  a trainer holds of it", held)
        rates = [rate(reading[f"{name}_bytes_per_second"]) for name in ("process", "total")]
        found.add_row(
            "features read",
            f"{rates[0]} per trainer, {rates[1]} in all ({reading['bytes_per_token']:,.0f} bytes a "
            "token); the time assumes that they arrive as fast",
        )
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in step.items() if name != "total")
    found.add_row("seconds per step", f"{step['total']:.3g} ({parts})")
    found.add_row("tokens", f"{content['tokens']:,}, {content['tokens_source']}")
    found.add_row("speed", content["speed"]["source"])
    found.add_row(
        "time",
        f"{content['hours']:.3g} h for {content['steps']:,} steps, {content['device_hours']:.3g} "
        f"device-hours on {settings['processes']} (measuring tau comes on top unless it was "
        "measured)",
    )
    return found


def rate(bytes_per_second: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.3g} {unit}/s"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
