"""Distillation against NumPy and finite differences: top tokens, the rest as a class, replayed students, refusals."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.model import top_tokens
from jkv.model.sampling import SamplingRows
from jkv.model.top_tokens import log1mexp
from jkv.replay.columns import Columns
from jkv.replay.score import UNEMBED_BLOCK, Scores, token_scores
from jkv.rl import (
    distillation,
    kl_divergence,
    log_probs,
    log_probs_at,
    make_batch,
    policy_loss,
    teacher_advantages,
    with_rest,
)
from tests.rl.test_batch import cut_out, is_token
from tests.support.checkpoints import dense_logits

K = 5


@pytest.fixture(scope="module")
def whole(model, squeezed):
    """The log-probabilities of the whole vocabulary at each completion token, full cache, float64: [n, T, V]."""
    found = np.zeros((*squeezed.tokens.shape, model.config.vocab_size))
    for i, (prompt, length) in enumerate(zip(squeezed.prompts, squeezed.lengths, strict=True)):
        logits = np.asarray(dense_logits(model.params, np.concatenate([prompt, squeezed.tokens[i, :length]])), np.float64)
        logits = logits[len(prompt) - 1 : -1] / squeezed.sampling[i].temperature
        found[i, :length] = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        found[i, :length] -= logits.max(-1, keepdims=True)
    return found


@pytest.fixture(scope="module")
def teacher(model, squeezed):
    """The full cache of the same weights."""
    return jkv.score(model, squeezed, top=K)


@pytest.fixture(scope="module")
def batches(squeezed, teacher):
    return {is_replayed: make_batch(squeezed, teacher=teacher, replay=is_replayed, rows=9) for is_replayed in (False, True)}


def reference(p, q):
    """KL(p || q) of log-probabilities, float64."""
    p, q = np.float64(p), np.float64(q)
    with np.errstate(invalid="ignore"):
        return np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0).sum(axis=-1)


def assert_near(got, wanted):
    """Log-probabilities of programs of different shapes, which round differently."""
    apart = np.abs(np.asarray(got) - np.asarray(wanted))
    assert np.percentile(apart, 99) <= 1e-5
    assert apart.max() <= 1e-4


def test_the_most_likely_tokens_of_a_score_are_those_of_the_whole_distribution(model, squeezed, teacher, whole):
    mask, (tokens, logprobs, rest) = is_token(squeezed), map(np.asarray, teacher.top)
    assert tokens.shape == logprobs.shape == (*squeezed.tokens.shape, K)
    best = np.sort(whole, axis=-1)[..., ::-1]
    assert_near(logprobs[mask], best[mask][:, :K])
    assert_near(np.take_along_axis(whole, tokens, axis=-1)[mask], logprobs[mask])
    assert_near(rest[mask], np.log(np.exp(best[..., K:]).sum(-1))[mask])
    assert (tokens[~mask] == -1).all()
    assert np.isneginf(logprobs[~mask]).all()
    assert not rest[~mask].any()
    np.testing.assert_array_equal(teacher.logprobs, jkv.score(model, squeezed).logprobs)
    assert repr(teacher).endswith(f"top: {K} tokens)")


def test_a_replay_s_most_likely_tokens_are_what_the_engine_drew_from(model, squeezed):
    """Where the drawn token is among them, it has the log-probability that it was drawn with; a large vocabulary is padded."""
    scores = jkv.score(model, squeezed, trace=squeezed.trace, top=40)
    mask, (tokens, logprobs, rest) = is_token(squeezed), map(np.asarray, scores.top)
    assert scores.vocab_size == 32
    assert (tokens[..., 32:] == -1).all()
    assert np.isneginf(rest[mask]).all()
    own = np.where(tokens == squeezed.tokens[..., None], logprobs, 0).sum(axis=-1, where=tokens >= 0)
    assert np.abs(own - squeezed.logprobs)[mask].max() <= 1e-4


@pytest.mark.parametrize("replay", [False, True], ids=["dense", "replayed"])
def test_the_loss_is_that_of_numpy(model, squeezed, batches, teacher, replay):
    batch, mask = batches[replay], is_token(squeezed)
    moved = jax.tree.map(lambda x: x * 1.02, model.params)  # as after an update
    tokens = np.asarray(teacher.top.tokens)
    student = jkv.score(moved, squeezed, trace=squeezed.trace if replay else "dense", top=32).top
    every = np.float64(np.take_along_axis(np.asarray(student.logprobs), np.argsort(student.tokens), axis=-1))  # by token
    every[~mask] = -np.log(32)
    at = np.take_along_axis(every, np.maximum(tokens, 0), axis=-1)
    others = np.exp(every)
    np.put_along_axis(others, np.maximum(tokens, 0), 0, axis=-1)
    classes = np.concatenate([at, np.log(others.sum(-1, keepdims=True))], axis=-1)
    found = np.asarray(log_probs_at(moved, batch, batch.teacher.top.tokens))
    for c in range(K + 1):
        assert_near(cut_out(found[..., c], squeezed, batch)[mask], classes[mask][:, c])
    known = np.asarray(teacher.top.classes)
    for kind, pair in {"forward": (known, classes), "reverse": (classes, known)}.items():
        loss, metrics = jax.jit(distillation, static_argnames="kind")(moved, batch, kind=kind)
        assert float(loss) == pytest.approx(reference(*pair)[mask].mean(), rel=1e-3, abs=1e-6)
        assert float(metrics["kl"]) == pytest.approx(float(loss), rel=1e-6)
        assert float(metrics["cut"]) == 0
        assert float(metrics["covered"]) == pytest.approx(np.exp(np.float64(known[..., :K])).sum(-1)[mask].mean(), abs=1e-5)
        sums, _ = distillation(moved, batch, kind=kind, denominator=10.0)
        assert float(sums) == pytest.approx(float(loss) * mask.sum() / 10, rel=1e-5)
        rows, _ = distillation(moved, batch, kind=kind, mean="sequences")
        values = np.where(mask, reference(*pair), 0).sum(-1) / mask.sum(-1)
        assert float(rows) == pytest.approx(values.mean(), rel=1e-3, abs=1e-6)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(model, batches):
    for kind in ("forward", "reverse"):
        (loss, _), gradient = jax.value_and_grad(distillation, has_aux=True)(model.params, batches[False], kind=kind)
        assert abs(float(loss)) < 1e-6
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-4


def test_the_sampled_form_is_the_score_function_with_the_teacher_s_advantage(model, squeezed, teacher, batches):
    """Its value is the estimate of the reverse divergence, and its gradient that of the policy loss with that advantage."""
    batch, mask = batches[True], is_token(squeezed)
    gain = teacher_advantages(teacher.logprobs, squeezed.logprobs, mask)
    np.testing.assert_allclose(gain, np.where(mask, np.asarray(teacher.logprobs) - squeezed.logprobs, 0), atol=1e-6)
    (loss, metrics), gradient = jax.value_and_grad(distillation, has_aux=True)(model.params, batch, kind="sampled")
    assert float(loss) == pytest.approx(-gain[mask].mean(), abs=1e-4)
    assert float(metrics["kl"]) > 0.01
    rewarded = make_batch(squeezed, gain, replay=True, rows=9)
    wanted = jax.grad(lambda params: policy_loss(params, rewarded)[0])(model.params)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert size > 1e-3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3 * size), gradient, wanted)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_gradient_of_a_replayed_student_is_that_of_finite_differences(model, batches, kind):
    batch = batches[True]
    value = jax.jit(lambda params: distillation(params, batch, kind=kind)[0])
    gradient = jax.grad(value)(model.params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    step = 1e-2 / norm
    there, back = (
        value(jax.tree.map(lambda x, g, s=sign: x + s * step * g / norm, model.params, gradient)) for sign in (1, -1)
    )
    assert float(there - back) / (2 * step) == pytest.approx(norm, rel=0.05)


def test_packed_students_have_the_loss_and_gradient_of_padded_ones(model, squeezed, teacher, batches):
    packed = make_batch(squeezed, teacher=teacher, replay=True, rows=9, pack=64)
    run = jax.value_and_grad(lambda params, batch: distillation(params, batch)[0])
    (one, gradient), (other, wanted) = run(model.params, packed), run(model.params, batches[True])
    assert float(one) == pytest.approx(float(other), rel=1e-4)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3 * size), gradient, wanted)


# Divergences by themselves.


def random_classes(seed, scale):
    logits = np.random.default_rng(seed).standard_normal((50, 8)) * scale
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize("scale", [0.5, 8.0])
def test_divergences_and_their_gradients_are_those_of_numpy_and_of_finite_differences(scale):
    p, q = random_classes(0, scale), random_classes(1, scale)
    wanted = reference(p, q)
    np.testing.assert_allclose(kl_divergence(jnp.asarray(p), jnp.asarray(q)), wanted, rtol=1e-6, atol=1e-6)
    slopes = jax.grad(lambda p, q: kl_divergence(p, q).sum(), argnums=(0, 1))(jnp.asarray(p), jnp.asarray(q))
    for i in range(2):
        step = np.zeros(p.shape)
        step[:, 3] = 1e-5
        pairs = [[np.float64(x) + sign * step * (i == j) for j, x in enumerate((p, q))] for sign in (1, -1)]
        measured = (reference(*pairs[0]) - reference(*pairs[1])) / 2e-5
        np.testing.assert_allclose(np.asarray(slopes[i])[:, 3], measured, rtol=1e-4, atol=1e-6)


def test_the_rest_is_exact_where_one_less_the_sum_is_not():
    """By `log1mexp`, from 1 to 2**-24; below, only a sum of the other tokens knows it."""
    for rest in (0.9, 0.5, 1e-2, 1e-5):
        top = np.log(np.array([0.75, 0.25]) * (1 - rest)).astype(np.float32)
        wanted = np.log1p(-np.exp(np.float64(top)).sum())
        np.testing.assert_allclose(with_rest(jnp.asarray(top))[-1], wanted, atol=2e-7 / rest)
    x = -np.logspace(-8, 1.9, 60)
    exact = np.where(x > -1, np.log(-np.expm1(np.float32(x).astype(np.float64))), np.log1p(-np.exp(np.float64(np.float32(x)))))
    np.testing.assert_allclose(log1mexp(jnp.asarray(x, jnp.float32)), exact, rtol=1e-6)
    assert np.isneginf(log1mexp(jnp.zeros(())))
    assert jax.grad(lambda x: jnp.where(x < 0, log1mexp(x), 0.0))(0.0) == 0
    logits = np.array([0.0, -1.0, -30.0, -31.0])
    wanted = logits - np.log(np.exp(logits).sum())
    found = top_tokens.log_probs_at(jnp.asarray(wanted, jnp.float32)[None], jnp.array([[1, -1]]))[0]
    np.testing.assert_allclose(found, [wanted[1], -np.inf, np.log(np.exp(wanted[[0, 2, 3]]).sum())], rtol=1e-6)
    found = top_tokens.log_probs_at(jnp.asarray(wanted, jnp.float32)[None], jnp.array([[0, 1]]))[0]
    np.testing.assert_allclose(found[-1], np.log(np.exp(wanted[2:]).sum()), rtol=1e-6)


def test_where_the_top_tokens_hold_all_mass_losses_and_gradients_are_finite():
    everything = with_rest(jnp.log(jnp.array([[0.75, 0.25], [1.0, 0.0]])))
    assert np.exp(np.asarray(everything))[:, -1].max() < 1e-7
    student = jnp.log(jnp.array([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]]))
    for pair in (lambda s: (everything, s), lambda s: (s, everything)):

        def total(s, pair=pair):
            value = kl_divergence(*pair(s))
            return jnp.where(jnp.isfinite(value), value, 0).sum()

        assert np.isfinite(kl_divergence(*pair(student))[0])
        assert np.isfinite(np.asarray(jax.grad(total)(student))).all()
    exact = jnp.concatenate([jnp.log(jnp.array([0.75, 0.25])), jnp.array([-jnp.inf])])
    assert float(kl_divergence(exact, student[0])) == pytest.approx(reference(exact, student[0]), rel=1e-6)
    assert np.isposinf(kl_divergence(student[0], exact))
    assert not np.asarray(jax.grad(lambda s: kl_divergence(s, exact))(student[0])).any()


def test_no_array_of_a_gradient_holds_all_logits(model):
    n, total, vocab = 2, 1024, 50_000
    config = dataclasses.replace(model.config, vocab_size=vocab)
    shape = (n, config.num_layers, config.num_kv_heads, total)
    columns = Columns(jax.ShapeDtypeStruct((n, 256), jnp.int32), jax.ShapeDtypeStruct(shape, jnp.uint8))
    row, start = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    wide = model.params.replace(embedding=jax.ShapeDtypeStruct((vocab, config.width), jnp.float32), config=config)
    asked = jax.ShapeDtypeStruct((n, total, 16), jnp.int32)

    def gradient(params, token, asked, columns, settings):
        def run(params):
            scores = token_scores(params, token, columns, settings, remat=True, top=16, asked=asked)
            return scores.classes.sum() + scores.top.classes.sum()

        return jax.value_and_grad(run)(params)

    token = jax.ShapeDtypeStruct((n, total), jnp.int32)
    text = str(jax.make_jaxpr(gradient)(wide, token, asked, columns, SamplingRows(row, row, start, row)))
    sizes = [[int(size) for size in found.split(",")] for found in set(re.findall(r"\w+\d+\[([\d,]+)\]", text))]
    assert any(vocab in shape for shape in sizes)
    assert all(vocab not in shape or np.prod(shape) <= n * UNEMBED_BLOCK * vocab for shape in sizes)


# What is refused.


@pytest.mark.parametrize("top", [-1, 65, 2.5, True])
def test_a_number_of_tokens_out_of_range_is_refused(model, squeezed, top):
    with pytest.raises(jkv.InputError, match="top must") as caught:
        jkv.score(model, squeezed, top=top)
    assert caught.value.field == "top"


def test_teachers_that_do_not_fit_are_refused_by_name(model, squeezed, teacher):
    def changed(**top):
        return dataclasses.replace(teacher, top=teacher.top._replace(**top))

    nan = np.array(teacher.top.logprobs)
    nan[3, 2, 1] = np.nan
    short = np.array(teacher.top.logprobs)
    short[1, squeezed.lengths[1] - 1] = -np.inf
    cases = {
        "must be scores; got 3": 3,
        r"must have scored completions \(8, \d+\); got \(4, ": Scores(teacher.logprobs[:4], None, 32),
        "must have the student's vocabulary, 32 tokens; it has 48": dataclasses.replace(teacher, vocab_size=48),
        r"at most 0, where mask is True; got nan at \[3, 2, 1\]": changed(logprobs=nan),
        r"no likely token at \[1, \d+\]": changed(logprobs=short),
        "must add up to at most 1": changed(rest=np.zeros_like(np.asarray(teacher.top.rest))),
    }
    for words, value in cases.items():
        with pytest.raises(jkv.InputError, match=words) as caught:
            make_batch(squeezed, teacher=value)
        assert caught.value.field == "teacher"
    failed = dataclasses.replace(squeezed, finish_reason=["nan"] * 8)
    with pytest.raises(jkv.InputError, match="needs drawn tokens"):
        make_batch(failed, teacher=teacher, failed="mask")
    with pytest.raises(jkv.InputError, match="by advantages or by a teacher; got neither"):
        make_batch(squeezed)


def test_a_loss_without_a_teacher_or_of_an_unknown_kind_is_refused(model, squeezed, batches):
    plain = make_batch(squeezed, np.zeros(8))
    bare = make_batch(squeezed, teacher=jkv.score(model, squeezed))
    for batch, options, words in (
        (plain, {"kind": "sampled"}, r"reads a teacher of the batch; there is none"),
        (bare, {"kind": "forward"}, r"its most likely tokens; there is none.*top=16"),
        (batches[True], {"kind": "backward"}, "kind must be one of forward, reverse, sampled"),
        (batches[True], {"mean": "rows"}, "mean must be one of"),
        (batches[True], {"denominator": 0}, "denominator must be positive"),
    ):
        with pytest.raises(jkv.InputError, match=words):
            distillation(model, batch, **options)
    assert np.isfinite(distillation(model, bare, kind="sampled")[0])


def test_tokens_and_log_probabilities_that_are_none_are_refused(model, batches):
    batch = batches[False]
    tokens = np.array(batch.teacher.top.tokens)
    for change, words in (
        (tokens[:, :-1], r"\[9, \d+, k\]; got"),
        (np.where(tokens == 3, 32, tokens), r"in \[0, 32\).*got 32"),
    ):
        with pytest.raises(jkv.InputError, match=words) as caught:
            log_probs_at(model, batch, change)
        assert caught.value.field == "tokens"
    with pytest.raises(jkv.InputError, match="must differ"):
        log_probs_at(model, batch, np.where(tokens >= 0, 3, tokens))
    with pytest.raises(jkv.InputError, match=r"add up to at most 1; got 1\.5"):
        with_rest(jnp.log(jnp.array([0.75, 0.75])))
    with pytest.raises(jkv.InputError, match="got NaN"):
        kl_divergence(jnp.array([jnp.nan, 0.0]), jnp.array([0.0, 0.0]))
    with pytest.raises(jkv.InputError, match="same classes"):
        kl_divergence(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(jkv.InputError, match="at least one token"):
        teacher_advantages(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2), bool))
    assert_near(log_probs(model, batch), batch.teacher.log_prob)
