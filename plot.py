"""Pictures and tables of runs and of measurements.

    python plot.py curve --runs runs/A runs/B runs/C --out docs/curve.png      # train_hygae.py
    python plot.py episode --run runs/A --level 3 --out docs/episode.png       # train_hygae.py
    python plot.py classes --runs runs/A runs/B runs/C --out docs/grow.png     # train_grow.py
    python plot.py compare --runs runs/A runs/B --out docs/grow_compare.png    # train_grow.py
    python plot.py summary --runs runs/A runs/B runs/C                         # both
    python plot.py diagnostics --runs runs/A runs/B runs/C                     # train_grow.py
    python plot.py worlds --out docs/worlds.png              # packages: requirements-worlds.txt
    python plot.py memory --data runs/bench_memory.json --out docs/grow_memory.png
"""

import json
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import matplotlib
import numpy as np
import torch
import tyro

from envs import make_env
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
class Classes:
    """GROW: held-out success by class of task over iterations, thin lines the runs, thick lines
    their median; and the actions that are played for each success, those of failures included."""

    runs: tuple[str, ...]
    """Run folders of train_grow.py, usually the same command with several seeds."""
    out: str = "docs/grow.png"
    """Picture to write."""


@dataclass(frozen=True)
class Compare:
    """GROW and its relatives: success on held-out worlds against the actions played in
    training; also as a table at the most actions that all runs have reached."""

    runs: tuple[str, ...]
    """Run folders of train_grow.py that differ in --algo, --gamma or another flag."""
    out: str = "docs/grow_compare.png"
    """Picture to write."""


@dataclass(frozen=True)
class Summary:
    """Cold start and end of each run and their median, as a table."""

    runs: tuple[str, ...]
    """Run folders."""


@dataclass(frozen=True)
class Diagnostics:
    """GROW: target locking, re-acquisition and success by class and among distractors, before and
    after reinforcement learning, medians of the runs, as a table."""

    runs: tuple[str, ...]
    """Run folders of train_grow.py."""


@dataclass(frozen=True)
class Worlds:
    """The first and the last frame of an expert's episode in the rooms and on the table."""

    seed: int = 8
    """Seed of the held-out levels."""
    out: str = "docs/worlds.png"
    """Picture to write."""


@dataclass(frozen=True)
class Memory:
    """Peak memory and seconds of an update against the episode's length, as bench.py measured."""

    data: str = "runs/bench_memory.json"
    """What `bench.py memory` wrote."""
    out: str = "docs/grow_memory.png"
    """Picture to write."""


def metrics(run: str) -> list[dict]:
    """All records of a run; a last line that a kill has torn is left out."""
    file = Path(run) / "metrics.jsonl"
    if not file.exists():
        raise SystemExit(f"plot.py: {run} holds no metrics.jsonl; is it the folder of a run?")
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def script(args: dict) -> str:
    """Which script made a run with these arguments."""
    return "train_grow.py" if "group_size" in args else "train_hygae.py"


