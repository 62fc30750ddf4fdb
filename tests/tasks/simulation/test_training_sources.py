"""Which workloads, clusters and policies a user may name, and what is said about those that are wrong."""

from pathlib import Path

import numpy as np
import pytest

from ebbflow.infra.errors import WorkloadError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.catalogue import BY_NAME, ENTRIES, Setting, policy_entries
from ebbflow.tasks.simulation import request as asked
from ebbflow.tasks.simulation.clusters import read_cluster
from ebbflow.tasks.simulation.sources import GENERATORS, SHIPPED, sources

FIXTURES = Path(__file__).parents[2] / "fixtures" / "training"
OWN = "id,arrival_s,gpus,duration_s\na,0,1,60\n"


def load(text: str, seed: int = 0, **options):
    (source,) = sources(text)
    return source.load(seed, **options)


# --- workloads --------------------------------------------------------------------------------------------


def test_each_format_is_known_by_its_first_line(tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    own.write_text(OWN, encoding="utf-8")
    table = {"throughputs": FIXTURES / "gavel" / "simulation_throughputs.json"}
    found = [
        load(str(FIXTURES / "adaptdl/workloads/workload-2.csv")),
        load(str(FIXTURES / "tiresias/60_job.csv")),
        load(str(own)),
        load(str(FIXTURES / "gavel/jobs-96.trace"), **table),
        load("pollux-2"),
        load("philly:50:3"),
    ]
    assert [(one.name, one.kind, one.jobs) for one in found] == [
        ("workload-2", "profiles", 160),
        ("60_job", "durations", 60),
        ("mine", "durations", 1),
        ("jobs-96", "rounds", 96),
        ("pollux-2", "profiles", 160),
        ("philly:50:3", "durations", 50),
    ]
    assert found[0].digest == found[4].digest  # content, not names
    assert found[3].rules.name == "gavel"


def test_a_generator_draws_from_the_runs_seed_unless_its_name_has_one() -> None:
    assert load("philly:20", 1).digest != load("philly:20", 2).digest
    assert load("philly:20:1", 5).digest == load("philly:20", 1).digest
    assert load("tiresias-testbed:4", 0).digest == load("tiresias-testbed", 4).digest
    assert load("tiresias-testbed").jobs == 480


def test_shipped_workloads_are_the_fixtures() -> None:
    for number in range(1, 5):
        path = SHIPPED[f"pollux-{number}"]
        assert path.samefile(FIXTURES / "adaptdl" / "workloads" / f"workload-{number}.csv")
    licence = path.parents[1] / "LICENSE"
    assert "Apache License" in licence.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("polux-1", WorkloadError, "no such workload file; did you mean pollux-1"),
        ("nothing/of/the.sort", WorkloadError, "no such workload file"),
        ("philly:many", OptionError, "is written philly:JOBS"),
        ("philly:1:2:3", OptionError, "is written philly:JOBS"),
        ("philly:0", OptionError, "jobs >= 1"),
        (",", OptionError, "needs a file or a name"),
        ("pollux-1,pollux-1", OptionError, "two workloads are called 'pollux-1'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(text: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        [source.load(0) for source in sources(text)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,c\n1,2,3\n", "line 1: no workload format that is known"),
        (OWN + "b,0,1,0\n", "line 3: duration_s must be > 0"),
        (OWN + "b,0,1,-5\n", "line 3: duration_s must be > 0"),
        (OWN + "b,-1,1,5\n", "line 3: arrival_s must be >= 0"),
        (OWN + "b,0,0,5\n", "line 3: gpus must be a whole number >= 1"),
        (OWN + "b,0,1\n", "line 3: has 3 fields"),
        (OWN + "a,0,1,5\n", "line 3: job 'a' is already in line 2"),
        (OWN.splitlines()[0] + "\n", "has no jobs"),
        (
            "name,time,application,num_replicas,batch_size\nx,0,cifar11,1,128\n",
            "line 2: no profile of .*nearest is 'cifar10'",
        ),
    ],
)
def test_malformed_files_name_line_and_reason(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(WorkloadError, match=message):
        load(str(path))


def test_the_nearest_profile_is_taken_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nx,0,cifar11,1,128\n", encoding="utf-8")
    assert load(str(path), nearest=True).workload.jobs[0].model == "cifar10"


def test_a_trace_in_rounds_needs_throughputs(tmp_path: Path) -> None:
    trace = FIXTURES / "shockwave" / "jobs-120.trace"
    with pytest.raises(OptionError, match="give its table of throughputs"):
        load(str(trace))
    with pytest.raises(WorkloadError, match=r"none\.json cannot be read"):
        load(str(trace), throughputs=tmp_path / "none.json")


# --- clusters ---------------------------------------------------------------------------------------------


def yaml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_cluster_by_size_or_by_groups(tmp_path: Path) -> None:
    assert [node.gpus for node in read_cluster("3x4").cluster.nodes] == [4, 4, 4]
    spec = read_cluster(
        yaml(
            tmp_path,
            "nodes:\n"
            "  - {count: 4, gpus: 8, type: p3.16xlarge, zone: us-east-1b, per_rack: 2, price: 24.48, market: spot}\n"
            "  - {count: 1, gpus: 2, rack: corner, name: old}\n"
            "spot: {gpus: 1, type: p3.2xlarge, zone: us-east-1c, price: 3.06}\n"
            "start: 2020-01-10T00:00:00Z\n",
        )
    )
    nodes = spec.cluster.nodes
    assert [(node.id, node.gpus, node.rack, node.market) for node in nodes] == [
        *((f"node-1-{i}", 8, f"node-1-rack-00{i // 2}", "spot") for i in range(4)),
        ("old-0", 2, "corner", "on-demand"),
    ]
    assert (nodes[0].instance_type, nodes[0].zone, nodes[0].price) == ("p3.16xlarge", "us-east-1b", 24.48)
    assert (spec.template.gpus, spec.template.market, spec.template.price) == (1, "spot", 3.06)
    assert (spec.per_node, spec.begin) == (8, 1578614400.0)
    assert spec.by_type("v100") == {"p3.16xlarge": 32, "v100": 2}


def test_only_a_spot_trace_can_fill_an_empty_cluster() -> None:
    assert read_cluster("0x4", spot=True).template.gpus == 4
    with pytest.raises(OptionError, match="at least one node"):
        read_cluster("0x4")


@pytest.mark.parametrize("text", ["16", "16x", "x4", "4x0", "16x4x2", "-1x4", "cluster.txt"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"is written NODESxGPUS|at least one node"):
        read_cluster(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "is not YAML"),
        ("- 1", "must be a mapping"),
        ("nodes: []", "must be a list of groups"),
        ("nodes: [{count: 1, gpu: 4}]", "unknown key 'gpu'; the nearest is 'gpus'"),
        ("nodes: [{count: 1}]", "gpus must be a whole number >= 1; got None"),
        ("nodes: [{count: 0, gpus: 4}]", "count must be a whole number >= 1; got 0"),
        ("nodes: [{count: 1, gpus: 4, price: -1}]", "price must be a number >= 0"),
        ("nodes: [{count: 1, gpus: 4, market: cheap}]", "market must be spot or on-demand"),
        ("nodes: [{count: 2, gpus: 4, rack: a, per_rack: 1}]", "give rack or per_rack"),
        ("nodes: [{count: 1, gpus: 4, name: a}, {count: 1, gpus: 4, name: a}]", "two nodes are called a-0"),
        ("nodes: [{count: 1, gpus: 4}]\nstart: soon", "start must be an ISO 8601 time"),
        ("nodes: [7]", "must be a mapping; got 7"),
    ],
)
def test_malformed_cluster_files_say_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=f"cluster.yaml.*{message}"):
        read_cluster(yaml(tmp_path, text))


