"""GROW: GRPO for open worlds, on state-action samples instead of whole trajectories.

    torchrun train_grow.py                                   # Crafter, tiny model, laptop CPU
    torchrun --nproc-per-node 2 train_grow.py                # the same run on two processes
    torchrun train_grow.py --algo grpo_trajectory            # what it is compared with; ppo, rloo
    torchrun train_grow.py --env CraftingGrid --horizon 100
    torchrun train_grow.py --resume runs/NAME                # go on where a run stopped

Source: arXiv 2605.20246. The formulas are in hygrow.py, the worlds in openworld.py, the model in
models.py. The phases and names are those of train_hygae.py: a supervised cold start, then collect
-> score -> advantages -> update -> log -> save. A group is one task on one world, played by
--group-size members that start alike. Each step is a sample of its own: the last --history frames
and actions, and the action taken; so the context, and the memory of an update, do not grow with the
episode.

All randomness is a function of (--seed, iteration, global row), never of a rank or of what happened
before: see train_hygae.py.

Differs from the paper: the defaults serve a tiny model and short episodes. gamma 0.97 (paper: 0.995
at several hundred steps; what matters is gamma^horizon); balanced statistics (paper, read
literally: pooled, where long failures outweigh the rest of their group); clip range, group size,
epochs and learning rate, which it does not give; a KL penalty to the cold start; a probability
ratio for each token (paper, as we read it: for the action); Crafter instead of Minecraft.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
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
from envs import make_env
from large import (
    AdapterReference,
    clip_gradients,
    explained,
    gathered,
    halving,
    lighten,
    like,
    load_adapter,
    passes,
    peak_flops,
    peak_memory,
    shard,
    update_flops,
    whole,
)
from models import Dialogue, Transcript, collate, idle, load_policy, make_tiny, save_policy
from openworld import TASKS
from openworld import WORLDS as OPEN_WORLDS


@dataclass(frozen=True)
class Args:
    env: str = "Crafter"
    """World to play: Crafter or CraftingGrid (openworld.py)."""
    env_options: tuple[str, ...] = ("brief=True", "think=True", "marks=True")
    """Options of the world as name=value, in place of the defaults: for Crafter e.g. area=64, for
    CraftingGrid distractors=8, for both paraphrase=True or chunk=3 (openworld.py has all). The
    defaults help the tiny model: no rules in the prompt (it has them from its demonstrations), a
    thought before the action, cells that carry their place. A pretrained model should read the
    rules: give --env-options with nothing behind it, or with other options."""
    tasks: str = "seen"
    """Tasks that training goes through in turn: seen, unseen, all, a class (Crafter: embodied,
    craft, combat; CraftingGrid: gui) or a name (openworld.TASKS). The cold start demonstrates all
    of the world."""
    horizon: int = 50
    """Actions an episode; what is not done by then has failed."""
    image_size: int = 126
    """Side of a frame in px, 9 cells; 252 makes a cell one visual token of Qwen2-VL. The tiny model
    has one token a cell at any multiple of 9."""
    history: int = 1
    """Frames in a sample, with the replies between them."""
    model: str = "tiny"
    """"tiny" (built here, no download), or a folder or hub id of Qwen2-VL, Qwen2.5-VL, Qwen3-VL.
    A checkpoint (runs/NAME/step_...) goes with --cold-start 0, else it is cold-started again."""
    random_init: bool = False
    """Random weights in the shape of --model, whose folder then needs none: to measure memory and
    speed."""
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
    algo: str = "grow"
    """grow; or, on the same samples, grpo_trajectory (one advantage a trajectory), rloo (the same,
    leave-one-out, not divided by the deviation), ppo (value head; GAE in which a step is one
    action; all samples weigh alike)."""
    gamma: float = 0.97
    """Discount per step in [0, 1]: the last step of a success is worth 1, the first of H steps
    gamma^(H - 1); formula in hygrow.grow_rewards. --algo grow and ppo, and the critic's targets
    in the cold start."""
    lam: float = 0.95
    """GAE lambda per step in [0, 1], --algo ppo only."""
    statistics: str = "balanced"
    """Mean and deviation of a group: each sample counts alike (pooled), or each trajectory does,
    whatever its length (balanced); formula in hygrow.grow_advantages. --algo grow only."""
    ratio: str = "token"
    """Probability ratio of a token, averaged over the reply's, or of the whole action; formula in
    hygrow.grow_loss."""
    loss_on: str = "reply"
    """Tokens that the advantage reaches: the whole reply, or its answer alone (all behind <answer>,
    or all where there is none). With the answer alone only --kl-coef keeps thought and format."""
    drop_equal_groups: bool = False
    """Leave out groups whose members all succeeded, too (DAPO); groups that all failed have no
    signal in any case. Not with --algo ppo, which has no groups."""
    groups: int = 8
    """Groups an iteration, over all processes (a multiple of their number): a task and a world
    each."""
    group_size: int = 8
    """Members of a group."""
    clip: float = 0.2
    """PPO clip range of the probability ratio (hygrow.policy_loss)."""
    value_clip: float = 0.5
    """Clip range of the value update (hygrow.value_loss), --algo ppo only."""
    value_coef: float = 0.5
    """Weight of the value loss, --algo ppo only."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (nats per token), annealed like --lr."""
    kl_coef: float = 0.02
    """Weight of the KL penalty to the cold-start policy in the loss (k2), over the samples that the
    advantage uses; it keeps the format and the tasks that are not trained on."""
    epochs: int = 1
    """Passes over the samples of an iteration."""
    minibatches: int = 4
    """Optimiser steps a pass."""
    micro_batch: int = 64
    """Samples a forward pass on one process; changes memory and speed, not the gradient."""
    max_tokens: int = 24
    """Longest reply in tokens; a longer one is cut and counted."""
    temperature: float = 1.0
    """Sampling temperature; the policy that is trained is softmax(logits / temperature)."""
    lr: float = 5e-4
    """AdamW learning rate, annealed linearly towards a tenth."""
    max_grad_norm: float = 1.0
    """Gradient clipping; an update whose gradient is not finite is skipped and counted."""
    iterations: int = 32
    """Iterations of reinforcement learning."""
    cold_start: int = 3000
    """Supervised steps before reinforcement learning, each on 6 samples of each of 4 demonstrations
    (of one a process, where there are more than 4 processes); 0 for a model that knows the format.
    Their learning rate is 3e-3 for the tiny model, else --lr."""
    demo_noise: float = 0.75
    """Share of random actions in the demonstrations."""
    eval_every: int = 8
    """Iterations between evaluations on held-out worlds, seen and unseen tasks."""
    eval_episodes: int = 8
    """Episodes a task, in an evaluation between and in each diagnostic; success before and after
    reinforcement learning is measured on three times as many."""
    save_every: int = 8
    """Iterations between checkpoints; the newest two are kept, and the cold start's."""
    seed: int = 1
    """Seed of weights, worlds and sampling."""
    run_dir: str = ""
    """Folder of the run; default runs/ENV__ALGO__seedS__TIME."""
    resume: str = ""
    """Run folder to continue; flags given beside it override the run's own."""
    threads: int = 1
    """Torch threads a process; on shared cores more than 1 is often slower."""

    def __post_init__(self):
        def need(names: str, fits, what: str):
            for name in names.split():
                if not fits(getattr(self, name)):
                    raise ValueError(f"{flag(name)} {getattr(self, name)!r} {what}")

        need("gamma lam demo_noise", lambda x: 0 <= x <= 1, "is outside [0, 1]")
        need("horizon history groups group_size epochs minibatches micro_batch max_tokens "
             "iterations eval_every eval_episodes save_every threads", lambda x: x >= 1,
             "must be at least 1")
        need("clip value_clip temperature lr max_grad_norm",
             lambda x: 0 < x < math.inf, "must be above 0 and finite")
        need("value_coef entropy_coef kl_coef cold_start seed lora_rank",
             lambda x: 0 <= x < math.inf, "must be 0 or more, and finite")
        for name, known in (("algo", ("grow", "grpo_trajectory", "rloo", "ppo")),
                            ("statistics", ("pooled", "balanced")), ("ratio", ("token", "action")),
                            ("loss_on", ("answer", "reply"))):
            need(name, known.__contains__, f"is none of {', '.join(known)}")
        alone = self.algo in ("grpo_trajectory", "rloo") or (self.algo == "grow" and (
            self.gamma == 1 or self.drop_equal_groups))
        if self.group_size == 1 and alone:
            raise ValueError(f"--group-size 1 leaves --algo {self.algo} nothing to compare with: "
                             "every advantage would be 0; give 2 or more, or --algo grow with "
                             "--gamma below 1 and without --drop-equal-groups")
        if self.offload and not self.shard:
            raise ValueError("--offload needs --shard")
        if self.lora_rank and self.shard:
            raise ValueError(f"--lora-rank {self.lora_rank} does not go with --shard: adapters "
                             "leave little to cut; leave out one of them")
        if self.random_init and self.model == "tiny":
            raise ValueError("--random-init needs --model: tiny has random weights in any case")
        if self.algo == "ppo" and self.drop_equal_groups:
            raise ValueError("--drop-equal-groups does not go with --algo ppo, which has no groups")
        need("env", OPEN_WORLDS.__contains__, f"is none of {', '.join(OPEN_WORLDS)}")
        self.make_env("train", self.tasks)  # refuses unknown names before anything is spent

    def make_env(self, split: str, tasks: str, **changes):
        """The world that --env, --env-options, --horizon and --image-size describe."""
        options = {}
        for option in self.env_options:
            name, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"--env-options {option!r} is not of the form name=value")
            if name in FIXED:
                raise ValueError(f"--env-options {name} is not set there: {FIXED[name]}")
            known = [key for key in OPEN_WORLDS[self.env].options if key not in FIXED]
            if name not in known:
                raise ValueError(f"--env-options {name!r} is no option of {self.env}; it has "
                                 f"{', '.join(known)}")
            options[name] = parse_value(value)
        return make_env(self.env, split=split, tasks=tasks, horizon=self.horizon,
                        image_size=self.image_size, **options | changes)


