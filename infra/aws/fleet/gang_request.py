"""The call that asks EC2 for a gang, and what too few nodes mean. Nothing is asked here."""

from collections.abc import Mapping, Sequence
from decimal import ROUND_DOWN, Decimal
from typing import Any

from ebbflow.infra.aws.clients import PRICE_CODES, of_code, scrubbed
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_GANG, TAG_GANG_SIZE, Names, Role
from ebbflow.infra.aws.settings import Pool
from ebbflow.infra.errors import AwsError, InsufficientCapacityError, SpotPriceTooHighError
from ebbflow.infra.protocols import Ask
from ebbflow.planners.model.gangs import GangRequest

_ROLES: Mapping[str, Role] = {"spark": "spark-worker", "gpu": "gpu-trainer"}
_TAGGED = ("fleet", "instance", "volume", "network-interface")


def call(request: GangRequest, pool: Pool, names: Names, token: str) -> Ask:
    """Return the request for a fleet of type instant; ``token`` makes a repetition the same request."""
    price = {} if request.max_price is None else {"MaxPrice": _price(request.max_price)}
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


def _price(dollars: float) -> str:
    """Return a limit as EC2 takes it, rounded down: what is asked for is never above what was allowed."""
    return str(Decimal(repr(dollars)).quantize(Decimal("0.0001"), ROUND_DOWN))


def _tags(request: GangRequest, pool: Pool, names: Names) -> list[dict[str, Any]]:
    tags = {
        **names.tags(MANAGED_BY_LOOP, role=_ROLES[pool.kind], pool=pool.name),
        TAG_GANG: request.name,
        TAG_GANG_SIZE: str(request.size),
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs} for kind in _TAGGED]
