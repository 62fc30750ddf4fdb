"""Sharded runs of real processes over gloo, which are the data-parallel run whatever happens to processes."""

from pathlib import Path

import numpy as np
import pytest

from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.launches import Launch, Log, same
from tests.infra.training.rank_server import RankServer

pytestmark = pytest.mark.processes


def test_a_sharded_run_that_shrinks_and_grows_is_the_run_that_does_not(launch: Launch, static: Log) -> None:
    worlds = ((3, {"stop": [2, 1]}, "fsdp"), (2, {"stop": [5, 0]}, "fsdp"), (1, {"stop": [7, 0]}, "fsdp"))
    for world, case, parallel in (*worlds, (2, {"stop": [9, 1]}, "ddp"), (3, {}, "fsdp")):
        ranks = launch.start(world, at=case, max_local=7, parallel=parallel if parallel != "ddp" else None)
        assert launch.wait(ranks) == [0] * world, [rank.said[-3000:] for rank in ranks]
        if case:
            (stopped,) = launch.said("stopped")
            assert (stopped.step, stopped.content["saved"]) == (case["stop"][0] + 1, True)
    same(launch.log(), static)


def test_tensor_parallel_groups_that_shrink_and_grow_are_one_process(launch: Launch, static: Log) -> None:
    worlds: tuple[tuple[int, dict, dict], ...] = (
        (4, {"stop": [3, 1]}, {"tensor": [2, 2]}),
        (2, {"stop": [6, 0]}, {"parallel": "fsdp"}),
        (4, {}, {"tensor": [2, 2], "parallel": "own"}),
    )
    for world, case, more in worlds:
        ranks = launch.start(world, at=case, max_local=7, **more)
        assert launch.wait(ranks) == [0] * world, [rank.said[-3000:] for rank in ranks]
        if case:
            (stopped,) = launch.said("stopped")
            assert (stopped.step, stopped.content["saved"]) == (case["stop"][0] + 1, True)
    same(launch.log(), static)


@pytest.mark.slow
def test_a_killed_process_takes_its_group_and_the_others_save(launch: Launch, static: Log) -> None:
    ranks = launch.start(4, at={"kill": [5, 2]}, tensor=[2, 1, 2])
    exits = launch.wait(ranks)
    assert sorted(map(str, exits)) == ["-9", "75", "75", "75"], [rank.said[-2000:] for rank in ranks]
    saved = [report for report in launch.said("stopped") if report.content["saved"]]
    assert [report.step for report in saved] == [5], "the other group holds the whole model"
    ranks = launch.start(4, at={"kill": [9, 1]}, tensor=[1, 4])
    assert sorted(map(str, launch.wait(ranks))) == ["-9", "75", "75", "75"]
    assert launch.said("started")[0].content["restored"] == 5
    for world, more in (
        (3, {"parallel": "fsdp"}),
        (2, {"tensor": [1, 2], "parallel": "spread"}),
        (1, {}),
        (4, {"tensor": [2, 2]}),
    ):
        at = {"stop": [13 - world, 0]} if world < 4 else {}
        ranks = launch.start(world, at=at, **more)
        assert launch.wait(ranks) == [0] * world, [rank.said[-2000:] for rank in ranks]
    end = launch.log().end  # steps 5 to 9 were done twice
    np.testing.assert_allclose(end["weights"], static.end["weights"], rtol=1e-4, atol=1e-6)
    assert end["steps"] == 15


@pytest.mark.slow
def test_clipping_and_adam_of_groups_are_those_of_one_process(server: RankServer, tmp_path: Path) -> None:
    logs = {}
    for name, world, more in (("one", 1, {}), ("groups", 4, {"tensor": [2, 2]})):
        (tmp_path / name).mkdir()
        one = Launch(server, tmp_path / name)
        case = {"adam": True, "clip_norm": 0.5, "max_local": 3, "nan_at": 17}
        ranks = one.start(world, **case, **more)
        assert one.wait(ranks) == [0] * world, ranks[0].said[-3000:]
        logs[name] = one.log()
    found, expected = logs["groups"].end, logs["one"].end
    assert found["skipped"] == expected["skipped"] >= 3
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=2e-3, atol=2e-3)


def test_shards_train_to_the_bit_as_whole_models_do(server: RankServer, tmp_path: Path) -> None:
    logs = {}
    for parallel in ("ddp", "fsdp"):
        (tmp_path / parallel).mkdir()
        one = Launch(server, tmp_path / parallel)
        ranks = one.start(2, parallel=None if parallel == "ddp" else parallel)
        assert one.wait(ranks) == [0, 0], ranks[0].said[-3000:]
        logs[parallel] = one.log()
    assert logs["fsdp"].losses == logs["ddp"].losses
    found, expected = logs["fsdp"].end, logs["ddp"].end
    assert found.pop("weights") == expected.pop("weights")
    assert found == pytest.approx(expected, rel=1e-6)


def test_clipping_and_loss_scaling_are_those_of_whole_models(server: RankServer, tmp_path: Path) -> None:
    logs = {}
    for parallel in ("ddp", "hsdp"):
        (tmp_path / parallel).mkdir()
        one = Launch(server, tmp_path / parallel)
        case = {"adam": True, "clip_norm": 0.5, "precision": "fp16", "max_local": 3, "nan_at": 17, "local": 2}
        ranks = one.start(4, parallel=None if parallel == "ddp" else parallel, **case)
        assert one.wait(ranks) == [0] * 4, ranks[0].said[-3000:]
        logs[parallel] = one.log()
    found, expected = logs["hsdp"].end, logs["ddp"].end
    assert found["steps"] == 15
    assert found["skipped"] == expected["skipped"] >= 3, "the loss scale is lowered on all ranks alike"
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=2e-3, atol=2e-3)


