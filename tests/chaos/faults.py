"""What goes wrong in a chaotic run, and when: drawn from its seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill-spark",  # a Spark worker, with all that runs on it
    "kill-gpu",  # a training node
    "kill-app",  # a process that holds a pipeline's run
    "kill-loop",  # the capacity loop
    "database",  # its connection, for a while
    "disk",  # is full, for a while
    "clock",  # of the wall jumps
    "notice-spark",
    "notice-gpu",
    "freeze-spark",  # SIGSTOP to all of a node, for a while
    "freeze-gpu",
    "freeze-app",
    "freeze-loop",
    "kill-worker",  # one process of a training
    "twin-app",  # a second process for a run that is held
]

NAMED: tuple[Kind, ...] = (
    "kill-spark", "kill-gpu", "kill-app", "kill-loop", "database", "disk", "clock",
)  # fmt: skip
"""Every run has each of these at least once."""
FURTHER: tuple[Kind, ...] = (
    "kill-spark", "kill-gpu", "kill-app", "kill-loop", "database", "disk", "clock", "notice-spark", "notice-gpu",
    "freeze-spark", "freeze-gpu", "freeze-app", "freeze-loop", "kill-worker", "twin-app",
)  # fmt: skip
_LASTS = {  # s, from and to
    "database": (2.0, 14.0),
    "disk": (2.0, 10.0),
    "freeze-spark": (2.0, 12.0),
    "freeze-gpu": (2.0, 12.0),
    "freeze-app": (2.0, 14.0),
    "freeze-loop": (2.0, 14.0),
    "notice-spark": (3.0, 10.0),
    "notice-gpu": (3.0, 10.0),
}
_JUMPS = (-3600.0, -45.0, -4.0, 4.0, 45.0, 3600.0)  # s


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float  # s after the beginning of the run
    kind: Kind
    seconds: float = 0.0  # that it lasts; of a notice: until the node goes; of a clock: by how much it jumps
    way: int = 0  # where there are several ways to do it, and which of several victims
    back: float = 1.0  # s after which what was killed is started again by whoever looks after it


@dataclass(frozen=True, slots=True)
class Script:
    """What happens in a run."""

    seed: int
    faults: tuple[Fault, ...]
    postgres: bool  # the ledger is in PostgreSQL, else in SQLite
    ledger_on_disk: bool  # that gets full
    spare: bool  # a second loop waits for the lead
    spark: bool = True
    window: float = 50.0  # s within which faults begin

    @classmethod
    def of(cls, seed: int, *, brief: bool = False) -> "Script":
        """Return the script of a seed; a ``brief`` one is for the suite: no Spark, SQLite, some seconds."""
        rng = random.Random(f"system chaos {seed}")
        if brief:
            kinds = [kind for kind in NAMED if kind != "kill-spark"]
            rng.shuffle(kinds)
            faults = _spread(kinds, 0.0, 3.0, rng, shorter=0.15)
            return cls(seed, faults, False, False, False, spark=False, window=3.0)
        kinds = [*NAMED, *rng.choices(FURTHER, k=rng.randint(5, 9))]
        rng.shuffle(kinds)
        return cls(
            seed,
            _spread(kinds, 4.0, 50.0, rng),
            postgres=seed % 4 == 3,
            ledger_on_disk=seed % 4 == 1,
            spare=rng.random() < 0.5,
        )

    @property
    def end(self) -> float:
        """Return when the last fault is over, s after the beginning."""
        return max(
            (one.at + (0.0 if one.kind == "clock" else one.seconds) for one in self.faults), default=0.0
        )


def _spread(
    kinds: Sequence[Kind], first: float, last: float, rng: random.Random, shorter: float = 1.0
) -> tuple[Fault, ...]:
    """Return one fault of each kind at times of their own, in order: they overlap, as it comes."""
    times = sorted(rng.uniform(first, last) for _ in kinds)
    return tuple(_fault(kind, at, rng, shorter) for kind, at in zip(kinds, times, strict=True))


def _fault(kind: Kind, at: float, rng: random.Random, shorter: float) -> Fault:
    if kind == "clock":
        seconds = rng.choice(_JUMPS)
    else:
        low, high = _LASTS.get(kind, (0.0, 0.0))
        seconds = rng.uniform(low, high) * shorter
    return Fault(
        round(at, 2),
        kind,
        round(seconds, 2),
        rng.randrange(1 << 16),
        round(rng.uniform(0.2, 4.0) * shorter, 2),
    )
