data "aws_caller_identity" "current" {}
data "aws_region" "current" {}

locals {
  # known before the groups exist, because the rules that watch them are made first
  group_names = [for pool in concat(keys(var.worker_pools), keys(var.gpu_pools), keys(var.aggregator_pools)) : "${module.naming.names.prefix}-${pool}"]

  # how long a list is must be known before a group is made
  ledger_groups = var.ledger == null ? [] : [module.network.ledger_security_group_id]

  pools = merge(
    { for name, pool in var.gpu_pools : name => merge(pool, {
      kind                = "gpu"
      role                = "node"
      security_group_ids  = [module.network.node_security_group_id]
      memory_lend         = var.memory_lend
      memory_dir          = "${module.storage.store}/memory"
      torch_index_url     = var.torch_index_url
      ledger_secret_arn   = null
      aggregation_cluster = null
    }) },
    { for name, pool in var.aggregator_pools : name => merge(pool, {
      kind                = "cpu"
      role                = "aggregator"
      security_group_ids  = concat([module.network.node_security_group_id], local.ledger_groups)
      memory_lend         = 0
      memory_dir          = null
      torch_index_url     = null
      ledger_secret_arn   = try(var.aggregation.ledger_secret_arn, null)
      aggregation_cluster = try(var.aggregation.cluster, null)
    }) },
  )

  settings = {
    cluster               = var.cluster
    region                = data.aws_region.current.region
    account_id            = data.aws_caller_identity.current.account_id
    bucket                = module.storage.bucket
    store                 = module.storage.store
    kms_key_arn           = module.storage.kms_key_arn
    notice_queue_url      = module.notices.queue_url
    dead_letter_queue_url = module.notices.dead_letter_queue_url
    capacity_role_arn     = module.iam.capacity_role_arn
    settings_parameter    = module.naming.names.settings_parameter
    documents             = module.commands.documents
    pools = merge(
      { for name, pool in try(module.spark[0].pools, {}) : name => pool },
      { for name, pool in module.pools : name => pool.pool },
    )
    spark_master            = one(module.spark[*].master_url)
    spark_master_ui         = one(module.spark[*].master_ui)
    spark_history           = one(module.spark[*].history_ui)
    prefect_api_url         = one(module.prefect[*].api_url)
    prefect_auth_secret_arn = one(module.prefect[*].auth_secret_arn)
    prefect_work_pool       = one(module.prefect[*].work_pool)
  }
}

module "naming" {
  source = "./modules/naming"

  cluster = var.cluster
  tags    = var.tags
}

module "storage" {
  source = "./modules/storage"

  cluster               = var.cluster
  force_destroy         = var.force_destroy
  keep_checkpoints_days = var.keep_checkpoints_days
  tags                  = var.tags
}

module "network" {
  source = "./modules/network"

  cluster             = var.cluster
  cidr                = var.cidr
  zone_count          = var.zone_count
  nat_gateways        = var.nat_gateways
  interface_endpoints = var.interface_endpoints
  flow_logs           = var.flow_logs
  agent_metrics_port  = var.agent_metrics_port
  agent_metrics_cidrs = var.agent_metrics_cidrs
  ledger              = var.ledger
  kms_key_arn         = module.storage.kms_key_arn
  tags                = var.tags
}

module "notices" {
  source = "./modules/notices"

  cluster       = var.cluster
  groups        = local.group_names
  alarm_actions = var.alarm_actions
  kms_key_arn   = module.storage.kms_key_arn
  tags          = var.tags
}

module "commands" {
  source = "./modules/commands"

  cluster = var.cluster
  tags    = var.tags
}

module "iam" {
  source = "./modules/iam"

  cluster                  = var.cluster
  bucket_arn               = module.storage.bucket_arn
  table_bucket_arns        = var.table_bucket_arns
  kms_key_arn              = module.storage.kms_key_arn
  queue_arns               = [module.notices.queue_arn, module.notices.dead_letter_queue_arn]
  subnet_ids               = module.network.private_subnet_ids
  security_group_ids       = concat([module.network.node_security_group_id], local.ledger_groups)
  capacity_principals      = var.capacity_principals
  permissions_boundary_arn = var.permissions_boundary_arn
  ledger_secret_arn        = try(var.aggregation.ledger_secret_arn, null)
  tags                     = var.tags
}

module "spark" {
  source = "./modules/spark"
  count  = length(var.worker_pools) > 0 ? 1 : 0

