output "capacity_role_arn" {
  description = "ARN of the capacity loop's role"
  value       = aws_iam_role.capacity.arn
}

output "role_names" {
  description = "Names of the nodes' roles, by what the node does"
  value       = { for role, resource in aws_iam_role.instance : role => resource.name }
}

output "role_arns" {
  description = "ARNs of the nodes' roles, by what the node does"
  value       = { for role, resource in aws_iam_role.instance : role => resource.arn }
}

output "instance_profiles" {
  description = "Names of the instance profiles, by what the node does"
  value       = { for role, resource in aws_iam_instance_profile.this : role => resource.name }
}
