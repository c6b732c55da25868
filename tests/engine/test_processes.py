"""One engine over two processes: `tests/support/two_processes.py`, in processes of its own."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.devices import environment

ROOT = Path(__file__).parents[2]
SECONDS = 900


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def start(process, port, path, devices):
    command = [sys.executable, "-m", "tests.support.two_processes", str(process), port, str(path)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(devices), **output)


@pytest.mark.everyday  # nothing else covers it
def test_two_processes_of_two_devices_do_what_one_device_does(tmp_path):
    port, paths = free_port(), [tmp_path / f"{process}.json" for process in (0, 1, -1)]
    running = [start(process, port, path, 2 if process >= 0 else 1) for process, path in zip((0, 1, -1), paths, strict=True)]
    for one in running:
        said, _ = one.communicate(timeout=SECONDS)
        assert one.returncode == 0, said
    first, second, alone = (json.loads(path.read_text()) for path in paths)
    refused = [first.pop("refusals"), second.pop("refusals")]
    assert first == second
    assert first["tokens"] == alone["tokens"]
    assert first["ends"] == alone["ends"]
    assert first["preemptions"] == alone["preemptions"] > 0
    assert first["loaded"] == alone["loaded"]
    for one, other in zip(first["logprobs"], alone["logprobs"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for process, (other_requests, *other_mesh) in enumerate(refused):
        assert f"another process has others than process {process}" in other_requests
        assert (
            f"must belong to this process, number {process}, or to all of the 2; got processes [{1 - process}]" in other_mesh[0]
        )
