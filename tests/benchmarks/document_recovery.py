"""The section of ``docs/benchmarks.md`` on how a run under the launcher comes back from faults."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    setup, medians, runs = found["setup"], found["medians"], found["runs"]
    faults = list(medians)

    def row(title: str, name: str) -> str:
        return f"| {title} | " + " | ".join(f"{medians[fault][name]:.2f}" for fault in faults) + " |"

    parts = "\n".join(row(f"{name}: {what}", name) for name, what in setup["parts"].items())
    worst = " | ".join(f"{max(run['total'] for run in runs[fault]):.2f}" for fault in faults)
    lost = " | ".join(f"{max(run['lost_steps'] for run in runs[fault]):.0f}" for fault in faults)
    return f"""## Coming back from faults

`python -m tests.benchmarks.training_recovery --out docs/benchmarks`

Two nodes of this machine train a perceptron of a million parameters; one is killed with all its processes, given
{setup["notice_s"]:.0f} s notice, or stopped, and the run continues on the other. Seconds, medians of
{setup["repetitions"]} faults each; {setup["machine"]}, torch {setup["torch"]}. A stopped node counts as hung after
{setup["stopped_s"]:g} s. Our own share is {", ".join(setup["own"][:-1])} and {setup["own"][-1]}; rendezvous is
torchrun's, whose agents look for each other once a second.

| | {" | ".join(faults)} |
|---|{"---|" * len(faults)}
{parts}
{row("**fault to next step**", "total")}
{row("of which our own share", "own")}
| worst | {worst} |
| steps lost at most | {lost} |

![seconds from the fault to the next step](benchmarks/training_recovery.svg)
"""
