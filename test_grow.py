"""The GROW training script: groups, samples, parity, invariance, resume, faults."""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bench
import plot
import train_grow
import train_hygae
from models import collate, load_policy, make_tiny
from openworld import Crafter
from train_grow import Args, Episode, Sample

ROOT = Path(__file__).parent
torch.set_num_threads(1)


def small(run: Path, **changes) -> Args:
    """A run of seconds: random replies of two tokens hardly ever succeed, so a few demonstrations
    come first, and easy tasks."""
    settings = dict(tasks="make_wood_pickaxe", horizon=6, groups=4, group_size=3, minibatches=2,
                    iterations=1, cold_start=20, demo_noise=0.1, eval_episodes=1, image_size=45,
                    max_tokens=2,
                    env_options=("worlds=2", "area=24", "brief=True"), run_dir=str(run))
    return Args(**{**settings, **changes})


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def first_gradient(run: Path) -> dict:
    """AdamW's first moment after one update is a tenth of the clipped gradient."""
    moments = load_file(run / "step_000001" / "optimizer.safetensors")
    return {name: x for name, x in moments.items() if name.endswith("exp_avg")}


def assert_same_gradient(a: Path, b: Path):
    same_gradient(first_gradient(a), first_gradient(b))


def same_gradient(a: dict, b: dict, tolerance=1e-5):
    scale = max(x.abs().max() for x in a.values())
    assert scale > 0 and len(a) > 20
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() < tolerance * scale, name


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, Crafter().texts, 0, patch=5)
    policy = load_policy(str(folder))
    head = policy.lm.get_output_embeddings()  # likelier ends: replies of different length
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[policy.eos] = 5.0
    return policy


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return small(tmp_path_factory.mktemp("run"), horizon=5, max_tokens=3)


def test_members_of_a_group_start_alike_and_act_apart(policy, args):
    """P21: byte-equal first frames, the same world for the same actions, other random numbers."""
    env = args.make_env("train", "seen")
    starts = train_grow.start_groups(env, [0, 1], args, first_seed=7)
    assert len(starts) == 6
    assert [e.env.task.name for e in starts[::3]] == [env.tasks[7 % 6], env.tasks[8 % 6]]  # in turn
    frames = [begun.observation["image"].tobytes() for begun in starts]
    assert len(set(frames[:3])) == len(set(frames[3:])) == 1 and frames[0] != frames[3]
    assert len({id(begun.env) for begun in starts}) == 6
    later = [begun.env.step("up")[0]["image"].tobytes() for begun in starts[:3]]
    assert len(set(later)) == 1
    noise = train_grow.numbers(0, 1, shape=(6, args.horizon, args.max_tokens))
    played = train_grow.start_groups(env, [0, 1], args, 7)
    train_grow.collect(policy, played, args, noise, 1)
    first = [tuple(e.samples[0].ids.tolist()) for e in played]
    assert len(set(first[:3])) > 1
    again = train_grow.start_groups(env, [0, 1], args, 7)
    train_grow.collect(policy, again, args, noise, 1)
    said = [[[s.ids.tolist() for s in e.samples] for e in group] for group in (played, again)]
    assert said[0] == said[1]
    noise[:, 1:] = 1 - noise[:, 1:]  # each step has its own random numbers
    third = train_grow.start_groups(env, [0, 1], args, 7)
    train_grow.collect(policy, third, args, noise, 1)
    assert [e.samples[0].ids.tolist() for e in third] == [replies[0] for replies in said[0]]
    assert [e.samples[1].ids.tolist() for e in third] != [replies[1] for replies in said[0]]


@pytest.mark.parametrize("history", [1, 3, 4])
def test_samples_are_what_was_seen_and_sampled(policy, args, history):
    """The training forward of the stored samples gives the log-probs and values of the rollout; a
    sample holds the last `history` frames and the replies between, and its length does not grow."""
    args = Args(**{**args.__dict__, "history": history, "micro_batch": 1})
    env = args.make_env("train", "seen")
    noise = train_grow.numbers(0, 2, shape=(3, args.horizon, args.max_tokens))
    played = train_grow.start_groups(env, [0], args, 3)
    train_grow.collect(policy, played, args, noise, args.temperature)
    assert any(e.cut for e in played) and any(e.cut < len(e.samples) for e in played)
    for episode in played:
        for t, sample in enumerate(episode.samples):
            count = min(t + 1, history)
            assert len(sample.frames) == len(sample.texts) == count == len(sample.past) + 1
            for k in range(1, count):
                before = episode.samples[t - k]
                assert np.array_equal(sample.frames[-1 - k], before.frames[-1])
                assert torch.equal(sample.past[-k][:len(before.ids)], before.ids)
                assert sample.past[-k][-1] == policy.eos  # a cut reply is closed, as context
        batch = collate(train_grow.transcribe(policy, env.system_prompt, episode.samples))
        out = policy(batch, args.temperature)
        assert (out["logprobs"] - batch["logprobs"]).abs().max() < 1e-4
        first = train_grow.first_tokens(batch["mask"]) > 0
        assert torch.equal(first.sum(1), torch.ones(len(first)).long())
        assert (out["values"][first] - batch["values"][first]).abs().max() < 1e-4
        lengths = batch["length"] - torch.tensor([len(s.ids) for s in episode.samples])
        full = lengths[history - 1:]  # past replies and a notice with the frame differ by a few
        assert full.max() < full.min() + 10 * history


