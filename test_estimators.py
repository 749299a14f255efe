"""The theory of HyGAE and GROW, a claim a test: `pytest test_estimators.py -v` reads like a table
of contents, -s prints the numbers. The estimators of hygrow.py run on the worlds of toy.py, where
every trajectory is written down: what stands below are exact sums and true gradients, in float64.
Where a claim holds only under a condition, its test also shows by how much it fails without. The
same functions against numbers worked by hand, shared vectors and a naive loop: test_hygrow.py."""

from functools import lru_cache
from math import nan as NAN

import pytest
import torch

import toy
from hygrow import (
    bi_level_gae, grow_advantages, grow_loss, grow_rewards, grow_weights, hybrid_gae,
    masked_reinforce, rl4vlm_gae, token_gae, trajectory_group_advantages, turn_gae,
    turn_start,
)
from toy import Recurrent, Tabular, World, paths

torch.set_num_threads(1)


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)  # shape and dtype, too


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


WORLDS = {
    "sampled end": World(),  # an end token that the policy samples, two turns of 1-3 tokens
    "settled end": World(ending="settled"),  # it is known before the last token that it is the last
    "three turns": World(turns=3, cap=2),
    "four tokens": World(cap=3, vocab=4),
    "fixed length": World(cap=2, ending="fixed"),
}
SETTLED = "settled end", "fixed length"
each_world = pytest.mark.parametrize("name", WORLDS)
each_net = pytest.mark.parametrize("net", [Tabular, Recurrent])
each_gamma = pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
EXACT = 1e-10


DENSE = World(ending="settled", dense=True)


@lru_cache
def enumerated(name):
    return paths(WORLDS.get(name, DENSE))


class Case:
    """A world, a policy, and what follows from them: V, Q, A* = Q - V by exact sums."""

    def __init__(self, name, net=Tabular, gamma=0.9, seed=0):
        self.path = path = enumerated(name)
        world = WORLDS.get(name, DENSE)
        self.policy, self.gamma = net(world, path.history, seed), gamma
        logits = self.policy()
        self.logp, self.p = toy.token_logprobs(path, logits), toy.probability(path, logits)
        self.p_fixed = self.p.detach()
        self.v, self.q = toy.exact_values(path, self.p_fixed, gamma)
        self.a = self.q - self.v
        self.batch = path.rewards, self.v, path.mask, path.turn_end
        turns, cap = world.turns, world.cap
        by_turn = lambda x: x.unflatten(1, (turns, cap))
        self.spread = lambda x: by_turn(x).sum(2, True).expand(-1, -1, cap).flatten(1)
        self.at_end = lambda x: self.spread(x * path.turn_end)  # x_{e_k}, at each token of turn k
        self.length = self.spread(path.mask.long())  # I_k at each token
        self.place = torch.arange(turns * cap) % cap  # t - b_k
        self.left = self.length - 1 - self.place  # e_k - t
        self.is_start = path.mask & (self.place == 0)
        self.inner = path.mask & ~path.turn_end
        self.discount = lambda n: torch.where(path.mask, gamma ** n.clamp(min=0).double(), 0)

    def gradient(self, x):
        """The gradient of a scalar by all parameters of the policy, as one vector."""
        parts = torch.autograd.grad(x, list(self.policy.parameters()), retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    def score(self, weight, where=True):
        """E[sum_t weight_t grad log pi_t] over tokens `where`: a policy gradient, enumerated."""
        return self.gradient((self.p_fixed[:, None] * (weight * where).detach() * self.logp).sum())

    def mean(self, x, key=None):
        """E[x_t | history before t] (or key) at each token."""
        key = self.path.context if key is None else key
        return toy.conditional_mean(self.path, self.p_fixed, x, key)

    def true_gradient(self):
        """Of J = E[sum_t gamma^t r_t], t counting generated tokens: by autograd."""
        reward = self.discount(self.path.clock) * self.path.rewards
        return self.gradient((self.p[:, None] * reward).sum())


def apart(x, y):
    """How far x is from y, as a share of y's length."""
    return ((x - y).norm() / y.norm()).item()


@each_gamma
@each_net
@each_world
def test_1_token_and_turn_gradient_are_the_same(name, net, gamma):
    """J_token = E[sum_t gamma^t r_t] and J_turn = E[sum_k (prod_{j<k} gamma^I_j) R_k], the turn's
    reward R_k seen from its first token, are one objective; both policy gradient theorems, over
    tokens with Q_t and over whole replies with Q_k, give its gradient. All with the weights gamma^t
    of the discounted state distribution."""
    case = Case(name, net, gamma)
    path, true = case.path, case.true_gradient()
    turn_weight = case.discount(path.clock - case.place)  # prod_{j<k} gamma^I_j at each token
    turn_reward = case.spread(case.discount(case.place) * path.rewards)  # R_k at each token
    j_turn = (case.p[:, None] * turn_weight * turn_reward * case.is_start).sum()
    close(case.gradient(j_turn), true, EXACT)
    close(case.score(case.discount(path.clock) * case.q), true, EXACT)
    # Q_k = E[R_k + gamma^I_k V_{b_{k+1}} | history, reply]: the reply is known at e_k, and so the
    # mean over what follows is Q_{e_k}, discounted back to b_k
    q_turn = case.at_end(case.discount(case.length - 1) * case.q)
    close(case.score(turn_weight * q_turn), true, EXACT)
    assert true.norm() > 0.02


@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "fixed length"])
def test_1_a_constant_discount_per_turn_is_another_objective(name, gamma):
    """With g^k in place of prod_{j<k} gamma^I_j, R_k as before, a part of the true gradient is
    missing whatever the value g and the scale: lengths that vary need gamma^I. How much depends on
    how much they vary (here 1 to 3 tokens): 0.1 to 3 % for gamma = 0.9, 0.3 to 10 % for 0.5,
    over five policies of each kind. With one length, g = gamma^I is the same objective."""

    def missing(name, net, seed):
        case = Case(name, net, gamma, seed)
        path, true = case.path, case.true_gradient()
        reward = case.p[:, None] * case.discount(case.place) * path.rewards  # R_k is its sum
        turn = torch.arange(path.mask.shape[1]) // WORLDS[name].cap
        parts = torch.stack([case.gradient((reward * (turn == k)).sum()) for k in turn.unique()])
        gaps = []
        for g in torch.linspace(0, 1, 201, dtype=torch.float64):
            other = (g ** torch.arange(len(parts)) @ parts)
            gaps.append(apart(other * (other @ true) / (other @ other), true))  # at its best scale
        return min(gaps)

    gaps = [missing(name, net, seed) for net in (Tabular, Recurrent) for seed in range(5)]
    print(f"gamma {gamma}, {name}: a constant discount misses {min(gaps):.4f} to {max(gaps):.4f}")
    assert min(gaps) > 1e-3 and max(gaps) > {0.9: 0.01, 0.5: 0.02}[gamma]
    assert missing("fixed length", Tabular, 0) < 0.02  # the grid's step