def read(run: str, of: str | None = None) -> tuple[dict, list[dict]]:
    """The arguments of a run and its evaluations, in order. of: the script it must be of."""
    records = [line for line in metrics(run) if line.get("label", "untrained") != "untrained"]
    if not records:
        raise SystemExit(f"plot.py: {run} has no evaluation yet; the first follows the cold start")
    try:
        args = json.loads((Path(run) / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"plot.py: {run}/args.json cannot be read ({error})") from error
    if of and script(args) != of:
        raise SystemExit(f"plot.py: {run} is a run of {script(args)}; this picture is for {of}")
    return args, records


def lines(axis, runs: list[list[dict]], name: str, colour: str, label: str, style="-") -> None:
    """A metric over iterations: thin the runs, thick their median where all have it. None: the
    actions of a success where there was none."""
    points = {}
    for records in runs:
        having = [r for r in records if r.get(name) is not None]
        axis.plot([r["iteration"] for r in having], [r[name] for r in having], colour, alpha=0.3,
                  lw=1, ls=style)
        for r in having:
            points.setdefault(r["iteration"], []).append(r[name])
    shared = sorted(i for i, values in points.items() if len(values) == len(runs))
    axis.plot(shared, [median(points[i]) for i in shared], colour, lw=2.5, ls=style, label=label)


def curve(options: Curve) -> None:
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    read_all = [read(run, "train_hygae.py") for run in options.runs]
    for name, colour, label in (("eval/success", "C0", "sampled"),
                                ("eval/greedy_success", "C1", "greedy")):
        lines(axis, [records for _, records in read_all], name, colour,
              f"{label}, median of {len(options.runs)} seeds")
    args, _ = read_all[0]
    title = options.title or " ".join([args["env"], *args["env_options"]])
    axis.set(xlabel="iteration of reinforcement learning (0: after the cold start)",
             ylabel="success on held-out levels", ylim=(0, 1), title=title)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


@torch.no_grad()
def episode(options: Episode) -> None:
    stored, _ = read(options.run, "train_hygae.py")
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


def classes(options: Classes) -> None:
    runs = [read(run, "train_grow.py")[1] for run in options.runs]
    args, _ = read(options.runs[0])
    trained = f"{args['tasks']} tasks"  # "seen" unless --tasks names others
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    kinds = [key for key in runs[0][0] if key.startswith("eval/success_")]
    lines(left, runs, "eval/success", "k", f"{trained}, all")
    for i, key in enumerate(kinds):
        lines(left, runs, key, f"C{i}", key.removeprefix("eval/success_"))
    lines(left, runs, "eval_unseen/success", "0.5", "tasks unseen in RL", "--")
    lines(right, runs, "eval/steps_per_success", "k", trained)
    lines(right, runs, "eval_unseen/steps_per_success", "0.5", "tasks unseen in RL", "--")
    left.set(ylabel="success on held-out worlds", ylim=(0, 1))
    right.set(ylabel="actions played for each success", ylim=(0, None))
    for axis in (left, right):
        axis.set(xlabel="iteration of reinforcement learning (0: after the cold start)")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{args['env']}, median of {len(runs)} run(s)")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


def against_steps(run: str) -> tuple[list, list]:
    """Actions played in training so far, and success on its tasks, at each evaluation."""
    _, records = read(run, "train_grow.py")
    played = {0: 0}
    for line in metrics(run):
        if "rollout/actions" in line:
            played[line["iteration"]] = played[line["iteration"] - 1] + line["rollout/actions"]
    return [played[r["iteration"]] for r in records], [r["eval/success"] for r in records]


def compare(options: Compare) -> None:
    stored = [read(run, "train_grow.py")[0] for run in options.runs]
    differ = [name for name in dict.fromkeys(key for args in stored for key in args)
              if name != "run_dir" and any(args.get(name) != stored[0].get(name)
                                           for args in stored)]
    names = [", ".join(f"{name} {args.get(name)}" for name in differ) or run
             for run, args in zip(options.runs, stored)]  # what sets each apart from the others
    curves = [(name, *against_steps(run)) for name, run in zip(names, options.runs)]
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for i, (name, steps, success) in enumerate(curves):
        axis.plot(steps, success, f"C{i}", marker="o", label=name)
    most = min(steps[-1] for _, steps, _ in curves)
    axis.axvline(most, color="0.7", lw=1)
    axis.set(xlabel="actions played in the training worlds", ylim=(0, None),
             ylabel="success on held-out worlds, trained tasks")
    axis.grid(alpha=0.3)
    axis.legend()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)
    print(f"| | start | after {most:,.0f} actions |\n|---|---|---|")
    for name, steps, success in curves:  # between two evaluations: on the line
        print(f"| {name} | {success[0]:.1%} | {np.interp(most, steps, success):.1%} |")


def solved_by_both(first: dict, last: dict) -> list[float | None]:
    """Mean actions in the episodes of the trained tasks that two evaluations both solved: a success
    rate that grows takes in longer episodes, and the mean over all successes with them."""
    pairs = [(a, b) for task, before in first["eval_solved_in"].items()
             for a, b in zip(before, last["eval_solved_in"].get(task, [])) if a and b]
    return [sum(column) / len(pairs) for column in zip(*pairs)] or [None, None]


