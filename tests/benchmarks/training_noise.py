"""The measured noise scale of the gradient against the true one, where the gradients' covariance is known."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training.gradients.noise import GradientMeter
from ebbflow.infra.training.process.world import World

INITIAL = 32  # M0, examples
STEPS = 3000


def noise(world: int, device: str) -> list[dict[str, Any]]:
    """Return, for each problem, what was measured and what is true, in examples."""
    place = World.join(60.0)
    found = []
    for adam in (False, True):
        for passes in (1, 2) if world == 1 else (1,):
            how = f"{world} processes" if world > 1 else ("pairs of steps" if passes == 1 else "2 passes")
            for name, gradient, deviation in _problems():
                measured, true = _measure(place, device, gradient, deviation, passes, adam)
                found.append(
                    {
                        "problem": name,
                        "samples": how,
                        "optimiser": "AdamW" if adam else "SGD",
                        "measured": measured,
                        "true": true,
                        "ratio": measured / true,
                    }
                )
    place.leave()
    return found


def _problems() -> list[tuple[str, Tensor, Tensor]]:
    """Return mean gradients and the deviations of one example's gradient, by element; the same on all ranks."""
    torch.manual_seed(7)
    size = 2000
    return [
        ("equal variances", torch.randn(size) / 30, torch.ones(size)),
        ("variances over four decades", torch.randn(size) / 30, torch.logspace(-2, 0, size) * 3),
        ("little noise", torch.randn(size), torch.full((size,), 2.0)),
    ]


def _measure(
    place: World, device: str, gradient: Tensor, deviation: Tensor, passes: int, adam: bool
) -> tuple[float, float]:
    """Train a linear loss whose gradients are drawn: normal, with the mean and the covariance of a batch."""
    torch.manual_seed(100 + place.rank)
    gradient, deviation = gradient.to(device), deviation.to(device)
    inner = nn.Linear(len(gradient), 1, bias=False).to(device)
    model = DistributedDataParallel(inner) if place.size > 1 else inner
    # a rate of 0: the gradient stays what it is, and Adam's second moments are gathered all the same
    optimizer = (
        torch.optim.AdamW(inner.parameters(), 0.0) if adam else torch.optim.SGD(inner.parameters(), 0.0)
    )
    meter = GradientMeter(model, optimizer, INITIAL, every=1)
    local = INITIAL / place.size / passes
    for _ in range(STEPS):
        for number in range(passes):
            last = number == passes - 1
            drawn = gradient + deviation / local**0.5 * torch.randn(len(gradient), device=device)
            quiet = model.no_sync() if place.size > 1 and not last else nullcontext()
            with quiet:
                loss = model(drawn).sum() * meter.loss_factor / passes
                with meter.micro_pass(last=last, weight=1 / passes):
                    loss.backward()
        meter.finish(place.sum(meter.local(INITIAL)), place.size, INITIAL)
        optimizer.step()
        optimizer.zero_grad()
    factor = torch.ones_like(gradient)
    if adam:  # v settles at the mean square of a batch's gradient
        factor = (gradient**2 + deviation**2 / INITIAL).rsqrt()
    true = ((factor * deviation) ** 2).sum() / ((factor * gradient) ** 2).sum()
    if place.size > 1:
        dist.barrier()
    return meter.noise_scale, float(true)
