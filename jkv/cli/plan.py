"""`jkv plan` computes what fits a device, and whether compression pays; `jkv plan --list` lists known models and devices."""

import argparse
import math
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, check_target, sampling_of
from jkv.cli.options import (
    BUDGET,
    DEVICE_PAGE_SIZE,
    DRAFTS,
    DTYPE,
    KV_DTYPE,
    POLICY,
    SET,
    SPECULATE,
    WEIGHT_DTYPE,
    Option,
    add_options,
    read_settings,
    sampling_options,
)
from jkv.errors import refused

GIGA, TERA = 1e9, 1e12
OPTIONS = (
    Option("list", bool, False, "list the models and devices that have names"),
    Option("device", str, None, "a name of --list"),
    POLICY,
    BUDGET,
    SET,
    Option("length", int, None, "tokens of a row, prompt included; default: 16384, or what the model has"),
    Option("prompt", int, 256, "tokens of it that are the prompt"),
    Option("batch", int, None, "rows decoded together; default: as many as fit"),
    *sampling_options(temperature=1, top_p=0.95),
    DEVICE_PAGE_SIZE,
    DTYPE,
    WEIGHT_DTYPE,
    KV_DTYPE,
    SPECULATE,
    DRAFTS,
    Option("max_adapters", int, 0, "places for adapters that requests may choose"),
    Option("adapter_rank", int, 16, "the highest rank of such an adapter"),
    Option("num_devices", int, 1, "that KV heads are split over"),
    Option("memory_share", float, 0.9, "of a device's memory to fill"),
    Option("memory", float, None, "of a device, in place of the vendor's", more={"metavar": "GB"}),
    Option("bandwidth", float, None, "of its memory, likewise", more={"metavar": "GB/S"}),
    Option("rate", float, None, "of its arithmetic, likewise", more={"metavar": "TFLOP/S"}),
    Option("json", bool, False, "print JSON"),
    Option("out", str, None, "write JSON here too", Path, {"metavar": "FILE"}),
)


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
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Plans, and prints the report."""
    import dataclasses
    import json

    from jkv.checkpoints.model_shapes import SHAPES
    from jkv.engine.drafters import drafter_named
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
        raise refused("plan takes a model and --device; `jkv plan --list` lists those that have names.", device="missing")
    if options.out:
        check_target(options.out)
    device = find_device(options.device)
    given = {"memory": (options.memory, GIGA), "bandwidth": (options.bandwidth, GIGA), "rate": (options.rate, TERA)}
    own = {field: value * unit for field, (value, unit) in given.items() if value is not None}
    if odd := next((field for field, value in own.items() if not 0 < value < math.inf), None):
        raise refused(f"--{odd} must be above 0 and finite; got {given[odd][0]}.", **{odd: "out_of_range"})
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
        speculate=drafter_named(options.speculate, options.drafts),
        max_adapters=options.max_adapters,
        adapter_rank=options.adapter_rank,
    )
    text = json.dumps(dataclasses.asdict(found), indent=1)
    print(text if options.json else found)
    if options.out:
        from jkv.reports import write_text

        write_text(options.out, text + "\n")
    return 0
