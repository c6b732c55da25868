"""Several devices of a CPU, whose number is settled when JAX starts: for tests that start a process of their own."""

import os

SECONDS = 600  # that devices wait for each other before the process is aborted; by default 40, which a busy machine exceeds


def environment(num_devices):
    """The environment of a process with `num_devices` CPU devices."""
    flags = (
        f"--xla_force_host_platform_device_count={num_devices} --xla_cpu_collective_call_terminate_timeout_seconds={SECONDS}"
    )
    return os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_PLATFORMS": "cpu"}
