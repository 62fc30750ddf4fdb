# terraform output -json > ebbflow.json is Ebbflow's configuration

output "cluster" {
  description = "Name of the cluster"
  value       = module.ebbflow.cluster
}

output "region" {
  description = "AWS region"
  value       = module.ebbflow.region
}

output "account_id" {
  description = "AWS account"
  value       = module.ebbflow.account_id
}

output "bucket" {
  description = "Bucket of checkpoints"
  value       = module.ebbflow.bucket
}

output "store" {
  description = "Checkpoint store, for --store"
  value       = module.ebbflow.store
}

output "kms_key_arn" {
  description = "Key that encrypts everything of the cluster"
  value       = module.ebbflow.kms_key_arn
}

output "notice_queue_url" {
  description = "Queue of interruption warnings and other changes"
  value       = module.ebbflow.notice_queue_url
}

output "dead_letter_queue_url" {
  description = "Queue of notices that could not be handled"
  value       = module.ebbflow.dead_letter_queue_url
}

output "capacity_role_arn" {
  description = "Role of the capacity loop"
  value       = module.ebbflow.capacity_role_arn
}

output "settings_parameter" {
  description = "Systems Manager parameter that holds these settings"
  value       = module.ebbflow.settings_parameter
}

output "documents" {
  description = "Systems Manager documents, by what they do"
  value       = module.ebbflow.documents
}

output "pools" {
  description = "Pools of nodes, by name"
  value       = module.ebbflow.pools
}

output "spark_master" {
  description = "URL of the Spark master, for --master; null without worker pools"
  value       = module.ebbflow.spark_master
}

output "spark_master_ui" {
  description = "The master's pages, inside the network"
  value       = module.ebbflow.spark_master_ui
}

output "spark_history" {
  description = "The history server's pages, inside the network"
  value       = module.ebbflow.spark_history
}

output "spark_secret_arn" {
  description = "Secret that a driver needs for the Spark master; null without worker pools"
  value       = module.ebbflow.spark_secret_arn
}

output "spark_master_instance_id" {
  description = "Instance of the master, for port forwarding by Systems Manager"
  value       = module.ebbflow.spark_master_instance_id
}
