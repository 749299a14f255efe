"""hygrow.py against numbers worked by hand, the shared vectors and a naive loop; its invariances,
losses, whitening over two ranks, and errors. The theory is tested in test_estimators.py."""

import ast
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
import mutants
from hygrow import (
    bi_level_gae, grow_advantages, grow_loss, grow_rewards, grow_weights, hybrid_gae, kl_terms,
    masked_mean, masked_reinforce, policy_loss, policy_stats, rl4vlm_gae, token_gae,
    leave_one_out_advantages, trajectory_group_advantages, turn_gae, turn_policy_loss, turn_start,
    value_loss, whiten,
)
from test_estimators import close, f64, random_batch

torch.set_num_threads(1)
HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "shared" / "vectors" / "estimators.json"
NAN, INF = math.nan, math.inf
LN2 = math.log(2)

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


def test_bi_level_by_hand():
    # turn_gamma = .75: delta_2 = 2 + .75 * 8 - 4 = 4 = A_2;  delta_1 = 1 + .75 * 4 - 2 = 2,
    # A_1 = 2 + .375 * 4 = 3.5: r' = 5.5 at e_1, 8 at e_2. In turn 2: delta 0 + 1 - 3 = -2,
    # 4 + 2 - 2 = 4, 8 - 4 = 4: A = 4, 4 + 4/4 = 5, -2 + 5/4 = -.75. Turn 1: 3.5, .5 + 1 - 1 + 3.5/4
    advantages, returns = bi_level_gae(R, V, MASK, END, turn_gamma=0.75, **HALF)
    expected = f64([[1.375, 3.5, 0, -0.75, 5, 4]])
    close(advantages, expected)
    close(returns, expected + V.where(MASK > 0, 0))
    # three turns, reward 1 at the end, no discount, no critic: every return is 1, not 3, 2, 1
    r, end = f64([[0, 0, 0, 0, 0, 1]]), f64([[0, 1, 0, 1, 0, 1]])
    one = torch.ones(1, 6, dtype=torch.float64)
    close(bi_level_gae(r, 0 * r, one, end, gamma=1.0, lam=1.0, turn_gamma=1.0)[1], one)


def test_rl4vlm_by_hand():
    # delta_2 = 2 + 8/2 - 3 = 3 = A_2;  delta_1 = 1 + 3/2 - 1 = 1.5, A_1 = 1.5 + 3/4 = 2.25
    advantages, returns = rl4vlm_gae(R, V, MASK, END, **HALF)
    close(advantages, f64([[2.25, 2.25, 0, 3, 3, 3]]))
    close(returns, f64([[3.25, 0, 0, 6, 0, 0]]))
    assert turn_start(MASK, END).tolist() == [[True, False, False, True, False, False]]
    # prompts in front and between, a turn of one token, a row without any
    mask, end = f64([[0, 1, 1, 0, 0, 1, 0, 1], [0] * 8]), f64([[0, 0, 1, 0, 0, 1, 0, 1], [0] * 8])
    expected = torch.tensor([[0, 1, 0, 0, 0, 1, 0, 1], [0] * 8]).bool()
    assert torch.equal(turn_start(mask, end), expected)
    assert turn_start(mask[:, :0], end[:, :0]).shape == (2, 0)
    with pytest.raises(ValueError, match="row 0: a turn has no turn_end"):
        turn_start(mask, 0 * end)


def test_reinforce_by_hand():
    # 2 + 8/2 = 6;  4 + 3 = 7;  3.5;  1 + 1.75;  .5 + 1.375
    for x in masked_reinforce(R, MASK, gamma=0.5, bootstrap=BOOT):
        close(x, f64([[1.875, 2.75, 0, 3.5, 7, 6]]))
    whole = masked_reinforce(torch.tensor([[0, 1]]), torch.ones(1, 2), gamma=0.5)[0]
    close(whole, torch.tensor([[0.5, 1]]))  # integer rewards: a float answer


