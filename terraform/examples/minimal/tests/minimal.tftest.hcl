mock_provider "aws" {
  source = "../../tests/mocks"
}

variables {
  ebbflow_package = "s3://bucket/packages/prefect_ebbflow-0.1.0-py3-none-any.whl"
  ebbflow_sha256  = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

  table_bucket_arns = ["arn:aws:s3:::my-tables"]
}

run "everything" {
  command = apply
}
