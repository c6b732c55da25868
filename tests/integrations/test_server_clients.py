"""Clients as they are published, against `jkv serve` in a process of its own: lm-evaluation-harness, guidellm and curl."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from tests.serving.conftest import TEMPLATE

pytest.importorskip("uvicorn")

from jkv.bench.serve import started

PROMPTS = ["b=3;c=7;d=b*c;?d", "x=4;y=9;z=x-y;?z", "b=1;c=2;d=b+c;?d"]
CHOICES = ["<think>b=3;", "b=2", "d=3"]
LIMIT = 40
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
"""
CHOOSE = """
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITE = """
doc_to_target: "none"
generation_kwargs: {until: ["</think>"], max_gen_toks: 40, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny-reasoner with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(checkpoint.find_folder("tiny-reasoner"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with started(str(folder), 4, 64, "--name", "tiny") as url:
        yield url


@pytest.fixture(scope="module")
def model(folder):
    return jkv.load(str(folder))


@pytest.fixture
def samples_of(tmp_path):
    """Runs the harness's own command on a task of `PROMPTS`; returns its samples in the order of the prompts."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip('lm-eval takes no part: pip install "lm-eval[api]"')
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"prompt": prompt, "choices": CHOICES} for prompt in PROMPTS]))
    for name, kind, rest in (("choose", "multiple_choice", CHOOSE), ("write", "generate_until", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, file=data, kind=kind) + rest)

    def run(kind, address, task, *options):
        command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", f"model=tiny,max_length=512,{address}"]
        command += ["--tasks", task, "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples", *options]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        out = subprocess.run([*map(str, command)], env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert out.returncode == 0, out.stderr[-2_000:]
        (file,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    return run


def likelihood(model, prompt, choice):
    """The log-probability of a choice after a prompt, and whether greedy decoding would write it."""
    begin, end = (model.tokenizer.encode(text) for text in (prompt, choice))
    log_probs = np.asarray(jkv.score(model, np.array([end]), prompts=[begin]).logprobs)[0, : len(end)]
    greedy = jkv.generate(model, begin, max_new_tokens=len(end), stop_ids=(), progress=False)
    return float(log_probs.sum()), greedy.tokens[0].tolist() == end


@pytest.mark.parametrize("tokenizer", ["remote", "local"])
def test_the_harness_reads_likelihoods_of_token_ids(samples_of, url, folder, model, tmp_path, tokenizer):
    own = tmp_path / "tokenizer"  # without config.json, by which transformers would take another class
    own.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, own / name)
    given = {"remote": "", "local": f",tokenizer_backend=huggingface,tokenizer={own}"}[tokenizer]
    place = f"base_url={url}/v1/completions{given}"
    for sample in samples_of("local-completions", place, "choose", "--batch_size", "4"):
        prompt = sample["doc"]["prompt"]
        for (found,), choice in zip(sample["resps"], CHOICES, strict=True):
            expected, is_greedy = likelihood(model, prompt, choice)
            assert float(found[0]) == pytest.approx(expected, rel=1e-3, abs=1e-3)
            assert str(found[1]) == str(is_greedy)


@pytest.mark.filterwarnings("ignore:.*chat model", "ignore:More than half")
@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_the_harness_generates_what_generate_does(samples_of, url, model, kind):
    is_chat = "chat" in kind
    place = "chat/completions" if is_chat else "completions"
    samples = samples_of(kind, f"base_url={url}/v1/{place}", "write", *["--apply_chat_template"] * is_chat)
    out = jkv.generate(model, PROMPTS, max_new_tokens=LIMIT, stop_strings=["</think>"], progress=False)
    texts = out.answer if is_chat else out.text
    assert [sample["resps"][0][0] for sample in samples] == texts
    assert any(out.text)


@pytest.mark.parametrize("kind", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_completes_all_requests_and_counts_their_tokens(url, folder, tmp_path, kind):
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("guidellm takes no part: pip install guidellm")
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model=tiny,request_format={kind}"]
    command += ["--profile", "kind=poisson,rate=8", "--constraint", "kind=max_requests,count=6"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=32", "--output", f"kind=json,path={file}"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    out = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2_000:]
    requests = json.loads(file.read_text())["benchmarks"][0]["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (6, 0), str(requests["errored"])[:2_000]
    for one in requests["successful"]:
        assert one["output_metrics"]["text_tokens"] == 32


def test_curl_streams(url):
    if shutil.which("curl") is None:
        pytest.skip("curl takes no part: it is not installed")
    message = {"role": "user", "content": PROMPTS[0]}
    counting = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [message], "stream": True, "stream_options": counting, "max_tokens": LIMIT, "ignore_eos": True}
    command = ["curl", "-sN", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    events = [line.removeprefix("data: ") for line in out.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert 0 < counts[0] < LIMIT  # the role comes with the first tokens
    assert counts[-1] == counts[-2] == LIMIT  # the last has no choices, the one before it the finish reason
    assert len(set(counts)) > 2