FIXED = {  # what --env-options leaves alone
    "name": "see --env", "tasks": "see --tasks", "horizon": "see --horizon",
    "image_size": "see --image-size", "render_mode": "it changes nothing here",
    "split": "training and evaluation choose it",
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


def numbers(*key: int, shape) -> torch.Tensor:
    """Numbers in [0, 1), float64, from `key`."""
    generator = torch.Generator().manual_seed(seeded(*key))
    return torch.rand(shape, generator=generator, dtype=torch.float64)


ACT, DEMO, EVAL, MIX = 0, 1, 2, 3  # what a stream of random numbers or worlds is for


# -------------------------------------------------------------------------------------- collect
@dataclass
class Sample:
    """One step of one episode: what was seen, what was answered."""

    frames: list  # uint8 [H, W, 3], the last --history
    texts: list  # the words that came with each
    past: list  # token ids of the replies between them
    ids: torch.Tensor | None = None  # [n] the reply's tokens
    logprobs: torch.Tensor | None = None  # [n]
    value: float = 0.0  # of the state before the reply
    images: list | None = None  # features of the frames, where a frozen tower encodes them once


@dataclass
class Episode:
    """One member's play, and where it stands."""

    env: object = None  # None: samples alone, as the advantages need no more
    observation: dict | None = None  # what is seen now
    info: dict | None = None
    samples: list = field(default_factory=list)
    success: bool = False
    moves: int = 0  # actions of the world; with --env-options chunk=N more than samples
    valid: int = 0  # replies that kept the format
    cut: int = 0  # replies stopped at --max-tokens
    tokens: int = 0  # of all samples, prompts and frames included
    fault: bool = False  # the world raised; nothing of this episode is learned from
    locked: list = field(default_factory=list)  # steps from where the target was in view: did the
    # distance to it not grow?
    found: int | None = None  # replies until a target was in view


def transcribe(policy, system: str, samples: list[Sample]) -> list[Transcript]:
    """Samples as conversations: (frame, reply) pairs, the last frame, and its reply where known."""
    new = [s for s in samples if s.images is None]
    images, scripts = iter(policy.process_images([f for s in new for f in s.frames])), []
    seen = [s.images or [next(images) for _ in s.frames] for s in samples]
    if policy.encode_once:
        for sample, pictures in zip(samples, seen):
            sample.images = pictures
    images = (picture for pictures in seen for picture in pictures)
    for sample in samples:
        scripts.append(script := Transcript())
        for i, text in enumerate(sample.texts):
            policy.show(script, system, text, *next(images))
            if i < len(sample.past):  # as context: it was learned from in its own sample
                ids = sample.past[i]
                script.context(ids, torch.arange(len(ids)).expand(3, -1), len(ids))
        if sample.ids is not None:
            values = torch.zeros(len(sample.ids))
            values[0] = sample.value
            script.reply(sample.ids, sample.logprobs, values)
    return scripts


@torch.no_grad()
def collect(policy, episodes: list[Episode], args, uniforms, temperature) -> None:
    """Play every started episode to its end, in place.

    uniforms [len(episodes), horizon, max_tokens]: the sampling noise. An env that raises ends its
    episode, which is counted and not learned from.
    """
    live = [i for i, episode in enumerate(episodes) if not episode.fault]
    past = [[] for _ in episodes]  # (frame, text, reply ids) of the steps before, newest last
    many = 4 * args.micro_batch  # without gradients more fit
    for step in range(args.horizon):
        going = []
        for rows in (live[low:low + many] for low in range(0, len(live), many)):
            samples = []
            for i in rows:
                recent = past[i][max(len(past[i]) + 1 - args.history, 0):]
                now = episodes[i].observation
                frames, texts, replies = ([x[k] for x in recent] for k in range(3))
                samples.append(Sample([*frames, now["image"]], [*texts, now["text"]], replies))
            system = episodes[rows[0]].env.system_prompt
            dialogue = Dialogue(policy, len(rows), system)
            dialogue.resume(scripts := transcribe(policy, system, samples))
            replies = dialogue.reply(args.max_tokens, uniforms[rows, step], temperature)
            for i, sample, script, reply in zip(rows, samples, scripts, replies):
                last = len(script.ids) - 1 - script.cut  # behind it only a closing token
                sample.ids, sample.logprobs = script.ids[last], script.logprobs[last]
                sample.value = float(script.values[last][0])
                past[i].append((sample.frames[-1], sample.texts[-1], torch.cat(script.ids[last:])))
                if play(episodes[i], reply, sample):
                    going.append(i)
                episodes[i].cut += script.cut
                episodes[i].tokens += sum(map(len, script.ids))
        live = going


def play(episode: Episode, reply: str, sample: Sample) -> bool:
    """One step of an episode -> whether it goes on."""
    before = episode.info["target_distance"]
    try:
        episode.observation, _, ended, truncated, info = episode.env.step(reply)
    except Exception as fault:  # a simulator may fail in any way; training goes on
        report(episode.env, "step", fault)
        episode.fault = True
        return False
    episode.samples.append(sample)
    episode.valid += info["valid"]
    episode.success, episode.moves, episode.info = bool(info["success"]), info["moves"], info
    if before is not None and not ended:
        after = info["target_distance"]
        episode.locked.append(after is not None and after <= before)
    if info["target_visible"] and episode.found is None:
        episode.found = len(episode.samples)
    return not (ended or truncated)


def report(env, where: str, fault: Exception) -> None:
    print(f"episode dropped, {type(env).__name__}.{where} raised {fault!r}", file=sys.stderr,
          flush=True)


def start(env, seed: int, task: str | None = None, away: bool = False) -> Episode:
    """Reset -> an Episode; with `fault` where that raised or could not be done.

    away: the player is moved to where no target is in view.
    """
    try:
        observation, info = env.reset(seed=seed, options={"task": task} if task else None)
        if away:
            observation, info = env.teleport_away(), info | {"target_distance": None}
    except Exception as fault:  # as in `play`
        report(env, f"reset({seed})", fault)
        return Episode(env, fault=True)
    return Episode(env, observation, info, fault=observation is None)


def start_groups(env, groups: list[int], args, first_seed: int) -> list[Episode]:
    """Each group's world is made once and cloned for its members: they start alike. The tasks come
    in turn, so that chance gives none of them more groups than another."""
    episodes = []
    for group in groups:
        seed = first_seed + group
        first = start(env, seed, env.tasks[seed % len(env.tasks)])
        for _ in range(args.group_size):
            member = env if first.fault else first.env.clone()
            episodes.append(Episode(member, first.observation, first.info, fault=first.fault))
    return episodes


# ------------------------------------------------------------------------------------- evaluate
def evaluate(policy, args, env, rank, world, episodes: int, *, temperature=None,
             away: bool = False) -> dict:
    """Play `episodes` of each task of a held-out world -> rates by task and by class.

    The k-th episode of a task has the same world and random numbers at every call, for every --seed
    and whatever `episodes` (up to 3 x --eval-episodes). temperature: default --temperature; 0 is
    greedy. away: the player is first moved to where no target is in view; tasks without a target
    are left out. Rates are means over tasks, of those with an episode whose world did not raise.
    """
    temperature = args.temperature if temperature is None else temperature
    plays = [(task, k) for task in env.tasks for k in range(episodes)]
    most = max(episodes, 3 * args.eval_episodes)
    noise = numbers(EVAL, shape=(len(env.tasks), most, args.horizon, args.max_tokens))
    noise = noise[:, :episodes].flatten(0, 1)
    mine = [i for i in range(rank, len(plays), world) if TASKS[plays[i][0]].target or not away]
    total = torch.zeros(len(env.tasks), 11, dtype=torch.float64)
    solved_in = torch.zeros(len(plays), dtype=torch.long)  # actions; 0 where it was not solved
    for low in range(0, len(mine), 64):
        rows = mine[low:low + 64]
        episodes = [start(env.clone(), plays[row][1], plays[row][0], away) for row in rows]
        collect(policy, episodes, args, noise[rows], temperature)
        for row, episode in zip(rows, episodes):
            task = env.tasks.index(plays[row][0])
            if episode.fault:
                total[task, 10] += 1
                continue
            total[task, :10] += torch.tensor([
                1, episode.success, episode.success * episode.moves, episode.moves, episode.valid,
                len(episode.samples), sum(episode.locked), len(episode.locked),
                episode.found is not None, episode.found or 0], dtype=torch.float64)
            solved_in[row] = episode.success * episode.moves
    total, solved_in = all_reduce_sum(total), all_reduce_sum(solved_in).view(len(env.tasks), -1)
    kinds = [TASKS[name].kind for name in env.tasks]
    rates = (total[:, 1] / total[:, 0]).tolist()  # nan where no episode counts
    fine, won, moves, played, valid, replies, locked, in_view, found, searched, faults = (
        total.sum(0).tolist())
    out = {"success": mean(rates), "steps": moves / won if won else None,
           "steps_per_success": played / won if won else None,
           "valid": valid / replies if replies else None, "env_faults": faults}
    if hasattr(env, "teleport_away"):  # else a target cannot be lost
        out["locking"] = locked / in_view if in_view else None
    if away:
        out |= {"reacquired": found / fine if fine else None,
                "reacquire_steps": searched / found if found else None}
    for kind in dict.fromkeys(kinds):
        out[f"success_{kind}"] = mean([r for r, k in zip(rates, kinds) if k == kind])
    out["by_task"] = {task: None if r != r else r for task, r in zip(env.tasks, rates)}
    out["solved_in"] = dict(zip(env.tasks, solved_in.tolist()))
    return out


def mean(values: list[float]) -> float | None:
    """Of those that are not nan; None where there are none."""
    known = [x for x in values if not math.isnan(x)]
    return sum(known) / len(known) if known else None


def held_out(args, tasks: str, trained: tuple = (), **changes):
    """The evaluation worlds of some tasks, less those that are trained on."""
    env = args.make_env("eval", tasks, **changes)
    env.tasks = tuple(task for task in env.tasks if task not in trained)
    return env


def diagnose(policy, args, tasks: str, trained: tuple, rank, world) -> dict:
    """The paper's diagnostics that need episodes of their own, and greedy success -> metrics.

    Crafter: from a start with no target in view, is one found again, after how many replies, and
    is the task then done? CraftingGrid: success among 0, 3 or 8 stacks that no recipe needs.
    """
    env, episodes = held_out(args, tasks, trained), args.eval_episodes
    greedy = evaluate(policy, args, env, rank, world, episodes, temperature=0.0)
    out = {"greedy_success": greedy["success"]}
    if hasattr(env, "teleport_away"):
        lost = evaluate(policy, args, env, rank, world, episodes, away=True)
        out |= {name: lost[name] for name in ("reacquired", "reacquire_steps")}
        out |= {"away_success": lost["success"], "away_steps": lost["steps"],
                "away_left_out": lost["env_faults"]}  # no place out of the target's sight
    for count in (0, 3, 8) if "distractors" in env.options else ():
        crowded = held_out(args, tasks, trained, distractors=count)
        among = evaluate(policy, args, crowded, rank, world, episodes)
        out[f"distractors_{count}_success"] = among["success"]
    return out


# ----------------------------------------------------------------------------------- cold start
def demonstrate(policy, env, seeds, args, each: int = 6) -> tuple[list[Sample], list[float]]:
    """`each` random samples of an expert episode a seed, and gamma^(H - t) x success of each."""
    samples, targets = [], []
    for seed in seeds:
        observation, done, steps = env.reset(seed=seed)[0], False, []
        while not done:
            reply = env.expert_reply(noise=args.demo_noise)
            steps.append((observation["image"], observation["text"], reply))
            observation, reward, ended, truncated, _ = env.step(reply)
            done = ended or truncated
        order = numbers(DEMO, seed, shape=len(steps)).argsort()[:each]
        for t in order.tolist():
            seen = steps[max(0, t - args.history + 1):t + 1]
            frames, texts, replies = ([x[k] for x in seen] for k in range(3))
            ids = [torch.tensor(row + [policy.eos]) for row in
                   policy.tokenizer(replies, add_special_tokens=False)["input_ids"]]
            samples.append(Sample(frames, texts, ids[:-1], ids[-1]))
            targets.append(reward * args.gamma ** (len(steps) - 1 - t))
    return samples, targets


def cold_start(policy, args, rank, world, log) -> None:
    """Imitate the scripted expert in all tasks, and fit the critic to the returns of its episodes.

    Reinforcement learning then sees --tasks alone: what became of the others is its generalisation.
    Differs from the paper: the value head is fitted for every --algo, through the trunk that it
    shares with the policy, so that all of them can begin from the same cold start.
    """
    size = max(4, world)  # demonstrations a step, over all processes
    peak = 3e-3 if args.model == "tiny" else args.lr  # from scratch; pretrained weights would break
    env = args.make_env("train", "all")
    parameters = [p for p in policy.parameters() if p.requires_grad]
    hidden = [p for name, p in policy.named_parameters() if args.model == "tiny" and p.ndim == 2
              and p.requires_grad and not args.shard  # it needs whole matrices
              and (".layers." in name or ".blocks." in name)]  # Muon learns to see sooner
    others = [p for p in parameters if not any(p is q for q in hidden)]
    optimizers = [torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.0)]
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, lr=peak, weight_decay=0.0,
                                           adjust_lr_fn="match_rms_adamw"))
    bar = tqdm(range(args.cold_start), desc="cold start", disable=rank > 0, mininterval=1)
    for step in bar:
        first = seeded(DEMO, args.seed) % 10**9 + step * size
        samples, targets = demonstrate(policy, env, range(first + rank, first + size, world), args)
        tokens = all_reduce_sum(torch.tensor([sum(len(s.ids) for s in samples), len(samples)]))
        tokens, loss = tokens.to(policy.device), torch.zeros(2, device=policy.device)
        starts = range(0, len(samples), args.micro_batch)
        for _ in range(len(starts), passes(len(starts), args.shard)):
            idle_pass(policy, None, args)
        for low in starts:
            chosen = samples[low:low + args.micro_batch]
            part = collate(transcribe(policy, env.system_prompt, chosen))
            out = policy(part, args.temperature)
            cross_entropy = -out["logprobs"].sum() / tokens[0]
            first_token = first_tokens(part["mask"]).to(policy.device)
            target = torch.tensor(targets[low:low + args.micro_batch], device=policy.device)
            error = out["values"] - target[:, None]
            value = hygrow.masked_mean(error**2, first_token, tokens[1])
            (cross_entropy + 0.5 * value).backward()
            loss += torch.stack([cross_entropy, value]).detach()
        if not args.shard:  # FSDP's backward pass has summed them
            reduce_gradients(parameters)
        norm = clip_gradients(parameters, args.max_grad_norm)
        if not math.isfinite(norm):
            raise RuntimeError(f"cold start step {step}: the gradient is {norm}, not finite")
        for optimizer in optimizers:
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


