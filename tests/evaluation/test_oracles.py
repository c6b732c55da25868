"""The oracle in `jkv eval`: as good as the full cache where a random set is not, and refused where it knows no future."""

import numpy as np
import pytest

from jkv.evaluation import compare as bench
from jkv.model.sampling import Sampling


@pytest.mark.parametrize("budget", ["25%", pytest.param("25% each", marks=pytest.mark.slow)])
def test_the_oracle_answers_as_the_full_cache_where_chance_does_not(reasoner, problems, budget):
    knobs = {"max_new_tokens": 512, "max_running": 6, "page_size": 4, "progress": False}
    settings = {"random": {"interval": 16, "recent": 4}, "oracle": {"recent": 4}}
    base, best, chance = bench.compare(reasoner, problems, ["oracle", "random"], [budget], settings, seeds=2, **knobs)
    assert (best.seed_accuracy, len(chance.seed_accuracy)) == ([], 2)
    assert (best.policy, best.share, best.kv_share) == ("oracle", 0.25, pytest.approx(chance.kv_share, rel=0.2))
    assert best.touched_each == "1" * len(problems)
    first = [np.reshape(one.lengths, (len(problems), -1))[:, 0] for one in (base, best, chance)]  # of the first seed
    same = [int((lengths == first[0]).sum()) for lengths in first[1:]]
    assert same[0] >= 5 > 2 >= same[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 2, "sampling": Sampling(seed=0)}, "knows the greedy answer"),
        ({"sampling": Sampling(temperature=0.6, seed=0)}, "knows the greedy answer"),
        ({"sampling": Sampling(temperature=0.0, repetition_penalty=1.1)}, "knows the greedy answer"),
        ({"settings": {"oracle": {"window": 4}}}, "settings interval, sinks and recent; got window"),
    ],
)
def test_an_oracle_of_answers_that_are_drawn_is_refused(reasoner, problems, options, says, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *args, **options: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=says):
        bench.compare(reasoner, problems, ["oracle"], [32], **options)