@each_gamma
@each_net
@each_world
def test_1_without_state_weights_the_two_gradients_differ(name, net, gamma):
    """What everybody implements drops the weights gamma^t before the log-probs. Then
    - for gamma < 1 neither the token nor the turn form is the gradient of J, nor are they equal;
    - exactly: the turn form, "first" anchor, is the token form with weights gamma^(t - b_k);
    - the "last" anchor, the paper's, counts from the turn's end: gamma^-(e_k - t) times the return;
    - for gamma = 1 all of them are the gradient of J."""
    case = Case(name, net, gamma)
    path, true = case.path, case.true_gradient()
    token = case.score(case.q)
    zero, how = torch.zeros_like(path.rewards), dict(gamma=gamma, lam=1.0)
    first, _ = turn_gae(path.rewards, zero, path.mask, path.turn_end, anchor="first", **how)
    last, _ = turn_gae(path.rewards, zero, path.mask, path.turn_end, **how)
    close(case.score(first), case.score(case.discount(case.place) * case.q), EXACT)
    g = toy.returns(path, gamma)
    close(case.score(last), case.score(gamma ** (-case.left.double()) * g, path.mask), EXACT)
    if gamma == 1:
        for form in (token, case.score(first), case.score(last)):
            close(form, true, EXACT)
    else:
        for form in (token, case.score(first), case.score(last)):
            assert apart(form, true) > 0.02
        for form in (case.score(first), case.score(last)):
            assert apart(form, token) > 0.02


@each_gamma
@each_net
@each_world
def test_2_sampled_estimators_are_unbiased(name, net, gamma):
    """REINFORCE with sampled returns, over tokens and over turns, with the weights gamma^t, has the
    mean grad J, without a baseline and with any critic, right or wrong, that has not seen the
    action: V before the token, V before the reply. The "last" anchor's V_{e_k} has seen most of the
    reply: a bias, with a random critic as with the exact one."""
    case = Case(name, net, gamma)
    path, true, weight = case.path, case.true_gradient(), case.discount(case.path.clock)
    rewards, _, mask, end = case.batch
    to_start = case.discount(path.clock - case.place)  # gamma^b_k at each token
    to_end = case.discount(case.at_end(path.clock))  # gamma^e_k
    g = torch.Generator().manual_seed(5)
    wrong = torch.randn(len(path.history), dtype=torch.float64, generator=g)[path.context]
    how = dict(gamma=gamma, lam=1.0)
    close(case.score(weight * masked_reinforce(rewards, mask, gamma=gamma)[0]), true, EXACT)
    for critic in (torch.zeros_like(wrong), wrong, case.v):
        close(case.score(weight * token_gae(rewards, critic, mask, **how)[0]), true, EXACT)
        first, _ = turn_gae(rewards, critic, mask, end, anchor="first", **how)
        close(case.score(to_start * first), true, EXACT)
        last, _ = turn_gae(rewards, critic, mask, end, **how)
        if not critic.any():
            close(case.score(to_end * last), true, EXACT)
        else:
            assert apart(case.score(to_end * last), true) > 0.1