def episode(steps: int, success: bool, values=None) -> Episode:
    values = values or [0.0] * steps
    samples = [Sample([], [], [], value=v) for v in values]
    return Episode(samples=samples, success=success, moves=steps)


def test_advantages_by_hand():
    """Group 0: a success in 1 step, a failure in 3: r = 1, 0, 0, 0. Pooled: mean 1/4, variance
    3/16; balanced (1/2 for the success, 1/6 for each step of the failure): 1/2 and 1/4. Group 4: a
    success and a failure of 2 steps. gamma 1/2: r = 1/2, 1, 0, 0: mean 3/8, square mean 5/16,
    variance 11/64. A third group was played and gave nothing: the mean over groups counts it."""
    def expect(args, advantages, weights, returns=(0,) * 8):
        out = train_grow.advantages_of(episodes, group, 3, args, None)
        for x, by_hand in zip(out, (advantages, weights, returns)):
            torch.testing.assert_close(x, torch.tensor(by_hand).double())
        assert out[3] == 8

    episodes = [episode(1, True, [0.5]), episode(3, False, [0.5, 0, 0]),
                episode(2, True, [0.5, 0]), episode(2, False, [1.0, 0])]
    group = torch.tensor([0, 0, 4, 4])
    weights = [1 / 6, 1 / 18, 1 / 18, 1 / 18, 1 / 12, 1 / 12, 1 / 12, 1 / 12]  # 1/3 1/2 1/H
    second = [x / math.sqrt(11) for x in (1, 5, -3, -3)]
    expect(Args(gamma=0.5, statistics="balanced"), [1, -1, -1, -1, *second], weights)
    pooled = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    expect(Args(gamma=0.5, statistics="pooled"), [*pooled, *second], weights)
    for algo in ("grpo_trajectory", "rloo"):
        expect(Args(algo=algo, statistics="pooled"), [1, -1, -1, -1, 1, 1, -1, -1], weights)
    # ppo, lam 1: A = G - V, whitened (mean 0, variance 2.5 / 7); every sample weighs the same
    returns = [1, 0, 0, 0, 0.5, 1, 0, 0]
    raw = [0.5, -0.5, 0, 0, 0, 1, -1, 0]
    expect(Args(algo="ppo", gamma=0.5, lam=1.0), [x / math.sqrt(2.5 / 7 + 1e-8) for x in raw],
           [1 / 8] * 8, returns)
    for algo in ("grow", "grpo_trajectory", "rloo", "ppo"):  # nothing to learn from: no error
        none = torch.zeros(0).long()
        *out, count = train_grow.advantages_of([], none, 2, Args(algo=algo), None)
        assert [len(x) for x in out] == [0, 0, 0] and count == 0


