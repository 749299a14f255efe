"""Measurements, not tests: speed of estimator, rollout and update, memory, the worlds.

    python bench.py speed                # a freshly made tiny model
    python bench.py speed --model runs/NAME/step_000100
    python bench.py memory               # GROW's update against the episode's length
    python plot.py memory --data runs/bench_memory.json --out docs/grow_memory.png
    python bench.py size                 # estimated memory of the large models
    python bench.py size --shape Qwen2-VL-2B --out runs/2b    # a folder for --random-init
    python bench.py worlds               # what expert and random replies reach in every world

speed: tokens/s of `models.Dialogue` against calling `model.generate` afresh for the whole
conversation at every turn, as turn-based agents usually do: the same model, batch, levels and reply
limit, in turn in one process. Then the update (forward, loss, backward) on what was played, in
minibatches and micro-batches of the training defaults: rows bucketed by length, as train_hygae.py
has them, against rows as they come, padded to the longest of all, with and without logits for the
tokens that were not generated, and against packing: a micro-batch as one row, with a
block-diagonal mask. Quote the ratio, not the seconds: machines are noisy.

size: exact parameter counts, and what one GPU holds at most, by the arithmetic in `account`.

memory: peak memory and seconds of one update (forward, loss, backward, optimiser step) on one
episode of each length, as GROW's state-action samples and as one whole conversation.

worlds: success of the scripted expert and of random valid replies on held-out levels, and replies a
second with frames and resets, in one process; worlds whose package is missing are named.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen2VLImageProcessorPil,
)

import envs
import hygrow
import train_grow
from large import peak_memory
from models import SPECIAL, Dialogue, Policy, Transcript, collate, take, tiny_tokenizer
from train_grow import Sample, advantages_of, transcribe
from train_hygae import Args, accumulate, build_policy, vocabulary


def positive(options, *names: str) -> None:
    """Raise ValueError where a flag, or one of its numbers, is below 1, or it has none."""
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


@dataclass(frozen=True)
class Speed:
    """Tokens a second of rollout and update, and seconds of hybrid_gae."""

    model: str = "tiny"
    """As in train_hygae.py."""
    env: str = "FrozenLake"
    """World to play."""
    num_envs: int = 192
    """Conversations in the batch; the default is the training default."""
    max_tokens: int = 32
    """Longest reply."""
    repeats: int = 3
    """Measurements of each; the best one counts."""
    threads: int = 1
    """Torch threads."""

    def __post_init__(self):
        positive(self, "num_envs", "max_tokens", "repeats", "threads")


@dataclass(frozen=True)
class Worlds:
    """What the scripted expert and random valid replies reach in each world."""

    seeds: int = 50
    """Held-out levels of each."""


@dataclass(frozen=True)
class Size:
    """Parameters and estimated memory of the large models; a folder to try one without weights."""

    gpus: tuple[int, ...] = (1, 8)
    """Numbers of GPUs to estimate for."""
    num_envs: int = 128
    """Conversations in the batch, over all GPUs."""
    tokens: int = 2400
    """Longest conversation, prompts and pictures included (the papers' cap in Sokoban)."""
    generated: int = 600
    """Generated tokens of it."""
    micro_batch: int = 2
    """Conversations a forward pass of the update."""
    shape: str = ""
    """Write the folder of this one (a name of bench.SHAPES) to --out."""
    out: str = ""
    """Folder: config, image processor, and a small tokenizer in place of the real one."""
    env: str = "Sokoban"
    """World whose words the small tokenizer gets."""

    def __post_init__(self):
        positive(self, "gpus", "num_envs", "tokens", "generated", "micro_batch")
        if self.generated > self.tokens:
            raise ValueError(f"--generated {self.generated} is more than --tokens {self.tokens}")
        if bool(self.shape) != bool(self.out):
            raise ValueError("--shape and --out go together")
        if self.shape and self.shape not in SHAPES:
            raise ValueError(f"--shape {self.shape} is not known; known: {', '.join(SHAPES)}")


@dataclass(frozen=True)
class Memory:
    """Peak memory and seconds of one update against the length of the episode (Crafter)."""

    lengths: tuple[int, ...] = (25, 50, 100, 200)
    """Steps of the episode; each is measured in both layouts."""
    micro_batch: int = 16
    """State-action samples a forward pass; fewer than --lengths, or there is but one."""
    model: str = "tiny"
    """As in train_grow.py."""
    threads: int = 1
    """Torch threads."""
    out: str = "runs/bench_memory.json"
    """File to write, for plot.py."""

    def __post_init__(self):
        positive(self, "lengths", "threads", "micro_batch")


def generate_afresh(policy: Policy, scripts: list[Transcript], limit: int) -> list[list[int]]:
    """One turn by transformers' generate on whole conversations, left padded. Token ids each."""
    batch, eos = collate(scripts), policy.eos
    length = batch["length"].tolist()
    width = max(length)
    ids = torch.full((len(scripts), width), policy.tokenizer.pad_token_id)
    attention = torch.zeros_like(ids)
    for row, n in enumerate(length):
        ids[row, width - n :] = batch["ids"][row, :n]
        attention[row, width - n :] = 1
    out = policy.lm.generate(
        input_ids=ids, attention_mask=attention, pixel_values=torch.cat(batch["pixels"]),
        image_grid_thw=torch.cat(batch["grids"]),
        mm_token_type_ids=(ids == policy.lm.config.image_token_id).int(), do_sample=True, top_k=0,
        max_new_tokens=limit, eos_token_id=eos, pad_token_id=policy.tokenizer.pad_token_id,
        suppress_tokens=policy.banned.nonzero().flatten().tolist(),
    )[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in out]


@torch.no_grad()
def play(policy: Policy, envs: list, limit: int, ours: bool) -> tuple[int, float, int, list]:
    """One episode in each env -> generated tokens, seconds in the model, turns, transcripts."""
    seen = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    system, live, seconds, turn = envs[0].system_prompt, list(range(len(envs))), 0.0, 0
    dialogue = Dialogue(policy, len(envs), system)
    scripts = dialogue.transcripts
    generator, frames = torch.Generator().manual_seed(0), [[] for _ in envs]
    while live:
        start = time.perf_counter()
        texts, images = [seen[i]["text"] for i in live], [seen[i]["image"] for i in live]
        if ours:
            dialogue.observe(live, texts, images)
            uniforms = torch.rand(len(live), limit, generator=generator, dtype=torch.float64)
            replies = dialogue.reply(limit, uniforms)
        else:
            for i, image in zip(live, images):
                frames[i].append(image)
            processed = iter(policy.process_images([f for i in live for f in frames[i]]))
            for i, text in zip(live, texts):  # afresh: the pictures of all turns, every turn
                pixels, grids = zip(*[next(processed) for _ in frames[i]])
                policy.show(scripts[i], system, text, pixels[-1], grids[-1])
                scripts[i].pixels = list(pixels)
            tokens = generate_afresh(policy, [scripts[i] for i in live], limit)
            for i, row in zip(live, tokens):
                scripts[i].reply(torch.tensor(row))
            eos = policy.eos
            kept = [[t for t in row if t != eos] for row in tokens]
            replies = policy.tokenizer.batch_decode(kept)
        seconds += time.perf_counter() - start
        going = []
        for i, reply in zip(live, replies):
            seen[i], _, ended, truncated, _ = envs[i].step(reply)
            if not (ended or truncated):
                going.append(i)
        live, turn = going, turn + 1
    tokens = int(sum(float(m.sum()) for script in scripts for m in script.mask))
    return tokens, seconds, turn, scripts


UPDATES = ("bucketed by length", "padded", "padded, logits everywhere", "packed")


def pack(batch: dict) -> dict:
    """The rows of a batch behind one another in one row [1, N] without padding. `blocks` gives the
    mask that keeps attention within each of them."""
    real = torch.arange(batch["ids"].shape[1]) < batch["length"][:, None]  # [B, T]
    out = {name: x[real][None] for name, x in batch.items()
           if torch.is_tensor(x) and x.shape == real.shape}
    out["positions"] = batch["positions"][:, real][:, None]  # [3, 1, N]
    out |= {name: [torch.cat(batch[name])] for name in ("pixels", "grids")}
    return out | {"length": batch["length"].sum()[None]}


def blocks(length: torch.Tensor) -> torch.Tensor:
    """Lengths [B] of packed rows -> bool [1, 1, N, N]: each token sees its own row up to itself."""
    row = torch.repeat_interleave(torch.arange(len(length)), length)
    return ((row[:, None] == row) & torch.ones(len(row), len(row)).tril().bool())[None, None]


def update_once(policy: Policy, batch: dict, layout: str, args) -> None:
    """Forward, loss and backward over all minibatches, as phase 4 of train_hygae.py."""
    if layout.startswith("padded"):
        batch = batch | {"length": torch.full_like(batch["length"], batch["ids"].shape[1])}
    for mb_inds in torch.arange(len(batch["length"])).chunk(args.minibatches):
        mb = mb_inds[batch["length"][mb_inds].argsort(stable=True)]
        tokens = batch["mask"][mb].sum()
        if layout != "packed":
            accumulate(policy, batch, mb.tolist(), tokens, args, 1.0, args.micro_batch)
            continue
        for rows in mb.split(args.micro_batch):
            part = take(batch, rows.tolist())
            policy.hidden = partial(Policy.hidden, policy, mask=blocks(part["length"]))
            accumulate(policy, pack(part), [0], tokens, args, 1.0, 1)
            del policy.hidden


def everywhere(policy: Policy, batch: dict, temperature: float) -> dict:
    """`Policy.forward` with logits for every token, thrown away again where none was generated."""
    mask = batch["mask"] > 0
    on = torch.ones_like(batch["mask"])
    on[:, 0] = 0  # nothing lies before it
    out = Policy.forward(policy, batch | {"mask": on}, temperature)
    return {name: x.masked_fill(~mask, 0) for name, x in out.items()}


def measure_update(policy: Policy, scripts: list[Transcript], repeats: int, args) -> dict:
    """Tokens/s of forward, loss and backward in each of UPDATES, the best of `repeats`."""
    batch = collate(scripts)
    noise = torch.Generator().manual_seed(0)
    for name in ("advantages", "returns"):
        batch[name] = torch.randn(batch["mask"].shape, generator=noise)
    tokens, rate = int(batch["length"].sum()), {}
    for layout in UPDATES:
        if layout.endswith("everywhere"):
            policy.forward = partial(everywhere, policy)
        seconds = []
        for _ in range(repeats):
            policy.zero_grad(set_to_none=True)
            start = time.perf_counter()
            update_once(policy, batch, layout, args)
            seconds.append(time.perf_counter() - start)
        policy.__dict__.pop("forward", None)
        rate[layout] = tokens / min(seconds)
    return rate


def speed(bench: Speed) -> None:
    torch.set_num_threads(bench.threads)
    B, T = 128, 2400
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, B, T, generator=generator)
    mask = (torch.arange(T) % 160 >= 40).float().expand(B, T)  # 15 turns of 120 tokens
    turn_end = (torch.arange(T) % 160 == 159).float().expand(B, T)
    times = []
    for _ in range(bench.repeats + 1):  # the first call warms up
        start = time.perf_counter()
        hygrow.hybrid_gae(rewards, values, mask, turn_end, gamma=0.99, lam=0.95, alpha=0.5)
        times.append(time.perf_counter() - start)
    print(f"hybrid_gae, B={B}, T={T}, {bench.threads} thread(s): {min(times[1:]):.3f} s")

    args = Args(env=bench.env, model=bench.model)
    with tempfile.TemporaryDirectory() as folder:
        policy = build_policy(args, 0, "cpu", Path(folder), None)
    envs = [args.make_env("eval") for _ in range(bench.num_envs)]
    rate = {}
    parts = (policy.lm.model.language_model.config, policy.lm.model.visual.config)
    own = [part._attn_implementation for part in parts]
    for name, ours in (("generate afresh every turn", False), ("models.Dialogue", True)):
        for part, attention in zip(parts, own):  # generate: the model as from_pretrained gives it
            part._attn_implementation = attention if ours else "sdpa"
        runs = [play(policy, envs, bench.max_tokens, ours) for _ in range(bench.repeats)]
        tokens, seconds, turns, scripts = min(runs, key=lambda run: run[1] / run[0])
        rate[name] = tokens / seconds
        print(f"rollout, {name}: {rate[name]:,.0f} tokens/s "
              f"({tokens} tokens, {turns} turns, {bench.num_envs} conversations)")
    print(f"rollout, ratio: {rate['models.Dialogue'] / rate['generate afresh every turn']:.1f}x")
    played = [script for script in scripts if script.turn_ends]
    lengths = [script.length for script in played]
    rate = measure_update(policy, played, bench.repeats, args)
    for layout in UPDATES:
        print(f"update, {layout}: {rate[layout]:,.0f} tokens/s "
              f"({min(lengths)} to {max(lengths)} tokens a conversation)")
    for layout in UPDATES[1:]:
        print(f"update, ratio to {layout}: {rate[UPDATES[0]] / rate[layout]:.2f}x")


