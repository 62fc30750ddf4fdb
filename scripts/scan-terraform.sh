#!/usr/bin/env bash
# scan-terraform.sh [VENV]: security findings of the Terraform modules, by checkov; fails at any without a reason.
#
# checkov needs an environment of its own (default .cache/checkov, made when it is missing), because it asks for other
# versions of boto3 and packaging than Ebbflow does. An exception is a comment within its resource:
#   #checkov:skip=CKV_AWS_18:why this one is right as it is
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.cache/checkov}

if [ ! -x "$venv/bin/checkov" ]; then
  echo "setting up $venv (once)"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check checkov==3.3.30
fi

"$venv/bin/checkov" --directory terraform --framework terraform secrets --compact --quiet --skip-download

# an exception without a reason explains nothing
if grep -rnE --include='*.tf' 'checkov:skip=[A-Z0-9_]+(:[[:space:]]*)?$' terraform; then
  echo "error: the exceptions above give no reason" >&2
  exit 1
fi
echo "no findings without a reason"
