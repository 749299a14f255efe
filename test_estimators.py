"""Tests of hygrow.py: numbers worked by hand, the shared vectors, a naive oracle, reductions,
invariances and errors. Nothing but torch and pytest: `pytest test_estimators.py`, about 15 s."""

import ast
import inspect
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hygrow
from hygrow import (
    hybrid_gae, kl_terms, masked_mean, policy_loss, policy_stats, token_gae, turn_gae, value_loss,
    whiten,
)

torch.set_num_threads(1)
HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "shared" / "vectors" / "estimators.json"
NAN, INF = math.nan, math.inf
LN2 = math.log(2)


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)  # shape and dtype, too


# One row, two turns of two and three tokens, a hole (NaN) between them, reward on nearly every
# token, V = 8 after the last one. gamma = lam = 1/2 keeps the numbers short.
MASK = f64([[1, 1, 0, 1, 1, 1]])
END = f64([[0, 1, 0, 0, 0, 1]])
R = f64([[0.5, 1, NAN, 0, 4, 2]])
V = f64([[1, 2, NAN, 3, 2, 4]])
BOOT = f64([8])
HALF = dict(gamma=0.5, lam=0.5, bootstrap=BOOT)


def test_token_gae_by_hand():
    # delta: 2 + 4 - 4 = 2;  4 + 2 - 2 = 4;  0 + 1 - 3 = -2;  1 + 1.5 - 2 = .5;  .5 + 1 - 1 = .5
    # A: 2;  4 + 2/4 = 4.5;  -2 + 4.5/4 = -.875;  .5 - .875/4 = .28125;  .5 + .28125/4 = .5703125
    advantages, returns = token_gae(R, V, MASK, **HALF)
    close(advantages, f64([[0.5703125, 0.28125, 0, -0.875, 4.5, 2]]))
    close(returns, f64([[1.5703125, 2.28125, 0, 2.125, 6.5, 6]]))


@pytest.mark.parametrize("how, a1, a2, expected", [
    # Gamma_2 = 1/2: delta_2 = 2 + 4 - 4 = 2 = A_2, G_e2 = 6. Gamma_1 = (1/2)^3, the NEXT turn's
    # length: delta_1 = 1 + 4/8 - 2 = -.5, A_1 = -.5 + 2/16 = -.375, G_e1 = 1.625
    (dict(), -0.375, 2, [1.3125, 1.625, 0, 3.5, 7, 6]),
    # R_1 = 1 + 0/2 + 4/4 = 2: delta_1 = .5, A_1 = .5 + 2/16 = .625
    (dict(aggregate_reward=True), 0.625, 2, [1.8125, 2.625, 0, 3.5, 7, 6]),
    # delta_2 = 2 + .75 * 8 - 4 = 4 = A_2;  delta_1 = 1 + .75 * 4 - 2 = 2, A_1 = 2 + .375 * 4 = 3.5
    (dict(turn_gamma=0.75), 3.5, 4, [3.25, 5.5, 0, 4, 8, 8]),
    # R_2 = 0 + 4/2 + 2/4 = 2.5, Gamma_2 = (1/2)^3: delta_2 = 2.5 + 1 - 3 = .5 = A_2, G_b2 = 3.5
    # R_1 = .5 + 1/2 = 1, Gamma_1 = (1/2)^2: delta_1 = 1 + 3/4 - 1 = .75, A_1 = .75 + .5/8 = .8125
    # after b: 2 + 8/2 = 6, 4 + 6/2 = 7, and at e_1: 1 + 3.5/2 = 2.75
    (dict(anchor="first"), 0.8125, 0.5, [1.8125, 2.75, 0, 3.5, 7, 6]),
    (dict(anchor="first", aggregate_reward=True), 0.8125, 0.5, [1.8125, 2.75, 0, 3.5, 7, 6]),
    # delta_2 = 2.5 + .75 * 8 - 3 = 5.5 = A_2;  delta_1 = 1 + .75 * 3 - 1 = 2.25,
    # A_1 = 2.25 + .375 * 5.5 = 4.3125;  G_e1 = 1 + .75 * (5.5 + 3) = 7.375, G_e2 = 2 + .75 * 8 = 8
    (dict(anchor="first", turn_gamma=0.75), 4.3125, 5.5, [5.3125, 7.375, 0, 8.5, 8, 8]),
])
def test_turn_gae_by_hand(how, a1, a2, expected):
    advantages, returns = turn_gae(R, V, MASK, END, **how, **HALF)
    close(advantages, f64([[a1, a1, 0, a2, a2, a2]]))
    close(returns, f64([expected]))