def test_which_episodes_are_learned_from():
    """Groups of two: both fail; both succeed; one of each; a dropped one beside a success; both
    dropped. Dropped episodes never count, groups without a signal only in the mean over groups."""
    played = [episode(2, win) for win in (0, 0, 1, 1, 0, 1, 1, 1, 0, 0)]
    for row in (6, 8, 9):
        played[row].fault = True
    for changes, expected in (({}, [2, 3, 4, 5, 7]), (dict(drop_equal_groups=True), [4, 5]),
                              (dict(algo="ppo"), [0, 1, 2, 3, 4, 5, 7])):
        args = Args(group_size=2, **changes)
        used, group, groups = train_grow.select(played, range(10), args)
        assert [row for row, _ in used] == expected and groups == 4
        assert all(e is played[row] for row, e in used)
        assert group.tolist() == [row // 2 for row in expected]
    used, group, groups = train_grow.select(played[4:6], [14, 15], args)  # of another process
    assert [row for row, _ in used] == [14, 15] and group.tolist() == [7, 7] and groups == 1


def test_no_gradient_anywhere_is_none_on_every_process(tmp_path):
    """Zeros in its place would let AdamW go on by its momentum, where one process stands still."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/sync", rank=0,
                                         world_size=1)
    try:
        for script in (train_grow, train_hygae):
            a, b = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
            b.grad = torch.full((2, 3), 0.5)
            script.reduce_gradients([a, b])
            assert a.grad is None and b.grad.tolist() == [[0.5] * 3] * 2
    finally:
        torch.distributed.destroy_process_group()


def test_the_advantage_reaches_the_answer(policy):
    """The first token behind <answer>, be the tag one token or several; all where it is missing."""
    def ids(*parts):
        rows = policy.tokenizer(list(parts), add_special_tokens=False)["input_ids"]
        return torch.tensor(sum(rows, []) + [policy.eos])

    assert len(ids("<answer>")) == 2  # one token for the tiny model, three as a large one has it
    for before in (["<answer>"], ["<", "answer", ">"]):
        reply = ids("<think>tree</think>", *before, "up</answer>")
        start = train_grow.answer_start(policy.tokenizer, reply)
        assert policy.tokenizer.decode(reply[start:]) == "up</answer><|im_end|>"
    assert train_grow.answer_start(policy.tokenizer, ids("up")) == 0
    assert train_grow.answer_start(policy.tokenizer, ids("<think>tree up")) == 0
    cut = ids("<answer>")[:1]  # nothing follows
    assert train_grow.answer_start(policy.tokenizer, cut) == 0
    mask = torch.tensor([[0.0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    assert train_grow.behind(mask, [2, 0]).tolist() == [[0, 0, 0, 1, 0], [0, 0, 1, 1, 1]]


def test_diagnostics_by_hand():
    """Distances to the target 3, 2, 2, 4, out of view, 1: from the first four it does not grow but
    in two (to 4, and out of view); it is found by the fifth reply if it was not in view before."""
    class World:
        distances = iter([2, 2, 4, None, 1, 1])

        def step(self, reply):
            distance = next(self.distances)
            info = dict(valid=reply == "do", success=reply == "do", moves=7,
                        target_distance=distance, target_visible=distance is not None)
            return "seen", 0.0, reply == "do", False, info

    played = Episode(World(), "start", {"target_distance": 3})
    goes_on = [train_grow.play(played, reply, Sample([], [], [])) for reply in ["up"] * 5 + ["do"]]
    assert goes_on == [True] * 5 + [False]
    assert played.locked == [True, True, False, False]  # none from out of view, none into the end
    assert played.found == 1 and played.success and played.moves == 7 and played.valid == 1
    lost = Episode(World(), "start", {"target_distance": None})
    World.distances = iter([None, None, 5, None])
    for _ in range(4):
        train_grow.play(lost, "up", Sample([], [], []))
    assert lost.found == 3 and lost.locked == [False] and len(lost.samples) == 4


def test_evaluation_counts_actions(monkeypatch):
    """Solved in 4, failed after 5, solved in 6, dropped: a success has 5 actions, and costs 7.5."""
    outcomes = iter([(True, 4), (False, 5), (True, 6), (True, 9)] + [(False, 5)] * 4)

    def collect(policy, episodes, args, uniforms, temperature):
        for episode in episodes:
            episode.success, episode.moves = next(outcomes)
            episode.fault = episode.moves == 9

    monkeypatch.setattr(train_grow, "collect", collect)
    args = Args(tasks="collect_wood", horizon=5)
    out = train_grow.evaluate(None, args, args.make_env("eval", args.tasks), 0, 1, 4)
    assert out["solved_in"] == {"collect_wood": [4, 0, 6, 0]}
    assert out["by_task"] == {"collect_wood": 2 / 3}
    assert (out["steps"], out["steps_per_success"], out["env_faults"]) == (5, 7.5, 1)
    out = train_grow.evaluate(None, args, args.make_env("eval", args.tasks), 0, 1, 4)
    assert out["success"] == 0 and out["steps"] is out["steps_per_success"] is None


def test_evaluations_are_alike(monkeypatch):
    """Episode k of a task: the same world and noise in a short and a long evaluation. A task whose
    episodes all failed to start, or that has no target to lose, is not a task at 0 %."""
    seen, left_out = [], set()

    def collect(policy, episodes, args, uniforms, temperature):
        for episode, noise in zip(episodes, uniforms):
            seen.append((episode.env.task.name, episode.env._seed, float(noise.sum())))
            episode.success, episode.fault = True, episode.env.task.name in left_out

    monkeypatch.setattr(train_grow, "collect", collect)
    args = Args(tasks="unseen", horizon=2, eval_episodes=2, env_options=("area=32",))
    env = train_grow.held_out(args, "craft", ("make_stone_pickaxe", "place_furnace"))
    assert len(env.tasks) == 5
    both = []
    for episodes in (2, 6):
        train_grow.evaluate(None, args, env, 0, 1, episodes)
        both.append(seen[:])
        seen.clear()
    assert len(both[0]) == 10 and len(both[1]) == 30
    assert set(both[0]) < set(both[1]) and len(set(both[1])) == 30
    left_out.add("place_table")
    out = train_grow.evaluate(None, args, env, 0, 1, 2)
    assert out["success"] == out["success_craft"] == 1 and out["env_faults"] == 2
    assert out["by_task"]["place_table"] is None
    out = train_grow.evaluate(None, args, env, 0, 1, 2, away=True)
    assert out["by_task"]["make_wood_sword"] is out["by_task"]["make_wood_pickaxe"] is None
    assert out["success"] == 1


def test_tasks_that_are_trained_on_are_not_called_unseen(tmp_path):
    out = train_grow.main(small(tmp_path, tasks="craft", cold_start=0, horizon=2))
    unseen = out["eval_unseen_by_task"].keys()
    assert "make_wood_sword" in out["eval_by_task"] and "make_wood_sword" not in unseen
    assert "collect_drink" in unseen


def test_diagnose_asks_for_the_worlds_it_names(monkeypatch):
    """Greedy, moved away, and as many distractors as the metric's name says."""
    asked = []

    def evaluate(policy, args, env, rank, world, episodes, temperature=None, away=False):
        asked.append((temperature, away, getattr(env, "distractors", None), env.split, env.tasks))
        return {"success": len(asked), "reacquired": 0.25, "reacquire_steps": 2.0, "steps": 4.0,
                "env_faults": 1}

    monkeypatch.setattr(train_grow, "evaluate", evaluate)
    out = train_grow.diagnose(None, Args(tasks="collect_wood"), "collect_wood", (), 0, 1)
    assert asked == [(0.0, False, None, "eval", ("collect_wood",)),
                     (None, True, None, "eval", ("collect_wood",))]
    assert out == {"greedy_success": 1, "reacquired": 0.25, "reacquire_steps": 2.0,
                   "away_success": 2, "away_steps": 4.0, "away_left_out": 1}
    asked.clear()
    out = train_grow.diagnose(None, Args(env="CraftingGrid"), "unseen", (), 0, 1)
    assert [row[:3] for row in asked] == [(0.0, False, 3), (None, False, 0), (None, False, 3),
                                          (None, False, 8)]
    assert out == {"greedy_success": 1, **{f"distractors_{n}_success": i for i, n in
                                           ((2, 0), (3, 3), (4, 8))}}


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    """A tiny model that has seen demonstrations: some of its episodes succeed, some do not."""
    run = tmp_path_factory.mktemp("beginner")
    train_grow.main(small(run, cold_start=200, save_every=1))
    return run / "step_000000"


def again(run: Path, beginner: Path, **changes) -> Args:
    """Reinforcement learning from the beginner."""
    return small(run, **{"model": str(beginner), "cold_start": 0, "horizon": 20,
                          **changes})


def test_ratios_outside_the_clip_range_by_hand():
    """Ratios 1.1 and 1.1 of a sample lie within 1 +- 0.2, their product 1.21 does not; tokens that
    the advantage does not reach are not asked."""
    gap = torch.tensor([[1.1, 1.1, 9.0], [0.7, 1.0, 1.5]]).log()
    acted = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    shares = {ratio: train_grow.outside(gap, acted, Args(ratio=ratio)).tolist()
              for ratio in ("token", "action")}
    assert shares == {"token": [0, pytest.approx(2 / 3)], "action": [1, 0]}  # 0.7 x 1.5 = 1.05


def test_the_kl_penalty_is_k2_and_holds(tmp_path, beginner, monkeypatch):
    """A larger one keeps the policy nearer; what the loss takes is (log pi - log ref)^2 / 2 alone:
    k1 has the wrong gradient, and k3's is exponential."""
    def distance(run, coefficient):
        train_grow.main(again(tmp_path / run, beginner, kl_coef=coefficient, iterations=3, lr=2e-3))
        return [m for m in metrics(tmp_path / run) if "rollout/success" in m][-1][
            "policy/reference_kl"]

    tight = distance("tight", 3.0)
    assert 0 < tight < 0.5 * distance("loose", 1e-9)

    def k2_alone(new, reference, mask):
        nothing = new * math.nan
        return nothing, (new - reference) ** 2 / 2 * mask, nothing.detach()

    monkeypatch.setattr(train_grow.hygrow, "kl_terms", k2_alone)
    assert distance("again", 3.0) == pytest.approx(tight, rel=1e-4)


def test_an_iteration_without_a_signal_is_said_and_moves_nothing(
        tmp_path, beginner, monkeypatch, capsys):
    """After an update, one in which nothing is to be learned: the momentum must not go on."""
    train_grow.main(again(tmp_path, beginner, save_every=1))
    monkeypatch.setattr(train_grow, "select", lambda *_: ([], torch.zeros(0).long(), 1))
    train_grow.main(train_grow.parse_args(["--resume", str(tmp_path), "--iterations", "2"]))
    first, second = (m for m in metrics(tmp_path) if "rollout/success" in m)
    assert first["optim/updates"] == 2 and second["optim/updates"] == 0
    assert first["optim/grad_norm"] > 0 and second["optim/grad_norm"] is None
    assert capsys.readouterr().out.count("no update: every group failed as a whole") == 1
    a, b = (load_file(tmp_path / f"step_00000{k}" / "model.safetensors") for k in (1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_that_is_not_there_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in (train_grow, train_hygae):
        with pytest.raises(SystemExit, match="--model ./nosuch: no such local folder"):
            script.main(script.parse_args(["--model", "./nosuch", "--run-dir", "runs/x"]))
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("changes", [{}, dict(ratio="action", kl_coef=0.1), dict(algo="ppo")])
def test_gradient_does_not_depend_on_micro_batches(tmp_path, beginner, changes):
    for size in (64, 5):
        run = tmp_path / str(size)
        train_grow.main(again(run, beginner, micro_batch=size, minibatches=1, **changes))
        assert 0 < next(m for m in metrics(run) if "rollout/success" in m)["rollout/success"] < 1
    assert_same_gradient(tmp_path / "64", tmp_path / "5")


TERMS = {"policy": dict(entropy_coef=0.0), "value": dict(algo="ppo", entropy_coef=0.0),
         "KL": dict(kl_coef=0.3, entropy_coef=0.0)}


@pytest.mark.parametrize("term", TERMS)
def test_gradient_of_each_term_does_not_depend_on_the_cut(policy, args, term):
    """Samples a pass, samples divided over two processes: the same gradient to 1e-5."""
    chosen = replace(args, minibatches=1, **TERMS[term])
    env = chosen.make_env("train", chosen.tasks)
    samples = bench.play_steps(policy, env, 7, 0.5)
    noise = torch.Generator().manual_seed(0)
    advantages, returns = torch.randn(2, 7, generator=noise)
    weights = torch.rand(7, generator=noise)
    if term != "policy":
        advantages = torch.zeros(7)
    reference = None
    if term == "KL":
        reference = copy.deepcopy(policy)
        with torch.no_grad():
            reference.lm.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.3)

    def gradient(size, pieces=1):
        policy.zero_grad(set_to_none=True)
        for inds in torch.arange(7).chunk(pieces):
            train_grow.accumulate(policy, reference, env.system_prompt, samples, inds,
                                  (advantages, weights, returns, 7), chosen, 1.0, size)
        return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

    whole = gradient(7)
    for cut in (gradient(1), gradient(3), gradient(7, pieces=2), gradient(2, pieces=3)):
        same_gradient(whole, cut)
    assert ("value_head.weight" in whole) == (term == "value")
    policy.zero_grad(set_to_none=True)


def torchrun(processes: int, args: Args, timeout=150) -> str:
    flags = []
    for name, value in args.__dict__.items():
        if value != Args.__dataclass_fields__[name].default:
            values = value if isinstance(value, tuple) else [str(value)]
            flags += [f"--{name.replace('_', '-')}", *values]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
               "--standalone", str(ROOT / "train_grow.py"), *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                         timeout=timeout)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("algo", ["grow", "ppo"])
def test_two_processes_are_one(tmp_path, beginner, algo):
    for processes in (1, 2):
        torchrun(processes, again(tmp_path / str(processes), beginner, algo=algo, minibatches=1))
    assert_same_gradient(tmp_path / "1", tmp_path / "2")
    for one, two in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2")):
        for name, value in one.items():
            if "/" in name and not name.startswith(("time/", "memory/")):
                close = value if value is None else pytest.approx(value, rel=1e-3, abs=1e-5)
                assert two[name] == close, name


def test_resume_is_bit_for_bit(tmp_path, beginner):
    train_grow.main(again(tmp_path / "whole", beginner, iterations=3, save_every=1))
    train_grow.main(again(tmp_path / "parts", beginner, iterations=3, save_every=1, eval_every=9))
    kept = sorted(folder.name for folder in (tmp_path / "parts").glob("step_*"))
    assert kept == ["step_000000", "step_000002", "step_000003"]  # the start and the newest two
    shutil.rmtree(tmp_path / "parts" / "step_000003")
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text()
    train_grow.main(train_grow.parse_args(["--resume", str(tmp_path / "parts")]))
    for file in ("model", "critic", "optimizer"):
        a, b = (load_file(tmp_path / run / "step_000003" / f"{file}.safetensors")
                for run in ("whole", "parts"))
        assert all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()
    strip = lambda text: [{k: v for k, v in json.loads(line).items()
                           if not k.startswith(("time/", "memory/"))} for line in text.splitlines()]
    assert strip((tmp_path / "parts" / "metrics.jsonl").read_text()) == strip(lines)


def test_damage_is_named_and_a_torn_log_is_mended(tmp_path):
    """Nothing that a resumed run needs may be missing in silence, nor may it become another run."""
    train_grow.main(small(tmp_path, cold_start=0))
    last, log = tmp_path / "step_000001", tmp_path / "metrics.jsonl"
    args = train_grow.parse_args(["--resume", str(tmp_path), "--iterations", "2"])
    for name, text in (("state.json", b"{}"), ("critic.safetensors", None)):
        whole = (last / name).read_bytes()
        (last / name).write_bytes(text) if text else (last / name).unlink()
        with pytest.raises(SystemExit, match=f"damaged .*{name}.* from the one before"):
            train_grow.main(args)
        (last / name).write_bytes(whole)
    for flags in (["--model", "other"], ["--image-size", "63"], ["--env-options", "area=64"]):
        with pytest.raises(SystemExit, match=f"--resume cannot change {flags[0]} from "):
            train_grow.parse_args(["--resume", str(tmp_path), *flags])
    before = metrics(tmp_path)
    assert before[0]["eval/success"] == 0 and before[0]["eval/steps"] is None  # not 0, the best
    log.write_text(log.read_text() + '{"iteration": 1, "eval_by_task": {"x": 0.0}')
    train_grow.main(args)
    after = metrics(tmp_path)
    assert after[:len(before)] == before and [m["iteration"] for m in after[len(before):]] == [2, 2]


def test_a_kill_before_the_first_evaluation_costs_only_that(tmp_path):
    """The cold start is saved before it is measured; a resumed run measures it then."""
    train_grow.main(small(tmp_path, cold_start=2))
    before = metrics(tmp_path)
    shutil.rmtree(tmp_path / "step_000001")
    early = [m for m in before if "cold_start/step" in m]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in early))
    train_grow.main(train_grow.parse_args(["--resume", str(tmp_path)]))
    def timeless(records):
        return [{k: v for k, v in m.items() if not k.startswith(("time/", "memory/"))}
                for m in records]
    assert timeless(metrics(tmp_path)) == timeless(before)
    assert [m["label"] for m in before if "label" in m] == ["cold start", "end"]