def test_hybrid_return_by_hand():
    # G^turn = 1.3125, 1.625, 3.5, 7, 6 and G^token = 1.875, 2.75, 3.5, 7, 6, as above
    how = dict(alpha=0.25, **HALF)
    kinds = {
        "exact": [1.734375, 2.46875, 0, 3.5, 7, 6],
        "broadcast": [0.25 * 1.625 + 0.75 * 1.875, 2.46875, 0, 1.5 + 2.625, 1.5 + 5.25, 6],
        "turn_end": [0, 2.46875, 0, 0, 0, 6],
        "token": [1.875, 2.75, 0, 3.5, 7, 6],
    }
    exact, _ = hybrid_gae(R, V, MASK, END, **how)
    for kind, expected in kinds.items():
        advantages, returns = hybrid_gae(R, V, MASK, END, hybrid_return=kind, **how)
        close(returns, f64([expected]))
        close(advantages, exact)
    # "first": G at b_k is 1.8125 and 3.5
    how = dict(alpha=1.0, anchor="first", hybrid_return="broadcast", **HALF)
    close(hybrid_gae(R, V, MASK, END, **how)[1], f64([[1.8125, 1.8125, 0, 3.5, 3.5, 3.5]]))


def test_trajectory_group_by_hand():
    # scores 3, 1, 2 | 5: mean 2, std 1 (ddof 1); the lone row 0
    r = f64([[1, 2, NAN], [1, 0, 0], [0, NAN, 2], [5, 0, 0]])
    mask = f64([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 1, 1]])
    group = torch.tensor([7, 7, 7, 2])
    expected = f64([[1, 1, 0], [-1, -1, -1], [0, 0, 0], [0, 0, 0]])
    close(trajectory_group_advantages(r, mask, group), expected / (1 + 1e-6))
    close(trajectory_group_advantages(r, mask, group, ddof=0, eps=0.0), expected * 1.5**0.5)
    same, one = torch.full((7, 1), 10.1), torch.ones(7, 1)
    tied = trajectory_group_advantages(same, one, torch.zeros(7).long())
    assert not tied.any() and tied.dtype == torch.float32
    # rewards that cancel: 0 but for their rounding, and so a tie; a row without tokens is not there
    cancel = torch.tensor([[0.1, 0.1, 0.1, -0.3], [0, 0, 0, 0]])
    assert cancel[0].double().sum() != 0
    assert not trajectory_group_advantages(cancel, torch.ones(2, 4), group[:2]).any()
    gone = f64([[1], [7], [1], [2]]), f64([[1], [0], [1], [1]]), torch.zeros(4).long()
    expected = torch.tensor([[-1.0], [0], [-1], [2]]).double() / 3**0.5
    close(trajectory_group_advantages(*gone, eps=0.0), expected)
    big = torch.full((3, 4096), 0.1)  # a float32 sum of these is not exact enough
    big[:, 0] += torch.tensor([0, 0.001, 0.01])
    x = trajectory_group_advantages(big, torch.ones(3, 4096), group[:3], eps=0.0)
    score = big.double().sum(1)
    close(x[:, 0], ((score - score.mean()) / score.std()).float(), 1e-6)
    half = torch.tensor([[0.1], [0.1]]).bfloat16()
    half[1] *= 1 + torch.finfo(half.dtype).eps  # one rounding step of its own type
    assert half[0] != half[1] and not trajectory_group_advantages(half, one[:2], group[:2]).any()
    whole = trajectory_group_advantages(torch.tensor([[1], [0], [2]]), one[:3], group[:3])
    close(whole, torch.tensor([[0.0], [-1], [1]]), 1e-5)  # integer rewards: a float answer


def test_leave_one_out_by_hand():
    # group 4: 3 - (1 + 5) / 2 = 0, 1 - 4 = -3, 5 - 2 = 3; the lone one 0
    score, group = f64([3, 2, 1, 5]), torch.tensor([4, 0, 4, 4])
    close(leave_one_out_advantages(score, group), f64([0, 0, -3, 3]))
    close(leave_one_out_advantages(score.int(), group), torch.tensor([0.0, 0, -3, 3]))
    with pytest.raises(ValueError, match="row 1: score is not finite: nan"):
        leave_one_out_advantages(f64([1, NAN]), group[:2])