@each_gamma
@each_net
@each_world
def test_3_the_unified_critic(name, net, gamma):
    """Rewards at turn ends. The critic that solves the token Bellman equation
    - is the turn critic at turn starts: V_{b_k} = E[R_k + gamma^I_k V_{b_{k+1}}], always;
    - V_{b_k} = E[gamma^(I_k - 1) Q_{e_k}], always: the value AFTER the last token;
    - V_{b_k} = E[gamma^(I_k - 1) V_{e_k}], the value the paper reads, BEFORE the last token, and
      the turn equation of "last" anchors, V_{e_k} = E[r_{e_k} + gamma^I_{k+1} V_{e_{k+1}}], hold if
      the text before e_k settles that e_k is the last. If e_k itself decides, the gap is
      E[gamma^(I_k - 1) A*_{e_k}]: V_{e_k} also averages over the replies that would have gone on.
    For gamma = 1 and a settled end that is the claim of the paper: V_{b_k} = E[V_{e_k}]."""
    case = Case(name, net, gamma)
    path, zero = case.path, torch.zeros_like(case.v)
    starts, how = case.is_start, dict(gamma=gamma, lam=0.0)
    close(case.mean(token_gae(*case.batch[:3], **how)[0]), zero, EXACT)  # the token equation
    first, _ = turn_gae(*case.batch, anchor="first", **how)
    close(case.mean(first) * starts, zero, EXACT)
    inside = case.discount(case.length - 1)
    close(case.mean(case.at_end(inside * case.q)) * starts, case.v * starts, EXACT)
    gap = case.v - case.mean(case.at_end(inside * case.v))
    close(gap * starts, case.mean(case.at_end(inside * case.a)) * starts, EXACT)
    last = turn_gae(*case.batch, **how)[0] * path.turn_end
    ends = path.context * 2 + path.turn_end  # what is known at a last token: text, and that it ends
    residual = case.mean(last, ends)
    if name in SETTLED:
        close(gap * starts, zero, EXACT)
        close(residual, zero, EXACT)
        wrong, _ = turn_gae(*case.batch, turn_gamma=0.4, **how)  # another discount: not solved
        assert case.mean(wrong * path.turn_end, ends).abs().max() > 0.01
    else:
        assert (gap * starts).abs().max() > 0.01
        assert residual.abs().max() > 0.05


@each_gamma
def test_3_and_4_with_rewards_inside_turns(gamma):
    """As a KL penalty pays them. First tokens: nothing changes. "last" anchors: their equation, and
    the zero of test_4 for a settled end, then hold only with aggregate_reward, which hands a turn's
    inner rewards to the turn before; the turn's own tokens learn nothing of them either way."""
    case = Case("dense rewards", Tabular, gamma)
    path, zero, how = case.path, torch.zeros_like(case.v), dict(gamma=gamma, lam=0.0)
    first, _ = turn_gae(*case.batch, anchor="first", **how)
    close(case.mean(first) * case.is_start, zero, EXACT)
    ends = path.context * 2 + path.turn_end
    for aggregate in (False, True):
        last, _ = turn_gae(*case.batch, aggregate_reward=aggregate, **how)
        residual = case.mean(last * path.turn_end, ends).abs().max()
        inner = case.score(last, case.inner).norm()
        assert max(residual, inner) < EXACT if aggregate else min(residual, inner) > 0.005
    assert case.score(case.a, case.inner).norm() > 0.05


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
@each_net
@each_world
def test_4_gradient_by_position(name, net, gamma, lam):
    """With an exact critic and rewards at turn ends, what the tokens at the j-th place of a turn
    learn on average:
    - token chain: E[A*_t grad log pi_t], the right thing;
    - "first" anchor: gamma^j E[A*_t grad log pi_t], right but for the clock;
    - "last" anchor: E[S_k grad log pi_t], the advantage of the turn's LAST token in place of the
      token's own (and a rest for lam < 1): S_k = A*_{e_k} - (1 - lam) sum_{m>k} lam^(m-k-1)
      gamma^(e_m - e_k) A*_{e_m}. V_{e_k} knows all the rest of the reply; what is left is luck;
    - so if it is settled before e_k that e_k is the last token, all tokens but e_k learn exactly
      nothing from it, e_k itself the right thing, and from the hybrid, the others learn at
      (1 - alpha) of PPO's rate;
    - if the end is sampled, they learn what was good about ending there."""
    case = Case(name, net, gamma)
    path, end, inner = case.path, case.path.turn_end, case.inner
    how = dict(gamma=gamma, lam=lam)
    token, _ = token_gae(*case.batch[:3], **how)
    first, _ = turn_gae(*case.batch, anchor="first", **how)
    last, _ = turn_gae(*case.batch, **how)
    clock, stop = path.clock, case.a * end
    later = torch.zeros_like(case.a)  # the sum in S_k, at each e_k
    for t in range(end.shape[1]):
        for m in range(t + 1, end.shape[1]):
            between = end[:, t + 1 : m].sum(1).double()  # m - k - 1
            later[:, t] += lam**between * gamma ** (clock[:, m] - clock[:, t]).double() * stop[:, m]
    s = case.at_end(case.a - (1 - lam) * later)
    for j in range(WORLDS[name].cap):
        place = case.place == j
        own = case.score(case.a, place)
        close(case.score(token, place), own, EXACT)
        close(case.score(first, place), gamma**j * own, EXACT)
        close(case.score(last, place), case.score(s, place), EXACT)
        assert own.norm() > 0.01
        if j == 0:  # (the last place is the last token for sure, and like a settled end)
            assert apart(case.score(last, place), own) > 0.1
    if name in SETTLED:
        assert case.score(last, inner).norm() < EXACT and case.score(case.a, inner).norm() > 0.01
        close(case.score(last, end), case.score(case.a, end), EXACT)
        mix, _ = hybrid_gae(*case.batch, alpha=0.3, token_lam=lam, **how)
        close(case.score(mix, inner), 0.7 * case.score(case.a, inner), EXACT)
    elif WORLDS[name].cap == 3:  # (with two tokens at most an inner token is followed by the last)
        assert case.score(last, inner).norm() > 0.01


