"""The section of ``docs/benchmarks.md`` on chaotic runs of the whole system."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    seen, wrong = found["seen"], found["violations"]
    rows = "\n".join(f"| {name} | {count} |" for name, count in found["faults"].items())
    verdict = (
        "**Nothing was lost, booked twice or left over in any of them.**"
        if not wrong and found["whole"] == found["wanted"]
        else f"**{found['whole']} of {found['wanted']} runs hold; wrong: {', '.join(wrong) or 'some did not end'}.**"
    )
    return f"""## The whole system in chaos

`make chaos`, that is `python -m tests.benchmarks.system_chaos --seeds {found["wanted"]} --out docs/benchmarks`

A capacity loop (in some runs a second one waits for its lead), two pipelines at a time of two teams and up to six
nodes of this machine, all processes of their own: queries on Spark and DuckDB, PyTorch trainings on one and on two
nodes, a search. The ledger is SQLite, on the disk that gets full in some runs, or PostgreSQL behind a network that
can be cut or fall silent ({found["postgresql"]} of the runs). A seed draws what goes wrong and when; who was killed
is started again as an orchestrator does.

| fault | times |
|---|---|
{rows}

{found["runs"]} runs in {found["seconds"] / 60:.0f} minutes, {found["restarts"]} restarts, {seen.get("leases", 0):,}
leases in {seen.get("events", 0):,} events. {verdict} Checked are

- {seen.get("queries", 0)} answers against DuckDB's;
- {seen.get("trainings", 0)} trainings: their {seen.get("steps", 0):,} steps used each sample once a pass, in the
  right order, although {seen.get("steps_again", 0):,} were done again in {seen.get("stretches", 0)} stretches; those
  on one node have bit for bit the weights of a training that nothing disturbs;
- {seen.get("searches", 0)} searches, which had all their trials;
- that at no recorded moment two leases had one GPU, and that in {seen.get("looks", 0):,} looks at all processes no
  two launchers used one;
- that all leases ended, the ledger replays, nothing in the stores is half-written, and no process or node is left.

Median {found["run_s"]:.0f} s a run, {found["longest_s"]:.0f} s at most. {found["machine"]}.
{found.get("note", "")}

![faults by kind](benchmarks/system_chaos.svg)
"""


def aws(found: dict[str, Any]) -> str:
    """Return the section on pipelines on emulated AWS."""
    rows = "\n".join(f"| {name} | {count} |" for name, count in found["faults"].items())
    wrong = found["violations"]
    verdict = (
        "**Nothing was lost, doubled or left over in any of them.**"
        if not wrong
        else f"**{found['whole']} of {found['runs']} runs hold; wrong: seeds {', '.join(wrong)}.**"
    )
    return f"""## Pipelines on emulated AWS

`python -m tests.benchmarks.aws_pipelines --seeds {found["wanted"]} --out docs/benchmarks`

A query, a training, a search of three trials and an elastic job on instances that are launched for them, on an
emulated AWS (EC2, Auto Scaling, EventBridge, SQS, S3) whose instances are loopback addresses of this machine with
real processes; in {found["spark"]} of the runs the query is on a Spark pool whose instances run workers of a real
Spark cluster, with its store on the local disk. A seed draws what goes wrong and when.

| fault | times |
|---|---|
{rows}

{found["runs"]} runs, of {found["wanted"]} that are wanted, in {found["seconds"] / 60:.0f} minutes,
{found["restarts"]} resumes, {found["leases"]} grants of leases. {verdict}
Checked are: the query's rows; the training's steps and its weight, and the weight of each trial, against undisturbed
runs (1e-6); that each trial is complete once; the elastic job's centres, bit for bit; that no two leases had one GPU
at once; and that no lease, instance or process is left.

Median {found["run_s"]:.0f} s a run, {found["longest_s"]:.0f} s at most. {found["machine"]}.
{found.get("note", "")}
"""
