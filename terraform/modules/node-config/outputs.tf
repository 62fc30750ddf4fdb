output "user_data" {
  description = "cloud-init configuration as text"
  value       = local.user_data
}

output "user_data_base64" {
  description = "The same, compressed, as launch templates and instances take it; EC2 allows 16 KiB before base64"
  value       = base64gzip(local.user_data)

  precondition {
    # base64 takes four characters for three bytes
    condition     = length(base64gzip(local.user_data)) * 3 / 4 <= 16384
    error_message = "The node's configuration is larger than the 16 KiB that EC2 takes; shorten constraints."
  }
}
