"""``scripts/tools.sh``: what tests need is installed, or named at once; no test is skipped for want of it."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "scripts" / "tools.sh"
PLAIN = ("bash", "sed", "awk", "xargs", "mktemp", "rm", "tail", "head", "cat", "mkdir", "touch", "chmod")
RIGHTS = re.compile(
    r"root|may not mount|right to mount|cannot mount|control group|machine has no network|there is no GPU"
)
"""What a test may be skipped for: a right, an address or a GPU that whoever runs it, or the machine, has not."""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the folder of all programs of a machine on which none of the tools is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PLAIN:
        found = subprocess.run(
            ["/bin/sh", "-c", f"command -v {name}"], capture_output=True, text=True, check=True
        )
        (folder / name).symlink_to(found.stdout.strip())
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{path.parent}/bash\n{text}\n")
    path.chmod(0o755)


APT = """
echo apt-get "$@" >>{log}
echo much talk
[ "$1" = install ] || exit 0
{fails}
for word in "$@"; do
  name={bin}/${{word/openjdk*/java}}
  printf '#!/bin/sh\\necho \\"version \\\\\\"21.0\\\\\\"\\" >&2\\n' >"$name"
  chmod +x "$name"
done
"""


def root_of_debian(machine: Path, *, works: bool = True) -> None:
    """Let the user be root, and apt-get install a program by each package's name, or fail loudly."""
    program(machine / "id", "echo 0")
    program(machine / "apt-cache", '[ "$2" != openjdk-17-jre-headless ]')
    fails = "" if works else "echo E: no network; exit 100"
    program(machine / "apt-get", APT.format(log=machine.parent / "asked", bin=machine, fails=fails))


def tools(machine: Path, *names: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [machine / "bash", TOOLS, *names],
        env={"PATH": str(machine), "HOME": str(machine.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def asked(machine: Path) -> list[str]:
    file = machine.parent / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_what_is_missing_is_installed_at_once_and_quietly_and_nothing_the_next_time(machine: Path) -> None:
    root_of_debian(machine)
    code, said, wrong = tools(machine, "chromium", "java")
    assert (code, wrong) == (0, "")
    packages = "chromium fonts-dejavu-core openjdk-21-jre-headless"
    assert said == f"installing {packages} (once)\n"
    assert asked(machine) == [
        "apt-get update -qq",
        f"apt-get install -y -qq --no-install-recommends {packages}",
    ]
    assert tools(machine, "chromium", "java") == (0, "", "")
    assert len(asked(machine)) == 2


def test_without_the_right_to_install_one_error_names_all_that_is_missing_and_the_command(
    machine: Path,
) -> None:
    program(machine / "id", "echo 1000")
    code, said, wrong = tools(machine, "chromium", "mount", "terraform")
    assert (code, said) == (1, "")
    assert "error: 3 of the needed programs are missing" in wrong
    assert "apt-get install --no-install-recommends chromium fonts-dejavu-core mount\n" in wrong
    assert re.search(r"terraform: for .*; Terraform 1\.9 or later from https://\S+, in PATH\n", wrong)


def test_an_installation_that_fails_is_an_error_with_what_apt_said(machine: Path) -> None:
    root_of_debian(machine, works=False)
    code, _, wrong = tools(machine, "mount")
    assert code == 1
    assert "E: no network" in wrong
    assert "error: 1 of the needed programs are missing" in wrong


def test_an_old_java_is_none(machine: Path) -> None:
    program(machine / "id", "echo 1000")
    program(machine / "java", "echo 'openjdk version \"11.0.2\"' >&2")
    assert tools(machine, "java")[0] == 1
    program(machine / "java", "echo 'openjdk version \"17.0.2\"' >&2")
    assert tools(machine, "java") == (0, "", "")


def test_a_tool_that_there_is_not_is_named(machine: Path) -> None:
    code, _, wrong = tools(machine, "jave")
    assert code == 2
    assert "no tool is called jave; there are: java postgres chromium" in wrong


def test_tests_and_measurements_begin_with_all_tools() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "bench", "chaos"):
        assert re.search(rf"^{target}: \$\(SETUP\) tools$", makefile, re.M), target
    assert "\ntools:\n\t@scripts/tools.sh\n" in makefile


def test_no_test_is_skipped_for_what_could_be_installed() -> None:
    """Packages are in the lock, programs in ``tools.sh``: without them a test fails, and says what is missing."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"importorskip|\.skip", text) else ():
            name = node.func if isinstance(node, ast.Call) else None
            called = name.attr if isinstance(name, ast.Attribute) else ""
            if called == "importorskip" or (
                called in ("skip", "skipif", "skipTest") and not RIGHTS.search(ast.unparse(node))
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_programs_of_ours_do_not_import_from_the_present_folder() -> None:
    """``python -m`` would put it first: a file there that is called like a package would be run."""
    found = []
    for folder in ("flows", "infra", "planners", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if '"-m"' in text else ():
                words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
                values = [word.value if isinstance(word, ast.Constant) else None for word in words]
                if "-m" in values[:3] and "-P" not in values and "executable" in ast.unparse(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
