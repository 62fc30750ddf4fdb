output "master_url" {
  description = "URL of the master, for --master"
  value       = local.master_url
}

output "master_ui" {
  description = "The master's pages, inside the network"
  value       = "http://${local.master_ip}:8080"
}

output "history_ui" {
  description = "The history server's pages, inside the network"
  value       = "http://${local.master_ip}:18080"
}

output "master_instance_id" {
  description = "Id of the master's instance"
  value       = aws_instance.master.id
}

output "secret_arn" {
  description = "ARN of the secret that a driver needs, too; the first master makes up its value"
  value       = aws_secretsmanager_secret.spark.arn
}

output "pools" {
  description = "What Ebbflow needs to know of the pools, by name"
  value       = { for name, pool in module.workers : name => pool.pool }
}

output "user_data" {
  description = "cloud-init configurations, as text, of the master and of the pools by name"
  value       = { master = module.node.user_data, workers = { for name, pool in module.workers : name => pool.user_data } }
}
