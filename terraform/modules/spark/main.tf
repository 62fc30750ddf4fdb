data "aws_region" "current" {}

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0

  name = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${var.master_architecture}"
}

module "naming" {
  source = "../naming"

  cluster = var.cluster
  role    = "spark-master"
  tags    = var.tags
}

locals {
  # a fixed address, so that workers find a master that has been replaced; AWS keeps the first four of a subnet
  master_ip  = cidrhost(var.subnet_cidrs[0], 10)
  master_url = "spark://${local.master_ip}:7077"
}

module "node" {
  source = "../node-config"

  cluster         = var.cluster
  role            = "spark-master"
  region          = data.aws_region.current.region
  versions        = var.versions
  ebbflow_package = var.ebbflow_package
  ebbflow_sha256  = var.ebbflow_sha256
  constraints     = var.constraints
  spark_events    = var.spark_events

  spark_secret_arn = aws_secretsmanager_secret.spark.arn
}

# Its value is made up by the first master, so that no state file holds it.
resource "aws_secretsmanager_secret" "spark" {
  #checkov:skip=CKV2_AWS_57:all daemons and applications share it; docs/security.md says how to change it
  name                    = "${module.naming.names.prefix}-spark"
  description             = "Secret by which the Spark processes of the Ebbflow cluster ${var.cluster} know each other"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 7

  tags = merge(module.naming.tags, { Name = "${module.naming.names.prefix}-spark" })
}

locals {
  secret_policies = { for role, name in var.role_names : role => {
    Version = "2012-10-17"
    Statement = concat(
      [{
        Sid      = "SparkSecret"
        Effect   = "Allow"
        Action   = ["secretsmanager:GetSecretValue"]
        Resource = [aws_secretsmanager_secret.spark.arn]
      }],
      # one role for all nodes, but only the master makes up a secret
      role != "node" ? [] : [{
        Sid       = "MakeUpSparkSecret"
        Effect    = "Allow"
        Action    = ["secretsmanager:PutSecretValue"]
        Resource  = [aws_secretsmanager_secret.spark.arn]
        Condition = { ArnEquals = { "ec2:SourceInstanceARN" = aws_instance.master.arn } }
      }],
    )
  } if contains(["node", "prefect-worker"], role) }
}

resource "aws_iam_role_policy" "secret" {
  for_each = local.secret_policies

  name   = "spark-secret"
  role   = var.role_names[each.key]
  policy = jsonencode(each.value)
}

# Losing the master costs every running application, so it is never a spot node.
resource "aws_instance" "master" {
  ami                         = var.ami_id == null ? nonsensitive(data.aws_ssm_parameter.ami[0].value) : var.ami_id
  instance_type               = var.master_instance_type
  subnet_id                   = var.subnet_ids[0]
  private_ip                  = local.master_ip
  vpc_security_group_ids      = var.security_group_ids
  associate_public_ip_address = false
  iam_instance_profile        = var.instance_profile
  user_data_base64            = module.node.user_data_base64
  user_data_replace_on_change = true
  ebs_optimized               = true
  monitoring                  = var.detailed_monitoring

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  maintenance_options {
    auto_recovery = "default"
  }

  root_block_device {
    encrypted   = true
    kms_key_id  = var.kms_key_arn
    volume_type = "gp3"
    volume_size = var.master_volume_size
    tags        = module.naming.tags
  }

  tags = module.naming.tags

  lifecycle {
    # a newer image alone is no reason to lose the running applications
    ignore_changes = [ami]
  }
}

module "workers" {
  source   = "../spot-pool"
  for_each = var.worker_pools

  cluster            = var.cluster
  name               = each.key
  kind               = "spark"
  instance_types     = each.value.instance_types
  architecture       = each.value.architecture
  min_size           = each.value.min_size
  max_size           = each.value.max_size
  initial_size       = each.value.initial_size
  on_demand_base     = each.value.on_demand_base
  max_spot_price     = each.value.max_spot_price
  capacity_rebalance = each.value.capacity_rebalance
  drain_on_rebalance = each.value.drain_on_rebalance
  drain_seconds      = each.value.drain_seconds
  ami_id             = each.value.ami_id
  root_volume        = each.value.root_volume

  on_demand_percentage_above_base = each.value.on_demand_percentage_above_base

  subnet_ids          = var.subnet_ids
  security_group_ids  = var.security_group_ids
  instance_profile    = var.instance_profile
  kms_key_arn         = var.kms_key_arn
  detailed_monitoring = var.detailed_monitoring
  agent_metrics_port  = var.agent_metrics_port
  memory_lend         = var.memory_lend
  memory_dir          = var.memory_dir
  spark_master        = local.master_url
  spark_secret_arn    = aws_secretsmanager_secret.spark.arn
  versions            = var.versions
  ebbflow_package     = var.ebbflow_package
  ebbflow_sha256      = var.ebbflow_sha256
  constraints         = var.constraints
  tags                = var.tags
}
