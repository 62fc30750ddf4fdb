"""The sections of ``docs/benchmarks.md`` on how a run under the launcher comes back from faults."""

import statistics
from typing import Any

from tests.benchmarks.training_pauses import chosen


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


def pauses(found: dict[str, Any]) -> str:
    """Return the section on how long a training stands still, beside other launchers."""
    names = list(dict.fromkeys(row["system"] for row in found["rows"]))
    tables = []
    for size in found["sizes"]:
        lines = [
            f"| {size} model | step | {' | '.join(found['events'])} |",
            f"|{'---|' * (len(found['events']) + 2)}",
        ]
        for name in names:
            cells, usual, again = [], [], 0
            for event in found["events"]:
                rows = chosen(found, name, size, event)
                seconds = [row["pause_s"] for row in rows]
                usual += [row["step_s"] for row in rows]
                again = max([again, *(row["again"] for row in rows)])
                cells.append(f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else "–")
            step = f"{statistics.median(usual) * 1e3:.0f} ms" if usual else "–"
            lines.append(f"| {name} | {step} | {' | '.join(cells)} |")
            if again:
                lines[-1] = lines[-1].replace(f"| {name} |", f"| {name}; up to {again} steps again |")
        tables.append("\n".join(lines))
    counts = [f"{len(chosen(found, names[0], size, 'SIGKILL'))} ({size})" for size in found["sizes"]]
    left = found.get("left_out", "")
    load = f", load {found['load']:.1f} at the end" if found["load"] else ""
    missing = (
        "" if found["torchft"].startswith("torchft==") else f" torchft was not measured: {found['torchft']}."
    )
    tables_text = "\n\n".join(tables)
    return f"""## How long a training stands still

`python -m tests.benchmarks.training_pauses --out docs/benchmarks`

Two members of this machine train a perceptron: a process of one is killed and another takes its place, its node gets
a notice and leaves, one comes, one is taken away. Longest time without a step, from what happens until all that are
to be there have trained again, seconds: median (worst) of {", ".join(counts)} each, of a node that comes twice as
many; the systems take turns. *In place* and *restart* are `--recovery`; torchft is {found["torchft"]} at two
heartbeat timeouts, and has no notice: its process is terminated; its gradients are reduced by its manager, for its
DistributedDataParallel ends with an error at a loss under this torch. torchrun's script saves every 5 s.
{found["machine"]}, torch {found["torch"]}{load}.{missing}{left}

{tables_text}

Goals were 0.25 s after SIGKILL and 0.05 s else; the small model meets them. Of larger ones a step alone takes longer
than each goal. One that comes is given 200 MB or 1 GB of parameters and momentum while all wait, and a killed one's
successor is one that comes: of 3.3 s with 500 MB, measured apart, 0.04 s are agreement and a new process group, 0.8 s
the copy and 2.4 s the first step together, 1.3 to 1.8 s later on, as who comes touches its memory for the first time.
torchft lets the others end their step meanwhile, to which one that comes contributes zeros.

![longest time without a step](benchmarks/training_pauses.svg)
"""


def chaos(found: dict[str, Any]) -> str:
    """Return the section on trainings to which things happen that a seed decides."""
    again = found["modes"].get("ddp", {}).get("restarts", {})
    said = "; ".join(f"{count} times because {reason}" for reason, count in again.items())
    restarts = f" Those of whole models started again nevertheless {said}." if said else ""
    return f"""## Trainings in chaos

`python -m tests.benchmarks.training_chaos --seeds 100 --out docs/benchmarks`

Real trainings over gloo under the launcher, {found["strikes"]} strikes each, decided by a seed: a process is killed
or stopped, a node is lost, stopped, given a notice, added or taken away, the storage of checkpoints fails for a
while, or two of these at once. With `--recovery auto` whole models keep the processes that are not hit, sharded ones
start again from what is saved. A run is whole if it continues after each strike, each sample is used once a pass,
parameters (float64) are those of an undisturbed run of one process up to a relative {found["rtol"]:g} and an absolute
{found["atol"]:g}, which is what another order of sums may change, and nobody who was not hit lost its process while
the generation was the same. {found["machine"]}, torch {found["torch"]}.

{_chaos_table(found)}

{_verdict(found)}{restarts}{found.get("note", "")}
"""


def chaos_cuda(found: dict[str, Any]) -> str:
    """Return the section on the same, where all processes train on one GPU."""
    seconds = ", ".join(f"{row['run_s']:.0f} s ({mode})" for mode, row in found["modes"].items())
    return f"""## Trainings in chaos on a GPU

`python -m tests.benchmarks.training_chaos --first 11 --seeds 6 --out docs/benchmarks`

The same on {found["machine"]}, torch {found["torch"]}: all processes share the GPU, hold model, gradients and moments
there, and exchange over gloo. Medians of a run {seconds}.

{_chaos_table(found)}

{_verdict(found)}{found.get("note", "")}
"""


def _chaos_table(found: dict[str, Any]) -> str:
    rows = []
    for mode, row in found["modes"].items():
        nodes, most, slots = found["clusters"][mode]
        events = ", ".join(f"{count} {name}" for name, count in row["events"].items())
        where = f"{nodes if nodes == most else f'{nodes} to {most}'} nodes of {slots}"
        rows.append(
            f"| {mode} | {where} | {row['runs']}{_seeds(row)} | {row['whole']} | {events}; "
            f"{row['two_at_once']} times two at once | {row['steps']:,} | {row['one_generation']} |"
        )
    return "\n".join(
        [
            "| parallel | where | runs (seeds) | whole | what happened | steps | runs of one generation |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def _seeds(row: dict[str, Any]) -> str:
    spans = [f"{first} to {last}" if first < last else f"{first}" for first, last in row.get("seeds", ())]
    return f" ({', '.join(spans)})" if spans else ""


def _verdict(found: dict[str, Any]) -> str:
    wrong = [f"{mode} {text}" for mode, row in found["modes"].items() for text in row["wrong"]]
    return (
        "Wrong: " + "; ".join(wrong) + "."
        if wrong
        else "**Nothing hung, was lost or was wrong in any of them.**"
    )