def test_grow_by_hand():
    # r = 1/4, 1/2, 1 | 0: mean 7/16, squares 21/16 / 4 - 49/256 = 35/256
    success, lengths = torch.tensor([True, False]), torch.tensor([3, 1])
    close(grow_rewards(success, lengths, gamma=0.5), torch.tensor([0.25, 0.5, 1, 0]))  # float32
    r = grow_rewards(success.double(), lengths.int(), gamma=0.5)
    close(r, f64([0.25, 0.5, 1, 0]))
    trajectory, group = torch.tensor([0, 0, 0, 1]), torch.zeros(4).long()
    close(grow_advantages(r, trajectory, group), f64([-3, 1, 9, -7]) / 35**0.5)
    close(grow_advantages(r, trajectory, group, ddof=1), f64([-3, 1, 9, -7]) / 35**0.5 * 0.75**0.5)
    # balanced: weights 1/6, 1/6, 1/6, 1/2: mean 7/24, variance 21/96 - 49/576 = 77/576
    balanced = grow_advantages(r, trajectory, group, statistics="balanced")
    close(balanced, f64([-1, 5, 17, -7]) / 77**0.5)
    close(grow_weights(trajectory, group), f64([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    # a group of one sample gets 0; weights are 1/2 to each group
    group = torch.tensor([1, 1, 1, 0])
    assert grow_advantages(r, trajectory, group)[3] == 0
    close(grow_weights(trajectory, group), f64([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    # groups [1] and [0, 1], P19; samples 1 | 0, 0, 0, 0, P20: mean .2, std .4 or mean .5, std .5
    ids = torch.arange(3)
    close(grow_advantages(f64([1, 0, 1]), ids, torch.tensor([0, 1, 1])), f64([0, -1, 1]))
    ids, zero = torch.tensor([0, 1, 1, 1, 1]), torch.zeros(5).long()
    five = f64([1, 0, 0, 0, 0])
    close(grow_advantages(five, ids, zero), f64([2, -0.5, -0.5, -0.5, -0.5]))
    close(grow_advantages(five, ids, zero, statistics="balanced"), f64([1, -1, -1, -1, -1]))
    weights = grow_weights(torch.tensor([5, 5, 5, 6, 5, 5]), torch.tensor([0, 0, 1, 1, 2, -3]))
    close(weights, f64([1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4]))  # four groups
    # numbers far from 1: squares that a float64 does not hold; ties below 0; 3 but not 6 eps
    for scale in (1e-200, 1e200, -1.0):
        far = grow_advantages(scale * f64([1, 0]), ids[:2], zero[:2])
        close(far, f64([1, -1]) * (1 if scale > 0 else -1))
    assert not grow_advantages(f64([-10.1] * 3), ids[:3], zero[:3]).any()
    for dtype in (torch.float32, torch.float64):
        for steps, tied in ((3, True), (6, False)):
            pair = torch.tensor([1, 1 + steps * torch.finfo(dtype).eps], dtype=dtype)
            for sign in (1, -1):
                pair_advantages = grow_advantages(sign * pair, ids[:2], zero[:2], ddof=1)
                assert pair_advantages.any() != tied
    close(grow_rewards(f64([1]), torch.tensor([3]), gamma=0.0), f64([0, 0, 1]))


# The shared vectors.
ESTIMATORS = {
    "hygae": hybrid_gae,
    "hygae_aggregate_reward": lambda *x, **p: hybrid_gae(*x, aggregate_reward=True, **p),
    "token_gae": lambda r, v, mask, end, **p: token_gae(r, v, mask, **p),
    # Their rewards sit on turn ends and their returns are 0 elsewhere: that is gamma = 0 inside.
    "bi_level_gae": bi_level_gae,
    "rl4vlm": rl4vlm_gae,
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
    for mixed in ((r.double(), v), (r, v.double())):  # of two types the wider one answers
        assert all(x.dtype == torch.float64 for x in hybrid_gae(*mixed, mask, end, **HYBRID))
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
        with pytest.raises(ValueError, match=f"^{name} {x} is outside"):
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


def test_errors_of_the_baselines_and_of_grow():
    batch = broken()
    for call in (bi_level_gae, rl4vlm_gae):
        how = dict(gamma=1.0, lam=1.0, **({"turn_gamma": 1.0} if call is bi_level_gae else {}))
        for name in how:
            with pytest.raises(ValueError, match=f"{name} -0.1 is outside"):
                call(**batch, **{**how, name: -0.1})
        with pytest.raises(ValueError, match="row 1: a turn has no turn_end"):
            call(**broken(turn_end=(1, 0)), **how)
        with pytest.raises(ValueError, match="row 1: rewards are not finite"):
            call(**broken(rewards=(0, INF)), **how)
    with pytest.raises(ValueError, match="hybrid_return 'both' is unknown; use 'exact' or"):
        hybrid_gae(**batch, **HYBRID, hybrid_return="both")
    r, mask, group = batch["rewards"], batch["mask"], torch.tensor([0, 0])
    with pytest.raises(ValueError, match="row 1: rewards are not finite"):
        trajectory_group_advantages(broken(rewards=(0, NAN))["rewards"], mask, group)
    with pytest.raises(ValueError, match=r"group \(1,\)"):
        trajectory_group_advantages(r, mask, group[:1])
    two, ones = torch.ones(2), torch.ones(2).long()
    for success, lengths, match in (
        (two, ones[:1], r"success \(2,\) and lengths \(1,\)"),
        (two, two, "of an integer type"),
        (two, torch.tensor([1, 0]), "row 1: a trajectory's length is less than 1"),
        (torch.tensor([0, NAN]), ones, "row 1: success is not a number >= 0: nan"),
        (torch.tensor([1, -1]), ones, "row 1: success is not a number >= 0: -1"),
        (two, ones.bool(), "of an integer type"),
    ):
        with pytest.raises(ValueError, match=match):
            grow_rewards(success, lengths, gamma=0.9)
    with pytest.raises(ValueError, match="gamma 2 is outside"):
        grow_rewards(two, ones, gamma=2)
    for rewards, trajectory, how, match in (
        (two[:1], ones, {}, r"rewards \(1,\)"),
        (two, ones[:1], {}, r"trajectory \(1,\)"),
        (torch.tensor([0, INF]), ones, {}, "row 1: rewards are not finite"),
        (two, ones, dict(ddof=-1), "ddof -1 must be 0 or 1"),
        (two, ones, dict(ddof=NAN), "ddof nan must be 0 or 1"),
        (two, two, {}, "must both be .S. whole numbers"),
        (torch.ones(1, 2), torch.ones(1, 2).long(), {}, "must both be .S. whole numbers"),
        (two, ones, dict(statistics="mean"), "statistics 'mean' is unknown; use 'pooled' or"),
    ):
        with pytest.raises(ValueError, match=match):
            grow_advantages(rewards, trajectory, ones, **how)
    with pytest.raises(ValueError, match="eps -1 a number >= 0"):
        trajectory_group_advantages(r, mask, group, eps=-1)
    with pytest.raises(ValueError, match="row 1: rewards are not finite: inf at .1,. .rows: .1, 2"):
        many = torch.tensor([0.0] + [INF] * 9)
        grow_advantages(many, torch.arange(10), torch.zeros(10).long())
    with pytest.raises(ValueError, match=r"trajectory \(2,\) and group \(3,\)"):
        grow_weights(ones, torch.ones(3).long())


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
    close(whiten(torch.tensor([[1, 3]]), torch.ones(1, 2)), torch.tensor([[-1, 1]]) * 0.5**0.5)
    with pytest.raises(ValueError, match="row 1: x is not finite"):
        whiten(x, f64([[1, 1, 0], [1, 1, 0]]))


def whiten_rank(rank, path):
    torch.distributed.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    x, mask = torch.load(path / "in.pt")
    part = slice(0, 3) if rank == 0 else slice(3, None)
    empty = mask[part] * (rank == 0)  # rank 1 without a token
    alone = torch.distributed.new_group([0])  # all ranks must make it, rank 0 alone is in it
    if rank == 0:
        torch.save(whiten(x[part], mask[part], dist=alone), path / "alone.pt")
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
    close(torch.load(tmp_path / "alone.pt"), whiten(x[:3], mask[:3]))
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
    far = policy_stats(torch.tensor([[200.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), clip=0.2)
    assert all(x.isfinite() for x in far.values())


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


def test_turn_policy_loss_by_hand():
    # row 0, turn 1: tokens +ln 2 (a thought, counts half) and -ln 2 / 4: rho = 2^(1/4); turn 2: one
    # token +ln 2. Row 1: one turn, -ln 2 and -ln 2: rho = 1/4
    mask, end = f64([[1, 1, 0, 1], [1, 0, 1, 0]]), f64([[0, 1, 0, 1], [0, 0, 1, 0]])
    old = f64([[-1, -2, NAN, -3], [-1, NAN, -1, INF]])
    change = f64([[LN2, -LN2 / 4, 0, LN2], [-LN2, 0, -LN2, 0]])
    new = (old + change).requires_grad_()
    advantages = f64([[9, 3, NAN, 2], [9, NAN, -1, 9]])  # read at turn ends
    thought = f64([[1, 0, 1, 0], [0, 0, 0, 0]])
    how = dict(clip=0.2, thought=thought, thought_coef=0.5)
    # -3 2^.25 (inside the clip range: 1.189);  -2.4;  max(.25, .8) = .8
    loss = turn_policy_loss(new, old, advantages, mask, end, **how)
    close(loss, f64((-3 * 2**0.25 - 2.4 + 0.8) / 3))
    loss.backward()
    one = -3 * 2**0.25 / 3
    close(new.grad, f64([[0.5 * one, one, 0, 0], [0, 0, 0, 0]]))
    loss = turn_policy_loss(new, old, advantages, mask, end, denominator=6, **how)
    close(loss.detach(), f64((-3 * 2**0.25 - 2.4 + 0.8) / 6))
    # without thoughts rho_1 = 2^(3/4), clipped to 1.2
    loss = turn_policy_loss(new, old, advantages, mask, end, clip=0.2)
    close(loss.detach(), f64((-3.6 - 2.4 + 0.8) / 3))
    # one-token turns: policy_loss
    x = new.detach().nan_to_num(posinf=0)
    both = (loss(x, old, advantages, end, *more, clip=0.2) for loss, more in
            ((policy_loss, ()), (turn_policy_loss, (end,))))
    close(*both)
    parts = [turn_policy_loss(new[i:i + 1], old[i:i + 1], advantages[i:i + 1], mask[i:i + 1],
                              end[i:i + 1], clip=0.2, denominator=3) for i in (0, 1)]
    close(sum(parts).detach(), loss.detach())
    empty = turn_policy_loss(new, old, advantages, 0 * mask, 0 * end, clip=0.2)
    assert empty == 0
    for shape in ((0, 3), (2, 0)):
        none = torch.zeros(shape)
        assert turn_policy_loss(none, none, none, none, none, clip=0.2) == 0
    # no dual clip: rho = e^2, A = -1; and no gradient to the old policy
    two, minus, one = f64([[2]]), f64([[-1]]), f64([[1]])
    before = f64([[0]]).requires_grad_()
    loss = turn_policy_loss(two.requires_grad_(), before, minus, one, one, clip=0.2)
    close(loss, f64(math.exp(2)))
    loss.backward()
    assert two.grad.any() and before.grad is None
    for coef in (NAN, -0.1, 2):
        with pytest.raises(ValueError, match="thought_coef .* is outside"):
            turn_policy_loss(new, old, advantages, mask, end, clip=0.2, thought_coef=coef)
    loss = turn_policy_loss(new, old, advantages, mask, end, clip=0.2)
    for wrong, match in ((dict(turn_end=0 * end), "row 0: a turn has no turn_end"),
                         (dict(turn_end=1 - 0 * end), "row 0: turn_end stands on a token off"),
                         (dict(turn_end=end, thought=2 * mask), "row 0: thought holds"),
                         (dict(turn_end=end, thought=mask[:, :2]), "shapes differ: thought")):
        with pytest.raises(ValueError, match=match):
            turn_policy_loss(new, old, advantages, mask, clip=0.2, **wrong)


def test_grow_loss_by_hand():
    # sample 0: tokens with rho 2 and 1/2, A = 2, w = 1/4;  sample 1: rho 1.1, A = -1, w = 3/4
    old = f64([[-1, -2], [-3, NAN]])
    new = (old + f64([[LN2, -LN2], [math.log(1.1), 0]])).requires_grad_()
    advantages, weights, mask = f64([2, -1]), f64([0.25, 0.75]), f64([[1, 1], [1, 0]])
    batch = new, old, advantages, weights, mask
    # token: 1/4 (min(4, 2.4) + min(1, 1.6)) / 2 = .425;  3/4 * -1.1 = -.825
    loss = grow_loss(*batch, clip=0.2)
    close(loss, f64(0.4))
    loss.backward()
    close(new.grad, f64([[0, -0.125], [0.825, 0]]))  # clipped;  -w A rho / 2;  -w A rho
    # action: rho_0 = 1: 1/4 * 2 = .5;  the other as before
    new.grad = None
    loss = grow_loss(*batch, clip=0.2, ratio="action")
    close(loss, f64(0.325))
    loss.backward()
    close(new.grad, f64([[-0.5, -0.5], [0.825, 0]]))
    # one-token actions: the same; micro-batches add up; a sample without tokens counts nothing
    single = [x[:, :1] if x.ndim == 2 else x for x in batch]
    close(grow_loss(*single, clip=0.2), grow_loss(*single, clip=0.2, ratio="action"))
    for ratio in ("token", "action"):
        parts = [grow_loss(*(x[i:i + 1] for x in batch), clip=0.2, ratio=ratio) for i in (0, 1)]
        close(sum(parts), grow_loss(*batch, clip=0.2, ratio=ratio))
        none = grow_loss(*batch[:4], 0 * mask, clip=0.2, ratio=ratio)
        assert none == 0
        far = torch.tensor([[100.0, 0]], requires_grad=True)  # exp would overflow
        one = torch.ones(1)
        x = grow_loss(far, 0 * far, one, one, torch.ones(1, 2), clip=0.2, ratio=ratio)
        x.backward()
        assert x.isfinite() and far.grad.isfinite().all()
    with pytest.raises(ValueError, match="ratio 'step' is unknown; use 'token' or 'action'"):
        grow_loss(*batch, clip=0.2, ratio="step")
    with pytest.raises(ValueError, match=r"weights \(1,\) must be \[S\] = \(2,\)"):
        grow_loss(new, old, advantages, weights[:1], mask, clip=0.2)
    with pytest.raises(ValueError, match="row 0: a weight is below 0: -0.25"):
        grow_loss(new, old, advantages, -weights, mask, clip=0.2)
    with pytest.raises(ValueError, match="row 1: mask holds"):
        grow_loss(*batch[:4], f64([[1, 1], [1, 3]]), clip=0.2)
    half = [x.bfloat16().requires_grad_() for x in (f64([[0.0, 0]]), f64([[0.0, 0]]))]
    x = grow_loss(*half, torch.ones(1), torch.ones(1), torch.ones(1, 2), clip=0.2)
    assert x.dtype == torch.float32
    x.backward()
    assert half[0].grad is not None and half[1].grad is None


def test_losses_are_float32_and_their_gradient_has_one_way():
    x, y, z = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0))
    one, half = torch.ones(2, 3), [t.bfloat16().requires_grad_() for t in (x, y, z)]
    outs = [policy_loss(*half, one, clip=0.2), value_loss(*half, one, clip=0.2),
            masked_mean(half[0], one), *kl_terms(*half[:2], one)]
    assert all(out.dtype == torch.float32 for out in outs)
    sum(out.sum() for out in outs).backward()
    assert [t.grad is not None for t in half] == [True, False, False]
    assert not any(t.requires_grad for t in policy_stats(*half[:2], one, clip=0.2).values())


def test_errors_of_losses_name_the_argument():
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


def test_stands_alone_and_is_readable(tmp_path):
    text = (HERE / "hygrow.py").read_text()
    tree = ast.parse(text)
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in imports if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"torch", "einops", "math"}
    assert text[: text.index("def token_gae")].count("\n") < 40
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            assert function.end_lineno - function.lineno < 40, function.name
            doc = ast.get_docstring(function) or ""
            if not function.name.startswith("_"):  # each public function names its tests...
                assert re.search(r"\btest_\w+", doc), function.name
            if function.name.endswith(("_gae", "reinforce", "advantages", "_rewards")):
                assert "Source: " in doc and " = " in doc, function.name
    tests = "".join((HERE / f"test_{name}.py").read_text() for name in ("estimators", "hygrow"))
    for test in re.findall(r"\btest_\w+", text):  # ... and they exist
        assert re.search(rf"^def {test}\(", tests, re.MULTILINE), test
    (tmp_path / "hygrow.py").write_text(text)
    code = ("import sys\nfor name in ('transformers', 'gymnasium', 'tyro', 'envs', 'models'):\n"
            "    sys.modules[name] = None\nimport hygrow, torch\nx = torch.ones(1, 2)\n"
            "print(hygrow.token_gae(x, x, x, gamma=1.0, lam=1.0)[0].tolist())")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.strip() == "[[1.0, 0.0]]", run.stderr
    assert Path(hygrow.__file__).parent == HERE


def test_mutants_fit():
    source = (HERE / "hygrow.py").read_text()
    broken = [mutants.mutate(source, *mutant) for mutant in mutants.MUTANTS]
    assert len(set(broken) - {source}) == len(mutants.MUTANTS) >= 20
    for text in broken:
        ast.parse(text)
    with pytest.raises(ValueError, match="token_gae: 'no such code' stands there 0 times"):
        mutants.mutate(source, "token_gae", "no such code", "")
