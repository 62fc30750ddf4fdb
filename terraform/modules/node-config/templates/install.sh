#!/usr/bin/env bash
# ebbflow-install UNIT...: installs what the node's role needs, in pinned versions, then starts the units.
set -euo pipefail
set -a
. /etc/ebbflow/node.env
set +a
home=/opt/ebbflow

finish() {
  local status=$?
  if [ "$status" = 0 ]; then return; fi
  echo "ebbflow-install: ended with status $status; this node is of no use" > /dev/console
  # a node of a pool costs money and does nothing: its group starts another
  if [ "$EBBFLOW_TERMINATE_WHEN_BROKEN" = yes ]; then shutdown -h +1 "Ebbflow could not be installed"; fi
}
trap finish EXIT # not ERR, which functions do not inherit and unset variables do not raise

again() { # the mirror may be busy when twenty nodes start at once
  for try in 1 2 3 4; do
    if "$@"; then return 0; fi
    sleep $((try * 5 + RANDOM % 10))
  done
  "$@"
}

# Amazon Linux takes packages of the release that the image was made of, so the image pins their versions.
packages=(python3.11)
if [ "$EBBFLOW_JAVA_PACKAGE" != none ]; then packages+=("$EBBFLOW_JAVA_PACKAGE"); fi
again dnf install --assumeyes --quiet "${packages[@]}"

id ebbflow > /dev/null 2>&1 || useradd --system --home-dir /var/lib/ebbflow --create-home --shell /sbin/nologin ebbflow
install -d -m 0700 -o ebbflow -g ebbflow /var/lib/ebbflow/spark /var/lib/ebbflow/spark/recovery /var/lib/ebbflow/work
install -d /etc/ebbflow/spark

if [ "$EBBFLOW_ROLE" = gpu-trainer ]; then
  nvidia-smi > /dev/null # the drivers come with the image
fi

[ -x "$home/bin/python" ] || python3.11 -m venv "$home"
options=(--quiet --disable-pip-version-check --no-input)
if [ -f /etc/ebbflow/constraints.txt ]; then options+=(--constraint /etc/ebbflow/constraints.txt); fi
if [ "$EBBFLOW_EXTRA_INDEX" != none ]; then options+=(--extra-index-url "$EBBFLOW_EXTRA_INDEX"); fi
read -r -a wanted <<< "$EBBFLOW_PACKAGES"
# What is installed as root is the wheel that was pinned, whoever can write where it comes from.
cache=/var/cache/ebbflow/package
rm -rf "$cache"
mkdir -p -m 0700 "$cache"
again aws s3 cp --only-show-errors "${wanted[0]}" "$cache/$(basename "${wanted[0]}")"
wheels=("$cache"/*.whl)
if [ "$(sha256sum "${wheels[0]}" | cut -d ' ' -f 1)" != "$EBBFLOW_SHA256" ]; then
  echo "ebbflow-install: ${wanted[0]} is not the wheel that ebbflow_sha256 pins" >&2
  exit 1
fi
wanted[0]=${wheels[0]}
# /tmp is in memory, half of it at most, and CUDA's wheels are gigabytes
TMPDIR=/var/tmp again "$home/bin/pip" install "${options[@]}" "${wanted[@]}"

if [ "$EBBFLOW_JAVA_PACKAGE" != none ]; then
  spark=$("$home/bin/python" -c 'import os, pyspark; print(os.path.dirname(pyspark.__file__))')
  ln -sfn "$spark" "$home/spark"
  chmod +x "$spark"/bin/* "$spark"/sbin/* 2> /dev/null || true
  for package in $EBBFLOW_SPARK_PACKAGES; do
    IFS=: read -r organisation module version <<< "$package"
    again java -cp "$home/spark/jars/*" org.apache.ivy.Main -warn -cache /var/cache/ebbflow/ivy \
      -dependency "$organisation" "$module" "$version" -confs default -types jar \
      -retrieve "$home/spark/jars/[artifact]-[revision](-[classifier]).[ext]"
  done
fi

systemctl daemon-reload
for unit in "$@"; do systemctl enable --now "$unit"; done
