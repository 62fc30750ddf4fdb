"""What AWS answers about prices and machines, read into our values. Pure; ``infra/aws/prices/prices.py`` asks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import AwsError
from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.prices import Machine, Series

PRODUCT = "Linux/UNIX"
LIST_REGION = "us-east-1"
"""The Price List is served from few regions, this one among them, and knows the prices of all."""
SERVICE = "AmazonEC2"
_ATTRIBUTES = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",  # not a reservation's
}


def list_filters(region: str, instance_type: str) -> list[dict[str, str]]:
    """Return the filters of ``get_products`` that leave one product: a plain Linux machine."""
    wanted = {**_ATTRIBUTES, "regionCode": region, "instanceType": instance_type}
    return [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in sorted(wanted.items())]


def on_demand_prices(products: Iterable[str], region: str) -> dict[str, float]:
    """Return $/h by instance type from ``PriceList``, the JSON texts of ``get_products``.

    Only Linux on shared hardware without further software counts, in dollars and by the hour. Of several prices of a
    type the one that came into force last is taken, then the lower. Raises ``AwsError`` for text that is no product.
    """
    found: dict[str, tuple[str, float]] = {}
    for text in products:
        try:
            product = json.loads(text)
            attributes = product["product"]["attributes"]
            terms = product.get("terms", {}).get("OnDemand", {})
            if attributes.get("regionCode") != region or any(
                attributes.get(name) != value for name, value in _ATTRIBUTES.items()
            ):
                continue
            kind = str(attributes["instanceType"])
            for since, price in _hourly(terms):
                known = found.get(kind)
                if known is None or (since, -price) > (known[0], -known[1]):
                    found[kind] = since, price
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AwsError(
                f"the AWS Price List's answer cannot be read ({type(error).__name__}: {error}); give on-demand prices"
                " in a file"
            ) from error
    return {kind: price for kind, (_, price) in found.items()}


def _hourly(terms: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return (in force since, $/h) of on-demand terms."""
    return [
        (str(term.get("effectiveDate", "")), price)
        for term in terms.values()
        for dimension in term["priceDimensions"].values()
        if dimension.get("unit") == "Hrs" and "USD" in dimension["pricePerUnit"]
        if (price := float(dimension["pricePerUnit"]["USD"])) > 0 and isfinite(price)
    ]


def spot_series(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Series]:
    """Return series by (zone, type) from ``SpotPriceHistory``, in whatever order it came.

    Raises ``AwsError`` for an entry without price or time.
    """
    found: dict[tuple[str, str], dict[float, float]] = {}
    for entry in entries:
        try:
            if not str(entry["ProductDescription"]).startswith(PRODUCT):
                continue
            at = entry["Timestamp"]
            price = float(entry["SpotPrice"])
            if not (price > 0 and isfinite(price)):
                raise ValueError(f"SpotPrice must be > 0; got {price}")
            # botocore gives times with a zone; the emulator may not
            moment = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
            found.setdefault((entry["AvailabilityZone"], entry["InstanceType"]), {})[moment] = price
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AwsError(
                f"AWS's spot price history cannot be read ({type(error).__name__}: {error})"
            ) from error
    empty = Series((), ())
    return {
        place: empty.joined(Series(tuple(prices), tuple(prices.values()))) for place, prices in found.items()
    }


def machine(entry: Mapping[str, Any]) -> Machine:
    """Return what one entry of ``describe_instance_types`` says. Raises ``AwsError``."""
    try:
        gpus = (entry.get("GpuInfo") or {}).get("Gpus", [])
        return Machine(
            instance_type=str(entry["InstanceType"]),
            cores=int(entry["VCpuInfo"]["DefaultVCpus"]),
            memory=float(entry["MemoryInfo"]["SizeInMiB"]) / 1024,
            gpus=sum(int(gpu["Count"]) for gpu in gpus),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AwsError(f"AWS's instance types cannot be read ({type(error).__name__}: {error})") from error


def utc(moment: float) -> datetime:
    """Return seconds since the Unix epoch as botocore wants times."""
    return datetime.fromtimestamp(moment, UTC)


@dataclass(frozen=True, slots=True)
class ListedPrices:
    """On-demand prices that a person gives: the Price List cannot be asked, or does not hold (a discount, say)."""

    source: str  # where and when they are from, for people
    region: str
    on_demand: Mapping[str, float] = field(default_factory=dict)  # $/h by instance type

    @classmethod
    def read(cls, path: str | Path) -> "ListedPrices":
        """Read a TOML file. Raises ``OptionError`` that names what is wrong.

        ``source`` and ``region`` are texts, the table ``on_demand`` holds $/h by instance type, Linux on shared
        hardware::

            source = "agreement of 1 March 2026"
            region = "eu-west-1"
            [on_demand]
            "m5.large" = 0.107
        """
        content = user_files.read_toml(path)
        unknown = sorted(set(content) - {"source", "region", "on_demand"})
        if unknown:
            raise OptionError(
                f"{path}: {', '.join(unknown)} is not known; known are source, region, on_demand"
            )
        for name in ("source", "region"):
            if not (isinstance(content.get(name), str) and content[name].strip()):
                raise OptionError(f"{path}: {name} must be a text; got {content.get(name)!r}")
        prices = content.get("on_demand")
        if not isinstance(prices, dict) or not prices:
            raise OptionError(f"{path}: on_demand must be a table of $/h by instance type; got {prices!r}")
        for kind, price in prices.items():
            # bool is an int for Python, not for us
            if (
                isinstance(price, bool)
                or not isinstance(price, int | float)
                or not (price > 0 and isfinite(price))
            ):
                raise OptionError(
                    f"{path}: on_demand.{kind!r} must be a number of dollars > 0; got {price!r}"
                )
        return cls(
            content["source"].strip(), content["region"].strip(), {k: float(v) for k, v in prices.items()}
        )
