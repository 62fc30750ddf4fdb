#!/usr/bin/env bash
# ebbflow-drain SECONDS: the node finishes its work and leaves within SECONDS.
set -euo pipefail
exec /opt/ebbflow/bin/python -P -m ebbflow.infra.aws.node_agent --drain "$1"
