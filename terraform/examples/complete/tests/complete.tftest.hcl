mock_provider "aws" {
  source = "../../tests/mocks"
}

variables {
  ebbflow_package = "s3://bucket/packages/prefect_ebbflow-0.1.0-py3-none-any.whl"
  ebbflow_sha256  = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

  cluster         = "prod"
  host_name       = "prefect.example.com"
  certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/11111111-2222-3333-4444-555555555555"

  worker_torch_index_url = "https://packages.example.com/cpu"
  ledger_secret_arn      = "arn:aws:secretsmanager:us-east-1:123456789012:secret:ledger-abcdef"

  ledger_security_group_id = "sg-0123456789abcdef0"
}

run "everything" {
  command = apply
}
