# What must hold of each module on its own: terraform test, from the directory terraform/.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster            = "lab"
  kms_key_arn        = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  name               = "etl"
  instance_types     = ["m5.large", "m6i.large"]
  subnet_ids         = ["subnet-1", "subnet-2"]
  security_group_ids = ["sg-1"]
  instance_profile   = "ebbflow-lab-node"
  spark_master       = "spark://10.42.16.10:7077"
  ebbflow_package    = "s3://bucket/packages/prefect_ebbflow-0.1.0-py3-none-any.whl"
  spark_secret_arn   = "arn:aws:secretsmanager:us-east-1:123456789012:secret:ebbflow-lab-spark-abcdef"
  ebbflow_sha256     = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
}

run "a_pool_is_private_encrypted_and_tagged" {
  module {
    source = "./modules/spot-pool"
  }

  variables {
    max_size       = 8
    initial_size   = 1
    on_demand_base = 1
    tags           = { Owner = "me", "ebbflow:cluster" = "other" }
  }

  assert {
    condition     = one(aws_launch_template.this.metadata_options).http_tokens == "required" && one(aws_launch_template.this.metadata_options).http_put_response_hop_limit == 1
    error_message = "The metadata service must answer version 2 only, and not to containers."
  }

  assert {
    condition     = tobool(one(one(aws_launch_template.this.block_device_mappings).ebs).encrypted) && one(one(aws_launch_template.this.block_device_mappings).ebs).kms_key_id == var.kms_key_arn
    error_message = "Volumes must be encrypted by the cluster's key."
  }

  assert {
    condition     = alltrue([for interface in aws_launch_template.this.network_interfaces : !tobool(interface.associate_public_ip_address)])
    error_message = "A node must have no public address."
  }

  assert {
    condition = alltrue([
      for specification in aws_launch_template.this.tag_specifications :
      specification.tags == tomap({ Name = "ebbflow-lab-etl", Owner = "me", "ebbflow:cluster" = "lab", "ebbflow:managed" = "loop", "ebbflow:role" = "spark-worker", "ebbflow:pool" = "etl" })
    ]) && toset(aws_launch_template.this.tag_specifications[*].resource_type) == toset(["instance", "volume", "network-interface"])
    error_message = "Nodes, volumes and interfaces must carry the cluster's tags, which no tag of the user's replaces."
  }

  assert {
    condition     = alltrue([for tag in aws_autoscaling_group.this.tag : tag.propagate_at_launch]) && contains(aws_autoscaling_group.this.tag[*].key, "ebbflow:cluster")
    error_message = "The group must pass its tags on."
  }

  assert {
    condition     = one(one(aws_autoscaling_group.this.mixed_instances_policy).instances_distribution).spot_allocation_strategy == "price-capacity-optimized" && one(one(aws_autoscaling_group.this.mixed_instances_policy).instances_distribution).on_demand_base_capacity == 1
    error_message = "The group must look for capacity first, and keep its on-demand base."
  }

  assert {
    condition     = aws_autoscaling_group.this.capacity_rebalance && contains(aws_autoscaling_group.this.suspended_processes, "AZRebalance")
    error_message = "The group must replace nodes at risk, and never end one for the balance of zones."
  }

  assert {
    condition     = aws_autoscaling_lifecycle_hook.drain.name == "drain" && aws_autoscaling_lifecycle_hook.drain.lifecycle_transition == "autoscaling:EC2_INSTANCE_TERMINATING" && aws_autoscaling_lifecycle_hook.drain.heartbeat_timeout == 150
    error_message = "A node that the group ends must be given time to drain."
  }
}

run "an_apply_leaves_the_size_of_a_pool_to_the_capacity_loop" {
  command = plan

  module {
    source = "./modules/spot-pool"
  }

  variables {
    max_size       = 8
    initial_size   = 5
    on_demand_base = 1
    tags           = { Owner = "me", "ebbflow:cluster" = "other" }
  }

  assert {
    condition     = aws_autoscaling_group.this.desired_capacity == 1
    error_message = "desired_capacity must be left alone after the group is made."
  }
}

run "a_pool_refuses_what_makes_no_sense" {
  command = plan

  module {
    source = "./modules/spot-pool"
  }

  variables {
    name           = "Not A Name"
    kind           = "gpu"
    instance_types = []
    max_size       = 2
    initial_size   = 3
    max_spot_price = "cheap"
    ami_id         = "latest"
    root_volume    = { size = 60 }
    kms_key_arn    = "alias/key"
  }

  expect_failures = [var.name, var.instance_types, var.initial_size, var.max_spot_price, var.ami_id, var.root_volume, var.kms_key_arn]
}

