"""A day of a cluster with three teams, as a loop would have written it into its ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cluster_events import CORES, GPU, START, SURE, Book

from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    AppSpec,
    Decided,
    Event,
    Extended,
    LoopBegan,
    Saved,
)


def simulated_day(
    seed: int = 7, hours: float = 24.0, apps: int = 14, interval: float = 600.0
) -> tuple[list[Event], dict[str, AppReport]]:
    """Return the events of a cluster over ``hours``, and what its apps said last. Equal seeds give equal days.

    Apps of three teams come and go, spot nodes come and go, an auction every ``interval`` seconds gives GPUs away by
    who is furthest behind, and a loop is replaced once.
    """
    rng = np.random.default_rng(seed)
    book = Book()
    book.write(0.0, LoopBegan(1, "loop on host-a"))
    book.capacity(
        1.0,
        *(replace(GPU, id=f"gpu-{i}") for i in range(4)),
        replace(SURE, id="gpu-base"),
        *(replace(CORES, id=f"worker-{i}") for i in range(3)),
        reason="at start",
    )
    wanted: dict[str, float] = {}  # GPU-seconds left
    total: dict[str, float] = {}
    specs = _specs(rng, hours, apps)
    at, number = 60.0, 4
    later: list[tuple[float, list[Node], list[str]]] = []
    queries: dict[str, list[dict[str, Any]]] = {}
    begun: dict[str, float] = {}
    end = hours * 3600
    while at < end:
        for after, fresh, idle in later:
            gone = [node for node in idle if node in book.state.nodes and not _held(book, node)]
            if fresh or gone:
                book.capacity(
                    after, *fresh, left=gone, reason="arrived" if fresh else f"left: {', '.join(gone)}"
                )
        later.clear()
        while specs and specs[0][0] <= at:
            after, spec, work = specs.pop(0)
            book.write(max(after, at - interval + 190), AppEntered(spec))
            if spec.kind == "query":
                begun[spec.id] = at
                queries[spec.id] = _stages(rng, book.start + at)
            else:
                wanted[spec.id] = total[spec.id] = work
        number = _nodes(book, rng, at, number, later)
        _queries(book, at, queries, begun)
        _auction(book, rng, at, interval, wanted, total)
        if at > end / 2 and book.state.token == 1:
            book.write(
                at + 30,
                LoopBegan(2, "loop on host-b"),
                Decided("recovery", "the loop on host-a went silent; its leases were checked, none is lost"),
            )
        at += interval
    return book.events, _reports(book, wanted, total, queries, end)


def _specs(rng: np.random.Generator, hours: float, apps: int) -> list[tuple[float, AppSpec, float]]:
    titles = (
        "resnet-50",
        "bert-base",
        "digits sweep",
        "vit-small",
        "churn forecast",
        "speech-ctc",
        "lora-7b",
    )
    found = []
    for i in range(apps):
        after = float(rng.uniform(0, hours * 3600 * 0.75)) if i else 5.0
        team = ("vision", "language", "research")[i % 3]
        if i % 5 == 4:
            spec = AppSpec(f"query-{i}", "query", team, f"revenue by nation {i}", "nightly" if i < 7 else "")
            found.append((after, spec, 0.0))
            continue
        gpus = int(rng.choice([1, 2, 4, 6]))
        work = gpus * float(rng.uniform(1.0, 5.0)) * 3600
        deadline = START + after + work / gpus * float(rng.uniform(1.0, 2.6)) if i % 4 == 1 else None
        spec = AppSpec(
            f"app-{i:02d}",
            "tuning" if i % 6 == 2 else "training",
            team,
            f"{titles[i % 7]} {i}",
            "nightly" if i < 7 else "",
            gpus,
            max(1, gpus // 2),
            gpus * 2,
            1.0 + (team == "vision"),
            deadline,
            budget=6.0 if i % 7 == 3 else None,
        )
        found.append((after, spec, work))
    return sorted(found, key=lambda entry: entry[0])


def _stages(rng: np.random.Generator, at: float) -> list[dict[str, Any]]:
    found, start = [], at
    for i in range(int(rng.integers(4, 8))):
        took = float(rng.uniform(60, 900))
        status = "cancelled" if i == 1 else "reused" if i == 2 else "completed"
        name = f"lineitem ⋈ part {i}" if i % 2 else f"orders ⋈ customer {i}"
        found.append(
            {
                "name": name,
                "status": status,
                "started": start,
                "ended": start + took,
                "plan": f"p{1 + (i > 1)}",
                "rows": int(rng.integers(1, 9_000_000)),
            }
        )
        start += took * float(rng.uniform(0.2, 1.0))
    return found


def _held(book: Book, node: str) -> list[int]:
    return [number for number, lease in book.state.leases.items() if lease.node == node]


def _nodes(
    book: Book,
    rng: np.random.Generator,
    at: float,
    number: int,
    later: list[tuple[float, list[Node], list[str]]],
) -> int:
    leaving = [n.node_id for n in book.state.notices.values()]
    if leaving:
        held = [k for k, lease in book.state.leases.items() if lease.node in leaving]
        if held:
            book.end(at, held, "the node is leaving")
        book.capacity(at + 1, left=leaving, reason=f"left: {', '.join(leaving)}")
    spot = sorted(n.id for n in book.state.nodes.values() if n.gpus and n.market == "spot")
    if spot and rng.random() < 0.10:
        node = str(rng.choice(spot))
        book.capacity(at + 2, notices=[Notice(node, book.start + at + 122)], reason=f"notice: {node}")
        held = [k for k, lease in book.state.leases.items() if lease.node == node and lease.recalled is None]
        if held:
            book.recall(at + 2.4, held, f"{node} leaves at its notice's deadline", 90.0)
    elif spot and rng.random() < 0.03:
        node = str(rng.choice(spot))
        book.capacity(at + 2, left=[node], reason=f"left: {node}")
        held = [k for k, lease in book.state.leases.items() if lease.node == node]
        if held:
            book.end(at + 3, held, "the node is gone")
            book.write(
                at + 3,
                Decided(
                    "recovery",
                    f"{node} left while apps held its GPUs",
                    inputs={"node": node},
                    outcome={"gpus": len(held)},
                ),
            )
    there = sum(1 for n in book.state.nodes.values() if n.gpus)
    waits = sum(1 for a in book.state.active() if a.spec.kind != "query" and not book.state.held(a.spec.id))
    target = 9 if waits else 5
    if there != target and rng.random() < 0.5:
        grow = there < target
        reason = f"{waits} apps wait for GPUs" if grow else "2 nodes idle for 20 minutes"
        book.write(
            at + 4,
            Decided(
                "scaling",
                f"gpu: {target} nodes, because {reason}",
                revision=book.state.revision,
                seconds=0.004,
                inputs={"pool": "gpu", "waiting": waits, "idle_s": 1200.0, "price": 0.72},
                outcome={"pool": "gpu", "nodes": target, "was": there},
            ),
        )
        if grow:
            count = int(rng.integers(1, target - there + 1))
            number += count
            fresh = [
                replace(GPU, id=f"gpu-{number - i}", price=round(0.72 + rng.normal(0, 0.05), 4))
                for i in range(count)
            ]
            later.append((at + 180, fresh, []))
            if count < target - there:
                book.write(
                    at + 4.5,
                    Decided(
                        "guard",
                        "the budget of $12/h allows 2 more nodes, not 4",
                        inputs={"wanted": target - there, "dollars_per_hour": 12.0},
                        outcome={"nodes": count},
                    ),
                )
        else:
            idle = [node for node in spot if not _held(book, node)]
            if idle:
                later.append((at + 180, [], idle[:1]))
    return number


def _queries(
    book: Book, at: float, queries: Mapping[str, Sequence[Mapping[str, Any]]], begun: Mapping[str, float]
) -> None:
    for id_, stages in queries.items():
        record = book.state.apps.get(id_)
        if record is None:  # over for long
            continue
        if record.phase == "waiting":
            book.write(at + 20, AppMoved(id_, "running"))
        elif record.phase == "running" and stages[-1]["ended"] < book.start + at:
            book.write(
                at + 20,
                Decided(
                    "replan",
                    "p2 finishes 4 min sooner on 2 nodes",
                    id_,
                    book.state.revision,
                    0.012,
                    {
                        "trigger": "left: worker-1",
                        "estimates": {
                            "p1": {"seconds": 840.0, "reused": 1},
                            "p2": {"seconds": 600.0, "reused": 2},
                        },
                    },
                    {"kind": "switch", "current": "p1", "chosen": "p2"},
                ),
            )
            book.write(at + 21, AppMoved(id_, "finished"))


def _auction(
    book: Book,
    rng: np.random.Generator,
    at: float,
    interval: float,
    wanted: dict[str, float],
    total: dict[str, float],
) -> None:
    """Work off what is held, end what is done, and give free GPUs to who is furthest behind."""
    bids: dict[str, dict[str, Any]] = {}
    for id_ in list(wanted):
        record, held = book.state.apps[id_], book.state.held(id_)
        wanted[id_] -= len(held) * interval * float(rng.uniform(0.85, 1.0))
        alone = total[id_] / record.spec.max_gpus
        elapsed = book.start + at - record.entered
        left = max(wanted[id_], 0.0)
        bids[id_] = {
            "rho": round((elapsed + left / max(len(held), 1)) / alone / 2, 3),
            "held": len(held),
            "wants": record.spec.max_gpus,
            **({"goodput": round(210.0 * len(held) ** 0.9, 1)} if held else {}),
        }
        if wanted[id_] <= 0:
            if held:
                book.end(at + 5, [lease.number for lease in held], "the app has finished")
            book.write(at + 5, Saved(id_, f"s3://runs/{id_}/last", 1000), AppMoved(id_, "finished"))
            del wanted[id_], bids[id_]
    if not bids:
        return
    free, granted = book.free(), dict[str, int]()
    for id_ in sorted(bids, key=lambda i: -bids[i]["rho"]):
        record, held = book.state.apps[id_], book.state.held(id_)
        if held:
            keep = [lease.number for lease in held if lease.recalled is None]
            if keep:
                book.write(at + 6, Extended(tuple(keep), book.start + at + 2 * interval))
        room = min(record.spec.max_gpus - len(held), len(free), 3)
        if room > 0:
            slots, free = free[:room], free[room:]
            book.grant(
                at + 6.5, id_, *slots, reason=f"ρ {bids[id_]['rho']}, the worst of those that can use more"
            )
            granted[id_] = room
            if record.phase == "waiting":
                book.write(at + 7, AppMoved(id_, "running"))
            book.write(at + 8, Saved(id_, f"s3://runs/{id_}/{int(at)}", int(at)))
    held_now = {id_: len(book.state.held(id_)) for id_ in bids}
    who = ", ".join(f"{i} gets {held_now[i]} GPUs" for i in granted) or "no allocation changes"
    book.write(
        at + 9,
        Decided(
            "auction",
            f"the interval is over: {len(bids)} bids; {who}",
            revision=book.state.revision,
            seconds=float(rng.uniform(0.002, 0.4)),
            inputs={"policy": "rho-bounded", "seed": 1, "why": "the interval is over", "apps": bids},
            outcome={
                "gpus": held_now,
                "placements": {i: {"gpus": n} for i, n in granted.items()},
                "waits": {i: "others are further behind" for i, n in held_now.items() if not n},
            },
        ),
    )


def _reports(
    book: Book,
    wanted: Mapping[str, float],
    total: Mapping[str, float],
    queries: Mapping[str, Sequence[Mapping[str, Any]]],
    end: float,
) -> dict[str, AppReport]:
    now = book.events[-1].at
    found = {}
    for id_, work in total.items():
        held, left = len(book.state.held(id_)), max(wanted.get(id_, 0.0), 0.0)
        found[id_] = AppReport(
            now,
            progress=1 - left / work,
            seconds_left=left / held if held else None,
            work_left=left,
            work_total=work,
            step=int(1e6 * (1 - left / work)),
            job={"goodput": 200.0 * held},
        )
    for id_, stages in queries.items():
        found[id_] = AppReport(now, cores=16.0, job={"stages": list(stages)})
    return found
