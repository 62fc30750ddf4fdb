"""What follows when a generation has ended, unless the caller knows better
(``planners.training.failures.retries``).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ebbflow.infra.protocols import Continue, GenerationEnd, GenerationKind, Halt, RankFailure
from ebbflow.infra.training.channel.wire import AgentEnd, Failure
from ebbflow.infra.training.launcher.job import fresh_name
from ebbflow.infra.training.process.channel import Report, StopRequest
from ebbflow.infra.training.process.leaving import PEER_LOST

_STUBBORN = 3  # generations without progress before a failure that may pass counts as one that does not
_LONGEST = 30.0  # seconds before the next attempt
_STORAGE = re.compile(
    r"^ebbflow\.infra\.errors\.StorageError: (?!.*((permission|access) denied; check|credentials have expired))",
    re.MULTILINE,
)


class Persist:
    """Continue with what is left, replace what hung, stop at errors of the script; storage may come back.

    Args:
        minimum: slots below which the run waits for ``resize`` to bring more.
        replace: whether a node that hung is replaced by a new one of its size, or ignored.
        names: returns all node names used so far.
    """

    def __init__(self, minimum: int, replace: bool, names: Callable[[], set[str]]) -> None:
        self._minimum, self._replace, self._names = minimum, replace, names

    def __call__(self, end: GenerationEnd) -> Continue | Halt:
        if end.kind in ("finished", "preflight"):
            return Halt("finished", end.reason)
        if end.kind in ("silent", "unprepared") or (end.kind == "failed" and _own_fault(end)):
            return Halt("failed", end.reason)
        if end.idle >= _STUBBORN:
            return Halt("failed", f"{end.reason} (no step won in {end.idle} generations)")
        left = {name: slots for name, slots in end.left.items() if name not in end.suspects}
        more = left | self._new(end)
        delay = 0.0 if end.kind in ("stopped", "lost", "hung") else min(2.0**end.idle, _LONGEST)
        if sum(left.values()) >= self._minimum:
            return Continue(left, end.reason, delay, then=more if more != left else None)
        if sum(more.values()) >= self._minimum:
            return Continue(more, end.reason, delay)
        slots = sum(left.values())
        return Halt("waiting", f"{slots} slots are left, {self._minimum} are needed: {end.reason}")

    def _new(self, end: GenerationEnd) -> dict[str, int]:
        """Return nodes to take the place of those to blame."""
        found: dict[str, int] = {}
        for suspect in end.suspects if self._replace else ():
            if suspect in end.placement:  # else the others trained on without it
                found[fresh_name({*self._names(), *found})] = end.placement[suspect]
        return found


def after_loss(stop: StopRequest | None, reason: str, deadline: float) -> StopRequest:
    """Return what to ask of those that are left: they end by ``deadline``, or by that of the stop under way.

    A stop's deadline stays, as one may be saving by it.
    """
    return StopRequest(reason, deadline, lost=True) if stop is None else replace(stop, lost=True)


def _own_fault(end: GenerationEnd) -> bool:
    """Return whether it was an error of the script's own, which would come again."""
    first = end.failures[0] if end.failures else None
    return first is None or _of_script(first)


def script_failed(end: AgentEnd) -> bool:
    """Return whether a process left with an error of the script's own."""
    return any(map(_of_script, end.failures))


def _of_script(failure: RankFailure | Failure) -> bool:
    """Tell whether it was neither killed, nor left after another's loss, nor for storage that is away.

    What is denied, and a verdict on a checkpoint, do not pass by themselves.
    """
    away = _STORAGE.search(failure.error or failure.log)
    return not (failure.signal or failure.exit_code == PEER_LOST or away)


def failures_of(ends: Mapping[str, AgentEnd], log_of: Callable[[str], str]) -> tuple[RankFailure, ...]:
    """Return the failures of a generation's nodes, causes first. ``log_of`` returns a node's log."""
    found = []
    for name, end in ends.items():
        for f in end.failures:
            found.append(RankFailure(f.rank, name, f.exit_code, f.signal, f.error, f.log, f.time))
        if end.state in ("broken", "unformed") or (end.state == "failed" and not end.failures):
            found.append(RankFailure(None, name, None, "", end.error, log_of(name), end.time))
    # those that left because a peer was lost come last: their word is on the loss, not on its cause
    return tuple(sorted(found, key=lambda f: (f.exit_code == PEER_LOST, f.time)))


def any_ended(ends: Mapping[str, AgentEnd]) -> bool:
    """Tell whether a node's processes were told to end."""
    return any(end.state == "ended" for end in ends.values())


def silent(stop: StopRequest | None, ends: Mapping[str, AgentEnd], form: float) -> tuple[GenerationKind, str]:
    """Return how a generation ended whose script has said nothing, in which it had ``form`` seconds to form."""
    if stop is not None:
        return "stopped", f"{stop.reason}: killed at the deadline, nothing was saved"
    if any_ended(ends):
        return "unformed", f"the processes did not start within {form:g} s"
    return "silent", (
        "the script ended without connecting to its launcher: it must train inside "
        "`with ElasticRun.start() as run:`"
    )


def describe_end(end: AgentEnd) -> str:
    """Return in a line how a node's processes ended."""
    first = next(iter(end.failures), None)
    if first is None:
        return end.error or f"its agent {end.state}"
    return f"rank {first.rank} " + (
        f"was ended by {first.signal}" if first.signal else f"ended with status {first.exit_code}"
    )


def describe(failure: RankFailure) -> str:
    """Return a failure in a line: who, how, and the last line of its error."""
    who = f"rank {failure.rank} on {failure.node}" if failure.rank is not None else f"node {failure.node}"
    how = f"was ended by {failure.signal}" if failure.signal else f"ended with status {failure.exit_code}"
    if failure.exit_code is None and not failure.signal:
        how = "failed"
    lines = [line for line in (failure.error or failure.log).splitlines() if line.strip()]
    return f"{who} {how}: {lines[-1].strip()}" if lines else f"{who} {how}"


def saves(report: Report) -> bool:
    """Return whether a report says that the run is saved as of its step."""
    if report.kind == "checkpoint":
        return "error" not in report.content
    return report.kind in ("stopped", "finished") and bool(report.content.get("saved"))


def unformed(end: GenerationEnd, missing: Mapping[str, str], before: set[str]) -> GenerationEnd:
    """Return the end of a generation whose nodes did not all come up; those in ``before`` once were there."""
    alike: dict[str, list[str]] = {}
    for name, how in missing.items():
        alike.setdefault(how, []).append(name)
    said = []
    for how, nodes in alike.items():
        who = f"node {nodes[0]} is" if len(nodes) == 1 else f"nodes {', '.join(nodes)} are"
        said.append(f"{who} not available: {how}".strip())
    reason = "; ".join(said)
    left = {name: slots for name, slots in end.left.items() if name not in missing}
    if before.issuperset(missing):
        return replace(end, kind="lost", reason=reason, left=left, failures=())
    return replace(end, kind="unformed", reason=reason, left=left, suspects=tuple(missing), failures=())


def unprepared(end: GenerationEnd, problems: Mapping[str, str]) -> GenerationEnd:
    """Return the end of a generation on whose nodes the user's code could not be prepared (node -> why)."""
    name, problem = next(iter(problems.items()))
    return replace(end, kind="unprepared", reason=f"{name} cannot prepare the code: {problem}", failures=())
