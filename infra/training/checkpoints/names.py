"""How full checkpoints and their manifests are named, for those who need no torch."""

import re

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{12})-(\d{13})-[0-9a-f]{8}")  # optimizer steps, milliseconds since 1970, random
