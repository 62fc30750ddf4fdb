"""Pins the newest versions that work together, each with the hashes of its files.

python scripts/lock.py [NAME]    what `make lock` and, for airflow, frameworks or connect, `make lock-NAME` run; needs
                                 uv and the index

requirements.lock            what every installation has, for all Pythons and systems that the project is for
requirements-torch.lock      PyTorch as the index has it: on Linux with CUDA's libraries
requirements-torch-cpu.lock  PyTorch for processors alone, from wherever pip is configured to find ``+cpu`` builds
requirements-airflow.lock    the environment of the Airflow provider, beside one of the two PyTorches
requirements-frameworks.lock the environment of trainers of other frameworks, beside one of the two PyTorches
requirements-connect.lock    the environment of Spark Connect's client, which needs another protobuf; without PyTorch
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_TORCH = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)==")
"""What comes with one build of PyTorch and not with the other."""

ENVIRONMENTS = {
    "airflow": ("requirements-airflow.in",),
    "frameworks": (
        "--extra", "train", "--constraint", "requirements.lock", "pyproject.toml", "requirements-frameworks.in",
    ),
    "connect": ("--extra", "connect", "pyproject.toml", "requirements-connect.in"),
}  # fmt: skip
"""What the environments of their own are made from."""

OTHERS = {"connect": re.compile(r"protobuf==")}
"""What an environment of its own has in another version than ``requirements.lock``, and is for."""

_ENTRY = re.compile(r"^[a-z0-9].*(?:\n    --hash=.*)*", re.MULTILINE)


def compiled(*arguments: str) -> list[str]:
    """Return the entries that uv pins for ``arguments``, each with its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock"
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--upgrade"]
        command += [
            "--fork-strategy=fewest",  # one version of a package for all Pythons
            "--generate-hashes",
            "--no-strip-extras",
            "--no-header",
            "--no-annotate",
            "--no-emit-index-url",
            "--no-sources",
        ]
        subprocess.run([*command, "--output-file", str(out), *arguments], check=True, cwd=ROOT, timeout=900)
        entries = _ENTRY.findall(out.read_text(encoding="utf-8"))
        return [one for e in entries if "; sys_platform == 'win32'" not in e for one in with_base(e)]


def with_base(entry: str) -> list[str]:
    """Return ``entry``, and one without its extras: pip with hashes may meet either of them first."""
    base = re.sub(r"^([^[=\s]+)\[[^]]*\]", r"\1", entry)
    return [entry] if base == entry else [base, entry]


def cpu_build(entries: list[str]) -> str:
    """Return the entry of PyTorch's ``+cpu`` build of the same version, by the hashes of the files that pip finds."""
    version = next(e for e in entries if e.startswith("torch==")).split()[0]
    hashes = set()
    with tempfile.TemporaryDirectory() as folder:
        for python in ("3.11", "3.12", "3.13"):
            where = Path(folder) / python
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--python-version", python, "--dest", str(where), f"{version}+cpu"]
            if subprocess.run(command, check=False, timeout=900, stderr=subprocess.DEVNULL).returncode == 0:
                digests = subprocess.run(
                    [sys.executable, "-m", "pip", "hash", *map(str, where.iterdir())],
                    check=True,
                    timeout=300,
                    capture_output=True,
                    text=True,
                ).stdout
                hashes |= set(re.findall(r"--hash=\S+", digests))
    if not hashes:
        raise SystemExit(
            f"error: pip finds no {version}+cpu; configure where it is (--find-links or an extra index)"
        )
    return " \\\n    ".join([f"{version}+cpu", *sorted(hashes)])


def constraints(name: str, folder: Path) -> list[str]:
    """Return the arguments that hold an environment of its own to the versions that ours has, but for ``OTHERS``;
    a file of them is written into ``folder``."""
    told = ["--constraint", "requirements-torch.lock"]
    if name in OTHERS:
        entries = _ENTRY.findall((ROOT / "requirements.lock").read_text(encoding="utf-8"))
        kept = folder / "constraints"
        kept.write_text("\n".join(e for e in entries if not OTHERS[name].match(e)) + "\n", encoding="utf-8")
        told += ["--constraint", str(kept)]
    return told


def write(name: str, entries: list[str]) -> None:
    """Replace a lock by these entries."""
    beside = ROOT / f".{name}.new"
    beside.write_text("\n".join(entries) + "\n", encoding="utf-8")
    beside.replace(ROOT / name)


def main() -> None:
    """Write the locks."""
    name, *more = sys.argv[1:] or [""]
    if name in ENVIRONMENTS:
        with tempfile.TemporaryDirectory() as folder:
            entries = compiled(*more, *constraints(name, Path(folder)), *ENVIRONMENTS[name])
        write(f"requirements-{name}.lock", [e for e in entries if not OF_TORCH.match(e)])
        return
    entries = compiled("--extra", "dev", *sys.argv[1:], "pyproject.toml")
    build = cpu_build(entries)
    write(
        "requirements.lock",
        [e for e in entries if not OF_TORCH.match(e) and not e.startswith("prefect-ebbflow==")],
    )
    write("requirements-torch.lock", [e for e in entries if OF_TORCH.match(e)])
    write("requirements-torch-cpu.lock", [build])


if __name__ == "__main__":
    main()
