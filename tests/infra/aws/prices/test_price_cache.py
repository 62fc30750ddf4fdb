"""Prices as AWS gives them: pages, what is asked again, what is kept, and what serves in an outage."""

import json
from datetime import UTC, datetime

import pytest
from botocore.stub import Stubber

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.prices.facts import PAUSE
from ebbflow.infra.aws.prices.listed import ListedPrices, list_filters, machine, on_demand_prices, spot_series
from ebbflow.infra.aws.prices.prices import DAY, HISTORY, PriceCache
from ebbflow.infra.aws.settings import Pool, Settings
from ebbflow.infra.errors import AwsError, AwsUnavailableError, CredentialsError, PriceError
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.prices import Machine, Series
from tests.aws.emulator import REGION, PoolShape
from tests.infra.conftest import ManualClock

NOW = 1_795_000_000.0
TYPES = ("m5.large", "m6i.large")
POOL = Pool("etl", "spark", "g", "lt", TYPES, ("subnet-2", "subnet-1"), 0, 0, 20)


def moment(seconds):
    return datetime.fromtimestamp(seconds, UTC)


def settings(account="123456789012"):
    plain = dict.fromkeys(
        (
            "bucket",
            "store",
            "kms_key_arn",
            "notice_queue_url",
            "dead_letter_queue_url",
            "capacity_role_arn",
            "settings_parameter",
        ),
        "x",
    )
    return Settings(
        cluster="lab", region=REGION, account_id=account, pools={"etl": POOL}, documents={}, **plain
    )


def product(kind="m5.large", price="0.0960000000", since="2026-01-01T00:00:00Z", unit="Hrs", **attributes):
    found = {
        "instanceType": kind,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "regionCode": REGION,
        **attributes,
    }
    dimension = {"unit": unit, "pricePerUnit": {"USD": price}}
    terms = {
        "OnDemand": {"A.B": {"effectiveDate": since, "priceDimensions": {"A.B.C": dimension}}},
        "Reserved": {},
    }
    return json.dumps({"product": {"attributes": found}, "serviceCode": "AmazonEC2", "terms": terms})


def price(kind, zone, dollars, at, sold="Linux/UNIX"):
    return {
        "InstanceType": kind,
        "AvailabilityZone": zone,
        "ProductDescription": sold,
        "SpotPrice": f"{dollars:.6f}",
        "Timestamp": moment(at),
    }


class Desk:
    """AWS with the answers that a test gives, in order; a call without one fails."""

    def __init__(self, clients):
        self.clients = clients
        self.ec2 = Stubber(self.clients.client("ec2"))
        self.list = Stubber(self.clients.client("pricing", "us-east-1"))
        self.ec2.activate()
        self.list.activate()
        self.clock = ManualClock(NOW)

    def history(self, entries, start, end=None, types=TYPES, token="", next_token=""):
        asked = {
            "InstanceTypes": list(types),
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": moment(start),
            "EndTime": moment(end or self.clock.time),
        }
        answer = {"SpotPriceHistory": entries, "NextToken": next_token}
        self.ec2.add_response(
            "describe_spot_price_history", answer, {**asked, "NextToken": token} if token else asked
        )

    def pool(self):
        """Give the subnets, offerings and machines of the pool."""
        zones = [
            {"SubnetId": "subnet-1", "AvailabilityZone": "a"},
            {"SubnetId": "subnet-2", "AvailabilityZone": "b"},
        ]
        self.ec2.add_response("describe_subnets", {"Subnets": zones}, {"SubnetIds": ["subnet-1", "subnet-2"]})
        offered = [("m5.large", "a"), ("m5.large", "b"), ("m5.large", "c"), ("m6i.large", "b")]
        self.ec2.add_response(
            "describe_instance_type_offerings",
            {"InstanceTypeOfferings": [{"InstanceType": kind, "Location": zone} for kind, zone in offered]},
            {
                "LocationType": "availability-zone",
                "Filters": [{"Name": "instance-type", "Values": list(TYPES)}],
            },
        )

    def machines(self):
        entries = [
            {"InstanceType": kind, "VCpuInfo": {"DefaultVCpus": 2}, "MemoryInfo": {"SizeInMiB": 8192}}
            for kind in TYPES
        ]
        self.ec2.add_response(
            "describe_instance_types", {"InstanceTypes": entries}, {"InstanceTypes": list(TYPES)}
        )

    def listed(self, kind, *products):
        asked = {"ServiceCode": "AmazonEC2", "Filters": list_filters(REGION, kind)}
        self.list.add_response(
            "get_products", {"FormatVersion": "aws_v1", "PriceList": list(products)}, asked
        )

    def done(self):
        self.ec2.assert_no_pending_responses()
        self.list.assert_no_pending_responses()


