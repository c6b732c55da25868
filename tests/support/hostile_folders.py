"""Checkpoint folders to damage, and how a bad one must be refused."""

import json
import time

import pytest

from jkv.checkpoints import loading as checkpoint
from research.tasks import vocabulary
from tests.support.checkpoints import golden_copy

AT_ONCE = 5.0  # seconds of this process, whatever else runs; what is refused here took gigabytes or had no end


def refused(folder, message):
    """Asserts that a folder is refused at once with a message."""
    begin = time.process_time()
    with pytest.raises(ValueError, match=message):
        checkpoint.load(folder)
    assert time.process_time() - begin < AT_ONCE


def with_text(folder, name, text):
    """The folder with a file of this text."""
    (folder / name).write_text(text)
    return folder


def with_tokenizer(folder, file="tokenizer.json", **fields):
    """A golden checkpoint with a tokenizer, some fields of a file of it changed."""
    golden_copy(folder)
    vocabulary.make_tokenizer().save_pretrained(folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder
