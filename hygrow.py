"""The maths of HyGAE: advantages, whitening, PPO losses. Pure functions on tensors, only torch.

Tensors are [B, T]: B sequences, T positions (prompt, images, padding and all).
- mask      1 on generated tokens. Recursions run over these only, so "the next token" after a
            turn's end is the first token of the next turn; what stands elsewhere (NaN too) is
            never read, and every [B, T] result is zero there. Bool, int or float.
- turn_end  1 on the last generated token of each turn. Turn k = 1..K of a row runs from its
            first token b_k to its last token e_k and has I_k generated tokens.
- values    V_t, the critic's value of the state before token t is sampled. rewards: r_t, on the
            token that earned it. Both in reward units, and so are advantages and returns.
- bootstrap [B], value of the state one token after the row's last one: 0 where the episode ended
            by itself (default: everywhere), V of the last observation where it was cut off.
gamma discounts one token, turn_gamma (where given) one turn. Rows without tokens stay zero.
Estimators work in float64, answer in the input's dtype, pass no gradient and do not whiten.
"""

import torch
from torch import Tensor


@torch.no_grad()
def token_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over single tokens, one chain across all turns.

    rewards, values, mask [B, T], bootstrap [B] -> advantages, returns [B, T], reward units.
        delta_t = r_t + gamma V_{t+1} - V_t        V after the last token is bootstrap
        A_t     = delta_t + gamma lam A_{t+1}      A after the last token is 0
        G_t     = A_t + V_t
    ValueError: shapes, mask not 0/1, not finite on the mask (names the row), gamma, lam off [0, 1].
    Source: arXiv 1506.02438, eq. 16. Pinned by test_token_gae_by_hand and test_vectors.
    """
    _check(gamma=gamma, lam=lam)
    r, v, after, _, restore = _read(rewards, values, mask, bootstrap)  # r, v [B, N], after [B]
    advantage = _backward(r + gamma * _next(v, after) - v, torch.full_like(r, gamma * lam))
    return restore(advantage), restore(advantage + v)


@torch.no_grad()
def turn_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_end: Tensor, *, gamma: float, lam: float,
    turn_gamma: float | None = None, anchor: str = "last", aggregate_reward: bool = False,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over turns: one advantage a turn, copied to each of its tokens. Shapes as token_gae.

        delta_k = R_k + Gamma_k V_{k+1} - V_k      V_{K+1} is bootstrap
        A_k     = delta_k + Gamma_k lam A_{k+1}    A_{K+1} is 0;  G at the anchor = A_k + V_k
    anchor="last" (the paper): V_k = V_{e_k}, R_k = r_{e_k}. e_{k+1} is I_{k+1} tokens after e_k:
      Gamma_k = gamma^I_{k+1}, but Gamma_K = gamma, as bootstrap is one token after e_K.
      aggregate_reward adds the rewards on the way, sum_{j=1..I_{k+1}-1} gamma^j r_{b_{k+1}+j-1},
      to R_k (k < K). Elsewhere in the turn G_t = r_t + gamma G_{t+1}.
    anchor="first" (ablation): V_k = V_{b_k}, R_k = sum_{j<I_k} gamma^j r_{b_k+j}: all rewards of
      the turn, aggregate_reward or not. b_{k+1} (or bootstrap) is the turn's own I_k tokens after
      b_k: Gamma_k = gamma^I_k. After b_k, G_t = r_t + gamma G_{t+1}, on into the next turn's b.
    turn_gamma replaces Gamma_k, and gamma where G steps from turn to turn; gamma stays inside.
    V_{e_k} has seen the response but for its last token, so with an exact critic the "last" turn
    term has zero expected gradient on all tokens of the turn but the last (test_expected_gradient).
    ValueError: as token_gae; a turn_end off the mask, tokens after the last one, unknown anchor.
    Source: arXiv 2607.23605. Pinned by test_turn_gae_by_hand, test_random_batches_match_naive.
    """
    across = gamma if turn_gamma is None else turn_gamma
    _check(anchor, gamma=gamma, lam=lam, turn_gamma=across)
    r, v, after, valid, restore = _read(rewards, values, mask, bootstrap)
    start, end, turn, length = _turns(turn_end, mask, valid)  # [B, N] three times, [B, K]
    step = gamma * (~end).double()  # [B, N] to the next token of the same turn
    if anchor == "last":
        at, elapsed, reward = end, _next(length, 1), _pack(r, end)  # [B, N], [B, K], [B, K]
        way = _pack(_backward(r * ~end, step), start)  # [B, K] a turn's rewards before its last
        reward = reward + aggregate_reward * gamma * _next(way, 0)
    else:
        at, elapsed, reward = start, length, _pack(_backward(r, step), start)
    value = _pack(v, at)  # [B, K]
    discount = gamma**elapsed if turn_gamma is None else torch.full_like(elapsed, turn_gamma)
    delta = reward + discount * _next(value, after) - value
    advantage = _backward(delta, discount * lam).gather(1, turn)  # [B, N]
    step = torch.where(end, across, step).masked_fill(at, 0)  # G starts anew at every anchor
    returns = _backward(torch.where(at, advantage + v, r), step, after)
    return restore(advantage), restore(returns)


