#!/usr/bin/env bash
# ebbflow-prefect server|worker: runs one of them with secrets that are read now and written nowhere.
set -euo pipefail
set -a
. /etc/ebbflow/node.env
set +a
export DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_HOME=/var/lib/ebbflow/prefect
export AWS_DEFAULT_REGION=$EBBFLOW_REGION

secret() { aws secretsmanager get-secret-value --secret-id "$1" --query SecretString --output text; }

wait_for() { # what another part writes when it is ready
  for _ in $(seq 60); do
    if "$@" 2> /dev/null; then return 0; fi
    sleep 10
  done
  "$@"
}

case "$1" in
  server)
    # the first server makes up the password, so that it is in no state file
    if ! problem=$(secret "$EBBFLOW_PREFECT_SECRET" 2>&1 > /dev/null); then
      case "$problem" in
        *ResourceNotFoundException*) ;;
        *) # a password that cannot be read now must not be replaced
          echo "$problem" >&2
          exit 1
          ;;
      esac
      made="ebbflow:$(head -c 24 /dev/urandom | base64 | tr -d '/+=')"
      aws secretsmanager put-secret-value --secret-id "$EBBFLOW_PREFECT_SECRET" \
        --secret-string file:///dev/stdin <<< "$made" > /dev/null
    fi
    PREFECT_SERVER_API_AUTH_STRING=$(secret "$EBBFLOW_PREFECT_SECRET" | tr -d '\n')
    database=$(secret "$EBBFLOW_DATABASE_SECRET")
    PREFECT_SERVER_DATABASE_CONNECTION_URL=$(
      /opt/ebbflow/bin/python -P -c '
import json, sys, urllib.parse
found = json.load(sys.stdin)
user, password = (urllib.parse.quote(found[key], safe="") for key in ("username", "password"))
print(f"postgresql+asyncpg://{user}:{password}@{sys.argv[1]}/prefect?ssl=require")
' "$EBBFLOW_DATABASE_ADDRESS" <<< "$database"
    )
    PREFECT_SERVER_UI_API_URL=$EBBFLOW_PREFECT_URL
    export PREFECT_SERVER_API_AUTH_STRING PREFECT_SERVER_DATABASE_CONNECTION_URL PREFECT_SERVER_UI_API_URL
    exec /opt/ebbflow/bin/prefect server start --host 0.0.0.0 --port 4200
    ;;
  worker)
    wait_for secret "$EBBFLOW_PREFECT_SECRET" > /dev/null
    PREFECT_API_AUTH_STRING=$(secret "$EBBFLOW_PREFECT_SECRET" | tr -d '\n')
    PREFECT_API_URL=$EBBFLOW_PREFECT_URL
    export PREFECT_API_AUTH_STRING PREFECT_API_URL PYSPARK_PYTHON=/opt/ebbflow/bin/python
    settings() {
      aws ssm get-parameter --with-decryption --name "$EBBFLOW_SETTINGS_PARAMETER" --query Parameter.Value --output text \
        > /var/lib/ebbflow/ebbflow.json
    }
    wait_for settings
    if [ -n "$EBBFLOW_SPARK_SECRET" ]; then # drivers start here, and the cluster asks for its secret
      /usr/local/sbin/ebbflow-spark conf
      export SPARK_CONF_DIR=/var/lib/ebbflow/spark/conf
    fi
    export EBBFLOW_TERRAFORM_OUTPUT=/var/lib/ebbflow/ebbflow.json
    exec /opt/ebbflow/bin/prefect worker start --type process --pool "$EBBFLOW_PREFECT_POOL"
    ;;
  *)
    echo "usage: ebbflow-prefect server|worker" >&2
    exit 2
    ;;
esac
