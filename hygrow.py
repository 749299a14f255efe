"""The maths of HyGAE, of GROW and of what they are compared with. Pure functions, only torch.

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
gamma discounts one token (rl4vlm_gae: one turn), turn_gamma where given one turn. Rows without
tokens stay zero. GROW's tensors are [S], one entry a state-action sample, and [S, T] with the
tokens of its action.
Estimators work in float64, answer in the input's dtype, pass no gradient and do not whiten. They
refuse with a ValueError that names the row or the argument: shapes that differ, flags other than 0
and 1, numbers not finite on the mask, a turn_end off the mask, tokens after a row's last turn_end,
discounts outside [0, 1]. Losses check shapes and flags; a NaN on the mask comes out as a NaN.
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
    anchor="first" (ablation): V_k = V_{b_k}, R_k = sum_{j<I_k} gamma^j r_{b_k+j}, with or without
      aggregate_reward. b_{k+1} (or bootstrap) is the turn's own I_k tokens after b_k:
      Gamma_k = gamma^I_k. After b_k, G_t = r_t + gamma G_{t+1}, on into the next turn's b.
    turn_gamma replaces Gamma_k, and gamma where G steps from turn to turn; gamma stays inside.
    V_{e_k} knows the turn but for its last token: with an exact critic and lam 1, "last" teaches
    the turn's tokens the advantage of that one, so on average nothing to the others if it is the
    last for sure; "first": gamma^(t - b_k) times their own. test_4_gradient_by_position.
    Source: arXiv 2607.23605. Pinned by test_turn_gae_by_hand, test_random_batches_match_naive.
    """
    across = gamma if turn_gamma is None else turn_gamma
    _check(gamma=gamma, lam=lam, turn_gamma=across)
    _choose("anchor", anchor, "last", "first")
    r, v, after, valid, restore = _read(rewards, values, mask, bootstrap)
    start, end, turn, length = _turns(turn_end, mask, valid)  # [B, N] three times, [B, K]
    step = gamma * (~end).double()  # [B, N] to the next token of the same turn
    if anchor == "last":
        at, elapsed = end, _next(length, 1)  # [B, N], [B, K]
        way = _pack(_backward(r * ~end, step), start)  # [B, K] a turn's rewards before its last
        reward = _pack(r, end) + aggregate_reward * gamma * _next(way, 0)
    else:
        at, elapsed, reward = start, length, _pack(_backward(r, step), start)
    discount = gamma**elapsed if turn_gamma is None else torch.full_like(elapsed, turn_gamma)
    delta = reward + discount * _next(_pack(v, at), after) - _pack(v, at)  # [B, K]
    advantage = _backward(delta, discount * lam).gather(1, turn)  # [B, N]
    step = torch.where(end, across, step).masked_fill(at, 0)  # G starts anew at every anchor
    returns = _backward(torch.where(at, advantage + v, r), step, after)
    return restore(advantage), restore(returns)


