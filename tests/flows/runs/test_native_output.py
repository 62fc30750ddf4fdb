"""What C libraries print must not end up in a command's output."""

import subprocess
import sys

SCRIPT = """
import os
from ebbflow.flows.runs.options import without_native_output

print("before")
with without_native_output():
    os.write(1, b"noise\\n")
    print("within")
os.write(1, b"direct\\n")
print("after")
"""


def test_only_python_writes_to_standard_output():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150, check=True
    )
    assert run.stdout.splitlines() == ["before", "within", "direct", "after"]
