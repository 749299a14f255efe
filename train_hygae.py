"""HyGAE: multi-turn PPO for vision-language policies with a hybrid turn- and token-level advantage.

    torchrun train_hygae.py --alpha 0.5                      # FrozenLake, tiny model, laptop CPU
    torchrun --nproc-per-node 2 train_hygae.py --alpha 0.5   # the same run on two processes
    torchrun train_hygae.py --env Sokoban --iterations 200
    torchrun train_hygae.py --resume runs/NAME               # go on where a run stopped

Source: arXiv 2607.23605. The formulas are in hygrow.py, the worlds in envs.py, the model in models.py;
this file is the order in which things happen: a supervised cold start, then iterations of
collect -> score -> advantages -> update -> log -> save.

All randomness is a function of (--seed, iteration, global row), never of a rank or of what happened
before. So any number of processes trains on the same episodes, and resuming needs no RNG state.
"""

import copy
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import hygrow
from envs import make_env
from models import Dialogue, Transcript, collate, load_policy, make_tiny, save_policy, take


@dataclass(frozen=True)
class Args:
    env: str = "FrozenLake"
    """World to play: FrozenLake or Sokoban (envs.py)."""
    env_options: tuple[str, ...] = ()
    """Options of the world as name=value, e.g. size=6 slippery=True random_corners=True."""
    max_turns: int = 5
    """Turns an episode; a longer episode is truncated."""
    model: str = "tiny"
    """"tiny" (built here, no download), or a folder or hub id of Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""
    critic: str = "shared"
    """"shared": value head on the policy's trunk; "separate": on a trunk of its own, as in the paper."""
    alpha: float = 0.5
    """Weight of the turn-level advantage and return in [0, 1]; formula in hygrow.hybrid_gae."""
    gamma: float = 0.99
    """Discount per generated token in [0, 1]."""
    lam: float = 1.0
    """GAE lambda of the turn chain in [0, 1]."""
    token_lam: float = 1.0
    """GAE lambda of the token chain in [0, 1]."""
    anchor: str = "last"
    """Token of a turn at which the turn chain reads the value: "last" (paper) or "first" (ablation)."""
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
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (nats per token); the paper: 0.001."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the cold-start policy in the reward (k1); the paper: 0.001."""
    reward_scale: float = 0.1
    """The environment's rewards are multiplied by this, so that a solved episode is worth about 1."""
    num_envs: int = 192
    """Episodes an iteration, over all processes."""
    epochs: int = 1
    """Passes over the episodes of an iteration."""
    minibatches: int = 4
    """Optimiser steps a pass."""
    micro_batch: int = 12
    """Episodes a forward pass on one process; changes memory and speed, not the gradient."""
    max_tokens: int = 32
    """Longest reply in tokens; a longer one is cut and counted."""
    temperature: float = 1.0
    """Sampling temperature; the policy that is trained is softmax(logits / temperature)."""
    lr: float = 2e-4
    """AdamW learning rate, annealed linearly to a tenth; the paper: 1e-6 for a pretrained 3B model."""
    max_grad_norm: float = 1.0
    """Gradient clipping; an update whose gradient is not finite is skipped and counted."""
    iterations: int = 150
    """Iterations of reinforcement learning."""
    cold_start: int = 600
    """Supervised steps (of 16 demonstrations) before; 0 for a model that knows the format already."""
    demo_noise: float = 0.5
    """Share of random actions in the demonstrations; more leaves more to reinforcement learning."""
    eval_every: int = 20
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
        for name in ("alpha", "gamma", "lam", "token_lam", "demo_noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} is outside [0, 1]")
        for name in ("max_turns", "num_envs", "epochs", "minibatches", "micro_batch", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        for name in ("iterations", "eval_every", "eval_episodes", "save_every", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        for name in ("clip", "value_clip", "temperature", "lr", "max_grad_norm", "reward_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be above 0 and finite")
        for name in ("value_coef", "entropy_coef", "kl_coef", "cold_start", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be 0 or more")
        for name, choices in (("critic", ("shared", "separate")), ("anchor", ("last", "first"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{flag(name)} {getattr(self, name)!r}: choose from {choices}")
        if self.dual_clip and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"--dual-clip {self.dual_clip} must be above 1, or 0 for none")
        if self.num_envs % self.minibatches:
            raise ValueError(
                f"--num-envs {self.num_envs} cannot be split into --minibatches {self.minibatches}; "
                f"use a multiple of {self.minibatches}"
            )
        self.make_env("train")  # refuses unknown names and options before anything is spent

    def make_env(self, split: str):
        options = {}
        for option in self.env_options:
            name, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"--env-options {option!r} is not of the form name=value")
            options[name] = parse_value(value)
        return make_env(self.env, split=split, max_turns=self.max_turns, **options)


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
    """SUM, not mean: every loss is already divided by a count over all processes."""
    if not dist.is_initialized():
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = all_reduce_sum(torch.cat([g.flatten() for g in grads]))
    for p, g in zip(parameters, flat.split([g.numel() for g in grads])):
        p.grad = g.view_as(p)


def seeded(*key: int) -> int:
    """A 63-bit seed from a tuple of whole numbers; different keys give unrelated streams."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


ACT, DEMO, EVAL = 0, 1, 2  # what a stream of random numbers is for


# -------------------------------------------------------------------------------------- collect
@torch.no_grad()
def collect(policy, envs, rows, args, key, temperature):
    """Play one episode in each env; `rows` are their global indices.

    Returns (batch, stats): `models.collate`'s tensors [B, T] and float64 [B, 8], a row an episode
    (STATS). An env that raises ends its episode, which is left out of the update and counted.
    """
    count = int(key[-1])
    generator = torch.Generator().manual_seed(seeded(*key))
    shape = (count, args.max_turns, args.max_tokens)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)[rows]
    base = seeded(*key[:2]) % 10**9 + key[2] * count if key[0] == ACT else 0  # evaluation: 0, 1, ...
    observations = [env.reset(seed=base + row)[0] for env, row in zip(envs, rows)]
    dialogue = Dialogue(policy, len(envs), envs[0].system_prompt)
    stats = torch.zeros(len(envs), len(STATS), dtype=torch.float64)
    live, turn = list(range(len(envs))), 0
    while live:
        texts, images = zip(*[(observations[i]["text"], observations[i]["image"]) for i in live])
        dialogue.observe(live, texts, images)
        replies = dialogue.reply(args.max_tokens, uniforms[live, turn], temperature)
        going = []
        for i, reply in zip(live, replies):
            script = dialogue.transcripts[i]
            try:
                observations[i], reward, ended, truncated, info = envs[i].step(reply)
            except Exception as fault:  # any simulator may fail in any way; training goes on
                print(f"episode dropped, {args.env} raised {fault!r}", file=sys.stderr, flush=True)
                stats[i, STATS.index("fault")] = 1
                continue
            script.rewards[-1] = reward * args.reward_scale
            stats[i] += torch.tensor([reward, 0, 1, info["valid"], 0, 0, 0, 0])
            if not (ended or truncated):
                going.append(i)
            elif info["success"]:
                stats[i, STATS.index("success")] = 1
            elif truncated and args.bootstrap_truncated:
                script.truncated = True
                image = policy.process_images([observations[i]["image"]])[0]
                policy.show(script, "", observations[i]["text"], *image)
        live, turn = going, turn + 1
    batch = collate(dialogue.transcripts)
    stats[:, STATS.index("tokens")] = batch["mask"].sum(1).double()
    stats[:, STATS.index("cut")] = torch.tensor([float(t.cut) for t in dialogue.transcripts])
    stats[:, STATS.index("context")] = batch["length"].double()
    dropped = stats[:, STATS.index("fault")] > 0
    for name in ("mask", "turn_end", "rewards"):
        batch[name][dropped] = 0
    return batch, stats


STATS = ["return", "success", "turns", "valid", "tokens", "cut", "context", "fault"]


def evaluate(policy, args, envs, rank, world, episodes, temperature) -> dict:
    """Success and return on the first `episodes` held-out levels, over all processes."""
    total = torch.zeros(len(STATS) + 1, dtype=torch.float64)
    mine = list(range(rank, episodes, world))
    for start in range(0, len(mine), len(envs)):
        rows = mine[start : start + len(envs)]
        key = (EVAL, 0, 0, episodes)  # the same levels and draws every time, for every --seed
        _, stats = collect(policy, envs[: len(rows)], rows, args, key, temperature)
        total[:-1] += stats.sum(0)
        total[-1] += len(rows)
    all_reduce_sum(total)
    mean = dict(zip(STATS, (total[:-1] / total[-1]).tolist()))
    return {"success": mean["success"], "return": mean["return"], "turns": mean["turns"],
            "valid": mean["valid"] / mean["turns"]}


# ----------------------------------------------------------------------------------- cold start
def demonstrate(policy, env, seeds, args) -> list[Transcript]:
    """One episode a seed of the noisy scripted expert, as the transcripts a model would have left."""
    scripts, said = [Transcript() for _ in seeds], []  # said: (episode, observation, reply, reward)
    for i, seed in enumerate(seeds):
        observation, done = env.reset(seed=seed)[0], False
        while not done:
            reply = env.expert_reply(noise=args.demo_noise)
            following, reward, ended, truncated, _ = env.step(reply)
            said.append((scripts[i], observation, reply, reward * args.reward_scale))
            observation, done = following, ended or truncated
    images = policy.process_images([observation["image"] for _, observation, _, _ in said])
    for (script, observation, reply, reward), image in zip(said, images):
        policy.show(script, env.system_prompt, observation["text"], *image)
        ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"]
        script.reply(torch.tensor(ids + [policy.tokenizer.eos_token_id]))
        script.rewards[-1] = reward
    return scripts


def cold_start(policy, args, rank, world, log) -> None:
    """Imitate noisy demonstrations: format and perception, and a critic fitted to their returns."""
    size, peak = 16, 3e-3  # demonstrations a step over all processes; AdamW learning rate
    if size % world:
        size = world * math.ceil(size / world)
    env = args.make_env("train")
    parameters = list(policy.parameters())
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
            micro = take(batch, micro.tolist())
            out = policy(micro, args.temperature)
            cross_entropy = -out["logprobs"].sum() / tokens
            error = out["values"] - micro["returns"].to(policy.device)
            value = hygrow.masked_mean(error**2, micro["mask"].to(policy.device), tokens)
            (cross_entropy + 0.5 * value).backward()
            loss += torch.stack([cross_entropy, value]).detach()
        reduce_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(f"cold start step {step}: the gradient is {float(norm)}, not finite")
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / 30, 1 - step / args.cold_start)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = all_reduce_sum(loss).tolist()
        bar.set_postfix(cross_entropy=f"{loss[0]:.3f}", refresh=False)
        if rank == 0 and (step % 20 == 0 or step + 1 == args.cold_start):
            log({"cold_start/step": step, "cold_start/cross_entropy": loss[0],
                 "cold_start/value_loss": loss[1], "cold_start/grad_norm": float(norm)}, step)


# ------------------------------------------------------------------------------- run directory
def save_checkpoint(run: Path, iteration: int, policy, optimizer, args, seconds: float) -> None:
    """Everything a resumed run needs, written aside and then renamed: a kill leaves the last one whole."""
    final, aside = run / f"step_{iteration:06d}", run / f"step_{iteration:06d}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    save_policy(policy, aside)
    names = {id(p): name for name, p in policy.named_parameters()}
    moments = {
        f"{names[id(p)]}.{key}": value.contiguous()
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    save_file(moments, aside / "optimizer.safetensors")
    state = {"iteration": iteration, "seconds": seconds, "args": asdict(args)}
    (aside / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(p for p in run.glob("step_*") if (p / "state.json").exists() and p.suffix == "")


def load_optimizer(optimizer, policy, folder: Path) -> dict:
    """Restore the moments of a checkpoint; returns its state.json."""
    moments = load_file(folder / "optimizer.safetensors")
    names = {id(p): name for name, p in policy.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            keys = ("step", "exp_avg", "exp_avg_sq")
            saved = {k: moments[f"{names[id(p)]}.{k}"] for k in keys if f"{names[id(p)]}.{k}" in moments}
            if saved:
                optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in saved.items()}
    return json.loads((folder / "state.json").read_text())


class Log:
    """metrics.jsonl and TensorBoard, on rank 0."""

    def __init__(self, run: Path, last: int | None):
        """last: the iteration that is resumed from; later lines of an earlier run are cut off."""
        self.path = run / "metrics.jsonl"
        if last is not None and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line).get("iteration", 0) <= last]
            self.path.write_text("".join(line + "\n" for line in kept))
        self.board = SummaryWriter(run / "tensorboard", purge_step=None if last is None else last + 1)

    def __call__(self, metrics: dict, step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        for name, value in metrics.items():
            if "/" in name:
                self.board.add_scalar(name, value, step)


def setup(args):
    """Process group, device and run folder -> (rank, world, device, run, resumed checkpoint or None)."""
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    rank = int(os.environ.get("RANK", 0))
    if args.num_envs // args.minibatches % world:
        raise ValueError(
            f"--num-envs {args.num_envs} / --minibatches {args.minibatches} cannot be split over "
            f"{world} processes; make the quotient a multiple of {world}"
        )
    torch.set_num_threads(args.threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    default = f"runs/{args.env}__alpha{args.alpha}__seed{args.seed}__{int(time.time())}"
    run = [args.resume or args.run_dir or default]
    if world > 1:
        dist.broadcast_object_list(run)  # rank 0's clock names the run
    run = Path(run[0])
    found = checkpoints(run) if args.resume else []
    if not args.resume and (run / "args.json").exists():
        raise ValueError(f"--run-dir {run} holds a run already; use --resume {run} or another folder")
    if world > 1:
        dist.barrier()
    if rank == 0:
        run.mkdir(parents=True, exist_ok=True)
        (run / "args.json").write_text(json.dumps(asdict(args), indent=1))
    return rank, world, device, run, found[-1] if found else None


def build_policy(args, rank, device, run: Path, checkpoint):
    """The policy of a checkpoint, of --model, or the tiny one, which rank 0 makes and all load."""
    source = str(checkpoint or args.model)
    if source == "tiny":
        source = str(run / "tiny")
        if rank == 0:
            env = args.make_env("train")
            texts = [env.system_prompt]
            for seed in range(200):  # the words of the world: what it says and what its expert says
                observation, _ = env.reset(seed=seed)
                done = False
                while not done:
                    reply = env.expert_reply(noise=0.5)
                    texts += [observation["text"], reply]
                    observation, _, ended, truncated, _ = env.step(reply)
                    done = ended or truncated
            make_tiny(source, texts, args.seed)
        if dist.is_initialized():
            dist.barrier()
    return load_policy(source, critic=args.critic, seed=args.seed, device=device)


# ----------------------------------------------------------------------------------------- main
@torch.no_grad()
def score(policy, reference, batch, args) -> None:
    """Add to the batch, in place, what generation did not leave behind.

    Log-probs and the values of a shared critic were read while sampling (a test pins that the training
    forward gives the same within 1e-4); the values of a separate critic, the KL penalty and the value
    after a truncated episode are read here.
    """
    batch["bootstrap"] = torch.zeros(len(batch["mask"]))
    batch["kl"] = torch.zeros_like(batch["mask"])
    for rows in torch.arange(len(batch["mask"])).split(args.micro_batch):
        micro = take(batch, rows.tolist())
        steps, on = micro["mask"].shape[1], micro["mask"] > 0
        if policy.critic is not None:
            batch["values"][rows, :steps] = policy(micro, args.temperature)["values"].cpu()
        if reference is not None:
            logprobs = reference(micro, args.temperature)["logprobs"].cpu()
            kl = torch.where(on, micro["logprobs"] - logprobs, 0)  # k1
            batch["rewards"][rows, :steps] -= args.kl_coef * kl
            batch["kl"][rows, :steps] = kl
        if micro["truncated"].any():
            late = policy.last_values(micro).cpu()
            batch["bootstrap"][rows] = torch.where(micro["truncated"], late, 0)


def main(args: Args) -> dict:
    """Train; returns the last evaluation. The loop is meant to be read from top to bottom."""
    try:
        rank, world, device, run, checkpoint = setup(args)
        policy = build_policy(args, rank, device, run, checkpoint)
    except ValueError as error:
        raise SystemExit(f"train_hygae.py: {error}") from error
    log = Log(run, int(checkpoint.name[5:]) if checkpoint else None) if rank == 0 else None
    say = tqdm.write if rank == 0 else lambda *_: None
    rows = list(range(rank, args.num_envs, world))  # this process's rows of the global batch
    envs = [args.make_env("train") for _ in rows]
    eval_envs = [args.make_env("eval") for _ in range(-(-args.eval_episodes // world))]
    size = sum(p.numel() for p in policy.parameters())
    say(f"{args.env}, {args.model} model, {size:,} parameters, {world} process(es), folder {run}")
    began, first, evaluation = time.time(), 1, {}

    def measure(label: str, iteration: int, episodes: int) -> dict:
        """Held-out success, sampled at --temperature and greedy; printed and logged."""
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

    if checkpoint is None:
        measure("untrained", 0, min(64, args.eval_episodes))
        cold_start(policy, args, rank, world, log)
        evaluation = measure("cold start", 0, args.eval_episodes)
    # Differs from the paper: the KL reference is the policy after the cold start, where there is one.
    start_policy = run / "reference"
    if args.kl_coef and checkpoint is None and rank == 0:
        save_policy(policy, start_policy)
    reference = None
    if args.kl_coef:
        if dist.is_initialized():
            dist.barrier()
        reference = load_policy(str(start_policy), critic=args.critic, device=device)
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    if checkpoint is not None:
        state = load_optimizer(optimizer, policy, checkpoint)
        first, began = state["iteration"] + 1, time.time() - state["seconds"]
        say(f"resumed from {checkpoint}, {args.iterations - first + 1} iterations to go")
    elif rank == 0:
        save_checkpoint(run, 0, policy, optimizer, args, time.time() - began)

    bar = tqdm(range(first, args.iterations + 1), initial=first - 1, total=args.iterations,
               desc="train", disable=rank > 0, mininterval=0.5)
    for iteration in bar:
        # 1. Collect: the policy plays one episode in each env -> padded tensors [B, T]
        began_collect = time.time()
        key = (ACT, args.seed, iteration, args.num_envs)
        batch, stats = collect(policy, envs, rows, args, key, args.temperature)

        # 2. Score: what sampling did not leave behind (KL penalty, separate critic, truncation)
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

        # 4. Update: epochs x minibatches; micro-batches and ranks change nothing but memory and time
        began_update, skipped, norms = time.time(), 0, []
        losses = torch.zeros(6, dtype=torch.float64)  # policy, value, entropy, kl, clipfrac, total
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - 0.9 * (iteration - 1) / args.iterations)
        for _ in range(args.epochs):
            for mb in torch.arange(len(rows)).chunk(args.minibatches):
                mb = sorted(mb.tolist(), key=lambda row: int(batch["length"][row]))  # less padding
                tokens = all_reduce_sum(mask[mb].sum().to(device)).clamp(min=1)  # [] over all ranks
                for low in range(0, len(mb), args.micro_batch):
                    micro = take(batch, mb[low : low + args.micro_batch])
                    old = {k: v.to(device) for k, v in micro.items() if torch.is_tensor(v)}
                    new = policy(micro, args.temperature)
                    policy_loss = hygrow.policy_loss(
                        new["logprobs"], old["logprobs"], old["advantages"], old["mask"],
                        clip=args.clip, dual_clip=args.dual_clip or None, denominator=tokens,
                    )
                    value_loss = hygrow.value_loss(
                        new["values"], old["values"], old["returns"], old["mask"],
                        clip=args.value_clip, denominator=tokens,
                    )
                    entropy = hygrow.masked_mean(new["entropy"], old["mask"], tokens)
                    loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy
                    loss.backward()
                    moved = hygrow.policy_stats(
                        new["logprobs"], old["logprobs"], old["mask"],
                        clip=args.clip, denominator=tokens,
                    )
                    terms = [policy_loss, value_loss, entropy, moved["approx_kl"],
                             moved["clipfrac"], loss]
                    losses += torch.stack([term.detach().double().cpu() for term in terms])
                reduce_gradients(parameters)
                norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)))
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
        total = [torch.tensor(len(rows)), on.sum(), batch["kl"].sum(), *moments]
        total = torch.stack([x.double() for x in total])
        total = all_reduce_sum(torch.cat([stats.sum(0), total, losses])).tolist()
        metrics = {"iteration": iteration} | iteration_metrics(total, args.epochs * args.minibatches)
        now = time.time()
        metrics |= {
            "optim/grad_norm": float(np.mean(norms)), "optim/skipped": skipped,
            "optim/lr": optimizer.param_groups[0]["lr"], "time/seconds": now - began,
            "time/collect_s": began_update - began_collect, "time/update_s": now - began_update,
            "time/tokens_per_s": metrics["rollout/all_tokens"] / (now - began_collect),
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
        if rank == 0 and (iteration % args.save_every == 0 or iteration == args.iterations):
            save_checkpoint(run, iteration, policy, optimizer, args, time.time() - began)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return evaluation


def iteration_metrics(total: list, updates: int) -> dict:
    """Means from the sums over all ranks; the README's table says each one's unit and reduction."""
    sums = dict(zip(STATS, total))
    episodes, tokens, kl, a, a2, g, g2, e, e2, *losses = total[len(STATS):]
    out = {f"rollout/{k}": sums[k] / episodes for k in ("return", "success", "turns", "tokens")}
    out |= {"rollout/valid": sums["valid"] / max(sums["turns"], 1),
            "rollout/cut": sums["cut"] / max(sums["turns"], 1),
            "rollout/env_faults": sums["fault"], "rollout/all_tokens": sums["context"]}
    tokens = max(tokens, 1)
    spread = max(g2 / tokens - (g / tokens) ** 2, 1e-12)
    out |= {"advantage/mean": a / tokens,
            "advantage/std": math.sqrt(max(a2 / tokens - (a / tokens) ** 2, 0)),
            "policy/reference_kl": kl / tokens, "value/return_mean": g / tokens,
            "value/explained_variance": 1 - (e2 / tokens - (e / tokens) ** 2) / spread}
    names = ("loss/policy", "loss/value", "policy/entropy", "policy/approx_kl", "policy/clipfrac",
             "loss/total")
    return out | {name: value / updates for name, value in zip(names, losses)}


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume, on top of the arguments of that run."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    if not args.resume:
        return args
    saved = Path(args.resume) / "args.json"
    if not saved.exists():
        sys.exit(f"train_hygae.py: --resume {args.resume} holds no args.json; runs lie in runs/")
    stored = json.loads(saved.read_text()) | {"resume": args.resume, "run_dir": ""}
    stored["env_options"] = tuple(stored["env_options"])
    return tyro.cli(Args, args=argv, default=Args(**stored), description=__doc__)


if __name__ == "__main__":
    main(parse_args())