@torch.no_grad()
def hybrid_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_end: Tensor, *, gamma: float, lam: float,
    alpha: float, token_lam: float = 1.0, anchor: str = "last", aggregate_reward: bool = False,
    hybrid_return: str = "exact", bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HyGAE: the advantage is a mix of turn_gae (weight alpha) and token_gae. Shapes as theirs.

        A = alpha A^turn(lam) + (1 - alpha) A^token(token_lam)
        G = alpha G^turn      + (1 - alpha) G^token                     hybrid_return="exact"
    Ablations of G: "broadcast" copies G^turn of the anchor, undiscounted, to all tokens of its turn
    before mixing; "turn_end" keeps G at turn ends only (0 elsewhere: give value_loss turn_end as
    its mask); "token" is G^token alone. The mix A is to be whitened once, after mixing; G never.
    With lam = token_lam = 1 and rewards on turn ends only, both returns are the same discounted
    sum of rewards: mixing them is a no-op, and only the actor's advantage differs from PPO's.
    ValueError: alpha outside [0, 1], unknown anchor or hybrid_return.
    Source: arXiv 2607.23605. Pinned by test_vectors, test_hybrid_by_hand, test_5_hybrid_return.
    """
    # Differs from the paper: its code takes the value after the last token as 0 always, also for
    # episodes cut by the turn limit, and has no "first" anchor. Both are options here, off unless
    # asked for. token_lam is fixed to 1 in its code.
    _check(alpha=alpha, token_lam=token_lam)
    _choose("hybrid_return", hybrid_return, "exact", "broadcast", "turn_end", "token")
    dtype, r = torch.promote_types(rewards.dtype, values.dtype), rewards.double()  # round once
    how = dict(anchor=anchor, aggregate_reward=aggregate_reward, bootstrap=bootstrap)
    turn, high = turn_gae(r, values, mask, turn_end, gamma=gamma, lam=lam, **how)
    token, low = token_gae(r, values, mask, gamma=gamma, lam=token_lam, bootstrap=bootstrap)
    if hybrid_return == "broadcast":  # without discount an advantage is its anchor's reward, copied
        still = dict(gamma=0.0, lam=0.0, anchor=anchor)
        high = turn_gae(high, torch.zeros_like(high), mask, turn_end, **still)[0]
    returns = low if hybrid_return == "token" else alpha * high + (1 - alpha) * low
    if hybrid_return == "turn_end":
        returns = torch.where(turn_end != 0, returns, 0)
    return (alpha * turn + (1 - alpha) * token).to(dtype), returns.to(dtype)


@torch.no_grad()
def bi_level_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_end: Tensor, *, gamma: float, lam: float,
    turn_gamma: float, bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """VAGEN's bi-level GAE: GAE over turns, whose result is each turn's reward in a GAE over its
    tokens. Shapes as token_gae.

        delta_k = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k}     V_{e_{K+1}} is bootstrap
        A_k     = delta_k + turn_gamma lam A_{k+1}               r'_{e_k} = A_k + V_{e_k}
        A_t     = r'_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}     in the turn: V, A after e_k 0
        G_t     = A_t + V_t                                      r'_t = r_t off turn ends
    Where A_k is the token advantage at e_k, all of it is token_gae: test_8_bi_level_is_token_gae.
    Source: VAGEN, arXiv 2510.16907. Pinned by test_vectors and test_bi_level_by_hand.
    """
    # Differs from the paper: HyGAE's own code lets V and A run on over turn ends in the token pass,
    # which counts later turns again and again; here the token chain restarts, as in VAGEN.
    _check(gamma=gamma, lam=lam, turn_gamma=turn_gamma)
    r, v, after, valid, restore = _read(rewards, values, mask, bootstrap)
    _, end, turn, _ = _turns(turn_end, mask, valid)
    value = _pack(v, end)  # [B, K]
    delta = _pack(r, end) + turn_gamma * _next(value, after) - value
    high = _backward(delta, torch.full_like(delta, turn_gamma * lam)).gather(1, turn)  # [B, N]
    step = gamma * (~end).double()  # [B, N] to the next token of the same turn
    low = _backward(torch.where(end, high + v, r) + step * _next(v, 0) - v, step * lam)
    return restore(low), restore(low + v)


@torch.no_grad()
def rl4vlm_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_end: Tensor, *, gamma: float, lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RL4VLM's GAE over turns: the value at the turn's first token, gamma per turn. Shapes as
    token_gae; goes with turn_policy_loss.

        delta_k = r_{e_k} + gamma V_{b_{k+1}} - V_{b_k}          V_{b_{K+1}} is bootstrap
        A_k     = delta_k + gamma lam A_{k+1}                    copied to each token of the turn
        G_{b_k} = A_k + V_{b_k}                                  0 elsewhere
    Give value_loss turn_start as its mask. Rewards elsewhere than on turn ends are not read.
    Source: RL4VLM, arXiv 2405.10292. Pinned by test_vectors and test_rl4vlm_by_hand.
    """
    _check(gamma=gamma, lam=lam)
    r, v, after, valid, restore = _read(rewards, values, mask, bootstrap)
    start, end, turn, _ = _turns(turn_end, mask, valid)
    value = _pack(v, start)  # [B, K]
    delta = _pack(r, end) + gamma * _next(value, after) - value
    advantage = _backward(delta, torch.full_like(delta, gamma * lam)).gather(1, turn)  # [B, N]
    return restore(advantage), restore((advantage + v) * start)


