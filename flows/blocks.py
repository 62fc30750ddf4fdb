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
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import EbbflowError, OptionError

Kind = TypeVar("Kind", bound=Block)


class EbbflowStorage(Block):
    """Where checkpoints, results and runs live: one place that every node of the cluster reaches."""

    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str] = "Ebbflow Storage"
    _block_type_slug: ClassVar[str] = "ebbflow-storage"
    _description: ClassVar[str] = "Where Ebbflow keeps checkpoints, results and runs."

    uri: str = Field(description="A folder, local or s3://BUCKET/PREFIX.", min_length=1)

    @field_validator("uri")
    @classmethod
    def _plain(cls, value: str) -> str:
        value = value.strip().rstrip("/")
        if "://" in value and not value.startswith(("s3://", "s3a://", "file://")):
            raise ValueError(f"uri must be a folder, local or s3://; got {value!r}")
        if not value or "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("uri must name a folder, without credentials")
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
    region: str = Field(default="", description="In place of the environment's.")
    profile: str = Field(default="", description="Of the AWS configuration where the flow runs.")
    role: str = Field(
        default="", description="ARN of the role to take on, in place of the one that Terraform made."
    )
    credentials: str = Field(
        default="", description="Name of a block of prefect-aws (aws-credentials) to take credentials from."
    )

    @model_validator(mode="after")
    def _one_place(self) -> "EbbflowAws":
        if bool(self.settings) == bool(self.settings_file):
            raise ValueError("give either settings or settings_file")
        if self.settings:
            try:
                Settings.from_json(self._text(), "settings")
            except EbbflowError as error:
                raise ValueError(str(error)) from error
        return self

    def _text(self, outputs: Mapping[str, Any] | None = None) -> str:
        outputs = dict(outputs if outputs is not None else self.settings or {})
        if self.role:
            outputs["capacity_role_arn"] = {"value": self.role}
        return json.dumps(outputs)

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Return the path of a settings file; meanwhile the environment says region, profile and credentials.

        For a process that runs one flow run. Raises ``OptionError``.
        """
        with environment(self._variables()):
            if not self.role and self.settings_file:
                yield self.settings_file
                return
            outputs = None
            if self.settings_file:
                try:
                    outputs = json.loads(Path(self.settings_file).expanduser().read_text(encoding="utf-8"))
                except (OSError, ValueError) as error:
                    raise OptionError(
                        f"settings_file {self.settings_file} cannot be read: {error}"
                    ) from error
            with tempfile.TemporaryDirectory(prefix="ebbflow-aws-") as folder:
                path = Path(folder) / "ebbflow.json"
                path.touch(mode=0o600)
                path.write_text(self._text(outputs), encoding="utf-8")
                yield str(path)

    def _variables(self) -> dict[str, str]:
        found = {"AWS_PROFILE": self.profile, "AWS_REGION": self.region, "AWS_DEFAULT_REGION": self.region}
        if self.credentials:
            block = load_block(self.credentials, Block, "aws-credentials")
            for variable, name in (
                ("AWS_ACCESS_KEY_ID", "aws_access_key_id"),
                ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
                ("AWS_SESSION_TOKEN", "aws_session_token"),
                ("AWS_PROFILE", "profile_name"),
            ):
                value = getattr(block, name, None)
                found[variable] = (
                    value.get_secret_value() if isinstance(value, SecretStr) else str(value or "")
                )
        return {name: value for name, value in found.items() if value}


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
        description="Where its nodes come from: local[:NAME], aws, spark://HOST:PORT, cluster[:NAME].",
    )
    master: str = Field(default="", description="The Spark master for queries, such as spark://HOST:PORT.")
    pools: list[str] = Field(default=[], description="Pools of an AWS fleet that trainings run on.")
    policy: str = Field(default="", description="That shares out GPUs; by default rho-bounded.")
    limits: str = Field(default="", description="A TOML file of limits.")
    aws: EbbflowAws | None = Field(default=None, description="The account, where nodes come from AWS.")
    storage: EbbflowStorage | None = Field(default=None, description="Where checkpoints and runs live.")

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
    """Return the name in ``SLUG/NAME``; ``None`` where ``text`` is something else, such as an address."""
    kind, slash, name = (text or "").partition("/")
    return name if slash and kind == slug and name and "/" not in name else None


def load_block(name: str, kind: type[Kind], slug: Slug) -> Kind:
    """Load a block by its name. Raises ``OptionError``."""
    name = block_name(name, slug) or name
    try:
        found = Block.load(f"{slug}/{name}")
    except (ValueError, KeyError) as error:
        raise OptionError(f"there is no Prefect block {slug}/{name}: {error}") from error
    if not isinstance(found, kind):
        raise OptionError(f"the Prefect block {slug}/{name} is a {type(found).__name__}")
    return found


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process while the block runs."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