# --------------------------------------------------------------------------------------- memory
LAYOUTS = ("state-action samples", "whole trajectory")
MB = 2**20


def play_steps(policy: Policy, env, steps: int, noise: float) -> list[Sample]:
    """So many steps of the noisy expert in training worlds, as samples of history 1.

    Where an episode ends earlier the next one follows: what an update costs depends on the number
    of frames and tokens, not on whether they belong together.
    """
    samples, over, seed = [], True, 0
    while len(samples) < steps:
        if over:
            (seen, _), seed = env.reset(seed=seed), seed + 1
        reply = env.expert_reply(noise=noise)
        ids = policy.tokenizer(reply, add_special_tokens=False)["input_ids"] + [policy.eos]
        old = torch.zeros(len(ids))  # log-probs: their values do not matter for the cost
        samples.append(Sample([seen["image"]], [seen["text"]], [], torch.tensor(ids), old))
        seen, _, ended, truncated, _ = env.step(reply)
        over = ended or truncated
    return samples


def conversation(policy: Policy, system: str, samples: list[Sample]) -> Transcript:
    """All steps as turns of one conversation, as agents train without the decomposition."""
    script = Transcript()
    images = policy.process_images([sample.frames[0] for sample in samples])
    for sample, image in zip(samples, images):
        policy.show(script, system, sample.texts[0], *image)
        script.reply(sample.ids, sample.logprobs)
    return script