def turn_start(mask: Tensor, turn_end: Tensor) -> Tensor:
    """b_k: the first generated token of each turn. mask, turn_end [B, T] -> [B, T] bool.

    Pinned by test_rl4vlm_by_hand and test_8_group_estimators.
    """
    mask = _as_bool("mask", mask, turn_end=turn_end)
    _ahead(turn_end, mask)  # refuses ends that do not fit
    count = mask.cumsum(1)  # [B, T] generated tokens up to here
    done = (count * (turn_end != 0)).cummax(1).values if mask.numel() else count  # in ended turns
    before = done.roll(1, 1) * (torch.arange(mask.shape[1], device=mask.device) > 0)
    return mask & (count - before == 1)


def masked_reinforce(
    rewards: Tensor, mask: Tensor, *, gamma: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE: the discounted sum of rewards from each token on, no critic. Shapes as token_gae.

        A_t = G_t = r_t + gamma G_{t+1}                          G after the last token is bootstrap
    Source: arXiv 2607.23605's baseline. Pinned by test_2_sampled_estimators_are_unbiased.
    """
    zero = rewards * 0.0  # a float, for rewards of an integer type too
    return token_gae(rewards, zero, mask, gamma=gamma, lam=1.0, bootstrap=bootstrap)


@torch.no_grad()
def trajectory_group_advantages(
    rewards: Tensor, mask: Tensor, group: Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """GRPO on whole trajectories: a row's score against its group, on each of its tokens.

    rewards, mask [B, T], group [B] any labels -> [B, T], unitless.
        s_i = sum_t r_{i,t},    A_i = (s_i - mean s) / (std s + eps) over the group, std with ddof
    A group whose scores are equal up to rounding, or a lone row, gets exactly 0. Rows without
    tokens are not part of their group. ValueError: also ddof other than 0 and 1, eps < 0.
    Source: arXiv 2402.03300 sec. 4.1.2. Pinned by test_trajectory_group_by_hand.
    """
    # Differs from the paper: HyGAE's code gives a lone row its raw score; 0 says "no comparison".
    mask, r = _on_mask(mask, rewards=rewards)
    _refuse(~r.isfinite(), "rewards are not finite on a generated token", rewards)
    dtype, some, r = _float(rewards.dtype), mask.any(1), r.double()
    rows = torch.arange(len(r), device=r.device)
    g, _ = _shares(rows[some], group[some] if group.shape == some.shape else group)
    score, size = r.sum(1)[some], r.abs().sum(1)[some]  # the size of what may have been rounded
    advantage = r.new_zeros(len(r)).masked_scatter(
        some, _standardise(score, torch.ones_like(score), g, ddof, eps, size, dtype)
    )
    return torch.where(mask, advantage[:, None], 0).to(dtype)


@torch.no_grad()
def leave_one_out_advantages(score: Tensor, group: Tensor) -> Tensor:
    """RLOO: a trajectory's score less the mean of the others in its group; not divided by a std.

    score [N], group [N] any labels -> [N], in the score's unit.
        A_i = s_i - mean_{j != i} s_j = G / (G - 1) (s_i - mean s);   a lone trajectory gets 0
    Source: RLOO, arXiv 2402.14740. Pinned by test_leave_one_out_by_hand.
    """
    g, share = _shares(torch.arange(len(score), device=score.device), group)  # share: 1/G
    _refuse(~score.isfinite(), "score is not finite", score)
    mean = torch.zeros_like(share).index_add(0, g, share * score.double())[g]
    advantage = torch.where(share < 1, (score - mean) / (1 - share), 0)
    return advantage.to(_float(score.dtype))


@torch.no_grad()
def grow_rewards(success: Tensor, lengths: Tensor, *, gamma: float) -> Tensor:
    """GROW's reward of each state-action sample: the success, discounted by the steps to go.

    success [N]: R_i of each trajectory, 1 or 0 (a failure must be 0: r is not shift-invariant).
    lengths [N]: H_i >= 1 steps. -> [S], S = sum of H_i, one trajectory after the other; in
    success's dtype (bool, int: float32).
        r_{i,t} = gamma^(H_i - t) R_i,   t = 1..H_i
    ValueError: also lengths that are not whole numbers >= 1, success < 0.
    Source: arXiv 2605.20246. Pinned by test_grow_by_hand.
    """
    _check(gamma=gamma)
    whole = not lengths.is_floating_point() and lengths.dtype != torch.bool
    if success.ndim != 1 or success.shape != lengths.shape or not whole:
        shapes = f"success {tuple(success.shape)} and lengths {tuple(lengths.shape)}"
        raise ValueError(f"{shapes} must both be [N], lengths of an integer type")
    _refuse(lengths < 1, "a trajectory's length is less than 1", lengths)
    _refuse(~success.isfinite() | (success < 0), "success is not a number >= 0", success)
    lengths = lengths.long()
    to_go = lengths.cumsum(0).repeat_interleave(lengths) - 1  # [S] index of the last step...
    to_go = to_go - torch.arange(len(to_go), device=to_go.device)  # ... minus the step's own
    reward = gamma ** to_go.double() * success.double().repeat_interleave(lengths)
    return reward.to(_float(success.dtype))


@torch.no_grad()
def grow_weights(trajectory: Tensor, group: Tensor) -> Tensor:
    """What each sample weighs in GROW's objective -> [S] float64; the weights sum to 1.

    trajectory, group [S]: any integer labels; trajectories of two groups may share a label.
        w_{i,t} = 1/M 1/G 1/H_i: M groups, G trajectories in the sample's, H_i samples in its own
    Source: arXiv 2605.20246. Pinned by test_grow_by_hand.
    """
    g, share = _shares(trajectory, group)
    return share / (g.max() + 1) if len(g) else share


@torch.no_grad()
def grow_advantages(
    rewards: Tensor, trajectory: Tensor, group: Tensor, *, statistics: str = "pooled", ddof: int = 0
) -> Tensor:
    """GROW: each sample's reward in standard deviations from the mean of its group's samples.

    rewards [S] (grow_rewards), trajectory, group [S] labels as in grow_weights -> [S], unitless.
        A_{i,t} = (r_{i,t} - mu) / sigma,   sigma^2 = N / (N - ddof) mean (r - mu)^2, N samples
    statistics: the means mu and sigma^2 are over all samples alike ("pooled", the paper read by the
    letter: long trajectories, mostly failures, weigh more) or weigh each sample 1/(G H_i)
    ("balanced": then the mean of A under grow_weights is 0 for unequal lengths too).
    A group whose rewards are all equal up to rounding (4 eps of their dtype; 3 % in bfloat16: use
    float32 or more) gets exactly 0. A lone trajectory is its own group: 0 if it failed; if it
    succeeded, early steps are negative and late ones positive (sum 0), as in a group where all
    succeed alike.
    ValueError: ddof other than 0 and 1, unknown statistics.
    Source: arXiv 2605.20246. Pinned by test_grow_by_hand and test_7_grow_identities.
    """
    _choose("statistics", statistics, "pooled", "balanced")
    g, share = _shares(trajectory, group)
    if rewards.shape != g.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group {tuple(g.shape)} must be [S]")
    _refuse(~rewards.isfinite(), "rewards are not finite", rewards)
    weight = share if statistics == "balanced" else torch.ones_like(share)
    r, dtype = rewards.double(), _float(rewards.dtype)
    return _standardise(r, weight, g, ddof, 0.0, r.abs(), dtype).to(dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, dist=None) -> Tensor:
    """x [B, T] in standard deviations from its mean over all masked tokens of all ranks; unitless.

        (x - mean) / sqrt(var + 1e-8), var with ddof 1; fewer than two tokens: x as it is
    dist: None for this process alone, torch.distributed for all ranks, or one process group. Every
    rank must call; a rank may hold no tokens. Two passes in float64: the mean, then the squares.
    Source: arXiv 2607.23605. Pinned by test_whiten_by_hand and test_whiten_two_ranks.
    """
    mask = _as_bool("mask", mask, x=x)
    _refuse(mask & ~x.isfinite(), "x is not finite on a generated token", x)
    x64, dtype = torch.where(mask, x, 0).double(), _float(x.dtype)
    count, total = _sum_over_ranks(torch.stack([mask.sum().double(), x64.sum()]), dist)
    if count < 2:
        return x64.to(dtype)
    gap = torch.where(mask, x64 - total / count, 0)
    var = _sum_over_ranks((gap**2).sum(), dist) / (count - 1)
    return (gap / (var + 1e-8).sqrt()).to(dtype)


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
    ValueError: clip <= 0, dual_clip <= 1.
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


def turn_policy_loss(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, turn_end: Tensor,
    *, clip: float, thought: Tensor | None = None, thought_coef: float = 1.0,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """RL4VLM's loss: policy_loss with one ratio and one term a turn, mean over turns -> scalar.

    Inputs as policy_loss; thought [B, T]: 1 on tokens inside a thought.
        rho_k = exp(sum_{t=b_k..e_k} c_t (new_t - old_t)),  c_t = thought_coef in a thought, else 1
    The turn's advantage is read at e_k. denominator: the number of turns of the optimiser batch.
    ValueError: also thought_coef outside [0, 1], clip <= 0.
    Source: RL4VLM, arXiv 2405.10292. Pinned by test_turn_policy_loss_by_hand.
    """
    mask, new, old, gain = _on_mask(
        mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs.detach(),
        advantages=advantages.detach(),
    )
    _check(thought_coef=thought_coef)
    ahead = _ahead(turn_end, mask)  # [B, T] 1 in the row's last turn, 2 in the one before, ...
    turns = int(ahead.max()) if ahead.numel() else 0
    coef = 1.0
    if thought is not None:
        coef = torch.where(_as_bool("thought", thought, mask=mask), thought_coef, 1.0)
    per_turn = lambda x: x.new_zeros(len(x), turns + 1).scatter_add(1, ahead, x)[:, 1:]
    change, exists = per_turn(coef * (new - old)), per_turn((turn_end != 0).to(new.dtype))
    gain = per_turn(torch.where(turn_end != 0, gain, 0))  # all three [B, K]
    return policy_loss(change, 0 * exists, gain, exists, clip=clip, denominator=denominator)


def grow_loss(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor,
    *, clip: float, ratio: str = "token",
) -> Tensor:
    """GROW's clipped surrogate, negated -> scalar. Gradient flows to new_logprobs alone.

    new_logprobs, old_logprobs, mask [S, T]: the tokens of each sample's action, nats. advantages
    [S] (grow_advantages), weights [S] >= 0 (grow_weights of the whole optimiser batch, so that the
    losses of micro-batches add up).
        L = -sum_s w_s min(rho_s A_s, clip(rho_s, 1 - clip, 1 + clip) A_s)
    ratio="token": each token has its own rho, and the min is averaged over the action's tokens;
    "action": rho is the whole action's, the product of its tokens'. One-token actions: the same.
    At the old policy the gradient of "token" is that of "action" / the action's tokens.
    ValueError: also clip <= 0, unknown ratio, weights < 0.
    Source: arXiv 2605.20246. Pinned by test_grow_loss_by_hand and test_7_grow_gradient_split.
    """
    _choose("ratio", ratio, "token", "action")
    mask, new, old = _on_mask(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs.detach())
    if not advantages.shape == weights.shape == mask.shape[:1]:
        shapes = f"advantages {tuple(advantages.shape)}, weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes} must be [S] = ({len(mask)},)")
    _refuse(weights < 0, "a weight is below 0", weights)
    if ratio == "action":
        new, old, mask = (x.sum(1, keepdim=True) for x in (new, old, mask))
        mask = mask > 0
    gain = (advantages * weights)[:, None] / mask.sum(1, keepdim=True).clamp(min=1)  # [S, 1]
    return policy_loss(new, old, gain.expand_as(new), mask, clip=clip, denominator=1)


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
    ValueError: clip <= 0.
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
    ref_logprobs. Reduce with masked_mean.
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
    _refuse(mask & ~rewards.isfinite(), "rewards are not finite on a generated token", rewards)
    _refuse(mask & ~values.isfinite(), "values are not finite on a generated token", values)
    _refuse(mask.any(1) & ~after.isfinite(), "bootstrap is not finite", after)
    dtype, valid = torch.promote_types(rewards.dtype, values.dtype), _pack(mask, mask) > 0

    def restore(y: Tensor) -> Tensor:
        return y.new_zeros(mask.shape).masked_scatter(mask, y[valid]).to(dtype)

    return _pack(rewards, mask), _pack(values, mask), after.double(), valid, restore


def _turns(turn_end, mask, valid):
    """Checked turns -> start, end (bool), turn (index of a token's turn) [B, N], length [B, K]."""
    mask = mask != 0
    ahead = _ahead(turn_end, mask)
    end = _pack(turn_end, mask) > 0
    start = valid & ~(valid & ~end).roll(1, 1)  # the token before it is not inside a turn
    position = _pack(valid.cumsum(1), end)  # [B, K] how many tokens the row has up to e_k
    length = position.diff(dim=1, prepend=position.new_zeros(len(position), 1))
    turn = length.shape[1] - _pack(ahead, mask).long()  # turns are numbered from the right, too
    return start, end, turn.clamp(max=length.shape[1] - 1), length


def _ahead(turn_end, mask):
    """Checked turn_end, bool mask -> [B, T] long: how many turns of the row end here or later."""
    turn_end = _as_bool("turn_end", turn_end, mask=mask)
    _refuse(turn_end & ~mask, "turn_end stands on a token off the mask", turn_end)
    ahead = turn_end.flip(1).cumsum(1).flip(1)
    late = "a turn has no turn_end: tokens follow the row's last turn_end"
    _refuse(mask & (ahead == 0), late, turn_end)
    return ahead


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
    """flags [B, T] as bool; ValueError unless it holds 0 and 1 only and all others are [B, T]."""
    if flags.ndim != 2 or any(x.shape != flags.shape for x in others.values()):
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in {name: flags, **others}.items())
        raise ValueError(f"shapes differ: {shapes}; all must be the same [B, T]")
    _refuse((flags != 0) & (flags != 1), f"{name} holds something else than 0 and 1", flags)
    return flags != 0


def _refuse(bad: Tensor, what: str, x: Tensor) -> None:
    """ValueError naming the first bad entry of x [B, ...] and the first rows that have one."""
    if bad.any():
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
        at = tuple(bad.nonzero()[0].tolist())
        more = f", {len(rows)} in all" if len(rows) > 5 else ""
        raise ValueError(f"row {rows[0]}: {what}: {x[at].item()} at {at} (rows: {rows[:5]}{more})")


def _float(dtype: torch.dtype) -> torch.dtype:
    """Of an answer to inputs of this dtype."""
    return dtype if dtype.is_floating_point else torch.float32


def _shares(trajectory: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [S] -> g [S], the groups numbered from 0, and 1/(G H_i) [S] as in grow_weights."""
    floats = trajectory.is_floating_point() or group.is_floating_point()
    if trajectory.ndim != 1 or trajectory.shape != group.shape or floats:
        shapes = f"trajectory {tuple(trajectory.shape)} and group {tuple(group.shape)}"
        raise ValueError(f"{shapes} must both be [S] whole numbers")
    g = group.unique(return_inverse=True)[1]
    pairs, i = torch.stack([g, trajectory]).unique(dim=1, return_inverse=True)  # [2, N], [S]
    return g, 1 / (pairs[0].bincount()[g] * i.bincount()[i]).double()


def _standardise(x, weight, g, ddof, eps, size, dtype):
    """(x - mean) / (std + eps) within each group g, weighted, float64; exactly 0 for a tie: a
    spread of at most four of dtype's rounding steps at the group's largest size."""
    if ddof not in (0, 1) or not 0 <= eps < torch.inf:
        raise ValueError(f"ddof {ddof} must be 0 or 1, eps {eps} a number >= 0")
    zero = x.new_zeros(int(g.max()) + 1 if len(g) else 0)
    total = lambda y: zero.index_add(0, g, y)[g]  # [S] sum over the sample's group
    reduce = lambda y, how: zero.scatter_reduce(0, g, y, how, include_self=False)[g]
    largest = reduce(size, "amax").clamp(min=torch.finfo(dtype).smallest_normal)
    tied = reduce(x, "amax") - reduce(x, "amin") <= 4 * torch.finfo(dtype).eps * largest
    x, eps, count = x / largest, eps / largest, total(torch.ones_like(x))  # so squares are in range
    gap = x - total(weight * x) / total(weight)
    var = total(weight * gap**2) / total(weight) * count / (count - ddof)  # one sample: a tie
    return torch.where(tied, 0, gap / (var.sqrt() + eps))


def _choose(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; use {' or '.join(map(repr, known))}")


def _check(**numbers: float) -> None:
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
