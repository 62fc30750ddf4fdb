# Ebbflow reads these (infra/aws/settings.py): terraform output -json > ebbflow.json

output "cluster" {
  description = "Name of the cluster"
  value       = local.settings.cluster
}

output "region" {
  description = "AWS region"
  value       = local.settings.region
}

output "account_id" {
  description = "AWS account"
  value       = local.settings.account_id
}

output "bucket" {
  description = "Bucket of checkpoints"
  value       = local.settings.bucket
}

output "store" {
  description = "Checkpoint store, for --store"
  value       = local.settings.store
}

output "kms_key_arn" {
  description = "Key that encrypts everything of the cluster"
  value       = local.settings.kms_key_arn
}

output "notice_queue_url" {
  description = "Queue of interruption warnings and other changes"
  value       = local.settings.notice_queue_url
}

output "dead_letter_queue_url" {
  description = "Queue of notices that could not be handled"
  value       = local.settings.dead_letter_queue_url
}

output "capacity_role_arn" {
  description = "Role of the capacity loop"
  value       = local.settings.capacity_role_arn
}

output "settings_parameter" {
  description = "Systems Manager parameter that holds these settings"
  value       = local.settings.settings_parameter
}

output "documents" {
  description = "Systems Manager documents, by what they do"
  value       = local.settings.documents
}

output "pools" {
  description = "Pools of nodes, by name"
  value       = local.settings.pools
}

output "spark_master" {
  description = "URL of the Spark master, for --master; null without worker pools"
  value       = local.settings.spark_master
}

output "spark_master_ui" {
  description = "The master's pages, inside the network"
  value       = local.settings.spark_master_ui
}

output "spark_history" {
  description = "The history server's pages, inside the network"
  value       = local.settings.spark_history
}

output "prefect_api_url" {
  description = "URL of Prefect's API, for PREFECT_API_URL; null without prefect"
  value       = local.settings.prefect_api_url
}

output "prefect_auth_secret_arn" {
  description = "Secret with user:password, for PREFECT_API_AUTH_STRING"
  value       = local.settings.prefect_auth_secret_arn
}

output "prefect_work_pool" {
  description = "Work pool of the cluster's Prefect workers"
  value       = local.settings.prefect_work_pool
}

# for people and other configurations

output "vpc_id" {
  description = "Id of the VPC"
  value       = module.network.vpc_id
}

output "private_subnet_ids" {
  description = "Ids of the private subnets"
  value       = module.network.private_subnet_ids
}

output "node_security_group_id" {
  description = "Id of the security group of all nodes"
  value       = module.network.node_security_group_id
}

output "ledger_security_group_id" {
  description = "Id of the security group of those that reach the ledger; null without ledger"
  value       = module.network.ledger_security_group_id
}

output "prefect_lb_dns_name" {
  description = "Name that prefect.host_name must point to; null without prefect"
  value       = one(module.prefect[*].lb_dns_name)
}

output "spark_secret_arn" {
  description = "Secret that a driver needs for the Spark master; null without worker pools"
  value       = one(module.spark[*].secret_arn)
}

output "spark_master_instance_id" {
  description = "Instance of the master, for port forwarding by Systems Manager"
  value       = one(module.spark[*].master_instance_id)
}