@pytest.mark.parametrize("changes", [
    dict(algo="grpo_trajectory", drop_equal_groups=True), dict(algo="rloo", epochs=2),
    dict(statistics="pooled", history=2), dict(group_size=1), dict(groups=1, minibatches=8),
    dict(env_options=("chunk=3", "brief=True"), max_tokens=8),
    dict(env="CraftingGrid", tasks="seen", env_options=("distractors=0",), cold_start=2),
])
def test_variants_run(tmp_path, beginner, changes):
    start = beginner if changes.get("env", "Crafter") == "Crafter" else "tiny"
    train_grow.main(again(tmp_path, start, **changes))
    record = next(m for m in metrics(tmp_path) if "rollout/success" in m)
    quiet = record["advantage/zero_frac"] == 1  # then nothing is updated, and there is no mean
    for name, value in record.items():
        absent = name == "rollout/steps" or name.startswith("rollout/success_") or (
            quiet and name.startswith(("policy/", "optim/grad_norm")))
        assert absent if value is None else math.isfinite(value), name
    assert record["optim/skipped"] == 0


def test_faulty_world_is_counted_and_survived(tmp_path, beginner, monkeypatch, capfd):
    """A world that raises in reset or in step costs its episode, never the run."""
    step, count, broken = Crafter.step, iter(range(10**9)), []

    def break_sometimes(env, reply):
        if env.split == "train" and next(count) % 9 == 4:
            broken.append(env)
            raise RuntimeError("renderer lost")
        return step(env, reply)

    monkeypatch.setattr(Crafter, "step", break_sometimes)
    train_grow.main(again(tmp_path, beginner, iterations=1))
    record = next(m for m in metrics(tmp_path) if "rollout/success" in m)
    assert record["rollout/env_faults"] == len(broken) > 0
    assert record["rollout/samples"] < record["rollout/actions"]  # what was played, and what counts
    printed = capfd.readouterr().err
    assert "episode dropped, Crafter.step raised RuntimeError('renderer lost')" in printed
    monkeypatch.setattr(Crafter, "step", step)
    reset = Crafter.reset

    def no_start(env, **how):
        if how["seed"] % 2:
            raise RuntimeError("no world")
        return reset(env, **how)

    monkeypatch.setattr(Crafter, "reset", no_start)
    train_grow.main(again(tmp_path / "reset", beginner, iterations=1))
    record = next(m for m in metrics(tmp_path / "reset") if "rollout/success" in m)
    assert record["rollout/env_faults"] == 6  # two of four groups, three members each