def update(policy, optimizer, system: str, samples: list[Sample], layout: str, args) -> int:
    """One optimiser step on one successful episode, as phase 4 of train_grow.py -> its tokens."""
    whole, size, tokens = layout == "whole trajectory", args.micro_batch, 0
    if whole:  # one row, one advantage: GRPO on the trajectory
        pieces, advantages, weights = [samples], torch.ones(1), torch.ones(1)
    else:
        pieces = [samples[low:low + size] for low in range(0, len(samples), size)]
        episode = train_grow.Episode(samples=samples, success=True)
        advantages, weights, *_ = advantages_of([episode], torch.tensor([0]), 1, args, None)
    for piece, a, w in zip(pieces, advantages.split(size), weights.split(size)):
        what = policy, system, piece
        part = collate([conversation(*what)] if whole else transcribe(*what))
        tokens += int(part["length"].sum())
        new = policy(part, args.temperature)
        mask, old = (part[name].to(policy.device) for name in ("mask", "logprobs"))
        a, w = (x.float().to(policy.device) for x in (a, w))
        loss = hygrow.grow_loss(new["logprobs"], old, a, w, mask, clip=args.clip, ratio=args.ratio)
        entropy = (w[:, None] / mask.sum(1, keepdim=True) * new["entropy"] * mask).sum()
        (loss - args.entropy_coef * entropy).backward()
    torch.nn.utils.clip_grad_norm_(list(policy.parameters()), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return tokens


def resident(device) -> float:
    """MB held now, where `peak_memory` says how many there ever were."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MB
    statm = Path("/proc/self/statm")  # Linux; elsewhere the peak so far has to do
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    return peak_memory(device)


def measure(options: Memory, layout: str, steps: int, pipe) -> None:
    """Send the cost of one update through `pipe`, or None if it does not fit."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = train_grow.Args(model=options.model, micro_batch=options.micro_batch, horizon=steps)
    env = args.make_env("train", args.tasks)
    with tempfile.TemporaryDirectory() as folder:
        policy = train_grow.build_policy(args, 0, device, Path(folder), None)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    samples = play_steps(policy, env, steps, args.demo_noise)
    what = (policy, optimizer, env.system_prompt)
    try:
        update(*what, samples[:2], layout, args)  # loads code, makes the optimiser's state
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = resident(device), time.perf_counter()
        tokens = update(*what, samples, layout, args)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:  # of CUDA, of the CPU's allocator
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        pipe.send(None)
        return
    seconds, total = time.perf_counter() - start, peak_memory(device)
    pipe.send({"tokens": tokens, "peak_mb": total - before, "total_mb": total, "seconds": seconds})


def fresh(options: Memory, layout: str, steps: int) -> dict | None:
    """`measure` in a process of its own, whose peak is that of nothing else; None: did not fit.

    Forked from a server that has imported everything and done nothing, which spares the import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Path(__file__).stem])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(options, layout, steps, send))
    process.start()
    send.close()  # the process holds the other end: if it dies, `recv` ends
    try:
        result = receive.recv()
    except EOFError:
        result = None
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):  # killed: by the system, for its memory
        raise SystemExit(f"bench.py: {layout}, {steps} steps failed, code {process.exitcode}")
    return result


def memory(options: Memory) -> list[dict]:
    """Measure, print a table, write --out."""
    # glibc's heap keeps what was freed, differently at every run; so tensors do without it. Their
    # memory goes back at once, and the peak is what is held. That takes time: up to twice as much.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    print("| layout | steps | tokens | peak of the update, MB | whole process, MB | seconds |")
    print("|---|---|---|---|---|---|")
    rows = []
    for layout in LAYOUTS:
        for steps in options.lengths:
            result = fresh(options, layout, steps)
            rows.append({"layout": layout, "steps": steps, "fits": result is not None})
            if result is None:
                print(f"| {layout} | {steps} | | did not fit | | |", flush=True)
                continue
            rows[-1] |= result
            print(f"| {layout} | {steps} | {result['tokens']:,} | {result['peak_mb']:,.0f} | "
                  f"{result['total_mb']:,.0f} | {result['seconds']:.1f} |", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    content = {"options": asdict(options), "device": device, "rows": rows}
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(content, indent=1))
    return rows


# ----------------------------------------------------------------------------------------- size
VISION_2 = dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16)
SHAPES = {  # from the config.json of each; parameter counts are pinned by a test
    "Qwen2-VL-2B": ("qwen2_vl", True, dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936), VISION_2 | dict(hidden_size=1536)),
    "Qwen2.5-VL-3B": ("qwen2_5_vl", True, dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151936), dict(
        depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=2048,
        window_size=112, fullatt_block_indexes=[7, 15, 23, 31])),
    "Qwen2-VL-7B": ("qwen2_vl", False, dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064), VISION_2 | dict(hidden_size=3584)),
}


def shape_config(name: str, **ids) -> PreTrainedConfig:
    """The config of a large model; ids: its special tokens, where they are not Qwen's own."""
    kind, tied, text, vision = SHAPES[name]
    rope = dict(rope_type="default", mrope_section=[16, 24, 24], rope_theta=1e6)
    text = text | dict(rope_parameters=rope, max_position_embeddings=32768,
                       tie_word_embeddings=tied)
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision,
                                tie_word_embeddings=tied, **ids)


