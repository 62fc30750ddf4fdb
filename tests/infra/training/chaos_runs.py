"""Trainings to which things happen that a seed decides, one after another and two at once.

Processes are killed and stopped, nodes are lost, stopped, given notice, added and taken away, and the storage of
checkpoints fails for a while. Afterwards no sample may be lost or used twice, the parameters must be those of a run
in which nothing happened, and who was not hit must have kept its process while the generation was the same.
"""

import ctypes
import functools
import os
import random
import signal
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import Continue, GenerationEnd, Halt, TrainingStatus
from ebbflow.infra.training.checkpoints.reading import load_checkpoint
from ebbflow.infra.training.launcher.decide import Persist
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataOrder, DataPosition
from tests.infra.training.elastic_runs import Run
from tests.infra.training.service.service_script import BATCH, SAMPLES, dataset, make_model

Event = Literal["kill", "lose", "notice", "grow", "shrink", "freeze", "storage"]
Mode = Literal["ddp", "fsdp", "hsdp"]  # whole models, whose processes stay; sharded ones, which start again

WIDTH = 32
SEED = 3  # of the script's run
RTOL, ATOL = 1e-7, 1e-9  # of parameters: those of float64, whose sums are made in another order
_WEIGHTS: Mapping[Event, int] = {  # the rarer need new nodes, which take their time to start
    "kill": 5, "freeze": 2, "lose": 1, "notice": 1, "grow": 1, "shrink": 1, "storage": 1,
}  # fmt: skip
_NODE = 0.25  # share of freezes that are of a whole node
_TWO = 0.35  # share of strikes of two events
_PAUSE = 0.3  # seconds of training between two strikes, at most
_BROKEN = 1.5  # seconds that the storage fails, at most
_HANG = HangRule(stopped=0.3)
_NOTICE = 30.0  # seconds
_DELAY = 0.1  # seconds before the next generation, at most
_ALLOWED = (
    "no process is left that knows",
    "slots are left",
    "the workers had not met",
    "generation was to end",
    "the model is sharded",
)
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens at one time: ``pause`` seconds after the run has come through the last one."""

    pause: float
    events: tuple[Event, ...]
    way: int  # which of several victims


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a mode's runs train: nodes at the beginning and at most, and processes of each."""

    nodes: int
    most: int
    slots: int


CLUSTERS: Mapping[Mode, Cluster] = {
    "ddp": Cluster(3, 4, 1),
    "fsdp": Cluster(2, 3, 1),
    "hsdp": Cluster(2, 2, 2),
}


def schedule(seed: int, count: int) -> tuple[Strike, ...]:
    """Return the strikes of a seed."""
    rng = random.Random(f"training chaos {seed}")
    found = []
    for _ in range(count):
        events = rng.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=2 if rng.random() < _TWO else 1)
        found.append(Strike(rng.random() * _PAUSE, tuple(events), rng.randrange(1 << 16)))
    return tuple(found)


