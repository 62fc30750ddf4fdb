output "names" {
  description = "Names of the cluster's resources"
  value       = local.names
}

output "tags" {
  description = "Tags of the resource"
  value       = local.tags
}

output "managed_by_loop" {
  description = "Tags that a resource must carry for the capacity loop to act on it"
  value       = { "ebbflow:cluster" = var.cluster, "ebbflow:managed" = "loop" }
}
