"""Prefect blocks that say where things are: a cluster, an AWS account, storage.

    prefect block register -m ebbflow.flows.blocks

Flows take a block's name where they take an address: ``ledger="ebbflow-cluster/lab"``,
``source="aws:ebbflow-aws/prod"``, ``store="ebbflow-storage/shared"``.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import EbbflowError, OptionError

if TYPE_CHECKING:
    from ebbflow.tasks.fleet.steps import OpenedFleet

Kind = TypeVar("Kind", bound=Block)


class EbbflowStorage(Block):
    """Where checkpoints, results and runs live: one place that every node of the cluster reaches."""

    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str] = "Ebbflow Storage"
    _block_type_slug: ClassVar[str] = "ebbflow-storage"
    _description: ClassVar[str] = "Where Ebbflow keeps checkpoints, results and runs."

    uri: str = Field(description="A directory, local or s3://BUCKET/PREFIX.", min_length=1)

    @field_validator("uri")
    @classmethod
    def _plain(cls, value: str) -> str:
        value = value.strip().rstrip("/")
        if "://" in value and not value.startswith(("s3://", "s3a://", "file://")):
            raise ValueError(f"uri must be a directory, local or s3://; got {value!r}")
        if not value or "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("uri must name a directory, without credentials")
        return value

    @property
    def store(self) -> str:
        """Return where queries keep their checkpoints."""
        return f"{self.uri}/store"

    @property
    def runs(self) -> str:
        """Return where trainings and searches keep their runs."""
        return f"{self.uri}/runs"


class EbbflowAws(Block):
    """The AWS account that Terraform has set up. Credentials stay where boto3 finds them, or in a block of theirs."""

    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str] = "Ebbflow AWS"
    _block_type_slug: ClassVar[str] = "ebbflow-aws"
    _description: ClassVar[str] = "The AWS account of an Ebbflow cluster, as Terraform has set it up."

    settings: dict[str, Any] | None = Field(
        default=None, description="What terraform output -json printed; or name its file."
    )
    settings_file: str = Field(
        default="", description="The file of that output, where the flow runs can read it."
    )
    profile: str = Field(default="", description="Of the AWS configuration where the flow runs.")
    role: str = Field(
        default="", description="ARN of the role to take on, in place of the one that Terraform made."
    )
    credentials: str = Field(
        default="", description="Name of a block of prefect-aws (aws-credentials) to take credentials from."
    )

    @field_validator("settings")
    @classmethod
    def _ours(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        # terraform prints outputs that are sensitive, too, and blocks show what is no secret
        known = {field.name for field in fields(Settings)}
        return value and {name: output for name, output in value.items() if name in known}

    @model_validator(mode="after")
    def _one_place(self) -> "EbbflowAws":
        if bool(self.settings) == bool(self.settings_file):
            raise ValueError("give either settings or settings_file")
        if self.profile and self.credentials:
            raise ValueError("give either profile or credentials")
        if self.settings:
            try:
                Settings.from_json(json.dumps(self.settings), "settings")
            except EbbflowError as error:
                raise ValueError(str(error)) from None
        return self

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Return the path of a settings file; meanwhile the environment says region, profile and credentials.

        For a process that runs one flow run. Raises ``SettingsError`` or ``OptionError``.
        """
        with tempfile.TemporaryDirectory(prefix="ebbflow-aws-") as place:
            path = Path(self.settings_file).expanduser()
            if self.settings or self.role:
                outputs = dict(self.settings or _outputs(path))
                if self.role:
                    outputs["capacity_role_arn"] = {"value": self.role}
                path = Path(place) / "ebbflow.json"
                path.touch(mode=0o600)
                path.write_text(json.dumps(outputs), encoding="utf-8")
            region = Settings.from_terraform(path).region
            with environment({"AWS_REGION": region, "AWS_DEFAULT_REGION": region, **self._access()}):
                yield str(path)

    @contextmanager
    def fleet(self, config: str | None = None, prices: str | None = None) -> "Iterator[OpenedFleet]":
        """Open the account's fleet for a flow of one's own; nothing is asked of AWS yet. See ``opened``.

        Args:
            config: the configuration file (TOML); by default ``$EBBFLOW_CONFIG``.
            prices: a file of on-demand prices of one's own; by default the AWS Price List.
        """
        from ebbflow.tasks.fleet.request import FleetRequest
        from ebbflow.tasks.fleet.steps import opened  # Prefect imports this module at each of its commands

        with (
            self.opened() as path,
            opened(FleetRequest(terraform_output=path, config=config, prices=prices)) as fleet,
        ):
            yield fleet

    def _access(self) -> dict[str, str | None]:
        """Return the variables by which boto3 finds credentials; ``None``: there is to be no such variable."""
        if self.profile:
            return {"AWS_PROFILE": self.profile}
        if not self.credentials:
            return {}
        block = load_block(self.credentials, Block, "aws-credentials")
        found = {
            "AWS_ACCESS_KEY_ID": _plain(block, "aws_access_key_id"),
            "AWS_SECRET_ACCESS_KEY": _plain(block, "aws_secret_access_key"),
            "AWS_SESSION_TOKEN": _plain(block, "aws_session_token"),
            "AWS_PROFILE": _plain(block, "profile_name"),
        }
        if not (found["AWS_ACCESS_KEY_ID"] or found["AWS_PROFILE"]):
            return {}  # it says that they are to be found where boto3 looks
        endpoint = _plain(getattr(block, "aws_client_parameters", None), "endpoint_url")
        return {**found, **({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})}