@pytest.mark.parametrize("anchor", ["last", "first"])
def test_5_hybrid_return(anchor):
    """Rewards on turn ends: with lam = 1 the hybrid return is the token return for every alpha. If
    lam < 1 it is less, at token t, by alpha sum_{m>k} (1 - lam^(m-k)) gamma^(a_m - t) delta_m, k
    being the turn of the next anchor from t on, a_m the anchors of the turns after that."""
    r, v, mask, end, boot = random_batch(12)
    r = r.where(end > 0, 0)
    how = dict(gamma=0.9, bootstrap=boot)
    plain = token_gae(r, v, mask, lam=1.0, **how)[1]
    deltas = turn_gae(r, v, mask, end, lam=0.0, anchor=anchor, **how)[0]
    for alpha in (0.0, 0.25, 0.5, 1.0):
        mix = lambda lam: hybrid_gae(r, v, mask, end, lam=lam, alpha=alpha, anchor=anchor, **how)[1]
        close(mix(1.0), plain)
        less = torch.zeros_like(plain)
        for b in range(len(mask)):
            slots = mask[b].nonzero().flatten().tolist()
            last = [i for i, t in enumerate(slots) if end[b, t]]
            starts = [0, *(i + 1 for i in last[:-1])]
            anchors = (last if anchor == "last" else starts) if slots else []
            for i, t in enumerate(slots):
                ahead = [a for a in anchors if a >= i]
                for n, a in enumerate(ahead):
                    less[b, t] += (1 - 0.6**n) * 0.9 ** (a - i) * deltas[b, slots[a]]
        close(mix(0.6), plain - alpha * less, EXACT)
        assert alpha == 0 or (mix(0.6) - plain).abs().max() > 0.02


def sweep(ending, gamma, noise=0.3, seeds=3):
    """[seed][anchor] -> {(lam, alpha): row}, from toy.table."""
    def rows(seed, anchor):
        table = toy.table(World(ending=ending), gamma=gamma, noise=noise, anchor=anchor, seed=seed)
        return {(row["lam"], row["alpha"]): row for row in table}
    return [{anchor: rows(seed, anchor) for anchor in ("last", "first")} for seed in range(seeds)]


@pytest.mark.parametrize("gamma", [0.95, 1.0])
@pytest.mark.parametrize("ending", ["sampled", "settled"])
def test_6_bias_and_variance_with_an_imperfect_critic(ending, gamma):
    """The critic is exact plus a fixed error, drawn for each history by itself, standard deviation
    0.3; token_lam = lam; bias is what differs between actions. "Turn-level: low bias, high
    variance; token-level: high bias, low variance; the hybrid between":
    - holds for the "first" anchor at lam = 0 and 0.5;
    - at lam = 1 (the paper's setting, and its token_lam is always 1) the token level has NO such
      bias, whatever the critic;
    - for the "last" anchor, the paper's, the turn level has the HIGHER bias at lam >= 0.5 (at 0 it
      depends on the world), with an exact critic, too: it is the anchor's, not the critic's;
    - the hybrid's bias and deviation are at most the weighted mean of the two (proved: a norm is
      convex), which allows less than either: its bias can be below both."""
    below, runs = [], sweep(ending, gamma)
    for tables in runs:
        for anchor, rows in tables.items():
            for lam in toy.LAMS:
                for name in ("bias", "action_bias", "std", "gradient_bias"):
                    token, turn = rows[lam, 0.0][name], rows[lam, 1.0][name]
                    for alpha in toy.ALPHAS:
                        line = (1 - alpha) * token + alpha * turn
                        assert rows[lam, alpha][name] <= line + EXACT
            assert rows[1.0, 0.0]["action_bias"] < EXACT
            assert rows[1.0, 0.0]["gradient_bias"] < EXACT
        for lam in (0.0, 0.5):
            token, turn = tables["first"][lam, 0.0], tables["first"][lam, 1.0]
            assert turn["action_bias"] < token["action_bias"] and turn["std"] > token["std"]
        last = tables["last"]
        for lam in (0.5, 0.95, 1.0):
            assert last[lam, 1.0]["action_bias"] > last[lam, 0.0]["action_bias"]
        below += [last[0.0, 0.5]["action_bias"] < min(last[0.0, x]["action_bias"] for x in (0, 1))]
    assert any(below)
    for exact in sweep(ending, gamma, noise=0.0, seeds=1):
        assert exact["last"][1.0, 1.0]["action_bias"] > 0.1
        assert exact["last"][1.0, 0.0]["bias"] < EXACT
    print(f"\nending={ending} gamma={gamma} critic error 0.3, seed 0, token_lam = lam")
    for anchor, rows in runs[0].items():
        assert rows[0.0, 0.0]["bias"] > 0.1
        print(f'anchor="{anchor}"\n{toy.show(list(rows.values()))}')