@torch.no_grad()
def hybrid_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_end: Tensor, *, gamma: float, lam: float,
    alpha: float, token_lam: float = 1.0, anchor: str = "last", aggregate_reward: bool = False,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HyGAE: the advantage is a mix of turn_gae (weight alpha) and token_gae. Shapes as theirs.

        A = alpha A^turn(lam) + (1 - alpha) A^token(token_lam),    G likewise
    The mix is to be whitened once, after mixing (whiten); returns are never whitened.
    With lam = token_lam = 1 and rewards on turn ends only, both returns are the same discounted
    sum of rewards: mixing them is a no-op, and only the actor's advantage differs from PPO's.
    With an exact critic and the "last" anchor, alpha shrinks the expected gradient to (1 - alpha)
    of PPO's on all tokens of a turn but its last (test_expected_gradient).
    ValueError: as token_gae and turn_gae; alpha off [0, 1].
    Source: arXiv 2607.23605. Pinned by test_vectors and test_hybrid_by_hand.
    """
    # Differs from the paper: its code takes the value after the last token as 0 always, also for
    # episodes cut by the turn limit, and has no "first" anchor. Both are options here, off unless
    # asked for. token_lam is fixed to 1 in its code.
    _check(alpha=alpha)
    dtype, r = torch.promote_types(rewards.dtype, values.dtype), rewards.double()  # round once
    turn = turn_gae(
        r, values, mask, turn_end, gamma=gamma, lam=lam, anchor=anchor,
        aggregate_reward=aggregate_reward, bootstrap=bootstrap,
    )
    token = token_gae(r, values, mask, gamma=gamma, lam=token_lam, bootstrap=bootstrap)
    advantage, returns = (alpha * a + (1 - alpha) * b for a, b in zip(turn, token))
    return advantage.to(dtype), returns.to(dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, dist=None) -> Tensor:
    """x [B, T] in standard deviations from its mean over all masked tokens of all ranks; unitless.

        (x - mean) / sqrt(var + 1e-8), var with ddof 1; fewer than two tokens: x as it is
    dist: None for this process alone, torch.distributed for all ranks, or one process group. Every
    rank must call; a rank may hold no tokens. Two passes in float64: the mean, then the squares.
    ValueError: shapes, mask not 0/1, x not finite on the mask (names the row).
    Source: arXiv 2607.23605. Pinned by test_whiten_by_hand and test_whiten_two_ranks.
    """
    mask = _as_bool("mask", mask, x=x)
    _refuse(mask & ~x.isfinite(), "x is not finite on a generated token")
    x64 = torch.where(mask, x, 0).double()
    count, total = _sum_over_ranks(torch.stack([mask.sum().double(), x64.sum()]), dist)
    if count < 2:
        return x64.to(x.dtype)
    gap = torch.where(mask, x64 - total / count, 0)
    var = _sum_over_ranks((gap**2).sum(), dist) / (count - 1)
    return (gap / (var + 1e-8).sqrt()).to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Sum of x over the mask / denominator -> scalar, in x's unit. Float32 at least.

    denominator: the number of generated tokens of the whole optimiser batch, over all micro-batches
    and ranks. Then losses and gradients of the parts add up to those of the whole, however it is
    split (sum gradients over ranks, do not average). None: the tokens of this mask. At least 1.
    Pinned by test_micro_batches_add_up.
    """
    mask, x = _on_mask(mask, x=x)
    count = mask.sum() if denominator is None else torch.as_tensor(denominator, device=x.device)
    return x.sum() / count.clamp(min=1)


