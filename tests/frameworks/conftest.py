"""Trainers of other frameworks. Where they are not installed nothing here is collected: make frameworks."""

from importlib.util import find_spec

collect_ignore_glob = ["*"] if find_spec("accelerate") is None else []