def test_6_where_the_usual_story_ends():
    """It is not a law. For gamma < 1 "first" has a bias of its own, its clock's gamma^(t - b_k), so
    with a good critic (error 0.03, gamma = 0.9) the turn level is the worse one at lam = 0, too;
    and for gamma = 1 the token level wins if the critic errs at turn starts alone."""
    for tables in sweep("settled", 0.9, noise=0.03):
        assert tables["first"][0.0, 1.0]["action_bias"] > tables["first"][0.0, 0.0]["action_bias"]
    for ending in ("sampled", "settled"):
        world = World(ending=ending)
        path = paths(world)
        logits = Tabular(world, path.history)()
        starts = torch.zeros(len(path.history), dtype=torch.float64)
        first = path.mask & (torch.arange(path.mask.shape[1]) % world.cap == 0)
        g = torch.Generator().manual_seed(1)
        noise = 0.3 * torch.randn(len(starts), dtype=torch.float64, generator=g)
        at = path.context[first].unique()
        starts[at] = noise[at]
        token, turn = (toy.bias_and_variance(path, logits, starts, gamma=1.0, lam=0.0, alpha=alpha,
                                             anchor="first") for alpha in (0.0, 1.0))
        assert turn["action_bias"] > token["action_bias"]


def draws(seed, binary=True):
    """A group of GROW with H the same for all: R [G], H, gamma, and A, w as [G, H]."""
    g = torch.Generator().manual_seed(seed)
    n, h = int(torch.randint(2, 9, (1,), generator=g)), int(torch.randint(1, 30, (1,), generator=g))
    gamma = 1 - torch.rand(1, generator=g).item() ** 3  # any, mostly near 1
    success = torch.rand(n, dtype=torch.float64, generator=g)
    if binary:
        success = (success > 0.5).double()
        success[:2] = f64([0, 1])
    lengths = torch.full((n,), h)
    rewards = grow_rewards(success, lengths, gamma=gamma)
    trajectory = torch.arange(n).repeat_interleave(lengths)
    advantages = grow_advantages(rewards, trajectory, 0 * trajectory)
    w = gamma ** torch.arange(h - 1, -1, -1, dtype=torch.float64)
    return success, h, gamma, advantages.view(n, h), w, rewards.view(n, h)


@pytest.mark.parametrize("binary", [True, False])
def test_7_grow_identities(binary):
    """GROW's advantage splits into a trajectory part, which is GRPO's shrunk by kappa, and a step
    part, which moves credit from early to late steps of a success and sums to zero in each
    trajectory. Exact for one length, any gamma > 0 and returns R >= 0, with ddof 0."""
    for seed in range(30):
        R, h, gamma, A, w, r = draws(seed, binary)
        S, var = R.mean(), R.var(correction=0)
        c = f64((1 - gamma**h) / (h * (1 - gamma)) if gamma < 1 else 1.0)
        m2 = f64((1 - gamma ** (2 * h)) / (h * (1 - gamma**2)) if gamma < 1 else 1.0)
        close(r, R[:, None] * w, EXACT)
        close(r.mean(), c * S, EXACT)  # I1
        sigma = (c**2 * var + (R**2).mean() * (m2 - c**2)).sqrt()
        close(r.std(correction=0), sigma, EXACT)  # I2
        if binary:
            close(sigma**2, S * m2 - S**2 * c**2, EXACT)
        whole, step = c * (R - S)[:, None].expand_as(A), R[:, None] * (w - c)
        close(A, (whole + step) / sigma, EXACT)  # I3
        close(A, ((R - S)[:, None] * w + S * (w - c)) / sigma, EXACT)  # I3'
        close(step.sum(1), 0 * R, EXACT)  # I4
        close(whole.sum(0), 0 * w, EXACT)
        close((whole * step).mean(), f64(0), EXACT)  # I5
        close((whole**2).mean(), c**2 * var, EXACT)
        close((step**2).mean(), (R**2).mean() * (m2 - c**2), EXACT)
        close(A.mean(), f64(0), EXACT)  # I6
        close((A**2).mean(), f64(1), EXACT)
        kappa = c * var.sqrt() / sigma
        assert 0 < kappa <= 1 + EXACT
        close(A.mean(1), kappa * (R - S) / var.sqrt(), EXACT)  # I7
        close(kappa**2, (whole**2).mean() / sigma**2, EXACT)
        if binary:  # a failed step; and when a step of a success is negative
            close(A[R == 0], (-S * c / sigma).expand_as(A[R == 0]), EXACT)
            to_go = torch.arange(h - 1, -1, -1)
            assert torch.equal(A[R == 1] < 0, (gamma**to_go < S * c).expand_as(A[R == 1]))


