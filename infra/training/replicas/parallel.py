"""``Replicas``: a model whose gradients are all-reduced among processes that come and go.

It stays what the script calls while ``DistributedDataParallel`` within is made anew for each process group: all of
its processes begin with the same buckets then, one that joins as those that were there.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # while there is no group: its functions' defaults would hold the first one for ever
from torch.nn.parallel import DistributedDataParallel

_UNFINISHED = (
    "Expected to have finished reduction"  # what DDP says of a backward pass that left parameters out
)
_BROADCAST = 250 << 20  # bytes of buffers that are sent at a time, as in DDP


class Replicas(torch.nn.Module):  # type: ignore[misc]
    """Calls ``module``, and reduces its gradients where there are several processes.

    Args:
        module: the script's model, on its device.
        options: of ``DistributedDataParallel``.
        lost: takes an error of a collective.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: Mapping[str, Any],
        lost: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self.module = module
        self._options, self.lost = dict(options), lost
        self._init = bool(self._options.pop("init_sync", True))
        syncs = self._options.pop("broadcast_buffers", True)
        self._syncs = bool(self._options.pop("forward_sync_buffers", syncs))
        self._within: list[DistributedDataParallel] = []  # a list, for its parameters are the module's
        self.register_state_dict_post_hook(_plain_names)
        self.register_load_state_dict_pre_hook(_own_names)

    @property
    def parallel(self) -> DistributedDataParallel | None:
        """Return what reduces gradients; ``None`` where there is one process."""
        return self._within[0] if self._within else None

    @property
    def called(self) -> torch.nn.Module:
        """Return what reduces gradients, or the model itself where there is one process."""
        return self.parallel or self.module

    def form(self, *, first: bool = False) -> None:
        """Reduce gradients in the present process group. ``first``: all take the first one's parameters."""
        self.release()
        if dist.get_world_size() > 1:
            made = DistributedDataParallel(
                self.module, init_sync=first and self._init, forward_sync_buffers=False, **self._options
            )
            self._within.append(made)

    def release(self) -> None:
        """Release the process group, whose peers see connections end then; DDP itself lives on in a cycle."""
        for old in self._within:
            old.reducer._remove_autograd_hooks()
            old.process_group = old.reducer = old.logger = None
        self._within.clear()

    def prepare_step(self) -> None:
        """Do what DDP would do in a forward pass, where its failure could not be taken up.

        Raises ``RuntimeError`` where the last backward pass has not reached all parameters.
        """
        if (parallel := self.parallel) is None:
            return
        with self._taken():
            if parallel.reducer._rebuild_buckets():
                parallel._has_rebuilt_buckets = True

    def share_buffers(self) -> None:
        """Take the first process's buffers, as DDP does in the forward pass after a step."""
        buffers = [*self.module.buffers()] if self._syncs and self.parallel is not None else []
        if buffers:
            with self._taken():
                dist._broadcast_coalesced(dist.group.WORLD, buffers, _BROADCAST, 0)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Tell whether the next backward pass reduces; see ``DistributedDataParallel.no_sync``."""
        return self.parallel is None or bool(self.parallel.require_backward_grad_sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self.parallel is not None:
            self.parallel.require_backward_grad_sync = value

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.called(*inputs, **more)

    def named_parameters(self, *args: Any, **more: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield parameters under the model's own names, as ``state_dict`` has them."""
        found: Iterator[tuple[str, torch.nn.Parameter]] = self.module.named_parameters(*args, **more)
        return found

    def named_buffers(self, *args: Any, **more: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers under the model's own names, as ``state_dict`` has them."""
        found: Iterator[tuple[str, torch.Tensor]] = self.module.named_buffers(*args, **more)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the model alone: a file must need neither the process group nor this class."""
        return copy.copy, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replicas":
        """Return a copy that is in no process group, as averages of a model are."""
        options = {**self._options, "forward_sync_buffers": self._syncs, "init_sync": self._init}
        made = memo[id(self)] = Replicas(copy.deepcopy(self.module, memo), options, self.lost)
        made.training = self.training
        return made

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, which scripts may use as if nothing was around it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def _taken(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            if _UNFINISHED in str(exc):  # some parameters had no gradient: the script's, and no loss
                raise
            self.lost(exc)


def _plain_names(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give a state the names that the model itself gives."""
    own = f"{prefix}module."
    named = [
        (prefix + name.removeprefix(own) if name.startswith(own) else name, state[name]) for name in state
    ]
    state.clear()
    state.update(named)


def _own_names(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Take a state under the names that the model itself gives, or with DDP's prefix, whichever fits it better.

    A model may have a part that is called ``module``, too, so that a name alone says nothing.
    """
    own, given = f"{prefix}module.", [name for name in state if name.startswith(prefix)]
    names = list(module.module.state_dict())
    plain, ddps = ({before + name for name in names} for before in (prefix, own))
    if len(ddps.intersection(given)) > len(plain.intersection(given)):
        return
    state.update([(own + name.removeprefix(prefix), state.pop(name)) for name in given])