def test_one_token_turns_by_hand():
    # A_3 = 1 - .3 = .7;  A_2 = .27 - .2 + .72 * .7 = .574;  A_1 = .18 - .1 + .72 * .574 = .49328
    r, v, one = f64([[0, 0, 1]]), f64([[0.1, 0.2, 0.3]]), torch.ones(1, 3)
    expected = f64([[0.49328, 0.574, 0.7]])
    close(token_gae(r, v, one, gamma=0.9, lam=0.8)[0], expected)
    for anchor in ("last", "first"):
        close(turn_gae(r, v, one, one, gamma=0.9, lam=0.8, anchor=anchor)[0], expected)


def test_hybrid_by_hand():
    # A^turn = -.375, 2 as above ("last"). token_lam = 1: G is the discounted sum of rewards and
    # bootstrap: 6, 4 + 3 = 7, 3.5, 1 + 1.75 = 2.75, .5 + 1.375 = 1.875; A = G - V
    advantages, returns = hybrid_gae(R, V, MASK, END, alpha=0.25, **HALF)
    turn, token = f64([[-0.375, -0.375, 0, 2, 2, 2]]), f64([[0.875, 0.75, 0, 0.5, 5, 2]])
    close(advantages, turn / 4 + token * 3 / 4)
    g_turn, g_token = f64([[1.3125, 1.625, 0, 3.5, 7, 6]]), f64([[1.875, 2.75, 0, 3.5, 7, 6]])
    close(returns, g_turn / 4 + g_token * 3 / 4)
    token = f64([[0.5703125, 0.28125, 0, -0.875, 4.5, 2]])  # token_lam = 1/2, as above
    close(hybrid_gae(R, V, MASK, END, alpha=0.25, token_lam=0.5, **HALF)[0], (turn + 3 * token) / 4)