def unequal(seed):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 7, (1,), generator=g))
    R = (torch.rand(n, generator=g) > 0.5).double()
    R[:2] = f64([0, 1])
    H = torch.randint(1, 20, (n,), generator=g)
    H[R == 0] = 25  # the horizon
    trajectory = torch.arange(n).repeat_interleave(H)
    return R, H, trajectory, 0 * trajectory, grow_rewards(R, H, gamma=0.93)


def test_7_unequal_lengths():
    """Pooled statistics, the formula by the letter: the mean over samples is zero, but that under
    the objective's weights 1/G 1/H_i is not: where failures run to the horizon, as here, they weigh
    more in mu, and it is positive. Balanced statistics make it zero."""
    for seed in range(20):
        R, H, trajectory, group, r = unequal(seed)
        c = torch.stack([(0.93 ** torch.arange(h).double()).mean() for h in H])
        A = grow_advantages(r, trajectory, group)
        mu, sigma = (H * c * R).sum() / H.sum(), r.std(correction=0)
        close(r.mean(), mu, EXACT)  # G1
        i = trajectory
        close(A, ((c[i] * R[i] - mu) + (r - R[i] * c[i])) / sigma, EXACT)  # G2
        weights = grow_weights(trajectory, group)
        close((weights * A).sum(), ((c * R).mean() - mu) / sigma, EXACT)  # G3
        close(A.mean(), f64(0), EXACT)
        assert (weights * A).sum() > 0.02
        balanced = grow_advantages(r, trajectory, group, statistics="balanced")
        close((weights * balanced).sum(), f64(0), EXACT)
        close((weights * balanced**2).sum(), f64(1), EXACT)
    r = grow_rewards(f64([1, 1, 0, 0]), torch.tensor([20, 60, 100, 100]), gamma=0.995)
    trajectory = torch.arange(4).repeat_interleave(torch.tensor([20, 60, 100, 100]))
    A = grow_advantages(r, trajectory, 0 * trajectory)
    close((grow_weights(trajectory, 0 * trajectory) * A).sum(), f64(0.499), 1e-3)


@pytest.mark.parametrize("clip", [0.2, 1e6])
def test_7_grow_clipped_form(clip):
    """J = J_traj + J_step for any ratios without clipping (clip 1e6). With clipping it holds if the
    clipped ratio f(rho, sign A) is taken from the whole advantage and then given to both parts;
    each part clipped by its own sign gives another number."""
    differ = 0
    for seed in range(20):
        R, h, gamma, A, w, _ = draws(seed)
        g = torch.Generator().manual_seed(seed)
        change = 0.5 * torch.randn(A.shape, dtype=torch.float64, generator=g)
        rho, n = change.exp(), len(R)
        trajectory = torch.arange(n).repeat_interleave(h)
        loss = grow_loss(change.view(-1, 1), torch.zeros(n * h, 1).double(), A.flatten(),
                         grow_weights(trajectory, 0 * trajectory), torch.ones(n * h, 1), clip=clip)
        f = lambda x: torch.where(x > 0, rho.clamp(max=1 + clip), rho.clamp(min=1 - clip))
        close(loss, -(A * f(A)).mean(), EXACT)
        sigma = (R[:, None] * w).std(correction=0)
        whole = w.mean() * (R - R.mean())[:, None] / sigma
        step = R[:, None] * (w - w.mean()) / sigma
        close(-loss, (whole * f(A)).mean() + (step * f(A)).mean(), EXACT)
        differ += abs(-loss - (whole * f(whole)).mean() - (step * f(step)).mean()) > 1e-3
    assert differ > 10 if clip == 0.2 else differ == 0


