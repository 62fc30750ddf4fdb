#!/usr/bin/env bash
# airflow-test.sh [PYTEST ARGUMENTS]: the Airflow provider in a real Airflow, in an environment of its own (.venv-airflow,
# or VENV_AIRFLOW). The first time it installs some 150 packages.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV_AIRFLOW:-.venv-airflow}
lock=requirements-airflow.lock

if ! cmp -s "$lock" "$venv/installed.lock"; then
  echo "setting up $venv (once)"
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes \
    --requirement "$lock" --requirement "$(scripts/torch-lock.sh "$venv")"
  cp "$lock" "$venv/installed.lock"
fi

if [ ! "$venv/.installed" -nt pyproject.toml ]; then # which maps the packages
  # Airflow and Prefect exclude each other (FastAPI), so Ebbflow comes without its dependencies
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
  touch "$venv/.installed"
fi

exec "$venv/bin/python" -m pytest --rootdir . --confcutdir tests -m "" --timeout 600 "${@:-tests/airflow_provider}"
