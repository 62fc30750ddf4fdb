"""Runs on a launcher without processes: the trial before the whole gang."""

import pytest

from tests.training_fakes import ECC, OOM, Act, failed, run

pytestmark = pytest.mark.processes


def test_a_trial_on_two_nodes_then_the_whole_gang(script: str) -> None:
    report, site = run(script, Act(steps=20), Act(), preflight="auto")
    assert site.made.launches[0][0] == {"node-1": 1, "node-2": 1}
    assert [launch[1].preflight_steps for launch in site.made.launches] == [20, 0]
    assert sum(site.made.launches[1][0].values()) == 6
    assert report.generations[0].kind == "preflight"
    assert report.generations[0].preflight
    assert report.lost_steps == 0


def test_an_error_of_the_program_never_meets_the_gang(script: str) -> None:
    report, site = run(script, failed("ImportError: no", steps=0), preflight="always")
    assert report.state == "failed"
    assert report.reason.startswith("preflight: import-error")
    assert len(site.made.launches) == 1


def test_a_trial_that_meets_a_broken_node_is_repeated_and_then_let_through(script: str) -> None:
    broken = failed(ECC, node="node-1", steps=0)
    report, site = run(script, broken, broken, Act(), preflight="always")
    assert report.state == "finished"
    assert [sum(launch[0].values()) for launch in site.made.launches] == [2, 2, 6]
    assert set(site.made.launches[0][0]).isdisjoint(site.made.launches[1][0])


def test_too_little_memory_in_the_trial_shrinks_the_pass_of_the_gang(script: str) -> None:
    report, site = run(script, failed(OOM, steps=0, saves=0), Act(steps=20), Act(), preflight="always")
    assert report.state == "finished"
    assert [launch[1].preflight_steps for launch in site.made.launches] == [20, 20, 0]
    assert [launch[1].max_local for launch in site.made.launches] == [None, 16, 16]  # 64 on two GPUs, halved


def test_a_node_lost_during_the_trial(script: str) -> None:
    lost = Act("lost", gone=("node-1",), steps=3)
    report, site = run(script, lost, Act(steps=20), Act(), preflight="always")
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-2": 1, "node-3": 1}
    assert site.made.launches[1][1].preflight_steps == 20


def test_a_trial_over_its_limit_ends_and_the_gang_trains_as_it_was_asked_to(script: str) -> None:
    report, site = run(script, Act("stopped", wait=True, steps=3), Act(), preflight="always")
    assert report.state == "finished"
    assert [sum(launch[0].values()) for launch in site.made.launches] == [2, 6]
    assert [launch[1].preflight_steps for launch in site.made.launches] == [20, 0]
    assert report.generations[0].ended > 300
    assert "slow, but 3 steps were done" in report.generations[0].decision
    assert site.made.ended_early == [1]
    assert site.made.resizes == []


def test_no_trial_where_it_would_be_the_whole_run_or_one_resumes(script: str) -> None:
    _, site = run(script, Act(), preflight="auto", nodes="local:1x1")
    assert site.made.launches[0][1].preflight_steps == 0
    _, site = run(script, Act(), preflight="auto", resume=True)
    assert site.made.launches[0][1].preflight_steps == 0
