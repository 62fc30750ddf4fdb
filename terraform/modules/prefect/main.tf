data "aws_region" "current" {}

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0

  name = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${var.architecture}"
}

module "naming" {
  source   = "../naming"
  for_each = toset(["prefect-server", "prefect-worker"])

  cluster = var.cluster
  role    = each.key
  tags    = var.tags
}

locals {
  names   = module.naming["prefect-server"].names
  tags    = module.naming["prefect-server"].tags
  ami_id  = var.ami_id == null ? nonsensitive(data.aws_ssm_parameter.ami[0].value) : var.ami_id
  api_url = "https://${var.host_name}/api"
  region  = data.aws_region.current.region

  nodes = {
    "prefect-server" = {
      size            = 1
      instance_type   = var.server_instance_type
      security_groups = [aws_security_group.server.id] # not the nodes': whatever runs there could reach port 4200
      target_groups   = [aws_lb_target_group.this.arn]
    }
    "prefect-worker" = {
      size            = var.worker_count
      instance_type   = var.worker_instance_type
      security_groups = concat(var.node_security_group_ids, var.worker_security_group_ids)
      target_groups   = []
    }
  }

  secret_policies = {
    "prefect-server" = {
      Version = "2012-10-17"
      Statement = [
        {
          Sid      = "Password"
          Effect   = "Allow"
          Action   = ["secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"]
          Resource = [aws_secretsmanager_secret.auth.arn]
        },
        {
          Sid      = "Database"
          Effect   = "Allow"
          Action   = ["secretsmanager:GetSecretValue"]
          Resource = [local.database_secret]
        },
        {
          Sid       = "Encryption"
          Effect    = "Allow"
          Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
          Resource  = [var.kms_key_arn]
          Condition = { StringEquals = { "kms:ViaService" = "secretsmanager.${local.region}.amazonaws.com" } }
        },
      ]
    }
    "prefect-worker" = {
      Version = "2012-10-17"
      Statement = [{
        Sid      = "Password"
        Effect   = "Allow"
        Action   = ["secretsmanager:GetSecretValue"]
        Resource = [aws_secretsmanager_secret.auth.arn]
      }]
    }
  }

  database_secret = one(aws_db_instance.this.master_user_secret[*].secret_arn)
}

module "node" {
  source   = "../node-config"
  for_each = local.nodes

  cluster             = var.cluster
  role                = each.key
  region              = local.region
  versions            = var.versions
  ebbflow_package     = var.ebbflow_package
  ebbflow_sha256      = var.ebbflow_sha256
  constraints         = var.constraints
  torch_index_url     = var.torch_index_url
  memory_dir          = var.memory_dir
  settings_parameter  = local.names.settings_parameter
  prefect_api_url     = local.api_url
  prefect_work_pool   = var.work_pool
  spark_secret_arn    = var.spark_secret_arn
  prefect_secret_arn  = aws_secretsmanager_secret.auth.arn
  database_secret_arn = coalesce(local.database_secret, "unknown")
  database_address    = aws_db_instance.this.endpoint
}

# --- who may reach whom: load balancer, then server, then database ---

resource "aws_security_group" "lb" {
  name        = "${local.names.prefix}-prefect-lb"
  description = "Load balancer of Prefect"
  vpc_id      = var.vpc_id

  tags = merge(local.tags, { Name = "${local.names.prefix}-prefect-lb" })
}

resource "aws_security_group" "server" {
  #checkov:skip=CKV2_AWS_5:the launch template of the server attaches it, through local.nodes
  name        = "${local.names.prefix}-prefect-server"
  description = "Prefect server"
  vpc_id      = var.vpc_id

  tags = local.tags
}

resource "aws_security_group" "database" {
  name        = "${local.names.prefix}-prefect-db"
  description = "Prefect database"
  vpc_id      = var.vpc_id

  tags = merge(local.tags, { Name = "${local.names.prefix}-prefect-db" })
}