def answer_start(tokenizer, ids: torch.Tensor) -> int:
    """Which of a reply's tokens ids [n] is the first behind "<answer>"; 0 where that is missing or
    nothing follows. The tag may be one token or several."""
    pieces = tokenizer.batch_decode(ids[:, None])
    end = "".join(pieces).find("<answer>") + len("<answer>")
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    return int((starts < end).sum()) % len(ids) if end >= len("<answer>") else 0


def behind(mask: torch.Tensor, begin: list[int]) -> torch.Tensor:
    """The generated tokens of each row of mask [B, T] but the first begin[b]."""
    return mask * (mask.cumsum(1) > torch.tensor(begin, device=mask.device)[:, None])


def outside(gap: torch.Tensor, acted: torch.Tensor, args) -> torch.Tensor:
    """Share of each sample's probability ratios, exp(gap [S, T]) of its tokens `acted` or of the
    whole action, that lie outside 1 +- --clip -> [S]."""
    gap = gap * acted
    if args.ratio == "action":
        return ((gap.sum(1).exp() - 1).abs() > args.clip).float()
    return ((gap.exp() - 1).abs() > args.clip).float().sum(1) / acted.sum(1)


def first_tokens(mask: torch.Tensor) -> torch.Tensor:
    """The first generated token of each row of mask [B, T]."""
    return mask * (mask.cumsum(1) == 1)


