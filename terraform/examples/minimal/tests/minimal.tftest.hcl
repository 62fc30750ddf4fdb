mock_provider "aws" {
  source = "../../tests/mocks"
}

variables {
  ebbflow_sha256 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

  table_bucket_arns = ["arn:aws:s3:::my-tables"]
}

run "everything" {
  command = apply
}