def summary(options: Summary) -> None:
    """Cold start and end, the columns of the script that made the first run."""
    args, _ = read(options.runs[0])
    of = script(args)
    if of == "train_grow.py":
        columns = {f"{args['tasks']} tasks": "eval/success", "greedy": "eval/greedy_success",
                   "steps per success": "eval/steps_per_success",
                   "unseen tasks": "eval_unseen/success"}
    else:
        columns = {"sampled": "eval/success", "greedy": "eval/greedy_success"}
    names, rows = [], []
    for run in options.runs:
        _, records = read(run, of)
        names.append(run if records[-1]["label"] == "end" else f"{run} (unfinished)")
        ends = (records[0], records[-1])
        values = [r.get(key) for r in ends for key in columns.values()]
        if of == "train_grow.py":
            values += solved_by_both(*ends)
        rows.append([*(math.nan if value is None else value for value in values),
                     records[-1]["time/seconds"] / 60])
    heads = [f"{when} {name}" for when in ("cold start", "end") for name in columns]
    if of == "train_grow.py":
        heads += ["solved by both: steps before", "after"]
    heads += ["minutes"]
    middle = [math.nan if any(map(math.isnan, column)) else median(column) for column in zip(*rows)]
    print(f"| run | {' | '.join(heads)} |\n{'|---' * (len(heads) + 1)}|")
    for name, row in [*zip(names, rows), ("median", middle)]:
        formats = (".1%" if head.endswith(("tasks", "greedy", "sampled")) else ".1f"
                   for head in heads)
        cells = ("-" if math.isnan(x) else format(x, form) for x, form in zip(row, formats))
        print(f"| {name} | {' | '.join(cells)} |")


def diagnostics(options: Diagnostics) -> None:
    """A row a metric, a column a set of tasks before and after; "-" where a run lacks it."""
    runs = [read(run, "train_grow.py")[1] for run in options.runs]
    names = dict.fromkeys(key.split("/")[1] for key in runs[0][0] if key.startswith("eval") and any(
        part in key for part in ("locking", "acquire", "away_s", "distractors", "success_")))
    end = "end" if all(r[-1]["label"] == "end" for r in runs) else "so far (unfinished)"
    heads = ("", "trained tasks, before", end, "unseen tasks, before", end)
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in names:
        cells = []
        for kind, k in (("eval", 0), ("eval", -1), ("eval_unseen", 0), ("eval_unseen", -1)):
            values = [records[k].get(f"{kind}/{name}") for records in runs]
            form = ".1f" if "steps" in name else ".1%"
            cells.append("-" if None in values else format(median(values), form))
        print(f"| {name} | {' | '.join(cells)} |")


def worlds(options: Worlds) -> None:
    rows = (("Navigation", {}), *(("PrimitiveSkill", {"tasks": task}) for task in (
        "align", "place", "stack", "drawer")), ("ViRL", {}))
    figure, axes = plt.subplots(2, len(rows), figsize=(2.4 * len(rows), 5.2),
                                constrained_layout=True)
    for (name, settings), (first, last) in zip(rows, axes.T):
        env = make_env(name, split="eval", image_size=224, **settings)
        seen, done = env.reset(seed=options.seed)[0], False
        first.imshow(seen["image"])
        title = re.split(r" red\(| apple\(| \[ \] go", seen["text"])[0].replace("[ ] ", "")
        first.set_title("\n".join([name, *textwrap.wrap(title, 30)]), fontsize=8)
        while not done:
            seen, _, ended, truncated, info = env.step(env.expert_reply())
            done = ended or truncated
        last.imshow(seen["image"])
        last.set_title(f"{'solved' if info['success'] else 'not solved'} in {info['moves']} "
                       "actions", fontsize=8)
    for axis in axes.flat:
        axis.set_axis_off()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)


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
        | Annotated[Classes, tyro.conf.subcommand("classes")]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
        | Annotated[Summary, tyro.conf.subcommand("summary")]
        | Annotated[Diagnostics, tyro.conf.subcommand("diagnostics")]
        | Annotated[Worlds, tyro.conf.subcommand("worlds")]
        | Annotated[Memory, tyro.conf.subcommand("memory")],
        description=__doc__,
    )
    if not getattr(command, "runs", True):
        raise SystemExit("plot.py: --runs names no run; their folders are runs/...")
    draw = {Curve: curve, Episode: episode, Classes: classes, Compare: compare,
            Summary: summary, Diagnostics: diagnostics, Worlds: worlds,
            Memory: memory}
    draw[type(command)](command)