@pytest.mark.parametrize("ratio", ["token", "action"])
def test_7_grow_gradient_split(ratio):
    """At the old policy clipping is silent, and the gradient is exactly that of J_traj plus J_step;
    for one length and by I7, J_traj is GRPO on trajectories with advantages shrunk by kappa."""
    for seed in range(10):
        R, h, gamma, A, w, _ = draws(seed)
        n, g = len(R), torch.Generator().manual_seed(seed)
        mask = torch.rand(n * h, 3, generator=g) > 0.3
        mask[:, 0] = True
        logp = torch.randn(n * h, 3, dtype=torch.float64, generator=g).requires_grad_()
        trajectory = torch.arange(n).repeat_interleave(h)
        weights = grow_weights(trajectory, 0 * trajectory)
        loss = grow_loss(logp, logp.detach(), A.flatten(), weights, mask, clip=0.2, ratio=ratio)
        got = torch.autograd.grad(loss, logp)[0]
        sigma = (R[:, None] * w).std(correction=0)
        whole = (w.mean() * (R - R.mean())[:, None] / sigma).expand_as(A).flatten()
        step = (R[:, None] * (w - w.mean()) / sigma).flatten()
        per_token = mask.double() / mask.sum(1, keepdim=True) if ratio == "token" else mask.double()
        parts = [-(weights * x)[:, None] * per_token for x in (whole, step)]
        close(got, sum(parts), EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("statistics", ["pooled", "balanced"])
def test_7_grow_edge_cases(statistics, dtype):
    how = dict(statistics=statistics)

    def advantages(R, H, gamma, **more):
        R, H = torch.tensor(R, dtype=dtype), torch.tensor(H)
        trajectory = torch.arange(len(R)).repeat_interleave(H)
        r = grow_rewards(R, H, gamma=gamma)
        out = grow_advantages(r, trajectory, 0 * trajectory, **how, **more)
        assert out.dtype == dtype and out.isfinite().all()
        return out.double().split(H.tolist())

    tol = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.02)
    assert not torch.cat(advantages([0, 0, 0], [4, 2, 7], 0.9)).any()  # all fail
    assert not torch.cat(advantages([1, 1, 1], [4, 2, 7], 1.0)).any()  # all succeed, gamma 1
    all_win = advantages([1, 1], [5, 5], 0.8)  # pure shaping in time, each trajectory's mean 0
    assert all_win[0][0] < -1 and all_win[0][-1] > 1
    close(torch.stack([a.mean() for a in all_win]), f64([0, 0]), max(tol, 1e-3))
    lone = advantages([1.0], [5], 0.8)[0]  # as documented: shaping, sum 0
    close(lone, all_win[0], tol)
    assert not advantages([0.0], [5], 0.8)[0].any() and not advantages([1.0], [1], 0.8)[0].any()
    if statistics == "pooled":  # shorter successes are better: efficiency pressure
        means = torch.stack([a.mean() for a in advantages([1, 1, 1], [5, 10, 40], 0.95)])
        close(means, f64([1.27, 0.91, -0.38]), 0.02 if tol > 1e-3 else 0.005)
    mixed = advantages([1, 0, 0, 1], [6, 6, 6, 6], 1.0)  # gamma 1: GRPO's, on each step
    close(torch.stack(mixed), f64([[1], [-1], [-1], [1]]).expand(4, 6), tol)
    close(torch.stack(advantages([2, 0, 0, 2], [6] * 4, 0.5)),  # a R, a > 0: the same
          torch.stack(advantages([1, 0, 0, 1], [6] * 4, 0.5)), tol)
    if dtype == torch.float64:  # R + b is not
        shifted, plain = (torch.stack(advantages(R, [6] * 2, 0.5)) for R in ([2, 1], [1, 0]))
        assert (shifted - plain).abs().max() > 0.1
        ddof = torch.stack(advantages([1, 0], [6] * 2, 0.5, ddof=1))
        close(ddof, plain * (11 / 12) ** 0.5, EXACT)
    zero = torch.zeros(97, dtype=torch.long)  # equal up to rounding is equal: no false signal
    for value in (1 / 3, 10.1, 1e-6):
        r = torch.full((97,), value, dtype=dtype)
        assert not grow_advantages(r, torch.arange(97), zero, **how).any()
        step = max(torch.finfo(dtype).eps * value, torch.finfo(dtype).smallest_normal / 1024)
        r[::3] += step  # one rounding step or two more (1e-6 is a subnormal float16)
        assert len(r.unique()) == 2
        assert not grow_advantages(r, torch.arange(97), zero, **how).any()


def test_7_groups_never_mix():
    R, H = f64([1, 0, 1, 1, 0, 1, 0]), torch.tensor([3, 5, 2, 4, 4, 1, 6])
    trajectory = torch.arange(7).repeat_interleave(H)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 3]).repeat_interleave(H)
    r = grow_rewards(R, H, gamma=0.9)
    for statistics in ("pooled", "balanced"):
        whole = grow_advantages(r, trajectory, group, statistics=statistics)
        for g in range(4):
            own = group == g
            alone = grow_advantages(r[own], trajectory[own], group[own], statistics=statistics)
            close(whole[own], alone)
        # labels are only labels: any numbers, any order, trajectories numbered anew in each group
        order = torch.randperm(len(r), generator=torch.Generator().manual_seed(0))
        local = trajectory - torch.tensor([0, 0, 0, 3, 3, 5, 6]).repeat_interleave(H)
        moved = grow_advantages(r[order], 9 - 2 * local[order], 70 - 7 * group[order],
                                statistics=statistics)
        close(moved, whole[order])
        close(grow_weights(local, group), grow_weights(trajectory, group))
    assert grow_advantages(r[:0], trajectory[:0], group[:0]).shape == (0,)
    assert grow_weights(trajectory[:0], group[:0]).shape == (0,)