def write_shape(options: Size) -> None:
    """A folder that `--random-init` takes, all but the weights."""
    tokenizer = tiny_tokenizer(vocabulary(Args(env=options.env).make_env("train")))
    number = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = shape_config(
        options.shape, image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"], vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"])
    size = dict(shortest_edge=56**2, longest_edge=28**2 * 1280)
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2,
                                         temporal_patch_size=2)
    for part in (config, tokenizer, processor):
        part.save_pretrained(options.out)
    print(f"{options.out}: --model {options.out} --random-init --cold-start 0")


GB = 1e9


def account(config, count: int, gpus: int, how: str, options: Size) -> dict:
    """GB on each GPU, estimated, the largest parts alone; shared critic, no KL reference. count:
    parameters. how: "whole", "shards", "lora".

    weights: float32. training: gradient and two moments, float32, of what is trained.
    copies: of all weights in bfloat16: with shards while the policy plays, without during every
    forward pass (autocast keeps them, but not of frozen weights).
    cache: keys and values of the conversations of this GPU, in the dtype of the layers, bfloat16.
    update: hidden states that --grad-checkpointing keeps, one a layer, bfloat16; and of one
    micro-batch's generated tokens six tensors of the vocabulary's width, float32 (logits,
    masked, log-softmax, probabilities, the entropy's product, a gradient).
    Playing and updating take turns, so the larger counts.
    """
    text, pieces = config.get_text_config(), 1 if how != "shards" else gpus
    head_dim = text.hidden_size // text.num_attention_heads
    rows = math.ceil(options.num_envs / gpus)
    token = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim  # bytes
    kept = 2 * text.num_hidden_layers * options.tokens * text.hidden_size
    logits = 6 * 4 * options.generated * text.vocab_size
    parts = {
        "weights": 4 * count / pieces,
        "training": 0 if how == "lora" else 12 * count / pieces,
        "copies": 0 if how == "lora" else 2 * count,
        "cache": rows * options.tokens * token,
        "update": options.micro_batch * (kept + logits),
    }
    play, update = parts["copies"] + parts["cache"], parts["update"]
    if how == "whole":
        update += parts["copies"]
    parts["peak"] = parts["weights"] + parts["training"] + max(play, update)
    return {name: number / GB for name, number in parts.items()}