# The shared vectors: hygae, aggregate, token and fixed turn gamma are this step's.
ESTIMATORS = {
    "hygae": hybrid_gae,
    "hygae_aggregate_reward": lambda *x, **p: hybrid_gae(*x, aggregate_reward=True, **p),
    "token_gae": lambda r, v, mask, end, **p: token_gae(r, v, mask, **p),
    # Their rewards sit on turn ends and their returns are 0 elsewhere: that is gamma = 0 inside.
    "turn_gae_fixed_gamma": lambda *x, **p: turn_gae(*x, gamma=0.0, **p),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_vectors(name):
    if not VECTORS.exists():
        pytest.skip(f"{VECTORS} is not beside this checkout; the naive oracle covers the formulas")
    cases = [case for case in json.loads(VECTORS.read_text()) if case["estimator"] == name]
    assert len(cases) >= 2
    for case in cases:
        fields = ("rewards", "values", "mask", "turn_end", "advantages", "returns")
        *inputs, advantages, returns = (f64(case[field]) for field in fields)
        actual = ESTIMATORS[name](*inputs, **case["params"])
        close(actual[0], advantages, 1e-9)
        close(actual[1], returns, 1e-9)
        if name == "turn_gae_fixed_gamma":  # any gamma: advantages, and returns at the turn ends
            actual = turn_gae(*inputs, gamma=0.9, **case["params"])
            close(actual[0], advantages, 1e-9)
            close(actual[1] * inputs[3], returns, 1e-9)


# The oracle: one row after the other, in plain Python, clocks read off token positions and sums
# written out instead of recursions.
def naive_row(r, v, ends, boot, gamma, lam, turn_gamma, anchor, aggregate):
    """Advantages and returns of the row's tokens 0..n-1; anchor "token": each token its own."""
    n, deltas, factors, returns = len(r), [], [], []
    owner = list(range(n)) if anchor == "token" else [sum(ends[:i]) for i in range(n)]
    pick = max if anchor == "last" else min
    anchors = [pick(i for i in range(n) if owner[i] == k) for k in sorted(set(owner))]
    for i, nxt in zip(anchors, anchors[1:] + [n]):  # nxt n: the state after the last token
        factors.append(gamma ** (nxt - i) if turn_gamma is None else turn_gamma)
        stop = nxt if anchor != "last" or (aggregate and nxt < n) else i + 1
        reward = sum(gamma ** (j - i) * r[j] for j in range(i, stop))
        deltas.append(reward + factors[-1] * (v + [boot])[nxt] - v[i])
    gae = [sum(math.prod(lam * f for f in factors[k:m]) * deltas[m] for m in range(k, len(deltas)))
           for k in range(len(deltas))]
    for i in range(n):
        total, weight = 0.0, 1.0
        while i < n and i not in anchors:
            total += weight * r[i]
            weight *= turn_gamma if ends[i] and turn_gamma is not None else gamma
            i += 1
        returns.append(total + weight * (boot if i == n else gae[anchors.index(i)] + v[i]))
    return [gae[k] for k in owner], returns


def naive(r, v, mask, end, boot, *, gamma, lam, turn_gamma=None, anchor="last", aggregate=False):
    out = torch.zeros(2, *r.shape, dtype=torch.float64)
    for b in range(len(r)):
        row = [x[b][mask[b] > 0].tolist() for x in (r, v, end.long())]
        result = naive_row(*row, boot[b].item(), gamma, lam, turn_gamma, anchor, aggregate)
        out[:, b, mask[b] > 0] = f64(result)
    return out[0], out[1]


def random_batch(seed, rows=5):
    """1-4 turns of 1-5 tokens, 0-3 off-mask positions anywhere (within turns too), dense rewards,
    NaN off the mask, bootstraps; the last row has no token at all and a NaN bootstrap."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    mask = torch.zeros(rows + 1, 48, dtype=torch.float64)
    end = mask.clone()
    for b in range(rows):
        t = -1
        for _ in range(draw(1, 5)):
            for _ in range(draw(1, 6)):
                t += 1 + max(0, draw(-3, 4)) * (t < 30)
                mask[b, t] = 1
            end[b, t] = 1
    r, v = torch.randn(2, *mask.shape, dtype=torch.float64, generator=g)
    boot = torch.randn(rows + 1, dtype=torch.float64, generator=g)
    boot[-1] = NAN
    return r.where(mask > 0, NAN), v.where(mask > 0, NAN), mask, end, boot


@pytest.mark.parametrize("anchor", ["last", "first"])
@pytest.mark.parametrize("turn_gamma", [None, 0.7])
@pytest.mark.parametrize("aggregate", [False, True])
def test_random_batches_match_naive(anchor, turn_gamma, aggregate):
    for seed in range(4):
        *batch, boot = random_batch(seed)
        numbers = dict(gamma=0.9, lam=0.8, turn_gamma=turn_gamma, anchor=anchor)
        expected = naive(*batch, boot, aggregate=aggregate, **numbers)
        actual = turn_gae(*batch, aggregate_reward=aggregate, bootstrap=boot, **numbers)
        token = naive(*batch, boot, gamma=0.9, lam=0.6, anchor="token")
        close(actual, expected)
        close(token_gae(*batch[:3], gamma=0.9, lam=0.6, bootstrap=boot), token)
        if turn_gamma is None:
            mix = hybrid_gae(
                *batch, gamma=0.9, lam=0.8, token_lam=0.6, alpha=0.3, anchor=anchor,
                aggregate_reward=aggregate, bootstrap=boot,
            )
            close(mix, tuple(0.3 * a + 0.7 * b for a, b in zip(expected, token)))
        zero = boot.new_zeros(len(boot))  # no bootstrap is a bootstrap of 0
        expected = naive(*batch, zero, aggregate=aggregate, **numbers)
        close(turn_gae(*batch, aggregate_reward=aggregate, **numbers), expected)


@pytest.mark.parametrize("anchor", ["last", "first"])
def test_reductions(anchor):
    r, v, mask, end, boot = random_batch(11)
    numbers = dict(gamma=0.9, lam=0.8, bootstrap=boot)
    turn = turn_gae(r, v, mask, end, anchor=anchor, **numbers)
    token = token_gae(r, v, mask, gamma=0.9, lam=0.6, bootstrap=boot)
    mix = dict(anchor=anchor, token_lam=0.6, **numbers)
    assert not torch.allclose(turn[0], token[0])
    close(hybrid_gae(r, v, mask, end, alpha=1.0, **mix), turn)  # alpha 1: turns only
    close(hybrid_gae(r, v, mask, end, alpha=0.0, **mix), token)  # alpha 0: tokens only
    # one-token turns: the turn chain is the token chain
    both = token_gae(r, v, mask, **numbers), turn_gae(r, v, mask, mask, anchor=anchor, **numbers)
    close(*both)
    # one turn: the advantage is the discounted reward at the anchor plus bootstrap, less its value
    one, last = torch.ones(1, 4), f64([[0, 0, 0, 1]])
    x, y = f64([[0, 0, 0, 2]]), f64([[1, 5, 5, 3]])
    advantage = turn_gae(x, y, one, last, anchor=anchor, gamma=0.5, lam=0.3, bootstrap=f64([4]))[0]
    close(advantage, one * f64([[2 + 2 - 3]] if anchor == "last" else [[2 / 8 + 4 / 16 - 1]]))
    # lam = 1: turn return = token return = discounted sum of rewards, if rewards are on turn ends
    # (or gathered on the way), and so the hybrid return is a no-op
    sparse = r.where(end > 0, 0)
    for rewards, gather in ((sparse, False), (r, True)):
        numbers = dict(gamma=0.9, lam=1.0, bootstrap=boot)
        plain = token_gae(rewards, v, mask, **numbers)[1]
        how = dict(anchor=anchor, aggregate_reward=gather)
        close(turn_gae(rewards, v, mask, end, **numbers, **how)[1], plain)
        close(hybrid_gae(rewards, v, mask, end, alpha=0.5, **numbers, **how)[1], plain)


@pytest.mark.parametrize("estimator", ["token", "last", "first", "hybrid"])
def test_expected_gradient(estimator):
    """A policy of four binary tokens in two turns, an exact critic, all 16 texts with their
    probabilities: the mean of A_t grad log pi_t is the true gradient of the mean return for the
    token chain and the "first" anchor; for the "last" anchor it is 0 on all but turn ends."""
    g = torch.Generator().manual_seed(3)
    logits = [torch.randn(2**t, 2, dtype=torch.float64, generator=g) for t in range(4)]
    logits = [x.requires_grad_() for x in logits]  # [t][text so far, next bit]
    texts = torch.arange(16)
    prefix = [texts >> (4 - t) for t in range(5)]
    logp = [logits[t].log_softmax(1)[prefix[t], prefix[t + 1] % 2] for t in range(4)]
    logp = torch.stack(logp, 1)
    p = logp.sum(1).exp()
    rewards = torch.zeros(16, 4, dtype=torch.float64)
    rewards[:, 1] = torch.sin(prefix[2].double())  # of the first turn's two tokens alone
    rewards[:, 3] = torch.randn(16, dtype=torch.float64, generator=g)
    true = torch.autograd.grad((p * rewards.sum(1)).sum(), logits, retain_graph=True)
    p, values = p.detach(), torch.zeros(16, 4, dtype=torch.float64)
    for t in range(4):  # V_t: mean of the rewards still to come, over all texts that go on so
        same = (prefix[t][:, None] == prefix[t]) * p
        values[:, t] = same @ rewards[:, t:].sum(1) / same.sum(1)
    inputs = (rewards, values, torch.ones(16, 4), f64([[0, 1, 0, 1]] * 16))
    numbers = dict(gamma=1.0, lam=0.7)
    call, inner = {
        "token": (lambda: token_gae(*inputs[:3], **numbers), 1.0),
        "last": (lambda: turn_gae(*inputs, **numbers), 0.0),
        "first": (lambda: turn_gae(*inputs, anchor="first", **numbers), 1.0),
        "hybrid": (lambda: hybrid_gae(*inputs, alpha=0.3, **numbers), 0.7),
    }[estimator]
    mean = torch.autograd.grad((p[:, None] * call()[0] * logp).sum(), logits)
    assert min(x.abs().max() for x in true) > 0.01
    for t in range(4):
        close(mean[t], true[t] * (1.0 if t in (1, 3) else inner))


HYBRID = dict(gamma=0.9, lam=0.8, alpha=0.4, token_lam=0.7)


def test_padding_order_and_batch_size_change_nothing():
    *batch, boot = random_batch(5)
    expected = torch.stack(hybrid_gae(*batch, bootstrap=boot, **HYBRID))
    junk = (NAN, -INF, 0, 0)
    for step, offset in ((1, 3), (2, 1), (3, 0)):  # columns in front, behind, between
        wide = [x.new_full((6, 150), fill) for x, fill in zip(batch, junk)]
        for x, y in zip(wide, batch):
            x[:, offset : offset + 48 * step : step] = y
        actual = torch.stack(hybrid_gae(*wide, bootstrap=boot, **HYBRID))
        assert torch.equal(actual[..., offset : offset + 48 * step : step], expected)
        assert actual.count_nonzero() == expected.count_nonzero()
    for rows in ([3, 0, 5, 4, 1, 2], [2], [5], [4, 1], []):
        part = hybrid_gae(*(x[rows] for x in batch), bootstrap=boot[rows], **HYBRID)
        assert torch.equal(torch.stack(part), expected[:, rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_no_gradient(dtype):
    r, v, mask, end, boot = random_batch(6)
    r, v = r.to(dtype), v.to(dtype).requires_grad_()
    for cast in (torch.bool, torch.int64, torch.uint8, torch.float32):
        flags = mask.to(cast), end.to(cast)
        actual = torch.stack(hybrid_gae(r, v, *flags, bootstrap=boot, **HYBRID))
        exact = hybrid_gae(r.double(), v.double(), mask, end, bootstrap=boot, **HYBRID)
        assert actual.dtype == dtype and not actual.requires_grad
        assert torch.equal(actual, torch.stack(exact).to(dtype))  # rounded once, at the end
    unit = dict(gamma=1.0, lam=1.0)
    for x in (*token_gae(r, v, mask, **unit), *turn_gae(r, v, mask, end, **unit), whiten(v, mask)):
        assert x.dtype == dtype and not x.requires_grad


def broken(**change):
    """A sound two-row batch, then one entry set in row 1."""
    batch = dict(rewards=f64([[0, 1, 0]] * 2), values=f64([[1, 2, 0]] * 2),
                 mask=f64([[1, 1, 0]] * 2), turn_end=f64([[0, 1, 0]] * 2), bootstrap=f64([[0]] * 2))
    for name, (t, x) in change.items():
        batch[name][1, t] = x
    return {**batch, "bootstrap": batch["bootstrap"][:, 0]}


@pytest.mark.parametrize("field, t, x, message", [
    ("turn_end", 2, 1, "turn_end stands on a token off the mask"),
    ("turn_end", 1, 0, "a turn has no turn_end"),
    ("mask", 2, 1, "a turn has no turn_end"),
    ("mask", 0, 0.5, "mask holds something else"),
    ("mask", 0, NAN, "mask holds something else"),
    ("turn_end", 1, 2, "turn_end holds something else"),
    ("rewards", 1, NAN, "rewards are not finite"),
    ("values", 0, INF, "values are not finite"),
    ("bootstrap", 0, NAN, "bootstrap is not finite"),
])
def test_errors_name_the_row(field, t, x, message):
    for call, numbers in ((hybrid_gae, HYBRID), (turn_gae, dict(gamma=1.0, lam=1.0))):
        call(**broken(), **numbers)
        with pytest.raises(ValueError, match="row 1: " + message):
            call(**broken(**{field: (t, x)}), **numbers)


def test_errors_name_the_argument():
    batch = broken()
    for name, x in (("gamma", 1.1), ("lam", -0.1), ("alpha", NAN), ("token_lam", 2)):
        with pytest.raises(ValueError, match=f"{name.split('_')[-1]} {x} is outside"):
            hybrid_gae(**batch, **{**HYBRID, name: x})
    with pytest.raises(ValueError, match="turn_gamma 1.5 is outside"):
        turn_gae(**batch, gamma=1.0, lam=1.0, turn_gamma=1.5)
    with pytest.raises(ValueError, match="anchor 'middle' is unknown; use 'last' or 'first'"):
        hybrid_gae(**batch, **HYBRID, anchor="middle")
    for name in batch:
        wrong = batch[name][:, :2] if name != "bootstrap" else f64([0, 0, 0])
        with pytest.raises(ValueError, match=name):
            hybrid_gae(**{**batch, name: wrong}, **HYBRID)
    with pytest.raises(ValueError, match="must be .B, T. floats"):
        token_gae(*torch.ones(3, 2, 3).long(), gamma=1.0, lam=1.0)
    x = torch.zeros(2, 3)
    for clip, dual in ((0.0, None), (-1.0, None), (0.2, 1.0), (NAN, None)):
        with pytest.raises(ValueError, match="clip"):
            policy_loss(x, x, x, x + 1, clip=clip, dual_clip=dual)
    with pytest.raises(ValueError, match="clip 0 must be > 0"):
        value_loss(x, x, x, x + 1, clip=0)
    for call in (lambda m: policy_loss(x, x, x, m, clip=0.2), lambda m: kl_terms(x, x, m),
                 lambda m: value_loss(x, x, x, m, clip=0.2), lambda m: masked_mean(x, m),
                 lambda m: whiten(x, m), lambda m: policy_stats(x, x, m, clip=0.2)):
        with pytest.raises(ValueError, match="shapes differ"):
            call(torch.ones(2, 2))
        with pytest.raises(ValueError, match="row 1: mask holds"):
            call(torch.tensor([[1, 1, 1], [1, 2, 1]]))


def test_whiten_by_hand():
    # mean (1 + 3 + 5) / 3 = 3, var (4 + 0 + 4) / 2 = 4
    x, mask = f64([[1, 3, NAN], [5, INF, NAN]]), f64([[1, 1, 0], [1, 0, 0]])
    close(whiten(x, mask), f64([[-1, 0, 0], [1, 0, 0]]), 1e-8)
    assert torch.equal(whiten(x, f64([[0, 1, 0], [0, 0, 0]])), f64([[0, 3, 0], [0, 0, 0]]))
    assert torch.equal(whiten(x, torch.zeros(2, 3)), torch.zeros(2, 3, dtype=torch.float64))
    close(whiten(f64([[1, 1 + 2e-4]]), torch.ones(1, 2)), f64([[-1, 1]]) * 1e-4 / 3e-8**0.5)  # eps
    far = torch.tensor([[1e4 - 1, 1e4, 1e4 + 1]])  # float32: the mean of squares would lose this
    close(whiten(far, torch.ones(1, 3)), torch.tensor([[-1.0, 0, 1]]), 1e-6)
    big = torch.tensor([[4e4, 5e4]], dtype=torch.float16)  # their sum is not a float16
    close(whiten(big, torch.ones(1, 2)), torch.tensor([[-(0.5**0.5), 0.5**0.5]]).half())
    with pytest.raises(ValueError, match="row 1: x is not finite"):
        whiten(x, f64([[1, 1, 0], [1, 1, 0]]))


def whiten_rank(rank, path):
    torch.distributed.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    x, mask = torch.load(path / "in.pt")
    part = slice(0, 3) if rank == 0 else slice(3, None)
    empty = mask[part] * (rank == 0)  # rank 1 without a token
    out = [whiten(x[part], mask[part], dist=torch.distributed),
           whiten(x[part], mask[part], dist=torch.distributed.group.WORLD),
           whiten(x[part], empty, dist=torch.distributed)]
    torch.save(out, path / f"out{rank}.pt")
    torch.distributed.destroy_process_group()


def test_whiten_two_ranks(tmp_path):
    x, _, mask, _, _ = random_batch(7)
    torch.save((x, mask), tmp_path / "in.pt")
    workers = torch.multiprocessing.spawn(whiten_rank, (tmp_path,), nprocs=2, join=False)
    deadline = time.monotonic() + 90
    try:
        while not workers.join(timeout=5):
            assert time.monotonic() < deadline, "the two ranks hang"
    finally:
        for process in workers.processes:
            process.terminate()
    parts = [torch.load(tmp_path / f"out{rank}.pt") for rank in (0, 1)]
    for i in (0, 1):
        close(torch.cat([part[i] for part in parts]), whiten(x, mask))
    close(torch.cat([part[2] for part in parts])[:3], whiten(x[:3], mask[:3]))
    assert (whiten(x, mask)[:3] - whiten(x[:3], mask[:3])).abs().max() > 0.01  # ranks do matter


def test_policy_loss_by_hand():
    # ratio 2, .5, 1.1, 2, and one token off the mask; clip .2
    old = f64([[-1, -2, -3, -4, NAN]])
    new = (old + f64([[LN2, -LN2, math.log(1.1), LN2, 0]])).requires_grad_()
    advantages, mask = f64([[1, -1, 2, -1, NAN]]), f64([[1, 1, 1, 1, 0]])
    # max(-2, -1.2) = -1.2;  max(.5, .8) = .8;  -2.2;  max(2, 1.2) = 2: sum -.6
    loss = policy_loss(new, old, advantages, mask, clip=0.2)
    close(loss, f64(-0.6 / 4))
    loss.backward()
    close(new.grad, f64([[0, 0, -2.2 / 4, 2 / 4, 0]]))  # clipped, clipped, -A ratio, -A ratio
    # dual clip 1.5: the last token's 2 becomes 1.5, positive advantages and .8 stay
    close(policy_loss(new, old, advantages, mask, clip=0.2, dual_clip=1.5).detach(), f64(-1.1 / 4))
    close(policy_loss(new, old, advantages, mask, clip=0.2, denominator=8).detach(), f64(-0.6 / 8))
    assert policy_loss(new, old, advantages, 0 * mask, clip=0.2) == 0  # no tokens: 0, not NaN


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_overflow(dual_clip):
    one = torch.ones(1, 2)
    for logratio in (100.0, -100.0, 1e4):
        for advantage in (0.0, 1.0, -1.0):
            new = torch.tensor([[logratio, 0.1]], requires_grad=True)
            loss = policy_loss(new, 0 * one, advantage * one, one, clip=0.2, dual_clip=dual_clip)
            loss.backward()
            assert loss.isfinite() and new.grad[0, 0] == 0
            near = math.exp(0.1)  # the other token, inside the clip range, is as ever
            close(new.grad[0, 1], torch.tensor(-advantage * near / 2), 1e-6)
            if logratio > 0 and advantage == 1:
                close(loss.detach(), torch.tensor(-(1.2 + near) / 2), 1e-6)


def test_policy_stats_by_hand():
    old = f64([[-1, -2, -3, NAN]])
    new = old + f64([[LN2, -LN2, 0.1, 0]])
    stats = policy_stats(new, old, f64([[1, 1, 1, 0]]), clip=0.2)
    # exp(d) - 1 - d: 1 - ln 2, -.5 + ln 2, exp(.1) - 1.1
    close(stats["approx_kl"].double(), f64((0.5 + math.exp(0.1) - 1.1) / 3), 1e-9)
    close(stats["clipfrac"].double(), f64(2 / 3), 1e-6)
    close(stats["ratio"].double(), f64((2 + 0.5 + math.exp(0.1)) / 3))


def test_value_loss_by_hand():
    # V 1, V_old 5, G 10, clip .2: clipped 4.8, max(81, 27.04) / 2 = 40.5. Clipped is the worse one
    # in the second: V 9, V_old 5: 5.2, max(1, 23.04) / 2 = 11.52, and no gradient
    one, old, target = f64([[1, 1, 0]]), f64([[5, 5, NAN]]), f64([[10, 10, NAN]])
    values = f64([[1, 9, NAN]]).requires_grad_()
    loss = value_loss(values, old, target, one, clip=0.2)
    close(loss, f64((40.5 + 11.52) / 2))
    loss.backward()
    close(values.grad, f64([[-9 / 2, 0, 0]]))
    close(value_loss(values, old, target, one, clip=None).detach(), f64((40.5 + 0.5) / 2))
    close(value_loss(values, old, target, one, clip=0.2, denominator=1).detach(), f64(52.02))


def test_kl_by_hand():
    lp = f64([[0, -2, 0, 0, -1, NAN]]).requires_grad_()
    ref = f64([[-LN2, LN2 - 2, -100, 100, -1, INF]])
    k1, k2, k3 = kl_terms(lp, ref, f64([[1, 1, 1, 1, 1, 0]]))
    close(k1.detach()[0, :3], f64([LN2, -LN2, 100]))
    close(k2.detach()[0, :3], f64([LN2**2 / 2, LN2**2 / 2, 5000]))
    close(k3.detach()[0, :3], f64([0.5 - 1 + LN2, 2 - 1 - LN2, 99]))  # .193147, .306853
    assert [x[0, 5].item() for x in (k1, k2, k3)] == [0, 0, 0] and k3.isfinite().all()
    assert k3.min() >= 0 and k3[0, 4] == 0
    (k1 + k2 + k3).sum().backward()
    # 1 + d + (1 - exp(-d));  at d = -100 the exp is clamped, its part has no gradient
    close(lp.grad, f64([[2 + LN2 - 0.5, 2 - LN2 - 2, 102, 1 - 100, 1, 0]]))
    lp = torch.tensor([[-100.0, 100.0]]).requires_grad_()  # float32: exp(100) is inf
    kl_terms(lp, torch.zeros(1, 2), torch.ones(1, 2))[2].sum().backward()
    close(lp.grad, torch.tensor([[0.0, 1]]))


def losses(new, values, batch, count):
    """Everything that the train script would add up over micro-batches."""
    old, advantages, old_values, returns, mask = batch
    kl = masked_mean(kl_terms(new, old, mask)[2], mask, count)
    policy = policy_loss(new, old, advantages, mask, clip=0.1, dual_clip=1.2, denominator=count)
    value = value_loss(values, old_values, returns, mask, clip=0.2, denominator=count)
    stats = policy_stats(new, old, mask, clip=0.1, denominator=count)
    return torch.stack([policy, value, kl, *stats.values()])


@pytest.mark.parametrize("count_as", [int, float, torch.tensor])
def test_micro_batches_add_up(count_as):
    _, _, mask, _, _ = random_batch(8)
    g = torch.Generator().manual_seed(8)
    data = [torch.randn(*mask.shape, dtype=torch.float64, generator=g).where(mask > 0, NAN)
            for _ in range(6)]
    new, values = data[0].requires_grad_(), data[1].requires_grad_()
    batch = (data[0].detach() + 0.2 * data[2], data[3], data[4], data[5], mask)
    whole = losses(new, values, batch, None)  # None: the mask's own tokens
    whole[:3].sum().backward()
    expected = new.grad.clone(), values.grad.clone()
    assert all(x.isfinite().all() and not x[mask == 0].any() for x in expected)
    new.grad = values.grad = None
    count, total = count_as(int(mask.sum())), 0
    for rows in ([0], [1, 2, 3], [4, 5]):
        part = losses(new[rows], values[rows], [x[rows] for x in batch], count)
        part[:3].sum().backward()
        total = total + part.detach()
    close(total, whole.detach())
    close((new.grad, values.grad), expected)


def test_losses_are_float32_and_their_gradient_has_one_way():
    x, y, z = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0))
    one, half = torch.ones(2, 3), [t.bfloat16().requires_grad_() for t in (x, y, z)]
    outs = [policy_loss(*half, one, clip=0.2), value_loss(*half, one, clip=0.2),
            masked_mean(half[0], one), *kl_terms(*half[:2], one)]
    assert all(out.dtype == torch.float32 for out in outs)
    sum(out.sum() for out in outs).backward()
    assert [t.grad is not None for t in half] == [True, False, False]
    assert not any(t.requires_grad for t in policy_stats(*half[:2], one, clip=0.2).values())


def test_stands_alone_and_is_honest(tmp_path):
    text = (HERE / "hygrow.py").read_text()
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in imports if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"torch", "einops", "math"}
    assert text[: text.index("def token_gae")].count("\n") < 40 and text.count("\n") <= 450
    for test in re.findall(r"\btest_\w+", text):  # each test that a docstring names is here
        assert inspect.isfunction(globals().get(test)), test
    (tmp_path / "hygrow.py").write_text(text)
    code = ("import sys\nfor name in ('transformers', 'gymnasium', 'tyro', 'envs', 'models'):\n"
            "    sys.modules[name] = None\nimport hygrow, torch\nx = torch.ones(1, 2)\n"
            "print(hygrow.token_gae(x, x, x, gamma=1.0, lam=1.0)[0].tolist())")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.strip() == "[[1.0, 0.0]]", run.stderr
    assert Path(hygrow.__file__).parent == HERE