@pytest.mark.parametrize("anchor", ["last", "first"])
def test_8_hybrid_reductions(anchor):
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
    # lam = 1 and rewards gathered on the way: the turn return is the token return for rewards on
    # any token, too (test_5 has those on turn ends)
    plain = token_gae(r, v, mask, gamma=0.9, lam=1.0, bootstrap=boot)[1]
    how = dict(anchor=anchor, aggregate_reward=True, gamma=0.9, lam=1.0, bootstrap=boot)
    close(turn_gae(r, v, mask, end, **how)[1], plain)
    close(hybrid_gae(r, v, mask, end, alpha=0.5, **how)[1], plain)


def test_8_bi_level_is_token_gae():
    """Iff A_k is the token advantage at e_k. For all critics that is: no rewards inside later turns
    (the first turn may have them), lam = 1, and turn_gamma = gamma^I_k for each turn but the first;
    or later turns of one token each and turn_gamma = gamma; or gamma = turn_gamma = 0. (A bootstrap
    is one token away, and so also asks for turn_gamma = gamma.)"""
    r, v, mask, end, boot = random_batch(13)
    first = (end.cumsum(1) - end == 0) & (mask > 0)
    sparse = r.where((end > 0) | first, 0)
    three = f64([[1] * 8 + [0]]), f64([[0, 1, 0, 0, 1, 0, 0, 1, 0]])  # turns of 2, 3, 3 tokens
    short = f64([[1] * 8 + [0]]), f64([[0, 0, 0, 1, 1, 1, 1, 1, 0]])  # of 4, 1, 1, 1, 1
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 1, 9, dtype=torch.float64, generator=g)
    first3 = x.where((three[1] > 0) | (torch.arange(9) < 2), 0)

    def gap(r, v, mask, end, gamma, lam, turn_gamma, boot=None):
        how = dict(gamma=gamma, lam=lam, bootstrap=boot)
        bi = bi_level_gae(r, v, mask, end, turn_gamma=turn_gamma, **how)
        token = token_gae(r, v, mask, **how)
        return max((a - b).abs().max().item() for a, b in zip(bi, token))

    for same in (
        (sparse, v, mask, end, 1.0, 1.0, 1.0, boot),
        (first3, y, *three, 0.9, 1.0, 0.9**3),
        (x, y, *short, 0.9, 0.7, 0.9, f64([2])),
        (r, v, mask, end, 0.0, 0.7, 0.0, boot),
    ):
        assert gap(*same) < 1e-12
    for other in (
        (r, v, mask, end, 1.0, 1.0, 1.0, boot),  # rewards inside later turns
        (sparse, v, mask, end, 1.0, 0.9, 1.0, boot),  # lam < 1
        (sparse, v, mask, end, 0.9, 1.0, 0.9, boot),  # lengths that vary
        (first3, y, *three, 0.9, 1.0, 0.9**2),  # another length
        (x, y, *short, 0.9, 0.7, 0.8),
    ):
        assert gap(*other) > 0.01


def test_8_group_estimators():
    """GROW with gamma = 1 is GRPO on trajectories, both with ddof 0 and eps 0: for one length with
    pooled statistics, for any lengths with balanced ones; RL4VLM is the "first" anchor with a clock
    of turns; REINFORCE is GAE
    without a critic."""
    for lengths in ([4, 4, 4], [2, 5, 3]):
        R, H = f64([1, 0, 0]), torch.tensor(lengths)
        trajectory = torch.arange(3).repeat_interleave(H)
        mask = (torch.arange(6) < H[:, None]).double()
        last = f64([[float(t == h - 1) for t in range(6)] for h in lengths])
        zero = torch.zeros(3).long()
        grpo = trajectory_group_advantages(R[:, None] * last, mask, zero, ddof=0, eps=0.0)[mask > 0]
        rewards = grow_rewards(R, H, gamma=1.0)
        pooled, balanced = (grow_advantages(rewards, trajectory, 0 * trajectory, statistics=s)
                            for s in ("pooled", "balanced"))
        close(balanced, grpo, EXACT)
        assert torch.allclose(pooled, grpo) == (lengths == [4, 4, 4])
    r, v, mask, end, boot = random_batch(14)
    sparse = r.where(end > 0, 0)
    turns = turn_gae(sparse, v, mask, end, gamma=1.0, lam=0.8, turn_gamma=0.9, anchor="first",
                     bootstrap=boot)
    vlm = rl4vlm_gae(r, v, mask, end, gamma=0.9, lam=0.8, bootstrap=boot)
    close(vlm[0], turns[0])
    first = torch.zeros_like(mask)  # of each turn, by a loop
    for b in range(len(mask)):
        fresh = True
        for t in mask[b].nonzero().flatten().tolist():
            first[b, t], fresh = float(fresh), bool(end[b, t])
    close(vlm[1], turns[1] * first)
    assert torch.equal(turn_start(mask, end), first > 0)
    close(masked_reinforce(r, mask, gamma=0.9, bootstrap=boot),
          token_gae(r, 0 * v.nan_to_num(), mask, gamma=0.9, lam=1.0, bootstrap=boot))
