"""Checks the locks without a network: exact pins with hashes, no hosts, nothing missing, licences that are known.

python scripts/check_lock.py        in the environment that the locks were installed into; exit status 1 with findings
python scripts/check_lock.py --why  which packages ask for each locked one

Vulnerabilities are another question: ``make audit`` asks a database for them.
"""

import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PIN = re.compile(
    r"(?P<name>[a-z0-9]+(?:[-._][a-z0-9]+)*)(?:\[[a-z0-9,. _-]+\])?==(?P<version>[0-9][A-Za-z0-9.]*(?:\+[a-z0-9.]+)?)"
    r"(?: ; (?P<marker>[^\\]+?))?(?P<hashes>(?: +--hash=sha256:[0-9a-f]{64})+)"
)
LOCKS = ("requirements.lock", "requirements-torch.lock")
"""What an installation has; where there is no GPU, ``CPU_LOCK`` stands in for the second."""

CPU_LOCK = "requirements-torch-cpu.lock"

ENVIRONMENTS = ("airflow", "frameworks", "connect")
"""Those that tests have of their own."""

ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "LGPL-3.0-only",  # as a library of its own, which users can replace
        "MIT",
        "MIT-0",
        "MPL-2.0",  # its own files only
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
"""SPDX names of licences that a package in the lock may have."""

NAMES = {
    "apache 2": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "asl 2.0": "Apache-2.0",
    "bsd-2": "BSD-2-Clause",
    "2-clause bsd": "BSD-2-Clause",
    "bsd": "BSD-3-Clause",
    "mozilla public license 2": "MPL-2.0",
    "mpl-2.0": "MPL-2.0",
    "mpl 2.0": "MPL-2.0",
    "python software foundation": "PSF-2.0",
    "psf": "PSF-2.0",
    "isc": "ISC",
    "unlicense": "Unlicense",
    "mit": "MIT",
}
"""How older packages write it, the more telling first."""

EXCEPTIONS = {
    "text-unidecode": "Artistic License or GPL, as one chooses: the former is permissive",
}
"""Packages whose metadata do not say it in a way that can be read, and why they may be there."""


PYTHONS = ("3.11.0", "3.11.99", "3.12.99", "3.13.99", "3.14.99")
"""Pythons that one lock is for: a package may be needed by only some of them, as what 3.11.3 brought itself."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the lock."""

    package: str
    what: str

    def __str__(self) -> str:
        return f"{self.package}: {self.what}"


def pins(lines: Iterable[str]) -> tuple[dict[str, Version], list[Finding]]:
    """Return the pinned versions by canonical name, and what is no exact pin with hashes or stands twice.

    What has extras may stand once more without them, equal in all else.
    """
    found: dict[str, Version] = {}
    wrong: list[Finding] = []
    seen: set[str] = set()
    for number, text in _joined(lines):
        match = PIN.fullmatch(text)
        if match is None:
            rule = "must be name==version, a marker if any, and sha256 hashes; got"
            wrong.append(Finding(f"line {number}", f"{rule} {text[:80]!r}"))
            continue
        name = canonicalize_name(match["name"])
        base = re.sub(r"^([^[=]+)\[[^]]*\]", r"\1", text)
        if name in found and (text == base or base not in seen):
            wrong.append(Finding(name, "is pinned twice"))
        seen = seen | {text} if text == base else seen - {base}
        found[name] = Version(match["version"])
    return found, wrong


def elsewhere(root: Path, *names: str) -> set[str]:
    """Return the pins whose marker leaves them out here: they are for other Pythons or systems."""
    matches = (
        PIN.fullmatch(text)
        for name in names
        for _, text in _joined((root / name).read_text(encoding="utf-8").splitlines())
    )
    return {
        canonicalize_name(match["name"])
        for match in matches
        if match and match["marker"] and not Marker(match["marker"]).evaluate()
    }


