# The same decisions as infra/aws/naming.py; a test compares the two.
locals {
  prefix = "ebbflow-${var.cluster}"
  name   = var.pool != null ? "${local.prefix}-${var.pool}" : var.role != null ? "${local.prefix}-${var.role}" : local.prefix

  tags = merge(
    var.tags,
    {
      Name              = local.name
      "ebbflow:cluster" = var.cluster
      "ebbflow:managed" = var.managed
    },
    var.role == null ? {} : { "ebbflow:role" = var.role },
    var.pool == null ? {} : { "ebbflow:pool" = var.pool },
  )

  names = {
    prefix              = local.prefix
    bucket              = "${local.prefix}-${var.account_id}-${var.region}"
    key_alias           = "alias/${local.prefix}"
    notice_queue        = "${local.prefix}-notices"
    dead_letter_queue   = "${local.prefix}-notices-dead"
    rules               = { for rule in ["interruption", "rebalance", "state", "lifecycle", "launch-failed", "health", "node"] : rule => "${local.prefix}-${rule}" }
    group               = var.pool == null ? "" : local.name
    roles               = { for role in ["node", "aggregator", "capacity", "prefect-server", "prefect-worker"] : role => "${local.prefix}-${role}" }
    documents           = { for document in ["spark-worker", "torch-node", "drain"] : document => "${local.prefix}-${document}" }
    settings_parameter  = "/ebbflow/${var.cluster}/settings"
    log_group           = "/ebbflow/${var.cluster}"
    event_source_prefix = "ebbflow.${var.cluster}."
    node_leaving        = "Ebbflow Node Leaving"
    drain_hook          = "drain"
    packages_prefix     = "packages"
    store_prefix        = "store"
    spark_events_prefix = "spark-events"
  }
}