run "a_pool_is_of_a_kind_that_is_known" {
  command = plan

  module {
    source = "./modules/spot-pool"
  }

  variables {
    kind = "quantum"
  }

  expect_failures = [var.kind]
}

run "a_wheel_without_its_hash_is_refused" {
  command = plan

  module {
    source = "./modules/node-config"
  }

  variables {
    role            = "gpu-trainer"
    region          = "us-east-1"
    ebbflow_package = "s3://bucket/store/prefect_ebbflow-0.1.0-py3-none-any.whl"
    ebbflow_sha256  = "latest"
  }

  expect_failures = [var.ebbflow_package, var.ebbflow_sha256]
}

run "storage_is_private_encrypted_and_versioned" {
  module {
    source = "./modules/storage"
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.this.block_public_acls && aws_s3_bucket_public_access_block.this.block_public_policy && aws_s3_bucket_public_access_block.this.ignore_public_acls && aws_s3_bucket_public_access_block.this.restrict_public_buckets
    error_message = "No object may become public."
  }

  assert {
    condition     = one(aws_s3_bucket_versioning.this.versioning_configuration).status == "Enabled"
    error_message = "A mistake must be possible to undo."
  }

  assert {
    condition     = alltrue([for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : one(rule.apply_server_side_encryption_by_default).sse_algorithm == "aws:kms" && one(rule.apply_server_side_encryption_by_default).kms_master_key_id == aws_kms_key.this.arn])
    error_message = "Objects must be encrypted by the cluster's key."
  }

  assert {
    condition     = aws_kms_key.this.enable_key_rotation
    error_message = "The key must rotate."
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(local.key_policy).Statement : can(statement.Condition) || can(regex(":root$", statement.Principal.AWS))
    ])
    error_message = "Nobody but the account may use the key without a condition."
  }

  assert {
    condition     = contains([for statement in jsondecode(local.bucket_policy).Statement : try(statement.Condition.Bool["aws:SecureTransport"], "")], "false")
    error_message = "Connections without TLS must be refused."
  }

  assert {
    condition = [
      for statement in jsondecode(local.bucket_policy).Statement :
      statement.Effect == "Deny" && endswith(statement.Resource, "/packages/*") && length(setintersection(statement.Action, ["s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion"])) == 3 &&
      toset(statement.Condition.ArnLike["aws:PrincipalArn"]) == toset([for role in ["node", "aggregator", "capacity", "prefect-server", "prefect-worker"] : "arn:aws:iam::123456789012:role/ebbflow-lab-${role}"])
      if statement.Sid == "NoNodeWritesPackages"
    ] == [true]
    error_message = "No role of the cluster may write what its nodes install, whatever its own policy says."
  }

  assert {
    condition     = !contains(keys({ for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.id => rule }), "checkpoints")
    error_message = "Checkpoints are deleted by Ebbflow unless a number of days is given."
  }
}

run "only_the_rules_may_send_notices" {
  module {
    source = "./modules/notices"
  }

  variables {
    groups        = ["ebbflow-lab-etl"]
    alarm_actions = ["arn:aws:sns:us-east-1:123456789012:people"]
  }

  assert {
    condition     = alltrue([for policy in values(local.queue_policies) : alltrue([for statement in jsondecode(policy).Statement : statement.Effect == "Deny" || (statement.Principal == { Service = "events.amazonaws.com" } && statement.Action == "sqs:SendMessage" && try(length(statement.Condition.ArnEquals["aws:SourceArn"]), 0) == 7)])])
    error_message = "Only the seven rules may be allowed anything."
  }

  assert {
    condition     = alltrue([for policy in values(local.queue_policies) : anytrue([for statement in jsondecode(policy).Statement : statement.Effect == "Deny" && can(statement.Condition.ArnNotEqualsIfExists["aws:SourceArn"])])])
    error_message = "Everybody else must be refused."
  }

  assert {
    condition     = aws_sqs_queue.this.kms_master_key_id == var.kms_key_arn && aws_sqs_queue.dead.kms_master_key_id == var.kms_key_arn
    error_message = "Queues must be encrypted by the cluster's key."
  }

  assert {
    condition     = jsondecode(aws_sqs_queue.this.redrive_policy).maxReceiveCount == 5 && aws_sqs_queue.dead.message_retention_seconds == 1209600
    error_message = "What cannot be handled must be kept for two weeks."
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["lifecycle"].event_pattern).detail.AutoScalingGroupName == ["ebbflow-lab-etl"]
    error_message = "Groups of other clusters are none of ours."
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["node"].event_pattern).source == [{ prefix = "ebbflow.lab." }]
    error_message = "Nodes of other clusters are none of ours."
  }

  assert {
    condition     = length(aws_cloudwatch_metric_alarm.dead) == 1
    error_message = "Dead letters must be told when somebody is named."
  }
}

