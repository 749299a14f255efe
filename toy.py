"""A world so small that every trajectory can be written down: expectations are sums, not samples.

A partially observed world of a few turns. The hidden state is one bit; each turn shows it through
noise (`seen`: 0.8), then the policy writes a reply token by token, and the reply earns a reward
that depends on the hidden bit and on every token. Token 0 ends the reply:
- ending="sampled": token 0 is the reply's last token, as an end-of-turn token that the policy
  samples; whether a token is the last is settled by the token itself.
- ending="settled": one more token follows token 0 (as an end-of-turn token follows </answer>), so
  it is known before the last token that it will be the last.
- ending="fixed": token 0 ends nothing, all replies have `cap` tokens.
In any case the reply stops at `cap` tokens. A reply whose tokens sum to 3 or more ends the episode,
so turns and lengths both vary. `paths(world)` lists all trajectories; the tests of the theory in
test_estimators.py put the real estimators of hygrow.py on them. `python toy.py` prints the bias and
variance of the advantages with an imperfect critic.
"""

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hygrow


@dataclass(frozen=True)
class World:
    turns: int = 2
    cap: int = 3
    vocab: int = 3
    ending: str = "sampled"
    dense: bool = False  # a reward on every token, not on turn ends only


@dataclass(frozen=True)
class Paths:
    """All N trajectories of a world, T = turns * cap positions; C distinct histories."""

    tokens: Tensor  # [N, T] long, 0 off the mask
    mask: Tensor  # [N, T] bool, with holes: turn k has the positions from k * cap on
    turn_end: Tensor  # [N, T] bool
    rewards: Tensor  # [N, T] float64
    clock: Tensor  # [N, T] long, generated tokens before this one
    context: Tensor  # [N, T] long, the index in 0..C-1 of all that was seen before the token
    chance: Tensor  # [N] float64, probability of what the world draws on the path
    history: Tensor  # [C, L] long: tokens + 1, or vocab + 1 + observation; 0 behind the end


def paths(world: World) -> Paths:
    """Every trajectory that has a positive probability under a policy without zeros."""
    index, rows = {}, []

    def play(turn, hidden, history, chance, steps):
        for shown in (0, 1):
            seen = history + (world.vocab + 1 + shown,)
            reply(turn, hidden, seen, chance * (0.8 if shown == hidden else 0.2), steps, ())

    def reply(turn, hidden, history, chance, steps, said):
        context = index.setdefault(history, len(index))
        for token in range(world.vocab):
            now, seen = said + (token,), history + (token + 1,)
            closed = 0 in {"sampled": now, "settled": said, "fixed": ()}[world.ending]
            last = closed or len(now) == world.cap
            earned = reward(turn, hidden, now) if last else 0.3 * math.cos(sum(now) + hidden)
            step = (turn * world.cap + len(said), token, last, earned * (last or world.dense),
                    len(steps), context)
            if not last:
                reply(turn, hidden, seen, chance, steps + (step,), now)
            elif sum(now) >= 3 or turn + 1 == world.turns:
                rows.append((chance, steps + (step,)))
            else:
                play(turn + 1, hidden ^ (now[0] == 1), seen, chance, steps + (step,))

    def reward(turn, hidden, said):
        # any function will do that depends on the turn, the hidden bit and each token
        return math.sin(1 + turn + 2.1 * hidden + sum((1.3 + i) * x for i, x in enumerate(said)))

    play(0, 0, (), 0.6, ())
    play(0, 1, (), 0.4, ())
    shape = (len(rows), world.turns * world.cap)
    columns = [torch.zeros(shape, dtype=t) for t in
               (torch.long, torch.bool, torch.bool, torch.float64, torch.long, torch.long)]
    for n, (_, steps) in enumerate(rows):
        for position, token, last, earned, clock, context in steps:
            values = (token, True, last, earned, clock, context)
            for column, value in zip(columns, values):
                column[n, position] = value
    history = torch.zeros(len(index), max(map(len, index)), dtype=torch.long)
    for symbols, i in index.items():
        history[i, : len(symbols)] = torch.tensor(symbols)
    return Paths(*columns, torch.tensor([row[0] for row in rows], dtype=torch.float64), history)


