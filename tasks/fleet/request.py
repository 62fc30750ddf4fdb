"""What ``ebbflow fleet`` is asked with: which cluster, by whose rights, within which limits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

from ebbflow.infra.aws.prices.listed import ListedPrices
from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.errors import SettingsError
from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.files import home
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.fallback import Fallback
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.fleet.market import Interruption, Terms
from ebbflow.planners.model.numbers import duration_of
from ebbflow.planners.sections import number, only, table

T = TypeVar("T")

_DURATIONS = ("after", "hold", "restart", "rework")

CONFIG = "EBBFLOW_CONFIG"
"""Environment variable that names the configuration file."""
TERRAFORM_OUTPUT = "EBBFLOW_TERRAFORM_OUTPUT"
"""Environment variable that names the file which ``terraform output -json`` has written."""
OF_LOOP = ("loop", "scaling", "teams", "intervals", "policy", "links")
"""Sections of the same file that only a capacity loop reads (``tasks.capacity.request``)."""

_TEACH = (
    "write it where terraform apply was run (terraform/examples/minimal is the cheapest cluster that works): "
    f"terraform output -json > ebbflow.json; then name the file: --terraform-output ebbflow.json "
    f"(of a loop: --source aws:ebbflow.json), or export {TERRAFORM_OUTPUT}=ebbflow.json"
)


@dataclass(frozen=True)
class FleetRules:
    """What decides besides the fleet itself; the configuration file holds it, and each part has a default."""

    limits: Limits = field(default_factory=Limits)
    fallback: Fallback = field(default_factory=Fallback)
    terms: Terms = field(default_factory=Terms)
    interruption: Interruption = field(default_factory=lambda: Interruption(restart=120.0, rework=300.0))
    source: str = ""  # the file; empty where there is none

    @classmethod
    def read(cls, path: str | Path) -> "FleetRules":
        """Read a TOML file with the sections quotas, fallback and market. Raises ``OptionError``."""
        return cls.parse(user_files.read_toml(path), str(path))

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str) -> "FleetRules":
        """Return the rules that ``content`` holds; ``source`` begins every message. Raises ``OptionError``."""
        only(content, source, ("quotas", "fallback", "market", *OF_LOOP))
        market = dict(table(content.get("market", {}), f"{source}: market"))
        cost = {name: market.pop(name) for name in ("restart", "rework", "span") if name in market}
        only(market, f"{source}: market", (*(f.name for f in fields(Terms)), "restart", "rework", "span"))
        default = Interruption(restart=120.0, rework=300.0)
        return cls(
            Limits.parse(content.get("quotas", {}), f"{source}: quotas"),
            _made(Fallback, content.get("fallback", {}), f"{source}: fallback"),
            _made(Terms, market, f"{source}: market"),
            _made(
                Interruption,
                {"restart": default.restart, "rework": default.rework} | cost,
                f"{source}: market",
            ),
            source,
        )


@dataclass(frozen=True)
class FleetRequest:
    """One call. Paths that are not given are taken from the environment; the present directory is not searched."""

    terraform_output: str | None = None  # default: $EBBFLOW_TERRAFORM_OUTPUT
    endpoint_url: str | None = None  # of an emulator; default: $AWS_ENDPOINT_URL, which boto3 reads itself
    profile: str | None = None  # of the AWS configuration
    own_credentials: bool = False  # do not take on the cluster's capacity role
    config: str | None = None  # the configuration file; default: $EBBFLOW_CONFIG
    prices: str | None = None  # file of on-demand prices
    state_dir: str | None = None  # directory of plans, notices and usage; default: fleet/ in Ebbflow's own

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint_url or "http://localhost")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise OptionError(
                f"endpoint_url must be an address such as http://localhost:4566; got {self.endpoint_url!r:.120}"
            )

    def settings(self) -> Settings:
        """Read Terraform's output. Raises ``SettingsError`` that says how to come by one."""
        given = self.terraform_output or os.environ.get(TERRAFORM_OUTPUT)
        if not given:
            raise SettingsError(f"no file of Terraform's output is named; {_TEACH}")
        path = Path(given).expanduser()
        if not path.is_file():
            raise SettingsError(f"the file of Terraform's output {path} does not exist; {_TEACH}")
        return Settings.from_terraform(path)

    def rules(self) -> FleetRules:
        """Read the configuration file. Raises ``OptionError``."""
        given = self.config or os.environ.get(CONFIG)
        return FleetRules.read(given) if given else FleetRules()

    def listed(self) -> ListedPrices | None:
        """Read the file of on-demand prices, where one is named. Raises ``OptionError``."""
        return ListedPrices.read(Path(self.prices).expanduser()) if self.prices else None

    def directory(self) -> Path:
        """Return the directory of plans, notices and usage."""
        return Path(self.state_dir).expanduser() if self.state_dir else home() / "fleet"


def unlimited(limits: Limits) -> bool:
    """Tell whether nothing limits what a fleet costs."""
    return limits.dollars_per_hour == inf and limits.nodes == inf and not limits.pools and not limits.teams


def _made(kind: type[T], content: object, where: str) -> T:
    """Return the value that a table of plain numbers describes. Raises ``OptionError``."""
    given = table(content, where)
    whole = {name: int in (hint, *get_args(hint)) for name, hint in get_type_hints(kind).items()}
    only(given, where, tuple(whole))
    values: dict[str, float] = {}
    for name, value in given.items():
        if name in _DURATIONS:
            values[name] = duration_of(value, f"{where}.{name}")
            continue
        found = value if value == inf else number(value, f"{where}.{name}")
        if whole[name] and (found == inf or found != int(found)):
            raise OptionError(f"{where}.{name} must be a whole number; got {value!r}")
        values[name] = int(found) if whole[name] else float(found)
    try:
        return kind(**values)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error