def policy_loss(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    clip: float, dual_clip: float | None = None, denominator: Tensor | float | None = None,
) -> Tensor:
    """PPO's clipped loss, masked_mean over tokens -> scalar. All tensors [B, T], log-probs in nats.

        L_t = max(-A rho, -A min(max(rho, 1 - clip), 1 + clip)),    rho = exp(new - old)
        dual_clip c > 1 (None: off): where A < 0, L_t = min(L_t, -c A)
    new - old is clamped to +-20 before exp: no overflow, and no gradient beyond. Gradient flows to
    new_logprobs alone. denominator as in masked_mean.
    ValueError: shapes, mask not 0/1 (names the row), clip <= 0, dual_clip <= 1.
    Source: PPO arXiv 1707.06347 eq. 7, dual clip arXiv 1912.09729. Pinned by
    test_policy_loss_by_hand and test_policy_loss_overflow.
    """
    if not clip > 0 or (dual_clip is not None and not dual_clip > 1):
        raise ValueError(f"clip {clip} must be > 0 and dual_clip {dual_clip} > 1, or None")
    mask, new, old, gain = _on_mask(
        mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs.detach(),
        advantages=advantages.detach(),
    )
    ratio = (new - old).clamp(-20, 20).exp()
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip))
    if dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -dual_clip * gain), loss)
    return masked_mean(loss, mask, denominator)


@torch.no_grad()
def policy_stats(
    new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *,
    clip: float, denominator: Tensor | float | None = None,
) -> dict[str, Tensor]:
    """How far the policy moved: masked means, so with a shared denominator parts add up.

    approx_kl: k3 of KL(old || new), nats. clipfrac: share of tokens with |rho - 1| > clip.
    ratio: mean rho. Inputs as policy_loss. Pinned by test_policy_stats_by_hand.
    """
    mask, new, old = _on_mask(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs)
    ratio = (new - old).clamp(-20, 20).exp()
    kl = kl_terms(old, new, mask)[2]
    terms = {"approx_kl": kl, "clipfrac": ((ratio - 1).abs() > clip).float(), "ratio": ratio}
    return {name: masked_mean(x, mask, denominator) for name, x in terms.items()}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *,
    clip: float | None, denominator: Tensor | float | None = None,
) -> Tensor:
    """Half the critic's squared error, the worse of free and clipped -> scalar, reward units^2.

        L_t = 1/2 max((V - G)^2, (V_old + min(max(V - V_old, -clip), clip) - G)^2);  None: no clip
    All tensors [B, T]. Gradient flows to values alone. denominator as in masked_mean.
    ValueError: shapes, mask not 0/1 (names the row), clip <= 0.
    Source: PPO's first code (OpenAI baselines). Pinned by test_value_loss_by_hand.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip} must be > 0, or None for no clipping")
    mask, new, old, target = _on_mask(
        mask, values=values, old_values=old_values.detach(), returns=returns.detach()
    )
    clipped = new if clip is None else old + (new - old).clamp(-clip, clip)
    loss = torch.maximum((new - target) ** 2, (clipped - target) ** 2)
    return 0.5 * masked_mean(loss, mask, denominator)


def kl_terms(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token estimates (k1, k2, k3) of KL(policy || reference), [B, T] each, nats.

        d = logprobs - ref_logprobs;  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d
    k1 may be negative and serves in a reward (as a loss its gradient ignores the reference); k3 is
    >= 0. In k3, -d is clamped to 20 before exp: no overflow, no gradient beyond. No gradient to
    ref_logprobs. Reduce with masked_mean. ValueError: shapes, mask not 0/1 (names the row).
    Pinned by test_kl_by_hand.
    """
    _, new, ref = _on_mask(mask, logprobs=logprobs, ref_logprobs=ref_logprobs.detach())
    d = new - ref
    back = (-d).clamp(max=20)
    return d, d**2 / 2, torch.expm1(back) - back


# Checks and packing. Packed tensors are [B, N] (tokens) or [B, K] (turns), float64, and aligned to
# the right: a row's last token or turn is in the last column, the unused columns in front are junk
# that no recursion from the right can bring into a used one.


def _read(rewards, values, mask, bootstrap):
    """Checked inputs -> r, v [B, N], after [B], valid [B, N], and restore: [B, N] -> [B, T]."""
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(f"values {tuple(values.shape)}, {values.dtype} must be [B, T] floats")
    mask = _as_bool("mask", mask, rewards=rewards, values=values)
    after = values.new_zeros(len(mask)) if bootstrap is None else bootstrap
    if after.shape != mask.shape[:1]:
        raise ValueError(f"bootstrap {tuple(after.shape)} must be [B] = ({len(mask)},)")
    _refuse(mask & ~rewards.isfinite(), "rewards are not finite on a generated token")
    _refuse(mask & ~values.isfinite(), "values are not finite on a generated token")
    _refuse(mask.any(1) & ~after.isfinite(), "bootstrap is not finite")
    dtype, valid = torch.promote_types(rewards.dtype, values.dtype), _pack(mask, mask) > 0

    def restore(y: Tensor) -> Tensor:
        return y.new_zeros(mask.shape).masked_scatter(mask, y[valid]).to(dtype)

    return _pack(rewards, mask), _pack(values, mask), after.double(), valid, restore


