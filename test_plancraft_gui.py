"""Tests of plancraft_gui.py. All but the first are skipped where plancraft is not installed."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs
from envs import make_env


def test_without_the_package_it_says_what_to_install():
    script = ("import sys\nsys.modules['plancraft'] = None\nimport envs\n"
              "envs.make_env('Plancraft')\n")
    run = subprocess.run([sys.executable, "-c", script], cwd=Path(envs.__file__).parent,
                         capture_output=True, text=True)
    assert "pip install plancraft==0.4.9" in run.stderr


@pytest.fixture
def env():
    pytest.importorskip("plancraft")
    return make_env("Plancraft")


def test_contract(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    large = make_env("Plancraft", large=True, text_state=True, split="eval", tasks="all")
    check_env(large, skip_render_check=True)
    observation, info = large.reset(seed=0)
    assert info["target"].replace("_", " ") in observation["text"]
    assert observation["text"].count("\n[I") == len(large._game.state)
    assert (env.reset(seed=0)[0]["image"][166:] == 0).all()
    assert env.reset(seed=0)[0]["image"][:166, :176].any(axis=2).mean() > 0.9


def test_expert_solves_and_episodes_do_not_leak(env):
    """The same seed twice: the same start, though the first episode used things up."""
    solved, random = 0, 0
    for seed in range(12):
        starts = []
        for _ in range(2):
            observation, info = env.reset(seed=seed)
            starts.append(observation["image"].tobytes())
            done = info["success"]
            assert not done
            while not done:
                _, reward, done, truncated, info = env.step(env.expert_reply())
                assert info["valid"] and reward == float(info["success"])
                done = done or truncated
            solved += info["success"]
        assert starts[0] == starts[1]
        env.reset(seed=seed)
        for _ in range(30):
            _, _, ended, truncated, info = env.step(env.expert_reply(1.0))
            if ended or truncated:
                break
        random += info["success"]
        assert info["valid"] and info["turn"] <= 30
    assert solved == 24 and random <= 2


def test_replies(env):
    env.reset(seed=0)
    frame = env._frame()
    for reply in ("", "move", "move: from [I1] to [0] with quantity 1",
                  "move: from [A1] to [A1] with quantity 1", "stop",
                  "move: from [I1] to [I37] with quantity 1",
                  "move: from [D1] to [I3] with quantity 1",
                  "I move: from [I1] to [I2] with quantity 1",
                  "move: from [I1] to [I2] with quantity 0",
                  "move: from [I1] to [I2] with quantity 65",
                  "smelt: from [0] to [I2] with quantity 1"):
        observation, reward, ended, _, info = env.step(reply)
        assert not info["valid"] and reward == 0.0 and not ended
        assert observation["text"].startswith("Invalid reply. Craft: ")
        assert (observation["image"] == frame).all()
    full = next(slot for slot in env._game.state if slot > 9)
    empty = next(slot for slot in range(10, 46) if slot not in env._game.state)
    amount = env._game.state[full]["quantity"]
    reply = f"move: from [I{full - 9}] to [I{empty - 9}] with quantity {amount}"
    observation, *_, info = env.step(reply)
    assert info["valid"] and full not in env._game.state
    assert env._game.state[empty]["quantity"] == amount
    assert (observation["image"] != frame).any()
    with pytest.raises(TypeError):
        env.step(3)


def test_splits_and_options(env):
    train = {e.id for e in env._examples}
    held = {e.id for e in make_env("Plancraft", split="eval")._examples}
    unseen = make_env("Plancraft", split="eval", tasks="unseen", difficulty="all")._examples
    assert len(train) == 400 and len(held) > 100 and not train & held
    wanted = {e.target for e in make_env("Plancraft", tasks="all", difficulty="all")._examples}
    assert len(unseen) == 72 and not wanted & {e.target for e in unseen}
    with pytest.raises(ValueError, match="leave no example of split 'train'"):
        make_env("Plancraft", tasks="unseen")
    with pytest.raises(ValueError, match="difficulty='huge'"):
        make_env("Plancraft", difficulty="huge")
    drawn = {env.reset(seed=s)[1]["target"] for s in range(40)}
    assert len(drawn) > 20
    assert isinstance(env.expert_reply(), str) and np.isfinite(env._frame()).all()
