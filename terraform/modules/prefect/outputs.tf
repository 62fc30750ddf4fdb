output "api_url" {
  description = "URL of Prefect's API, for PREFECT_API_URL"
  value       = local.api_url
}

output "ui_url" {
  description = "URL of Prefect's UI"
  value       = "https://${var.host_name}"
}

output "lb_dns_name" {
  description = "Name of the load balancer that host_name must point to"
  value       = aws_lb.this.dns_name
}

output "auth_secret_arn" {
  description = "ARN of the secret with user:password, for PREFECT_API_AUTH_STRING"
  value       = aws_secretsmanager_secret.auth.arn
}

output "work_pool" {
  description = "Name of the work pool"
  value       = var.work_pool
}

output "group_names" {
  description = "Names of the Auto Scaling groups of server and workers"
  value       = { for role, group in aws_autoscaling_group.this : role => group.name }
}

output "user_data" {
  description = "cloud-init configurations, as text, of server and workers"
  value       = { for role, node in module.node : role => node.user_data }
}
