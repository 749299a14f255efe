"""Environments in processes of their own: alike, side by side, and restarted when they die."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import envs
from envs import FrozenLake, make_env
from workers import WorkerLost, remote_envs


class Fragile(FrozenLake):
    """FrozenLake that dies, hangs or raises on command."""

    def step(self, reply):
        if reply == "die":
            os._exit(7)
        if reply == "hang":
            time.sleep(60)
        if reply == "raise":
            raise ValueError("renderer lost")
        return super().step(reply)


class Mortal(FrozenLake):
    """FrozenLake whose process dies at every seventh level, if it is a worker."""

    def reset(self, *, seed=None, options=None):
        if seed % 7 == 0 and sys.argv[0].endswith("workers.py"):
            os._exit(7)
        return super().reset(seed=seed, options=options)


def fragile(count, **options):
    return remote_envs("Fragile", count, **options)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name in ("Fragile", "Mortal"):
        monkeypatch.setitem(envs.OPEN_WORLDS, name, "test_workers")


GO = "<think></think><answer>Right</answer>"


def test_a_remote_environment_is_the_environment():
    here = make_env("FrozenLake", split="eval")
    there = remote_envs("FrozenLake", 1, processes=1, split="eval")[0]
    try:
        assert there.system_prompt == here.system_prompt
        for env in (here, there):
            env.frames = [env.reset(seed=3)[0]["image"]]
            for _ in range(3):
                seen, reward, ended, truncated, info = env.step(env.expert_reply(noise=0.3))
                env.frames.append(seen["image"])
                if ended or truncated:
                    break
            env.end = (seen["text"], reward, ended, truncated, info)
        assert here.end == there.end
        assert all(np.array_equal(a, b) for a, b in zip(here.frames, there.frames))
    finally:
        there.worker.close()


def test_what_a_world_raises_arrives_and_nothing_else_is_lost():
    env = fragile(1, processes=1)[0]
    try:
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match="ValueError: renderer lost"):
            env.step("raise")
        assert env.step(GO)[4]["turn"] == 1  # the same process, the same episode
    finally:
        env.worker.close()


@pytest.mark.parametrize("how, said", [("die", r"died \(exit code 7\)"), ("hang", "within 2 s")])
def test_a_lost_process_costs_the_episodes_in_it_alone(how, said):
    """Four environments in two processes: the neighbour in the same process has lost its episode,
    too, and says so; the others go on; all start again."""
    many = fragile(4, processes=2, limit=2.0)
    try:
        for env in many:
            env.reset(seed=1)
        with pytest.raises(WorkerLost, match=said):
            many[0].step(how)
        with pytest.raises(RuntimeError, match="call reset"):
            many[2].step(GO)
        assert many[1].step(GO)[4]["turn"] == many[3].step(GO)[4]["turn"] == 1
        for env in many[::2]:
            env.reset(seed=1)
            assert env.step(GO)[4]["turn"] == 1
    finally:
        for env in many:
            env.worker.close()


def test_processes_work_side_by_side():
    """Two calls that hang end together, not one after the other; each is reported."""
    many = fragile(2, processes=2, limit=2.0)
    try:
        for env in many:
            env.reset(seed=1)
        began = time.perf_counter()

        def lost(env):
            with pytest.raises(WorkerLost):
                env.step("hang")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lost, many))
        assert time.perf_counter() - began < 3.8
    finally:
        for env in many:
            env.worker.close()


def iteration(run, **changes) -> dict:
    """What a training run of one iteration logs of it, less the times."""
    import train_hygae  # here: a worker imports this file and wants no torch

    args = dict(num_envs=8, minibatches=1, cold_start=2, iterations=1, eval_episodes=4, max_turns=2,
                max_tokens=12, run_dir=str(run))
    train_hygae.main(train_hygae.Args(**(args | changes)))
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    record = next(m for m in records if "rollout/success" in m)
    return {k: v for k, v in record.items() if not k.startswith("time/")}


def test_training_does_not_see_the_difference(tmp_path):
    assert iteration(tmp_path / "0") == iteration(tmp_path / "2", env_workers=2)


def test_training_survives_processes_that_die(tmp_path, capfd):
    """One of eight training levels in a row, at least, kills the process of four environments."""
    record = iteration(tmp_path, env="Mortal", env_workers=2)
    assert 1 <= record["rollout/env_faults"] < 8
    assert record["optim/skipped"] == 0
    assert "died (exit code 7)" in capfd.readouterr().err
