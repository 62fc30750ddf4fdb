"""What a comparison gives its user: a JSON file, a CSV file, and one page with pictures."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg, lines_svg
from ebbflow.tasks.drawing.wording import number_text, plural
from ebbflow.tasks.report.query import page
from ebbflow.tasks.simulation.pictures import allocation_svg, by_policy, price, utilisation, waiting
from ebbflow.tasks.simulation.records import FORMAT, METRICS, Record, details, public

PHONE = 380  # width of pictures on a narrow screen
_HOURS = "hours since the first arrival"
TOGETHER = 6  # curves in one picture: as many as differ by colour and dash

HOURS, PLAIN = 1 / 3600, 1.0
COLUMNS: tuple[tuple[str, str, float, int], ...] = (
    ("avg_jct_s", "mean JCT, h", HOURS, -1),
    ("p50_jct_s", "p50, h", HOURS, -1),
    ("p90_jct_s", "p90, h", HOURS, -1),
    ("p99_jct_s", "p99, h", HOURS, -1),
    ("makespan_s", "makespan, h", HOURS, -1),
    ("worst_rho", "worst ρ", PLAIN, -1),
    ("jain_rho", "Jain ρ", PLAIN, 1),
    ("unfair_pct", "unfair, %", PLAIN, -1),
    ("gpu_hours", "GPU-h", PLAIN, -1),
    ("dollars", "$", PLAIN, -1),
    ("restarts_mean", "restarts", PLAIN, -1),
    ("placement_score", "placement", PLAIN, 1),
    ("policy_seconds", "policy, CPU s", PLAIN, -1),
)
"""Figure, heading, factor, and whether less (-1) or more (1) is better."""


def json_text(records: Sequence[Record], settings: Mapping[str, Any]) -> str:
    """Return the JSON file: ``results``, one a (workload, policy, seed), and ``details`` in the same order."""
    data = {
        "format": FORMAT,
        "settings": settings,
        "results": [public(record) for record in records],
        "details": [details(record) for record in records],
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


JOB_COLUMNS = (
    "name", "model", "team", "gpus", "arrival", "start", "finish", "queueing_s", "jct_s", "alone", "rho", "restarts",
    "gpu_seconds", "lost_gpu_seconds", "score",
)  # fmt: skip


def csv_text(records: Sequence[Record]) -> str:
    """Return one row a job, rejected ones too; columns that do not apply are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["workload", "policy", "seed", *JOB_COLUMNS, "rejected"])
    for record in records:
        head = [record["workload"], record["policy"], record["seed"]]
        for found in record["jobs"]:
            job = {
                **found,
                "queueing_s": found["start"] - found["arrival"],
                "jct_s": found["finish"] - found["arrival"],
            }
            writer.writerow([*head, *("" if job[name] is None else job[name] for name in JOB_COLUMNS), ""])
        for job in record["rejected"]:
            writer.writerow([*head, job["name"], *[""] * (len(JOB_COLUMNS) - 1), job["reason"]])
    return file.getvalue()


def columns_of(records: Sequence[Record]) -> list[tuple[str, str, float, int]]:
    """Return the columns that say something: dollars only where nodes have prices."""
    priced = any(run["dollars_on_demand"] for run in records)
    return [column for column in COLUMNS if priced or column[0] != "dollars"]


def compared(records: Sequence[Record]) -> list[tuple[str, list[str], list[bool]]]:
    """Return for each policy of one workload its name, its figures, mean over seeds, and which are the best.

    Figures are in the order of ``columns_of``.
    """
    columns = columns_of(records)
    means = {
        policy: [_mean([run["figures"][name] for run in runs]) for name, *_ in columns]
        for policy, runs in by_policy(records).items()
    }
    rows = []
    for policy, values in means.items():
        shown, best = [], []
        for number, (_, _, factor, sign) in enumerate(columns):
            value = values[number]
            others = [row[number] for row in means.values() if row[number] is not None]
            shown.append("–" if value is None else number_text(value * factor))
            leads = value is not None and sign * value >= max(sign * other for other in others)
            best.append(leads and len(set(others)) > 1)
        rows.append((policy, shown, best))
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def notes_of(records: Sequence[Record]) -> list[str]:
    """Return what is worth knowing of the runs, each remark once: rejected jobs, and what the inputs left open."""
    found: dict[str, None] = {}
    for record in records:
        where = f"{record['workload']}, {record['policy']}"
        for note in record["notes"]:
            found[f"{where}: {note}"] = None
        if record["rejected"]:
            first = record["rejected"][0]
            many = plural(len(record["rejected"]), "job")
            found[
                f"{where}: {many} of {record['submitted']} rejected; {first['name']}: {first['reason']}"
            ] = None
    return list(found)


