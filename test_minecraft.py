"""Tests of minecraft.py: codecs against tables written down here, the adapter against a fake.

`FakeSim` keeps what was recorded of MineStudio 1.1.6's simulator; the real engine is never started.
"""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import minecraft
from minecraft import (
    BEGIN,
    CENTRE,
    END,
    INVENTORY,
    KEYS,
    Minecraft,
    Task,
    bin_of,
    codes_to_keys,
    decode_text,
    decode_tokens,
    degrees_of,
    encode_text,
    encode_tokens,
    keys_to_codes,
)

RECORDED = [0, 0.178, 0.419, 0.746, 1.19, 1.79, 2.61, 3.71, 5.21, 7.24, 10]  # degrees
GROUPS = [  # in the simulator's order
    ["none", *(f"hotbar.{n}" for n in range(1, 10))], ["none", "forward", "back"],
    ["none", "left", "right"], ["none", "sprint", "sneak"], ["none", "use"], ["none", "drop"],
    ["none", "attack"], ["none", "jump"], ["none", "camera"],
]
COMBINATIONS = list(itertools.product(*GROUPS))
FIRST = [151837, 151847, 151850, 151853, 151856, 151858, 151860, 151862, 151864]
LOG = Task("mine_block:oak_log", "mine_block", ("oak_log", "birch_log"))


class FakeSim:
    """Agent actions are popped and replaced; counters run on in dicts written in place; noisy
    rewards mean nothing; the engine's end sets both flags; each attack mines a log."""

    def __init__(self, task, seed, action_type, ends_at=None):
        self.task, self.seed, self.action_type, self.ends_at = task, seed, action_type, ends_at
        self.played, self.taken, self.resets, self.closed = [], [], 0, False
        self.info = {"mine_block": {"oak_log": np.array(7.0)}, "isGuiOpen": False,
                     "pov": np.zeros((360, 640, 3), np.uint8), "kill_entity": {}}

    def reset(self):
        self.resets += 1
        self.steps, self.info["pov"] = 0, np.zeros((360, 640, 3), np.uint8)
        return {"image": np.zeros((224, 224, 3), np.uint8)}, dict(self.info)

    def step(self, action):
        self.taken.append(action)
        if self.action_type == "agent":
            buttons, camera = action.pop("buttons"), action.pop("camera")
            assert buttons.shape == camera.shape == (1,)
            self.played.append((int(buttons[0]), int(camera[0])))
            keys = codes_to_keys(*self.played[-1])
            action.update(keys)
        else:
            assert set(action) == {*KEYS, "camera"} and action["camera"].shape == (2,)
            keys = {name: value.copy() for name, value in action.items()}
            self.played.append(keys)
            action.clear()
        counters = self.info["mine_block"]
        if keys["attack"]:
            counters["oak_log"] = counters["oak_log"] + 1
        if keys["use"]:
            counters["birch_log"] = counters.get("birch_log", 0) + 1
            counters["dirt"] = counters.get("dirt", 0) + 5
        self.steps += 1
        self.info["pov"] = np.full((360, 640, 3), self.steps, np.uint8)
        done = self.steps == self.ends_at
        return {"image": None}, 1.0, done, done, dict(self.info)

    def close(self):
        self.closed = True


def make(task=LOG, ends_at=None, **options):
    sims = []

    def factory(*args):
        sims.append(FakeSim(*args, ends_at))
        return sims[-1]

    return Minecraft(task, sim_factory=factory, **options), sims


def press(*names, camera=CENTRE):
    buttons, _ = keys_to_codes(dict.fromkeys(names, 1))
    if camera != CENTRE:
        buttons += 1  # the flag is the least significant group
    return encode_tokens(buttons, camera)


# Codecs


def test_camera_bins_are_the_recorded_ones():
    ours = degrees_of(np.arange(21))
    assert np.abs(ours[10:] - RECORDED).max() < 0.006 and np.allclose(ours, -ours[::-1])
    assert (bin_of(ours) == np.arange(21)).all()
    assert bin_of([-180, -10, -0.08, 0.08, 0.1, 10, 99]).tolist() == [0, 0, 10, 10, 11, 20, 20]
    grid = np.linspace(-10, 10, 2001)
    assert (np.diff(bin_of(grid)) >= 0).all()
    assert np.abs(degrees_of(bin_of(grid)) - grid).max() < 1.6


def test_buttons_are_the_simulators():
    """All 8641 codes, against the product of the groups in the simulator's order."""
    assert len(COMBINATIONS) == INVENTORY == 8640 and CENTRE == 220
    for code, combination in enumerate(COMBINATIONS):
        keys = codes_to_keys(code, CENTRE)
        pressed = {name for name in combination if name not in ("none", "camera")}
        assert {name for name in KEYS if keys[name]} == pressed
        if combination[-1] == "none":
            assert keys_to_codes(keys) == (code, CENTRE)
    assert [name for name in KEYS if codes_to_keys(INVENTORY, 3)[name]] == ["inventory"]
    assert keys_to_codes({"inventory": 1, "attack": 1, "camera": (5, 5)}) == (INVENTORY, CENTRE)


