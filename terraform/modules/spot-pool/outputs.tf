output "pool" {
  description = "What Ebbflow needs to know of the pool"
  value = {
    kind            = var.kind
    group           = aws_autoscaling_group.this.name
    launch_template = aws_launch_template.this.id
    instance_types  = var.instance_types
    subnet_ids      = var.subnet_ids
    on_demand_base  = var.on_demand_base
    min_size        = var.min_size
    max_size        = var.max_size
  }
}

output "group_name" {
  description = "Name of the Auto Scaling group, known before it exists"
  value       = local.names.group
}

output "group_arn" {
  description = "ARN of the Auto Scaling group"
  value       = aws_autoscaling_group.this.arn
}

output "launch_template_id" {
  description = "Id of the launch template, for one-off fleets"
  value       = aws_launch_template.this.id
}

output "user_data" {
  description = "cloud-init configuration of the nodes, as text"
  value       = module.node.user_data
}