class EbbflowCluster(Block):
    """A cluster: its ledger, where its nodes come from, and where trainings and queries run on it."""

    model_config = ConfigDict(hide_input_in_errors=True)  # what is refused may hold a password

    _block_type_name: ClassVar[str] = "Ebbflow Cluster"
    _block_type_slug: ClassVar[str] = "ebbflow-cluster"
    _description: ClassVar[str] = "A cluster of Ebbflow: its ledger and its nodes."

    ledger: SecretStr | None = Field(
        default=None, description="A file, or postgresql://...; by default that of the flow run's machine."
    )
    cluster: str = Field(default="local", description="Its name in that ledger.", min_length=1)
    source: str = Field(
        default="local",
        description="Where its nodes come from: local[:NAME], aws, spark://HOST:PORT.",
    )
    master: str = Field(default="", description="The Spark master for queries, such as spark://HOST:PORT.")
    pools: list[str] = Field(default=[], description="Pools of an AWS fleet that trainings run on.")
    policy: str = Field(default="", description="That shares out GPUs; by default rho-bounded.")
    config: str = Field(
        default="", description="The configuration file, ebbflow.toml: quotas, teams, scaling."
    )
    aws: EbbflowAws | None = Field(
        default=None, title="AWS", description="The account, where nodes come from AWS."
    )
    storage: EbbflowStorage | None = Field(
        default=None, title="Storage", description="Where checkpoints and runs live."
    )

    @field_validator("source")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.partition(":")[0] not in ("local", "aws", "spark"):
            from ebbflow.tasks.capacity.node_sources import SOURCES

            raise ValueError(f"source must be one of {SOURCES}; got {value!r}")
        return value

    @model_validator(mode="after")
    def _of_the_account(self) -> "EbbflowCluster":
        if self.aws is not None and self.source != "aws":
            raise ValueError(f"a cluster with an account has the source aws; got {self.source!r}")
        return self

    @field_validator("ledger")
    @classmethod
    def _address(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and value.get_secret_value().strip("*"):  # a hidden one is shown as stars
            try:
                parse(value.get_secret_value())
            except EbbflowError as error:
                raise ValueError(str(error)) from None
        return value

    @property
    def address(self) -> str | None:
        """Return the ledger's address, with its password."""
        return None if self.ledger is None else self.ledger.get_secret_value()


Slug = Literal["ebbflow-cluster", "ebbflow-aws", "ebbflow-storage", "aws-credentials"]


def block_name(text: str | None, slug: Slug) -> str | None:
    """Return the name in ``SLUG/NAME``; ``None`` where ``text`` is something else, such as an address.

    Raises ``OptionError`` for the name of a block that there cannot be.
    """
    kind, slash, name = (text or "").partition("/")
    if kind != slug or not slash:
        return None
    if not name or "/" in name:
        raise OptionError(f"a block is named {slug}/NAME; got {text!r}")
    return name


def load_block(name: str, kind: type[Kind], slug: Slug) -> Kind:
    """Load a block by its name. Raises ``OptionError``."""
    name = block_name(name, slug) or name
    try:
        found = Block.load(f"{slug}/{name}")
    except KeyError:
        raise OptionError(f"blocks {slug} are not known here; is their package installed?") from None
    except ValueError as error:
        raise OptionError(f"there is no Prefect block {slug}/{name}: {error}") from error
    except RuntimeError:  # its cause would show what is in it
        raise OptionError(
            f"the Prefect block {slug}/{name} was saved by another version; save it anew"
        ) from None
    if not isinstance(found, kind):
        raise OptionError(f"the Prefect block {slug}/{name} is a {type(found).__name__}")
    return found


@contextmanager
def environment(given: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process while the block runs, and take those away that are ``None``."""
    before = {name: os.environ.get(name) for name in given}
    try:
        _put(given)
        yield
    finally:
        _put(before)


def _put(given: Mapping[str, str | None]) -> None:
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _outputs(path: Path) -> dict[str, Any]:
    Settings.from_terraform(path)  # which says what is wrong with it
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _plain(block: object, name: str) -> str | None:
    """Return a field of a block as text, secret or not; ``None`` where it has none."""
    value = getattr(block, name, None)
    return (value.get_secret_value() if isinstance(value, SecretStr) else str(value or "")) or None
