"""How many GPUs and cores the apps need: to run at all once they have waited long enough, and to meet deadlines.

What elastic apps hold beyond what they asked for is no need: it costs nothing more while it is there, and nothing is
rented for it, unless ``Scaling.min_marginal_goodput`` says what is worth renting.

What nodes do and hold, for who is to choose those that leave.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from ebbflow.planners.aggregation.demand import RunDemand, aggregators_needed
from ebbflow.planners.capacity.cycle_state import CycleState, bounds, needs
from ebbflow.planners.capacity.estimates import AppEstimate, belief
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.values import Memory, Plan, Scaling, SchedulerInput
from ebbflow.planners.capacity.view import active, service_of
from ebbflow.planners.fleet.scaling.scale_in import NodeUse
from ebbflow.planners.model.ledger import AppRecord
from ebbflow.planners.model.scheduling import gpus_of


@dataclass(frozen=True, slots=True)
class Need:
    """What all apps together need of GPUs or cores."""

    units: int  # GPUs or cores
    reason: str  # for people
    apps: Mapping[str, int] = field(default_factory=dict)  # need by app
    app: str = ""  # whose need is the reason
    seconds: float | None = None  # until that app ends with it
    soonest: float = inf  # Unix s, when somebody will have waited for too long


def gpu_need(scene: CycleState, memory: Memory, rules: Scaling, out: Collection[str]) -> Need:
    """Return the GPUs that trainings and searches need, those in ``out`` left aside."""
    now = scene.now
    apps: dict[str, int] = {}
    why, driver, seconds, soonest, most = "", "", None, inf, 0
    elastic = scene.settings.elastic
    for record in active(scene):
        id_ = record.spec.id
        if id_ in out:
            continue
        asked = bounds(record)[1]
        wanted = memory.plan.wanted.get(id_)
        holds = gpus_of(wanted.placement) if wanted is not None else len(scene.live(id_))
        need, said, left = min(holds, asked), "", None
        if not holds:
            since = memory.waits.get(id_, now)
            if now - since >= rules.scale_out_after_s:
                need = needs(record, elastic)
                said = f"{id_} has waited for {now - since:.0f} s for {need} GPUs"
            else:
                soonest = min(soonest, since + rules.scale_out_after_s)
        if record.spec.deadline is not None and record.spec.deadline > now:
            gpus, left, can = gpus_in_time(believed(scene, record), record, holds, now, rules)
            if gpus > holds:
                need = max(need, gpus)
                end = record.spec.deadline - now
                if can:
                    said = f"{id_} needs {gpus} GPUs to complete within {end:.0f} s; {holds} allocated"
                else:
                    said = f"{id_} cannot complete within {end:.0f} s; {gpus} GPUs complete it soonest"
            else:
                need = max(need, min(holds, asked), gpus)
        if rules.min_marginal_goodput is not None and (holds or said):
            gpus = worthwhile(believed(scene, record), record, rules.min_marginal_goodput)
            if gpus > need:
                need, said = gpus, f"{id_} runs efficiently on {gpus} GPUs"
        apps[id_] = need
        if said and need > most:
            most, why, driver, seconds = need, said, id_, left
    total = sum(apps.values())
    return Need(total, why or f"{total} GPUs are needed", apps, driver, seconds, soonest)


def aggregator_need(
    scene: CycleState, memory: Memory, rules: Scaling, out: Collection[str]
) -> tuple[Need, float | None]:
    """Return the nodes that trainings' shared aggregators need, and since when some are lacking.

    A training's aggregators are asked for with its GPUs: as soon as it holds some, is to, or has waited for so long
    that nodes are launched for it. One that has no GPUs, or takes no part, needs none.
    """
    found, now = scene.aggregation, scene.now
    if found is None:
        return Need(0, "no training uses aggregators"), None
    known = {one.run for one in found.runs}
    waiting, without = [], set(out)
    for record in active(scene):
        id_ = record.spec.id
        wanted = memory.plan.wanted.get(id_)
        has = bool(scene.held(id_)) or (wanted is not None and bool(wanted.placement))
        if not has and now - memory.waits.get(id_, now) < rules.scale_out_after_s:
            without.add(id_)
        elif record.spec.aggregators and id_ not in known:
            waiting.append(RunDemand(id_, record.spec.aggregators))
    since = memory.lacking if memory.lacking is not None else now
    need = aggregators_needed(
        found, waiting, without, scene.closed, lacked_s=now - since, patience_s=rules.scale_out_after_s
    )
    soonest = (
        since + rules.scale_out_after_s if need.lacking and since + rules.scale_out_after_s > now else inf
    )
    apps = {need.run: need.count} if need.run else {}
    app = need.run if need.run in scene.state.apps else ""
    return Need(need.count, need.reason, apps, app, None, soonest), since if need.lacking else None


def believed(scene: CycleState, record: AppRecord) -> AppEstimate:
    """Return what is believed of an app."""
    _, asked, most = bounds(record)
    search = record.spec.kind == "tuning"
    return belief(scene.report(record.spec.id), asked, most, service_of(scene, record), search)


def worthwhile(one: AppEstimate, record: AppRecord, worth: float) -> int:
    """Return the most GPUs of which each gives ``worth`` of a single one's goodput (Pollux, OSDI 2021, section 5.10
    of the thesis, which aims at a half). An app without a model makes no claim beyond what it asked for."""
    _, asked, _ = bounds(record)
    single = one.speed.iteration_time(1)
    best = asked
    for gpus in range(asked + 1, (one.most if one.goodput is not None else asked) + 1):
        if single / one.speed.iteration_time(gpus) >= worth * gpus:
            best = gpus
    return best


def gpus_in_time(
    one: AppEstimate, record: AppRecord, holds: int, now: float, rules: Scaling
) -> tuple[int, float, bool]:
    """Return the fewest GPUs on which an app ends before its deadline, the seconds that it then takes, and whether
    it can at all; else those on which it ends soonest.

    ``rules.deadline_safety_factor`` times the expected time is counted, and GPUs beyond those that it has come
    ``provision_time_s`` later.
    """
    least, asked, _ = bounds(record)
    most = max(one.most if least < one.most else asked, least)
    time = (record.spec.deadline or inf) - now
    best, soonest = least, inf
    for gpus in range(least, most + 1):
        took = one.seconds(gpus)
        late = rules.provision_time_s if gpus > holds else 0.0
        if took * rules.deadline_safety_factor + late <= time:
            return gpus, took, True
        if took < soonest * (1 - 1e-9):
            best, soonest = gpus, took
    return best, soonest, False


def core_need(scene: CycleState, rules: Scaling, cores: int, each: int, planned: int) -> Need:
    """Return the cores that queries need; ``cores`` are there, ``planned`` are to be, a node has ``each`` at least.

    A query with a deadline needs as many as do the work that it has left in time. Another works with what there is:
    for it nodes stay as far as it could use them, and it is given one if there is none.
    """
    queries = [record for record in scene.active if record.spec.kind == "query"]
    weights = sum(max(record.spec.weight, 0.0) for record in queries) or 1.0
    apps: dict[str, int] = {}
    usable, need = 0.0, 0
    why, driver, seconds = "", "", None
    for record in queries:
        id_ = record.spec.id
        report = scene.report(id_)
        could = report.cores if report is not None and report.cores is not None else float(each)
        usable += could
        apps[id_] = 1
        time = (record.spec.deadline or inf) - scene.now
        left = report.seconds_left if report is not None else None
        if left is None or not 0 < time < inf or not left < inf:
            continue
        share = cores * max(record.spec.weight, 0.0) / weights
        if left * rules.deadline_safety_factor <= time or not share:
            apps[id_] = (
                max(1, min(ceil(share), ceil(left * share * rules.deadline_safety_factor / time)))
                if share
                else each
            )
            continue
        # nodes that are asked for now work after they have come; until then it has what it has
        rest = max(
            left * share * rules.deadline_safety_factor - share * min(rules.provision_time_s, time), 0.0
        )
        wanted = rest / max(time - rules.provision_time_s, 1.0)
        apps[id_] = max(ceil(min(max(wanted, share), max(could, share))), 1)
        if apps[id_] > need:
            need, driver, seconds = apps[id_], id_, time
            why = f"{id_} needs {apps[id_]} cores to end within {time:.0f} s; its share is {share:.0f}"
    total = sum(apps.values())
    stays = min(planned, ceil(usable))
    units = max(total, stays) if queries else 0
    said = why or (
        f"{len(queries)} queries could use {usable:.0f} cores" if queries else "no query is active"
    )
    return Need(units, said, apps, driver, seconds)


def uses_of(situation: SchedulerInput, scene: CycleState, plan: Plan) -> dict[str, NodeUse]:
    """Return what nodes do and hold, leases included: a node with a lease is busy until it was let go of, and one
    that the plan wants is so already."""
    found = dict(situation.uses)
    counts: dict[str, int] = {}
    for leases in scene.mine.values():
        for lease in leases.values():
            counts[lease.node] = counts.get(lease.node, 0) + 1
    for wanted in plan.wanted.values():
        for node, gpus in wanted.placement:
            if node not in scene.closed:
                counts[node] = max(counts.get(node, 0), gpus)
    for node in nodes_of_tensors(scene):  # busy until others have them
        counts[node] = max(counts.get(node, 0), 1)
    for node, gpus in counts.items():
        use = found.get(node, NodeUse())
        found[node] = replace(
            use, busy=use.busy + gpus * scene.settings.termination_grace_s, work=max(use.work, float(gpus))
        )
    return found


def nodes_of_tensors(scene: CycleState) -> set[str]:
    """Return the nodes whose aggregators have tensors of trainings, or may have some.

    What an aggregator has said of itself is older than what it has: of a node that leaves only its end counts. Of a
    service of which nothing is known all leased nodes may.
    """
    if scene.aggregation is None:
        return {lease.node for lease in scene.state.held(SERVICE)}
    there = (one for one in scene.aggregation.nodes if one.node)
    return {one.node for one in there if one.tensors or one.node in scene.closed}