def report_page(records: Sequence[Record], settings: Mapping[str, Any]) -> str:
    """Return the page: for each workload a table that compares the policies, and pictures."""
    workloads = []
    pictures: dict[str, str] = {}
    for number, name in enumerate(dict.fromkeys(record["workload"] for record in records)):
        mine = [record for record in records if record["workload"] == name]
        drawn = _pictures(mine)
        pictures |= {f"{number}-{key}": svg for key, svg in drawn.items()}
        workloads.append(
            {
                "name": name,
                "jobs": mine[0]["submitted"],
                "headings": [heading for _, heading, *_ in columns_of(mine)],
                "rows": compared(mine),
                "keys": [f"{number}-{key.removesuffix('-wide')}" for key in drawn if key.endswith("-wide")],
                "rejected": _rejected(mine),
                "worst": _worst(mine),
            }
        )
    return page(
        "training.html.j2",
        pictures,
        workloads=workloads,
        settings=settings,
        notes=notes_of(records),
        seeds=len({record["seed"] for record in records}),
    )


def _rejected(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    found = {
        (record["policy"], job["name"], job["reason"]): None
        for record in records
        for job in record["rejected"]
    }
    return list(found)


def _worst(records: Sequence[Record], count: int = 3) -> list[dict[str, str]]:
    """Return the jobs with the largest ρ of each policy's first seed."""
    rows = []
    for policy, runs in by_policy(records).items():
        known = [job for job in runs[0]["jobs"] if job["rho"] is not None]
        for job in sorted(known, key=lambda job: -job["rho"])[:count]:
            rows.append(
                {
                    "policy": policy,
                    "job": job["name"],
                    "gpus": str(job["gpus"]),
                    "rho": number_text(job["rho"]),
                    "waited": number_text((job["start"] - job["arrival"]) / 3600),
                    "jct": number_text((job["finish"] - job["arrival"]) / 3600),
                    "restarts": str(job["restarts"]),
                }
            )
    return rows


def _pictures(records: Sequence[Record]) -> dict[str, str]:
    """Return the pictures of one workload by name, each wide and narrow."""
    policies = by_policy(records)
    names = list(policies)
    groups = [names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)]
    priced = any(record["dollars_on_demand"] for record in records)
    found: dict[str, str] = {}
    for size, width in (("wide", 980.0), ("narrow", float(PHONE))):
        for number, group in enumerate(groups):
            runs = {name: policies[name] for name in group}
            first = {name: found_runs[0] for name, found_runs in runs.items()}
            jcts = {name: [_jct(job) for run in of for job in run["jobs"]] for name, of in runs.items()}
            rhos = {
                name: [job["rho"] for run in of for job in run["jobs"] if job["rho"] is not None]
                for name, of in runs.items()
            }
            found[f"jct{number}-{size}"] = cdf_svg(
                "Completion time, share of jobs",
                jcts,
                label="completion time",
                unit="h",
                width=width,
                log=True,
            )
            found[f"rho{number}-{size}"] = cdf_svg(
                "Finish-time fairness ρ, share of jobs", rhos, label="ρ (line: 1, as fast as a fair share)", unit="",
                width=width, mark=1.0, log=True,
            )  # fmt: skip
            ran = {name: run for name, run in first.items() if run["jobs"]}
            found[f"utilisation{number}-{size}"] = lines_svg(
                "GPUs in use, of those that are there", {name: utilisation(run) for name, run in ran.items()},
                label=_HOURS, unit="%", most=100.0, width=width,
            )  # fmt: skip
            found[f"waiting{number}-{size}"] = lines_svg(
                "Jobs that have arrived and not finished", {name: waiting(run) for name, run in ran.items()},
                label=_HOURS, unit="jobs", width=width,
            )  # fmt: skip
        if priced:
            longest = max(records, key=lambda record: record["last_finish"])
            found[f"price-{size}"] = lines_svg(
                "Price of all nodes that are there", {"all nodes": price(longest)}, label=_HOURS, unit="$/h",
                width=width,
            )  # fmt: skip
        found[f"totals-{size}"] = _totals(policies, priced, width)
        for name, of in policies.items():
            if of[0]["jobs"]:
                found[f"gpus-{name}-{size}"] = allocation_svg(f"{name}: GPUs of each app", of[0], width=width)
    return found


def _totals(policies: Mapping[str, list[Record]], priced: bool, width: float) -> str:
    names = list(policies)
    if not priced:
        held = [_mean([run["figures"]["gpu_hours"] for run in policies[name]]) for name in names]
        return bars_svg("GPU time held", names, {"GPU-hours": held}, unit="GPU-h", width=width)
    paid = [_mean([run["figures"]["dollars"] for run in policies[name]]) for name in names]
    listed = [_mean([run["dollars_on_demand"] for run in policies[name]]) for name in names]
    series = {"as priced": paid} if paid == listed else {"at spot prices": paid, "on demand": listed}
    return bars_svg("Cost of the nodes that were there", names, series, unit="$", width=width)


def _jct(job: Mapping[str, Any]) -> float:
    return float(job["finish"] - job["arrival"]) / 3600


__all__ = ["COLUMNS", "METRICS", "columns_of", "compared", "csv_text", "json_text", "notes_of", "report_page"]
