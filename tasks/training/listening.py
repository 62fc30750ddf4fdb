"""Who hears of a training run while it continues, and how the launcher's events read."""

from collections.abc import Mapping
from typing import Protocol

from ebbflow.infra.protocols import TrainingEvent
from ebbflow.infra.protocols.trainings import NODES_MEMORY
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.training.report import EventReport, GoodputForecast, PointReport


class TrainingListener(Protocol):
    """Hears what happens, in any thread, and must not be long about it. Every method may do nothing."""

    def point(self, point: PointReport) -> None: ...
    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None: ...
    def event(self, event: EventReport) -> None: ...
    def forecast(self, forecast: GoodputForecast) -> None: ...
    def tick(self) -> None:
        """Do what takes longer; called several times a second in the thread that runs the training."""
        ...


class NullTrainingListener(TrainingListener):
    """A listener that does nothing; others extend it."""

    def point(self, point: PointReport) -> None: ...
    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None: ...
    def event(self, event: EventReport) -> None: ...
    def forecast(self, forecast: GoodputForecast) -> None: ...
    def tick(self) -> None: ...


class CompositeTrainingListener(NullTrainingListener):
    """Passes everything on to several listeners, in order."""

    def __init__(self, *listeners: TrainingListener) -> None:
        self._listeners = listeners

    def point(self, point: PointReport) -> None:
        for listener in self._listeners:
            listener.point(point)

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for listener in self._listeners:
            listener.metrics(step, epoch, values)

    def event(self, event: EventReport) -> None:
        for listener in self._listeners:
            listener.event(event)

    def forecast(self, forecast: GoodputForecast) -> None:
        for listener in self._listeners:
            listener.forecast(forecast)

    def tick(self) -> None:
        for listener in self._listeners:
            listener.tick()


def event_text(event: TrainingEvent) -> str:
    """Return an event of the launcher in words for the reader; empty for those that say little."""
    said = event.content
    placed = said.get("placement")
    where = ""
    if isinstance(placed, Mapping):
        where = f"{plural(sum(placed.values()), 'GPU')} on {plural(len(placed), 'node')}"
    match event.kind:
        case "generation":
            return f"generation {event.generation}: {where}"
        case "started":
            restored = said.get("restored")
            if said.get("own_checkpoints"):
                return f"the script starts on {plural(int(said.get('world', 1)), 'GPU')}"  # type: ignore[call-overload]
            begins = "begins" if restored is None else f"resumes from step {restored}"
            if "oldest" in said:
                begins += f" of the running checkpoint (oldest parameters of step {said['oldest']}"
                if (moved := said.get("perturbation")) is not None:  # unless another world had saved it
                    begins += f"; they had moved on by {moved:.3g}, L2 norm, when last measured"
                begins += ")"
            if fixed := said.get("fixed"):
                begins += f", and starts again at each change of nodes ({fixed}),"
            return f"training {begins} on {plural(int(said.get('world', 1)), 'GPU')}"  # type: ignore[call-overload]
        case "stop-requested":
            return f"asked to save and exit: {said.get('reason')}"
        case "stopped":
            if "error" in said and not said.get("saved"):
                return ""  # one of several survivors, of whom another saves
            saved = "saved" if said.get("saved") else "nothing saved"
            return f"stopped at step {said.get('step')}: {saved}"
        case "node-lost":
            return f"{said.get('node')} was lost: {str(said.get('how', '')).splitlines()[0]}"
        case "node-prepares":
            return f"{said.get('node')} prepares the code"
        case "worker-lost":
            return (
                f"training continues without {said.get('node')}: {str(said.get('how', '')).splitlines()[0]}"
            )
        case "worker-joins":
            return f"{said.get('node')} joins the training"
        case "members":
            if fixed := said.get("fixed"):
                return f"each change of nodes restarts all processes from now on: {fixed}"
            if first := said.get("first"):
                return f"all processes restart where the first one fails or leaves: {first}"
            return ""
        case "restarts":
            return f"all processes start again without those of {said.get('node')}: {said.get('reason')}"
        case "aggregator-lost":
            return f"{said.get('aggregator')} was lost"
        case "moments":
            old = plural(int(said.get("rounds", 0)), "round")  # type: ignore[call-overload]
            return f"moments of its tensors are {old} old: training continues with the last mirrored ones"
        case "node-notice":
            return f"{said.get('node')} received an interruption notice"
        case "hang":
            return f"hang detected: {said.get('reason')}"
        case "straggler":
            return f"{said.get('node')} is a straggler and is replaced"
        case "waiting":
            return f"waits for nodes: {said.get('reason')}"
        case "cut-off":
            return "processes that were left at the deadline were killed"
        case "saving" if said.get("reading"):
            return f"the run's checkpoints cannot be read yet, retrying: {said.get('error')}"
        case "saving":
            return f"step {said.get('step')} is not saved yet, retrying: {said.get('error')}"
        case "spilled":
            where = f"{said.get('uri')} on {said.get('host')}"
            return f"step {said.get('step')} is saved in {where}, not in the run's directory: {said.get('error')}"
        case "damaged":
            found = "; ".join(map(str, said.get("checkpoints", ())))  # type: ignore[call-overload]
            again = "; the run restarts at step 0, as requested (--restart)" if said.get("restarted") else ""
            return f"unusable checkpoints: {found}{again}"
        case "resumed":
            reached, saved = said.get("reached", -1), said.get("saved", -1)
            if reached == saved:
                return ""
            return (
                f"its launcher last knew of step {reached}, with step {saved} saved; processes that outlived it may "
                "have saved more"
            )
        case "communication":
            return _communication_text(said)
        case "checkpoint":
            error = str(said.get("error", ""))
            return f"no checkpoint: {error}" if error and said.get("reason") != NODES_MEMORY else error
        case "preflight":
            return f"the preflight run passed: {said.get('steps')} steps, a checkpoint saved and restored"
        case "resize-changed":
            return f"continues without nodes that were asked for: {said.get('reason')}"
        case _:
            return ""


def _communication_text(said: Mapping[str, object]) -> str:
    """Return what became of planned communication, in words."""
    if said.get("state") == "ddp":
        return f"gradients are exchanged by DDP: {said.get('reason') or 'no plan'}"
    if said.get("state") == "profiled":
        return "the training's communication is recorded, and its links are measured; a plan is searched"
    seconds, plain = float(said.get("seconds", 0.0)), float(said.get("plain_seconds", 0.0))  # type: ignore[arg-type]
    predicted = f"{seconds * 1e3:.3g} ms per iteration predicted, {plain * 1e3:.3g} ms without"
    if said.get("state") == "committed":
        return f"communication plan {said.get('version')} is accepted by all processes: {predicted}"
    return f"gradients are exchanged by communication plan {said.get('version')}"
