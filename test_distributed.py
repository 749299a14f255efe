"""Several processes on the CPU: shards equal the whole model, no process waits for ever, and what is
lost is named. Each run has a time limit. Minutes, so: pytest -m distributed"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import test_grow
import train_grow
import train_hygae
from test_grow import beginner
from test_training import assert_same_gradient, first_gradient, small

__all__ = ["beginner"]  # a fixture
ROOT = Path(__file__).parent
pytestmark = pytest.mark.distributed
torch.set_num_threads(1)


def start(args, processes: int, patch: str = "") -> subprocess.Popen:
    """torchrun of the script that `args` belong to, `patch` executed in each process before."""
    script = "train_grow" if isinstance(args, train_grow.Args) else "train_hygae"
    run = Path(args.resume or args.run_dir)
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.parent / f"start_{run.name}.py"
    file.write_text(f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
                    f"import {script} as train\n"
                    f"from {script} import Args\nfrom large import explained\n{patch}\n"
                    f"with explained('{script}.py', {str(run)!r}):\n    train.main({args!r})\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(processes), str(file)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, start_new_session=True)


def ended(run: subprocess.Popen, seconds: float) -> tuple[int, str]:
    """Exit status and output; a run that outlives the limit fails the test."""
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output, _ = run.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output[-3000:]}")
    return run.returncode, output


def succeed(args, processes: int, patch: str = "", seconds: float = 150) -> str:
    status, output = ended(start(args, processes, patch), seconds)
    assert status == 0, output[-3000:]
    return output


def records(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a kill tears the last


def changed(args, **changes):
    return type(args)(**args.__dict__ | changes)


# ---------------------------------------------------------------------------------- the same run
@pytest.mark.parametrize("changes", [
    dict(), dict(critic="separate", kl_coef=0.1, grad_checkpointing=True, offload=True),
    dict(freeze_vision=True, micro_batch=3, kl_coef=0.1),
])
def test_shards_are_the_whole_model(tmp_path, changes):
    """Two processes with shards have the first-update gradient of one without, and log the same;
    what they save opens plainly."""
    args = small(tmp_path / "whole", cold_start=0, **changes | dict(offload=False))
    train_hygae.main(args)
    succeed(small(tmp_path / "cut", cold_start=0, shard=True, **changes), 2)
    assert_same_gradient(first_gradient(tmp_path / "whole"), first_gradient(tmp_path / "cut"))
    compared = 0
    for one, two in zip(records(tmp_path / "whole"), records(tmp_path / "cut")):
        for name, value in one.items():
            if "/" in name and not name.startswith(("time/", "memory/")):
                assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
                compared += 1
    assert compared > 30
    saved = tmp_path / "cut" / "step_000001"
    _, report = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for file in ("model", "critic"):
        whole, cut = (load_file(tmp_path / run / f"step_000001/{file}.safetensors")
                      for run in ("whole", "cut"))
        assert {k: v.shape for k, v in whole.items()} == {k: v.shape for k, v in cut.items()}


@pytest.mark.parametrize("before, after", [((2, True), (1, False)), ((1, False), (2, True))])
def test_run_goes_on_with_another_number_of_processes(tmp_path, before, after):
    """Two iterations in one sitting, or in two with another layout: the same first moments."""
    settings = dict(cold_start=0, iterations=2)
    train_hygae.main(small(tmp_path / "whole", **settings))
    parts = small(tmp_path / "parts", shard=before[1], **settings)
    succeed(parts, before[0])
    (tmp_path / "parts/step_000002/state.json").unlink()  # as if it had not got so far
    succeed(changed(parts, run_dir="", resume=str(tmp_path / "parts"), shard=after[1]), after[0])
    a, b = ({n: x for n, x in load_file(tmp_path / run / "step_000002/optimizer.safetensors").items()
             if n.endswith("exp_avg")} for run in ("whole", "parts"))
    assert_same_gradient(a, b, tolerance=1e-3)  # Adam blows up the rounding of the first update
    assert [r["iteration"] for r in records(tmp_path / "parts") if "loss/total" in r] == [1, 2]


def test_grow_shards_are_the_whole_model(tmp_path, beginner):
    """Ranks have different numbers of samples, so one of them makes passes from which nothing is
    learned."""
    cut = test_grow.again(tmp_path / "cut", beginner, minibatches=1, kl_coef=0.1, micro_batch=2,
                          shard=True)
    count = ("import large\npasses = large.passes\n"
             "def noted(count, sharded):\n"
             "    most = passes(count, sharded)\n"
             f"    with open({str(tmp_path)!r} + '/passes' + os.environ['RANK'], 'a') as file:\n"
             "        print(count, most, file=file)\n"
             "    return most\n"
             "train.passes = noted\n")
    succeed(cut, 2, count)
    made = [(tmp_path / f"passes{rank}").read_text().split() for rank in (0, 1)]
    assert made[0][1::2] == made[1][1::2] != []
    assert any(own != other for own, other in zip(made[0][::2], made[1][::2])), made
    train_grow.main(changed(cut, shard=False, run_dir=str(tmp_path / "whole")))
    alone, both = (test_grow.first_gradient(tmp_path / run) for run in ("whole", "cut"))
    for name in both.keys() - alone.keys():  # the value head, which has no part in GROW
        assert "value_head" in name and not both.pop(name).any()
    assert_same_gradient(alone, both)


def test_everything_at_once(tmp_path):
    """bfloat16, shards in CPU memory, recomputation, frozen tower, truncated episodes."""
    flags = dict(shard=True, bf16=True, offload=True, grad_checkpointing=True, kl_coef=0.1,
                 bootstrap_truncated=True, max_context=150, max_turns=4)
    for name, more in (("frozen", dict(freeze_vision=True)), ("seeing", dict(critic="separate"))):
        succeed(small(tmp_path / name, **flags, **more), 2)
        last = [r for r in records(tmp_path / name) if "loss/total" in r][-1]
        assert last["loss/total"] is not None and last["optim/skipped"] == 0
        state = load_file(tmp_path / name / "step_000001/model.safetensors")
        assert {x.dtype for x in state.values()} == {torch.float32}


# -------------------------------------------------------------------------------- no one waits
FAULTY = """
from envs import FrozenLake
step = reset = None
step, reset = FrozenLake.step, FrozenLake.reset
def lost(self, reply):
    if os.environ["RANK"] == "1" and self.split == "train" and {steps}:
        raise OSError("the simulator is gone")
    return step(self, reply)