def test_a_missing_cluster_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.yaml cannot be read"):
        read_cluster(str(tmp_path / "none.yaml"))


# --- policies and rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_listed_policy_can_be_made(entry) -> None:
    for kind in entry.kinds:
        policy: Policy = entry.make(Setting(kind, services=[100.0, 200.0]))
        assert callable(policy.decide)
        assert policy.name
    assert 0 < len(entry.line) <= 100


def test_names_of_policies_are_lists_without_repetition() -> None:
    assert [entry.name for entry in policy_entries("tiresias, Themis,tiresias")] == ["tiresias", "themis"]
    with pytest.raises(OptionError, match="no policy is called 'tirseias'; the nearest is 'tiresias'"):
        policy_entries("themis,tirseias")
    with pytest.raises(OptionError, match="at least one name"):
        policy_entries(" ,")
    assert len(BY_NAME) == len(ENTRIES)
    assert set(GENERATORS) == {"philly", "tiresias-testbed", "themis-w1", "themis-w2"}


def test_rates_are_one_or_two_numbers() -> None:
    failures, stragglers = asked.failures("0.02,600"), asked.stragglers("0.1")
    assert (failures.rate, failures.repair) == (0.02, 600)
    assert (stragglers.share, stragglers.factor) == (0.1, 2.0)
    assert asked.failures(None) is None
    for text in ("", "a", "1,2,3"):
        with pytest.raises(OptionError, match=r"--failures is written RATE\[,REPAIR\]"):
            asked.failures(text)


def test_the_equal_generators_of_a_seed_are_equal() -> None:
    make, takes, _ = GENERATORS["philly"]
    one, other = (make(np.random.default_rng(3), *[30][:takes]) for _ in range(2))
    assert one == other