# ----------------------------------------------------------------------------------- advantages
def select(played: list[Episode], rows: list[int], args) -> tuple[list, torch.Tensor, int]:
    """What an update learns from -> (global row, episode) of each, their groups [N], and how many
    groups were played at all.

    Left out: episodes whose world raised, and the groups in which no advantage or, with
    --drop-equal-groups, no difference of success is to be had. These still count in the mean over
    groups.
    Differs from the paper: it does not say what becomes of a member that is lost; here the rest of
    the group goes on without it.
    """
    kept = [(row, e) for row, e in zip(rows, played) if not e.fault]
    wins = {}
    for row, episode in kept:
        wins.setdefault(row // args.group_size, []).append(episode.success)
    idle = {g for g in wins if args.algo != "ppo" and not any(wins[g])}  # advantage 0 for all
    idle |= {g for g in wins if args.drop_equal_groups and all(wins[g])}
    used = [(row, e) for row, e in kept if row // args.group_size not in idle]
    return used, torch.tensor([row // args.group_size for row, _ in used]).long(), len(wins)


def advantages_of(episodes: list, group: torch.Tensor, played: int, args, ranks) -> tuple:
    """What each sample of the episodes is worth and weighs -> advantages, weights, returns [S], and
    the number of samples on all processes.

    group [N]: of each episode. played: how many groups were played here; the weights are
    1/played 1/G 1/H_i, over all processes. returns: the critic's target (--algo ppo), else 0.
    ranks: torch.distributed, or None for one process.
    """
    lengths = torch.tensor([len(e.samples) for e in episodes], dtype=torch.long)
    success = torch.tensor([float(e.success) for e in episodes], dtype=torch.float64)
    trajectory = torch.arange(len(episodes)).repeat_interleave(lengths)
    groups = group.repeat_interleave(lengths)
    rewards = hygrow.grow_rewards(success, lengths, gamma=args.gamma)
    weights, returns = hygrow.grow_weights(trajectory, groups), torch.zeros_like(rewards)
    if args.algo == "grow":
        advantages = hygrow.grow_advantages(rewards, trajectory, groups, statistics=args.statistics)
    elif args.algo == "grpo_trajectory":  # GROW with gamma 1 and balanced statistics: test_8_...
        outcome = hygrow.grow_rewards(success, lengths, gamma=1.0)
        advantages = hygrow.grow_advantages(outcome, trajectory, groups, statistics="balanced")
    elif args.algo == "rloo":
        advantages = hygrow.leave_one_out_advantages(success, group).repeat_interleave(lengths)
    else:
        width = int(lengths.max()) if len(lengths) else 1
        mask = torch.arange(width) < lengths[:, None]  # [N, H]: a step is a "token" here
        values = torch.zeros(len(episodes), width, dtype=torch.float64)
        values[mask] = torch.tensor([s.value for e in episodes for s in e.samples]).double()
        paid = torch.zeros_like(values)
        paid[torch.arange(len(episodes)), lengths - 1] = success
        a, g = hygrow.token_gae(paid, values, mask, gamma=args.gamma, lam=args.lam)
        advantages, returns = hygrow.whiten(a, mask, dist=ranks)[mask], g[mask]
        # Differs from the paper: it does not say how its PPO weighs; here all samples alike
        weights = torch.full_like(advantages, 1 / max(len(advantages), 1))
    used = torch.tensor([group.unique().numel(), len(advantages), played], dtype=torch.float64)
    total = all_reduce_sum(used.clone())
    # so far weights sum to 1 over what this process uses
    share = used[1] / total[1] if args.algo == "ppo" else used[0] / total[2]
    return advantages, weights * share if len(weights) else weights, returns, int(total[1])


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
    for old in checkpoints(run)[1:-2]:  # the first, the cold start, is where comparisons begin
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
        self.evaluated = any("label" in json.loads(line) for line in kept)
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
    if args.groups % world:
        raise ValueError(
            f"--groups {args.groups} cannot be split over {world} processes; use a multiple of "
            f"{world}"
        )
    if cuda and local >= torch.cuda.device_count():
        raise ValueError(f"process {local} has no GPU: there are {torch.cuda.device_count()}")
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.shard and "MASTER_ADDR" not in os.environ:
        raise ValueError("--shard needs torchrun: torchrun --nproc-per-node N train_grow.py ...")
    if (world > 1 or args.shard) and not dist.is_initialized():  # statistics are reduced on the CPU
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    default = f"runs/{args.env}__{args.algo}__seed{args.seed}__{int(time.time())}"
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


def build_policy(args, rank, device, run: Path, checkpoint):
    """The policy of a checkpoint, of --model, or the tiny one, which rank 0 makes and all load."""
    source = str(checkpoint or args.model)
    if source == "tiny":
        source = str(run / "tiny")
        if rank == 0:
            texts = args.make_env("train", args.tasks).texts
            make_tiny(source, texts, args.seed, patch=args.image_size // 9)
        if dist.is_initialized():
            dist.barrier()
    if checkpoint and args.lora_rank:  # its merged weights are rounded: adapters go on their base
        source = str(run / "tiny") if args.model == "tiny" else args.model
    home = "cpu" if args.shard else device  # shards are cut on the CPU: a whole may not fit a GPU
    try:
        policy = load_policy(source, seed=args.seed, device=home,
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

    Differs from the paper: GROW's objective has no such term.
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
    reference = load_policy(str(folder), device=home).requires_grad_(False)
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
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        state = load_checkpoint(optimizer, policy, checkpoint) if checkpoint else None
        reference = None
        if checkpoint and args.kl_coef:
            reference = load_reference(policy, args, device, run)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train_grow.py: {error}") from error
    say = tqdm.write if rank == 0 else lambda *_: None
    log = Log(run, state["iteration"] if state else None) if rank == 0 else None
    if rank == 0:  # only now: a run that cannot start leaves nothing that forbids the next try
        (run / "args.tmp").write_text(json.dumps(asdict(args) | {"resume": ""}, indent=1))
        os.replace(run / "args.tmp", run / "args.json")
    env, ranks = args.make_env("train", args.tasks), dist if world > 1 else None
    groups = list(range(rank, args.groups, world))  # this process's groups of the global batch
    rows = [g * args.group_size + i for g in groups for i in range(args.group_size)]
    size, trained = sum(p.numel() for p in policy.parameters()), sum(p.numel() for p in parameters)
    some = f" ({trained:,} trained)" if trained < size else ""
    say(f"{args.env}, {args.model} model, {size:,} parameters{some}, {world} process(es), "
        f"folder {run}")
    token = policy.processor.patch_size * policy.processor.merge_size
    if args.image_size != 9 * token:
        say(f"note: 9 cells of a frame share {args.image_size} px, a visual token of the model has "
            f"{token}; --image-size {9 * token} makes a cell one token")
    began, first, evaluation = time.time(), 1, {}

    def measure(label: str, iteration: int, thorough: bool = False) -> dict:
        """Success on held-out worlds, seen and unseen tasks; printed and logged.

        thorough, before and after reinforcement learning: the curve's ends and the diagnostics.
        """
        result, lines = {"iteration": iteration, "label": label}, []
        for name, tasks, trained in (("eval", args.tasks, ()),
                                     ("eval_unseen", "unseen", env.tasks)):
            worlds = held_out(args, tasks, trained)
            if not worlds.tasks:  # all of them are trained on
                continue
            with gathered(policy):  # --shard: no communication while playing
                rates = evaluate(policy, args, worlds, rank, world,
                                 args.eval_episodes * (3 if thorough else 1))
                more = diagnose(policy, args, tasks, trained, rank, world) if thorough else {}
            for table in ("by_task", "solved_in"):
                result[f"{name}_{table}"] = rates.pop(table)
            rates |= more
            result |= {f"{name}/{key}": value for key, value in rates.items()}
            shown = (f"{key} " + ("-" if value is None else format(
                         value, ".1f" if "steps" in key else ".1%"))
                     for key, value in rates.items() if key not in ("env_faults", "away_left_out"))
            lines.append(f"\n  {tasks} tasks: {', '.join(shown)}")
        result["time/seconds"] = time.time() - began
        say(f"[{result['time/seconds']:4.0f} s] {label}{''.join(lines)}")
        if rank == 0:
            log(result, iteration)
        return result

    if state:
        first, began = state["iteration"] + 1, time.time() - state["seconds"]
        say(f"resumed from {checkpoint}, {args.iterations - first + 1} iterations to go")
    else:
        if args.resume:
            say(f"{run} has no checkpoint yet: it starts again")
        cold_start(policy, args, rank, world, log)
        if args.kl_coef:
            save_reference(policy, rank, run)
            reference = load_reference(policy, args, device, run)
        save_checkpoint(run, 0, policy, optimizer, time.time() - began)
    evaluated = all_reduce_sum(torch.tensor(int(rank == 0 and log.evaluated)))
    if first == 1 and not evaluated:  # a kill may have come between the checkpoint and this
        evaluation = measure("cold start" if args.cold_start else "start", 0, thorough=True)

    micro_batch = args.micro_batch  # smaller on this process once it ran out of memory
    bar = tqdm(range(first, args.iterations + 1), initial=first - 1, total=args.iterations,
               desc="train", disable=rank > 0, mininterval=0.5)
    for iteration in bar:
        # 1. Collect: the members of each group start alike, and act -> one Episode each
        began_collect = time.time()
        noise = numbers(ACT, args.seed, iteration, shape=(
            args.groups * args.group_size, args.horizon, args.max_tokens))
        first_seed = seeded(ACT, args.seed) % 10**9 + iteration * args.groups
        played = start_groups(env, groups, args, first_seed)
        with gathered(policy):  # --shard: no communication until the update
            collect(policy, played, args, noise[rows], args.temperature)

            # 2. Score: log-probs and values were read while sampling; here, which episodes count
            used, group, played_groups = select(played, rows, args)
            episodes = [e for _, e in used]
            if args.bf16:
                score(policy, env.system_prompt, episodes, args)

        # 3. Advantages: A = (r - mu) / sigma over the group's samples, r = gamma^(H - t) success
        advantages, weights, returns, total = advantages_of(episodes, group, played_groups, args,
                                                            ranks)
        samples = [s for e in episodes for s in e.samples]

        # 4. Update: epochs x minibatches; micro-batches and ranks only change memory and time
        began_update, skipped, norms, oom = time.time(), 0, [], 0
        losses = torch.zeros(10, dtype=torch.float64)  # summed in the order of LOSSES
        annealed = 1 - 0.9 * (iteration - 1) / args.iterations  # towards a tenth
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.lr * annealed
        worth = advantages, args.minibatches * weights, returns, total
        for epoch in range(args.epochs):
            mixed = [numbers(MIX, args.seed, iteration, epoch, row, shape=len(e.samples))
                     for row, e in used]  # which minibatch a sample is in, whatever the rank
            place = (torch.cat([torch.zeros(0), *mixed]) * args.minibatches).long()
            for minibatch in range(args.minibatches):
                mb_inds = (place == minibatch).nonzero().flatten()
                update = partial(accumulate, policy, reference, env.system_prompt, samples, mb_inds,
                                 worth, args, annealed)
                terms, micro_batch, failed = halving(update, micro_batch, parameters, args.shard)
                losses, oom = losses + terms, oom + failed
                if not args.shard:  # FSDP's backward pass has summed them
                    reduce_gradients(parameters)
                if all(p.grad is None for p in parameters):
                    continue  # no sample with a signal on any rank: optim/updates says so
                norms.append(clip_gradients(parameters, args.max_grad_norm))
                if math.isfinite(norms[-1]):
                    optimizer.step()
                else:  # the same on all ranks, since the gradient is summed
                    skipped += 1
                optimizer.zero_grad(set_to_none=True)
        if skipped and skipped == len(norms):
            raise RuntimeError(
                f"no update of iteration {iteration} had a finite gradient. The last checkpoint is "
                f"{checkpoints(run)[-1]}; go on from it with --resume {run} and a smaller --lr"
            )

        # 5. Log: sums over all episodes, samples, minibatches and ranks, one division
        metrics = iteration_metrics(env, played, advantages, losses, oom,
                                    args.epochs * args.minibatches)
        now = time.time()
        update_s, peak = now - began_update, peak_flops(device)
        tokens, metrics["time/update_tflops"] = metrics.pop("tokens"), metrics.pop("flops") / 1e12
        metrics["time/update_tflops"] /= update_s
        if peak:
            metrics["time/update_mfu"] = metrics["time/update_tflops"] * 1e12 / peak / world
        metrics |= {
            "iteration": iteration, "optim/skipped": skipped,
            "optim/updates": len(norms) - skipped,
            "optim/grad_norm": mean([x if math.isfinite(x) else math.nan for x in norms]),
            "optim/lr": optimizer.param_groups[0]["lr"], "time/seconds": now - began,
            "time/collect_s": began_update - began_collect, "time/update_s": update_s,
            "time/tokens_per_s": metrics["rollout/all_tokens"] / (now - began_collect),
            "time/collect_tokens_per_s": (metrics["rollout/all_tokens"]
                                          / (began_update - began_collect)),
            "time/update_tokens_per_s": tokens / update_s,
            "memory/peak_mb": peak_memory(device),
        }
        shown = {key.removeprefix("rollout/").removeprefix("success_"): value
                 for key, value in metrics.items() if key.startswith("rollout/success")}
        bar.set_postfix({key: "-" if x is None else f"{x:.2f}" for key, x in shown.items()},
                        steps=f"{metrics['rollout/steps'] or math.nan:.0f}".replace("nan", "-"),
                        zero=f"{metrics['advantage/zero_frac']:.2f}",
                        tok_s=f"{metrics['time/tokens_per_s']:.0f}",
                        MB=f"{metrics['memory/peak_mb']:.0f}", refresh=False)
        if not norms:
            lost = all(e.fault for e in played)
            say(f"iteration {iteration}: no update: " + (
                "the worlds of all episodes raised, see the errors above" if lost else
                "every group failed as a whole (or, with --drop-equal-groups, succeeded); a longer "
                "--cold-start or easier --tasks help"))
        if rank == 0:
            log(metrics, iteration)
        if iteration % args.eval_every == 0 or iteration == args.iterations:
            last = iteration == args.iterations
            evaluation = measure("end" if last else f"iteration {iteration}", iteration, last)

        # 6. Save
        if iteration % args.save_every == 0 or iteration == args.iterations:
            save_checkpoint(run, iteration, policy, optimizer, time.time() - began)
    if rank == 0:
        log.board.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return evaluation


LOSSES = ("loss/policy", "loss/value", "loss/total", "policy/entropy", "policy/approx_kl",
          "policy/clipfrac", "policy/reference_kl", "weight", "tokens", "flops")


def idle_pass(policy, reference, args) -> None:
    """A pass from which nothing is learned: with --shard another process still has one to make."""
    part = idle(policy)
    if reference is not None:
        with torch.no_grad():
            reference(part, args.temperature)
    out = policy(part, args.temperature)
    (0 * (out["logprobs"].sum() + out["values"].sum())).backward()


def accumulate(policy, reference, system: str, samples, mb_inds, worth, args, annealed,
               size) -> torch.Tensor:
    """Add the gradient of one minibatch, `size` samples a pass -> the terms of LOSSES [10].

    mb_inds: which samples. worth: their advantages, weights and returns [S], and the number of
    samples on all processes. The weights make every term a part of a sum over all processes.
    """
    advantages, weights, returns, total = worth
    device, losses = policy.device, torch.zeros(10, dtype=torch.float64)
    pieces = mb_inds.split(size) if len(mb_inds) else ()
    for _ in range(len(pieces), passes(len(pieces), args.shard)):
        idle_pass(policy, reference, args)
    for inds in pieces:
        scripts = transcribe(policy, system, [samples[i] for i in inds])
        part = collate(scripts)
        old = {k: v.to(device) for k, v in part.items() if torch.is_tensor(v)}
        if reference is not None:
            with torch.no_grad():
                anchor = reference(part, args.temperature)["logprobs"]
        new = policy(part, args.temperature)
        mask = old["mask"]
        w = weights[inds].float().to(device)  # [S], the mean of J
        acted = mask
        if args.loss_on == "answer":
            ids = [samples[i].ids for i in inds]
            acted = behind(mask, [answer_start(policy.tokenizer, x) for x in ids])
        policy_loss = hygrow.grow_loss(
            new["logprobs"], old["logprobs"], advantages[inds].float().to(device), w,
            acted, clip=args.clip, ratio=args.ratio,
        )
        per_token = w[:, None] / mask.sum(1, keepdim=True)  # [S, 1]
        entropy = (per_token * new["entropy"] * mask).sum()
        value_loss = kl = torch.zeros((), device=device)
        if args.algo == "ppo":
            target = returns[inds].float().to(device)[:, None].expand_as(mask)
            value_loss = args.minibatches / total * hygrow.value_loss(
                new["values"], old["values"], target, first_tokens(mask),
                clip=args.value_clip, denominator=1,
            )
        if reference is not None:
            # k2: as a loss its gradient is that of KL(policy || reference), and linear in the gap;
            # k3's is exponential, and one token can outweigh an update
            kl = hygrow.kl_terms(new["logprobs"], anchor, mask)[1]
            kl = (per_token * kl).sum()
        loss = (policy_loss + args.value_coef * value_loss + args.kl_coef * kl
                - args.entropy_coef * annealed * entropy)
        if args.shard:  # its gradient sums need every tensor on every process, the value head's too
            loss = loss + 0 * new["values"].sum()
        loss.backward()
        with torch.no_grad():
            step = hygrow.kl_terms(old["logprobs"], new["logprobs"], mask)[2]
            gap = new["logprobs"] - old["logprobs"]
            moved = [(per_token * step).sum(), (w * outside(gap, acted, args)).sum()]
        cost = [part["length"].sum(), torch.tensor(update_flops(policy, part))]
        terms = [policy_loss, value_loss, loss, entropy, *moved, kl, w.sum(), *cost]
        losses += torch.stack([x.detach().double().cpu() for x in terms])
    return losses


@torch.no_grad()
def score(policy, system: str, episodes: list[Episode], args) -> None:
    """Read log-probs and values again, in place: in bfloat16 one token at a time does not round as
    a whole row does, and the first probability ratio is to be 1."""
    samples = [s for e in episodes for s in e.samples]
    for low in range(0, len(samples), args.micro_batch):
        some = samples[low:low + args.micro_batch]
        part = collate(transcribe(policy, system, some))
        out = policy(part, args.temperature)
        for row, sample in enumerate(some):
            on = part["mask"][row] > 0
            sample.logprobs = out["logprobs"][row].cpu()[on]
            sample.value = float(out["values"][row].cpu()[on][0])


def iteration_metrics(env, played, advantages, losses, oom: int, updates: int) -> dict:
    """Means from the sums over all ranks; the README's table says each one's unit and reduction."""
    kinds = list(dict.fromkeys(TASKS[name].kind for name in env.tasks))
    by_kind = torch.zeros(len(kinds), 2, dtype=torch.float64)
    for episode in played:
        if not episode.fault:
            kind = kinds.index(episode.env.task.kind)
            by_kind[kind] += torch.tensor([episode.success, 1.0])
    fine = [e for e in played if not e.fault]
    wins = [e for e in fine if e.success]
    replies = sum(len(e.samples) for e in fine)
    idle = replies - len(advantages) + int((advantages == 0).sum())
    sums = torch.tensor([
        len(fine), len(wins), sum(e.moves for e in wins), sum(e.valid for e in fine), replies,
        sum(e.cut for e in fine), sum(e.fault for e in played), sum(e.moves for e in played),
        sum(e.tokens for e in played), oom, idle, float(advantages.sum()), float((advantages**2).sum()),
    ], dtype=torch.float64)
    sums = all_reduce_sum(torch.cat([sums, losses, by_kind.flatten()])).tolist()
    episodes, won, moves, valid, replies, cut, faults, actions, tokens, oom, idle, a, a2 = sums[:13]
    *sums_of_losses, weight, updated, flops = sums[13:23]
    replies_, split = max(replies, 1), sums[23:]
    return {
        "rollout/success": won / episodes if episodes else None,
        **{f"rollout/success_{kind}": split[2 * i] / split[2 * i + 1] if split[2 * i + 1] else None
           for i, kind in enumerate(kinds)},
        "rollout/steps": moves / won if won else None,
        "rollout/valid": valid / replies_,
        "rollout/cut": cut / replies_,
        "rollout/env_faults": faults,
        "optim/oom_retries": oom,
        "tokens": updated, "flops": flops,
        "rollout/samples": replies,
        "rollout/actions": actions,
        "rollout/all_tokens": tokens,
        "advantage/zero_frac": idle / replies_,
        "advantage/mean": a / replies_,
        "advantage/std": math.sqrt(max(a2 / replies_ - (a / replies_) ** 2, 0)),
        **{name: value / updates if name.startswith("loss/") else value / weight if weight else None
           for name, value in zip(LOSSES, sums_of_losses)},
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
            sys.exit(f"train_grow.py: --resume {resume} holds no args.json; runs lie in runs/")
        try:
            stored = json.loads(saved.read_text())
            stored["env_options"] = tuple(stored["env_options"])
            default = Args(**stored)
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"train_grow.py: {saved} does not fit this version or script ({error!r})")
    args = tyro.cli(Args, args=argv, default=default, description=__doc__)
    fixed = ("env", "env_options", "model", "image_size", "lora_rank", "freeze_vision")
    for name in fixed if resume else ():
        if getattr(args, name) != getattr(default, name):
            sys.exit(f"train_grow.py: --resume cannot change {flag(name)} from "
                     f"{getattr(default, name)!r}; begin a new run (from its checkpoint, --model "
                     f"{resume}/step_..., where words and --image-size fit)")
    if args.resume and args.run_dir not in ("", default.run_dir):
        sys.exit("train_grow.py: give --resume or --run-dir, not both")
    return args


if __name__ == "__main__":
    args = parse_args()
    with explained("train_grow.py", args.resume or args.run_dir):
        main(args)
