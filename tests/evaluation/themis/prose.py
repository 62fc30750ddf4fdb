"""The words of the page on Themis."""

SETTING = """## What is simulated

Themis' trace is not published. 60 apps are drawn from what is: a tenth of one job, the others of many (the
published 10 to 100, median 75, times 0.4, which gives apps that want about 50 GPUs, as the trace has it), job
times log-normal with σ 1.4 (cut at 2 σ), gaps between arrivals with a coefficient of variation of 2, its mix of
models. They arrive within 16 h instead of two weeks; all work is scaled so that it would keep 80 GPUs busy for
that long, so that a run takes seconds. W1: jobs of 1 or 2 tasks. W2: jobs of 2, 4 or 8 tasks, successive halving
with as many iterations in each phase and twice the tasks, up to 8; the tuner forecasts later phases by the median
job. Network-intensive models (AlexNet, VGG, LanguageModel, Transformer, DeepSpeech) slow down 1.29 times across
machines and 1.6 times across racks, others 1.0 and 1.02.

A tuner packs whole gangs on machines, then in racks, then anywhere, and moves GPUs among the jobs of a phase so
that they end together. A change of the set of GPUs pauses the jobs on GPUs that changed, for 42.5 s (checkpoint
7.5, container 35), on the testbed and in the sweep of leases; elsewhere changes are free. Testbed: 12 machines of
4 and 8 of 2 GPUs; simulator: 16 of 8, 28 of 4 and 16 of 1 (256 GPUs; the printed inventory sums to 168); four
racks. f = 0.8, leases of 10 minutes unless swept. Leases that end within 60 s are sold together, under every
policy.

ρ is the completion time over T_cluster × the mean number of active apps, T_cluster the budget over all GPUs that
the app can use. Figures are means over seeds of the workload (5 on the testbed; 4 for f and for lies; 2
elsewhere) with 95% intervals in brackets or after ±; of two seeds that is the range, which proves little.
"""

HEADLINE = """## Largest ρ on the testbed (Fig. 9)

Means of the ratio of largest ρ in each run. The figure does not say which workload it shows.

"""

GPU_TIME = """## GPU time for the same work (Fig. 10)

Pauses are part of it. "≈ 250%" is read as (SLAQ - Themis) / Themis.

"""

PLACEMENT = """## Placement score (Fig. 11)

1/S over an app's life. Published: about 1 for all on W1; best for Themis on W2, then Gandiva.

"""

SIZES = """## Long and short apps (Table 3)

Apps of W1 whose GPU time under Themis is within a factor of 1.5 of the published one. The intervals are over
apps.

"""

CONTENTION = """## Contention: W1 on 256, 128 and 64 GPUs (Fig. 12)

Largest ρ, and the share of apps with ρ ≤ 1. Published: only Themis keeps the sharing incentive.

"""

NETWORK = """## Share of network-intensive apps, W2 (Fig. 13)

"""

KNOB = """## Fairness knob, W2 (Fig. 16)

Published: the largest ρ improves from 0 to 0.8 and is worse by about 1.5 times beyond; GPU time grows with f.

"""

LEASE = """## Length of leases, W2, with pauses (Fig. 16)

Published: shorter is fairer, longer more efficient.

"""

ERRORS = """## Errors of estimates, W2 (Fig. 14)

Iterations and S that apps report are wrong by a factor each, uniform within ±X% by app.

"""

LYING = """## Lies (Fig. 15)

Eight equal apps of one network-intensive job for 8 GPUs on one machine of 8 and 28 of 2; the first one lies.
Changes are against the same run without a lie. Published: nothing to gain up to 34%, a large loss beyond.

"""

RULES = """## Rules that the sources leave open, W2

"""

TIMES = """## Time of a bid and of a round

CPU time. A bid: the whole table of one app for all 64 GPUs. A round: all bids, the auction with payments,
leftovers.

"""

WHY = {
    "gandiva": "greedy by locality: who is spread may wait very long",
    "las": "here elastic, one GPU at a time and well placed, close to an equal share of GPU time",
    "srtf": "exact knowledge of the time left; short apps go first, and long ones are few",
    "throughput": "the first GPU of an app comes before anything else",
    "slaq": "apps whose loss is flat already starve",
    "srsf": "as SRTF",
    "strawman": "the worst-off takes all it can use",
    "sizes": "other apps: ρ depends on how many GPUs the app can use",
    "gandiva-time": "what Themis' losers forfeit is dealt out GPU by GPU, which spreads gangs",
    "error": "two seeds; one app decides the largest ρ",
    "times": "compressed tables and column generation instead of enumeration and Gurobi",
}

LIMITS = """## What is different, and why

- The workload is drawn, not the trace. The largest ρ is decided by one app in each run, often a small one that
  arrives while long leases hold everything: intervals are wide.
- T_cluster × N overstates the time alone on a share for apps that cannot use all GPUs, so ρ is below 1 for most
  apps under every policy on W1. Policies differ in the tail.
- With f = 0.8 two or three apps bid. What they forfeit as hidden payments goes at random to apps that did not
  bid, GPU by GPU, which spreads gangs and costs GPU time; the greedy policies also hand out GPU by GPU, but near
  what an app has. So Gandiva needs less GPU time than Themis on W2 here, against what was published. Gandiva
  pays for it with ρ: it serves who is well placed, and an app that is not may wait very long.
- LAS, SRTF and throughput-first hand out single GPUs to elastic apps, which the sources' own versions may not
  have done. Few apps starve under them, so that their largest ρ is near Themis' rather than twice it; on W2 the
  worst app is in some runs the same under all of them, a small one that arrives when all leases are long.
- Four seeds do not tell how the largest ρ depends on f: one small app decides it, any app without GPUs is first in
  line for every f, and intervals are wide. The published optimum at 0.8 is within them, not shown by them.
- A liar that inflates staggered S gains here as long as the lie is 40% or less, where the sources see no gain; the
  loss beyond is there, between 40% and 60% instead of at 34%.
- Testbed measurements (container changes, checkpoints, agents over a network) are parameters here, not results.
"""