def size(options: Size) -> dict:
    """Print the table; returns the parameter counts."""
    if options.shape:
        write_shape(options)
        return {}
    print(f"{options.num_envs} conversations of {options.tokens} tokens, {options.generated} of "
          f"them generated, --micro-batch {options.micro_batch} --bf16 --grad-checkpointing\n")
    print("| model | parameters | flags | GPUs | weights | training | copies | cache | update | "
          "peak, GB a GPU |")
    print("|---" * 10 + "|")
    counted = {}
    for name in SHAPES:
        config = shape_config(name)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        counted[name] = sum(p.numel() for p in model.parameters())
        for gpus in options.gpus:
            for how, flags in {"whole": "", "shards": "--shard", "lora": "--lora-rank 16"}.items():
                gb = account(config, counted[name], gpus, how, options)
                cells = " | ".join(f"{gb[part]:.1f}" for part in
                                   ("weights", "training", "copies", "cache", "update", "peak"))
                print(f"| {name} | {counted[name]:,} | {flags} | {gpus} | {cells} |")
    return counted


WORLDS = (  # environment, its options, package, licence of the simulator, the paper's own?
    ("FrozenLake", {}, "gymnasium", "MIT", "yes"),
    ("Sokoban", {}, "", "ours", "same rules"),
    ("Navigation", {"max_turns": 10}, "miniworld", "Apache-2.0", "stand-in"),
    *(("PrimitiveSkill", {"tasks": task, "image_size": 56}, "mujoco", "Apache-2.0", "stand-in")
      for task in ("align", "place", "stack", "drawer")),
    ("ViRL", {}, "", "ours", "stand-in"),
    *(("ManiSkill", {"tasks": task, "image_size": 128}, "mani_skill", "Apache-2.0", "yes")
      for task in ("align", "place", "stack")),
)