def _joined(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Return entries with the number of their first line; one goes on where a line ends with a backslash."""
    first, parts = 0, list[str]()
    for number, line in enumerate(lines, 1):
        first = first or number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            yield first, " ".join(parts)
            first, parts = 0, []
    if parts:
        yield first, " ".join(parts)


def read(root: Path, *names: str) -> tuple[dict[str, Version], list[Finding]]:
    """Return the pins of several locks together."""
    return pins(line for name in names for line in (root / name).read_text(encoding="utf-8").splitlines())


def builds(root: Path = ROOT) -> list[Finding]:
    """Return what is wrong with the lock of PyTorch for processors alone: one ``+cpu`` build of the same version."""
    locked, wrong = read(root, CPU_LOCK)
    other, _ = read(root, "requirements-torch.lock")
    version = locked.pop("torch", None)
    if version is None or version.local != "cpu" or version.public != str(other.get("torch")):
        wrong.append(Finding("torch", f"must be {other.get('torch')}+cpu in {CPU_LOCK}; it is {version}"))
    return wrong + [Finding(name, f"is in {CPU_LOCK}, which is PyTorch's alone") for name in locked]


def wanted(project: Mapping[str, object]) -> list[Requirement]:
    """Return what ``[project]`` of ``pyproject.toml`` asks for, its own name left out, with all extras but those that
    have an environment of their own."""
    name = canonicalize_name(str(project["name"]))
    texts = list(project.get("dependencies", []))  # type: ignore[call-overload]
    extras: Mapping[str, list[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
    for extra, asked in extras.items():
        if extra not in ENVIRONMENTS:
            texts += asked
    requirements = [Requirement(text) for text in texts]
    for one in requirements:
        if canonicalize_name(one.name) == name and (unknown := one.extras - set(extras)):
            raise ValueError(f"{one} asks for an extra that there is not: {', '.join(sorted(unknown))}")
    return [one for one in requirements if canonicalize_name(one.name) != name]


def unmet(requirements: Iterable[Requirement], locked: Mapping[str, Version], by: str) -> list[Finding]:
    """Return the requirements that the lock lacks or contradicts."""
    wrong = []
    for one in requirements:
        version = locked.get(canonicalize_name(one.name))
        if version is None:
            wrong.append(
                Finding(canonicalize_name(one.name), f"is asked for by {by} ({one}) and not in the lock")
            )
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(
                Finding(canonicalize_name(one.name), f"is {version} in the lock, and {by} asks for {one}")
            )
        if one.url:
            wrong.append(Finding(canonicalize_name(one.name), f"comes from an address: {one.url}"))
    return wrong


def asked_extras(locked: Mapping[str, Version], first: Iterable[Requirement]) -> dict[str, set[str]]:
    """Return which extras of which locked packages somebody asks for, by canonical name."""
    asked: dict[str, set[str]] = {}
    waiting = list(first)
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        new = set(one.extras) - asked.get(name, set())
        if name in asked and not new:
            continue
        asked.setdefault(name, set()).update(new)
        if name in locked and (installed := _installed(name)) is not None:
            waiting += requirements_of(installed, asked[name])
    return asked


def requirements_of(installed: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """Return what an installed package asks for with these of its extras, on this system and any of ``PYTHONS``."""
    found = []
    for text in installed.requires or ():
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue  # pip would ignore it, too
        if one.marker is None or any(
            one.marker.evaluate(
                {
                    "extra": extra,
                    "python_version": ".".join(python.split(".")[:2]),
                    "python_full_version": python,
                }
            )
            for extra in ("", *extras)
            for python in PYTHONS
        ):
            found.append(one)
    return found


def closure(
    project: Mapping[str, object], locked: Mapping[str, Version], absent: Collection[str] = ()
) -> list[Finding]:
    """Return what installed packages need and the lock lacks, what nobody needs, and what is another version here.

    ``absent``: pins whose marker leaves them out here.
    """
    wrong: list[Finding] = []
    asked = asked_extras(locked, wanted(project))
    for name, version in locked.items():
        installed = _installed(name)
        if installed is None:
            if name in asked and name not in absent:
                wrong.append(Finding(name, "is in the lock and not installed: run make test once"))
            continue
        if Version(installed.version).public != version.public:
            wrong.append(
                Finding(name, f"is {version} in the lock and {installed.version} in this environment")
            )
            continue
        if name not in asked:
            wrong.append(Finding(name, "is needed by nothing that is asked for"))
        wrong += unmet(requirements_of(installed, asked.get(name, ())), locked, name)
    return wrong


def licence(installed: Distribution) -> str:
    """Return what a package says of its licence: an SPDX expression where it gives one, else its own words."""
    data = installed.metadata
    if expression := data.get("License-Expression"):
        return expression
    classified = [
        entry.split(" :: ")[-1]
        for entry in data.get_all("Classifier") or ()
        if entry.startswith("License :: OSI Approved :: ")
    ]
    if classified:
        return " AND ".join(_spdx(entry) for entry in classified)
    text = (data.get("License") or "").strip()
    return _spdx(text.splitlines()[0]) if text else ""


def licences(locked: Iterable[str], exceptions: Mapping[str, str] = EXCEPTIONS) -> list[Finding]:
    """Return the packages whose licence is not allowed, and exceptions that are none any more."""
    wrong = []
    needless = set(exceptions)
    for name in locked:
        installed = _installed(name)
        if installed is None:
            continue
        said = licence(installed)
        if permitted(said):
            continue
        if name in exceptions:
            needless.discard(name)
            continue
        wrong.append(
            Finding(name, f"its licence is not in the list of those allowed: {said or 'it names none'!r}")
        )
    wrong += [Finding(name, "needs no exception any more") for name in sorted(needless)]
    return wrong


def permitted(expression: str) -> bool:
    """Tell whether an SPDX expression can be met by allowed licences alone; OR leaves the choice to us."""
    plain = re.sub(r"\s+WITH\s+[\w.-]+", "", expression.replace("(", " ").replace(")", " "))
    alternatives = re.split(r"\s+OR\s+", plain, flags=re.IGNORECASE)
    return any(
        all(part.strip() in ALLOWED for part in re.split(r"\s+AND\s+|;|,", one, flags=re.IGNORECASE))
        for one in alternatives
    )


def _spdx(text: str) -> str:
    """Return the SPDX name of a licence that is written in words, or the words."""
    if text in ALLOWED:
        return text
    low = text.lower()
    return next((spdx for words, spdx in NAMES.items() if re.search(rf"\b{re.escape(words)}", low)), text)


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def check(root: Path = ROOT) -> list[Finding]:
    """Return all findings about the lock in ``root``."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked, wrong = read(root, *LOCKS)
    wrong += unmet(wanted(project), locked, "pyproject.toml")
    wrong += closure(project, locked, elsewhere(root, *LOCKS))
    wrong += licences(locked)
    return wrong + builds(root) + [one for name in ENVIRONMENTS for one in environment(name, root)]


def why(root: Path = ROOT) -> dict[str, list[str]]:
    """Return who asks for each installed package of the locks, by name: ``pyproject.toml``, or other packages."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked, _ = read(root, *LOCKS)
    asked = asked_extras(locked, wanted(project))
    by: dict[str, list[str]] = {name: [] for name in locked if _installed(name)}
    for one in wanted(project):
        by.get(canonicalize_name(one.name), []).append("pyproject.toml")
    for name in by:
        for one in requirements_of(_installed(name), asked.get(name, ())):  # type: ignore[arg-type]
            if (needed := canonicalize_name(one.name)) in by:
                by[needed].append(name)
    return {name: list(dict.fromkeys(who)) for name, who in sorted(by.items())}


def environment(name: str, root: Path = ROOT) -> list[Finding]:
    """Return what is wrong with the lock of an environment of its own; it is not installed here."""
    asked = [
        Requirement(line)
        for line in (root / f"requirements-{name}.in").read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked += [Requirement(text) for text in project["optional-dependencies"].get(name, ())]
    locked, wrong = read(root, f"requirements-{name}.lock", "requirements-torch.lock")
    return wrong + unmet(asked, locked, f"requirements-{name}.in")


if __name__ == "__main__":
    if sys.argv[1:] == ["--why"]:
        for package, who in why().items():
            print(f"{package}: {', '.join(who)}")
        sys.exit()
    findings = check()
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"requirements: {len(findings) or 'no'} findings")
    sys.exit(bool(findings))
