locals {
  spark  = contains(["spark-master", "spark-worker", "prefect-worker"], var.role)
  trains = var.role == "gpu-trainer"
  worker = var.role == "prefect-worker"
  torch  = local.trains || local.worker # launchers of trainings serve torch's store
  sums   = var.role == "aggregator"
  comes  = contains(["spark-worker", "gpu-trainer", "aggregator"], var.role)
  server = var.role == "prefect-server"
  lends  = local.comes && var.memory_lend > 0

  packages = concat(
    [var.ebbflow_package],
    ["boto3==${var.versions.boto3}", "prefect==${var.versions.prefect}", "fastapi==${var.versions.fastapi}"],
    local.spark ? ["pyspark==${var.versions.spark}"] : [],
    local.torch ? ["torch==${var.versions.torch}", "pyzmq==${var.versions.pyzmq}"] : [],
    local.sums ? ["psycopg[binary]==${var.versions.psycopg}", "pyzmq==${var.versions.pyzmq}"] : [],
    # a ledger in PostgreSQL, searches, elastic jobs: with the above all that a flow may want
    local.worker ? [
      "psycopg[binary]==${var.versions.psycopg}",
      "optuna==${var.versions.optuna}",
      "msgpack==${var.versions.msgpack}",
    ] : [],
  )

  # values that a shell script reads; every one is quoted there
  environment = {
    EBBFLOW_CLUSTER               = var.cluster
    EBBFLOW_ROLE                  = var.role
    EBBFLOW_REGION                = var.region
    EBBFLOW_SHA256                = var.ebbflow_sha256
    EBBFLOW_PACKAGES              = join(" ", local.packages)
    EBBFLOW_EXTRA_INDEX           = local.torch ? coalesce(var.torch_index_url, "none") : "none"
    EBBFLOW_JAVA_PACKAGE          = local.spark ? var.java_package : "none"
    EBBFLOW_SPARK_PACKAGES        = local.spark ? join(" ", var.spark_packages) : ""
    EBBFLOW_SPARK_MASTER          = var.spark_master == null ? "" : var.spark_master
    EBBFLOW_SPARK_SECRET          = var.spark_secret_arn == null ? "" : var.spark_secret_arn
    EBBFLOW_SPARK_EVENTS          = var.spark_events == null ? "" : var.spark_events
    EBBFLOW_SETTINGS_PARAMETER    = var.settings_parameter == null ? "" : var.settings_parameter
    EBBFLOW_GROUP                 = var.group == null ? "" : var.group
    EBBFLOW_REBALANCE             = var.drain_on_rebalance ? "drain" : "note"
    EBBFLOW_DRAIN_SECONDS         = tostring(var.drain_seconds)
    EBBFLOW_AGENT_METRICS         = local.comes && var.agent_metrics_port != null ? "0.0.0.0:${var.agent_metrics_port}" : ""
    EBBFLOW_MEMORY_LEND           = local.lends ? tostring(var.memory_lend) : "0"
    EBBFLOW_MEMORY_DIR            = var.memory_dir == null ? "" : var.memory_dir
    EBBFLOW_LEDGER_SECRET         = local.sums ? var.ledger_secret_arn : ""
    EBBFLOW_AGGREGATION_CLUSTER   = local.sums ? coalesce(var.aggregation_cluster, var.cluster) : ""
    EBBFLOW_PREFECT_URL           = var.prefect_api_url == null ? "" : var.prefect_api_url
    EBBFLOW_PREFECT_POOL          = var.prefect_work_pool == null ? "" : var.prefect_work_pool
    EBBFLOW_PREFECT_SECRET        = var.prefect_secret_arn == null ? "" : var.prefect_secret_arn
    EBBFLOW_DATABASE_SECRET       = var.database_secret_arn == null ? "" : var.database_secret_arn
    EBBFLOW_DATABASE_ADDRESS      = var.database_address == null ? "" : var.database_address
    EBBFLOW_TERMINATE_WHEN_BROKEN = local.comes ? "yes" : "no"
  }

  scripts = merge(
    {
      "ebbflow-install" = "install.sh"
      "ebbflow-drain"   = "drain.sh"
    },
    local.spark ? { "ebbflow-spark" = "spark.sh" } : {},
    local.trains ? { "ebbflow-torch" = "torch.sh" } : {},
    local.sums ? { "ebbflow-aggregator" = "aggregator.sh" } : {},
    local.server || local.worker ? { "ebbflow-prefect" = "prefect.sh" } : {},
    local.lends ? { "ebbflow-memory" = "memory.sh" } : {},
  )

  units = concat({
    "spark-master"   = ["ebbflow-spark-master.service", "ebbflow-spark-history.service"]
    "spark-worker"   = ["ebbflow-spark-worker.service", "ebbflow-agent.service"]
    "gpu-trainer"    = ["ebbflow-torch-node@.service", "ebbflow-agent.service"]
    "aggregator"     = ["ebbflow-aggregator.service", "ebbflow-agent.service"]
    "prefect-server" = ["ebbflow-prefect-server.service"]
    "prefect-worker" = ["ebbflow-prefect-worker.service"]
  }[var.role], local.lends ? ["ebbflow-memory.service"] : [])

  files = concat(
    [{
      path        = "/etc/ebbflow/node.env"
      permissions = "0644"
      content     = join("", [for name, value in local.environment : "${name}=\"${value}\"\n"])
    }],
    var.constraints == null ? [] : [{
      path        = "/etc/ebbflow/constraints.txt"
      permissions = "0644"
      content     = var.constraints
    }],
    local.spark ? [{
      path        = "/etc/ebbflow/spark/spark-defaults.conf"
      permissions = "0644"
      content     = file("${path.module}/templates/spark-defaults.conf")
    }] : [],
    [for name, source in local.scripts : {
      path        = "/usr/local/sbin/${name}"
      permissions = "0755"
      content     = file("${path.module}/templates/${source}")
    }],
    [for unit in local.units : {
      path        = "/etc/systemd/system/${unit}"
      permissions = "0644"
      content     = file("${path.module}/templates/${unit}")
    }],
  )

  user_data = templatefile("${path.module}/templates/cloud-config.yaml.tftpl", {
    files = local.files
    # a template unit is started by name, when a training wants the node
    start = [for unit in local.units : unit if !endswith(unit, "@.service")]
  })
}