def worlds(options: Worlds) -> list[dict]:
    """Print a row a world."""
    print("| environment | simulator | expert | random | replies/s | licence | the paper's own? |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for name, settings, package, licence, own in WORLDS:
        title = " ".join([name, settings.get("tasks", "")]).strip()
        try:
            env = envs.make_env(name, split="eval", **settings)
            env.reset(seed=0)  # some find only now that they lack a package or a renderer
        except (ImportError, RuntimeError) as error:
            print(f"{title} left out: {error}", file=sys.stderr)
            continue
        began = time.perf_counter()
        ends = [[envs.play(env, seed, noise) for seed in range(options.seeds)]
                for noise in (0.0, 1.0)]
        speed = sum(end["turn"] for half in ends for end in half) / (time.perf_counter() - began)
        expert, random = (sum(end["success"] for end in half) / options.seeds for half in ends)
        rows.append({"name": title, "expert": expert, "random": random})
        simulator = f"{package} {version(package)}" if package else "-"
        print(f"| {title} | {simulator} | {expert:.0%} | {random:.0%} | {speed:.0f} | {licence} | "
              f"{own} |", flush=True)
    return rows


if __name__ == "__main__":
    command = tyro.cli(
        Annotated[Speed, tyro.conf.subcommand("speed")]
        | Annotated[Memory, tyro.conf.subcommand("memory")]
        | Annotated[Size, tyro.conf.subcommand("size")]
        | Annotated[Worlds, tyro.conf.subcommand("worlds")],
        description=__doc__,
    )
    {Speed: speed, Memory: memory, Size: size, Worlds: worlds}[type(command)](command)
