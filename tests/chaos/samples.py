"""Which samples went into a training's result: what its processes wrote down (``fit``), put together.

A run that goes on from a checkpoint does the steps after it again: only what came last counts. A *stretch* is one
world of processes; it takes the history back to where it began and adds the steps that it did.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass
class Stretch:
    """One world of processes."""

    key: tuple[str, int]  # of the launcher, and its generation
    begins: int  # steps that were done before
    at: float  # s, monotonic, at which its first process began
    seen: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)  # by step: pass, and samples
    done: dict[int, float] = field(default_factory=dict)  # steps, and when they were first said to be done


@dataclass
class Account:
    """What a training used, in order."""

    steps: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # pass, and samples
    ends: list[tuple[int, str]] = field(
        default_factory=list
    )  # steps and weights, as each end of the script said
    stretches: int = 0
    repeated: int = 0  # steps that were done more than once
    problems: list[str] = field(default_factory=list)


def read(folder: Path) -> list[list[Line]]:
    """Return the lines of each process; a last one that was cut off by SIGKILL is left out."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        lines: list[Line] = []
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                lines.append(json.loads(text))
        if lines:
            found.append(lines)
    return found


def account(processes: Iterable[list[Line]]) -> Account:
    """Put together what the processes of one training wrote down."""
    found = Account()
    stretches: dict[tuple[str, int], Stretch] = {}
    for lines in processes:
        first = lines[0]
        if "begins" not in first:
            found.problems.append(f"a process says first: {dict(first)}")
            continue
        key = (str(first["launch"]), int(first["generation"]))
        one = stretches.setdefault(key, Stretch(key, int(first["begins"]), float(first["at"])))
        one.at = min(one.at, float(first["at"]))
        if one.begins != first["begins"]:
            found.problems.append(
                f"processes of generation {key} begin at {one.begins} and {first['begins']}"
            )
        for line in lines[1:]:
            if "seen" in line:
                one.seen.setdefault(line["step"], []).append((line["turn"], line["seen"]))
            elif "done" in line:
                at = one.done.get(line["done"], float(line["at"]))
                one.done[line["done"]] = min(at, float(line["at"]))
            elif "end" in line:
                found.ends.append((line["end"], line["weights"]))
    _put_together(sorted(stretches.values(), key=lambda one: one.at), found)
    return found


def _put_together(stretches: list[Stretch], found: Account) -> None:
    found.stretches = len(stretches)
    last: tuple[Stretch, float] | None = None
    for one in stretches:
        if one.begins > len(found.steps):
            found.problems.append(
                f"generation {one.key} begins at step {one.begins}, after {len(found.steps)}"
            )
            return
        if one.done and last is not None and last[1] > min(one.done.values()):
            found.problems.append(f"generations {last[0].key} and {one.key} trained at the same time")
        if one.done:
            found.repeated += sum(step < len(found.steps) for step in one.done)
            del found.steps[one.begins :]
        for step in sorted(one.done):
            if step != len(found.steps):
                found.problems.append(f"generation {one.key} did step {step} after {len(found.steps)} steps")
                return
            turns = {turn for turn, _ in one.seen.get(step, [])}
            if len(turns) != 1:
                found.problems.append(f"step {step} is of passes {sorted(turns)}")
                return
            samples = [n for _, seen in one.seen[step] for n in seen]
            found.steps.append((turns.pop(), tuple(samples)))
        if one.done:
            last = one, max(one.done.values())


def wrong(
    found: Account, samples: int, batch: int, epochs: int, order: Iterable[Iterable[int]], weights: str = ""
) -> list[str]:
    """Return what does not hold: every pass has each sample once, in the run's ``order`` of batches.

    ``weights`` are those of a training that nothing disturbed, where they must be the same.
    """
    said = list(found.problems)
    per_pass = samples // batch
    if len(found.steps) != epochs * per_pass:
        said.append(
            f"{len(found.steps)} steps count, and {epochs * per_pass} are {epochs} passes over the data"
        )
    for turn in range(epochs):
        used = sorted(n for of, some in found.steps for n in some if of == turn)
        if used != list(range(samples)):
            twice = sorted({n for n in used if used.count(n) > 1})
            never = sorted(set(range(samples)) - set(used))
            said.append(
                f"pass {turn} used {len(twice)} samples twice ({twice[:3]}) and {len(never)} never ({never[:3]})"
            )
            break
    for step, ((_, used_here), due) in enumerate(zip(found.steps, order, strict=False)):
        if sorted(used_here) != sorted(due):
            said.append(f"step {step} used other samples than it should have")
            break
    if not found.ends:
        said.append("it never came to its end")
    elif weights and any(reached != weights for _, reached in found.ends):
        said.append("its weights are not those of a training that nothing disturbed")
    return said
