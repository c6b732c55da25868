"""GRPO in PyTorch, on rollouts of a `jkv serve` in a process of its own: one page to start from.

    pip install "jkv-cache[serve]" torch
    python -m research.grpo.with_torch --steps 60

The trainer knows the server by HTTP alone, as SkyRL, verl and slime know theirs: token ids go out, token ids and
log-probabilities come back, and new weights lie in a folder that both see. The server's cache is compressed and the trainer's
is not, so each token has an importance weight, cut at 2. A tiny Qwen3 with random weights learns to count.
"""

import argparse
import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROMPTS, SAMPLES = 4, 8  # of a step: prompts, and completions of each
PROMPT_TOKENS, NEW_TOKENS = 5, 24
SERVE = ("--policy", "r_kv", "--budget", "12", "--interval", "8", "--window", "4", "--page-size", "4", "--max-running", "32")
CONFIG: dict[str, Any] = {
    "vocab_size": 16,  # ten digits, and six tokens that are never right
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def make_model() -> Any:
    """The model that is trained."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG))


def make_tokenizer() -> Any:
    """A word for each token: a server passes texts too."""
    words = {f"{token:x}": token for token in range(CONFIG["vocab_size"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "f")))


def reward(tokens: list[int]) -> float:
    """The share of adjacent tokens that are digits of which the second is one more than the first."""
    pairs = list(itertools.pairwise(tokens))
    return sum(after == before + 1 and after < 10 for before, after in pairs) / len(pairs)


class Server:
    """A `jkv serve` that a trainer drives."""

    def __init__(self, port: int, key: str) -> None:
        self.url, self.headers = (
            f"http://127.0.0.1:{port}",
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request; a refusal is raised with its message."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers)
        try:
            with urllib.request.urlopen(request) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from None

    def is_ready(self) -> bool:
        """Whether it answers, with its programs compiled."""
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health").status == 200)
        except OSError:  # a refused connection, or 503 while it warms up
            return False


@contextlib.contextmanager
def served(folder: Path, root: Path) -> Iterator[Server]:
    """A server of a checkpoint, which reads new weights below `root`; ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "jkv", "serve", str(folder), "--port", str(port), *SERVE, "--trainer"]
    child = subprocess.Popen([*command, "--weights-root", str(root)], env=os.environ | {"JKV_TRAINER_KEY": key})
    try:
        server = Server(port, key)
        while not server.is_ready():
            if child.poll() is not None:
                raise RuntimeError(f"jkv serve ended with status {child.returncode}.")
            time.sleep(0.2)
        yield server
    finally:
        child.terminate()
        child.wait()


def log_probs(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> Any:
    """The log-probability of each completion token, [N, T]; all prompts have one length, and so have all completions."""
    ids = torch.tensor([prompt + tokens for prompt, tokens in zip(prompts, completions, strict=True)])
    logits = model(ids[:, :-1]).logits[:, len(prompts[0]) - 1 :]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompts[0]) :, None])[..., 0]


def train(steps: int) -> list[float]:
    """The mean reward of each step."""
    model, rng, rewards = make_model(), np.random.default_rng(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        model.save_pretrained(root / "first")
        make_tokenizer().save_pretrained(root / "first")
        with served(root / "first", root) as server:
            for step in range(steps):
                asked = rng.integers(10, size=(PROMPTS, PROMPT_TOKENS)).tolist()
                drawn = server.post("/generate", token_ids=asked, n=SAMPLES, max_tokens=NEW_TOKENS, temperature=1.0, seed=step)
                choices = drawn["choices"]
                prompts = [asked[one["prompt_index"]] for one in choices]
                sampled = torch.tensor([one["logprobs"] for one in choices])
                own = log_probs(model, prompts, [one["token_ids"] for one in choices])
                values = torch.tensor([reward(one["token_ids"]) for one in choices]).reshape(PROMPTS, SAMPLES)
                advantage = (values - values.mean(1, keepdim=True)) / (values.std(1, keepdim=True) + 1e-6)
                weight = torch.exp(own.detach() - sampled).clamp(max=2.0)
                loss = -(weight * advantage.reshape(-1, 1) * own).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.save_pretrained(root / f"step-{step}")
                server.post("/update_weights", model_path=f"step-{step}")
                shutil.rmtree(root / f"step-{step}")
                rewards.append(float(values.mean()))
                print(f"step {step + 1}: reward {rewards[-1]:.3f}, importance weights {weight.mean():.2f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    rewards = train(parser.parse_args().steps)
    print(f"reward {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}")