def never(self, **options):
    if os.environ["RANK"] == "1" and self.split == "train" and {resets}:
        raise OSError("no scene")
    return reset(self, **options)
FrozenLake.step, FrozenLake.reset = lost, never
"""


@pytest.mark.parametrize("what", ["steps", "resets"])
@pytest.mark.parametrize("shard", [False, True])
def test_a_process_whose_worlds_fail(tmp_path, what, shard):
    """All episodes of one process raise: counted, and the others' are learned from."""
    patch = FAULTY.format(steps=what == "steps", resets=what == "resets")
    output = succeed(small(tmp_path / "run", cold_start=0, shard=shard, micro_batch=2), 2, patch)
    counted = [r["rollout/env_faults"] for r in records(tmp_path / "run") if "loss/total" in r]
    assert counted == [4] and "episode dropped" in output


GROW_FAULTY = """
from openworld import Crafter
step = Crafter.step
def lost(self, reply):
    if os.environ["RANK"] == "1" and self.split == "train":
        raise OSError("the simulator is gone")
    return step(self, reply)
Crafter.step = lost
"""


@pytest.mark.parametrize("shard", [False, True])
def test_a_process_without_a_sample(tmp_path, shard, beginner):
    args = test_grow.again(tmp_path / "run", beginner, shard=shard, kl_coef=0.1, minibatches=1)
    succeed(args, 2, GROW_FAULTY)
    last = [r for r in records(tmp_path / "run") if "loss/total" in r][-1]
    assert last["rollout/env_faults"] == 6  # two of four groups of three
    assert last["optim/updates"] == 1, "the other process had no sample either"


STARVED = """
import models, torch
forward = models.Policy.forward
def limited(self, batch, temperature=1.0):
    out = forward(self, batch, temperature)
    if torch.is_grad_enabled() and os.environ["RANK"] == "1" and len(batch["mask"]) > 1:
        raise torch.OutOfMemoryError("a made-up shortage")
    return out
models.Policy.forward = limited
"""


def test_out_of_memory_on_one_process(tmp_path):
    """It alone halves; the gradient stays. With shards, where the others wait inside the pass, the
    run ends in time and says what to do."""
    train_hygae.main(small(tmp_path / "rich", cold_start=0))
    succeed(small(tmp_path / "poor", cold_start=0), 2, STARVED)
    assert_same_gradient(first_gradient(tmp_path / "rich"), first_gradient(tmp_path / "poor"))
    counted = [r["optim/oom_retries"] for r in records(tmp_path / "poor") if "loss/total" in r]
    assert counted == [4]  # 12 -> 6 -> 3 -> 2 -> 1, once
    status, output = ended(start(small(tmp_path / "cut", cold_start=0, shard=True), 2, STARVED), 150)
    assert status != 0 and "out of memory with --micro-batch 12: with --shard" in output


# ------------------------------------------------------------------------------ stopped, killed
def workers(run: subprocess.Popen) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
    return [int(pid) for pid in children.stdout.split()]


def wait_for(path: Path, run: subprocess.Popen, seconds: float = 150) -> None:
    deadline = time.time() + seconds
    while not path.exists():
        assert time.time() < deadline and run.poll() is None, run.communicate()[0][-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("shard", [False, True])
def test_interrupt_ends_all_processes(tmp_path, shard):
    run = start(small(tmp_path / "run", iterations=500, shard=shard), 2)
    wait_for(tmp_path / "run/step_000001/state.json", run)
    children = workers(run)
    assert len(children) == 2
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
    status, _ = ended(run, 60)
    assert status != 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_kill_of_one_process_at_a_random_moment_five_times(tmp_path):
    """With and without shards in turn. The run can always go on, nothing before the last checkpoint
    is lost, and what is left of the run says what happened."""
    args, dice = small(tmp_path / "run", iterations=400, minibatches=2, eval_every=10), random.Random(0)
    folder, done = tmp_path / "run", 0
    for attempt in range(5):
        shard = bool(attempt % 2)
        resume = dict(run_dir="", resume=str(folder)) if attempt else {}
        run = start(changed(args, shard=shard, **resume), 2)
        wait_for(folder / f"step_{done + 1:06d}", run)
        time.sleep(dice.uniform(0, 4))
        saved = train_hygae.checkpoints(folder)[-1]
        os.kill(dice.choice(workers(run)), signal.SIGKILL)
        status, output = ended(run, 90)
        assert status != 0
        assert "another process of this run has ended or was stopped" in output, output[-3000:]
        assert f"--resume {folder}" in output
        now = int(train_hygae.checkpoints(folder)[-1].name[5:])
        assert now >= int(saved.name[5:]) > done
        done = now
        logged = [r["iteration"] for r in records(folder) if "loss/total" in r]
        assert logged[:done] == list(range(1, done + 1))  # no hole, nothing twice
    last = changed(args, run_dir="", resume=str(folder), iterations=done + 1)
    succeed(last, 2)
    assert [r["iteration"] for r in records(folder) if "loss/total" in r] == list(range(1, done + 2))


