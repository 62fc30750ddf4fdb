"""What Terraform has created, as ``terraform output -json > ebbflow.json`` writes it.

The same JSON is kept in a Systems Manager parameter (``Names.settings_parameter``) for the cluster's own nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ebbflow.infra.aws.naming import Names
from ebbflow.infra.errors import SettingsError
from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError

T = TypeVar("T")
Kind = Literal["spark", "gpu", "cpu"]  # cpu: aggregators of trainings
_KINDS: tuple[Kind, ...] = get_args(Kind)
_ROLE = re.compile(r"arn:[a-z0-9-]+:iam::[0-9]+:role/\S+")


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of nodes that come and go."""

    name: str
    kind: Kind
    group: str  # Auto Scaling group
    launch_template: str  # id
    instance_types: tuple[str, ...]
    subnet_ids: tuple[str, ...]
    on_demand_base: int  # nodes that are always on-demand
    min_size: int
    max_size: int


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster. Optional fields are None where the part was not asked for."""

    cluster: str
    region: str
    account_id: str
    bucket: str
    store: str  # s3:// URI, for --store
    kms_key_arn: str
    notice_queue_url: str
    dead_letter_queue_url: str
    capacity_role_arn: str
    settings_parameter: str
    pools: Mapping[str, Pool]  # by name
    documents: Mapping[str, str]  # Systems Manager documents, by what they do
    spark_master: str | None = None  # spark://host:port
    spark_master_ui: str | None = None  # http://host:port, inside the network
    spark_history: str | None = None
    prefect_api_url: str | None = None
    prefect_auth_secret_arn: str | None = None  # Secrets Manager; user:password
    prefect_work_pool: str | None = None

    @property
    def names(self) -> Names:
        """Names of the cluster's resources."""
        return Names(self.cluster)

    @classmethod
    def from_terraform(cls, path: str | Path) -> "Settings":
        """Read the file that ``terraform output -json`` has written.

        Outputs that are not known are left alone: a configuration may have others. Raises ``SettingsError``.
        """
        text = user_files.read_text(
            path, error=lambda said: SettingsError(f"{said}; write it by terraform output -json > {path}")
        )
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str) -> "Settings":
        """Read the same from ``text``; ``source`` says in errors where it is from. Raises ``SettingsError``."""
        outputs = user_files.parse_json(text, source, error=SettingsError, hint="; was -json omitted?")
        if not isinstance(outputs, dict):
            raise SettingsError(f"{source} must hold a JSON object of outputs; got {type(outputs).__name__}")
        if not outputs:
            raise SettingsError(f"{source} holds no outputs; run terraform apply first")
        return _Reader(outputs, source).settings()


class _Reader:
    """Takes outputs out of Terraform's wrapping and says which one is wrong."""

    def __init__(self, outputs: Mapping[str, Any], source: str) -> None:
        self._outputs = outputs
        self._source = source

    def settings(self) -> Settings:
        try:
            Names(cluster := self._text("cluster"))
        except OptionError as error:
            raise SettingsError(f"{self._source}: {error}") from error
        return Settings(
            cluster=cluster,
            region=self._text("region"),
            account_id=self._text("account_id"),
            bucket=self._text("bucket"),
            store=self._text("store"),
            kms_key_arn=self._text("kms_key_arn"),
            notice_queue_url=self._text("notice_queue_url"),
            dead_letter_queue_url=self._text("dead_letter_queue_url"),
            capacity_role_arn=self._role("capacity_role_arn"),
            settings_parameter=self._text("settings_parameter"),
            pools={name: self._pool(name, fields) for name, fields in self._object("pools").items()},
            documents={
                name: self._checked(f"documents.{name}", value, str)
                for name, value in self._object("documents").items()
            },
            spark_master=self._optional("spark_master"),
            spark_master_ui=self._optional("spark_master_ui"),
            spark_history=self._optional("spark_history"),
            prefect_api_url=self._optional("prefect_api_url"),
            prefect_auth_secret_arn=self._optional("prefect_auth_secret_arn"),
            prefect_work_pool=self._optional("prefect_work_pool"),
        )

    def _pool(self, name: str, fields: object) -> Pool:
        where = f"pools.{name}"
        values: dict[str, Any] = self._checked(where, fields, dict)

        def field(key: str, kind: type[T]) -> T:
            if key not in values:
                raise SettingsError(f"{self._source}: output {where} lacks {key!r}")
            return self._checked(f"{where}.{key}", values[key], kind)

        def texts(key: str) -> tuple[str, ...]:
            found: list[Any] = field(key, list)
            return tuple(self._checked(f"{where}.{key}[{i}]", text, str) for i, text in enumerate(found))

        kind = field("kind", str)
        if kind not in _KINDS:
            raise SettingsError(
                f"{self._source}: {where}.kind must be one of {', '.join(_KINDS)}; got {kind!r}"
            )
        return Pool(
            name=name,
            kind=kind,
            group=field("group", str),
            launch_template=field("launch_template", str),
            instance_types=texts("instance_types"),
            subnet_ids=texts("subnet_ids"),
            on_demand_base=field("on_demand_base", int),
            min_size=field("min_size", int),
            max_size=field("max_size", int),
        )

    def _value(self, name: str) -> object:
        if name not in self._outputs:
            raise SettingsError(
                f"{self._source} lacks the output {name!r}; take the outputs of terraform/examples/minimal into your "
                "configuration, apply it, and write the file again"
            )
        wrapped = self._outputs[name]
        if not isinstance(wrapped, dict) or "value" not in wrapped:
            raise SettingsError(
                f"{self._source}: output {name!r} has no 'value'; write the file by terraform output -json"
            )
        return wrapped["value"]

    def _text(self, name: str) -> str:
        text: str = self._checked(name, self._value(name), str)
        if not text:
            raise SettingsError(f"{self._source}: output {name!r} must not be empty")
        return text

    def _role(self, name: str) -> str:
        text = self._text(name)
        if not _ROLE.fullmatch(text):
            raise SettingsError(
                f"{self._source}: output {name!r} must be a role, arn:aws:iam::ACCOUNT:role/NAME; got {text!r:.120}"
            )
        return text

    def _optional(self, name: str) -> str | None:
        # terraform output leaves out what is null
        if name not in self._outputs or self._value(name) is None:
            return None
        return self._text(name)

    def _object(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._checked(name, self._value(name), dict)
        return found

    def _checked(self, where: str, value: object, kind: type[T]) -> T:
        # bool is an int for Python, not for us
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}[kind]
            raise SettingsError(f"{self._source}: output {where} must be {wanted}; got {value!r}")
        return value
