"""Long texts are encoded and decoded in batches, which hold no lock of Python's, to the same tokens and texts."""

import jkv
from jkv.checkpoints.chat_template import USER, ChatText
from jkv.checkpoints.chat_tokens import encode_chat
from jkv.checkpoints.long_texts import LONG


class Counting:
    """A tokenizer of the library that counts calls by their names."""

    def __init__(self, backend):
        self.backend, self.calls = backend, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.backend, name)


def test_a_long_text_is_a_batch_of_one(monkeypatch):
    tokenizer = jkv.load("tiny-reasoner").tokenizer
    backend = tokenizer.backend_tokenizer
    counting = Counting(backend)
    monkeypatch.setitem(vars(tokenizer), "backend_tokenizer", counting)
    for text, is_long in (("b=3;c=7;", False), ("b=3;c=7;" * (LONG // 8), True)):
        for add in (False, True):
            counting.calls.clear()
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == backend.encode(text, add_special_tokens=add).ids
            assert counting.calls == ["encode_batch" if is_long else "encode"]
        counting.calls.clear()
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)
        assert counting.calls == ["decode_batch" if len(ids) >= LONG else "decode"]
        counting.calls.clear()
        assert encode_chat(tokenizer, ChatText(text, USER * len(text))) == backend.encode(text, add_special_tokens=False).ids
        assert ("encode" in counting.calls) != is_long
