"""Every policy by name: what it does in a line, and how it is set up for a workload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.planners.model.scheduling import Policy

Kind = Literal["profiles", "durations", "searches", "rounds"]
"""How jobs progress: by measured profiles (AdaptDL), by a duration, as hyper-parameter searches (Themis), or by
throughputs in rounds (Gavel)."""

ALL: frozenset[Kind] = frozenset(get_args(Kind))
RIGID: frozenset[Kind] = ALL - {"searches"}
"""What policies can run on that know whole gangs only."""

_PROFILES: frozenset[Kind] = frozenset({"profiles"})
_NOT_ROUNDS: frozenset[Kind] = frozenset({"profiles", "durations"})
_ROUNDS: frozenset[Kind] = frozenset({"rounds"})


@dataclass(frozen=True, slots=True)
class Setting:
    """What the set-up of a policy depends on."""

    kind: Kind
    services: Sequence[float] = ()  # GPU-s of past jobs: those of the workload itself
    types: tuple[str, ...] = ("v100", "p100", "k80")  # of GPUs, fast ones first
    round_s: float = 120.0
    reset_s: float = 1000.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy. ``make`` imports it only when it is wanted."""

    name: str
    line: str
    make: "Callable[[Setting], Policy]" = field(repr=False)
    kinds: frozenset[Kind] = RIGID
    agents: bool = False  # jobs choose their batch by goodput (Pollux)
    reports: frozenset[Kind] = frozenset()  # where apps must bid or report more than the engine knows


def _tiresias(setting: Setting) -> "Policy":
    from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
    from ebbflow.planners.scheduling.placement import most_free_first

    if setting.kind == "profiles":  # as AdaptDL's simulator has it: 16 GPU-hours, no placement by skew
        return Tiresias((57_600.0,), order="insertion", placer=most_free_first)
    return Tiresias()


def _tiresias_g(setting: Setting) -> "Policy":
    from ebbflow.planners.scheduling.gangs.gittins import ServiceDistribution
    from ebbflow.planners.scheduling.gangs.tiresias import Tiresias

    return Tiresias(distribution=ServiceDistribution(setting.services), name="tiresias-g")


def _themis(setting: Setting) -> "Policy":
    from ebbflow.planners.scheduling.auction.auction import AuctionOptions
    from ebbflow.planners.scheduling.themis.themis import Themis

    if setting.kind == "searches":  # dozens of apps that each want more than the cluster has
        return Themis(options=AuctionOptions(solver="search"))
    return Themis()


def _named(module: str, name: str) -> Any:
    return getattr(import_module(f"ebbflow.planners.scheduling.{module}"), name)


def _plain(module: str, factory: str, **options: str) -> "Callable[[Setting], Policy]":
    """Return what calls ``factory`` of a module of ``planners.scheduling`` with ``options``, whatever the setting."""

    def make(setting: Setting) -> "Policy":
        made: Policy = _named(module, factory)(**options)
        return made

    return make


def _shares(module: str, rule: str, **options: bool) -> "Callable[[Setting], Policy]":
    """Return what makes the round-based policy of a share rule."""

    def make(setting: Setting) -> "Policy":
        from ebbflow.planners.scheduling.shares.rounds import RoundBased

        kind = _named(module, rule)
        known = {"reference": setting.types[0]} if "reference" in kind.__dataclass_fields__ else {}
        return RoundBased(kind(**options, **known), setting.round_s, setting.reset_s, setting.types)

    return make