@pytest.fixture(scope="module")
def clients():
    """Make clients once: reading EC2's description takes a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"), ("AWS_SECRET_ACCESS_KEY", "secret")):
            patch.setenv(name, value)
        found = Clients(REGION, "http://127.0.0.1:9")
        found.client("ec2")
        found.client("pricing", "us-east-1")
        yield found


@pytest.fixture
def desk(clients):
    desk = Desk(clients)
    yield desk
    desk.ec2.deactivate()
    desk.list.deactivate()


def spot(found):
    return [(one.instance_type, one.zone, one.price) for one in found if one.market == "spot"]


def on_demand(found):
    return [(one.instance_type, one.zone, one.price) for one in found if one.market == "on-demand"]


@pytest.fixture
def book(desk, tmp_path):
    return PriceCache(desk.clients, settings(), JsonStore(StorageLocation(tmp_path)), clock=desk.clock)


def test_offers_are_the_pools_types_in_its_zones_at_present_prices(desk, book):
    desk.pool()
    first = [price("m5.large", "a", 0.04, NOW - 2 * DAY), price("m5.large", "a", 0.05, NOW - 60)]
    more = [
        price("m6i.large", "b", 0.03, NOW - 60),
        price("m6i.large", "b", 9.0, NOW - 50, "Windows"),
        price("m5.large", "c", 0.01, NOW - 60),  # no subnet there
    ]
    desk.history(first, NOW - DAY, next_token="more")
    desk.history(more, NOW - DAY, token="more")
    desk.machines()
    desk.listed("m5.large", product())
    desk.listed("m6i.large", product("m6i.large", "0.1"))
    found = book.offers("etl")
    assert spot(found) == [("m5.large", "a", 0.05), ("m6i.large", "b", 0.03)]
    assert on_demand(found) == [("m5.large", "a", 0.096), ("m5.large", "b", 0.096), ("m6i.large", "b", 0.1)]
    assert {(one.cores, one.memory, one.gpus) for one in found} == {(2, 8.0, 0)}
    assert book.problems() == []
    # nothing is asked again while it is fresh
    desk.clock.time += 60
    assert book.offers("etl") == found
    desk.done()


def test_only_what_is_newer_is_asked_for_and_put_behind_what_is_known(desk, book):
    desk.history([price("m5.large", "a", 0.04, NOW - DAY)], NOW - DAY / 2, types=["m5.large"])
    assert book.series("a", "m5.large", NOW - DAY / 2).last == 0.04
    desk.clock.time += 600
    # the price that held at the start is told again
    again = [price("m5.large", "a", 0.06, NOW + 300), price("m5.large", "a", 0.04, NOW - DAY)]
    desk.history(again, NOW, types=["m5.large"])
    found = book.series("a", "m5.large", NOW - DAY / 2)
    assert found == Series((NOW - DAY, NOW + 300), (0.04, 0.06))
    assert found.dollars(NOW, NOW + 600) == pytest.approx(0.04 / 12 + 0.06 / 12)
    desk.done()


def test_an_earlier_start_asks_for_the_whole_and_never_for_more_than_ec2_keeps(desk, book):
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    book.series("a", "m5.large", NOW - 3600)
    early = [price("m5.large", "a", 0.02, NOW - HISTORY - 60), price("m5.large", "a", 0.05, NOW - 60)]
    desk.history(early, NOW - HISTORY, types=["m5.large"])
    assert book.series("a", "m5.large", NOW - 2 * HISTORY) == Series(
        (NOW - HISTORY - 60, NOW - 60), (0.02, 0.05)
    )
    assert book.series("a", "m5.large", NOW - HISTORY).at(NOW - DAY) == 0.02
    desk.done()


def test_what_is_older_than_ec2_tells_is_forgotten(desk, book):
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    book.series("a", "m5.large", NOW - 3600)
    desk.clock.time += 2 * HISTORY
    now = desk.clock.time
    desk.history([price("m5.large", "a", 0.07, now - 3700)], now - 3600, types=["m5.large"])
    assert book.series("a", "m5.large", now - 3600) == Series((now - 3700,), (0.07,))
    # between the old prices and the new ones nothing is known
    early = [price("m5.large", "a", 0.06, now - DAY), price("m5.large", "a", 0.07, now - 3700)]
    desk.history(early, now - DAY, types=["m5.large"])
    assert book.series("a", "m5.large", now - DAY) == Series((now - DAY, now - 3700), (0.06, 0.07))
    desk.done()


def test_a_new_process_knows_what_the_last_one_has_learnt(desk, book, tmp_path):
    desk.pool()
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - DAY)
    desk.machines()
    desk.listed("m5.large", product())
    desk.listed("m6i.large", product("m6i.large", "0.1"))
    found = book.offers("etl")
    other = PriceCache(desk.clients, settings(), JsonStore(StorageLocation(tmp_path)), clock=desk.clock)
    assert other.offers("etl") == found
    desk.done()
    # but another account's zones are others
    elsewhere = PriceCache(
        desk.clients, settings("210987654321"), JsonStore(StorageLocation(tmp_path)), clock=desk.clock
    )
    with pytest.raises(AwsError):
        elsewhere.offers("etl")


def test_an_outage_is_bridged_and_said_for_so_long(desk, book):
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    book.series("a", "m5.large", NOW - 3600)
    desk.clock.time = NOW + 600
    desk.ec2.add_client_error("describe_spot_price_history", "RequestLimitExceeded", http_status_code=503)
    assert book.series("a", "m5.large", NOW - 3600).last == 0.05
    (said,) = book.problems()
    assert said.startswith("spot prices of m5.large are 10 minutes old: cannot read the spot price history")
    assert book.problems() == []
    # for a while nothing is asked at all
    desk.clock.time += PAUSE / 2
    assert book.series("a", "m5.large", NOW - 3600).last == 0.05
    assert "retry in 30 s" in book.problems()[0]
    desk.clock.time += PAUSE
    desk.history([price("m5.large", "a", 0.09, NOW + 600)], NOW, types=["m5.large"])
    assert book.series("a", "m5.large", NOW - 3600).last == 0.09
    desk.clock.time += DAY + 600
    desk.ec2.add_client_error("describe_spot_price_history", "Unavailable", http_status_code=503)
    with pytest.raises(AwsUnavailableError, match="cannot read the spot price history: Unavailable"):
        book.series("a", "m5.large", NOW - 3600)
    desk.done()


def test_an_outage_without_anything_known_and_missing_rights_are_errors(desk, book):
    desk.ec2.add_client_error("describe_spot_price_history", "UnauthorizedOperation", http_status_code=403)
    with pytest.raises(CredentialsError):
        book.series("a", "m5.large", NOW - 3600)
    desk.ec2.add_client_error("describe_spot_price_history", "Unavailable", http_status_code=503)
    with pytest.raises(AwsUnavailableError):
        book.series("a", "m5.large", NOW - 3600)


def test_a_torn_cache_is_asked_for_again(desk, tmp_path):
    cache = JsonStore(StorageLocation(tmp_path))
    for content in (
        "nonsense",
        {"since": 1, "until": NOW, "zones": {"a": {"times": [1, 2], "prices": [1]}}},
        {"until": "x"},
    ):
        cache.put(f"aws prices 123456789012 {REGION} 1 spot m5.large", content)
        book = PriceCache(desk.clients, settings(), cache, clock=desk.clock)
        desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
        assert book.series("a", "m5.large", NOW - 3600).last == 0.05
    future = {"since": 1.0, "until": NOW + DAY, "zones": {}}
    cache.put(f"aws prices 123456789012 {REGION} 1 spot m5.large", future)
    book = PriceCache(desk.clients, settings(), cache, clock=desk.clock)
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    assert book.series("a", "m5.large", NOW - 3600).last == 0.05
    desk.done()


def test_a_cache_that_cannot_be_written_is_a_problem_and_no_error(desk, tmp_path):
    (tmp_path / "file").write_text("in the way")
    book = PriceCache(
        desk.clients, settings(), JsonStore(StorageLocation(tmp_path / "file")), clock=desk.clock
    )
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    assert book.series("a", "m5.large", NOW - 3600).last == 0.05
    assert "prices are not kept" in book.problems()[0]


def test_a_list_that_may_not_be_asked_is_said_and_a_persons_prices_serve(desk, book, tmp_path):
    desk.list.add_client_error("get_products", "AccessDeniedException", http_status_code=400)
    assert book.on_demand("m5.large") is None
    (said,) = book.problems()
    assert "the on-demand price of m5.large is not known" in said
    assert "give it in a file of prices" in said
    assert book.on_demand("m6i.large") is None  # and not asked again so soon
    assert "retry in 60 s" in book.problems()[0]
    path = tmp_path / "prices.toml"
    path.write_text(f'source = "contract of 2026"\nregion = "{REGION}"\n[on_demand]\n"m5.large" = 0.08\n')
    own = PriceCache(desk.clients, settings(), listed=ListedPrices.read(path), clock=desk.clock)
    assert own.on_demand("m5.large") == 0.08
    assert own.problems() == []
    desk.done()


def test_a_list_price_serves_for_a_week_and_in_an_outage_for_longer(desk, book):
    desk.listed("m5.large", product())
    assert book.on_demand("m5.large") == 0.096
    desk.clock.time += 6 * DAY
    assert book.on_demand("m5.large") == 0.096
    desk.clock.time += 2 * DAY
    desk.list.add_client_error("get_products", "ThrottlingException", http_status_code=400)
    assert book.on_demand("m5.large") == 0.096
    assert book.problems()[0].startswith("on-demand price of m5.large is 8.0 days old")
    desk.clock.time += PAUSE
    desk.listed("m5.large", product(price="0.1"))
    assert book.on_demand("m5.large") == 0.1
    desk.clock.time += 71 * DAY
    desk.list.add_client_error("get_products", "ThrottlingException", http_status_code=400)
    assert book.on_demand("m5.large") is None
    assert "the on-demand price of m5.large is not known" in book.problems()[0]
    desk.clock.time += PAUSE
    desk.listed("x9.large")
    assert book.on_demand("x9.large") is None
    assert "the AWS Price List has no price of x9.large in us-east-1" in book.problems()[0]
    desk.done()


def test_what_is_asked_for_must_exist(desk, book):
    with pytest.raises(OptionError, match=r"pool must be one of the cluster's \(etl\); got 'gpu'"):
        book.offers("gpu")
    desk.history([price("m5.large", "a", 0.05, NOW - 60)], NOW - 3600, types=["m5.large"])
    with pytest.raises(PriceError, match=r"no spot prices of m5\.large in z; there are in a"):
        book.series("z", "m5.large", NOW - 3600)
    with pytest.raises(OptionError, match="the listed prices are of eu-west-1; the cluster is in us-east-1"):
        PriceCache(desk.clients, settings(), listed=ListedPrices("s", "eu-west-1", {}))
    with pytest.raises(OptionError, match="0 <= fresh <= oldest"):
        PriceCache(desk.clients, settings(), fresh=10.0, oldest=1.0)


# --- what is read ------------------------------------------------------------------------------------------------


def test_only_plain_linux_machines_count_and_the_newest_price_of_them():
    texts = [
        product(),
        product(price="0.0920000000", since="2026-06-01T00:00:00Z"),
        product(price="0.5", operatingSystem="Windows"),
        product(price="0.4", preInstalledSw="SQL Std"),
        product(price="0.3", tenancy="Dedicated"),
        product(price="0.2", capacitystatus="AllocatedCapacityReservation"),
        product(price="0.1", regionCode="eu-west-1"),
        product("free", "0.0000000000"),
        product("odd", "5", unit="Quantity"),
        json.dumps({"product": {"attributes": {}}}),
    ]
    assert on_demand_prices(texts, REGION) == {"m5.large": 0.092}
    assert on_demand_prices(reversed(texts), REGION) == {"m5.large": 0.092}
    for text in ("{", "[]", '{"product": 5}', product(price="much")):
        with pytest.raises(AwsError, match="Price List's answer cannot be read"):
            on_demand_prices([text], REGION)


def test_history_is_read_in_any_order():
    entries = [price("m", "a", 0.3, NOW), price("m", "a", 0.1, NOW - 20), price("m", "b", 0.2, NOW - 10)]
    entries[2]["Timestamp"] = entries[2]["Timestamp"].replace(tzinfo=None)
    assert spot_series(entries) == {
        ("a", "m"): Series((NOW - 20, NOW), (0.1, 0.3)),
        ("b", "m"): Series((NOW - 10,), (0.2,)),
    }
    for broken in (
        {**entries[0], "SpotPrice": "0"},
        {**entries[0], "Timestamp": "now"},
        {"ProductDescription": "Linux/UNIX"},
    ):
        with pytest.raises(AwsError, match="spot price history cannot be read"):
            spot_series([broken])


def test_machines_have_their_gpus():
    entry = {
        "InstanceType": "p3.8xlarge",
        "VCpuInfo": {"DefaultVCpus": 32},
        "MemoryInfo": {"SizeInMiB": 249856},
        "GpuInfo": {"Gpus": [{"Name": "V100", "Count": 4}]},
    }
    assert machine(entry) == Machine("p3.8xlarge", 32, 244.0, 4)
    with pytest.raises(AwsError, match="instance types cannot be read"):
        machine({"InstanceType": "m"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on_demand = 5", "source must be a text; got None"),
        ('source = "s"\nregion = ""\n', "region must be a text; got ''"),
        ('source = "s"\nregion = "r"\n', "on_demand must be a table"),
        (
            'source = "s"\nregion = "r"\n[on_demand]\nm = "1"\n',
            "on_demand.'m' must be a number of dollars > 0; got '1'",
        ),
        ('source = "s"\nregion = "r"\n[on_demand]\nm = 0\n', "must be a number of dollars > 0; got 0"),
        ('source = "s"\nregion = "r"\n[on_demand]\nm = true\n', "must be a number of dollars > 0; got True"),
        ("price = 1", "price is not known; known are source, region, on_demand"),
        ("source = ", "is not TOML"),
    ],
)
def test_a_file_of_prices_that_breaks_its_form_is_named(text, said, tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=said):
        ListedPrices.read(path)


def test_a_file_of_prices_must_be_there(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        ListedPrices.read(tmp_path / "none.toml")


# --- over HTTP ---------------------------------------------------------------------------------------------------


def test_prices_of_an_emulated_account(aws_account, tmp_path):
    """The emulator's spot price is one for all and for ever, and it has no Price List."""
    cluster = aws_account.cluster("lab", PoolShape("etl", types=("m5.large", "m5a.large")))
    clients = Clients(REGION, aws_account.emulator.url, attempts=1)
    path = tmp_path / "prices.toml"
    path.write_text(f'source = "a test"\nregion = "{REGION}"\n[on_demand]\n"m5.large" = 0.096\n')
    book = PriceCache(
        clients, cluster.settings, JsonStore(StorageLocation(tmp_path)), listed=ListedPrices.read(path)
    )
    found = book.offers("etl")
    assert {one.price for one in found if one.market == "spot"} == {0.00001}
    assert {one.instance_type for one in found if one.market == "spot"} == {"m5.large", "m5a.large"}
    assert {(one.instance_type, one.price) for one in found if one.market == "on-demand"} == {
        ("m5.large", 0.096)
    }
    assert {(one.cores, one.memory) for one in found} == {(2, 8.0)}
    assert "the on-demand price of m5a.large is not known" in book.problems()[0]
