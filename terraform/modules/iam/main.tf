data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

module "naming" {
  source = "../naming"

  cluster = var.cluster
  tags    = var.tags
}

locals {
  names   = module.naming.names
  account = data.aws_caller_identity.current.account_id
  region  = data.aws_region.current.region
  arn     = "arn:${data.aws_partition.current.partition}"
  ec2     = "${local.arn}:ec2:${local.region}:${local.account}"

  # a resource of this cluster that the capacity loop may start and end
  ours       = { for tag, value in module.naming.managed_by_loop : "aws:ResourceTag/${tag}" => value }
  being_ours = { for tag, value in module.naming.managed_by_loop : "aws:RequestTag/${tag}" => value }

  surroundings = concat(
    ["${local.arn}:ec2:${local.region}::image/*", "${local.ec2}:network-interface/*"],
    [for subnet in var.subnet_ids : "${local.ec2}:subnet/${subnet}"],
    [for group in var.security_group_ids : "${local.ec2}:security-group/${group}"],
  )

  store_statements = [
    {
      Sid      = "List"
      Effect   = "Allow"
      Action   = ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetBucketLocation"]
      Resource = [var.bucket_arn]
    },
    {
      # what nodes install as root lies elsewhere in the bucket, see packages_statements
      Sid      = "Objects"
      Effect   = "Allow"
      Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
      Resource = [for prefix in [local.names.store_prefix, local.names.spark_events_prefix] : "${var.bucket_arn}/${prefix}/*"]
    },
    {
      Sid       = "Encryption"
      Effect    = "Allow"
      Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
      Resource  = [var.kms_key_arn]
      Condition = { StringEquals = { "kms:ViaService" = ["s3.${local.region}.amazonaws.com", "sqs.${local.region}.amazonaws.com", "ssm.${local.region}.amazonaws.com", "secretsmanager.${local.region}.amazonaws.com"] } }
    },
  ]

  # read by all nodes, written by none: only who applies this configuration puts packages there
  packages_statements = [
    {
      Sid      = "Packages"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = ["${var.bucket_arn}/${local.names.packages_prefix}/*"]
    },
  ]

  tables_statements = length(var.table_bucket_arns) == 0 ? [] : [
    {
      Sid      = "ListTables"
      Effect   = "Allow"
      Action   = ["s3:ListBucket", "s3:GetBucketLocation"]
      Resource = var.table_bucket_arns
    },
    {
      Sid      = "ReadTables"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = [for bucket in var.table_bucket_arns : "${bucket}/*"]
    },
  ]

  # what the agent of Systems Manager needs for commands and sessions; these actions know no resources
  ssm_statements = [
    {
      Sid    = "SystemsManagerAgent"
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
        "ec2messages:AcknowledgeMessage", "ec2messages:DeleteMessage", "ec2messages:FailMessage",
        "ec2messages:GetEndpoint", "ec2messages:GetMessages", "ec2messages:SendReply",
      ]
      Resource = ["*"]
    },
    {
      Sid      = "Documents"
      Effect   = "Allow"
      Action   = ["ssm:GetDocument", "ssm:DescribeDocument"]
      Resource = [for document in values(local.names.documents) : "${local.arn}:ssm:${local.region}:${local.account}:document/${document}"]
    },
  ]

  # what a node that comes and goes may do when it leaves
  leaving_statements = [
    {
      # a drained node lets its group go on
      Sid       = "OwnGroup"
      Effect    = "Allow"
      Action    = ["autoscaling:CompleteLifecycleAction", "autoscaling:RecordLifecycleActionHeartbeat"]
      Resource  = ["${local.arn}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${local.names.prefix}-*"]
      Condition = { StringEquals = local.ours }
    },
    {
      # it says that it leaves, and no other: the source that the rule asks for and the reader compares ends in the
      # instance whose credentials these are, which AWS fills in
      Sid      = "SayThatItLeaves"
      Effect   = "Allow"
      Action   = ["events:PutEvents"]
      Resource = ["${local.arn}:events:${local.region}:${local.account}:event-bus/default"]
      Condition = {
        "ForAllValues:StringEquals" = { "events:source" = ["${local.names.event_source_prefix}$${ec2:SourceInstanceARN}"], "events:detail-type" = [local.names.node_leaving] }
        Null                        = { "events:source" = "false", "events:detail-type" = "false" }
      }
    },
  ]

  settings_statement = {
    Sid      = "Settings"
    Effect   = "Allow"
    Action   = ["ssm:GetParameter"]
    Resource = ["${local.arn}:ssm:${local.region}:${local.account}:parameter${local.names.settings_parameter}"]
  }

  policies = {
    node = {
      Version   = "2012-10-17"
      Statement = concat(local.store_statements, local.packages_statements, local.tables_statements, local.ssm_statements, local.leaving_statements)
    }

    # of all nodes that come and go these alone reach the ledger; what trainings and queries run does not
    aggregator = {
      Version = "2012-10-17"
      Statement = concat(local.packages_statements, local.ssm_statements, local.leaving_statements, [
        {
          Sid       = "DecryptPackagesAndTheLedgersAddress"
          Effect    = "Allow"
          Action    = ["kms:Decrypt"]
          Resource  = [var.kms_key_arn]
          Condition = { StringEquals = { "kms:ViaService" = ["s3.${local.region}.amazonaws.com", "secretsmanager.${local.region}.amazonaws.com"] } }
        },
        ], var.ledger_secret_arn == null ? [] : [{
          Sid      = "LedgersAddress"
          Effect   = "Allow"
          Action   = ["secretsmanager:GetSecretValue"]
          Resource = [var.ledger_secret_arn]
      }])
    }

    capacity = {
      Version = "2012-10-17"
      Statement = [
        {
          # AWS offers no conditions for these; they only read
          Sid    = "Look"
          Effect = "Allow"
          Action = [
            "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeAutoScalingInstances",
            "autoscaling:DescribeScalingActivities", "autoscaling:DescribeLifecycleHooks",
            "ec2:DescribeInstances", "ec2:DescribeInstanceStatus", "ec2:DescribeInstanceTypes",
            "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeLaunchTemplates", "ec2:DescribeLaunchTemplateVersions",
            "ec2:DescribeFleets", "ec2:DescribeFleetInstances", "ec2:DescribeFleetHistory",
            "ec2:DescribeSpotPriceHistory", "ec2:GetSpotPlacementScores", "ec2:DescribeSubnets",
            "ssm:DescribeInstanceInformation", "ssm:GetCommandInvocation", "ssm:ListCommandInvocations",
            "pricing:GetProducts",
          ]
          Resource = ["*"]
        },
        {
          Sid    = "Groups"
          Effect = "Allow"
          Action = [
            "autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup",
            "autoscaling:DetachInstances", "autoscaling:SetInstanceProtection", "autoscaling:SetInstanceHealth",
            "autoscaling:CompleteLifecycleAction", "autoscaling:RecordLifecycleActionHeartbeat",
          ]
          Resource  = ["${local.arn}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${local.names.prefix}-*"]
          Condition = { StringEquals = local.ours }
        },
        {
          # the on-demand base and scale-in protection; bounds and subnets stay Terraform's
          Sid      = "GroupsPolicy"
          Effect   = "Allow"
          Action   = ["autoscaling:UpdateAutoScalingGroup"]
          Resource = ["${local.arn}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${local.names.prefix}-*"]
          Condition = {
            StringEquals = local.ours
            Null         = { "autoscaling:MinSize" = "true", "autoscaling:MaxSize" = "true", "autoscaling:VPCZoneIdentifiers" = "true" }
          }
        },
        {
          Sid       = "EndNodes"
          Effect    = "Allow"
          Action    = ["ec2:TerminateInstances"]
          Resource  = ["${local.ec2}:instance/*"]
          Condition = { StringEquals = local.ours }
        },
        {
          Sid       = "ChangeFleets"
          Effect    = "Allow"
          Action    = ["ec2:ModifyFleet", "ec2:DeleteFleets"]
          Resource  = ["${local.ec2}:fleet/*"]
          Condition = { StringEquals = local.ours }
        },
        {
          # one-off gangs: only from a launch template of ours, and only as nodes of ours
          Sid       = "StartFromOwnTemplates"
          Effect    = "Allow"
          Action    = ["ec2:CreateFleet", "ec2:RunInstances"]
          Resource  = ["${local.ec2}:launch-template/*"]
          Condition = { StringEquals = local.ours }
        },
        {
          Sid       = "StartAsOurs"
          Effect    = "Allow"
          Action    = ["ec2:CreateFleet", "ec2:RunInstances"]
          Resource  = ["${local.ec2}:fleet/*", "${local.ec2}:instance/*", "${local.ec2}:volume/*"]
          Condition = { StringEquals = local.being_ours }
        },
        {
          # a fleet cannot do without a launch template
          Sid      = "FleetOnOwnNetwork"
          Effect   = "Allow"
          Action   = ["ec2:CreateFleet"]
          Resource = local.surroundings
        },
        {
          # without one, an instance could be anything
          Sid       = "StartOnOwnNetwork"
          Effect    = "Allow"
          Action    = ["ec2:RunInstances"]
          Resource  = local.surroundings
          Condition = { ArnLike = { "ec2:LaunchTemplate" = "${local.ec2}:launch-template/*" } }
        },
        {
          Sid       = "TagWhatIsStarted"
          Effect    = "Allow"
          Action    = ["ec2:CreateTags"]
          Resource  = ["${local.ec2}:fleet/*", "${local.ec2}:instance/*", "${local.ec2}:volume/*", "${local.ec2}:network-interface/*"]
          Condition = { StringEquals = merge(local.being_ours, { "ec2:CreateAction" = ["CreateFleet", "RunInstances"] }) }
        },
        {
          Sid       = "GiveNodesTheirRole"
          Effect    = "Allow"
          Action    = ["iam:PassRole"]
          Resource  = [for role in ["node", "aggregator"] : "${local.arn}:iam::${local.account}:role/${local.names.roles[role]}"]
          Condition = { StringEquals = { "iam:PassedToService" = "ec2.amazonaws.com" } }
        },
        {
          Sid      = "ReadNotices"
          Effect   = "Allow"
          Action   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility", "sqs:GetQueueAttributes"]
          Resource = var.queue_arns
        },
        {
          Sid       = "DecryptNoticesAndVolumes"
          Effect    = "Allow"
          Action    = ["kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext", "kms:DescribeKey"]
          Resource  = [var.kms_key_arn]
          Condition = { StringEquals = { "kms:ViaService" = ["sqs.${local.region}.amazonaws.com", "ssm.${local.region}.amazonaws.com", "ec2.${local.region}.amazonaws.com"] } }
        },
        {
          Sid       = "VolumesOfOneOffNodes"
          Effect    = "Allow"
          Action    = ["kms:CreateGrant"]
          Resource  = [var.kms_key_arn]
          Condition = { Bool = { "kms:GrantIsForAWSResource" = "true" }, StringEquals = { "kms:ViaService" = "ec2.${local.region}.amazonaws.com" } }
        },
        {
          Sid      = "OurDocuments"
          Effect   = "Allow"
          Action   = ["ssm:SendCommand"]
          Resource = [for document in values(local.names.documents) : "${local.arn}:ssm:${local.region}:${local.account}:document/${document}"]
        },
        {
          Sid       = "OnOurNodes"
          Effect    = "Allow"
          Action    = ["ssm:SendCommand"]
          Resource  = ["${local.ec2}:instance/*"]
          Condition = { StringEquals = { for tag, value in module.naming.managed_by_loop : "ssm:resourceTag/${tag}" => value } }
        },
        local.settings_statement,
      ]
    }

    "prefect-server" = {
      Version = "2012-10-17"
      Statement = concat(local.packages_statements, local.ssm_statements, [
        {
          Sid       = "DecryptPackages"
          Effect    = "Allow"
          Action    = ["kms:Decrypt"]
          Resource  = [var.kms_key_arn]
          Condition = { StringEquals = { "kms:ViaService" = "s3.${local.region}.amazonaws.com" } }
        },
      ])
    }

    "prefect-worker" = {
      Version = "2012-10-17"
      Statement = concat(local.store_statements, local.packages_statements, local.tables_statements, local.ssm_statements, [
        local.settings_statement,
        {
          Sid      = "BecomeTheCapacityLoop"
          Effect   = "Allow"
          Action   = ["sts:AssumeRole"]
          Resource = ["${local.arn}:iam::${local.account}:role/${local.names.roles.capacity}"]
        },
      ])
    }
  }

  ec2_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })

  capacity_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { AWS = concat([aws_iam_role.instance["prefect-worker"].arn], var.capacity_principals) }
    }]
  })

  instance_roles = toset(["node", "aggregator", "prefect-server", "prefect-worker"])
}

resource "aws_iam_role" "instance" {
  for_each = local.instance_roles

  name                 = local.names.roles[each.key]
  description          = "Nodes of the Ebbflow cluster ${var.cluster}: ${each.key}"
  assume_role_policy   = local.ec2_trust
  permissions_boundary = var.permissions_boundary_arn

  tags = merge(module.naming.tags, { Name = local.names.roles[each.key] })
}

resource "aws_iam_role" "capacity" {
  name                 = local.names.roles.capacity
  description          = "The capacity loop of the Ebbflow cluster ${var.cluster}"
  assume_role_policy   = local.capacity_trust
  permissions_boundary = var.permissions_boundary_arn
  max_session_duration = 43200

  tags = merge(module.naming.tags, { Name = local.names.roles.capacity })
}

resource "aws_iam_role_policy" "this" {
  for_each = local.policies

  name   = "ebbflow"
  role   = each.key == "capacity" ? aws_iam_role.capacity.name : aws_iam_role.instance[each.key].name
  policy = jsonencode(each.value)
}

resource "aws_iam_instance_profile" "this" {
  for_each = aws_iam_role.instance

  name = each.value.name
  role = each.value.name

  tags = merge(module.naming.tags, { Name = each.value.name })
}
