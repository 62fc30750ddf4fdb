#!/usr/bin/env bash
# environment-test.sh NAME TESTS [PYTEST ARGUMENTS]: tests in an environment of their own, .venv-NAME, made from
# requirements-NAME.lock. The first time it installs some 150 packages.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
venv=.venv-$name
lock=requirements-$name.lock

if ! cmp -s "$lock" "$venv/installed.lock"; then
  echo "setting up $venv (once)"
  "${PYTHON:-python3}" -m venv --clear "$venv"
  torch=()
  if [ "$name" != connect ]; then torch=(--requirement "$(scripts/torch-lock.sh "$venv")"); fi
  "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes \
    --requirement "$lock" "${torch[@]}"
  cp "$lock" "$venv/installed.lock"
fi

if [ ! "$venv/.installed" -nt pyproject.toml ]; then # which maps the packages
  # the lock has what Ebbflow needs here; with Airflow that is not all (it and Prefect exclude each other)
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
  touch "$venv/.installed"
fi

exec "$venv/bin/python" -m pytest --rootdir . --confcutdir tests -m "" --timeout 900 "$@"
