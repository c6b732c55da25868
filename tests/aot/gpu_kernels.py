"""What a compiled program says of its GPU kernels: the grid, shared memory, registers and loads on their way.

`python -m tests.aot.gpu_kernels` prints these figures of `paged_attention` as a table, for an H200 that need not be there.
"""

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.choice import RESERVED_BYTES, SHARED_KIB
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.paged_attention import gpu, shapes
from tests.aot import targets

MULTIPROCESSORS, REGISTERS = 132, 65_536  # of an H200, and of each of its multiprocessors


class GpuKernel(NamedTuple):
    """A kernel as it is launched."""

    name: str
    programs: int
    threads: int
    shared_bytes: int
    registers: int = 0  # per thread; 0 where the compiler writes no PTX (jax 0.11 and later)
    spilled_bytes: int = 0
    waits: tuple[int, ...] = ()  # asynchronous loads that are still on their way after each wait, in the order of the code

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once. Registers are given to warps in units of 256."""
        by_memory = SHARED_KIB[9, 0] * 1024 // (self.shared_bytes + RESERVED_BYTES)
        by_registers = REGISTERS // (self.threads // 32 * -(-max(1, self.registers) * 32 // 256) * 256)
        return min(by_memory, by_registers, 2048 // self.threads)

    @property
    def waves(self) -> float:
        """How often the device is filled with programs."""
        return self.programs / (MULTIPROCESSORS * self.resident)


def assembler() -> Path:
    """The `ptxas` of the extra `aot-gpu`; skips the test without it."""
    found = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        pytest.skip(f"{targets.ASSEMBLER} is not installed (extra {targets.EXTRAS['cuda']})")
    return Path(places[0]) / "bin" / "ptxas"


def kernels_of(trace: Callable[..., jax.stages.Traced], *args: Any, target: str = "h200") -> list[GpuKernel]:
    """The kernels of a program in the order of their launches; skips the test where the compilers are missing."""
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        targets.compile_for(target, trace, *args, compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        launches = "".join(path.read_text() for path in Path(folder).glob("*.thunk_sequence.txt"))
        figures = {name: found for path in Path(folder).glob("*.ptx") for name, found in assembled(path).items()}
    line = re.compile(r"kCustomKernel.*?\] (\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), .*shared_memory: (\d+) bytes")
    found = []
    for name, x, y, z, threads, shared in line.findall(launches):
        found.append(GpuKernel(name, int(x) * int(y) * int(z), int(threads), int(shared), *figures.get(name, ())))
    return found


def assembled(path: Path) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Kernel -> registers, spilled bytes and waits, for each kernel of a file of PTX."""
    text = path.read_text()
    names = re.findall(r"\.entry (\w+)", text)
    if not names:
        return {}
    architecture = re.search(r"\.target (\w+)", text)
    assert architecture
    run = [assembler(), "-v", f"-arch={architecture[1]}", path, "-o", "/dev/null"]
    told = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    spills, registers = re.findall(r"(\d+) bytes spill stores", told), re.findall(r"Used (\d+) registers", told)
    order = re.findall(r"Compiling entry function '(\w+)'", told)
    bodies = dict(zip(names, re.split(r"\.entry \w+", text)[1:], strict=True))
    waits = {name: tuple(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", body))) for name, body in bodies.items()}
    figures = zip(order, registers, spills, strict=True)
    return {name: (int(used), int(spilled), waits[name]) for name, used, spilled in figures}


def attention_kernels(model: Any, workload: Workload, *, weighted: bool = False, with_logits: bool = False) -> list[GpuKernel]:
    """The kernels of a call of `paged_attention` on an H200."""
    return kernels_of(*attention_call(model, workload, weighted=weighted, with_logits=with_logits))


def attention_code(model: Any, workload: Workload) -> dict[str, str]:
    """The PTX of each kernel of a call of `paged_attention` on an H200; skips the test where the compiler writes none."""
    return code_of(*attention_call(model, workload))


def code_of(trace: Callable[..., jax.stages.Traced], *args: Any) -> dict[str, str]:
    """The PTX of each kernel of a program on an H200; skips the test where the compiler writes none."""
    with tempfile.TemporaryDirectory() as folder:
        targets.compile_for("h200", trace, *args, compiler_options={"xla_dump_to": folder})
        found = {}
        for text in (path.read_text() for path in Path(folder).glob("*.ptx")):
            found |= zip(re.findall(r"\.entry (\w+)", text), re.split(r"\.entry \w+", text)[1:], strict=True)
    return found or pytest.skip("this JAX writes no PTX")


def attention_call(model: Any, workload: Workload, *, weighted: bool = False, with_logits: bool = False) -> list[Any]:
    """How to trace a call of `paged_attention`, and its arguments; skips the test without the compiler."""
    if reason := targets.why_missing("h200"):
        pytest.skip(reason)
    sharding = targets.sharding_of("h200")
    args = shapes.arguments(model, workload, weighted=weighted)
    assert gpu.why_not(*args, with_logits=with_logits) is None
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)

    def run(*args: Any) -> Any:
        return gpu.paged_attention(*args, with_logits=with_logits)

    return [jax.jit(run).trace, *args]


LLAMA = MODELS["r1-llama-8b"]
R_KV = Workload(batch=32, page_size=16, layers=1)
INT4 = R_KV._replace(kv_format="int4")
CALLS: dict[str, tuple[Any, Workload, dict[str, bool]]] = {
    "1 row": (LLAMA, R_KV._replace(batch=1), {}),
    "32 rows": (LLAMA, R_KV, {}),
    "128 rows": (LLAMA, R_KV._replace(batch=128), {}),
    "703 rows": (LLAMA, R_KV._replace(batch=703), {}),
    "128 rows of 16k slots": (LLAMA, R_KV._replace(batch=128, slots=16_384), {}),
    "log-weights": (LLAMA, R_KV, {"weighted": True}),
    "log-weights, logits": (LLAMA, R_KV, {"weighted": True, "with_logits": True}),
    "16 rows of 32k slots": (LLAMA, R_KV._replace(batch=16, slots=32_768), {}),
    "256 slots": (LLAMA, R_KV._replace(slots=256), {}),
    "page 128": (LLAMA, R_KV._replace(page_size=128), {}),
    "float32": (LLAMA, R_KV._replace(dtype=jnp.float32), {}),
    "int8": (LLAMA, R_KV._replace(kv_format="int8"), {}),
    "fp8": (LLAMA, R_KV._replace(kv_format="fp8"), {}),
    "int4": (LLAMA, INT4, {}),
    "int4, 128 rows": (LLAMA, INT4._replace(batch=128), {}),
    "int4, log-weights, logits": (LLAMA, INT4, {"weighted": True, "with_logits": True}),
    "int4, head 64": (LLAMA._replace(head_size=64), INT4, {}),
    "head 64": (LLAMA._replace(head_size=64), R_KV, {}),
    "head 96": (LLAMA._replace(head_size=96), R_KV, {}),
    "head 256": (LLAMA._replace(head_size=256), R_KV, {}),
    "head 256, float32": (LLAMA._replace(head_size=256), R_KV._replace(dtype=jnp.float32), {}),
}


def table() -> str:
    """The figures of all calls in Markdown. Blocks in flight are the one waited for and those behind it.

    A block is two loads, of keys and of values, or four with their scales; in int4, six with head size 128.
    """
    head = "call", "kernel", "programs", "per multiprocessor", "waves", "blocks in flight", "shared bytes", "registers"
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, (model, workload, options) in CALLS.items():
        for one in attention_kernels(model, workload, **options):
            loads = {None: 2, "int4": 2 + model.head_size // 32}.get(workload.kv_format, 4)
            ahead = str(1 + max(one.waits) // loads) if one.waits else ""
            cells = one.name, one.programs, one.resident, f"{one.waves:.2f}", ahead, one.shared_bytes, one.registers
            lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