run "the_capacity_loop_acts_on_its_own_nodes_only" {
  module {
    source = "./modules/iam"
  }

  variables {
    bucket_arn          = "arn:aws:s3:::ebbflow-lab-123456789012-us-east-1"
    queue_arns          = ["arn:aws:sqs:us-east-1:123456789012:ebbflow-lab-notices"]
    capacity_principals = ["arn:aws:iam::123456789012:role/me"]
  }

  # whatever changes or ends something that is a node's, a group's or a fleet's asks for the cluster's tags
  assert {
    condition = alltrue(flatten([
      for statement in local.policies.capacity.Statement : [
        for action in statement.Action :
        try(statement.Condition.StringEquals["aws:ResourceTag/ebbflow:cluster"] == "lab" && statement.Condition.StringEquals["aws:ResourceTag/ebbflow:managed"] == "loop", false)
        if can(regex("^(ec2:(Terminate|Modify|Delete|Stop|Reboot)|autoscaling:(Set|Terminate|Detach|Complete|Record|Update|Delete))", action))
      ]
    ]))
    error_message = "Ending and changing must ask for the cluster's tags."
  }

  assert {
    condition = alltrue([
      for statement in local.policies.capacity.Statement :
      try(statement.Condition.StringEquals["aws:RequestTag/ebbflow:cluster"], statement.Condition.StringEquals["aws:ResourceTag/ebbflow:cluster"], "") == "lab"
      if contains(statement.Action, "ec2:RunInstances") && anytrue([for resource in statement.Resource : endswith(resource, "instance/*") || endswith(resource, "launch-template/*")])
    ])
    error_message = "What is started must be tagged as the cluster's, and come from its launch templates."
  }

  assert {
    condition = alltrue([
      for statement in local.policies.capacity.Statement :
      try(statement.Condition.StringEquals["ssm:resourceTag/ebbflow:cluster"] == "lab", false) || alltrue([for resource in statement.Resource : strcontains(resource, ":document/ebbflow-lab-")])
      if contains(statement.Action, "ssm:SendCommand")
    ])
    error_message = "Commands must be the cluster's documents, on the cluster's nodes."
  }

  assert {
    condition = alltrue(flatten([
      for statement in local.policies.capacity.Statement : [
        for action in statement.Action : can(regex(":(Describe|Get|List)", action))
      ] if contains(statement.Resource, "*")
    ]))
    error_message = "Only what reads may be allowed on everything."
  }

  assert {
    condition     = alltrue(flatten([for policy in values(local.policies) : [for statement in policy.Statement : [for action in statement.Action : !strcontains(action, "*")]]]))
    error_message = "No action may hold a wildcard."
  }

  assert {
    condition     = alltrue([for statement in local.policies.capacity.Statement : statement.Resource == ["arn:aws:iam::123456789012:role/ebbflow-lab-node", "arn:aws:iam::123456789012:role/ebbflow-lab-aggregator"] if contains(statement.Action, "iam:PassRole")])
    error_message = "Nodes may be given the nodes' roles only."
  }

  assert {
    condition     = alltrue(flatten([for statement in concat(local.policies.node.Statement, local.policies["prefect-worker"].Statement) : [for action in statement.Action : !startswith(action, "ec2:") && !startswith(action, "iam:")]]))
    error_message = "Nodes may neither start nor end nodes."
  }

  assert {
    condition = alltrue([
      for statement in local.policies.node.Statement :
      statement.Condition["ForAllValues:StringEquals"]["events:source"] == ["ebbflow.lab.$${ec2:SourceInstanceARN}"] && statement.Condition.Null["events:source"] == "false"
      if contains(statement.Action, "events:PutEvents")
    ])
    error_message = "A node may send events in its own name only: a forged notice drains nodes."
  }

  # what is installed as root on nodes that may do more
  assert {
    condition = alltrue(flatten([
      for policy in values(local.policies) : [
        for statement in policy.Statement : [
          for resource in statement.Resource : [
            for action in statement.Action :
            can(regex("^arn:aws:s3:::ebbflow-lab-123456789012-us-east-1/(store|spark-events)/\\*$", resource))
            if can(regex("^s3:(Put|Delete|Abort|Restore|Replicate|[*])", action))
          ]
        ]
      ]
    ]))
    error_message = "No role may write but where checkpoints and event logs are."
  }

  assert {
    condition = alltrue([
      for role in ["node", "prefect-server", "prefect-worker"] :
      contains(flatten([for statement in local.policies[role].Statement : statement.Resource if contains(statement.Action, "s3:GetObject")]), "arn:aws:s3:::ebbflow-lab-123456789012-us-east-1/packages/*")
    ])
    error_message = "Every node must be able to read the wheel that it installs."
  }
}

