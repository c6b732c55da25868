"""`jkv plan` computes what fits a device, and whether compression pays; `jkv plan --list` lists known models and devices."""

import argparse
import math
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, add_budget, add_sampling, add_settings, check_target, sampling_of
from jkv.cli.options import KV_DTYPE, WEIGHT_DTYPE, read_settings

GIGA, TERA = 1e9, 1e12


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "plan",
        help="compute what fits a device, how fast it could be, and whether compression pays",
        description="Bytes, the largest batch, a bound on tokens a second, and from which length compression pays. Loads "
        "nothing and runs nothing.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "model", nargs="?", help="a name of --list, a TOML file, a checkpoint folder, a GGUF file, or a hub name"
    )
    command.add_argument("--list", action="store_true", help="list the models and devices that have names")
    command.add_argument("--device", help="a name of --list")
    command.add_argument("--policy", default="full", help="how the cache stays small (see `jkv policies`); default: full")
    add_budget(command)
    add_settings(command)
    command.add_argument("--length", type=int, help="tokens of a row, prompt included; default: 16384, or what the model has")
    command.add_argument("--prompt", type=int, default=256, help="tokens of it that are the prompt; default: 256")
    command.add_argument("--batch", type=int, help="rows decoded together; default: as many as fit")
    add_sampling(command, temperature=1, top_p=0.95)
    command.add_argument("--page-size", type=int, help="slots of a page; default: 128 on a TPU, 16 elsewhere")
    command.add_argument("--dtype", help="of weights and cache; default: float32 on a CPU, bfloat16 elsewhere")
    WEIGHT_DTYPE.add(command)
    KV_DTYPE.add(command)
    command.add_argument("--num-devices", type=int, default=1, help="that KV heads are split over; default: 1")
    command.add_argument("--memory-share", type=float, default=0.9, help="of a device's memory to fill; default: 0.9")
    command.add_argument("--memory", type=float, metavar="GB", help="of a device, in place of the vendor's")
    command.add_argument("--bandwidth", type=float, metavar="GB/S", help="of its memory, likewise")
    command.add_argument("--rate", type=float, metavar="TFLOP/S", help="of its arithmetic, likewise")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--out", type=Path, metavar="FILE", help="write JSON here too")


def run(options: argparse.Namespace) -> int:
    """Plans, and prints the report."""
    import dataclasses
    import json

    from jkv.checkpoints.model_shapes import SHAPES
    from jkv.planning.devices import DEVICES, find_device
    from jkv.planning.plan import DRAWN, plan
    from jkv.policies import make

    if options.list:
        print(f"models: {', '.join(SHAPES)}\ndevices:")
        for device in DEVICES.values():
            assert device.bandwidth is not None
            assert device.rate is not None
            speed = f"{device.bandwidth / GIGA:6,.0f} GB/s {device.rate / TERA:7,.1f} TFLOP/s"
            print(f"  {device.name:<10} {device.platform} {device.memory / GIGA:5,.0f} GB {speed}")
        print("  cpu        this machine's memory; --bandwidth and --rate set its speed")
        return 0
    if options.model is None or options.device is None:
        raise ValueError("plan takes a model and --device; `jkv plan --list` lists those that have names.")
    if options.out:
        check_target(options.out)
    device = find_device(options.device)
    given = {"memory": (options.memory, GIGA), "bandwidth": (options.bandwidth, GIGA), "rate": (options.rate, TERA)}
    own = {field: value * unit for field, (value, unit) in given.items() if value is not None}
    if odd := next((field for field, value in own.items() if not 0 < value < math.inf), None):
        raise ValueError(f"--{odd} must be above 0 and finite; got {given[odd][0]}.")
    if "memory" in own:
        own["memory"] = int(own["memory"])
    if "rate" in own:
        own["rate_float32"] = None
    found = plan(
        options.model,
        dataclasses.replace(device, **own),
        policy=make(options.policy, read_settings(options.budget, options.set)),
        length=options.length,
        prompt=options.prompt,
        batch=options.batch,
        page_size=options.page_size,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        weight_dtype=options.weight_dtype,
        num_devices=options.num_devices,
        sampling=sampling_of(options, DRAWN),
        memory_share=options.memory_share,
    )
    text = json.dumps(dataclasses.asdict(found), indent=1)
    print(text if options.json else found)
    if options.out:
        from jkv.reports import write_text

        write_text(options.out, text + "\n")
    return 0
