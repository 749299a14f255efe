"""HyGAE: multi-turn PPO for vision-language policies with a hybrid turn- and token-level advantage.

    torchrun train_hygae.py --alpha 0.5                      # FrozenLake, tiny model, laptop CPU
    torchrun --nproc-per-node 2 train_hygae.py --alpha 0.5   # the same run on two processes
    torchrun train_hygae.py --env Sokoban --env-options min_moves=2 --max-turns 3 --demo-noise 0.7
    torchrun train_hygae.py --resume runs/NAME               # go on where a run stopped

Source: arXiv 2607.23605. The formulas are in hygrow.py, the worlds in envs.py, the model in
models.py; this file is the order in which things happen: a supervised cold start, then iterations
of collect -> score -> advantages -> update -> log -> save.

All randomness is a function of (--seed, iteration, global row), never of a rank or of what happened
before. So any number of processes draws the same levels and the same random numbers (the gradient
of the first update is the same to 1e-5; rounding parts the runs later), and resuming needs no RNG.

Differs from the paper: the defaults serve a tiny model instead of a pretrained one: a cold
start; one AdamW (betas .9/.95, no weight decay) and one learning rate for actor and critic,
annealed together with the entropy bonus (paper: two trunks, 1e-6 and 1e-5, betas .9/.999, decay
0.01, all constant); temperature 1 without top-p (paper: 0.7 with top-p 0.95, which its log-probs do
not model); rewards scaled; evaluation on levels that training never sees, greedy beside sampled.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import hygrow
from envs import env_class, make_env
from large import (
    AdapterReference,
    clip_gradients,
    explained,
    gathered,
    halving,
    lighten,
    like,
    load_adapter,
    peak_flops,
    peak_memory,
    shard,
    update_flops,
    whole,
)
from models import Dialogue, Transcript, blank, collate, load_policy, make_tiny, save_policy, take
from workers import remote_envs, side_by_side


@dataclass(frozen=True)
class Args:
    env: str = "FrozenLake"
    """World to play: FrozenLake, Sokoban (envs.py), ViRL (virl.py), Navigation, Thor
    (navigation.py), PrimitiveSkill or ManiSkill (skills.py); the last four need a package, which an
    error names."""
    env_options: tuple[str, ...] = ()
    """Options of the world as name=value, e.g. size=6 slippery=True random_corners=True."""
    env_workers: int = 0
    """Processes of their own for the environments, for each training process: for simulators that
    crash, hang or are slow (workers.py); 0: all in the training process."""
    env_limit: float = 60.0
    """Seconds after which a worker that does not answer is restarted; its episodes are dropped."""
    max_turns: int = 5
    """Turns an episode; a longer episode is truncated."""
    model: str = "tiny"
    """"tiny" (built here, no download), or a folder or hub id of Qwen2-VL, Qwen2.5-VL, Qwen3-VL.
    A checkpoint (runs/NAME/step_...) goes with --cold-start 0, else it is cold-started again."""
    random_init: bool = False
    """Random weights in the shape of --model, whose folder then needs none: to measure memory and
    speed."""
    critic: str = "shared"
    """"shared": value head on the policy's trunk; "separate" (paper): on a trunk of its own."""
    critic_lr: float = 0.0
    """Learning rate of value head and separate critic, annealed like --lr; 0: that of --lr; the
    paper: 1e-5."""
    freeze_vision: bool = False
    """Do not train the vision tower; each frame is then encoded once (large.lighten)."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank in the text layers, and the value head, alone; checkpoints
    hold the merged weights (large.lighten). 0: all weights."""
    grad_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    shard: bool = False
    """Cut weights, gradients and moments over all processes (FSDP2, large.shard)."""
    bf16: bool = False
    """Compute layers in bfloat16; what is optimised, log-softmax, values and losses stay float32."""
    offload: bool = False
    """With --shard: keep the shards in CPU memory."""
    max_context: int = 0
    """Tokens of a conversation at which its episode ends, as at --max-turns, before a frame that
    may not fit; 0: what the model was made for."""
    alpha: float = 0.5
    """Weight of the turn-level advantage and return in [0, 1]; formula in hygrow.hybrid_gae."""
    gamma: float = 0.99
    """Discount per generated token in [0, 1]."""
    lam: float = 1.0
    """GAE lambda of the turn chain in [0, 1]."""
    token_lam: float = 1.0
    """GAE lambda of the token chain in [0, 1]."""
    anchor: str = "last"
    """Token of a turn at which the turn chain reads the value: "last" (paper) or "first"."""
    bootstrap_truncated: bool = False
    """Continue a truncated episode with the critic's value; off, as in the paper: the turn limit is
    part of the task and the conversation shows the turn number, so the limit is a true end."""
    clip: float = 0.2
    """PPO clip range of the probability ratio (hygrow.policy_loss)."""
    dual_clip: float = 3.0
    """Bound of the loss for negative advantages, above 1; 0 turns it off (hygrow.policy_loss)."""
    value_clip: float = 0.5
    """Clip range of the value update in scaled reward units (hygrow.value_loss)."""
    value_coef: float = 0.5
    """Weight of the value loss (which holds a factor 1/2 of its own)."""
    entropy_coef: float = 0.005
    """Weight of the entropy bonus (nats per token), annealed like --lr; the paper: 0.001."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the cold-start policy in the reward (k1); the paper: 0.001."""
    reward_scale: float = 0.1
    """Factor on the environment's rewards, so that a solved episode is worth about 1."""
    num_envs: int = 192
    """Episodes an iteration, over all processes."""
    epochs: int = 2
    """Passes over the episodes of an iteration."""
    minibatches: int = 4
    """Optimiser steps a pass."""
    micro_batch: int = 12
    """Episodes a forward pass on one process; changes memory and speed, not the gradient."""
    max_tokens: int = 48
    """Longest reply in tokens; a longer one is cut and counted."""
    temperature: float = 1.0
    """Sampling temperature; the policy that is trained is softmax(logits / temperature)."""
    lr: float = 2e-4
    """AdamW learning rate, annealed linearly towards a tenth; the paper: 1e-6 for a 3B model."""
    max_grad_norm: float = 1.0
    """Gradient clipping; an update whose gradient is not finite is skipped and counted."""
    iterations: int = 50
    """Iterations of reinforcement learning."""
    cold_start: int = 700
    """Supervised steps (of 16 demonstrations) before; 0 for a model that knows the format. Their
    learning rate is 3e-3 for the tiny model, else --lr."""
    demo_noise: float = 0.6
    """Share of random actions in the demonstrations; more leaves more to reinforcement learning."""
    eval_every: int = 10
    """Iterations between evaluations on held-out levels, sampled and greedy."""
    eval_episodes: int = 256
    """Episodes of an evaluation; the last one uses twice as many."""
    save_every: int = 10
    """Iterations between checkpoints; the newest two are kept."""
    seed: int = 1
    """Seed of weights, levels and sampling."""
    run_dir: str = ""
    """Folder of the run; default runs/ENV__alphaA__seedS__TIME."""
    resume: str = ""
    """Run folder to continue; flags given beside it override the run's own."""
    threads: int = 1
    """Torch threads a process; on shared cores more than 1 is often slower."""

    def __post_init__(self):
        def need(names: str, fits, what: str):
            for name in names.split():
                if not fits(getattr(self, name)):
                    raise ValueError(f"{flag(name)} {getattr(self, name)!r} {what}")

        need("alpha gamma lam token_lam demo_noise", lambda x: 0 <= x <= 1, "is outside [0, 1]")
        need("max_turns num_envs epochs minibatches micro_batch max_tokens iterations eval_every "
             "eval_episodes save_every threads", lambda x: x >= 1, "must be at least 1")
        need("clip value_clip temperature lr max_grad_norm reward_scale",
             lambda x: 0 < x < math.inf, "must be above 0 and finite")
        need("env_limit", lambda x: 0 < x < math.inf, "must be above 0 and finite")
        need("value_coef entropy_coef kl_coef cold_start seed env_workers critic_lr lora_rank "
             "max_context",
             lambda x: 0 <= x < math.inf, "must be 0 or more, and finite")
        need("critic", ("shared", "separate").__contains__, "is neither 'shared' nor 'separate'")
        need("anchor", ("last", "first").__contains__, "is neither 'last' nor 'first'")
        need("dual_clip", lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for none")
        need("num_envs", lambda x: x % self.minibatches == 0, "cannot be split into "
             f"--minibatches {self.minibatches}; use a multiple of {self.minibatches}")
        if self.offload and not self.shard:
            raise ValueError("--offload needs --shard")
        if self.lora_rank and self.shard:
            raise ValueError(f"--lora-rank {self.lora_rank} does not go with --shard: adapters "
                             "leave little to cut; leave out one of them")
        if self.random_init and self.model == "tiny":
            raise ValueError("--random-init needs --model: tiny has random weights in any case")
        try:
            self.make_env("train")  # refuses unknown names and options before anything is spent
        except ImportError as error:  # the package of a simulator
            raise ValueError(f"--env {self.env}: {error}") from error

    def make_env(self, split: str):
        """The world that --env, --env-options and --max-turns describe."""
        return make_env(self.env, split=split, max_turns=self.max_turns, **self.options())

    def make_envs(self, split: str, count: int) -> list:
        """So many of them, in --env-workers processes."""
        if not self.env_workers:
            return [self.make_env(split) for _ in range(count)]
        return remote_envs(self.env, count, processes=self.env_workers, limit=self.env_limit,
                           split=split, max_turns=self.max_turns, **self.options())

    def options(self) -> dict:
        """--env-options as keyword arguments of the world."""
        options, world = {}, env_class(self.env)
        for option in self.env_options:
            name, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"--env-options {option!r} is not of the form name=value")
            if name in FIXED:
                raise ValueError(f"--env-options {name} is not set there: {FIXED[name]}")
            known = [key for key in world.options if key not in FIXED]
            if name not in known:
                raise ValueError(f"--env-options {name!r} is no option of {self.env}; it has "
                                 f"{', '.join(known)}")
            options[name] = parse_value(value)
        return options


