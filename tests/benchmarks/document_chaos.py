"""The section of ``docs/benchmarks.md`` on capacity loops that are killed on an AWS that fails."""

from typing import Any


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    faults = ", ".join(
        f"{count:,} {name.replace('-', ' ')}" for name, count in sorted(found["faults"].items())
    )
    wrong = found["violations"]
    verdict = (
        "**Nothing was lost in any of them.**"
        if not wrong and found["whole"] == found["wanted"]
        else f"**{found['whole']} of {found['wanted']} runs hold; wrong: {', '.join(wrong) or 'some did not end'}.**"
    )
    notice = found["notice_s"]
    return f"""## A capacity loop in chaos

`python -m tests.benchmarks.fleet_chaos --seeds {found["wanted"]} --out docs/benchmarks`

A real controller process (`SpotFleet`, `NoticeFeed`, `AwsCapacity`, guard) on an emulated AWS over HTTP grows a
pool to 20 nodes, shrinks and resizes it, and in half of the runs holds a gang beside it. 30 % of its spot nodes are
interrupted, the warnings coming through EventBridge and SQS, twice and out of order; spot is dry at first, calls
are throttled, fail, or lose their answer after they were carried out; nodes of another installation and of nobody
stand in the same account. The controller is killed at calls that the seed chooses, before or after AWS has carried
them out, and started again. At the end no node may be billed that is not known and planned, none ended that is not
ours or was not drained first, no warning of an observed node missing from the revisions or forgotten by the next
process, and the fleet must be of the size that was asked for.

{found["runs"]} runs, {found["kills"]} kills, {found["calls"]:,} calls ({faults}), {found["launched"]:,} nodes,
{found["interrupted"]:,} interruptions. {verdict} From a warning to the revision that has it: median
{notice["median"]:.2f} s, 95 % within {notice["share_95"]:.2f} s, worst {notice["worst"]:.2f} s, restarts and the
delays that were injected included; the emulated clock goes {found["speed"]:g} times as fast as the wall, the seconds
here are the wall's. {found["machine"]}; {found["run_s"]:.1f} s a run.
{found.get("note", "")}

![from a warning to its revision](benchmarks/fleet_chaos.svg)
"""