@pytest.mark.parametrize("flags, message", [
    (["--algo", "sarsa"], "--algo 'sarsa' is none of grow, grpo_trajectory, rloo, ppo"),
    (["--gamma", "1.5"], "--gamma 1.5 is outside"),
    (["--tasks", "fly"], "tasks='fly' is not in Crafter"),
    (["--horizon", "0"], "--horizon 0 must be at least 1"),
    (["--group-size", "1", "--algo", "rloo"], "--group-size 1 leaves --algo rloo nothing to comp"),
    (["--group-size", "1", "--drop-equal-groups"], "--group-size 1 leaves --algo grow nothing to"),
    (["--group-size", "1", "--gamma", "1"], "--group-size 1 leaves --algo grow nothing to compare"),
    (["--algo", "ppo", "--drop-equal-groups"], "does not go with --algo ppo"),
    (["--env", "FrozenLake"], "--env 'FrozenLake' is none of Crafter, CraftingGrid"),
    (["--env-options", "horizon=3"], "--env-options horizon is not set there: see --horizon"),
    (["--env-options", "split=eval"], "not set there: training and evaluation choose it"),
    (["--env-options", "distractors=3"], "--env-options 'distractors' is no option of Crafter; it"),
    (["--env-options", "area"], "'area' is not of the form name=value"),
])
def test_wrong_flags_are_refused_with_a_sentence(flags, message, capsys):
    with pytest.raises(SystemExit):
        train_grow.parse_args(flags)
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in printed


