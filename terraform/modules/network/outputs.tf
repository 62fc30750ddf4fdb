output "vpc_id" {
  description = "Id of the VPC"
  value       = aws_vpc.this.id
}

output "vpc_cidr" {
  description = "IPv4 range of the VPC"
  value       = aws_vpc.this.cidr_block
}

output "private_subnet_ids" {
  description = "Ids of the private subnets, one a zone, in the order of the zones' names"
  value       = [for zone in local.zones : aws_subnet.private[zone].id]

  # a node that starts before it can reach anything cannot install anything
  depends_on = [aws_route.private, aws_route_table_association.private, aws_route.public, aws_route_table_association.public]
}

output "private_subnet_cidrs" {
  description = "IPv4 ranges of the private subnets, in the same order"
  value       = [for zone in local.zones : aws_subnet.private[zone].cidr_block]
}

output "public_subnet_ids" {
  description = "Ids of the public subnets, in the same order"
  value       = [for zone in local.zones : aws_subnet.public[zone].id]
}

output "zones" {
  description = "Names of the availability zones"
  value       = local.zones
}

output "node_security_group_id" {
  description = "Id of the security group of all nodes"
  value       = aws_security_group.nodes.id
}

output "ledger_security_group_id" {
  description = "Id of the security group of those that reach the ledger; null without ledger"
  value       = one(aws_security_group.ledger[*].id)
}
