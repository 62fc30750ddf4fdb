"""An elastic run in the test's own process: what a script may do, and what it is told when it may not."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ebbflow.infra.errors import (
    DatasetError,
    OtherModelError,
    RunLockedError,
    StorageFullError,
    TrainingError,
)
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training import ElasticRun, RunStopped
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.data.samples import Samples
from ebbflow.infra.training.gradients import noise
from ebbflow.infra.training.process.world import peer_lost
from ebbflow.infra.training.progress import seed_everything
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataPosition

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train(
    run: ElasticRun, epochs: int = 1, data: Any = (X, Y), model: nn.Module | None = None, **options: Any
) -> list[float]:
    """Train a linear model and return the losses."""
    called, _ = run.prepare(
        model or nn.Linear(4, 1), options.pop("optimizer", sgd), **{"batch_size": 10} | options
    )
    losses = []
    for _ in run.epochs(epochs):
        for x, y in run.batches(data):
            run.backward(nn.functional.mse_loss(called(x), y))
            if run.step():
                losses.append(run.statistics.loss)
    return losses


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("EBBFLOW_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before, "a run puts the handler back"
    assert not [t for t in threading.enumerate() if t.name == "ebbflow-link"]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_alone_it_trains_as_plain_torch_would(monkeypatch: pytest.MonkeyPatch, clip: float | None) -> None:
    monkeypatch.setattr(noise, "DENSE", 0)  # of later steps all but two in sixteen are not measured
    with ElasticRun.start(seed=5) as run:
        torch.manual_seed(0)
        losses = train(run, epochs=3, clip_norm=clip)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = sgd(model.parameters())
    plain, clipped = [], 0
    from ebbflow.planners.training.saving.data_order import DataOrder

    for turn in range(3):
        order = torch.from_numpy(DataOrder(50, 5).indices(turn, 0, 50).copy())
        for part in order.split(10):
            loss = nn.functional.mse_loss(model(X[part]), Y[part])
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                clipped += bool(nn.utils.clip_grad_norm_(model.parameters(), clip) > clip)
            optimizer.step()
            plain.append(loss.item())
    assert clip is None or clipped > 2
    np.testing.assert_allclose(losses, plain, rtol=1e-5)


def test_clipping_counts_what_a_script_has_changed_since_gradients_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "DENSE", 0)  # norms are summed in each step, and estimates made in few
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(requires_grad=False)
    with ElasticRun.start(seed=5) as run:
        called, _ = run.prepare(model, sgd, batch_size=10, clip_norm=0.3)
        model.bias.requires_grad_(requires_grad=True)  # as a script does that thaws layers one after another
        for _ in run.epochs(2):
            for x, y in run.batches((X, Y)):
                before = [one.detach().clone() for one in model.parameters()]
                run.backward(nn.functional.mse_loss(called(x), y + 20.0))
                for one in model.parameters():
                    assert one.grad is not None
                    one.grad = 3.0 * one.grad
                assert run.step()
                moved = [
                    (one.detach() - old).flatten()
                    for one, old in zip(model.parameters(), before, strict=True)
                ]
                assert float(torch.cat(moved).norm()) == pytest.approx(0.05 * 0.3, rel=1e-3)


def test_rates_are_told_in_tokens_where_the_script_says_what_they_are() -> None:
    with ElasticRun.start() as run:
        model, _ = run.prepare(nn.Linear(4, 1), sgd, batch_size=10)
        for _ in run.epochs(1):
            for x, y in run.batches((X, Y), tokens=lambda batch: 7 * len(batch[0])):
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
        assert run.statistics.tokens == 7.0
        assert run.statistics.to_json()["tokens"] == 7.0


def test_a_warm_up_counts_progress() -> None:
    factors = []
    with ElasticRun.start() as run:
        called, optimizer = run.prepare(
            nn.Linear(4, 1), sgd, batch_size=10, learning_rate_rule="legw", warm_up=4.0
        )
        for _ in run.epochs(2):
            for x, y in run.batches((X, Y)):
                run.backward(nn.functional.mse_loss(called(x), y))
                run.step()
                factors.append(run.statistics.factor)
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert factors == pytest.approx([0.25, 0.5, 0.75] + 7 * [1.0])


@pytest.mark.parametrize("workers", [0, 2])
def test_accumulation_and_workers_change_nothing(workers: int) -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, i: int) -> Any:
            return X[i], Y[i]

    found = []
    for data, most in (((X, Y), None), (Pairs() if workers else TensorDataset(X, Y), 3)):
        with ElasticRun.start() as run:
            torch.manual_seed(0)
            called, _ = run.prepare(nn.Linear(4, 1), sgd, batch_size=20, max_local=most)
            losses = []
            for _ in run.epochs(2):
                for x, y in run.batches(data, workers=workers if most else 0):
                    assert most is None or len(x) <= most
                    run.backward(nn.functional.mse_loss(called(x), y))
                    if run.step():
                        losses.append(run.statistics.loss)
            found.append(losses)
    assert len(found[0]) == 6, "the last batch of each pass is smaller, and a step of its own"
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_too(precision: Any) -> None:
    with ElasticRun.start() as run:
        losses = train(run, epochs=12, precision=precision)
        assert run.progress.skipped < 10, "a loss scale that is too high is lowered within a few steps"
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.1 * losses[0]


def test_an_epoch_of_progress_is_shorter_with_a_worthwhile_larger_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ebbflow.infra.training.gradients.tuner import BatchTuner
    from ebbflow.planners.training.speed.batch_size import BatchSplit

    monkeypatch.setattr(BatchTuner, "split", lambda self, nodes, gpus: BatchSplit(10, 1))
    noise = torch.randn(2000, 4, generator=torch.Generator().manual_seed(2))
    y = noise.sum(1, keepdim=True) + 3 * torch.randn(2000, 1, generator=torch.Generator().manual_seed(3))
    with ElasticRun.start() as run:
        train(run, epochs=3, data=(noise, y), max_batch_size=40)
        progress, last = run.progress, run.statistics
    assert last.batch == 20
    assert 1.0 < last.gain < 2.0
    assert last.factor == pytest.approx(last.gain), "AdaScale's factor is the gain"
    assert 600 <= progress.gained < 602
    assert progress.step == pytest.approx(600 / 1.7, rel=0.25)
    assert progress.epoch == 3


def test_an_epoch_that_a_script_leaves_early_is_over() -> None:
    with ElasticRun.start() as run:
        model, _ = run.prepare(nn.Linear(4, 1), sgd, batch_size=10)
        seen = []
        for epoch in run.epochs(3):
            for x, y in run.batches((X, Y)):
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
                seen.append(epoch)
                if epoch == 0 and len(seen) == 2:
                    break
    assert seen == [0] * 2 + [1] * 5 + [2] * 5
    assert run.progress.cursor == DataPosition(2, 20), "the data go on where they were"


def test_a_run_that_finished_does_not_begin_again(tmp_path: Path) -> None:
    for expected in (5, 0):
        with ElasticRun.start(directory=tmp_path, run_id="one") as run:
            assert len(train(run)) == expected
        assert run.progress.step == 5
    assert (tmp_path / "one" / "checkpoints").is_dir()


def test_sigterm_saves_and_leaves_and_the_next_process_goes_on(tmp_path: Path) -> None:
    def part(epochs: int, stop_at: int | None) -> list[float]:
        losses = []
        with ElasticRun.start(directory=tmp_path, run_id="one") as run:
            model, _ = run.prepare(nn.Linear(4, 1), sgd, batch_size=10, state={"more": more})
            for _ in run.epochs(epochs):
                for x, y in run.batches((X, Y)):
                    if run.progress.step == stop_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                    run.backward(nn.functional.mse_loss(model(x), y))
                    try:
                        run.step()
                    finally:
                        losses.append(run.statistics.loss)
        return losses

    more = nn.Linear(1, 1)
    with torch.no_grad():
        more.weight.fill_(7.0)
    with pytest.raises(RunStopped) as stopped:
        part(3, 6)
    assert (stopped.value.code, stopped.value.reason) == (0, "terminated")
    with torch.no_grad():
        more.weight.fill_(0.0)
    assert len(part(3, None)) == 15 - 7
    assert more.weight.item() == 7.0


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    calls = []

    def full(self: CheckpointFolder, state: Any, step: int, note: Any = None) -> bool:
        calls.append(step)
        raise StorageFullError("no space left on device")

    monkeypatch.setattr(CheckpointFolder, "save_async", full)
    with ElasticRun.start(
        directory=tmp_path, run_id="one", settings=RunSettings(checkpoint_interval=0.0)
    ) as run:
        assert len(train(run, epochs=2)) == 10
    assert calls == list(range(1, 11))
    assert "no space left" in caplog.text


def test_a_checkpoint_of_another_model_is_refused_with_the_parameters_named(tmp_path: Path) -> None:
    with ElasticRun.start(directory=tmp_path, run_id="one") as run:
        train(run)
    with (
        ElasticRun.start(directory=tmp_path, run_id="one") as run,
        pytest.raises(OtherModelError, match="weight"),
    ):
        run.prepare(nn.Linear(4, 2), sgd, batch_size=10)
    with (
        ElasticRun.start(directory=tmp_path, run_id="one") as run,
        pytest.raises(TrainingError, match="batch_size=10"),
    ):
        run.prepare(nn.Linear(4, 1), sgd, batch_size=11)
    with (
        ElasticRun.start(directory=tmp_path, run_id="one") as run,
        pytest.raises(DatasetError, match="50 samples"),
    ):
        train(run, epochs=2, data=(X[:40], Y[:40]))


def test_one_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with ElasticRun.start(directory=tmp_path, run_id="one"), pytest.raises(RunLockedError, match="one"):
        ElasticRun.start(directory=tmp_path, run_id="one")


def test_a_users_error_passes_through_unchanged() -> None:
    mistake = KeyError("mine")

    def script() -> None:
        with ElasticRun.start() as run:
            train(run)
            raise mistake

    with pytest.raises(KeyError) as raised:
        script()
    assert raised.value is mistake
    assert mistake.__cause__ is None


def test_a_preflight_without_a_folder_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(RunStopped, match="preflight"),
        ElasticRun.start(settings=RunSettings(preflight_steps=2)) as run,
    ):
        train(run)
    assert run.progress.step == 2
    assert not list(tmp_path.glob("ebbflow*"))


def test_leaving_a_script_with_status_0_finishes_the_run(tmp_path: Path) -> None:
    def script(status: int) -> None:
        with ElasticRun.start(directory=tmp_path, run_id=f"run-{status}") as run:
            train(run)
            raise SystemExit(status)

    for status in (0, 3):
        with pytest.raises(SystemExit) as left:
            script(status)
        assert left.value.code == status
    assert CheckpointFolder(StorageLocation(tmp_path / "run-0" / "checkpoints")).latest() is not None
    assert CheckpointFolder(StorageLocation(tmp_path / "run-3" / "checkpoints")).latest() is None


def test_a_gradient_that_is_never_finite_ends_the_run() -> None:
    with ElasticRun.start() as run, pytest.raises(TrainingError, match="100 steps in a row"):
        train(run, epochs=1000, data=(X * math.nan, Y))


def test_data_that_cannot_be_ordered_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield X[0]

    with pytest.raises(DatasetError, match="Stream can only be iterated"):
        Samples(Stream())
    with pytest.raises(DatasetError, match="generator"):
        Samples(x for x in X)
    with pytest.raises(DatasetError, match="50, 49"):
        Samples((X, Y[1:]))
    with pytest.raises(DatasetError, match="workers"):
        Samples(X, workers=-1)
    with (
        ElasticRun.start() as run,
        pytest.raises(DatasetError, match="5 samples is smaller than the batch of 10"),
    ):
        train(run, data=(X[:5], Y[:5]))


def test_all_kinds_of_data_are_read() -> None:
    rows = np.array([3, 1])
    assert torch.equal(Samples(X).read(rows), X[[3, 1]])
    assert torch.equal(Samples(X.numpy()).read(rows), X[[3, 1]])
    assert [tuple(part.shape) for part in Samples((X.numpy(), Y)).read(rows)] == [(2, 4), (2, 1)]
    assert Samples(["a", "b", "c", "d"]).read(rows) == ["d", "b"]
    assert Samples([{"x": i} for i in range(4)]).read(rows)["x"].tolist() == [3, 1]
    assert Samples(list(range(4)), collate=sum).read(rows) == 4


def test_a_script_in_the_wrong_order_is_told_what_is_missing() -> None:
    with ElasticRun.start() as run:
        with pytest.raises(TrainingError, match=r"run\.prepare"):
            next(run.epochs(1))
        model, _ = run.prepare(nn.Linear(4, 1), sgd, batch_size=10)
        with pytest.raises(TrainingError, match="prepared once"):
            run.prepare(nn.Linear(4, 1), sgd, batch_size=10)
        with pytest.raises(TrainingError, match=r"run\.epochs"):
            next(run.batches((X, Y)))
        with pytest.raises(TrainingError, match=r"run\.step\(\) comes after"):
            run.step()
        for _ in run.epochs(1):
            batches = run.batches((X, Y))
            next(batches)
            with pytest.raises(TrainingError, match=r"run\.backward\(loss\) was not called"):
                next(batches)
            batches = run.batches((X, Y))
            x, y = next(batches)
            run.backward(nn.functional.mse_loss(model(x), y))
            with pytest.raises(TrainingError, match="once to each batch"):
                run.backward(nn.functional.mse_loss(model(x), y))
            with pytest.raises(TrainingError, match=r"run\.step\(\) was not called"):
                next(batches)
            break


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10, "max_batch_size": 5}, "max_batch_size must be >= batch_size"),
        ({"batch_size": 0}, "1 <= initial"),
        ({"batch_size": 10, "min_local": 20, "max_local": 5}, "smallest_local"),
        ({"batch_size": 10, "min_local": 20}, "1 processes cannot share"),
        ({"batch_size": 10, "precision": "fp8"}, "fp32, bf16 or fp16"),
        ({"batch_size": 10, "learning_rate_rule": "cube"}, "learning_rate_rule must be"),
        ({"batch_size": 10, "scheduler": lambda o: None, "scheduler_unit": "day"}, "iteration or epoch"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with ElasticRun.start() as run, pytest.raises(OptionError, match=message):
        run.prepare(nn.Linear(4, 1), sgd, **options)


def test_streams_of_random_numbers_are_independent_and_repeatable() -> None:
    def draw(*stream: int) -> tuple[float, float, float]:
        import random

        seed_everything(9, *stream)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(4, 0) == draw(4, 0)
    assert len({draw(step, rank) for step in range(20) for rank in range(3)}) == 60
    with pytest.raises(TrainingError, match="seed must be"):
        seed_everything(-1)


def test_only_what_a_lost_peer_says_counts_as_one() -> None:
    assert peer_lost(
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:4")
    )
    assert peer_lost(RuntimeError("Application timeout caused pair closure"))
    assert not peer_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not peer_lost(ValueError("gloo/transport"))
    caused = ValueError("evaluation failed")
    caused.__cause__ = RuntimeError("gloo/transport/tcp: Connection reset by peer")
    assert peer_lost(caused)


def test_without_a_launcher_what_is_reported_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with ElasticRun.start() as run:
        train(run, 2)
        run.report(loss=0.12345, accuracy=1)
    assert capsys.readouterr().out == "epoch 2, step 10: loss 0.123, accuracy 1\n"


def test_statistics_say_what_a_run_does() -> None:
    with ElasticRun.start() as run:
        model, _ = run.prepare(
            nn.Linear(4, 1), sgd, batch_size=10, clip_norm=1.0,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), scheduler_unit="epoch",
        )  # fmt: skip
        for _ in run.epochs(2):
            for x, y in run.batches((X, Y)):
                time.sleep(0.06)
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
            run.report(loss=run.statistics.loss)
        last = run.statistics
    assert (last.step, last.samples, last.batch, last.gpus, last.factor) == (10, 100, 10, 1, 1.0)
    assert last.learning_rate == 0.05 / 4
    assert 0 < last.throughput < 170
    assert last.goodput == pytest.approx(last.throughput)
    assert 0.05 < last.step_seconds < 150
    assert run.metrics == {"loss": last.loss}
    assert last.to_json()["noise_scale"] >= 0


@pytest.mark.parametrize("own", [False, True])
def test_hyperparameters_are_the_checkpoint_s_or_the_script_s(tmp_path: Path, own: bool) -> None:
    def rates(lr: float, momentum: float) -> list[float]:
        settings = RunSettings(script_hyperparameters=own)
        with ElasticRun.start(directory=tmp_path, run_id="r", settings=settings) as run:
            _, optimizer = run.prepare(
                nn.Linear(4, 1),
                lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
                batch_size=10,
                scheduler=lambda found: torch.optim.lr_scheduler.StepLR(found, 5, 0.5),
            )
            began = optimizer.param_groups[0]["lr"]
            for _ in run.epochs(run.progress.epoch + 1):
                for x, y in run.batches((X, Y)):
                    run.backward(nn.functional.mse_loss(run._prepared.model(x), y))  # type: ignore[union-attr]
                    run.step()
            group = optimizer.param_groups[0]
            return [began, group["lr"], group["momentum"]]

    assert rates(0.04, 0.0) == pytest.approx([0.04, 0.02, 0.0])
    expected = [0.04, 0.02, 0.9] if own else [0.02, 0.01, 0.0]  # an epoch is five steps
    assert rates(0.08, 0.9) == pytest.approx(expected)
