"""What machines cost on AWS, now and before: spot prices, on-demand prices, and what one gets for them.

On-demand prices come from the AWS Price List (``pricing:GetProducts``). Where it cannot be asked they are those a
person has written down (``ListedPrices``); Ebbflow ships none, for a list in a package is wrong soon.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.prices.facts import Facts
from ebbflow.infra.aws.prices.listed import (
    LIST_REGION,
    PRODUCT,
    SERVICE,
    ListedPrices,
    list_filters,
    machine,
    on_demand_prices,
    spot_series,
    utc,
)
from ebbflow.infra.aws.settings import Pool, Settings
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import AwsError, AwsUnavailableError, PriceError
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.fleet import Offer
from ebbflow.planners.model.prices import Machine, Series, offers_of

MINUTE, DAY = 60.0, 86400.0
HISTORY = 90 * DAY
"""For so long EC2 keeps spot prices (DescribeSpotPriceHistory)."""
FRESH_LIST = 7 * DAY
"""Age after which an on-demand price is asked for again; they seldom change."""
FRESH_OFFERINGS = DAY
FRESH_MACHINES = 30 * DAY
_RECORDS = 200_000  # of price history that one call reads at most
_TYPES = 100  # that DescribeInstanceTypes takes at once


@dataclass(frozen=True, slots=True)
class _Spot:
    """What is known of one type: all price changes of ``since`` to ``until``, by zone."""

    since: float
    until: float
    zones: Mapping[str, Series]


class PriceCache:
    """A ``PriceSource`` of one cluster's pools. Safe for several threads.

    Answers are kept in ``cache`` too, so that a new process knows them, and used when AWS does not answer: spot
    prices up to ``oldest`` s, other facts up to ten times the age at which they are asked for again. That is said in
    ``problems``. Zones are those of the pools' subnets.
    """

    def __init__(
        self,
        clients: Clients,
        settings: Settings,
        cache: JsonStore | None = None,
        *,
        listed: ListedPrices | None = None,
        clock: Clock | None = None,
        fresh: float = 5 * MINUTE,
        oldest: float = DAY,
    ) -> None:
        """Make a book; nothing is asked yet. Spot prices are asked for again after ``fresh`` s.

        Raises ``OptionError`` for listed prices of another region, or ages that contradict each other.
        """
        if listed is not None and listed.region != settings.region:
            raise OptionError(
                f"the listed prices are of {listed.region}; the cluster is in {settings.region}"
            )
        if not 0 <= fresh <= oldest:
            raise OptionError(f"0 <= fresh <= oldest must hold; got {fresh:g}, {oldest:g} s")
        self._clients = clients
        self._settings = settings
        self._listed = listed
        self._clock = clock or SystemClock()
        self._fresh = fresh
        self._oldest = oldest
        self._lock = threading.Lock()
        self._spot: dict[str, _Spot] = {}
        # the same zone name means other places for another account
        self._facts = Facts(f"aws prices {settings.account_id} {settings.region}", cache, self._clock)

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """See ``PriceSource``. Raises ``OptionError`` for an unknown pool, ``PriceError`` or ``AwsError``."""
        found = self._settings.pools.get(pool)
        if found is None:
            known = ", ".join(sorted(self._settings.pools)) or "none"
            raise OptionError(f"pool must be one of the cluster's ({known}); got {pool!r}")
        types = tuple(sorted(set(found.instance_types)))
        with self._lock:
            zones = self._zones(found, types)
            self._refresh(types, self._clock.now() - DAY)
            spot = {
                (zone, kind): series.last
                for kind in types
                for zone, series in self._spot[kind].zones.items()
                if zone in zones[kind]
            }
            return offers_of(self._machines(types), zones, spot)

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """See ``PriceSource``. Raises ``PriceError`` or ``AwsError``."""
        with self._lock:
            self._refresh((instance_type,), start)
            zones = self._spot[instance_type].zones
        if zone not in zones:
            raise PriceError(
                f"there are no spot prices of {instance_type} in {zone or 'no zone'}; there are in"
                f" {', '.join(sorted(zones)) or 'no zone'}"
            )
        return zones[zone].between(start, self._clock.now())

    def on_demand(self, instance_type: str) -> float | None:
        """See ``PriceSource``. What a person has listed comes before the Price List."""
        with self._lock:
            return self._on_demand(instance_type)

    def problems(self) -> list[str]:
        """See ``PriceSource``: what could not be had, and how old what was used instead is."""
        with self._lock:
            return self._facts.problems()

    # --- spot prices ------------------------------------------------------------------------------------------

    def _refresh(self, types: Sequence[str], since: float) -> None:
        """Make sure that spot prices of ``types`` are known from ``since`` on, and are fresh."""
        now = self._clock.now()
        since = max(since, now - HISTORY)
        wanted: dict[float, list[str]] = {}
        for kind in types:
            known = self._spot.get(kind) or self._remembered(kind, now)
            if known is not None:
                self._spot[kind] = known
            if known is None or known.since > since or known.until < now - HISTORY:
                wanted.setdefault(since, []).append(kind)
            elif known.until < now - self._fresh:
                wanted.setdefault(known.until, []).append(kind)
        for start, kinds in sorted(wanted.items()):
            self._ask_spot(kinds, start, now)

    def _ask_spot(self, kinds: Sequence[str], start: float, now: float) -> None:
        try:
            found = self._facts.asked("the spot price history", partial(self._history, kinds, start, now))
        except AwsUnavailableError as error:
            known = [self._spot[kind] for kind in kinds if kind in self._spot]
            age = max((now - one.until for one in known), default=0.0)
            if len(known) < len(kinds) or age > self._oldest:
                raise
            self._facts.say(f"spot prices of {', '.join(kinds)} are {age / MINUTE:.0f} minutes old: {error}")
            return
        for kind in kinds:
            self._learn(kind, start, now, {zone: one for (zone, of), one in found.items() if of == kind})

    def _learn(self, kind: str, start: float, now: float, new: Mapping[str, Series]) -> None:
        old = self._spot.get(kind)
        zones, since = dict(new), start
        if old is not None and start <= old.until:  # no gap between them
            since = min(start, old.since)
            for zone, series in old.zones.items():
                zones[zone] = series.joined(zones[zone]) if zone in zones else series
        horizon = now - HISTORY
        kept = {zone: series.between(horizon, now) for zone, series in zones.items()}
        self._spot[kind] = _Spot(
            max(since, horizon), now, {zone: one for zone, one in kept.items() if one.times}
        )
        self._facts.remember(f"spot {kind}", asdict(self._spot[kind]))

    def _history(self, kinds: Sequence[str], start: float, end: float) -> Mapping[tuple[str, str], Series]:
        with calling("read the spot price history"):
            pages = (
                self._clients.client("ec2")
                .get_paginator("describe_spot_price_history")
                .paginate(
                    InstanceTypes=list(kinds),
                    ProductDescriptions=[PRODUCT],
                    StartTime=utc(start),
                    EndTime=utc(end),
                    PaginationConfig={"MaxItems": _RECORDS},
                )
            )
            entries = [entry for page in pages for entry in page.get("SpotPriceHistory", ())]
        if len(entries) >= _RECORDS:
            self._facts.say(f"only {_RECORDS} spot prices of {', '.join(kinds)} were read; there are more")
        return spot_series(entries)

    def _remembered(self, kind: str, now: float) -> _Spot | None:
        content = self._facts.recall(f"spot {kind}")
        try:
            zones = {
                str(zone): Series(tuple(map(float, one["times"])), tuple(map(float, one["prices"])))
                for zone, one in content["zones"].items()
            }
            found = _Spot(float(content["since"]), float(content["until"]), zones)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
        sound = all(len(one.times) == len(one.prices) > 0 for one in zones.values())
        return found if sound and found.until <= now else None

    # --- machines, zones, list prices -------------------------------------------------------------------------

    def _on_demand(self, kind: str) -> float | None:
        if self._listed is not None and kind in self._listed.on_demand:
            return self._listed.on_demand[kind]
        region = self._settings.region
        try:
            found = self._facts.get(
                f"on-demand price of {kind}",
                "the AWS Price List",
                FRESH_LIST,
                partial(self._ask_list, kind),
                AwsError,
            )
        except AwsError as error:
            self._facts.say(
                f"the on-demand price of {kind} is not known: {error}; give it in a file of prices"
            )
            return None
        if found is None:
            self._facts.say(
                f"the AWS Price List has no price of {kind} in {region}; give it in a file of prices"
            )
        return found

    def _ask_list(self, kind: str) -> float | None:
        region = self._settings.region
        with calling(f"read the on-demand price of {kind}"):
            pages = (
                self._clients.client("pricing", LIST_REGION)
                .get_paginator("get_products")
                .paginate(ServiceCode=SERVICE, Filters=list_filters(region, kind))
            )
            products = [text for page in pages for text in page.get("PriceList", ())]
        return on_demand_prices(products, region).get(kind)

    def _machines(self, types: Sequence[str]) -> list[Machine]:
        found: list[Machine] = []
        for kind in types:
            ask = partial(self._ask_machine, types, kind)
            content = self._facts.get(f"machine {kind}", "the instance types", FRESH_MACHINES, ask)
            found.append(Machine(**{**content, "on_demand": self._on_demand(kind)}))
        return found

    def _ask_machine(self, types: Sequence[str], wanted: str) -> dict[str, Any]:
        """Return what AWS says of one type, and learn it of all ``types`` with the same call."""
        found: dict[str, dict[str, Any]] = {}
        with calling("read the instance types"):
            pager = self._clients.client("ec2").get_paginator("describe_instance_types")
            for at in range(0, len(types), _TYPES):
                for page in pager.paginate(InstanceTypes=list(types[at : at + _TYPES])):
                    for entry in page.get("InstanceTypes", ()):
                        one = machine(entry)
                        found[one.instance_type] = asdict(one)
        for kind, content in found.items():
            self._facts.keep(f"machine {kind}", content)
        if wanted not in found:
            raise PriceError(f"AWS does not know the instance type {wanted}")
        return found[wanted]

    def _zones(self, pool: Pool, types: Sequence[str]) -> dict[str, list[str]]:
        """Return the zones of ``pool`` in which each of ``types`` is offered."""
        ours = self._facts.get(
            f"zones of {', '.join(sorted(pool.subnet_ids))}",
            "the pool's subnets",
            FRESH_MACHINES,
            partial(self._ask_zones, pool.subnet_ids),
        )
        found: dict[str, list[str]] = {}
        for kind in types:
            ask = partial(self._ask_offerings, types, kind)
            offered = self._facts.get(f"zones of {kind}", "the offerings of zones", FRESH_OFFERINGS, ask)
            found[kind] = [zone for zone in ours if zone in offered]
        return found

    def _ask_zones(self, subnets: Sequence[str]) -> list[str]:
        with calling("read the pool's subnets"):
            pager = self._clients.client("ec2").get_paginator("describe_subnets")
            pages = pager.paginate(SubnetIds=sorted(subnets))
            return sorted({str(one["AvailabilityZone"]) for page in pages for one in page.get("Subnets", ())})

    def _ask_offerings(self, types: Sequence[str], wanted: str) -> list[str]:
        """Return the zones that offer one type, and learn those of all ``types`` with the same call."""
        found: dict[str, list[str]] = {kind: [] for kind in types}
        with calling("read where instance types are offered"):
            pager = self._clients.client("ec2").get_paginator("describe_instance_type_offerings")
            pages = pager.paginate(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(types)}]
            )
            for page in pages:
                for one in page.get("InstanceTypeOfferings", ()):
                    found.setdefault(str(one["InstanceType"]), []).append(str(one["Location"]))
        for kind, zones in found.items():
            self._facts.keep(f"zones of {kind}", sorted(zones))
        return sorted(found[wanted])