class Tabular(nn.Module):
    """Softmax over a row of numbers for each history: as expressive as a policy can be."""

    def __init__(self, world: World, histories: Tensor, seed: int = 0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        size = len(histories), world.vocab
        self.logits = nn.Parameter(torch.randn(size, dtype=torch.float64, generator=g))

    def forward(self) -> Tensor:
        return self.logits  # [C, V]


class Recurrent(nn.Module):
    """A GRU that reads the history: histories share parameters, as in a real model."""

    def __init__(self, world: World, histories: Tensor, seed: int = 0, width: int = 6):
        super().__init__()
        self.histories = histories
        self.embed = nn.Embedding(world.vocab + 3, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, world.vocab)
        g = torch.Generator().manual_seed(seed)
        for p in self.double().parameters():
            p.data = torch.randn(p.shape, dtype=torch.float64, generator=g) * 0.7

    def forward(self) -> Tensor:
        states = self.gru(self.embed(self.histories))[0]  # [C, L, width]
        last = (self.histories > 0).sum(1) - 1  # [C]
        return self.head(states[torch.arange(len(last)), last])  # [C, V]


def token_logprobs(path: Paths, logits: Tensor) -> Tensor:
    """log pi of each token [N, T], 0 off the mask, from the policy's logits [C, V]."""
    return logits.log_softmax(1)[path.context, path.tokens] * path.mask


def probability(path: Paths, logits: Tensor) -> Tensor:
    """[N], sums to 1; differentiable."""
    return path.chance * token_logprobs(path, logits).sum(1).exp()


def conditional_mean(path: Paths, p: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """E[x_t | key_t] at each token [N, T]; x [N, T], p [N], key [N, T] long, equal where the same
    things are known."""
    weight = p[:, None] * path.mask
    size = int(key.max()) + 1
    total = x.new_zeros(size).index_add(0, key.flatten(), (weight * x).flatten())
    mass = x.new_zeros(size).index_add(0, key.flatten(), weight.flatten())
    return (total / mass.clamp(min=1e-300))[key] * path.mask


def returns(path: Paths, gamma: float) -> Tensor:
    """G_t [N, T]: the rewards from token t on, gamma per token."""
    return hygrow.masked_reinforce(path.rewards, path.mask, gamma=gamma)[0]


def exact_values(path: Paths, p: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """V_t = E[G_t | history] and Q_t = E[G_t | history, token t], [N, T] each."""
    g, vocab = returns(path, gamma), int(path.tokens.max()) + 1
    q = conditional_mean(path, p, g, path.context * vocab + path.tokens)
    return conditional_mean(path, p, g, path.context), q


def bias_and_variance(
    path: Paths, logits: Tensor, error: Tensor, *, gamma: float, lam: float, alpha: float,
    anchor: str = "last",
) -> dict[str, float]:
    """What hybrid_gae (with token_lam = lam) makes of a critic that is off by `error` [C].

    Against A*_t = Q_t - V_t, in root mean squares over the tokens that the policy writes:
    bias  E[A_t | history, token] - A*_t;   action_bias  its part that differs between actions of
    one history: what is left of it in a gradient;   std  of A_t about E[A_t | history, token].
    gradient_bias and gradient_std: the same of sum_t A_t grad log pi_t for the tabular policy, as
    shares of the length of the true sum_t A*_t grad log pi_t.
    """
    p, pi = probability(path, logits).detach(), logits.detach().softmax(1)
    v, q = exact_values(path, p, gamma)
    critic = (v + error[path.context]) * path.mask
    how = dict(gamma=gamma, lam=lam, alpha=alpha, token_lam=lam, anchor=anchor)
    a, _ = hygrow.hybrid_gae(path.rewards, critic, path.mask, path.turn_end, **how)
    vocab = logits.shape[1]
    mean = conditional_mean(path, p, a, path.context * vocab + path.tokens)
    bias = mean - (q - v)
    action_bias = bias - conditional_mean(path, p, bias, path.context)
    weight = p[:, None] * path.mask
    rms = lambda x: ((weight * x**2).sum() / weight.sum()).sqrt().item()
    score = nn.functional.one_hot(path.tokens, vocab) - pi[path.context]  # [N, T, V] d log pi / d z

    def gradient(x):  # [C, V], expected over trajectories
        flat = ((weight * x)[..., None] * score).flatten(0, 1)
        return torch.zeros_like(pi).index_add(0, path.context.flatten(), flat)

    true, got = gradient(q - v), gradient(a)
    # histories of one trajectory are all different: squares of its gradient add up over tokens
    square = (weight * a**2 * (score**2).sum(-1)).sum()
    return {
        "bias": rms(bias), "action_bias": rms(action_bias), "std": rms(a - mean),
        "gradient_bias": ((got - true).norm() / true.norm()).item(),
        "gradient_std": ((square - got.norm() ** 2).sqrt() / true.norm()).item(),
    }


ALPHAS, LAMS = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.5, 0.95, 1.0)


def table(world: World, *, gamma: float, noise: float, anchor: str, seed: int = 0) -> list[dict]:
    """bias_and_variance for all ALPHAS and LAMS; noise: standard deviation of the critic's error,
    drawn once for each history."""
    path = paths(world)
    logits = Tabular(world, path.history, seed)()
    g = torch.Generator().manual_seed(seed + 1)
    error = noise * torch.randn(len(path.history), dtype=torch.float64, generator=g)
    return [{"lam": lam, "alpha": alpha, **bias_and_variance(
        path, logits, error, gamma=gamma, lam=lam, alpha=alpha, anchor=anchor)}
        for lam in LAMS for alpha in ALPHAS]


def show(rows: list[dict]) -> str:
    lines = ["   ".join(f"{name:>13}" for name in rows[0])]
    lines += ["   ".join(f"{value:13.3f}" for value in row.values()) for row in rows]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=bias_and_variance.__doc__.split("\n")[0])
    parser.add_argument("--gamma", type=float, default=0.95, help="discount of one token")
    parser.add_argument("--noise", type=float, default=0.3, help="std of the critic's fixed error")
    parser.add_argument("--ending", default="sampled", choices=["sampled", "settled", "fixed"])
    args = parser.parse_args()
    for anchor in ("last", "first"):
        print(f"anchor={anchor} gamma={args.gamma} critic error={args.noise} ending={args.ending}")
        world = World(ending=args.ending)
        print(show(table(world, gamma=args.gamma, noise=args.noise, anchor=anchor)), "\n")


if __name__ == "__main__":
    main()
