mock_provider "aws" {
  source = "../../tests/mocks"
}

run "everything" {
  command = apply
}
