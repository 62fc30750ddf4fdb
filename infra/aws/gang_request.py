"""What a gang is, the call that asks EC2 for one, and what too few nodes mean. Nothing is asked here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.aws.clients import PRICE_CODES, of_code, scrubbed
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_GANG, TAG_GANG_SIZE, Names, Role
from ebbflow.infra.aws.settings import Pool
from ebbflow.infra.errors import AwsError, InsufficientCapacityError, SpotPriceTooHighError
from ebbflow.infra.protocols import Ask
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market

MOST = 1000  # nodes; EC2's bound of a minimum target capacity
_CHEAPEST = 0.001  # dollars per hour; EC2 takes no lower limit

_NAME = re.compile(r"[a-z0-9](-?[a-z0-9]){0,39}")
_ROLES: Mapping[str, Role] = {"spark": "spark-worker", "gpu": "gpu-trainer"}
_TAGGED = ("fleet", "instance", "volume", "network-interface")


@dataclass(frozen=True, slots=True)
class GangRequest:
    """``size`` equal places, at once or not at all, in one zone (``one_zone``) or of one type (``one_type``) or both.

    ``max_price`` is in dollars per hour for one node; None stands for the on-demand price, which AWS never exceeds.
    """

    name: str
    pool: str  # whose launch template, instance types and subnets are used
    size: int
    market: Market = "spot"
    one_zone: bool = True
    one_type: bool = True
    max_price: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise OptionError(
                "a gang's name must be 1 to 40 lower-case letters, digits and single dashes, with no dash first or "
                f"last; got {self.name!r}"
            )
        if not 1 <= self.size <= MOST:
            raise OptionError(f"a gang's size must be 1 to {MOST} nodes; got {self.size}")
        if not (self.one_zone or self.one_type):
            raise OptionError(
                "a gang must be in one zone or of one type: AWS promises all or nothing only then"
            )
        if self.max_price is not None and (self.market != "spot" or not self.max_price >= _CHEAPEST):
            raise OptionError(
                "max_price is for spot nodes and must be at least 0.001 dollars; got "
                f"{self.max_price!r} for {self.market}"
            )


def call(request: GangRequest, pool: Pool, names: Names, token: str) -> Ask:
    """Return the request for a fleet of type instant; ``token`` makes a repetition the same request."""
    price = {} if request.max_price is None else {"MaxPrice": f"{request.max_price:.4f}"}
    options: dict[str, Any] = {
        "SingleInstanceType": request.one_type,
        "SingleAvailabilityZone": request.one_zone,
        "MinTargetCapacity": request.size,
    }
    how = (
        {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized", **options}}
        if request.market == "spot"
        else {"OnDemandOptions": {"AllocationStrategy": "lowest-price", **options}}
    )
    parameters: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": pool.launch_template,
                    "Version": "$Default",
                },
                "Overrides": [
                    {"InstanceType": kind, "SubnetId": subnet, **price}
                    for kind in pool.instance_types
                    for subnet in pool.subnet_ids
                ],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": request.size,
            "DefaultTargetCapacityType": request.market,
        },
        "TagSpecifications": _tags(request, pool, names),
        **how,
    }
    return Ask("gang", request.name, request.size, "ec2:CreateFleet", parameters)


def shortage(what: str, size: int, came: int, errors: Sequence[Mapping[str, Any]]) -> AwsError:
    """Return the error for an answer with ``came`` of ``size`` nodes, which are returned, and EC2's ``errors``."""
    told = [(str(error.get("ErrorCode", "")), str(error.get("ErrorMessage", ""))) for error in errors]
    said = "; ".join(sorted({f"{code}: {scrubbed(message)}" for code, message in told})) or "AWS says no more"
    text = f"cannot {what}: {came} of {size} nodes could be had, and are returned ({said})"
    codes = [code for code, _ in told]
    for found in (of_code(what, *each) for each in told):
        if not isinstance(found, InsufficientCapacityError):
            return type(found)(f"{found}; the {came} nodes that came are returned", found.code)
    if codes and all(code in PRICE_CODES for code in codes):
        return SpotPriceTooHighError(f"{text}; raise max_price, or leave it out", codes[0])
    return InsufficientCapacityError(text, codes[0] if codes else "")


def _tags(request: GangRequest, pool: Pool, names: Names) -> list[dict[str, Any]]:
    tags = {
        **names.tags(MANAGED_BY_LOOP, role=_ROLES[pool.kind], pool=pool.name),
        TAG_GANG: request.name,
        TAG_GANG_SIZE: str(request.size),
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs} for kind in _TAGGED]
