"""Measurements, not tests: how fast are the estimator, the rollout and the update.

    python bench.py                      # a freshly made tiny model
    python bench.py --model runs/NAME/step_000100

Rollout: tokens/s of `models.Dialogue` against calling `model.generate` afresh for the whole
conversation at every turn, as turn-based agents usually do: the same model, batch, levels and reply
limit, in turn in one process. Quote the ratio, not the seconds: machines are noisy.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import hygrow
from models import Dialogue, Policy, Transcript, collate
from train_hygae import Args, build_policy


@dataclass(frozen=True)
class Bench:
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
def play(policy: Policy, envs: list, limit: int, ours: bool) -> tuple[int, float, int]:
    """One episode in each env -> generated tokens, seconds in the model, turns."""
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
    return int(sum(float(m.sum()) for script in scripts for m in script.mask)), seconds, turn


def main(bench: Bench) -> None:
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
        tokens, seconds, turns = min(runs, key=lambda run: run[1] / run[0])
        rate[name] = tokens / seconds
        print(f"rollout, {name}: {rate[name]:,.0f} tokens/s "
              f"({tokens} tokens, {turns} turns, {bench.num_envs} conversations)")
    print(f"rollout, ratio: {rate['models.Dialogue'] / rate['generate afresh every turn']:.1f}x")


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