def test_memory_of_an_update_against_the_length_of_the_episode(tmp_path):
    """bench.py writes what plot.py draws; a conversation's tokens are those of its samples, less
    the system prompts; two micro-batches do not need more than one."""
    data, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    command = [sys.executable, ROOT / "bench.py", "memory", "--lengths", "8", "16",
               "--micro-batch", "8", "--out", data]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(data.read_text())["rows"]
    assert printed.count("\n") == 2 + len(rows)
    cost = {(row["layout"], row["steps"]): row for row in rows}
    assert cost.keys() == {(layout, n) for layout in bench.LAYOUTS for n in (8, 16)}
    for row in rows:
        assert row["fits"] and row["seconds"] > 0 and 0 < row["peak_mb"] < row["total_mb"]
    samples, trajectory = ([cost[layout, n] for n in (8, 16)] for layout in bench.LAYOUTS)
    assert all(s["tokens"] > t["tokens"] for s, t in zip(samples, trajectory))
    assert trajectory[1]["peak_mb"] > 1.5 * trajectory[0]["peak_mb"]
    assert samples[1]["peak_mb"] < 1.3 * samples[0]["peak_mb"]
    plot.memory(plot.Memory(str(data), str(picture)))
    assert picture.stat().st_size > 1000


def test_metric_table_of_the_readme_is_complete(beginner):
    names = {re.sub("_(embodied|craft|combat|gui)$", "_KIND", name.replace("eval_unseen", "eval"))
             for record in metrics(beginner.parent) for name in record if "/" in name}
    readme = (ROOT / "README.md").read_text()
    missing = [name for name in names if f"`{name}`" not in readme]
    assert not missing, missing


