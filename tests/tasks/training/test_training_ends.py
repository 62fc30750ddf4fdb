"""Runs on a launcher without processes: what follows the loss of a node, and each kind of failure."""

import pytest

from tests.training_fakes import ECC, OOM, Act, failed, run

pytestmark = pytest.mark.processes


def test_a_lost_node_costs_the_steps_since_the_checkpoint(script: str) -> None:
    report, site = run(script, Act("lost", steps=10, saves=7, gone=("node-2",)), Act())
    assert [launch[0] for launch in site.made.launches] == [
        {"node-1": 2, "node-2": 2, "node-3": 2},
        {"node-1": 2, "node-3": 2},
    ]
    first, second = report.generations
    assert (first.lost_steps, report.lost_steps, second.lost_steps) == (3, 3, 0)
    assert first.failure is not None
    assert (first.failure.reason, first.failure.failure_class) == ("node-lost", "scheduler")
    assert second.gap_seconds is not None
    assert report.steps == 17
    assert [point.lost_steps for point in report.series] == [0] * 10 + [3] * 10, "known as soon as it goes on"


def test_a_notice_is_no_failure_of_the_node(script: str) -> None:
    report, _ = run(script, Act("stopped", gone=("node-2",), noticed=("node-2",)), Act())
    failure = report.generations[0].failure
    assert failure is not None
    assert failure.reason == "spot-revocation"
    assert report.lost_steps == 0


def test_losses_never_count(script: str) -> None:
    acts = [Act("lost", gone=(f"node-{n}",)) for n in range(1, 12)]
    report, site = run(script, *acts, Act(), nodes="local:12x1")
    assert report.state == "finished"
    assert len(site.made.launches) == 12
    assert set(site.made.delays) == {0.0}


@pytest.mark.parametrize(
    ("text", "reason"), [("TypeError: no", "semantic-error"), ("FileNotFoundError: x", "incorrect-inputs")]
)
def test_errors_of_program_and_data_run_once(script: str, text: str, reason: str) -> None:
    report, site = run(script, failed(text))
    assert report.state == "failed"
    assert report.failure is not None
    assert report.failure.reason == reason
    assert text in report.reason
    assert len(site.made.launches) == 1


def test_out_of_memory_goes_on_with_half_the_examples_a_pass(script: str) -> None:
    report, site = run(script, failed(OOM, batch=96), Act())
    assert report.state == "finished"
    assert [launch[1].max_local for launch in site.made.launches] == [None, 8]  # 96 over six GPUs, halved


def test_out_of_memory_twice_is_the_end(script: str) -> None:
    report, site = run(script, failed(OOM, saves=0), failed(OOM, saves=0))
    assert report.state == "failed"
    assert len(site.made.launches) == 2


def test_a_broken_gpu_is_replaced_after_a_while(script: str) -> None:
    report, site = run(script, failed(ECC, node="node-2", saves=0), Act(), retry_backoff=10.0)
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-1": 2, "node-3": 2, "node-4": 2}
    assert 8 <= site.made.delays[0] <= 12
    assert "not on node-2" in report.generations[0].decision


def test_a_crash_is_tried_once_on_other_nodes(script: str) -> None:
    crash = failed("", code=-11, saves=0)
    report, site = run(script, crash, crash, nodes="local:2x1")
    assert report.state == "failed"
    assert [set(launch[0]) for launch in site.made.launches] == [{"node-1", "node-2"}, {"node-3", "node-4"}]


def test_survivors_hide_no_cause(script: str) -> None:
    cause = failed("KeyError: 'label'", node="node-2", rank=1).failures[0]
    survivor = failed("", node="node-1", code=75).failures[0]
    report, _ = run(script, Act("failed", failures=(survivor, cause)))
    assert report.failure is not None
    assert (report.failure.reason, report.failure.node) == ("traceback", "node-2")


def test_blind_retries(script: str) -> None:
    report, site = run(script, *[failed("SyntaxError: no", saves=0)] * 4, retry_policy="blind")
    assert report.state == "failed"
    assert len(site.made.launches) == 4


def test_a_hang_is_blamed_on_who_stood_still(script: str) -> None:
    hang = Act("hung", suspects=("node-3",), saves=0)
    report, site = run(script, hang, Act(), retry_backoff=0.0)
    assert report.state == "finished"
    assert site.made.launches[1][0] == {"node-1": 2, "node-2": 2}  # at once with what is ready,
    assert site.made.then == [{"node-1": 2, "node-2": 2, "node-4": 2}]  # and with all when the new one is
    assert report.generations[0].failure.reason == "collective-timeout"


def test_a_node_that_stood_still_is_a_lost_one(script: str) -> None:
    report, site = run(script, Act("hung", suspects=("node-3",), gone=("node-3",), saves=0), Act())
    assert report.generations[0].failure.reason == "node-lost"
    assert site.made.delays == [0.0]


def test_the_hazard_is_learnt_unless_stated(script: str) -> None:
    lost = Act("lost", gone=("node-2",), seconds=1200.0)
    _, site = run(script, lost, Act())
    first, second = (launch[1].interruption_rate for launch in site.made.launches)
    assert first == 0.05
    assert second == pytest.approx(1.05 / 2)  # after an hour of one node in twenty minutes of three
    _, site = run(script, lost, Act(), interruption_rate=3.0, run_id="stated")
    assert [launch[1].interruption_rate for launch in site.made.launches] == [3.0, 3.0]


def test_a_script_without_elastic_run(script: str) -> None:
    report, _ = run(script, Act("silent", steps=0, saves=0))
    assert report.state == "failed"
    assert "with ElasticRun.start() as run" in report.reason


def test_too_few_nodes_wait_and_a_new_one_ends_the_wait(script: str) -> None:
    lost = Act("lost", gone=("node-1",))
    report, site = run(script, lost, Act(), nodes="local:1x2", min_gpus=2, fault=("0s:add:1",))
    assert report.state == "finished"
    # node-2 came while the first generation ran or while the run waited, whichever the fault's thread met
    assert site.made.launches[-1][0] == {"node-2": 2}


def test_memory_that_runs_out_before_the_first_step(script: str) -> None:
    report, site = run(script, failed(OOM, steps=0, saves=0, batch=60), Act())
    assert report.state == "finished"
    assert site.made.launches[1][1].max_local == 5
