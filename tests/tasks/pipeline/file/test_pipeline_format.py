"""The format of a pipeline's file: what it means, and what it says about files that are wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import ebbflow.flows
from ebbflow.planners.errors import PipelineFileError
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.pipeline.file.form import json_schema
from ebbflow.tasks.pipeline.file.read import parse_pipeline, read_pipeline
from ebbflow.tasks.pipeline.file.spec import LocalSpec, Pipeline
from tests.tasks.pipeline.pipelines import changed, content, read, text_of

ROOT = Path(__file__).parents[4]
DEMO = Path(ebbflow.flows.__path__[0]) / "setup" / "demo_files" / "pipeline.yaml"
EXAMPLE = ROOT / "examples" / "pipeline.yaml"


def refused(text: str, folder: Path, **parameters: str) -> list[str]:
    with pytest.raises(PipelineFileError) as error:
        parse_pipeline(text, "shop.yaml", str(folder), parameters)
    return str(error.value).splitlines()


def test_what_a_file_says(tmp_path: Path) -> None:
    plain = content(tmp_path)
    plain["trainings"]["fit"] |= {
        "deadline": "1h30m",
        "gpus": 2,
        "max_gpus": 3,
        "checkpoint_interval": "500ms",
    }
    plain["cluster"]["local"]["faults"] = ["20s:kill:gpu-1", "fit+1.5s:notice:gpu:1m"]
    plain["loop"] = {
        "policy": "themis",
        "options": {"knob": 0.5},
        "lease_duration": "20s",
        "scaling": {"scale_in_idle": 0},
    }
    plain["quotas"] |= {"dollars_per_hour": 7, "pools": {"gpu": {"max_nodes": 2}}}
    found = read(plain, tmp_path)
    assert found.needs == {
        "orders": frozenset(), "fit": frozenset({"orders"}), "tune": frozenset({"fit"})
    }  # fmt: skip
    fit = found.steps["fit"]
    assert fit.deadline is not None
    assert fit.deadline.moment(1000.0) == 1000.0 + 5400.0
    assert fit.options["checkpoint_interval"] == 0.5
    assert isinstance(found.cluster, LocalSpec)
    assert found.cluster.faults == (
        Fault(20.0, "kill", "gpu-1"), Fault(1.5, "notice", "gpu", 60.0, step="fit")
    )  # fmt: skip
    assert found.cluster.gpus == 3
    assert found.quotas.teams["research"].gpus == 2
    assert found.loop.settings["lease_duration"] == 20.0
    assert found.quotas.pools["gpu"].max_nodes == 2


def test_a_moment_needs_its_offset(tmp_path: Path) -> None:
    plain = changed(content(tmp_path), "trainings.fit.deadline", "2026-11-22T18:00:00+02:00")
    due = read(plain, tmp_path).steps["fit"].deadline
    assert due is not None
    assert due.moment(0.0) == 1795363200.0
    lines = refused(text_of(changed(plain, "trainings.fit.deadline", "2026-11-22T18:00")), tmp_path)
    assert "a moment with its offset" in lines[0]


def test_parameters_stand_anywhere_and_can_be_set(tmp_path: Path) -> None:
    plain = content(tmp_path)
    plain["parameters"] = {"nodes": 2, "engine": "duckdb"}
    plain["cluster"]["local"]["pools"]["gpu"]["nodes"] = "${parameters.nodes}"
    text = text_of(plain)  # quoted, as it must be within braces
    assert isinstance(cluster := parse_pipeline(text, folder=str(tmp_path)).cluster, LocalSpec)
    assert cluster.pools[0].start == 2
    cluster = parse_pipeline(text, folder=str(tmp_path), parameters={"nodes": "3"}).cluster
    assert isinstance(cluster, LocalSpec)
    assert cluster.pools[0].start == 3
    assert refused(text, tmp_path, nods="3") == [
        f"shop.yaml:{_line(text, 'nodes: 2')}: parameters: 'nods' was set, but the file has no such parameter; "
        "did you mean nodes?"
    ]


def _line(text: str, words: str) -> int:
    """Return the first line that holds ``words``, from 1."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if words in line)


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("name", None, "name is missing"),
        ("name", "two words", "must be a name of letters, digits, _ and -; got 'two words'"),
        ("searches", {}, "'searches' is not known here; did you mean tunings?"),
        ("title", "Shop", "'title' is not known here; did you mean display_name?"),
        ("cluster.local.pools.gpu.most", 2, "'most' is not known here; did you mean max_nodes?"),
        ("cluster.local.pools.gpu.boot", "1s", "'boot' is not known here; did you mean provision_time?"),
        ("nme", "shop", "'nme' is not known here; did you mean name?"),
        ("format", 2, "must be a whole number >= 1 and <= 1; got '2'"),
        ("cluster.aws", {"pools": ["a"]}, "exactly one of local, aws, existing must be given"),
        ("cluster.local.pools", {}, "a fleet must have at least one pool"),
        ("cluster.local.pools.gpu.kind", "gpo", "must be one of spark, gpu; got 'gpo'; did you mean gpu?"),
        ("cluster.local.pools.gpu.nodes", 9, "min_nodes <= initial <= max_nodes"),
        ("cluster.local.pools.gpu.memory", "lots", "must be a positive size such as 6GiB or 512m; got 'lots'"),
        ("cluster.local.faults", ["soon:kill:gpu"], "a fault of a pipeline is [STEP+]TIME:VERB"),
        ("cluster.local.faults", ["fot+1s:kill:gpu"], "there is no step 'fot'; did you mean fit?"),
        ("cluster.local.faults", ["1s:kill:gpx"], "there is no pool or node 'gpx'"),
        ("teams.sales.weight", 0, "must be a number > 0 and <= 1e+06; got '0'"),
        ("queries.orders.team", "salse", "there is no team 'salse' in teams; did you mean sales?"),
        ("queries.orders.team", None, "team is missing: one of sales, research"),
        ("queries.orders.file", "a.sql", "exactly one of sql, file must be given; got sql and file"),
        ("queries.orders.sql", None, "exactly one of sql, file must be given; got none"),
        ("queries.orders.tables", "nowhere", "there is no directory 'nowhere'"),
        ("queries.orders.tables", None, "name the tables"),
        ("queries.orders.engine", "spark", "engine spark needs a pool of kind spark in cluster; got none"),
        ("queries.orders.dialect", "klingon", "dialect must be one that sqlglot knows"),
        ("queries.orders.weight", "heavy", "must be a number > 0 and <= 1e+06; got 'heavy'"),
        ("trainings.fit.script", "gone.py", "script must be a Python file; there is none at"),
        ("trainings.fit.argumnts", [], "'argumnts' is not known here; did you mean arguments?"),
        ("trainings.fit.arguments", ["${queries.order.path}"], "no 'order' in queries; did you mean orders?"),
        ("trainings.fit.arguments", ["${queries.orders.size}"], "of queries there are path, file, rows"),
        ("trainings.fit.arguments", ["${orders.path}"], "a reference looks like"),
        ("trainings.fit.arguments", ["${queries.orders.path"], "got one without an end"),
        ("trainings.fit.arguments", ["${env:KEY}"], "may stand in environment only"),
        ("trainings.fit.arguments", ["${tunings.tune.best.lrr}"], "does not tune 'lrr'; did you mean lr?"),
        ("trainings.fit.after", ["tune"], "steps wait for each other: fit -> tune -> fit"),
        ("trainings.fit.after", ["fit"], "steps wait for each other: fit -> fit"),
        ("trainings.fit.deadline", "soon", "must be a duration from the pipeline's beginning, such as 20m"),
        ("trainings.fit.gpus", 2, "min_gpus <= gpus <= max_gpus must hold"),
        ("trainings.fit.min_gpus", 4, "min_gpus <= gpus <= max_gpus must hold"),
        ("trainings.fit.gpus", 1.5, "must be a whole number"),
        ("trainings.fit.gpus", True, "must be a whole number >= 1 and <= 10000; got 'true'"),
        ("trainings.fit.checkpoint_interval", -1, "must be a duration such as"),
        ("trainings.orders", {"script": "fit.py", "team": "sales"}, "the name 'orders' is taken by queries.orders"),
        ("trainings.1st", {"script": "fit.py"}, "a name begins with a letter"),
        ("tunings.tune.space", {}, "space must name at least one hyperparameter"),
        ("tunings.tune.space.lr", {"log": [1]}, "log takes two numbers"),
        ("tunings.tune.pruner", "curve", "needs to know the epochs"),
        ("loop.policy", "thems", "the nearest is 'themis'"),
        ("loop.options", {"knob": 1}, "has no option 'knob'"),
        ("loop.lease_duration", "0s", "must be longer than 0 s"),
        ("quotas.teams.salse", {"gpus": 1}, "there is no team 'salse'"),
        ("quotas.dollars_per_hour", 0, "must be a number > 0; got '0'"),
        ("quotas.pools", {"gpu": {"min_nodes": 2, "max_nodes": 1}}, "min_nodes must be at most max_nodes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(path: str, value: Any, rule: str, tmp_path: Path) -> None:
    plain = content(tmp_path)
    if path == "trainings.fit.gpus" and value == 2:
        plain["trainings"]["fit"]["max_gpus"] = 1
    if path.endswith("min_gpus"):
        plain["trainings"]["fit"]["max_gpus"] = 2
    lines = refused(text_of(changed(plain, path, value)), tmp_path)
    assert rule in "\n".join(lines)
    assert all(re.match(r"shop\.yaml:\d+: ", line) for line in lines)


def test_lines_are_right_and_all_errors_are_told_at_once(tmp_path: Path) -> None:
    plain = content(tmp_path)
    plain["trainings"]["fit"]["deadline"] = "soon"
    plain["tunings"]["tune"]["trials"] = 0
    text = text_of(plain)
    assert [int(line.split(":")[1]) for line in refused(text, tmp_path)] == [
        _line(text, "deadline: soon"), _line(text, "trials: 0")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "shop.yaml:1: the file is empty"),
        ("- a", "must be a table; got a list"),
        ("name: [", "shop.yaml:1: this is not YAML"),
        ("name: a\nname: b", "shop.yaml:2: name stands here twice; the first is in line 1"),
        ("name: !!python/object:os.system x", "tags are not read here"),
        ("name: &a [*a]", "an alias must not stand for what it is a part of"),
        ("{a: 1}: b", "a key must be a word"),
        ("[" * 100_000, "shop.yaml:1: values are nested too deeply"),
        ("a:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 60)), "values are nested too deeply"),
        ("name: a\0", "this is not YAML"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)
        ), "a pipeline has at most 20,000 values"),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_at_all(text: str, rule: str, tmp_path: Path) -> None:
    assert rule in "\n".join(refused(text, tmp_path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", "binary.yaml", "."):
        with pytest.raises(PipelineFileError, match=r"the pipeline .*(cannot be read|is not UTF-8)"):
            read_pipeline(tmp_path / name)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["15m", "2GiB", "gpu", "fit", "orders", "${queries.orders.path}", "${env:A}", "${", "local"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [above] if above else []
    for key, one in items:
        found += _paths(one, (*above, key))
    return found


@given(st.data())
@settings(
    max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_broken_file_gets_our_error(tmp_path: Path, data: st.DataObject) -> None:
    plain = content(tmp_path)
    path = data.draw(st.sampled_from(_paths(plain)))
    table: Any = plain
    for key in path[:-1]:
        table = table[key]
    key = (
        path[-1] if isinstance(table, list) else data.draw(st.sampled_from([path[-1]]) | st.text(max_size=8))
    )
    table[key] = data.draw(PLAIN)
    try:
        assert isinstance(parse_pipeline(text_of(plain), "shop.yaml", str(tmp_path)), Pipeline)
        said = []
    except PipelineFileError as error:
        said = str(error).splitlines()
    assert all(re.match(r"shop\.yaml:\d+: ", line) for line in said)


@given(st.text(max_size=200))
def test_any_text_gets_our_error(text: str) -> None:
    with pytest.raises(PipelineFileError):
        parse_pipeline(text)


def test_the_shipped_schema_is_that_of_the_format() -> None:
    shipped = ROOT / "tasks" / "pipeline" / "file" / "schema.json"
    assert json.loads(shipped.read_text()) == json.loads(json.dumps(json_schema()))


def test_the_schema_takes_what_is_right_and_refuses_unknown_keys(tmp_path: Path) -> None:
    schema = Draft202012Validator(json_schema())
    Draft202012Validator.check_schema(json_schema())
    for right in (content(tmp_path), yaml.safe_load(DEMO.read_text()), yaml.safe_load(EXAMPLE.read_text())):
        assert [error.message for error in schema.iter_errors(right)] == []
    for path, value in (
        ("nme", 1),
        ("trainings.fit.gpus", "many"),
        ("queries.orders.sql", None),
        ("name", None),
    ):
        assert not schema.is_valid(changed(content(tmp_path), path, value))


@pytest.mark.parametrize("file", [DEMO, EXAMPLE], ids=["demo", "example"])
def test_what_is_shipped_is_right(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    found = read_pipeline(file, {"tables": str(tmp_path / "tables")})
    assert found.of("query")
    assert found.of("training")
    assert found.of("tuning")
