"""One library that decodes for `research.bench.peers`, in its own process: `python -m research.bench.peer_worker jkv NAME`.

Jobs come as lines of JSON on standard input, and what they took goes back as lines on standard output. Every library has the
same weights in float32, the same prompts as token ids, all cores, and greedy decoding:

- `jkv`: `jkv.generate`, all prompts in one batch;
- `transformers`: `generate`, all prompts in one batch, padded on the left, or one after the other (`job["alone"]`);
- `kvpress`: its text-generation pipeline with a `DecodingPress`, which takes one sequence at a time.
"""

import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jkv.bench.rounds import GREEDY, timer

Tokens = list[list[int]]
Decode = Callable[[dict[str, Any]], tuple[Tokens, int]]  # a job's completions, and the most bytes that its caches held


def main() -> None:
    """Answers jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    decode = CONTENDERS[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        job = json.loads(line)
        forget_peak()
        try:
            with timer() as seconds:
                tokens, kv_bytes = decode(job)
            answer = {"seconds": seconds.running, "tokens": tokens, "kv_bytes": kv_bytes, "peak_rss": peak_rss()}
        except Exception as error:  # goes to the parent process, which ends the run
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def forget_peak() -> None:
    """Resets the process's peak memory, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """The most bytes of memory that the process had since then."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def with_jkv(name: str) -> Decode:
    """`jkv.generate`; `job["policy"]` names one, with its settings; `job["guesses"]` is for `jkv.ngram`."""
    from jkv.checkpoints.loading import load
    from jkv.engine.drafters import ngram
    from jkv.engine.results import complete
    from jkv.generate import generate
    from research.bench.kvpress_scores import policy_of

    model = load(name)

    def decode(job: dict[str, Any]) -> tuple[Tokens, int]:
        out = generate(
            model,
            job["prompts"],
            policy=policy_of(job["policy"], job.get("settings", {})),
            sampling=GREEDY,
            max_new_tokens=job["new_tokens"],
            stop_ids=() if job["forced"] else None,
            max_running=1 if job.get("alone") else len(job["prompts"]),
            speculate=ngram(job["guesses"]) if "guesses" in job else None,
            progress=False,
        )
        tokens = [row[:length].tolist() for row, length in zip(complete(out).tokens, out.lengths, strict=True)]
        return tokens, out.stats.peak_kv_bytes

    return decode


def files_of(name: str) -> dict[str, str]:
    """What transformers loads a model from: a folder, or a GGUF file, whose weights it dequantises."""
    from jkv.checkpoints.loading import find_folder, find_gguf

    if file := find_gguf(name):
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": str(find_folder(name) or name)}


def torch_model(name: str, attention: str) -> Any:
    """The same weights in transformers, float32, all cores."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(**files_of(name), dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.repetition_penalty = None  # greedy decoding, whatever its makers advise
    return model


def recording_cache() -> Any:
    """A cache of transformers that remembers the most bytes of keys and values it held; none are copied for it."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        peak = 0

        def update(self, *args: Any, **kwargs: Any) -> Any:
            out = super().update(*args, **kwargs)
            pairs = ((getattr(one, "keys", None), getattr(one, "values", None)) for one in self.layers)
            held = sum(key.nbytes + value.nbytes for key, value in pairs if key is not None and value is not None)
            self.peak = max(self.peak, held)
            return out

    return Recording()


def static_bytes(config: Any, batch: int, length: int) -> int:
    """Keys and values of a static cache of float32, which holds all of its slots from the start."""
    return 2 * 4 * config.num_hidden_layers * batch * config.num_key_value_heads * length * config.head_dim


def with_transformers(name: str) -> Decode:
    """`generate` on a padded batch; `job["attention"]` is "sdpa" or "eager", `job["cache"]` "dynamic" or "static".

    `job["guesses"]` is how many its prompt lookup makes in a step, which takes one sequence at a time.
    """
    import torch

    models = {attention: torch_model(name, attention) for attention in ("sdpa", "eager")}

    def decode(job: dict[str, Any]) -> tuple[Tokens, int]:
        if not job.get("alone"):
            return decode_batch(job, job["prompts"])
        parts = [decode_batch(job, [prompt]) for prompt in job["prompts"]]
        return [row for rows, _ in parts for row in rows], max(peak for _, peak in parts)

    def decode_batch(job: dict[str, Any], prompts: Tokens) -> tuple[Tokens, int]:
        model, limit = models[job["attention"]], job["new_tokens"]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ends: Any = {"min_new_tokens": limit, "eos_token_id": None} if job["forced"] else {}
        is_static = job["cache"] == "static"
        cache = recording_cache() if job.get("records") and not is_static else None
        guesses: Any = {"prompt_lookup_num_tokens": job["guesses"]} if "guesses" in job else {}
        kept: Any = {"cache_implementation": "static"} if is_static else {} if cache is None else {"past_key_values": cache}
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0, **ends, **kept, **guesses
            )
        rows = out[:, width:].tolist()
        peak = static_bytes(model.config, len(prompts), width + limit) if is_static else 0 if cache is None else cache.peak
        return rows if job["forced"] else [until(row, END) for row in rows], peak

    return decode


END = 0  # tiny-reasoner's end token, and its padding


def until(row: Sequence[int], end: int) -> list[int]:
    """A row up to its end token, that one included."""
    return list(row[: row.index(end) + 1]) if end in row else list(row)


def with_kvpress(name: str) -> Decode:
    """The pipeline of kvpress, its own decoding loop; `job["press"]` names a scorer, `job["settings"]` its target."""
    import kvpress
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**files_of(name))
    pipes = {
        attention: kvpress.KVPressTextGenerationPipeline(model=torch_model(name, attention), tokenizer=tokenizer)
        for attention in ("sdpa", "eager")
    }
    drawn: list[int] = []

    def keep(tokens: Any, **_: Any) -> str:
        drawn.extend(tokens.tolist())
        return ""

    for pipe in pipes.values():  # its answer is text; what is compared are tokens
        pipe.tokenizer.decode = keep
    presses = {"SnapKV": kvpress.SnapKVPress, "KeyDiff": kvpress.KeyDiffPress, "Knorm": kvpress.KnormPress}

    def decode(job: dict[str, Any]) -> tuple[Tokens, int]:
        pipe, settings, peak, rows = pipes[job["attention"]], job["settings"], 0, []
        pipe.model.generation_config.eos_token_id = [-1] if job["forced"] else [END]
        for prompt in job["prompts"]:
            scorer = presses[job["press"]](**({"window_size": settings["window"]} if job["press"] == "SnapKV" else {}))
            press = kvpress.DecodingPress(scorer, compression_interval=settings["interval"], target_size=settings["budget"])
            cache = recording_cache() if job.get("records") else None
            ids = torch.tensor([prompt])
            inputs = {"context_ids": ids[:, :-1], "questions_ids": [ids[:, -1:]]}
            drawn.clear()
            with torch.inference_mode():
                pipe._forward(inputs, max_new_tokens=job["new_tokens"], press=press, cache=cache)
            rows.append(list(drawn))
            peak = max(peak, 0 if cache is None else cache.peak)
        return rows, peak

    return decode


CONTENDERS: dict[str, Callable[[str], Decode]] = {
    "jkv": with_jkv,
    "transformers": with_transformers,
    "kvpress": with_kvpress,
}

if __name__ == "__main__":
    main()