run "commands_take_no_free_text" {
  module {
    source = "./modules/commands"
  }

  assert {
    condition = alltrue(flatten([
      for document in local.documents : [
        for parameter in document.parameters : can(parameter.allowedValues) || can(regex("^\\^.*\\$$", parameter.allowedPattern))
      ]
    ]))
    error_message = "Every parameter must have a form."
  }
}

run "the_network_gives_no_public_addresses" {
  module {
    source = "./modules/network"
  }

  variables {
    interface_endpoints = ["ssm", "sqs"]
  }

  assert {
    condition     = alltrue([for subnet in concat(values(aws_subnet.private), values(aws_subnet.public)) : !subnet.map_public_ip_on_launch])
    error_message = "No subnet may give public addresses."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.nodes.referenced_security_group_id == aws_security_group.nodes.id && aws_vpc_security_group_egress_rule.https.from_port == 443 && aws_vpc_security_group_egress_rule.https.to_port == 443
    error_message = "Nodes are reached by nodes only, and reach nothing but HTTPS."
  }

  assert {
    condition     = length(aws_security_group.ledger) == 0 && length(aws_vpc_security_group_ingress_rule.ledger) == 0 && output.ledger_security_group_id == null
    error_message = "Nothing reaches a ledger that is not named."
  }

  assert {
    condition     = alltrue([for endpoint in aws_vpc_endpoint.interface : endpoint.security_group_ids == toset([aws_security_group.endpoints[0].id])]) && alltrue([for rule in aws_vpc_security_group_ingress_rule.endpoints : rule.from_port == 443 && rule.to_port == 443])
    error_message = "Endpoints of AWS services are reached by HTTPS, from nodes and servers alike."
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.private) == 3
    error_message = "One gateway must serve all zones unless each is to have its own."
  }
}

run "a_group_of_its_own_reaches_the_ledger_at_its_port_and_no_other" {
  module {
    source = "./modules/network"
  }

  variables {
    ledger = { security_group_id = "sg-0123456789abcdef0", port = 6432 }
  }

  assert {
    condition     = one(aws_vpc_security_group_egress_rule.ledger).security_group_id == one(aws_security_group.ledger).id && one(aws_vpc_security_group_egress_rule.ledger).referenced_security_group_id == "sg-0123456789abcdef0" && output.ledger_security_group_id == one(aws_security_group.ledger).id
    error_message = "The group must reach the ledger's group, and nothing else."
  }

  assert {
    condition     = one(aws_vpc_security_group_ingress_rule.ledger).security_group_id == "sg-0123456789abcdef0" && one(aws_vpc_security_group_ingress_rule.ledger).referenced_security_group_id == one(aws_security_group.ledger).id
    error_message = "The ledger must be reached by that group alone."
  }

  assert {
    condition     = alltrue([for rule in concat(aws_vpc_security_group_egress_rule.ledger, aws_vpc_security_group_ingress_rule.ledger) : rule.from_port == 6432 && rule.to_port == 6432 && rule.ip_protocol == "tcp"])
    error_message = "One port is open, for TCP."
  }
}

run "a_ledger_that_is_none_is_refused" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    ledger = { security_group_id = "db.internal", port = 70000 }
  }

  expect_failures = [var.ledger]
}