  cluster              = var.cluster
  master_instance_type = var.spark_master.instance_type
  master_architecture  = var.spark_master.architecture
  master_volume_size   = var.spark_master.volume_size
  ami_id               = var.spark_master.ami_id
  worker_pools         = var.worker_pools
  spark_events         = module.storage.spark_events
  subnet_ids           = module.network.private_subnet_ids
  subnet_cidrs         = module.network.private_subnet_cidrs
  security_group_ids   = [module.network.node_security_group_id]
  instance_profile     = module.iam.instance_profiles["node"]
  role_names           = module.iam.role_names
  kms_key_arn          = module.storage.kms_key_arn
  detailed_monitoring  = var.detailed_monitoring
  agent_metrics_port   = var.agent_metrics_port
  memory_lend          = var.memory_lend
  memory_dir           = "${module.storage.store}/memory"
  versions             = var.versions
  ebbflow_package      = var.ebbflow_package
  ebbflow_sha256       = var.ebbflow_sha256
  constraints          = var.constraints
  tags                 = var.tags
}

module "pools" {
  source   = "./modules/spot-pool"
  for_each = local.pools

  cluster            = var.cluster
  name               = each.key
  kind               = each.value.kind
  instance_types     = each.value.instance_types
  architecture       = each.value.architecture
  min_size           = each.value.min_size
  max_size           = each.value.max_size
  initial_size       = each.value.initial_size
  on_demand_base     = each.value.on_demand_base
  max_spot_price     = each.value.max_spot_price
  capacity_rebalance = each.value.capacity_rebalance
  drain_on_rebalance = each.value.drain_on_rebalance
  drain_seconds      = each.value.drain_seconds
  ami_id             = each.value.ami_id
  root_volume        = each.value.root_volume

  on_demand_percentage_above_base = each.value.on_demand_percentage_above_base

  security_group_ids  = each.value.security_group_ids
  instance_profile    = module.iam.instance_profiles[each.value.role]
  memory_lend         = each.value.memory_lend
  memory_dir          = each.value.memory_dir
  torch_index_url     = each.value.torch_index_url
  ledger_secret_arn   = each.value.ledger_secret_arn
  aggregation_cluster = each.value.aggregation_cluster

  subnet_ids          = module.network.private_subnet_ids
  kms_key_arn         = module.storage.kms_key_arn
  detailed_monitoring = var.detailed_monitoring
  agent_metrics_port  = var.agent_metrics_port
  versions            = var.versions
  ebbflow_package     = var.ebbflow_package
  ebbflow_sha256      = var.ebbflow_sha256
  constraints         = var.constraints
  tags                = var.tags
}

moved {
  from = module.gpu_pools
  to   = module.pools
}

module "prefect" {
  source = "./modules/prefect"
  count  = var.prefect == null ? 0 : 1

  cluster                 = var.cluster
  host_name               = var.prefect.host_name
  certificate_arn         = var.prefect.certificate_arn
  internal                = var.prefect.internal
  allowed_cidrs           = var.prefect.allowed_cidrs
  work_pool               = var.prefect.work_pool
  server_instance_type    = var.prefect.server_instance_type
  worker_instance_type    = var.prefect.worker_instance_type
  worker_count            = var.prefect.worker_count
  torch_index_url         = var.prefect.torch_index_url
  database_class          = var.prefect.database_class
  database_multi_az       = var.prefect.database_multi_az
  deletion_protection     = var.prefect.deletion_protection
  ami_id                  = var.prefect.ami_id
  vpc_id                  = module.network.vpc_id
  private_subnet_ids      = module.network.private_subnet_ids
  public_subnet_ids       = module.network.public_subnet_ids
  node_security_group_ids = [module.network.node_security_group_id]
  spark_secret_arn        = one(module.spark[*].secret_arn)
  memory_dir              = var.memory_lend > 0 ? "${module.storage.store}/memory" : null
  instance_profiles       = module.iam.instance_profiles
  role_names              = module.iam.role_names
  kms_key_arn             = module.storage.kms_key_arn
  versions                = var.versions
  ebbflow_package         = var.ebbflow_package
  ebbflow_sha256          = var.ebbflow_sha256
  constraints             = var.constraints
  tags                    = var.tags

  worker_security_group_ids = local.ledger_groups
}

# what terraform output -json writes, for the cluster's own nodes
resource "aws_ssm_parameter" "settings" {
  name        = module.naming.names.settings_parameter
  description = "Settings of the Ebbflow cluster ${var.cluster}"
  type        = "SecureString"
  key_id      = module.storage.kms_key_arn
  tier        = "Intelligent-Tiering"
  value       = jsonencode({ for name, value in local.settings : name => { value = value } if value != null })

  tags = module.naming.tags
}
