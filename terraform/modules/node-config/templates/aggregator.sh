#!/usr/bin/env bash
# ebbflow-aggregator: serves the cluster's trainings until the ledger or SIGTERM has its tensors moved to others.
set -euo pipefail
set -a
. /etc/ebbflow/node.env
set +a
token=$(curl -sSf --max-time 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
  http://169.254.169.254/latest/api/token)
about() { curl -sSf --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $token" "http://169.254.169.254/latest/meta-data/$1"; }
host=$(about local-ipv4)
name=$(about instance-id)
export AWS_DEFAULT_REGION=$EBBFLOW_REGION EBBFLOW_HOME=/var/lib/ebbflow
# read now and written nowhere
EBBFLOW_LEDGER=$(aws secretsmanager get-secret-value --secret-id "$EBBFLOW_LEDGER_SECRET" --query SecretString --output text)
export EBBFLOW_LEDGER
# named and known to the capacity loop by its instance; the agent writes the deadline before it signals
exec /opt/ebbflow/bin/python -P -m ebbflow.infra.aggregation.shared_process "$name" "$EBBFLOW_AGGREGATION_CLUSTER" "$host" \
  "$(nproc)" "$name" /var/lib/ebbflow/aggregator-drained /run/ebbflow/draining