FIXED = {  # what --env-options leaves alone
    "name": "see --env", "max_turns": "see --max-turns",
    "render_mode": "it changes nothing here", "split": "training and evaluation choose it",
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_value(text: str):
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except json.JSONDecodeError:
        return text


# ---------------------------------------------------------------------------------------- ranks
def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over all processes, in place; the identity with one process."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def reduce_gradients(parameters: list) -> None:
    """SUM, not mean: every loss is already divided by a count over all processes.

    What has no gradient on any process (an empty minibatch, an unused head) keeps none, as it would
    with one process: zeros would let the optimiser go on by its momentum.
    """
    if not dist.is_initialized():
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    having = torch.tensor([float(p.grad is not None) for p in parameters]).to(grads[0])
    flat = all_reduce_sum(torch.cat([having, *(g.flatten() for g in grads)]))
    having, *grads = flat.split([len(grads), *(g.numel() for g in grads)])
    for p, g, some in zip(parameters, grads, having.tolist()):
        p.grad = g.view_as(p) if some else None


def seeded(*key: int) -> int:
    """A 63-bit seed from a tuple of whole numbers; different keys of one length give
    unrelated streams."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


ACT, DEMO, EVAL = 0, 1, 2  # what a stream of random numbers or levels is for


# -------------------------------------------------------------------------------------- collect
STATS = ["return", "success", "turns", "valid", "tokens", "cut", "context", "fault", "full"]


@torch.no_grad()
def collect(policy, envs, rows, args, first_seed, uniforms, temperature):
    """Play one episode in each env: row i of the global batch on level `first_seed` + i.

    rows: the global indices of `envs`; uniforms [global rows, turns, tokens]: the sampling noise.
    Returns (batch, stats): `models.collate`'s tensors [B, T] and float64 [B, 9], a row an episode
    (STATS). An env that raises, or pays what is not a number, ends its episode, which is counted
    and left out of the update. A conversation that may not hold another frame and reply ends, too.
    """
    most = args.max_context or policy.lm.config.get_text_config().max_position_embeddings
    uniforms = uniforms[rows]
    dialogue = Dialogue(policy, len(envs), envs[0].system_prompt)
    stats = torch.zeros(len(envs), len(STATS), dtype=torch.float64)
    observations, live, turn = [None] * len(envs), [], 0

    def attempt(i: int, action, *inputs):
        try:
            return i, action(*inputs)
        except Exception as fault:  # a simulator may fail in any way; training goes on
            print(f"episode dropped, {args.env} raised {fault!r}", file=sys.stderr, flush=True)
            stats[i, STATS.index("fault")] = 1

    def begin(i: int):
        return attempt(i, lambda env, seed: env.reset(seed=seed), envs[i], first_seed + rows[i])

    for i, start in filter(None, side_by_side(begin, envs, range(len(envs)))):
        observations[i] = start[0]
        live.append(i)
    while live:
        texts, images = zip(*[(observations[i]["text"], observations[i]["image"]) for i in live])
        dialogue.observe(live, texts, images)
        replies = dialogue.reply(args.max_tokens, uniforms[live, turn], temperature)
        answers, going = dict(zip(live, replies)), []

        def advance(i: int):
            return attempt(i, finite_step, envs[i], answers[i])

        for i, step in filter(None, side_by_side(advance, envs, live)):  # None: counted above
            script = dialogue.transcripts[i]
            observations[i], reward, ended, truncated, info = step
            script.rewards[-1] = reward * args.reward_scale
            stats[i, :4] += torch.tensor([reward, info["success"], 1, info["valid"]])
            longest = max(map(len, script.ids)) + args.max_tokens + 1  # the first has the rules
            if not (ended or truncated) and script.length + longest > most:
                truncated = True  # whole turns, never a part of an image
                stats[i, STATS.index("full")] = 1
            if not (ended or truncated):
                going.append(i)
            elif truncated and not ended and args.bootstrap_truncated:
                script.truncated = True
                image = policy.process_images([observations[i]["image"]])[0]
                policy.show(script, "", observations[i]["text"], *image)
        live, turn = going, turn + 1
    for script in dialogue.transcripts:
        if not script.length:
            blank(policy, script)
    batch = collate(dialogue.transcripts)
    dropped = stats[:, STATS.index("fault")] > 0
    for name in ("mask", "turn_end", "rewards"):
        batch[name][dropped] = 0
    stats[dropped, :4] = 0
    stats[:, STATS.index("tokens")] = batch["mask"].sum(1).double()
    stats[:, STATS.index("cut")] = torch.tensor([float(t.cut) for t in dialogue.transcripts])
    stats[:, STATS.index("context")] = batch["length"].double()
    return batch, stats


def finite_step(env, reply: str):
    step = env.step(reply)
    if not math.isfinite(step[1]):
        raise FloatingPointError(f"reward {step[1]}")
    return step


def noise(args, episodes: int, *key: int) -> torch.Tensor:
    """One number in [0, 1) for each token of each turn of the global batch, from `key`."""
    generator = torch.Generator().manual_seed(seeded(*key))
    shape = (episodes, args.max_turns, args.max_tokens)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def evaluate(policy, args, envs, rank, world, episodes, temperature) -> dict:
    """Means over the first `episodes` held-out levels, over all processes.

    The same levels and the same random numbers at every call and for every --seed.
    """
    total = torch.zeros(len(STATS) + 1, dtype=torch.float64)
    mine, uniforms = list(range(rank, episodes, world)), noise(args, episodes, EVAL)
    for start in range(0, len(mine), len(envs)):
        rows = mine[start : start + len(envs)]
        stats = collect(policy, envs[: len(rows)], rows, args, 0, uniforms, temperature)[1]
        total += torch.cat([stats.sum(0), torch.tensor([len(rows)])])
    total = dict(zip(STATS + ["episodes"], all_reduce_sum(total).tolist()))
    played = max(total["episodes"] - total["fault"], 1)
    return {"success": total["success"] / played, "return": total["return"] / played,
            "turns": total["turns"] / played, "valid": total["valid"] / max(total["turns"], 1),
            "env_faults": total["fault"], "context_full": total["full"]}


# ----------------------------------------------------------------------------------- cold start
def expert_episode(env, seed: int, noise: float):
    """Yield (observation, reply, reward) of the scripted expert with a share of random actions."""
    observation, done = env.reset(seed=seed)[0], False
    while not done:
        reply = env.expert_reply(noise=noise)
        following, reward, ended, truncated, _ = env.step(reply)
        yield observation, reply, reward
        observation, done = following, ended or truncated


def demonstrate(policy, env, seeds, args) -> list[Transcript]:
    """One expert episode a seed, as the transcripts a model would have left."""
    episodes = [list(expert_episode(env, seed, args.demo_noise)) for seed in seeds]
    frames = [observation["image"] for episode in episodes for observation, _, _ in episode]
    images = iter(policy.process_images(frames) if frames else [])
    scripts = []
    for episode in episodes:
        scripts.append(script := Transcript())
        for observation, reply, reward in episode:
            policy.show(script, env.system_prompt, observation["text"], *next(images))
            ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
            script.reply(torch.tensor(ids + [policy.eos]))
            script.rewards[-1] = reward * args.reward_scale
    return scripts


def cold_start(policy, args, rank, world, log) -> None:
    """Imitate noisy demonstrations: format and perception, and a critic fitted to their returns."""
    size = -(-16 // world) * world  # demonstrations a step, over all processes, as many on each
    peak = 3e-3 if args.model == "tiny" else args.lr  # from scratch; pretrained weights would break
    env = args.make_env("train")
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
    bar = tqdm(range(args.cold_start), desc="cold start", disable=rank > 0, mininterval=1)
    for step in bar:
        first = seeded(DEMO, args.seed) % 10**9 + step * size
        seeds = range(first + rank, first + size, world)
        batch = collate(demonstrate(policy, env, seeds, args))
        returns = hygrow.token_gae(batch["rewards"], batch["values"], batch["mask"],
                                   gamma=args.gamma, lam=1.0)[1]
        batch["returns"] = returns
        tokens = all_reduce_sum(batch["mask"].sum().to(policy.device))
        loss = torch.zeros(2, device=policy.device)
        order = batch["length"].argsort()  # rows of a like length together: less padding
        for micro in order.split(min(args.micro_batch, max(len(order) // 2, 1))):
            part = take(batch, micro.tolist())
            out = policy(part, args.temperature)
            cross_entropy = -out["logprobs"].sum() / tokens
            error = out["values"] - part["returns"].to(policy.device)
            value = hygrow.masked_mean(error**2, part["mask"].to(policy.device), tokens)
            (cross_entropy + 0.5 * value).backward()
            loss += torch.stack([cross_entropy, value]).detach()
        if not args.shard:  # FSDP's backward pass has summed them
            reduce_gradients(parameters)
        norm = clip_gradients(parameters, args.max_grad_norm)
        if not math.isfinite(norm):
            raise RuntimeError(f"cold start step {step}: the gradient is {norm}, not finite")
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / 30, 1 - step / args.cold_start)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = all_reduce_sum(loss).tolist()
        bar.set_postfix(cross_entropy=f"{loss[0]:.3f}", refresh=False)
        if rank == 0 and (step % 20 == 0 or step + 1 == args.cold_start):
            log({"cold_start/step": step, "cold_start/cross_entropy": loss[0],
                 "cold_start/value_loss": loss[1], "cold_start/grad_norm": norm},
                step - args.cold_start)  # on TensorBoard's axis before iteration 0


# ------------------------------------------------------------------------------------- score
@torch.no_grad()
def score(policy, reference, batch, args) -> None:
    """Add to the batch, in place, what generation did not leave behind.

    Log-probs and the values of a shared critic were read while sampling (a test pins that the
    training forward gives the same within 1e-4); the values of a separate critic, the KL penalty
    and the value after a truncated episode are read here. In bfloat16 one token at a time does not
    round as a whole row does: all is read again, so that the first probability ratio is 1.
    """
    batch["bootstrap"] = torch.zeros(len(batch["mask"]))
    batch["kl"] = torch.zeros_like(batch["mask"])
    for rows in torch.arange(len(batch["mask"])).split(args.micro_batch):
        part = take(batch, rows.tolist())
        steps = part["mask"].shape[1]
        if policy.critic is not None or args.bf16:
            out = policy(part, args.temperature)
            batch["values"][rows, :steps] = out["values"].cpu()
            if args.bf16:
                part["logprobs"] = batch["logprobs"][rows, :steps] = out["logprobs"].cpu()
        if reference is not None:
            logprobs = reference(part, args.temperature)["logprobs"].cpu()
            kl = hygrow.kl_terms(part["logprobs"], logprobs, part["mask"])[0]  # k1
            batch["kl"][rows, :steps] = kl
            batch["rewards"][rows, :steps] -= args.kl_coef * kl
        if part["truncated"].any():
            late = policy.last_values(part).cpu()
            batch["bootstrap"][rows] = torch.where(part["truncated"], late, 0)


# ------------------------------------------------------------------------------- run directory
def save_checkpoint(run: Path, iteration: int, policy, optimizer, seconds: float) -> None:
    """All that a resumed run needs, written aside, then renamed: a kill leaves the last one.

    Every process calls it, rank 0 writes."""
    final, aside = run / f"step_{iteration:06d}", run / f"step_{iteration:06d}.tmp"
    write = not dist.is_initialized() or dist.get_rank() == 0
    if write:
        shutil.rmtree(aside, ignore_errors=True)
    save_policy(policy, aside, write)
    names, moments = {p: name for name, p in policy.named_parameters()}, {}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            value = whole(value)  # with --shard every process has its piece
            if write:
                moments[f"{names[p]}.{key}"] = value.contiguous().cpu()
    if not write:
        return
    save_file(moments, aside / "optimizer.safetensors")
    state = {"iteration": iteration, "seconds": seconds}
    (aside / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(p for p in run.glob("step_*") if (p / "state.json").exists() and p.suffix == "")


def load_checkpoint(optimizer, policy, folder: Path) -> dict:
    """Restore the optimiser's moments; returns the checkpoint's state.json."""
    try:
        moments = load_file(folder / "optimizer.safetensors")
        state = json.loads((folder / "state.json").read_text())
        if not {"iteration", "seconds"} <= state.keys():
            raise OSError("state.json lacks iteration or seconds")
        if not (folder / "critic.safetensors").exists():  # else the value head would be a new one
            raise OSError("no critic.safetensors")
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder} is damaged ({error}); delete it, and --resume goes on from the one before"
        ) from error
    names = {name: p for name, p in policy.named_parameters()}
    for key, value in moments.items():
        name, _, moment = key.rpartition(".")
        p = names[name]
        optimizer.state[p][moment] = value if moment == "step" else like(p, value)
    return state


class Log:
    """metrics.jsonl and TensorBoard, on rank 0."""

    def __init__(self, run: Path, last: int | None):
        """last: the iteration resumed from; what an earlier sitting logged after it is cut off."""
        self.path = run / "metrics.jsonl"
        kept = []
        if last is not None and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # a kill may tear the last one
            kept = [line for line in whole if json.loads(line).get("iteration", 0) <= last]
        self.path.write_text("".join(kept))
        purge = None if last is None else last + 1
        self.board = SummaryWriter(run / "tensorboard", purge_step=purge)

    def __call__(self, metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                metrics[name] = None  # JSON knows no NaN; optim/skipped counts where it came from
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        for name, value in metrics.items():
            if "/" in name and value is not None:
                self.board.add_scalar(name, value, step)


def setup(args):
    """Process group, device, run folder -> (rank, world, device, run, checkpoint or None)."""
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    rank, cuda = int(os.environ.get("RANK", 0)), torch.cuda.is_available()
    if args.num_envs // args.minibatches % world:
        raise ValueError(
            f"--num-envs {args.num_envs} / --minibatches {args.minibatches} cannot be split over "
            f"{world} processes; make the quotient a multiple of {world}"
        )
    if cuda and local >= torch.cuda.device_count():
        raise ValueError(f"process {local} has no GPU: there are {torch.cuda.device_count()}")
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.shard and "MASTER_ADDR" not in os.environ:
        raise ValueError("--shard needs torchrun: torchrun --nproc-per-node N train_hygae.py ...")
    if (world > 1 or args.shard) and not dist.is_initialized():  # statistics are reduced on the CPU
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    default = f"runs/{args.env}__alpha{args.alpha}__seed{args.seed}__{int(time.time())}"
    run = [args.resume or args.run_dir or default]
    if world > 1:
        dist.broadcast_object_list(run)  # rank 0's clock names the run
    run = Path(run[0])
    found = checkpoints(run) if args.resume else []
    for folder in run.glob("step_*") if args.resume and rank == 0 else ():
        if folder not in found and folder.suffix == "":
            print(f"{folder} has no state.json: it is passed over", file=sys.stderr)
    if not args.resume and (run / "args.json").exists():
        raise ValueError(f"--run-dir {run} holds a run already; --resume {run} goes on with it")
    if found and int(found[-1].name[5:]) >= args.iterations:
        raise ValueError(
            f"--resume {run}: already at iteration {int(found[-1].name[5:])} of {args.iterations}; "
            "give a larger --iterations to go on"
        )
    if world > 1:
        dist.barrier()
    return rank, world, device, run, found[-1] if found else None


def vocabulary(env) -> list[str]:
    """What a world and its expert say: the words that the tiny model's tokenizer gets."""
    texts = [env.system_prompt, "Invalid reply. "]
    for seed in range(200) if not hasattr(env, "texts") else ():
        for observation, reply, _ in expert_episode(env, seed, noise=0.5):
            texts += [observation["text"], reply]
    return texts + getattr(env, "texts", [])


def build_policy(args, rank, device, run: Path, checkpoint):
    """The policy of a checkpoint, of --model, or the tiny one, which rank 0 makes and all load."""
    source = str(checkpoint or args.model)
    if source == "tiny":
        source = str(run / "tiny")
        if rank == 0:
            make_tiny(source, vocabulary(args.make_env("train")), args.seed)
        if dist.is_initialized():
            dist.barrier()
    if checkpoint and args.lora_rank:  # its merged weights are rounded: adapters go on their base
        source = str(run / "tiny") if args.model == "tiny" else args.model
    home = "cpu" if args.shard else device  # shards are cut on the CPU: a whole may not fit a GPU
    try:
        policy = load_policy(source, critic=args.critic, seed=args.seed, device=home,
                             random_init=args.random_init and not checkpoint)
        lighten(policy, freeze_vision=args.freeze_vision, lora_rank=args.lora_rank,
                grad_checkpointing=args.grad_checkpointing, seed=args.seed)
        if checkpoint and args.lora_rank:
            saved = checkpoint / "adapter.safetensors"
            load_adapter(policy, load_file(saved), saved)
    except (ValueError, OSError, SafetensorError) as error:
        if not checkpoint:
            raise
        raise ValueError(f"{checkpoint} is damaged ({error}); delete it, and --resume goes on "
                         "from the one before") from error
    place(policy, args, device)
    return policy


def place(policy, args, device) -> None:
    """Cut it over the processes, or leave it whole on its device."""
    policy.device = torch.device(device)
    if args.shard:
        shard(policy, bf16=args.bf16, offload=args.offload)
    policy.bf16 = args.bf16 and not args.shard


def save_reference(policy, rank, run: Path) -> None:
    """Keep the policy that --kl-coef holds to: as it was before reinforcement learning.

    Differs from the paper: that is the policy after the cold start, where there is one.
    """
    if rank == 0:
        shutil.rmtree(run / "reference.tmp", ignore_errors=True)
    save_policy(policy, run / "reference.tmp", write=rank == 0)
    if rank == 0:
        shutil.rmtree(run / "reference", ignore_errors=True)
        os.replace(run / "reference.tmp", run / "reference")
    if dist.is_initialized():
        dist.barrier()


def load_reference(policy, args, device, run: Path):
    folder = run / "reference"
    if not folder.exists():
        raise ValueError(f"--kl-coef needs {folder}, which only a run begun with it has; "
                         "go on with --kl-coef 0")
    if args.lora_rank:
        return AdapterReference(policy, load_file(folder / "adapter.safetensors"))
    home = "cpu" if args.shard else device
    reference = load_policy(str(folder), critic=args.critic, device=home).requires_grad_(False)
    reference.critic = None  # only its log-probs are asked for
    reference.encode_once = policy.encode_once  # it gets the same features
    place(reference, args, device)
    return reference


# ----------------------------------------------------------------------------------------- main
def main(args: Args) -> dict:
    """Train; returns the last evaluation. The loop is meant to be read from top to bottom."""
    try:
        rank, world, device, run, checkpoint = setup(args)
        policy = build_policy(args, rank, device, run, checkpoint)
        run.mkdir(parents=True, exist_ok=True)  # only now: a wrong --model leaves no folder behind
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = make_optimizer(policy, args)
        state = load_checkpoint(optimizer, policy, checkpoint) if checkpoint else None
        reference = None
        if checkpoint and args.kl_coef:
            reference = load_reference(policy, args, device, run)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train_hygae.py: {error}") from error
    say = tqdm.write if rank == 0 else lambda *_: None
    log = Log(run, state["iteration"] if state else None) if rank == 0 else None
    if rank == 0:  # only now: a run that cannot start leaves nothing that forbids the next try
        (run / "args.tmp").write_text(json.dumps(asdict(args) | {"resume": ""}, indent=1))
        os.replace(run / "args.tmp", run / "args.json")
    rows = list(range(rank, args.num_envs, world))  # this process's rows of the global batch
    envs = args.make_envs("train", len(rows))
    eval_envs = args.make_envs("eval", -(-args.eval_episodes // world))
    size, trained = sum(p.numel() for p in policy.parameters()), sum(p.numel() for p in parameters)
    some = f" ({trained:,} trained)" if trained < size else ""
    say(f"{args.env}, {args.model} model, {size:,} parameters{some}, {world} process(es), "
        f"folder {run}")
    began, first, evaluation = time.time(), 1, {}

    def measure(label: str, iteration: int, episodes: int) -> dict:
        """Held-out success, sampled at --temperature and greedy; printed and logged."""
        with gathered(policy):
            sampled = evaluate(policy, args, eval_envs, rank, world, episodes, args.temperature)
            greedy = evaluate(policy, args, eval_envs, rank, world, episodes, 0)
        seconds = time.time() - began
        say(f"[{seconds:4.0f} s] {label}: held-out success {sampled['success']:.1%} sampled, "
            f"{greedy['success']:.1%} greedy; {sampled['valid']:.1%} of replies valid")
        result = {"iteration": iteration, "label": label, "time/seconds": seconds}
        result |= {f"eval/{name}": value for name, value in sampled.items()}
        result |= {f"eval/greedy_{name}": value for name, value in greedy.items()}
        if rank == 0:
            log(result, iteration)
        return result

    if state:
        first, began = state["iteration"] + 1, time.time() - state["seconds"]
        say(f"resumed from {checkpoint}, {args.iterations - first + 1} iterations to go")
    else:
        if args.resume:
            say(f"{run} has no checkpoint yet: it starts again")
        if args.cold_start:
            measure("untrained", 0, min(64, args.eval_episodes))
            cold_start(policy, args, rank, world, log)
        evaluation = measure("cold start" if args.cold_start else "start", 0, args.eval_episodes)
        if args.kl_coef:
            save_reference(policy, rank, run)
            reference = load_reference(policy, args, device, run)
        save_checkpoint(run, 0, policy, optimizer, time.time() - began)

    micro_batch = args.micro_batch  # smaller on this process once it ran out of memory
    bar = tqdm(range(first, args.iterations + 1), initial=first - 1, total=args.iterations,
               desc="train", disable=rank > 0, mininterval=0.5)
    for iteration in bar:
        # 1. Collect: the policy plays one episode in each env -> padded tensors [B, T]
        began_collect = time.time()
        uniforms = noise(args, args.num_envs, ACT, args.seed, iteration)
        first_seed = seeded(ACT, args.seed) % 10**9 + iteration * args.num_envs
        with gathered(policy):  # --shard: no communication until the update
            batch, stats = collect(policy, envs, rows, args, first_seed, uniforms, args.temperature)

            # 2. Score: what sampling did not leave behind; nothing with a shared critic and no KL
            score(policy, reference, batch, args)
        mask, values = batch["mask"], batch["values"]

        # 3. Advantages: A = alpha A_turn + (1 - alpha) A_token, and the same mix for the returns G
        advantages, returns = hygrow.hybrid_gae(
            batch["rewards"], values, mask, batch["turn_end"], gamma=args.gamma, lam=args.lam,
            alpha=args.alpha, token_lam=args.token_lam, anchor=args.anchor,
            bootstrap=batch["bootstrap"],
        )
        batch["advantages"] = hygrow.whiten(advantages, mask, dist=dist if world > 1 else None)
        batch["returns"] = returns

        # 4. Update: epochs x minibatches; micro-batches and ranks only change memory and time
        began_update, skipped, norms, oom = time.time(), 0, [], 0
        losses = torch.zeros(6, dtype=torch.float64)  # summed in the order of LOSSES
        annealed = 1 - 0.9 * (iteration - 1) / args.iterations  # towards a tenth
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * annealed
        for _ in range(args.epochs):
            for mb_inds in torch.arange(len(rows)).chunk(args.minibatches):
                mb = mb_inds[batch["length"][mb_inds].argsort()].tolist()  # less padding
                tokens = all_reduce_sum(mask[mb].sum().to(device)).clamp(min=1)  # [] over all ranks
                update = partial(accumulate, policy, batch, mb, tokens, args, annealed)
                terms, micro_batch, failed = halving(update, micro_batch, parameters, args.shard)
                losses, oom = losses + terms, oom + failed
                if not args.shard:  # FSDP's backward pass has summed them
                    reduce_gradients(parameters)
                norms.append(clip_gradients(parameters, args.max_grad_norm))
                if math.isfinite(norms[-1]):
                    optimizer.step()
                else:  # the same on all ranks, since the gradient is summed
                    skipped += 1
                optimizer.zero_grad(set_to_none=True)
        if skipped == args.epochs * args.minibatches:
            raise RuntimeError(
                f"no update of iteration {iteration} had a finite gradient. The last checkpoint is "
                f"{checkpoints(run)[-1]}; go on from it with --resume {run} and a smaller --lr"
            )

        # 5. Log: sums over all episodes, tokens, minibatches and ranks, one division
        on = mask > 0
        error = (returns - values)[on].double()
        moments = [x for y in (advantages[on].double(), returns[on].double(), error)
                   for x in (y.sum(), (y**2).sum())]
        flops = torch.tensor(update_flops(policy, batch) * args.epochs)
        counts = [torch.tensor(len(rows)), on.sum(), batch["kl"].sum(), torch.tensor(oom), flops,
                  *moments]
        sums = torch.cat([stats.sum(0), torch.stack([x.double() for x in counts]), losses])
        metrics = iteration_metrics(all_reduce_sum(sums).tolist(), args.epochs * args.minibatches)
        now = time.time()
        update_s, peak = now - began_update, peak_flops(device)
        metrics["time/update_tflops"] /= update_s
        if peak:
            metrics["time/update_mfu"] = metrics["time/update_tflops"] * 1e12 / peak / world
        metrics |= {
            "iteration": iteration, "optim/skipped": skipped,
            "optim/grad_norm": sum(filter(math.isfinite, norms)) / (len(norms) - skipped),
            "optim/lr": optimizer.param_groups[0]["lr"], "time/seconds": now - began,
            "time/collect_s": began_update - began_collect, "time/update_s": update_s,
            "time/tokens_per_s": metrics["rollout/all_tokens"] / (now - began_collect),
            "time/collect_tokens_per_s": (metrics["rollout/all_tokens"]
                                          / (began_update - began_collect)),
            "time/update_tokens_per_s": args.epochs * metrics["rollout/all_tokens"] / update_s,
            "memory/peak_mb": peak_memory(device),
        }
        bar.set_postfix(success=f"{metrics['rollout/success']:.2f}",
                        ret=f"{metrics['rollout/return']:.2f}",
                        tok_s=f"{metrics['time/tokens_per_s']:.0f}", refresh=False)
        if rank == 0:
            log(metrics, iteration)
        if iteration % args.eval_every == 0 or iteration == args.iterations:
            last = iteration == args.iterations
            evaluation = measure("end" if last else f"iteration {iteration}", iteration,
                                 args.eval_episodes * (2 if last else 1))

        # 6. Save
        if iteration % args.save_every == 0 or iteration == args.iterations:
            save_checkpoint(run, iteration, policy, optimizer, time.time() - began)
    if rank == 0:
        log.board.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return evaluation


def make_optimizer(policy, args):
    """AdamW over what is trained: actor and critic in a group each, with their learning rates."""
    groups = [{"params": [], "initial_lr": args.lr, "lr": args.lr},
              {"params": [], "initial_lr": args.critic_lr or args.lr, "lr": args.lr}]
    for name, p in policy.named_parameters():
        if p.requires_grad:
            groups[not name.startswith("lm.")]["params"].append(p)
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95),
                             weight_decay=0.0)


LOSSES = ("loss/policy", "loss/value", "policy/entropy", "policy/approx_kl", "policy/clipfrac",
          "loss/total")


def accumulate(policy, batch, mb, tokens, args, annealed, size) -> torch.Tensor:
    """Add the gradient of one minibatch, `size` episodes a pass -> the terms of LOSSES [6].

    mb: row indices; tokens []: generated tokens of the minibatch over all ranks, which every term
    is divided by, so that neither `size` nor the number of ranks changes the sum.
    """
    losses = torch.zeros(6, dtype=torch.float64)
    for low in range(0, len(mb), size):
        part = take(batch, mb[low : low + size])
        old = {k: v.to(policy.device) for k, v in part.items() if torch.is_tensor(v)}
        new = policy(part, args.temperature)
        policy_loss = hygrow.policy_loss(
            new["logprobs"], old["logprobs"], old["advantages"], old["mask"],
            clip=args.clip, dual_clip=args.dual_clip or None, denominator=tokens,
        )
        value_loss = hygrow.value_loss(
            new["values"], old["values"], old["returns"], old["mask"],
            clip=args.value_clip, denominator=tokens,
        )
        entropy = hygrow.masked_mean(new["entropy"], old["mask"], tokens)
        loss = (policy_loss + args.value_coef * value_loss
                - args.entropy_coef * annealed * entropy)
        loss.backward()
        moved = hygrow.policy_stats(
            new["logprobs"], old["logprobs"], old["mask"], clip=args.clip, denominator=tokens,
        )
        terms = [policy_loss, value_loss, entropy, moved["approx_kl"], moved["clipfrac"], loss]
        losses += torch.stack([term.detach().double().cpu() for term in terms])
    return losses


def iteration_metrics(sums: list, updates: int) -> dict:
    """Means from the sums over all ranks; the README's table says each one's unit and reduction."""
    stats = dict(zip(STATS, sums))
    episodes, tokens, kl, oom, flops, a, a2, g, g2, e, e2, *losses = sums[len(STATS):]
    played = max(episodes - stats["fault"], 1)
    turns, tokens = max(stats["turns"], 1), max(tokens, 1)
    spread = max(g2 / tokens - (g / tokens) ** 2, 1e-12)
    return {
        **{f"rollout/{k}": stats[k] / played for k in ("return", "success", "turns", "tokens")},
        "rollout/valid": stats["valid"] / turns,
        "rollout/cut": stats["cut"] / turns,
        "rollout/env_faults": stats["fault"],
        "rollout/context_full": stats["full"],
        "optim/oom_retries": oom,
        "time/update_tflops": flops / 1e12,
        "rollout/all_tokens": stats["context"],
        "advantage/mean": a / tokens,
        "advantage/std": math.sqrt(max(a2 / tokens - (a / tokens) ** 2, 0)),
        "policy/reference_kl": kl / tokens,
        "value/return_mean": g / tokens,
        "value/explained_variance": 1 - (e2 / tokens - (e / tokens) ** 2) / spread,
        **{name: value / updates for name, value in zip(LOSSES, losses)},
    }


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume, on top of the arguments of that run."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", default="")
    resume = finder.parse_known_args(argv)[0].resume
    default = Args()
    if resume:
        saved = Path(resume) / "args.json"
        if not saved.exists():
            sys.exit(f"train_hygae.py: --resume {resume} holds no args.json; runs lie in runs/")
        try:
            stored = json.loads(saved.read_text())
            stored["env_options"] = tuple(stored["env_options"])
            default = Args(**stored)
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"train_hygae.py: {saved} does not fit this version or script ({error!r})")
    args = tyro.cli(Args, args=argv, default=default, description=__doc__)
    for name in ("env", "env_options", "model", "lora_rank", "freeze_vision") if resume else ():
        if getattr(args, name) != getattr(default, name):
            sys.exit(f"train_hygae.py: --resume cannot change {flag(name)} from "
                     f"{getattr(default, name)!r}; begin a new run (from its checkpoint, --model "
                     f"{resume}/step_..., where the words fit)")
    if args.resume and args.run_dir not in ("", default.run_dir):
        sys.exit("train_hygae.py: give --resume or --run-dir, not both")
    return args


if __name__ == "__main__":
    args = parse_args()
    with explained("train_hygae.py", args.resume or args.run_dir):
        main(args)
