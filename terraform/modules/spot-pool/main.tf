data "aws_region" "current" {}

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0

  name = coalesce(var.ami_ssm_parameter, local.default_ami[var.kind])
}

locals {
  role = { spark = "spark-worker", gpu = "gpu-trainer", cpu = "aggregator" }[var.kind]

  # all are Amazon Linux 2023; that for gpu comes with NVIDIA's drivers
  default_ami = {
    spark = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${var.architecture}"
    cpu   = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${var.architecture}"
    gpu   = "/aws/service/deeplearning/ami/${var.architecture}/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
  }
  ami_id = var.ami_id == null ? nonsensitive(data.aws_ssm_parameter.ami[0].value) : var.ami_id

  names = module.naming.names
  tags  = module.naming.tags
}

module "naming" {
  source = "../naming"

  cluster = var.cluster
  managed = "loop"
  role    = local.role
  pool    = var.name
  tags    = var.tags
}

module "node" {
  source = "../node-config"

  cluster            = var.cluster
  role               = local.role
  region             = data.aws_region.current.region
  group              = local.names.group
  versions           = var.versions
  ebbflow_package    = var.ebbflow_package
  ebbflow_sha256     = var.ebbflow_sha256
  constraints        = var.constraints
  torch_index_url    = var.torch_index_url
  spark_master       = var.spark_master
  spark_secret_arn   = var.spark_secret_arn
  drain_on_rebalance = var.drain_on_rebalance
  drain_seconds      = var.drain_seconds
  agent_metrics_port = var.agent_metrics_port
  memory_lend        = var.memory_lend
  memory_dir         = var.memory_dir
  ledger_secret_arn  = var.ledger_secret_arn

  aggregation_cluster = var.aggregation_cluster
}

resource "aws_launch_template" "this" {
  name                                 = local.names.group
  description                          = "Nodes of the pool ${var.name} of the Ebbflow cluster ${var.cluster}"
  image_id                             = local.ami_id
  instance_type                        = var.instance_types[0]
  user_data                            = module.node.user_data_base64
  update_default_version               = true
  ebs_optimized                        = true
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    name = var.instance_profile
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  monitoring {
    enabled = var.detailed_monitoring
  }

  network_interfaces {
    device_index                = 0
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = var.security_group_ids
  }

  block_device_mappings {
    device_name = var.root_device_name

    ebs {
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      volume_type           = "gp3"
      volume_size           = coalesce(var.root_volume.size, { spark = 60, gpu = 120, cpu = 20 }[var.kind])
      iops                  = var.root_volume.iops
      throughput            = var.root_volume.throughput
      delete_on_termination = true
    }
  }

  dynamic "placement" {
    for_each = var.placement_group == null ? [] : [var.placement_group]

    content {
      group_name = placement.value
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = local.tags
    }
  }

  tags = local.tags

  lifecycle {
    create_before_destroy = false
  }
}

resource "aws_autoscaling_group" "this" {
  name                      = local.names.group
  min_size                  = var.min_size
  max_size                  = var.max_size
  desired_capacity          = var.initial_size
  vpc_zone_identifier       = var.subnet_ids
  capacity_rebalance        = var.capacity_rebalance
  health_check_type         = "EC2"
  health_check_grace_period = 300
  termination_policies      = ["OldestLaunchTemplate", "Default"]
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances", "GroupPendingInstances", "GroupTerminatingInstances"]

  # moving nodes between zones for the sake of balance would throw work away
  suspended_processes = ["AZRebalance"]

  # the group never chooses whom to end: the capacity loop names nodes, and drains them first
  protect_from_scale_in = true

  # spot capacity may be away for hours; an apply does not wait for it
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = var.on_demand_base
      on_demand_percentage_above_base_capacity = var.on_demand_percentage_above_base
      on_demand_allocation_strategy            = "lowest-price"
      spot_allocation_strategy                 = "price-capacity-optimized"
      spot_max_price                           = var.max_spot_price
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.this.id
        version            = aws_launch_template.this.latest_version
      }

      dynamic "override" {
        for_each = var.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = local.tags

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    # the capacity loop decides them at run time; the next apply must not undo that
    ignore_changes = [
      desired_capacity,
      mixed_instances_policy[0].instances_distribution[0].on_demand_base_capacity,
    ]

    precondition {
      condition     = var.kind != "spark" || (var.spark_master != null && var.spark_secret_arn != null)
      error_message = "spark_master and spark_secret_arn are needed by a pool of kind spark."
    }

    precondition {
      condition     = var.kind != "cpu" || var.ledger_secret_arn != null
      error_message = "ledger_secret_arn is needed by a pool of kind cpu."
    }
  }
}

resource "aws_autoscaling_lifecycle_hook" "drain" {
  name                   = local.names.drain_hook
  autoscaling_group_name = aws_autoscaling_group.this.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_TERMINATING"
  default_result         = "CONTINUE"

  # the agent ends the wait when the node is drained; this is for a node whose agent is gone
  heartbeat_timeout = var.drain_seconds + 30
}
