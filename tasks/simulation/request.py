"""What a user asks for on the command line, as values: rates, options, and how they are shown again."""

from pathlib import Path
from typing import Any

from ebbflow.infra.simulation.faults import Failures, Stragglers
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import is_number
from ebbflow.tasks.simulation.inputs import Options


def failures(text: str | None) -> Failures | None:
    """Return ``RATE[,REPAIR]``: losses per node-hour, and seconds until a node is back. Raises ``OptionError``."""
    return None if text is None else Failures(*_numbers("--failures", text, "RATE[,REPAIR]", "0.01,1800"))


def stragglers(text: str | None) -> Stragglers | None:
    """Return ``SHARE[,FACTOR]``: chance of a node to be slow, and how many times. Raises ``OptionError``."""
    return None if text is None else Stragglers(*_numbers("--stragglers", text, "SHARE[,FACTOR]", "0.1,2"))


def _numbers(option: str, text: str, shape: str, example: str) -> list[float]:
    parts = text.split(",")
    values = [float(part) for part in parts if is_number(part)]
    if not 1 <= len(values) <= 2 or len(values) < len(parts):
        raise OptionError(f"{option} is written {shape}, such as {example}; got {text!r}")
    return values


def shown(options: Options, workloads: str, policies: str, seeds: int) -> dict[str, Any]:
    """Return what was asked for, for reports; what was left open is left out."""
    found = {
        "workload": workloads,
        "cluster": Path(options.cluster).name,
        "policy": policies,
        "seeds": seeds,
        "interval, s": options.interval,
        "restart delay, s": options.restart_delay,
        "interference": options.interference or None,
        "spot trace": options.spot_trace and options.spot_trace.name,
        "notice, s": options.notice or None,
        "prices": options.prices and options.prices.name,
        "throughputs": options.throughputs and options.throughputs.name,
    }
    if options.failures:
        found["failures"] = (
            f"{options.failures.rate:g} per node-hour, back after {options.failures.repair:g} s"
        )
    if options.stragglers:
        found["stragglers"] = (
            f"{options.stragglers.share:.0%} of nodes, {options.stragglers.factor:g} times slower"
        )
    if options.failures or options.spot_trace:
        found["checkpoints every, s"] = options.checkpoint_interval
    return {name: value for name, value in found.items() if value is not None}
