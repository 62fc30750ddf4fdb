"""This machine: processes and who guards them, control groups, GPUs, a server for pages."""
