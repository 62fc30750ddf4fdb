#!/usr/bin/env bash
# torch-lock.sh VENV: which lock PyTorch comes from. The build for processors alone where there is no GPU and pip is
# configured to find it, else the package index's own, which on Linux brings CUDA's libraries. EBBFLOW_TORCH=cpu|cuda decides.
set -euo pipefail
cpu=requirements-torch-cpu.lock cuda=requirements-torch.lock
case ${EBBFLOW_TORCH:-} in
  cpu) echo $cpu ;;
  cuda) echo $cuda ;;
  '') if [ ! -e /dev/nvidiactl ] && "$1/bin/pip" --quiet --disable-pip-version-check install --dry-run --no-deps \
           --require-hashes --requirement $cpu >/dev/null 2>&1; then echo $cpu; else echo $cuda; fi ;;
  *) echo "error: EBBFLOW_TORCH must be cpu or cuda; got $EBBFLOW_TORCH" >&2; exit 1 ;;
esac
