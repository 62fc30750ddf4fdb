"""What the evaluation says in words: set-up, what the source found, where ours differs."""

# QOOP, figures 2.6a and 2.6b: median improvement over Clarinet and share of jobs that are faster
SOURCE = {
    ("spot", "low"): (1.08, 0.58), ("spot", "medium"): (1.11, 0.62), ("spot", "high"): (1.47, 0.66),
    ("cluster", "low"): (1.08, 0.56), ("cluster", "medium"): (1.11, 0.58), ("cluster", "high"): (1.20, 0.60),
}  # fmt: skip

HEAD = """# QOOP's evaluation, in simulation

Mahajan, Chowdhury, Akella and Chawla evaluated QOOP on 20 machines with TPC-DS at 500 GB (*Dynamic Query
Re-Planning using QOOP*, OSDI 2018; Mahajan's thesis, chapter 2, whose figure numbers are used here). This page
repeats the evaluation in simulation and puts each figure of the source ("theirs") beside ours. It is made by

```
python -m tests.evaluation qoop --out docs/evaluation --document docs/qoop-evaluation.md
```

from the JSON files beside its pictures; no number is copied by hand. `--help` says how to run a part of it.

The simulator is a driver of the planner's own state machine (`planners/query/running/execution.py`), which also
drives Spark: estimates, progress propagation, hysteresis and checkpoints are the code that runs real queries. Only
time, tasks and capacity are simulated. At constant capacity a simulated query takes exactly as long as estimated.
"""

WORKLOAD = """## Workload and parameters

- **TPC-DS**: the plans that our planner makes for the benchmark's queries, one join a stage, from statistics at scale
  factor 1 taken to 500: fact tables times 500, other tables by the specification's row counts, interpolated between
  300 and 1000. It plans for {containers} containers, tasks of one core. The {queries} queries with the most
  alternative plans are used; queries whose plans take over 20 times the median are left out, since they rest on
  cardinalities gone wrong.
- **Random queries**: {random_queries} trees of joins between tables of similar size, planned in the same way. The
  sizes were chosen, after first results with others, so that plans differ more than those of TPC-DS.
- Every plan comes in {grains} times the tasks of the cost model; cutting a stage into 4 times the tasks multiplies
  its work by {grain_work}. This is what makes plans trade work against time: *as planned* (a sweep below), one plan
  is often best at every capacity, and then nothing can be gained by changing it. The source does not say how its
  plans differed.
- All times are multiplied by one factor per profile, so that the best plans take {mean_seconds:g} s on average at the
  profile's mean level: the source's jobs took about 500 s.
- Testbed: {machines} machines of {per_machine} one-core containers, {memory:g} GiB each. A spot instance stands for
  one machine.
- Each query and class runs on {runs} profiles made of random 10-minute regions of that class, one after the other,
  QOOP and Clarinet on the same ones; an improvement is Clarinet's mean time over QOOP's. Hysteresis {hysteresis:.0%},
  every change of the share triggers a decision, {keep} plans a query, seed {seed}.
- Decreases revoke containers at once; the least progressed tasks fail and run again. Completed tasks persist.
"""

SWEEPS = {
    "backtracking": (
        "Backtracking on and off (figure 2.13)",
        "Off means that outputs are lost once their consumer is complete, and tasks of cancelled stages with them. "
        "Theirs: on gives more.",
    ),
    "errors": (
        "Estimate errors (figure 2.14)",
        "Each stage's demand and duration, as the planner sees them, is off by up to this much. Theirs, spot: 1.4× "
        "under high volatility at 25%; 1.18× against 1.25× without error under low.",
    ),
    "hysteresis": (
        "Hysteresis (figure 2.15)",
        "Theirs: a plateau from 10 to 25%, less but positive at 0, worse when very high.",
    ),
    "length": ("Job length (ours)", "Mean time of the best plans at the profile's mean level."),
    "parallelism": (
        "What parallelism costs (ours)",
        'By how much the work grows when a stage is cut into 4 times the tasks; "as planned" has no such variants.',
    ),
}

DIFFERENCES = """## Where our figures differ, and why

- **Medians are smaller than theirs.** A switch pays only if another plan finishes what is left more than the
  threshold sooner, redone work included. As planned, the best plan for one capacity is close to the best at another
  for half of TPC-DS (the medians of the table of regrets above): the scan of a fact table dominates, all plans share
  it, and it divides into more tasks than there are containers. In three degrees the regrets are larger, but between
  capacities ten times apart, which a job of 500 s rarely sees. Their plans came from Hive's optimiser and are not
  described.
- **Shared cluster.** Gains are small but frequent, and hardly depend on the class. Part of them probably comes from
  choosing again at all, since a plan made at launch has one degree of parallelism and a later choice mixes them; this
  was not measured by itself.
- **Low volatility.** With steps of two machines at 20 or fewer, a low spot region is flat. What changes there are
  the joints between regions.
- **Task throughput** compares plans that cut stages differently; theirs had plans of similar task sizes.
- **Overhead** counts decisions only: candidates are cached at launch, as theirs were, and neither messages nor the
  start of containers are simulated.
- **Errors** are drawn per stage; the source does not say whether per stage, task or query.
- **Hysteresis.** Theirs rises to a plateau. Where a switch costs nothing but the tasks that it aborts, as here, a
  threshold mostly forgoes gains: ours fall from the start, and to a third or less at 50%. What it buys is fewer
  queries that end slower.
- **Job length.** Gains do not grow with it without end, as theirs do: they are largest at 1000 s, and at 4000 s
  more than a third of the queries lose. That a share changes again long before what was chosen for it ends is the
  likely reason; it was not measured by itself.
- **Backtracking** on and off differ only when a switch goes back to an output that was already consumed, or resumes
  a stage that was left half done. Rows that are equal suggest that no run did either; single runs were not checked.
- **Number of runs.** The source has 10 regions a query and class and 50 queries throughout; the numbers used here are
  stated with each section, and the command takes others.
- **Backtracking depth** is informal in the source. Ours is the longest way, in stages, from the current plan's
  frontier to the nearest stage whose output the new plan uses.
- A switch can be regretted: the planner takes a share to persist. "Slower" counts such queries.
"""

DETAIL = """\
"Busy containers" and "tasks/s" are QOOP's over Clarinet's: container-seconds of completed tasks, and tasks, each per
second of the job. Plans cut stages into different numbers of tasks, so that the first says more. "Bushy stages" are
stages that read several others, in percentage points over Clarinet. The overhead is the processor time of all
decisions over the job's time. Depths are of runs that switch. Theirs: +24% tasks/s and more bushy plans on spot;
overhead below 1%; on the cluster, depth 2 in 5.7% of the runs, under high volatility only, and no backtracking in
85.3% of the runs under low.
"""