run "prefect_is_reached_by_tls_and_its_database_by_the_server" {
  module {
    source = "./modules/prefect"
  }

  variables {
    vpc_id                  = "vpc-1"
    private_subnet_ids      = ["subnet-1", "subnet-2"]
    node_security_group_ids = ["sg-1"]
    instance_profiles       = { "prefect-server" = "ebbflow-lab-prefect-server", "prefect-worker" = "ebbflow-lab-prefect-worker" }
    role_names              = { "prefect-server" = "ebbflow-lab-prefect-server", "prefect-worker" = "ebbflow-lab-prefect-worker" }
    host_name               = "prefect.example.com"
    certificate_arn         = "arn:aws:acm:us-east-1:123456789012:certificate/1"
    allowed_cidrs           = ["10.0.0.0/8"]
  }

  assert {
    condition     = aws_lb.this.internal && aws_lb_listener.https.protocol == "HTTPS" && strcontains(aws_lb_listener.https.ssl_policy, "TLS13")
    error_message = "The UI must be inside the network, and speak TLS."
  }

  assert {
    condition     = aws_db_instance.this.storage_encrypted && !aws_db_instance.this.publicly_accessible && aws_db_instance.this.manage_master_user_password && aws_db_instance.this.deletion_protection
    error_message = "The database must be private, encrypted, protected, and its password in no state file."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.database_server.referenced_security_group_id == aws_security_group.server.id && aws_vpc_security_group_ingress_rule.server_lb.referenced_security_group_id == aws_security_group.lb.id
    error_message = "The database is reached by the server, the server by the load balancer."
  }

  # TLS ends at the load balancer: whoever shared the server's group could speak to port 4200 without
  assert {
    condition     = one(aws_launch_template.this["prefect-server"].network_interfaces).security_groups == toset([aws_security_group.server.id])
    error_message = "The server must carry no group that others carry."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.server_lb.from_port == 4200 && aws_vpc_security_group_egress_rule.server_https.from_port == 443 && aws_vpc_security_group_egress_rule.server_database.from_port == 5432
    error_message = "The server is reached at one port, and reaches HTTPS and its database."
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : one(template.metadata_options).http_tokens == "required" && !tobool(one(template.network_interfaces).associate_public_ip_address) && tobool(one(one(template.block_device_mappings).ebs).encrypted)])
    error_message = "Prefect's nodes must be as closed as any other."
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : template.tags["ebbflow:managed"] == "terraform"])
    error_message = "The capacity loop must not touch Prefect's nodes."
  }
}

run "prefect_is_not_open_to_the_internet" {
  command = plan

  module {
    source = "./modules/prefect"
  }

  variables {
    vpc_id                  = "vpc-1"
    private_subnet_ids      = ["subnet-1", "subnet-2"]
    node_security_group_ids = ["sg-1"]
    instance_profiles       = { "prefect-server" = "a", "prefect-worker" = "b" }
    role_names              = { "prefect-server" = "a", "prefect-worker" = "b" }
    host_name               = "prefect.example.com"
    certificate_arn         = "arn:aws:acm:us-east-1:123456789012:certificate/1"
    allowed_cidrs           = ["0.0.0.0/0"]
  }

  expect_failures = [var.allowed_cidrs]
}

run "the_spark_master_is_on_demand_private_and_keeps_its_address" {
  module {
    source = "./modules/spark"
  }

  variables {
    subnet_cidrs = ["10.42.16.0/20", "10.42.32.0/20"]
    spark_events = "s3a://bucket/spark-events"
    worker_pools = { etl = { instance_types = ["m5.large"] } }
    role_names   = { node = "ebbflow-lab-node", "prefect-worker" = "ebbflow-lab-prefect-worker", "prefect-server" = "ebbflow-lab-prefect-server" }
  }

  assert {
    condition     = toset(keys(aws_iam_role_policy.secret)) == toset(["node", "prefect-worker"]) && aws_secretsmanager_secret.spark.kms_key_id == var.kms_key_arn
    error_message = "Spark's secret is for nodes and for drivers on Prefect's workers, and for no other role."
  }

  assert {
    condition = alltrue(flatten([for role, policy in local.secret_policies : [for statement in policy.Statement :
      statement.Resource == [aws_secretsmanager_secret.spark.arn] &&
      (statement.Action == ["secretsmanager:GetSecretValue"] || (role == "node" && try(statement.Condition.ArnEquals["ec2:SourceInstanceARN"], "anybody") == aws_instance.master.arn))
    ]]))
    error_message = "Only the master may set Spark's secret; the others read it, and no other secret."
  }

  assert {
    condition     = alltrue([for text in concat([output.user_data.master], values(output.user_data.workers)) : strcontains(text, aws_secretsmanager_secret.spark.arn)])
    error_message = "Every Spark node must know where the secret is."
  }

  assert {
    condition     = one(aws_instance.master.metadata_options).http_tokens == "required" && one(aws_instance.master.root_block_device).encrypted && !aws_instance.master.associate_public_ip_address
    error_message = "The master must be as closed as any other node."
  }

  assert {
    condition     = aws_instance.master.private_ip == "10.42.16.10" && output.master_url == "spark://10.42.16.10:7077"
    error_message = "Workers must find a master that has been replaced."
  }

  assert {
    condition     = length(aws_instance.master.instance_market_options) == 0 && aws_instance.master.tags["ebbflow:managed"] == "terraform"
    error_message = "The master is neither a spot node nor the capacity loop's."
  }

  assert {
    condition     = output.pools["etl"].group == "ebbflow-lab-etl"
    error_message = "Workers must be a pool."
  }
}
