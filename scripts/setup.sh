#!/usr/bin/env bash
# setup.sh PYTHON VENV: a virtual environment with the locked packages and Ebbflow itself, editable.
set -euo pipefail
python=$1 venv=$2

fail() { echo "error: $1" >&2; exit 1; }

command -v "$python" >/dev/null || fail "$python is missing; install Python 3.11 or later, or run make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or later is needed, $("$python" --version) found; run make PYTHON=/path/to/python3.11"

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
  else
    fail "Python's venv module is missing; install it (Debian, Ubuntu: apt-get install python3-venv)"
  fi
fi

echo "setting up $venv (once)"
"$python" -m venv "$venv"
pip() { "$venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --require-hashes --requirement requirements.lock --requirement "$(scripts/torch-lock.sh "$venv")"
pip install --no-deps --no-build-isolation --editable .

# A folder named ebbflow beside a user's script, such as this checkout, would hide the root of an editable install: there
# Python takes a folder for a package before it asks setuptools' finder.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/.typing/first" > "$site/ebbflow_first.pth"