def test_a_killed_shard_costs_the_steps_since_the_last_checkpoint_that_is_not_damaged(
    launch: Launch, static: Log
) -> None:
    ranks = launch.start(
        3, RunSettings(checkpoint_interval=0.0), at={"kill": [9, 2]}, pause=0.05, parallel="fsdp"
    )
    assert sorted(map(str, launch.wait(ranks))) == ["-9", "75", "75"]
    assert [report.content["saved"] for report in launch.said("stopped")] in ([], [False], [False, False])
    found = launch.checkpoints.latest()
    assert found is not None
    assert found.layout == "sharded"
    assert 3 <= found.step <= 9
    damaged = launch.folder / "run" / "checkpoints" / found.name / "part-0002-of-0003.bin"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    earlier = [path for path in damaged.parents[1].glob("step-*") if path.name < found.name]
    before = max(earlier, key=lambda path: path.name)  # killed before old ones are removed, it has left more
    assert launch.run(2, parallel="fsdp") == [0, 0]
    step = launch.said("started")[0].step
    assert before.name.startswith(f"step-{step:012d}-")
    damage = [text for report in launch.said("damaged") for text in report.content["checkpoints"]]
    assert any(found.name in text and "bytes that are not those written" in text for text in damage)
    end = launch.log().end
    np.testing.assert_allclose(end["weights"], static.end["weights"], rtol=1e-4, atol=1e-6)
    assert (end["steps"], end["extra"]) == (15, step)


def test_a_killed_replica_costs_the_step_in_flight_only(launch: Launch, static: Log) -> None:
    ranks = launch.start(4, at={"kill": [5, 2]}, parallel="hsdp", local=2)
    exits = launch.wait(ranks)
    assert sorted(map(str, exits)) == ["-9", "75", "75", "75"], [rank.said[-2000:] for rank in ranks]
    saved = [report for report in launch.said("stopped") if report.content["saved"]]
    assert [report.step for report in saved] == [5], "the survivors hold a replica between them"
    assert launch.run(2, parallel="fsdp") == [0, 0]
    assert launch.said("started")[0].content["restored"] == 5
    same(launch.log(), static)


def test_a_running_checkpoint_of_shards_is_read_by_any_other_world(launch: Launch) -> None:
    settings = RunSettings(
        checkpoint_interval=600.0, partial_checkpoint_interval=4, partial_checkpoint_fraction=0.25
    )
    fsdp, hsdp = {"parallel": "fsdp"}, {"parallel": "hsdp", "local": 2}
    for world, until, case in ((2, 4, fsdp), (3, 8, fsdp), (1, 11, {}), (4, 0, hsdp)):
        kill = {"kill": [until, world - 1]} if until else {}
        ranks = launch.start(world, settings, at=kill, pause=0.05, adam=True, **case)
        exits = launch.wait(ranks)
        assert (exits == [0] * world) == (not kill), [rank.said[-2000:] for rank in ranks]
        (started,) = launch.said("started")
        assert started.step == (started.content["restored"] or 0)
        assert (started.step > 0) == (launch.generation > 1), "there is no other checkpoint"
    assert launch.log().end["steps"] == 15
    assert launch.log().end["extra"] == started.step


def test_a_model_that_the_script_has_sharded_and_a_mesh_are_taken(launch: Launch, static: Log) -> None:
    for world, case, parallel in (
        (3, {"stop": [4, 1]}, "own"),
        (4, {"stop": [9, 0]}, "mesh"),
        (1, {}, "own"),
    ):
        ranks = launch.start(world, at=case, parallel=parallel)
        assert launch.wait(ranks) == [0] * world, [rank.said[-2000:] for rank in ranks]
    same(launch.log(), static)


def test_a_preflight_of_shards_rehearses_saving_on_all_processes(launch: Launch) -> None:
    assert launch.run(2, RunSettings(preflight_steps=3), parallel="fsdp") == [0, 0]
    (preflight,) = launch.said("preflight")
    assert preflight.content["steps"] == 3
    assert preflight.content["checkpoint_bytes"] > 1000
    assert not (launch.folder / "run" / "preflight").exists()
    assert launch.checkpoints.latest() is None


def test_parts_written_at_the_last_moment_are_a_checkpoint(launch: Launch) -> None:
    settings = RunSettings(termination_grace=4.0)
    ranks = launch.start(2, settings, at={"hang": [4, 0]}, parallel="fsdp", also_terminated=[4, 1])
    assert launch.wait(ranks) == [0, 0], [rank.said[-2000:] for rank in ranks]
    saved = [report for report in launch.said("stopped") if report.content["saved"]]
    assert [(report.step, report.content["last_moment"]) for report in saved] == [(4, True)]
    found = launch.checkpoints.latest()
    assert found is not None
    assert (found.step, found.layout) == (4, "sharded")


def test_a_save_that_one_process_cannot_write_is_none(launch: Launch) -> None:
    settings = RunSettings(termination_grace=2.0)
    ranks = launch.start(2, settings, at={"stop": [4, 0]}, parallel="fsdp", unwritable=1)
    assert launch.wait(ranks) == [1, 1], [rank.said[-2000:] for rank in ranks]
    assert "step 5 of the run is not saved in its directory" in ranks[0].said
    assert "no space left" in ranks[0].said
    (stopped,) = launch.said("stopped")
    assert not stopped.content["saved"]
    assert launch.checkpoints.latest() is None
    assert [p.name for p in (launch.folder / "run" / "checkpoints").glob("*")] == []
