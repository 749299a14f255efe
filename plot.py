"""Pictures of a run: its learning curve, and one episode on a held-out level; of measurements.

    python plot.py curve --runs runs/A runs/B runs/C --out docs/curve.png
    python plot.py episode --run runs/A --level 3 --out docs/episode.png
    python plot.py summary --runs runs/A runs/B runs/C
    python plot.py memory --data runs/bench_memory.json --out docs/grow_memory.png
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import matplotlib
import torch
import tyro

from models import Dialogue, load_policy
from train_hygae import Args, checkpoints

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen: no display needed)


@dataclass(frozen=True)
class Curve:
    """Held-out success over iterations, thin lines the runs, thick lines their median."""

    runs: tuple[str, ...]
    """Run folders, usually the same command with several seeds."""
    out: str = "docs/curve.png"
    """Picture to write."""
    title: str = ""
    """Heading; default: the environment."""


@dataclass(frozen=True)
class Episode:
    """One held-out episode: what the policy saw and said in each turn."""

    run: str
    """Run folder; its newest checkpoint plays."""
    level: int = 0
    """Seed of the held-out level."""
    temperature: float = 1.0
    """0 is greedy."""
    out: str = "docs/episode.png"
    """Picture to write."""


@dataclass(frozen=True)
class Summary:
    """Cold start and end of each run and their median, as a table."""

    runs: tuple[str, ...]
    """Run folders."""


@dataclass(frozen=True)
class Memory:
    """Peak memory and seconds of an update against the episode's length, as bench.py measured."""

    data: str = "runs/bench_memory.json"
    """What `bench.py memory` wrote."""
    out: str = "docs/grow_memory.png"
    """Picture to write."""


def read(run: str) -> tuple[dict, list[dict]]:
    """The arguments of a run and its evaluations, in order."""
    folder = Path(run)
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"plot.py: {run} holds no metrics.jsonl; is it the folder of a run?")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line.get("label", "untrained") != "untrained"]
    if not records:
        raise SystemExit(f"plot.py: {run} has no evaluation yet; the first follows the cold start")
    return json.loads((folder / "args.json").read_text()), records


def curve(options: Curve) -> None:
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name, colour, label in (("eval/success", "C0", "sampled"),
                                ("eval/greedy_success", "C1", "greedy")):
        points = {}
        for run in options.runs:
            _, records = read(run)
            axis.plot([r["iteration"] for r in records], [r[name] for r in records], colour,
                      alpha=0.3, lw=1)
            for r in records:
                points.setdefault(r["iteration"], []).append(r[name])
        shared = sorted(i for i, values in points.items() if len(values) == len(options.runs))
        axis.plot(shared, [median(points[i]) for i in shared], colour, lw=2.5,
                  label=f"{label}, median of {len(options.runs)} seeds")
    args, _ = read(options.runs[0])
    title = options.title or " ".join([args["env"], *args["env_options"]])
    axis.set(xlabel="iteration of reinforcement learning (0: after the cold start)",
             ylabel="success on held-out levels", ylim=(0, 1), title=title)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


@torch.no_grad()
def episode(options: Episode) -> None:
    stored, _ = read(options.run)
    args = Args(**{**stored, "env_options": tuple(stored["env_options"]), "resume": ""})
    found = checkpoints(Path(options.run))
    if not found:
        raise SystemExit(f"plot.py: {options.run} has no checkpoint, so nothing can play")
    policy = load_policy(str(found[-1]), critic=args.critic)
    env = args.make_env("eval")
    seen, _ = env.reset(seed=options.level)
    dialogue, frames, done = Dialogue(policy, 1, env.system_prompt), [], False
    generator = torch.Generator().manual_seed(options.level)
    while not done:
        dialogue.observe([0], [seen["text"]], [seen["image"]])
        uniforms = torch.rand(1, args.max_tokens, generator=generator, dtype=torch.float64)
        reply = dialogue.reply(args.max_tokens, uniforms, options.temperature)[0]
        image = seen["image"]
        seen, reward, ended, truncated, info = env.step(reply)
        frames.append((image, f"{reply}\nreward {reward:+.1f}"))
        done = ended or truncated
    outcome = "solved" if info["success"] else "not solved"
    frames.append((seen["image"], outcome))
    figure, axes = plt.subplots(1, len(frames), figsize=(3 * len(frames), 4.4),
                                constrained_layout=True)
    for turn, (axis, (image, text)) in enumerate(zip(axes, frames), 1):
        axis.imshow(image, interpolation="nearest")
        axis.set_axis_off()
        axis.set_title(f"turn {turn}" if turn < len(frames) else "end", fontsize=10)
        text = text.replace("</think>", "</think>\n")
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 34)]
        axis.text(0, -0.04, "\n".join(lines), transform=axis.transAxes, va="top", fontsize=8.5,
                  family="monospace", parse_math=False)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110, bbox_inches="tight")
    print(f"level {options.level}: {outcome} in {info['moves']} moves")


def summary(options: Summary) -> None:
    names, rows = [], []
    for run in options.runs:
        _, records = read(run)
        names.append(run if records[-1]["label"] == "end" else f"{run} (unfinished)")
        rows.append([records[0]["eval/success"], records[0]["eval/greedy_success"],
                     records[-1]["eval/success"], records[-1]["eval/greedy_success"],
                     records[-1]["time/seconds"] / 60])
    print("| run | cold start sampled | cold start greedy | end sampled | end greedy | minutes |")
    print("|---|---|---|---|---|---|")
    medians = [median(column) for column in zip(*rows)]
    for name, row in [*zip(names, rows), ("median", medians)]:
        print(f"| {name} | " + " | ".join(f"{x:.1%}" for x in row[:4]) + f" | {row[4]:.1f} |")


def memory(options: Memory) -> None:
    if not Path(options.data).exists():
        raise SystemExit(f"plot.py: no file {options.data}; `python bench.py memory` writes one")
    content = json.loads(Path(options.data).read_text())
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), constrained_layout=True)
    for axis, name, label in ((axes[0], "peak_mb", "peak memory of the update, MB"),
                              (axes[1], "seconds", "seconds of the update")):
        for layout in dict.fromkeys(row["layout"] for row in content["rows"]):
            rows = [row for row in content["rows"] if row["layout"] == layout]
            large = [str(row["steps"]) for row in rows if not row["fits"]]
            rows = [row for row in rows if row["fits"]]
            note = f" (did not fit: {', '.join(large)})" if large else ""
            axis.plot([row["steps"] for row in rows], [row[name] for row in rows], "o-",
                      label=layout + note)
        axis.set(xlabel="steps of the episode", ylabel=label, xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left")
    settings = content["options"]
    figure.suptitle(f"one update on one episode: {settings['model']} model, {content['device']}, "
                    f"micro-batches of {settings['micro_batch']}", fontsize=10)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    command = tyro.cli(
        Annotated[Curve, tyro.conf.subcommand("curve")]
        | Annotated[Episode, tyro.conf.subcommand("episode")]
        | Annotated[Summary, tyro.conf.subcommand("summary")]
        | Annotated[Memory, tyro.conf.subcommand("memory")],
        description=__doc__,
    )
    draw = {Curve: curve, Episode: episode, Summary: summary, Memory: memory}
    draw[type(command)](command)
