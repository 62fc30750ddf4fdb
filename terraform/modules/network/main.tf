data "aws_availability_zones" "available" {
  #checkov:skip=CKV_AWS_394:the first zone_count by name are taken, and the letter of a new zone comes last
  state = "available"

  # zones that must be opted into have few instance types
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_region" "current" {}

module "naming" {
  source = "../naming"

  cluster = var.cluster
  tags    = var.tags
}

locals {
  names = module.naming.names
  tags  = module.naming.tags
  zones = slice(sort(data.aws_availability_zones.available.names), 0, var.zone_count)

  # private networks hold the nodes and are sixteen times as large as public ones
  private_cidrs = [for i in range(var.zone_count) : cidrsubnet(var.cidr, 4, i + 1)]
  public_cidrs  = [for i in range(var.zone_count) : cidrsubnet(var.cidr, 8, i)]
  nat_zones     = var.nat_gateways == "per-zone" ? local.zones : slice(local.zones, 0, 1)
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true

  tags = local.tags
}

# the VPC's own group would let everything in it talk to everything else
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-unused" })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id

  tags = local.tags
}

resource "aws_subnet" "private" {
  for_each = { for i, zone in local.zones : zone => local.private_cidrs[i] }

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false

  tags = merge(local.tags, { Name = "${local.names.prefix}-private-${each.key}" })
}

# for NAT gateways and a public load balancer; no node is ever placed here
resource "aws_subnet" "public" {
  for_each = { for i, zone in local.zones : zone => local.public_cidrs[i] }

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false

  tags = merge(local.tags, { Name = "${local.names.prefix}-public-${each.key}" })
}

resource "aws_eip" "nat" {
  #checkov:skip=CKV2_AWS_19:the address is a NAT gateway's, not an instance's
  for_each = toset(local.nat_zones)

  domain = "vpc"

  tags = merge(local.tags, { Name = "${local.names.prefix}-nat-${each.key}" })
}

resource "aws_nat_gateway" "this" {
  for_each = toset(local.nat_zones)

  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = aws_subnet.public[each.key].id

  tags = merge(local.tags, { Name = "${local.names.prefix}-${each.key}" })

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-public" })
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  for_each = aws_subnet.private

  vpc_id = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-private-${each.key}" })
}

resource "aws_route" "private" {
  for_each = aws_route_table.private

  route_table_id         = each.value.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[contains(local.nat_zones, each.key) ? each.key : local.nat_zones[0]].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[each.key].id
}

# free of charge, and keeps checkpoints off the NAT gateway, which is not
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${data.aws_region.current.region}.s3"
  route_table_ids   = [for table in aws_route_table.private : table.id]

  tags = merge(local.tags, { Name = "${local.names.prefix}-s3" })
}

resource "aws_vpc_endpoint" "interface" {
  for_each = toset(var.interface_endpoints)

  vpc_id              = aws_vpc.this.id
  vpc_endpoint_type   = "Interface"
  service_name        = "com.amazonaws.${data.aws_region.current.region}.${each.key}"
  subnet_ids          = [for subnet in aws_subnet.private : subnet.id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true

  tags = merge(local.tags, { Name = "${local.names.prefix}-${each.key}" })
}

# of their own: Prefect's server reaches them too, and is none of the nodes
resource "aws_security_group" "endpoints" {
  #checkov:skip=CKV2_AWS_5:the interface endpoints carry it
  count = length(var.interface_endpoints) > 0 ? 1 : 0

  name        = "${local.names.prefix}-endpoints"
  description = "AWS services reached inside the network"
  vpc_id      = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-endpoints" })
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  for_each = { for zone, subnet in aws_subnet.private : zone => subnet.cidr_block if length(var.interface_endpoints) > 0 }

  security_group_id = aws_security_group.endpoints[0].id
  description       = "Private subnet"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.value

  tags = local.tags
}

resource "aws_security_group" "nodes" {
  #checkov:skip=CKV2_AWS_5:the modules spark, spot-pool and prefect attach it
  name        = "${local.names.prefix}-nodes"
  description = "Nodes of the cluster: each other, and HTTPS to the outside"
  vpc_id      = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-nodes" })
}

# Spark, the collectives of training and aggregators choose their ports when they start
resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "Nodes of the cluster among themselves"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.nodes.id

  tags = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "metrics" {
  for_each = toset(var.agent_metrics_cidrs)

  security_group_id = aws_security_group.nodes.id
  description       = "Prometheus, which scrapes the agents of nodes"
  ip_protocol       = "tcp"
  from_port         = var.agent_metrics_port
  to_port           = var.agent_metrics_port
  cidr_ipv4         = each.value

  tags = local.tags
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "Nodes of the cluster among themselves"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.nodes.id

  tags = local.tags
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.nodes.id
  description       = "Packages and AWS services"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"

  tags = local.tags
}

# Of all nodes these reach the ledger: what trainings and queries run does not.
resource "aws_security_group" "ledger" {
  #checkov:skip=CKV2_AWS_5:the modules spot-pool and prefect attach it
  count = var.ledger == null ? 0 : 1

  name        = "${local.names.prefix}-ledger"
  description = "Nodes that reach the database of the ledger"
  vpc_id      = aws_vpc.this.id

  tags = merge(local.tags, { Name = "${local.names.prefix}-ledger" })
}

resource "aws_vpc_security_group_egress_rule" "ledger" {
  count = var.ledger == null ? 0 : 1

  security_group_id            = aws_security_group.ledger[0].id
  description                  = "Database of the ledger"
  ip_protocol                  = "tcp"
  from_port                    = var.ledger.port
  to_port                      = var.ledger.port
  referenced_security_group_id = var.ledger.security_group_id

  tags = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "ledger" {
  count = var.ledger == null ? 0 : 1

  security_group_id            = var.ledger.security_group_id
  description                  = "Nodes of the Ebbflow cluster ${var.cluster} that use the ledger"
  ip_protocol                  = "tcp"
  from_port                    = var.ledger.port
  to_port                      = var.ledger.port
  referenced_security_group_id = aws_security_group.ledger[0].id

  tags = local.tags
}

locals {
  flow_log_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "vpc-flow-logs.amazonaws.com" }
    }]
  })
  flow_log_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
      Resource = [for group in aws_cloudwatch_log_group.flow : "${group.arn}:*"]
    }]
  })
}

resource "aws_cloudwatch_log_group" "flow" {
  count = var.flow_logs ? 1 : 0

  name              = local.names.log_group
  kms_key_id        = var.kms_key_arn
  retention_in_days = 365

  tags = local.tags
}

resource "aws_iam_role" "flow" {
  count = var.flow_logs ? 1 : 0

  name               = "${local.names.prefix}-flow-logs"
  assume_role_policy = local.flow_log_trust

  tags = local.tags
}

resource "aws_iam_role_policy" "flow" {
  count = var.flow_logs ? 1 : 0

  name   = "write"
  role   = aws_iam_role.flow[0].name
  policy = local.flow_log_policy
}

resource "aws_flow_log" "this" {
  count = var.flow_logs ? 1 : 0

  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT"
  log_destination = aws_cloudwatch_log_group.flow[0].arn
  iam_role_arn    = aws_iam_role.flow[0].arn

  tags = local.tags
}