ENTRIES: tuple[Entry, ...] = (
    Entry("rho-bounded", "ours: most goodput within a bound on finish-time fairness",
          _plain("rho_bounded.policy", "RhoBounded"),
          agents=True, reports=RIGID - _PROFILES),
    Entry("themis", "partial allocation auction for finish-time fairness (NSDI 2020)",
          _themis, kinds=ALL, reports=ALL),
    Entry("pollux", "goodput, evenly; batch sizes adapt; our local search (OSDI 2021)",
          _plain("goodput.pollux", "Pollux"), _PROFILES, agents=True),
    Entry("pollux-genetic", "the same objective with the paper's genetic search",
          _plain("goodput.pollux", "Pollux", search="genetic", name="pollux-genetic"), _PROFILES, agents=True),
    Entry("tiresias", "2D-LAS: queues by attained service, no knowledge needed (NSDI 2019)", _tiresias),
    Entry("tiresias-g", "2D-Gittins: the distribution of the workload's durations is known", _tiresias_g,
          frozenset({"durations"})),
    Entry("optimus", "each further GPU where it saves most remaining time (EuroSys 2018)",
          _plain("gangs.optimus", "Optimus"), kinds=ALL, reports=_ROUNDS),
    Entry("yarn-cs", "first in, first out, no preemption; the first app that does not fit blocks the queue",
          _plain("gangs.ordered", "yarn_cs")),
    Entry("best-effort", "first in, first out; later gangs that fit may start",
          _plain("gangs.ordered", "best_effort")),
    Entry("philly", "by submission, spread only when waiting costs more; small jobs are preempted (ATC 2019)",
          _plain("gangs.philly", "Philly"), kinds=_NOT_ROUNDS),
    Entry("las", "whole gangs with the least attained service first", _plain("gangs.las", "las")),
    Entry("srtf", "shortest remaining time first", _plain("gangs.ordered", "srtf")),
    Entry("srsf", "shortest remaining service first", _plain("gangs.ordered", "srsf")),
    Entry("smallest-first", "fewest GPUs first", _plain("gangs.ordered", "smallest_first")),
    Entry("drf", "dominant resource fairness on GPUs, without leases",
          _plain("leased.simple", "drf"), kinds=ALL, reports=_PROFILES),
    Entry("gandiva", "best placement first, with migration, as in Themis' evaluation",
          _plain("leased.gandiva", "gandiva"),
          kinds=ALL, reports=_PROFILES),
    Entry("slaq", "GPUs where they lower losses most (SoCC 2017)",
          _plain("leased.slaq", "slaq"), kinds=ALL, reports=_PROFILES),
    Entry("leased-las", "least attained service, GPU by GPU, in leases", _plain("gangs.las", "leased_las"),
          kinds=ALL, reports=_PROFILES),
    Entry("leased-srtf", "shortest remaining time in leases", _plain("leased.simple", "leased_srtf"),
          kinds=ALL, reports=_PROFILES),
    Entry("leased-srsf", "shortest remaining service in leases", _plain("leased.simple", "leased_srsf"),
          kinds=ALL, reports=_PROFILES),
    Entry("throughput-first", "each further GPU where it raises throughput most",
          _plain("leased.gandiva", "throughput_first"), kinds=ALL, reports=_PROFILES),
    Entry("worst-off-first", "all it can use to the app with the largest rho (strawman, Themis thesis)",
          _plain("leased.simple", "worst_off_first"), kinds=ALL, reports=ALL),
    Entry("gandiva-fair", "equal time on every GPU type, in rounds",
          _shares("shares.simple", "GandivaFair"), reports=_NOT_ROUNDS),
    Entry("isolated", "1/n of the cluster for each job, in rounds",
          _shares("shares.simple", "Isolated"), reports=_NOT_ROUNDS),
    Entry("fifo-perf", "in order, each on its fastest GPU type, in rounds",
          _shares("shares.simple", "FifoPerf"), reports=_NOT_ROUNDS),
    Entry("max-min", "max-min of normalised shares (Gavel, OSDI 2020), in rounds",
          _shares("shares.max_min", "MaxMin"), reports=_NOT_ROUNDS),
    Entry("max-min-perf", "the same, knowing how fast each job is on each GPU type",
          _shares("shares.max_min", "MaxMin", perf=True), reports=_NOT_ROUNDS),
    Entry("finish-time", "least largest rho as a convex programme (Gavel), in rounds",
          _shares("shares.least_rho", "FinishTimeProgramme"), reports=_NOT_ROUNDS),
    Entry("finish-time-perf", "the same, knowing how fast each job is on each GPU type",
          _shares("shares.least_rho", "FinishTimeProgramme", perf=True), reports=_NOT_ROUNDS),
    Entry("max-sum", "largest sum of throughputs (Gavel), in rounds",
          _shares("shares.max_min", "MaxSum"), reports=_NOT_ROUNDS),
    Entry("min-makespan", "least makespan (Gavel), in rounds",
          _shares("shares.max_min", "MinMakespan"), reports=_NOT_ROUNDS),
    Entry("min-makespan-perf", "the same, knowing how fast each job is on each GPU type",
          _shares("shares.max_min", "MinMakespan", perf=True), reports=_NOT_ROUNDS),
    Entry("allox", "least total completion time by assignment (EuroSys 2020), in rounds",
          _shares("shares.allox", "AlloX"), reports=_NOT_ROUNDS),
    Entry("equal-share", "the same number of GPUs for each app (sanity floor)",
          _plain("leased.simple", "equal_share"),
          kinds=ALL, reports=_PROFILES),
    Entry("random", "each free GPU to an app drawn at random (sanity floor)",
          _plain("leased.simple", "random_policy"),
          kinds=ALL, reports=_PROFILES),
)  # fmt: skip

BY_NAME = {entry.name: entry for entry in ENTRIES}


def policy_entry(name: str) -> Entry:
    """Return the policy called ``name``. Raises ``OptionError`` naming the nearest."""
    found = BY_NAME.get(name.strip().lower())
    if found is None:
        close = get_close_matches(name.lower(), BY_NAME, n=1, cutoff=0.0)
        raise OptionError(f"no policy is called {name!r}; the nearest is {close[0]!r}; --help lists all")
    return found


def policy_entries(text: str) -> list[Entry]:
    """Return the policies of a comma-separated list; each once. Raises ``OptionError``."""
    names = [name for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError("--policy needs at least one name; --help lists all")
    return list({entry.name: entry for entry in map(policy_entry, names)}.values())