class ChaosRun(Run):
    """A training in chaos.

    Args:
        folder: for all that it writes.
        mode: how the model is parallel.
        cluster: where it trains; the mode's unless given.
        hang: bounds beyond which something is taken to hang.
        settings: others than those of such a run.
    """

    def __init__(
        self,
        folder: Path,
        mode: Mode = "ddp",
        *,
        cluster: Cluster | None = None,
        hang: HangRule = _HANG,
        **settings: Any,
    ) -> None:
        self.cluster, self._added = cluster or CLUSTERS[mode], 0
        self._timer: threading.Timer | None = None
        self.happened: list[str] = []
        super().__init__(
            folder,
            self.cluster.nodes,
            RunSettings(
                adaptive=False,
                **{"checkpoint_interval": 0.5, **settings},
            ),
            arguments=("100000", "momentum", "0.02", "float64", str(WIDTH), mode),
            slots=self.cluster.slots,
            hang=hang,
            decide=self._decide,
            replace=False,
            stragglers=False,
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.join(10)
        super().close()

    def _decide(self, end: GenerationEnd) -> Continue | Halt:
        """Return what follows by the launcher's own rule, only sooner."""
        answer = Persist(1, replace=False, names=lambda: set(self.pool._nodes))(end)
        # to wait for what passes by itself is no part of what happens here
        return replace(answer, delay=min(answer.delay, _DELAY)) if isinstance(answer, Continue) else answer

    # --- who is there ---------------------------------------------------------------------------------------

    def trained(self) -> dict[int, int]:
        """Return the process IDs of those that have trained in the newest generation, by rank."""
        return {one["rank"]: one["pid"] for one in self._of_generation()}

    def workers(self) -> dict[int, int]:
        """Return the process IDs of those that have trained last, by rank."""
        mine = self._of_generation()
        last = max((one["step"] for one in mine), default=0)
        return {one["rank"]: one["pid"] for one in mine if one["step"] >= last - 1}

    def _of_generation(self) -> list[dict[str, Any]]:
        newest = max((one["generation"] for one in self.steps), default=0)
        return [one for one in self._steps if one["generation"] == newest]

    def pids(self, node: str) -> set[int]:
        with suppress(ClusterError):
            return set(self.pool.pids(node))
        return set()

    def _settled(self) -> bool:
        placement = self.trainer.status().placement
        at = [self.pids(name) & set(self.trained().values()) for name in placement]
        return bool(at) and all(len(found) == self.cluster.slots for found in at)

    # --- what happens ---------------------------------------------------------------------------------------

    def through(self, strikes: Iterable[Strike]) -> int:
        """Let all happen, see that nothing was lost, and return the last step."""
        self.until(lambda: self.step > 3, "steps")
        for one in strikes:
            self.strike(one)
        return self.finish()

    def strike(self, one: Strike) -> None:
        """Let things happen at once, and wait until the run has come through them."""
        SystemClock().sleep(one.pause)
        self.until(self._settled, "nodes whose processes all train")
        status, trained = self.trainer.status(), self.trained()
        blow = _Blow(self, dict(status.placement), random.Random(one.way))
        begun = self.step
        for event in one.events:
            blow.happen(event)
        if blow.resized:
            self.trainer.resize(blow.wanted)
        self.until(lambda: self.step > begun + 2 and blow.over(), f"{'+'.join(blow.done)}")
        self.happened.append("+".join(blow.done))
        others = {pid for name, mine in blow.nodes.items() if name not in blow.touched for pid in mine}
        stay = {rank: pid for rank, pid in trained.items() if pid in others}
        if self.trainer.status().generation == status.generation:
            self.until(
                lambda: stay.items() <= self.workers().items(), f"processes of {sorted(stay)}, which stay"
            )

    def break_storage(self, seconds: float) -> None:
        """Let checkpoints be neither written nor read for a while."""
        place = self.folder / "run" / "checkpoints"
        if self._timer is not None or not place.is_dir():
            return
        other = self.folder / "run" / "not-a-directory"
        other.write_text("")
        _exchange(place, other)

        def mend() -> None:
            _exchange(place, other)
            other.unlink()
            self._timer = None

        self._timer = threading.Timer(seconds, mend)
        self._timer.start()

    @property
    def whole(self) -> bool:
        """Tell whether the storage works."""
        return self._timer is None

    def added(self) -> str:
        """Return the name of a node that comes."""
        self._added += 1
        return f"added-{self._added}"

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Stop the run, see that it lost nothing, and return its last step."""
        self.until(lambda: self.whole, "storage that works")
        status = self.stop()
        end = status.end
        assert end is not None
        # one that had gone back to what was saved need not have come as far as the one before
        step = end.last_step if end.last_step >= 0 else status.step
        self.check_data(step)
        # where a loss came first, shards go back to what was saved, of which the launcher may not have heard
        self.check_weights(step if end.kind == "stopped" else end.saved_step)
        self.check_slot_seconds(status)
        for said in self.kinds("restarts"):
            assert any(reason in str(said["reason"]) for reason in _ALLOWED), said
        return step

    def check_slot_seconds(self, status: TrainingStatus) -> None:
        """See that slots of the last generation count while their nodes were of it, as its events tell."""
        end = status.end
        assert end is not None
        slots, expected, since = self.cluster.slots, 0.0, dict[str, float]()
        for event in self.trainer.events():
            name = str(event.content.get("node"))
            if event.generation != end.generation:
                continue
            if event.kind == "generation":
                since = dict.fromkeys(event.content["placement"], end.started)  # type: ignore[call-overload]
            elif event.kind == "worker-joins":
                since[name] = event.time
            elif event.kind in ("worker-lost", "node-lost") and name in since:
                expected += slots * (event.time - since.pop(name))
        expected += slots * sum(end.ended - begun for begun in since.values())
        assert abs(end.slot_seconds - expected) < 0.01 * expected + 1.0

    def check_weights(self, least: int) -> None:
        """See that ``least`` steps and more are saved, with parameters of a run in which nothing happened."""
        found = load_checkpoint(str(self.folder / "run"))
        step = int(found["run"]["progress"]["step"])
        assert step >= least
        for name, value in undisturbed().after(step).items():
            torch.testing.assert_close(found["model"][name], value, rtol=RTOL, atol=ATOL)


class _Blow:
    """The events of one strike."""

    def __init__(self, run: ChaosRun, wanted: dict[str, int], rng: random.Random) -> None:
        self.run, self.wanted, self.rng = run, wanted, rng
        self.nodes = {name: run.pids(name) for name in wanted}
        self.touched: set[str] = set()  # nodes that are hit, or leave
        self.resized = False
        self.done: list[str] = []
        self._leave: set[str] = set()
        self._come: set[str] = set()
        self._gone: set[int] = set()  # processes

    def happen(self, event: Event) -> None:
        run, rng = self.run, self.rng
        free = sorted(set(self.wanted) & set(self.nodes) - self.touched)
        if event in ("lose", "notice", "shrink", "freeze") and len(free) < 2:
            event = "grow"
        if event == "grow" and len(self.wanted) >= run.cluster.most:
            event = "shrink" if len(free) > 1 else "kill"
        if event == "kill" and not free:
            event = "storage"
        self.done.append(event)
        if event == "storage":
            run.break_storage(rng.random() * _BROKEN)
            return
        if event == "grow":
            name = run.added()
            self.wanted[name], self.resized = run.cluster.slots, True
            self._come.add(name)
            return
        name = rng.choice(free)
        self.touched.add(name)
        workers = sorted(self.nodes[name] & set(run.trained().values()))
        if event == "kill":
            self._end(rng.choice(workers), signal.SIGKILL)
        elif event == "freeze" and rng.random() > _NODE:
            self._end(rng.choice(workers), signal.SIGSTOP)
        elif event in ("freeze", "lose"):
            self._gone.update(workers)
            (run.pool.pause if event == "freeze" else run.pool.kill)(name)
            del self.wanted[name]
        else:
            self._leave.add(name)
            del self.wanted[name]
            if event == "notice":
                run.pool.notice(name, _NOTICE)
            else:
                self.resized = True

    def over(self) -> bool:
        """Tell whether the run has come through them."""
        trained, placement = set(self.run.trained().values()), self.run.trainer.status().placement
        return (
            not any(map(_lives, self._gone))
            and not self._leave & set(placement)
            and all(self.run.pids(name) & trained for name in self._come)
        )

    def _end(self, pid: int, number: signal.Signals) -> None:
        self._gone.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Undisturbed:
    """A training of one process in which nothing happens: SGD with Nesterov's momentum, of clipped gradients.

    It does not depend on a run's seed or mode, and keeps the parameters after each step that it has taken.
    """

    def __init__(self) -> None:
        self._model = make_model(WIDTH).double()
        self._parameters = list(self._model.parameters())
        self._momentum = [torch.zeros_like(one) for one in self._parameters]
        self._x, self._y = (part.double() for part in dataset())
        self._order, self._cursor = DataOrder(SAMPLES, SEED), DataPosition()
        self._kept = [self._state()]

    def after(self, steps: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters after ``steps``."""
        while len(self._kept) <= steps:
            self._step()
            self._kept.append(self._state())
        return self._kept[steps]

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._model.state_dict().items()}

    def _step(self) -> None:
        cursor = self._cursor
        rows = torch.tensor(self._order.indices(cursor.turn, cursor.position, cursor.position + BATCH))
        loss = torch.nn.functional.mse_loss(self._model(self._x[rows]), self._y[rows])
        gradients = torch.autograd.grad(loss, self._parameters)
        norm = torch.stack([one.square().sum() for one in gradients]).sum().sqrt()
        scale = (5.0 / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for parameter, gradient, moved in zip(self._parameters, gradients, self._momentum, strict=True):
                moved.mul_(0.9).add_(gradient * scale)
                parameter.sub_(0.05 * (gradient * scale + 0.9 * moved))
        self._cursor = self._order.after(cursor, BATCH)


@functools.cache
def undisturbed() -> Undisturbed:
    """Return the one of this process."""
    return Undisturbed()


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places at once, so that nobody finds neither."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, bytes(one), _HERE, bytes(other), _EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), f"{one} and {other} cannot change places")
