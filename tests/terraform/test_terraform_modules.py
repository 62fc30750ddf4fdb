"""Every module is well-formed by the provider's schema, and what must hold of it holds."""

import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "terraform"
MODULES = sorted(p.name for p in (FOLDER / "modules").iterdir() if p.is_dir())
CONFIGURATIONS = [".", *(f"modules/{m}" for m in MODULES), "examples/complete", "examples/minimal"]


def _blocks(kind: str, text: str) -> dict[str, str]:
    """Return the top-level blocks of ``kind`` by name; formatted code closes them in the first column."""
    return {m[1]: m[2] for m in re.finditer(rf'^{kind} "(\w+)" {{\n(.*?)^}}', text, re.M | re.S)}


def _text(configuration: str, file: str) -> str:
    return (FOLDER / configuration / file).read_text()


def test_the_code_is_formatted(terraform):
    done = terraform.run("fmt", "-check", "-diff", "-recursive")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("configuration", ["examples/complete", "examples/minimal", "modules/naming"])
def test_configurations_fit_the_providers_schema(terraform, configuration):
    # examples reach all modules; every block of every module is checked with them
    terraform.ready(configuration)
    done = terraform.run("validate", "-no-color", folder=configuration)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_call_every_module():
    reached: set[str] = set()
    seen = ["examples/complete"]
    while seen:
        here = seen.pop()
        for source in re.findall(r'^\s*source\s+= "(\.[./a-z-]*)"', _text(here, "main.tf"), re.M):
            folder = (FOLDER / here / source).resolve().relative_to(FOLDER)
            if str(folder) not in reached:
                reached.add(str(folder))
                seen.append(str(folder))
    assert reached == {"."} | {f"modules/{m}" for m in MODULES}


def test_a_misspelt_argument_is_found(terraform, tmp_path):
    (tmp_path / "main.tf").write_text('resource "aws_sqs_queue" "this" {\n  naem = "x"\n}\n')
    done = terraform.run("validate", "-no-color", folder=str(tmp_path))
    assert done.returncode == 1
    assert "naem" in done.stdout + done.stderr


@pytest.mark.parametrize("page", ["aws", "aggregation"])
def test_what_pages_tell_of_aggregators_fits_the_modules(terraform, tmp_path, page):
    (given,) = re.findall(
        r"^```hcl\n(aggregation +=.*?)^```", (FOLDER.parent / f"docs/{page}.md").read_text(), re.M | re.S
    )
    (tmp_path / "main.tf").write_text(f"""
module "ebbflow" {{
  source          = "{os.path.relpath(terraform.folder, tmp_path)}"
  cluster         = "lab"
  ebbflow_package = "s3://bucket/packages/prefect_ebbflow-0.1.0-py3-none-any.whl"
  ebbflow_sha256  = "{"0" * 64}"
{given}}}
resource "aws_security_group" "database" {{
  name = "database"
}}
resource "aws_secretsmanager_secret" "ledger" {{
  name = "ledger"
}}
""")
    terraform.ready(str(tmp_path))
    done = terraform.run("validate", "-no-color", folder=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_keep_what_they_promise(terraform):
    terraform.ready(".")
    done = terraform.run("test", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_variables_and_outputs_are_typed_and_described(configuration):
    for name, body in _blocks("variable", _text(configuration, "variables.tf")).items():
        assert re.search(r"^  description = \S", body, re.M), f"{configuration}: variable {name}"
        assert re.search(r"^  type +=", body, re.M), f"{configuration}: variable {name}"
    for name, body in _blocks("output", _text(configuration, "outputs.tf")).items():
        assert re.search(r"^  description = \S", body, re.M), f"{configuration}: output {name}"


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_versions_are_pinned(configuration):
    text = _text(configuration, "versions.tf")
    assert 'required_version = ">= 1.9"' in text
    if any(
        word in _text(configuration, "main.tf") for word in ('resource "aws_', 'data "aws_', 'provider "aws"')
    ):
        assert 'version = ">= 6.25, < 7"' in text


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_readme_tells_every_variable_and_output(configuration):
    readme = _text(configuration, "README.md")
    for kind in ("variable", "output"):
        file = f"{kind}s.tf"
        for name in _blocks(kind, _text(configuration, file)):
            assert f"| `{name}` |" in readme, f"{configuration}/README.md lacks {kind} {name}"


def test_the_cost_table_adds_up():
    rows = re.findall(
        r"^\| (.+?) \| ([\d.,]+) .*? \| \$([\d.]+) .*? \| \$([\d.,]+) \|$",
        _text("examples/minimal", "README.md"),
        re.M,
    )
    total = re.search(
        r"^\| \*\*sum\*\* \|.*\| \*\*\$([\d.,]+)\*\* \|$", _text("examples/minimal", "README.md"), re.M
    )
    assert len(rows) >= 5
    assert total is not None
    for what, amount, price, cost in rows:
        assert float(amount.replace(",", "")) * float(price) == pytest.approx(float(cost), abs=0.006), what
    assert sum(float(row[3]) for row in rows) == pytest.approx(float(total[1]), abs=0.006)