def fake_run(folder: Path, success: list, steps: list, samples: int, **changes) -> str:
    """A run of one iteration between evaluations, as its files tell it."""
    folder.mkdir()
    settings = {"group_size": 8, "env": "Crafter", "tasks": "seen", "algo": "grow",
                "gamma": 0.97} | changes
    (folder / "args.json").write_text(json.dumps(settings | {"run_dir": str(folder)}))
    records = []
    for k, (share, moves) in enumerate(zip(success, steps)):
        records += [{"iteration": k, "rollout/actions": samples}] if k else []
        label = {0: "cold start", len(success) - 1: "end"}.get(k, f"iteration {k}")
        record = {"iteration": k, "label": label, "time/seconds": 60.0 * k,
                  "eval/success": share, "eval/success_craft": share / 2,
                  "eval/steps_per_success": moves, "eval_unseen/success": share / 4,
                  "eval_unseen/steps_per_success": moves,
                  "eval/locking": share, "eval/reacquire_steps": None if k else moves,
                  "eval_unseen/locking": share / 2,
                  "eval_solved_in": {"x": [8 - k, 0, 6 - k], "y": [k, 5, 0]}}
        if not label.startswith("iteration"):  # the ends have more
            record |= {"eval/greedy_success": 0.5}
        records.append(record)
    lines = [json.dumps(record) for record in records] + ['{"iteration": 9, "torn']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_tables_and_pictures_of_runs(tmp_path, capsys):
    """Medians by hand; equal steps by interpolation; a label says what sets a run apart."""
    a = fake_run(tmp_path / "a", [0.2, 0.4, 0.6], [20, 18, 16], 100)
    b = fake_run(tmp_path / "b", [0.2, 0.3, 0.5], [20, 18, 14], 80, gamma=1.0)
    c = fake_run(tmp_path / "c", [0.3, 0.3, 0.7], [20, 18, 12], 90, gamma=0.9)
    plot.summary(plot.Summary((a, b, c)))
    median = capsys.readouterr().out.splitlines()[-1]
    assert median == ("| median | 20.0% | 50.0% | 20.0 | 5.0% "
                      "| 60.0% | 50.0% | 14.0 | 15.0% | 6.3 | 5.0 | 2.0 |")  # 8, 6, 5 -> 6, 4, 5
    plot.diagnostics(plot.Diagnostics((a, b, c)))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| success_craft | 10.0% | 30.0% | - | - |", "| locking | 20.0% | 60.0% | 10.0% | 30.0% |",
        "| reacquire_steps | 20.0 | - | - | - |"]
    plot.compare(plot.Compare((a, b, c), str(tmp_path / "compare.png")))
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| | start | after 160 actions |"  # b has played the fewest
    assert table[2:] == ["| gamma 0.97 | 20.0% | 52.0% |",  # 0.4 + 0.6 x (0.6 - 0.4)
                         "| gamma 1.0 | 20.0% | 50.0% |", "| gamma 0.9 | 30.0% | 61.1% |"]
    plot.classes(plot.Classes((a, b, c), str(tmp_path / "classes.png")))
    _, axis = plot.plt.subplots()
    runs = [[{"iteration": k, "x": x} for k, x in enumerate(xs)] for xs in ([1, 5], [3, 9, 7])]
    plot.lines(axis, runs, "x", "k", "")
    assert axis.lines[-1].get_xydata().tolist() == [[0, 2], [1, 7]]  # where both have it
    for name in ("compare", "classes"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="is a run of train_grow.py; this picture is for train_hy"):
        plot.curve(plot.Curve((a,), str(tmp_path / "curve.png")))
    assert not (tmp_path / "curve.png").exists()


@pytest.mark.slow
def test_training_learns(tmp_path):
    """From a cold start to clearly more on held-out worlds: place a table, make a pickaxe.

    120 episodes before and after, so the standard error of their difference is below 0.065 whatever
    the rates: a run that learns nothing passes with odds of about 1 in 1000.
    """
    args = Args(tasks="make_wood_pickaxe", env_options=("brief=True",), image_size=63, max_tokens=2,
                horizon=12, cold_start=500, demo_noise=0.8, groups=4, iterations=12, save_every=12,
                eval_every=12, eval_episodes=1, run_dir=str(tmp_path))
    torchrun(2, args, timeout=900)
    env = args.make_env("eval", args.tasks)
    before, after = (
        train_grow.evaluate(load_policy(str(tmp_path / step)), args, env, 0, 1, 120)["success"]
        for step in ("step_000000", "step_000012"))
    print(f"success {before:.1%} -> {after:.1%}")
    assert 0.02 < before < 0.6
    assert after > before + 0.2
