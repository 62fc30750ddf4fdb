module "naming" {
  source = "../naming"

  cluster = var.cluster
  tags    = var.tags
}

locals {
  names = module.naming.names

  # The text of a parameter is put into the script as it is, so every parameter has a form that a shell reads as one word.
  documents = {
    "spark-worker" = {
      description = "Start, stop or look at the node's Spark worker; starting one that runs changes nothing"
      parameters = {
        action = {
          type          = "String"
          description   = "start, stop or status"
          allowedValues = ["start", "stop", "status"]
          default       = "status"
        }
      }
      script = ["exec /usr/local/sbin/ebbflow-spark '{{ action }}'"]
    }

    "torch-node" = {
      description = "Start, stop or look at a training's node process; starting one that runs changes nothing"
      parameters = {
        action = {
          type          = "String"
          description   = "start, stop or status"
          allowedValues = ["start", "stop", "status"]
          default       = "status"
        }
        name = {
          type           = "String"
          description    = "The node's key within its run"
          allowedPattern = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
        }
        entry = {
          type           = "String"
          description    = "What EBBFLOW_NODE_ENTRY holds, in base64, which is no secret; needed to start"
          allowedPattern = "^[A-Za-z0-9+/=]*$"
          default        = ""
        }
      }
      script = ["exec /usr/local/sbin/ebbflow-torch '{{ action }}' '{{ name }}' '{{ entry }}'"]
    }

    "drain" = {
      description = "Let the node finish and leave within the given seconds"
      parameters = {
        seconds = {
          type           = "String"
          description    = "Seconds from now on"
          allowedPattern = "^[0-9]{1,5}$"
          default        = "120"
        }
      }
      script = ["exec /usr/local/sbin/ebbflow-drain '{{ seconds }}'"]
    }
  }
}

resource "aws_ssm_document" "this" {
  for_each = local.documents

  name            = local.names.documents[each.key]
  document_type   = "Command"
  document_format = "JSON"
  target_type     = "/AWS::EC2::Instance"
  content = jsonencode({
    schemaVersion = "2.2"
    description   = each.value.description
    parameters    = each.value.parameters
    mainSteps = [{
      name         = "run"
      action       = "aws:runShellScript"
      precondition = { StringEquals = ["platformType", "Linux"] }
      inputs = {
        timeoutSeconds = tostring(var.timeout)
        runCommand     = each.value.script
      }
    }]
  })

  tags = merge(module.naming.tags, { Name = local.names.documents[each.key] })
}