resource "aws_vpc_security_group_ingress_rule" "lb_people" {
  for_each = toset(var.allowed_cidrs)

  security_group_id = aws_security_group.lb.id
  description       = "People"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.key

  tags = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "lb_nodes" {
  count = length(var.node_security_group_ids)

  security_group_id            = aws_security_group.lb.id
  description                  = "Nodes of the cluster"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = var.node_security_group_ids[count.index]

  tags = local.tags
}

resource "aws_vpc_security_group_egress_rule" "lb_server" {
  security_group_id            = aws_security_group.lb.id
  description                  = "Prefect server"
  ip_protocol                  = "tcp"
  from_port                    = 4200
  to_port                      = 4200
  referenced_security_group_id = aws_security_group.server.id

  tags = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "server_lb" {
  security_group_id            = aws_security_group.server.id
  description                  = "Load balancer"
  ip_protocol                  = "tcp"
  from_port                    = 4200
  to_port                      = 4200
  referenced_security_group_id = aws_security_group.lb.id

  tags = local.tags
}

resource "aws_vpc_security_group_egress_rule" "server_database" {
  security_group_id            = aws_security_group.server.id
  description                  = "Database"
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
  referenced_security_group_id = aws_security_group.database.id

  tags = local.tags
}

resource "aws_vpc_security_group_egress_rule" "server_https" {
  security_group_id = aws_security_group.server.id
  description       = "Packages and AWS services"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"

  tags = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "database_server" {
  security_group_id            = aws_security_group.database.id
  description                  = "Prefect server"
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
  referenced_security_group_id = aws_security_group.server.id

  tags = local.tags
}

# --- database ---

resource "aws_db_subnet_group" "this" {
  name       = "${local.names.prefix}-prefect"
  subnet_ids = var.private_subnet_ids

  tags = local.tags
}

resource "aws_db_instance" "this" {
  #checkov:skip=CKV_AWS_118:enhanced monitoring of the operating system tells nothing that Performance Insights does not, for a database of this size
  #checkov:skip=CKV2_AWS_30:statements of Prefect hold parameters of flows, which belong in no log
  identifier     = "${local.names.prefix}-prefect"
  engine         = "postgres"
  engine_version = var.postgres_version
  instance_class = var.database_class

  db_name                       = "prefect"
  username                      = "prefect"
  manage_master_user_password   = true
  master_user_secret_kms_key_id = var.kms_key_arn

  storage_type          = "gp3"
  allocated_storage     = 20
  max_allocated_storage = 200
  storage_encrypted     = true
  kms_key_id            = var.kms_key_arn

  db_subnet_group_name   = aws_db_subnet_group.this.name
  vpc_security_group_ids = [aws_security_group.database.id]
  publicly_accessible    = false
  multi_az               = var.database_multi_az

  iam_database_authentication_enabled = true
  auto_minor_version_upgrade          = true
  backup_retention_period             = var.database_backup_days
  copy_tags_to_snapshot               = true
  deletion_protection                 = var.deletion_protection
  skip_final_snapshot                 = !var.deletion_protection
  final_snapshot_identifier           = "${local.names.prefix}-prefect-final"
  enabled_cloudwatch_logs_exports     = ["postgresql", "upgrade"]
  performance_insights_enabled        = true
  performance_insights_kms_key_id     = var.kms_key_arn

  tags = merge(local.tags, { Name = "${local.names.prefix}-prefect" })
}

# Its value is made up by the first server, so that no state file holds it.
resource "aws_secretsmanager_secret" "auth" {
  #checkov:skip=CKV2_AWS_57:the server reads it at its start; delete its value and restart the server to change it
  name                    = "${local.names.prefix}-prefect"
  description             = "user:password of the Prefect server of the Ebbflow cluster ${var.cluster}"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 7

  tags = merge(local.tags, { Name = "${local.names.prefix}-prefect" })
}

resource "aws_iam_role_policy" "secrets" {
  for_each = local.secret_policies

  name   = "secrets"
  role   = var.role_names[each.key]
  policy = jsonencode(each.value)
}

# --- load balancer ---

resource "aws_lb" "this" {
  #checkov:skip=CKV_AWS_150:deletion_protection decides, true unless said otherwise
  #checkov:skip=CKV_AWS_91:the cluster's bucket is encrypted by an own key, which load balancers cannot write to; Prefect's events tell who did what
  #checkov:skip=CKV2_AWS_28:inside the network unless internal is false; add a web ACL where it is reached from the internet
  #checkov:skip=CKV2_AWS_20:there is no listener for plain HTTP to redirect from
  name                       = "${local.names.prefix}-ui"
  internal                   = var.internal
  load_balancer_type         = "application"
  security_groups            = [aws_security_group.lb.id]
  subnets                    = var.internal ? var.private_subnet_ids : var.public_subnet_ids
  drop_invalid_header_fields = true
  enable_deletion_protection = var.deletion_protection
  # events come through websockets, which are quiet at times
  idle_timeout = 300

  tags = merge(local.tags, { Name = "${local.names.prefix}-ui" })

  lifecycle {
    precondition {
      condition     = length(var.internal ? var.private_subnet_ids : var.public_subnet_ids) >= 2
      error_message = "A load balancer needs subnets in two zones."
    }
  }
}

resource "aws_lb_target_group" "this" {
  #checkov:skip=CKV_AWS_378:TLS ends at the load balancer; the server can be reached from there only
  name                 = "${local.names.prefix}-ui"
  port                 = 4200
  protocol             = "HTTP"
  vpc_id               = var.vpc_id
  target_type          = "instance"
  deregistration_delay = 30

  health_check {
    path                = "/api/health"
    matcher             = "200"
    interval            = 15
    timeout             = 10
    healthy_threshold   = 2
    unhealthy_threshold = 4
  }

  tags = merge(local.tags, { Name = "${local.names.prefix}-ui" })
}

resource "aws_lb_listener" "https" {
  load_balancer_arn = aws_lb.this.arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.this.arn
  }

  tags = local.tags
}

# --- server and worker, both on-demand: they decide what happens when spot nodes leave ---

resource "aws_launch_template" "this" {
  for_each = local.nodes

  name                   = "${local.names.prefix}-${each.key}"
  description            = "${each.key} of the Ebbflow cluster ${var.cluster}"
  image_id               = local.ami_id
  instance_type          = each.value.instance_type
  user_data              = module.node[each.key].user_data_base64
  update_default_version = true
  ebs_optimized          = true

  iam_instance_profile {
    name = var.instance_profiles[each.key]
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  network_interfaces {
    device_index                = 0
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = each.value.security_groups
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      volume_type           = "gp3"
      volume_size           = 30
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = module.naming[each.key].tags
    }
  }

  tags = module.naming[each.key].tags
}

resource "aws_autoscaling_group" "this" {
  for_each = local.nodes

  name                      = "${local.names.prefix}-${each.key}"
  min_size                  = each.value.size
  max_size                  = each.value.size
  vpc_zone_identifier       = var.private_subnet_ids
  target_group_arns         = each.value.target_groups
  health_check_type         = length(each.value.target_groups) > 0 ? "ELB" : "EC2"
  health_check_grace_period = 900
  wait_for_capacity_timeout = "0"

  launch_template {
    id      = aws_launch_template.this[each.key].id
    version = aws_launch_template.this[each.key].latest_version
  }

  # a server that is replaced migrates the database; two at once would both do so
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 0
    }
  }

  dynamic "tag" {
    for_each = module.naming[each.key].tags

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}