def test_camera_codes():
    for camera in range(441):
        pitch, yaw = divmod(camera, 21)
        flag = int(camera != CENTRE)
        keys = codes_to_keys(flag, camera)
        assert np.allclose(keys["camera"], [degrees_of(pitch), degrees_of(yaw)])
        assert keys_to_codes(keys) == (flag, camera)
        assert not codes_to_keys(0, camera)["camera"].any()  # without its flag it stands still


def test_keys_that_exclude_each_other():
    def press(*names):
        keys = codes_to_keys(*keys_to_codes(dict.fromkeys(names, 1)))
        return [name for name in KEYS if keys[name]]

    assert press("forward", "back", "attack") == ["attack"]
    assert press("left", "right") == []
    assert press("sprint", "sneak") == ["sneak"]
    assert press("hotbar.2", "hotbar.7") == ["hotbar.7"]


def test_token_round_trips():
    """Every button code with some camera, every camera with some buttons."""
    rng = np.random.default_rng(0)
    pairs = [(code, int(rng.integers(441))) for code in range(8640)]
    pairs += [(int(rng.integers(8640)), camera) for camera in range(441)]
    for buttons, camera in pairs:
        buttons = buttons // 2 * 2 + int(camera != CENTRE)  # the flag says whether it moves
        ids = encode_tokens(buttons, camera)
        assert decode_tokens(ids) == [(buttons, camera)]
        assert ids[0] == BEGIN == 151835 and ids[-1] == END == 151836 and 4 <= len(ids) <= 13
        assert all(151833 <= token <= 151907 for token in ids)
        choices = [group.index(name) for group, name in zip(GROUPS, COMBINATIONS[buttons])]
        expected = [first + choice for first, choice in zip(FIRST, choices) if choice]
        assert ids[1:-3] == expected
        assert ids[-3:-1] == [151866 + camera // 21, 151887 + camera % 21]
    assert decode_tokens(encode_tokens(INVENTORY, CENTRE)) == [(INVENTORY, CENTRE)]
    assert encode_tokens(0, CENTRE) == [151835, 151876, 151897, 151836]
    for bad in ((8641, 0), (-1, 0), (0, 441), (0, -1)):
        with pytest.raises(ValueError, match="is not in 0..8640, 0..440"):
            encode_tokens(*bad)


@pytest.mark.parametrize(("ids", "actions"), [
    ([], []),
    ([1, 2, 3], []),
    ([BEGIN], []),
    ([BEGIN, 151861], []),
    ([151861, END], []),
    ([BEGIN, END], [(0, 220)]),
    ([BEGIN, 151861, END], [(4, 220)]),
    ([9, BEGIN, 9, 151861, 9, END, 9], [(4, 220)]),
    ([BEGIN, 151860, END], [(0, 220)]),  # the token of "none"
    ([BEGIN, 151848, 151849, END], [(2 * 3 * 3 * 32, 220)]),  # forward, then back: back
    ([BEGIN, 151865, END], [(0, 220)]),  # the camera's flag, but it stands still
    ([BEGIN, 151886, END], [(1, 440 - 20 + 10)]),  # pitch alone
    ([BEGIN, 151834, 151861, END], [(8640, 220)]),
    ([BEGIN, 151833, 151861, END], [(4, 220)]),
    ([BEGIN, 151861, BEGIN, 151863, END], [(2, 220)]),  # begun anew
    ([BEGIN, 151861, END, END, BEGIN, 151863, END], [(4, 220), (2, 220)]),
])
def test_decoding_of_anything(ids, actions):
    assert decode_tokens(ids) == actions
    assert decode_tokens(np.array(ids, dtype=np.int64)) == actions


@pytest.mark.parametrize(("reply", "pressed", "camera"), [
    ("Action: move(20, -10)", [], (-1.5, 3.0)),
    ("Action: press(w, space)", ["forward", "jump"], (0, 0)),
    ("Action:click(left)", ["attack"], (0, 0)),
    ("Action: click(right)", ["use"], (0, 0)),
    ("Thought: a tree.\nAction: move(4, 0) press(ctrl,w) click(left)\nmore",
     ["attack", "forward", "sprint"], (0, 0.6)),
    ("Action: move(0,40) and press(1), click(right)", ["hotbar.1", "use"], (6, 0)),
    ("Action: press(e)", ["inventory"], (0, 0)),
    ("Action: no_op", [], (0, 0)),
    ("Action: no_op()", [], (0, 0)),
])
def test_text_actions(reply, pressed, camera):
    keys = decode_text(reply)
    assert sorted(name for name in KEYS if keys[name]) == pressed
    assert np.allclose(keys["camera"], camera)
    again = decode_text(encode_text(keys))
    assert all(np.array_equal(again[name], keys[name]) for name in keys)


@pytest.mark.parametrize("reply", [
    "", "w", "Action:", "Action: ", "Action: jump", "Action: press()", "Action: press(x)",
    "Action: press(W)", "Action: move(1)", "Action: move(1.5, 2)", "Action: move(99999, 0)",
    "Action: click(middle)", "Action: press(w) then run", "action: press(w)", "Action\n: press(w)",
    "Action: move(\u0661, 2)",
])
def test_text_that_is_not_understood(reply):
    assert decode_text(reply) is None


# The adapter


def test_success_is_what_the_counter_gains():
    env, sims = make()
    observation, info = env.reset()
    assert observation["text"] == "mine block oak log\nobservation:"
    assert observation["image"].shape == (364, 644, 3) and not info["success"]
    assert info["count"] == 0  # though the counter stands at 7
    _, reward, ended, truncated, info = env.step(press("forward"))
    assert (reward, ended, truncated) == (0.0, False, False)  # the simulator's reward is not ours
    assert info["steps"] == 1 and info["valid"] and info["isGuiOpen"] is False
    observation, reward, ended, truncated, info = env.step(press("attack"))
    assert (reward, ended, truncated) == (1.0, True, False)
    assert info["success"] and info["count"] == 1 and not info["engine_done"]
    assert (observation["image"] == 2).all()
    with pytest.raises(RuntimeError, match="over"):
        env.step(press("attack"))
    assert not env.reset()[1]["success"] and len(sims) == 1 and sims[0].resets == 2
    assert env.step(press("use"))[4]["success"]  # the other kind of log, new in the counter


def test_times_and_other_objects():
    env, _ = make(Task("mine", "mine_block", ("oak_log", "birch_log"), times=3))
    env.reset()
    results = [env.step(press(name)) for name in ("attack", "use", "attack")]
    assert [r[1] for r in results] == [0.0, 0.0, 1.0]
    env, _ = make(Task("dig", "mine_block", ("stone",), max_steps=3))
    env.reset()
    assert [env.step(press("use"))[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]
    env, _ = make(Task("craft", "craft_item", ("stick",), max_steps=1))  # no such counter yet
    env.reset()
    assert env.step(press("use"))[2:4] == (False, True)


def test_the_engines_end_ends_the_episode():
    env, _ = make(ends_at=2)
    env.reset()
    env.step(press("jump"))
    _, reward, ended, truncated, info = env.step(press("jump"))
    assert (reward, ended, truncated) == (0.0, True, False)
    assert info["engine_done"] and not info["success"]
    env.reset()
    env.step(press("jump"))
    assert env.step(press("attack"))[1:4] == (1.0, True, False)


@pytest.mark.parametrize("codec", ["tokens", "text"])
def test_actions_are_copies(codec):
    """The simulator ruins what it is given: no action may be ruined for the next step by it."""
    env, sims = make(codec=codec, chunk=3)
    env.reset()
    reply = press("forward", camera=7) if codec == "tokens" else "Action: move(20, 8) press(w)"
    for invalid in ([1], "what?"), ([], ""):
        env.step(reply)
        env.step(invalid[codec == "text"])
    first, noop = sims[0].played[0], sims[0].played[1]
    if codec == "tokens":
        assert sims[0].played == [first, noop] * 2 and noop == (0, 220) and first[1] == 7
    else:
        for played in sims[0].played[::2]:
            assert played["forward"] and np.allclose(played["camera"], (1.2, 3))
        for played in sims[0].played[1::2]:
            assert not any(np.any(value) for value in played.values())
    assert len({id(action) for action in sims[0].taken}) == 4


def test_invalid_replies_pass_time():
    for codec, reply in (("tokens", [1, 2, BEGIN]), ("text", "Chop!")):
        env, _ = make(Task("wait", "mine_block", ("oak_log",), max_steps=2), codec=codec)
        env.reset()
        _, reward, ended, truncated, info = env.step(reply)
        assert (reward, ended, truncated, info["valid"]) == (0.0, False, False, False)
        assert env.step(reply)[3]


def test_chunks():
    two = press("jump") + press("attack") + press("jump")
    for chunk, played in ((1, 1), (2, 2), (9, 2)):  # nothing after success
        env, sims = make(chunk=chunk)
        env.reset()
        info = env.step(two)[4]
        assert len(sims[0].played) == info["steps"] == played and info["success"] == (chunk > 1)
    env, sims = make(Task("wait", "mine_block", ("coal",), max_steps=2), chunk=9)
    env.reset()
    assert env.step(two)[3] and len(sims[0].played) == 2


def test_init_actions_come_before_the_count():
    task = Task("mine", "mine_block", ("oak_log",), init_actions=("Action: click(left)",))
    for codec in ("tokens", "text"):
        env, sims = make(task, codec=codec)
        info = env.reset()[1]
        assert len(sims[0].played) == 1 and info["count"] == 0 and info["steps"] == 0
        assert info["mine_block"]["oak_log"] == 8
    env, _ = make(Task("mine", "mine_block", ("oak_log",), init_actions=("open it",)))
    with pytest.raises(ValueError, match="init_actions: 'open it' is not understood"):
        env.reset()


def test_seeds_and_engines():
    env, sims = make(Task("mine", "mine_block", ("oak_log",), seed=5))
    env.reset()
    env.reset()
    env.reset(seed=5)
    assert [sim.seed for sim in sims] == [5] and sims[0].action_type == "agent"
    env.reset(seed=6)
    assert [(sim.seed, sim.closed) for sim in sims] == [(5, True), (6, False)]
    env.close()
    assert sims[1].closed
    with pytest.raises(RuntimeError, match="call reset"):
        env.step([])
    env, sims = make(codec="text")
    env.reset()
    assert sims[0].action_type == "env"


def test_gymnasium_contract():
    for codec in ("tokens", "text"):
        env, _ = make(Task("mine", "kill_entity", ("cow",)), codec=codec)
        check_env(env, skip_render_check=True)
        assert env.action_space.contains("Action: no_op" if codec == "text" else (151835, 151836))


@pytest.mark.parametrize(("options", "message"), [
    ({"codec": "json"}, "codec='json' must be 'tokens' or 'text'"),
    ({"chunk": 0}, "chunk=0 must be an int of 1 or more"),
    ({"chunk": 1.0}, "chunk=1.0 must be"),
    ({"task": Task("a", "mine_block", ())}, "needs objects"),
    ({"task": Task("a", "mine_block", ("dirt",), max_steps=0)}, "max_steps and times of 1"),
])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_without_minestudio_it_says_what_to_install():
    script = ("import sys\nsys.modules['minestudio'] = None\nimport minecraft\n"
              "env = minecraft.Minecraft(minecraft.Task('a', 'mine_block', ('dirt',)))\n"
              "print('imported')\nenv.reset()\n")
    run = subprocess.run([sys.executable, "-c", script], cwd=Path(minecraft.__file__).parent,
                         capture_output=True, text=True)
    assert run.stdout == "imported\n" and "ImportError" in run.stderr
    for word in ("pip install minestudio==1.1.6", "Java 8", "xvfb", "engine"):
        assert word in run.stderr


def test_the_simulator_is_built_with_the_set_up(monkeypatch, tmp_path):
    """MineStudio's names and keywords, as its source has them, and the check for the engine."""
    built = {}

    def recorder(name):
        return lambda *args, **kwargs: built.setdefault(name, (args, kwargs))

    class Module:
        pass

    simulator, entry, utils, callbacks = (Module() for _ in range(4))
    simulator.MinecraftSim, simulator.callbacks = recorder("sim"), callbacks
    entry.CameraConfig = recorder("camera")
    utils.get_mine_studio_dir = lambda: str(tmp_path)
    for name in ("CommandsCallback", "InitInventoryCallback", "SummonMobsCallback"):
        setattr(callbacks, name, recorder(name))
    for name, module in (("minestudio", Module()), ("minestudio.simulator", simulator),
                         ("minestudio.simulator.entry", entry), ("minestudio.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    stack = {"slot": 0, "type": "stick", "quantity": 2}
    mob = {"name": "cow", "number": 1, "range_x": [-1, 1], "range_z": [2, 7]}
    task = Task("a", "kill_entity", ("cow",), commands=("/time set 0",), inventory=(stack,),
                distraction="easy", mobs=(mob,), biome="plains")
    with pytest.raises(RuntimeError, match="the engine .*mcprec-6.13.jar is missing.*Java 8"):
        minecraft.minestudio_sim(task, 3, "agent")
    jar = tmp_path / "engine" / "build" / "libs" / "mcprec-6.13.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    minecraft.minestudio_sim(task, 3, "agent")
    assert built["CommandsCallback"] == ((["/time set 0"],), {})
    assert built["InitInventoryCallback"] == (([stack], "easy"), {})
    assert built["SummonMobsCallback"] == (([mob],), {})
    assert built["camera"][1] == {"camera_binsize": 1, "camera_maxval": 10, "camera_mu": 20.0}
    sim = built["sim"][1]
    assert (sim["action_type"], sim["seed"]) == ("agent", 3)
    assert sim["preferred_spawn_biome"] == "plains" and len(sim["callbacks"]) == 3
    built.clear()
    minecraft.minestudio_sim(LOG, 0, "env")
    assert built["sim"][1]["callbacks"] == []
