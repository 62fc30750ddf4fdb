"""Bad input of every kind for every option: a message that names it, an exit status of the table, nothing left."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.cases import BASES, Case, commands, every_case, sample
from tests.bad_input.runner import STATUSES, nothing_starts, run_case
from tests.bad_input.workplace import Workplace
from tests.real_command import real_command

SEED = int(os.environ.get("EBBFLOW_BAD_INPUT_SEED", "19"))
IN_PROCESS, IN_PARTS, REAL = 500, 5, 25
_UNSET = (
    "PREFECT_API_URL",
    "EBBFLOW_HOME",
    "EBBFLOW_MEMORY_DIR",
    "EBBFLOW_LEDGER",
    "EBBFLOW_CONFIG",
    "EBBFLOW_TERRAFORM_OUTPUT",
    "EBBFLOW_SHARE",
)
_SET = {
    "COLUMNS": "400",  # what is bad is not to be broken into lines
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Return a working directory and a home of its own, to which this process and its children go."""
    before = Path.cwd()
    for name in _UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in _SET.items():
        monkeypatch.setenv(name, value)
    made = Workplace(tmp_path)
    monkeypatch.setenv("HOME", str(made.home))
    yield made
    os.chdir(before)


def test_every_command_has_arguments_to_start_from() -> None:
    assert set(commands()) == set(BASES)


def test_every_option_that_takes_a_value_has_cases() -> None:
    having = {(case.command, case.option) for case in every_case()}
    for words, command in commands().items():
        for parameter in command.params:
            positional = parameter.param_type_name == "argument"
            if positional or not (parameter.is_flag or parameter.name == "help"):
                option = parameter.metavar if positional else max(parameter.opts, key=len)
                assert (words, option) in having, (words, option)


def test_the_arguments_to_start_from_are_right(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cases would show nothing: each must be refused for what is bad in it."""
    needed = (
        "local",
        "fleet",
        "report",
        "capacity s",
        "apps ",
        "ledger v",
        "demo",
        "doctor",
        "memory stop",
        "aggregation drain",
    )  # what is there
    with nothing_starts():
        for words, base in BASES.items():
            if words.startswith(needed):
                continue
            # a case that is surely bad and is not: the only finding must be that it was accepted
            case = Case(words, base, "nothing", "--nothing", "as it should be")
            found = run_case(case, workplace, monkeypatch)
            assert found is not None
            assert [one.split(" ")[0] for one in found.problems] == ["accepted"], str(found)


@pytest.mark.parametrize("part", range(IN_PARTS))
def test_bad_input_in_this_process(part: int, workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = []
    with nothing_starts():
        for case in sample(IN_PROCESS, SEED)[part::IN_PARTS]:
            found = run_case(case, workplace, monkeypatch)
            if found is not None:
                findings.append(str(found))
    assert not findings, "\n\n".join([f"{len(findings)} findings", *findings])


# those that would start or ask something where their input was right after all
_QUIET = (
    "query",
    "explain",
    "run",
    "train",
    "tune",
    "ledger",
    "simulate training",
    "capacity",
    "apps",
    "local status",
    "report",
)


@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_bad_input_of_the_real_command(
    workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = [case for case in sample(10**6, SEED + 1) if case.surely and case.command.startswith(_QUIET)]
    cases = [case for case in cases if not any("\0" in word or "\udcff" in word for word in case.words)][
        :REAL
    ]
    assert len(cases) == REAL
    findings = []
    with real_command(tmp_path_factory.mktemp("said")) as command:
        for case in cases:
            bad = workplace.work / case.bad
            if case.place is not None:
                case.place(bad)
            before = workplace.listing()
            done = command.run(case.words)
            said = done.stdout + done.stderr
            if done.returncode not in STATUSES or done.returncode not in case.statuses:
                findings.append(f"{case}\n    status {done.returncode}: {said[-1500:]}")
            if re.search(r"Traceback \(most recent|codec can't|Errno \d+\]", said):
                findings.append(f"{case}\n    {said[-1500:]}")
            if workplace.listing() != before:
                findings.append(f"{case}\n    left something behind")
            workplace.reset()
    assert not findings, "\n\n".join(findings)
