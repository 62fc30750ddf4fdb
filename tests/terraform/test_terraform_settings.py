"""``terraform output -json`` of the examples is a configuration."""

import json

import pytest

from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.errors import SettingsError


@pytest.fixture
def written(complete, tmp_path):
    """Write the outputs of the complete example, after ``change``, and return the file."""

    def write(change=lambda outputs: None):
        outputs = json.loads(json.dumps(complete.outputs))
        change(outputs)
        path = tmp_path / "ebbflow.json"
        path.write_text(json.dumps(outputs))
        return path

    return write


def test_the_complete_example_is_read(written):
    settings = Settings.from_terraform(written())
    assert settings.cluster == "prod"
    assert settings.bucket == settings.names.bucket("123456789012", "us-east-1")
    assert settings.spark_master == "spark://10.64.16.10:7077"
    assert settings.prefect_api_url == "https://prefect.example.com/api"
    assert settings.prefect_work_pool == "ebbflow"
    assert set(settings.pools) == {"etl", "trainers", "sums"}
    assert settings.pools["sums"].kind == "cpu"
    etl, trainers = settings.pools["etl"], settings.pools["trainers"]
    assert (etl.kind, etl.group, etl.on_demand_base, etl.max_size) == ("spark", "ebbflow-prod-etl", 1, 40)
    assert (trainers.kind, trainers.instance_types[0], len(trainers.subnet_ids)) == ("gpu", "g5.xlarge", 3)
    assert settings.documents["drain"] == "ebbflow-prod-drain"


def test_the_minimal_example_has_no_prefect(minimal, tmp_path):
    path = tmp_path / "ebbflow.json"
    path.write_text(json.dumps(minimal.outputs))
    settings = Settings.from_terraform(path)
    assert settings.prefect_api_url is None
    assert settings.pools["workers"].instance_types == ("m5.large", "m5a.large", "m6i.large", "m6a.large")


def test_the_parameter_for_nodes_holds_the_same(complete):
    (parameter,) = complete.of("aws_ssm_parameter").values()
    outputs = Settings.from_json(json.dumps(complete.outputs), "outputs")
    assert Settings.from_json(parameter["value"], "parameter") == outputs
    assert parameter["type"] == "SecureString"


REQUIRED = (
    "cluster", "region", "account_id", "bucket", "store", "kms_key_arn", "notice_queue_url",
    "dead_letter_queue_url", "capacity_role_arn", "settings_parameter", "pools", "documents",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_output_is_named(written, name):
    with pytest.raises(SettingsError, match=f"lacks the output '{name}'"):
        Settings.from_terraform(written(lambda outputs: outputs.pop(name)))


def _set(outputs, name, value):
    outputs[name]["value"] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: _set(o, "region", 3), "output region must be a text; got 3"),
        (lambda o: _set(o, "bucket", ""), "output 'bucket' must not be empty"),
        (lambda o: _set(o, "cluster", "No"), "cluster must be 3 to 20"),
        (lambda o: _set(o, "pools", ["etl"]), "output pools must be an object"),
        (lambda o: o["pools"]["value"]["etl"].pop("group"), "output pools.etl lacks 'group'"),
        (
            lambda o: o["pools"]["value"]["etl"].update(max_size=True),
            "pools.etl.max_size must be a whole number",
        ),
        (
            lambda o: o["pools"]["value"]["etl"].update(kind="tpu"),
            "pools.etl.kind must be one of spark, gpu, cpu",
        ),
        (
            lambda o: o["pools"]["value"]["etl"].update(subnet_ids=[1]),
            r"subnet_ids\[0\] must be a text; got 1",
        ),
        (lambda o: o.update(store="s3://x"), "output 'store' has no 'value'"),
        (lambda o: o.clear(), "holds no outputs; run terraform apply"),
    ],
)
def test_an_output_of_another_form_is_named(written, change, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_terraform(written(change))


def test_a_file_that_is_no_output_says_how_to_write_it(tmp_path):
    path = tmp_path / "ebbflow.json"
    with pytest.raises(SettingsError, match="terraform output -json >"):
        Settings.from_terraform(path)
    path.write_text("cluster = prod\n")
    with pytest.raises(SettingsError, match="was -json omitted"):
        Settings.from_terraform(path)
    path.write_text("[]")
    with pytest.raises(SettingsError, match="must hold a JSON object"):
        Settings.from_terraform(path)
