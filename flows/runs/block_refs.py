"""Addresses that flows are given: as they are, or as the names of Prefect blocks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ebbflow.flows.blocks import EbbflowAws, EbbflowCluster, EbbflowStorage, block_name, load_block
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.leased.place import ClusterPlace


@dataclass(frozen=True)
class ClusterSettings:
    """What a flow was told of its cluster, with what the cluster's block says where the flow was told nothing."""

    ledger: str | None = field(default=None, repr=False)
    cluster: str = "local"
    source: str = "local"  # of nodes
    master: str = ""
    pools: tuple[str, ...] = ()
    policy: str = ""
    config: str | None = None
    storage: EbbflowStorage | None = None

    @property
    def place(self) -> ClusterPlace:
        """Return the cluster for an app; trainings run on nodes of this machine, or of AWS."""
        kind = self.source.partition(":")[0]
        fleet = self.source if kind in ("local", "aws") else "local"
        return ClusterPlace(self.ledger, self.cluster, fleet, self.pools)


@contextmanager
def found(
    ledger: str | None = None,
    cluster: str | None = None,
    source: str | None = None,
    secret: str | None = None,
) -> Iterator[ClusterSettings]:
    """Return the cluster that a flow's parameters name; blocks are loaded.

    Args:
        ledger: an address without a password, or ``ebbflow-cluster/NAME``.
        cluster: its name; before the block's.
        source: of nodes; before the block's. ``aws:ebbflow-aws/NAME`` names a block.
        secret: Prefect's secret block, or variable, that holds the ledger's address.

    Raises ``OptionError``.
    """
    block = None
    if ledger and secret:
        raise OptionError("give either ledger or ledger_secret, which says the same")
    if name := block_name(ledger, "ebbflow-cluster"):
        block = load_block(name, EbbflowCluster, "ebbflow-cluster")
        address = block.address
    else:
        if ledger and parse(ledger).secret:
            raise OptionError(
                "the parameter ledger must have no password, since Prefect keeps and shows parameters; put the "
                "address into a secret and name it: ledger_secret, or into a block: ledger=ebbflow-cluster/NAME"
            )
        address = ledger if secret is None else secret_address(secret)
    with ExitStack() as stack:
        where = source or (block.source if block else "local")
        kind, _, rest = where.partition(":")
        aws = block.aws if block is not None and where == "aws" else None
        if kind == "aws" and (account := block_name(rest, "ebbflow-aws")):
            aws = load_block(account, EbbflowAws, "ebbflow-aws")
        if aws is not None:
            where = f"aws:{stack.enter_context(aws.opened())}"
        yield ClusterSettings(
            address,
            cluster or (block.cluster if block else "local"),
            where,
            (block.master if block else "") or (where if kind == "spark" else ""),
            tuple(block.pools) if block else (),
            block.policy if block else "",
            (block.config or None) if block else None,
            block.storage if block else None,
        )


def store_of(text: str | None, storage: EbbflowStorage | None = None) -> str | None:
    """Return where queries keep checkpoints: an address, or what ``ebbflow-storage/NAME`` says."""
    block = _storage(text) if text else storage
    return block.store if block is not None else text


def runs_of(text: str | None, storage: EbbflowStorage | None = None) -> str | None:
    """Return where trainings and searches keep their runs; see ``store_of``."""
    block = _storage(text) if text else storage
    return block.runs if block is not None else text


def of_a_cluster(ledger: str | None, **given: object) -> None:
    """Raise ``OptionError`` for what only an app of a cluster has, where no ledger was named."""
    named = [name for name, value in given.items() if value not in (None, "")]
    if ledger is None and named:
        raise OptionError(f"{', '.join(named)} need ledger: they are an app's, and without it there is none")


def secret_address(name: str) -> str:
    """Return the address that the secret block or variable ``name`` holds. Raises ``OptionError``."""
    from prefect.blocks.system import Secret
    from prefect.variables import Variable

    try:
        return str(Secret.load(name).get())  # type: ignore[union-attr]
    except ValueError:
        value = Variable.get(name)
    if not isinstance(value, str) or not value:
        raise OptionError(
            f"there is no Prefect secret or variable {name!r} that holds the ledger's address; make one: "
            "prefect block create secret"
        )
    return value


def _storage(text: str) -> EbbflowStorage | None:
    name = block_name(text, "ebbflow-storage")
    return load_block(name, EbbflowStorage, "ebbflow-storage") if name else None
