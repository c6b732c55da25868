"""Events joined are the text of the result, whatever the tokens are and however a sample ends; without a device."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import jkv
from jkv.engine.outputs import Outputs, text_of
from jkv.engine.requests import Request
from jkv.engine.row import Row
from jkv.engine.samples import Completion, RowOutputs, Sample, stop_finder
from jkv.testing import tiny_model
from tests.support.small_tokenizers import byte_level, sentence_piece

TOKENIZERS = {"bytes": byte_level(b" a", "☃".encode()[1:] + b"\xf0"), "sentence pieces": sentence_piece("\u2581a", "b", "☃")}
TOKENS = st.lists(st.sampled_from([*"☃😀".encode(), *b"ab\n", 0x80, 0xFF, 256, 257, 258]), max_size=40)
ENDS = ["length", "stop", "cancelled", "nan"]
MODEL = tiny_model()


class FakeDevice:
    """Samples of one request, whose tokens the test draws."""

    def __init__(self, tokenizer, stops, limit, on_tokens=None):
        self.model, self.end = dataclasses.replace(MODEL, tokenizer=tokenizer), len(tokenizer) - 1
        request = Request(np.zeros(1, np.int32), jkv.full(), jkv.Sampling(0.0), 0, 0, 0, limit, (self.end,), tuple(stops))
        finder = stop_finder(tokenizer, request)
        self.sample = Sample(0, 0, request, Completion(), 1, row=Row(filled=np.zeros(1)), stops=finder, on_tokens=on_tokens)
        self.outputs = Outputs(self.model, {0: [self.sample]}, self.finish)
        self.outputs.is_streaming = on_tokens is None

    def finish(self, sample, reason):
        sample.recall()
        sample.completion.finish_reason = reason

    def chunk(self, tokens, last_log_prob=-1.0):
        """A chunk's tokens come from the device."""
        log_probs = [*[-1.0] * (len(tokens) - 1), last_log_prob]
        row = RowOutputs(list(tokens), log_probs, log_probs, True, None, None, None, None)
        self.sample.advance(row)
        self.outputs.collect(self.sample, row, 0)
        self.outputs.emit_collected()

    def cancel(self):
        """The sample ends between two chunks."""
        self.finish(self.sample, "cancelled")
        self.outputs.emit(self.sample)

    def restart(self):
        """The sample starts again, as after a device error."""
        self.sample.restart(stop_finder(self.model.tokenizer, self.sample.request), 0)
        self.sample.row.filled = np.zeros(1)

    @property
    def whole(self):
        return text_of(self.model.tokenizer, self.sample)


def run(device, tokens, size, end):
    """Draws tokens in chunks of a size until the sample ends, at the latest as `end` says."""
    tokens = [*tokens, device.end] if end == "stop" else list(tokens)
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        is_last = start + size >= len(tokens)
        device.chunk(chunk, np.nan if end == "nan" and is_last else -1.0)
        if device.sample.is_finished:
            break
    if not device.sample.is_finished:
        device.cancel()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(TOKENS, st.integers(1, 17), st.sampled_from(ENDS), st.lists(st.sampled_from(["☃", "ab", "b\n", "\ufffd"]), max_size=2))
@example([*b"Alpha beta gamma end!", 0xEF, 0xBF, 0xBD], 16, "length", [])
@example([*b"Alpha beta gamma end!", 0xE2, 0x98], 16, "stop", [])
def test_joined_events_are_the_text_of_the_result(name, tokens, size, end, stops):
    tokenizer = TOKENIZERS[name]
    tokens = [token for token in tokens if token < len(tokenizer) - 1]
    device = FakeDevice(tokenizer, stops, limit=len(tokens) if end == "length" and tokens else 1_000)
    run(device, tokens, size, end)
    events = device.outputs.take()
    assert "".join(event.text for event in events) == device.whole
    assert [token for event in events for token in event.tokens] == device.sample.completion.tokens
    assert [bool(event.finish_reason) for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize("tokens_after", [0, 3, 9, 20])
def test_a_sample_that_restarts_and_is_cancelled_keeps_what_its_events_had(tokens_after):
    device, tokens = FakeDevice(TOKENIZERS["bytes"], [], limit=100), list("a☃ and so on".encode())
    for start in (0, 5):
        device.chunk(tokens[start : start + 5])
    device.restart()
    device.restart()
    if tokens_after:
        device.chunk(tokens[:tokens_after])
    device.cancel()
    events = device.outputs.take()
    assert "".join(event.text for event in events) == device.whole
    assert device.sample.completion.tokens == tokens[: max(10, tokens_after)]
    assert len(device.sample.completion.log_probs) == len(device.sample.completion.tokens)


def test_a_callback_that_raises_leaves_events_that_are_the_text():
    def give_up(event):
        raise ValueError("enough")

    device = FakeDevice(TOKENIZERS["bytes"], [], limit=100, on_tokens=give_up)
    device.chunk([*b"Alpha", 0xE2])
    events = device.outputs.take()
    assert device.sample.completion.finish_reason == "error"
    assert "".join(event.text for event in events) == device.whole == "Alpha\ufffd"


def test_a_stop_string_may_go_across_a_special_token_that_no_file_names():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|x|>": 2}, unk_token="a"))
    backend.add_special_tokens(["<|x|>"])
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.all_special_ids == []
    assert stop_finder(tokenizer, types.SimpleNamespace(stop_strings=("ab",))).find([0, 2, 1, 0]) == 3