def _turns(turn_end, mask, valid):
    """Checked turns -> start, end (bool), turn (index of a token's turn) [B, N], length [B, K]."""
    mask = mask != 0
    turn_end = _as_bool("turn_end", turn_end, mask=mask)
    _refuse(turn_end & ~mask, "turn_end stands on a token off the mask")
    ahead = turn_end.flip(1).cumsum(1).flip(1)  # [B, T] how many turns end here or later
    _refuse(mask & (ahead == 0), "a turn has no turn_end: tokens follow the row's last turn_end")
    end = _pack(turn_end, mask) > 0
    start = valid & ~(valid & ~end).roll(1, 1)  # the token before it is not inside a turn
    position = _pack(valid.cumsum(1), end)  # [B, K] how many tokens the row has up to e_k
    length = position.diff(dim=1, prepend=position.new_zeros(len(position), 1))
    turn = length.shape[1] - _pack(ahead, mask).long()  # turns are numbered from the right, too
    return start, end, turn.clamp(max=length.shape[1] - 1), length


def _pack(x: Tensor, keep: Tensor) -> Tensor:
    """The kept entries of each row of x, in order, against the right edge, in float64."""
    count = keep.sum(1, keepdim=True)  # [B, 1]
    width = max([1, *count.flatten().tolist()])
    slots = torch.arange(width, device=x.device) >= width - count  # [B, width]
    return torch.zeros(slots.shape, dtype=torch.float64, device=x.device).masked_scatter(
        slots, x[keep].double()
    )


def _next(x: Tensor, last: Tensor | float) -> Tensor:
    """x one column ahead, with `last` [B] or a number where there is none."""
    out = x.roll(-1, 1)
    out[:, -1] = last
    return out


def _backward(x: Tensor, factor: Tensor, after: Tensor | None = None) -> Tensor:
    """y_t = x_t + factor_t y_{t+1} along dim 1, y after the last column = after [B] (None: 0)."""
    y = torch.zeros_like(x[:, 0]) if after is None else after
    columns = []
    for x_t, factor_t in zip(x.T.contiguous().flip(0), factor.T.contiguous().flip(0)):
        y = torch.addcmul(x_t, factor_t, y)
        columns.append(y)
    return torch.stack(columns[::-1], 1)


def _on_mask(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """mask as bool and each tensor in float32 (float64 kept), 0 off the mask: nothing that stands
    there can reach an exp, and so no inf * 0 can make a NaN, in the loss or in the gradient."""
    mask = _as_bool("mask", mask, **tensors)
    kept = (torch.where(mask, x, 0) for x in tensors.values())
    return mask, *(x.to(torch.promote_types(x.dtype, torch.float32)) for x in kept)


def _as_bool(name: str, flags: Tensor, **others: Tensor) -> Tensor:
    """flags as bool; ValueError unless it holds 0 and 1 only and has the shape of all others."""
    if any(x.shape != flags.shape for x in others.values()):
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in {name: flags, **others}.items())
        raise ValueError(f"shapes differ: {shapes}; all must be the same [B, T]")
    _refuse((flags != 0) & (flags != 1), f"{name} holds something else than 0 and 1")
    return flags != 0


def _refuse(bad: Tensor, what: str) -> None:
    if bad.any():
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
        raise ValueError(f"row {rows[0]}: {what} (rows: {rows})")


def _check(anchor: str = "last", **numbers: float) -> None:
    if anchor not in ("last", "first"):
        raise ValueError(f"anchor {anchor!r} is unknown; use 'last' or 'first'")
    for name, x in numbers.items():
        if not 0 <= x <= 1:
            raise ValueError(f"{name} {x} is outside [0, 1]")


def _sum_over_ranks(x: Tensor, dist) -> Tensor:
    """Sum of x over the ranks, in place; dist as in whiten."""
    if hasattr(dist, "all_reduce"):
        dist.all_reduce(x)
    elif dist is not None:
        torch.distributed.all_reduce(x, group=dist)
    return x
