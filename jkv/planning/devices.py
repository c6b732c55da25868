"""Devices for `jkv.plan`: memory, memory bandwidth and peak rates, as their vendors publish them.

Figures are for one JAX device, in bytes, bytes a second, and operations a second without sparsity. A vendor's GB counts as
10**9, which is never too many. Matrix products in float32 have the rate of JAX's default precision: TF32 on a GPU that has it,
bfloat16 passes on a TPU. Figures of H200, H100, A100, L4, T4, V100 and TPUs were read from the pages named here; the figures of
other GPUs were written down from memory, and only the RTX 4090's were compared with a page. Sources: NVIDIA's data sheets of
B200 (a GPU of HGX), GH200, H200, H100 SXM, A100 SXM, A10G, L40S, L4, T4 and V100 SXM2, its Ada and Blackwell white papers for
RTX cards (16 bits with sums in float32), and the pages v4, v5e, v5p, v6e and tpu7x of docs.cloud.google.com/tpu/docs. A chip of
TPU 7x is two devices to JAX, each with half of it.
"""

import dataclasses
import os

from jkv.checks import check_known, did_you_mean, out_of_range
from jkv.errors import refused
from pallas_kernels.choice import LEAST_CAPABILITY


@dataclasses.dataclass(frozen=True)
class Device:
    """One device, by its vendor's figures or your own.

    Attributes:
      name: its name in reports.
      platform: "tpu", "gpu" or "cpu".
      memory: bytes.
      bandwidth: bytes a second between memory and cores; None if unknown, and then no speed is planned.
      rate: operations a second of matrix products in 16 bits; None if unknown.
      rate_float32: the same in float32, at JAX's default precision; None if `rate` applies.
      compute_capability: of an NVIDIA GPU, as (major, minor): below (8, 0) it has no Triton kernels and no bfloat16.
    """

    name: str
    platform: str
    memory: int
    bandwidth: float | None = None
    rate: float | None = None
    rate_float32: float | None = None
    compute_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_known(("tpu", "gpu", "cpu"), platform=self.platform)
        for field in ("memory", "bandwidth", "rate", "rate_float32"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise out_of_range(field, "be above 0", value)
        given = self.compute_capability
        if given is not None and not (
            isinstance(given, tuple) and len(given) == 2 and all(type(part) is int for part in given)
        ):
            rule = f"compute_capability must be two integers, like (7, 5); got {given!r}."
            raise refused(rule, compute_capability="wrong_type")

    @property
    def is_old_gpu(self) -> bool:
        """Whether it is a GPU with neither Triton kernels nor bfloat16."""
        return self.compute_capability is not None and self.compute_capability < LEAST_CAPABILITY

    def rate_of(self, itemsize: int) -> float | None:
        """Operations a second of matrix products whose elements have `itemsize` bytes."""
        return self.rate_float32 if itemsize == 4 and self.rate_float32 else self.rate


GB, GB_S, TFLOP_S = 10**9, 1e9, 1e12
DEVICES = {
    device.name: device
    for device in (
        Device("b200", "gpu", 180 * GB, 7700 * GB_S, 2250 * TFLOP_S, 1125 * TFLOP_S, (10, 0)),
        Device("gh200", "gpu", 96 * GB, 4000 * GB_S, 989 * TFLOP_S, 495 * TFLOP_S, (9, 0)),
        Device("gh200-144gb", "gpu", 144 * GB, 4900 * GB_S, 989 * TFLOP_S, 495 * TFLOP_S, (9, 0)),
        Device("h200", "gpu", 141 * GB, 4800 * GB_S, 989 * TFLOP_S, 495 * TFLOP_S, (9, 0)),
        Device("h100", "gpu", 80 * GB, 3350 * GB_S, 989 * TFLOP_S, 495 * TFLOP_S, (9, 0)),
        Device("a100", "gpu", 80 * GB, 2039 * GB_S, 312 * TFLOP_S, 156 * TFLOP_S, (8, 0)),
        Device("a100-40gb", "gpu", 40 * GB, 1555 * GB_S, 312 * TFLOP_S, 156 * TFLOP_S, (8, 0)),
        Device("rtx-pro-6000", "gpu", 96 * GB, 1792 * GB_S, 503 * TFLOP_S, 251 * TFLOP_S, (12, 0)),
        Device("rtx-6000-ada", "gpu", 48 * GB, 960 * GB_S, 364 * TFLOP_S, 182 * TFLOP_S, (8, 9)),
        Device("l40s", "gpu", 48 * GB, 864 * GB_S, 362 * TFLOP_S, 183 * TFLOP_S, (8, 9)),
        Device("rtx-5090", "gpu", 32 * GB, 1792 * GB_S, 209 * TFLOP_S, 104 * TFLOP_S, (12, 0)),
        Device("rtx-4090", "gpu", 24 * GB, 1008 * GB_S, 165 * TFLOP_S, 82 * TFLOP_S, (8, 9)),
        Device("rtx-3090", "gpu", 24 * GB, 936 * GB_S, 71 * TFLOP_S, 35 * TFLOP_S, (8, 6)),
        Device("a10g", "gpu", 24 * GB, 600 * GB_S, 70 * TFLOP_S, 35 * TFLOP_S, (8, 6)),
        Device("l4", "gpu", 24 * GB, 300 * GB_S, 121 * TFLOP_S, 60 * TFLOP_S, (8, 9)),
        Device("t4", "gpu", 16 * GB, 300 * GB_S, 65 * TFLOP_S, 8.1 * TFLOP_S, (7, 5)),
        Device("v100", "gpu", 16 * GB, 900 * GB_S, 125 * TFLOP_S, 15.7 * TFLOP_S, (7, 0)),
        Device("v4", "tpu", 32 * GB, 1200 * GB_S, 275 * TFLOP_S),
        Device("v5e", "tpu", 16 * GB, 819 * GB_S, 197 * TFLOP_S),
        Device("v5p", "tpu", 95 * GB, 2765 * GB_S, 459 * TFLOP_S),
        Device("v6e", "tpu", 32 * GB, 1638 * GB_S, 918 * TFLOP_S),
        Device("7x", "tpu", 96 * GB, 3690 * GB_S, 1153 * TFLOP_S),
    )
}


def find_device(name: str | Device) -> Device:
    """The device with this name, in small or large letters; "cpu" is this machine, whose speed is unknown.

    Raises:
      ValueError: an unknown name; the known ones are listed.

    >>> find_device("V5e").memory
    16000000000
    """
    if isinstance(name, Device):
        return name
    wanted = str(name).lower()
    if wanted == "cpu":
        return Device("cpu", "cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if wanted not in DEVICES:
        known = ", ".join(DEVICES)
        raise refused(
            f"device must be one of {known}, cpu, or a jkv.Device with figures of your own; got {name!r}."
            f"{did_you_mean(wanted, DEVICES)}",
            device="unknown_name",
        )
    return DEVICES[wanted]
