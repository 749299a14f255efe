"""Tests of skills.py. They are skipped where mujoco is not installed or cannot draw, the one of the
real ManiSkill also where that or its renderer is missing."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import envs

ROOT = Path(envs.__file__).parent


def test_without_the_package_it_says_what_to_install():
    script = "import sys\nsys.modules['mujoco'] = None\nimport skills\n"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "pip install mujoco==" in run.stderr


skills = pytest.importorskip("skills", reason="mujoco is not installed", exc_type=ImportError)
try:
    skills.renderer("align", 32, 0)
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)
SMALL = {"image_size": 32}


def answer(skills_text):
    return f"<think>x</think><answer>{skills_text}</answer>"


def start(level, **options):
    env = skills.PrimitiveSkill(**SMALL | options)
    env.reset(seed=0, options={"level": level})
    return env


# The protocol


@pytest.mark.parametrize("reply, wanted", [
    ("pick(1,-2,3)", [("pick", [1, -2, 3])]),
    (" place( 1 , -2,3 ) | push(1,2,3,4,5,6) ",
     [("place", [1, -2, 3]), ("push", [1, 2, 3, 4, 5, 6])]),
    ("pick(1,2)", None), ("pick(1,2,3,4)", None), ("push(1,2,3)", None), ("pick(1,2,3.0)", None),
    ("push(1,2,3,4,5)", None), ("pick(1,2,3)|pick(1,2,3)|pick(1,2,3)", None), ("", None),
    ("pick(1,2,3)|", None), ("pick(1,2,3), pick(1,2,3)", None), ("Pick(1,2,3)", None),
    ("pick(1,2,+3)", None), ("pick(1,2,12345)", None), ("grasp(1,2,3)", None),
    ("pick(1,2,3) now", None), ("pick(1,2,\u0663)", None),
])
def test_parse(reply, wanted):
    assert skills.parse_skills(answer(reply), 2) == wanted


def test_parse_wants_the_whole_reply():
    assert skills.parse_skills(answer("pick(1,2,3)") + "!", 2) is None
    assert skills.parse_skills("<answer>pick(1,2,3)</answer>", 2) is None
    assert skills.parse_skills("pick(1,2,3)", 2) is None
    assert skills.parse_skills(answer("pick(1,2,3)|place(1,2,3)"), 1) is None
    with pytest.raises(TypeError, match="list"):
        skills.parse_skills([], 2)


@pytest.mark.parametrize("task", skills.TASKS)
def test_contract(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(skills.PrimitiveSkill(tasks=task, **SMALL), skip_render_check=True)
    env = skills.PrimitiveSkill(tasks=task, render_mode="rgb_array")
    observation, info = env.reset(seed=1)
    assert observation["image"].shape == (300, 300, 3) and observation["image"].std() > 20
    assert (env.render() == observation["image"]).all()
    assert info["split"] == "train" and info["level"].startswith(task) and not info["success"]
    assert observation["text"].startswith(skills.TASKS[task].says)
    assert len(env.system_prompt) < 700 and "pick(x,y,z)" in env.system_prompt


def test_invalid_replies_move_nothing_and_spend_the_turn():
    env = start("align: red 40 -120, green 0 60", max_turns=2)
    before = env._state.data.qpos.copy()
    observation, reward, terminated, truncated, info = env.step("pick(40,-120,20)")
    assert observation["text"].startswith("Invalid reply. ") and (reward, terminated) == (0, False)
    assert not info["valid"] and info["actions"] == [] and info["format_reward"] == 0
    assert (env._state.data.qpos == before).all() and not truncated
    _, reward, _, truncated, info = env.step("")
    assert truncated and reward == 4 - 4 and info["turn"] == 2  # green stood on the line already
    with pytest.raises(RuntimeError, match="reset"):
        env.step("")


def test_bad_options():
    make = skills.PrimitiveSkill
    for bad in ({"tasks": "juggle"}, {"grid": 0}, {"max_skills": 0}, {"named": 1},
                {"image_size": 5000}, {"split": "test"}, {"max_actions": 11}):
        (name, value), = bad.items()
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            make(**bad)
    with pytest.raises(ValueError, match="no option 'colour'; it has split"):
        make(colour=1)
    for level in ("", "align", "align: red 40 -120", "juggle: red 1 1",
                  "align: red 900 0, green 0 0", "align: green 0 0, red 100 0",
                  "align: red 40 -120, green 0 60, blue 0 0",
                  "drawer: apple 0 -100, drawer 0 0", "align: red a 0, green 0 60"):
        with pytest.raises(ValueError, match="level|outside"):
            make().reset(options={"level": level})


def test_no_renderer_says_what_to_do(monkeypatch):
    def broken(*_):
        raise AttributeError("no EGL")

    monkeypatch.setattr(skills.mujoco, "Renderer", broken)
    with pytest.raises(RuntimeError, match="MUJOCO_GL=.*osmesa"):
        skills.renderer("align", 17, 0)


def test_broken_physics_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log
    env = start("align: red 40 -120, green 0 60")
    env._state.data.qvel[:] = 1e12
    with pytest.raises(RuntimeError, match="physics"):
        env.step(answer("pick(0,0,20)"))


# Rewards and success


def test_rewards_by_hand():
    """Nothing, a held cube, a cube on its target, both: 0, 2, 4, 10; each skill costs 0.1."""
    level = "place: red 40 -120, green -60 100, red target -60 0, green target 100 100"
    pick, place = "pick(40,-120,20)", "place(-60,0,20)"
    nothing = answer("pick(100,0,20)")
    for replies, wanted in (
        ([nothing], -0.1), ([answer(pick)], 2 - 0.1), ([answer(f"{pick}|{place}")], 4 - 0.2),
        ([answer(f"{pick}|{place}"), answer("pick(-60,100,20)|place(100,100,20)")], 10 - 0.4),
        ([answer(f"{pick}|{place}"), answer("pick(-60,100,20)")], 4 - 0.3),
        ([answer(pick), "broken"], 2 - 0.1),
    ):
        env = start(level, max_turns=len(replies))
        rewards, valid = [], []
        for reply in replies:
            _, reward, terminated, truncated, info = env.step(reply)
            rewards.append(reward)
            valid.append(0.5 * info["valid"])
        assert terminated or truncated
        assert rewards[:-1] == valid[:-1]  # the credit comes in the last turn alone
        assert rewards[-1] == pytest.approx(wanted + valid[-1])
        assert info["success"] == terminated == (wanted > 9)


@pytest.mark.parametrize("level, replies", [
    ("align: red 40 -120, green -60 60",
     ["pick(40,-120,20)|place(0,-120,20)", "pick(-60,60,20)|place(0,60,20)"]),
    ("place: red 40 -120, green -60 100, red target -60 0, green target 100 100",
     ["pick(-60,100,20)|place(100,100,20)", "pick(40,-120,20)|place(-60,0,20)"]),
    ("stack: red 40 -120, green -60 60, blue 100 100",
     ["pick(40,-120,20)|place(-60,60,60)", "pick(100,100,20)|place(-60,60,100)"]),
    ("drawer: apple -60 -120, drawer 20 60",
     ["pick(-60,-120,20)|place(20,60,30)", "push(20,-10,30,20,100,30)"]),
])
def test_stage_credit_in_every_task(level, replies):
    env, values = start(level), []
    first, second = (reply.split("|") for reply in replies)
    for skill in (*first, *second):
        info = env.step(answer(skill))[4]
        values.append(info["stage_value"])
    assert values == [2, 4, 4, 10][: len(values) - 1] + [10]
    assert info["success"] and info["moves"] == len(values)


def test_success_conditions():
    """On both sides of each bound."""
    def at(**things):
        return {name: np.array(place, float) for name, place in things.items()}

    done = skills.done_parts
    assert done("align", at(red=(10, 9, 50), green=(11, 0, 20))) == (True, False)
    assert done("align", at(red=(0, 0, 51), green=(-10, 0, 20))) == (False, True)
    targets = {"red target": np.array([0, 0, 20.0]), "green target": np.array([0, 150, 20.0])}
    assert done("place", at(red=(50, 0, 20), green=(0, 99, 20)) | targets) == (True, False)
    for blue, fits in (((0, 19, 61), True), ((0, 21, 61), False), ((0, 0, 60), False)):
        assert done("stack", at(red=(0, 0, 40), green=(0, 0, 19), blue=blue)) == (True, fits)
    assert done("stack", at(red=(0, 30, 20), green=(0, 0, 20), blue=(0, 30, 60))) == (False, False)
    for apple, y, wanted in (((0, 140, 28), 140, (True, True)), ((0, 139, 28), 139, (True, False)),
                             ((49, 140, 28), 140, (False, False)),
                             ((0, 140, 70), 140, (False, False))):
        assert done("drawer", at(apple=apple, drawer=(0, y, 30))) == wanted
    assert skills.stage_value((True, True), "red") == 4  # not released
    assert skills.stage_value((True, True), None) == 10
    assert skills.stage_value((False, False), "red") == 2
    assert skills.stage_value((False, False), None) == 0


def test_the_skills_obey_physics():
    """A push moves the cube that is in its way, a blocked drawer stays open, what is dropped
    falls; nothing leaves the table's rim."""
    env = start("align: red 40 -120, green -60 60")
    _, _, _, _, info = env.step(answer("push(40,-180,20,40,-60,20)"))
    red = env._state.positions()["red"]
    assert abs(red[1] + 30) < 8 and abs(red[0] - 40) < 8  # the finger's and the cube's halves
    assert np.allclose(env._state.positions()["green"][:2], (-60, 60), atol=1)
    env.step(answer("push(40,-100,20,40,999,20)"))
    assert env._state.positions()["red"][1] < 215  # the rim
    env.step(answer("pick(-60,60,20)"))
    assert env._state.held() == "green" and env._state.positions()["green"][2] > 190
    env.step(answer("place(60,60,200)"))
    assert env._state.held() is None and env._state.positions()["green"][2] < 25
    drawer = start("drawer: apple 0 -120, drawer 20 60")
    drawer.step(answer("push(0,-60,20,0,-200,20)"))  # the apple would roll over the low rim
    assert drawer._state.positions()["apple"][1] > -210
    drawer.step(answer("push(20,-10,200,20,100,200)"))  # over it
    assert abs(drawer._state.positions()["drawer"][1] - 60) < 1
    drawer.step(answer("push(20,-10,30,20,40,30)"))  # half-way
    assert 80 < drawer._state.positions()["drawer"][1] < 100


def test_held_means_between_both_fingers():
    table = start("align: red 40 -120, green -60 60")._state
    for point in ((100, -120, 200), (100, -120, 20), (50, -120, 20)):
        table._go(point, 0.2)
    assert abs(table.positions()["red"][0] - 22) < 4  # in touch with the left finger
    assert table.held() is None


def test_limits():
    env = start("align: red 40 -120, green -60 60", max_skills=3)
    assert env.step(answer("pick(-999,999,0)"))[4]["actions"] == ["pick(-100,200,10)"]
    _, _, _, truncated, info = env.step(answer("pick(0,0,100)|pick(0,0,100)"))
    assert truncated and info["moves"] == 3
    env = start("align: red 40 -120, green -60 60", max_skills=1)
    _, _, _, truncated, info = env.step(answer("pick(0,0,100)|pick(1,1,100)"))
    assert truncated and info["actions"] == ["pick(0,0,100)"]
    env = start("align: red 40 -120, green 0 60", max_turns=1)
    info = env.step(answer("pick(40,-120,20)|place(0,-120,20)"))[4]
    assert info["success"] and info["turn"] == 1


def test_success_ends_the_reply():
    env = start("align: red 40 -120, green 0 60", max_actions=3)
    _, _, terminated, truncated, info = env.step(
        answer("pick(40,-120,20)|place(0,-120,20)|pick(0,60,20)"))
    assert terminated and not truncated and len(info["actions"]) == 2


# Chance


def test_same_seed_same_episode_in_any_process():
    script = """
import hashlib, skills
def digest(*before):
    env, seen = skills.PrimitiveSkill(image_size=64), hashlib.sha256()
    for seed in before:
        env.reset(seed=seed); env.step(env.expert_reply(0.5))
    for seed in range(3):
        observation, info = env.reset(seed=seed)
        for _ in range(3):
            seen.update(observation["image"].tobytes() + observation["text"].encode())
            observation, reward, a, b, info = env.step(env.expert_reply(0.5))
            seen.update(repr((reward, info)).encode())
            if a or b:
                break
    return seen.hexdigest()
if __name__ == "__main__":
    print(digest())
"""
    space = {"__name__": "here"}
    exec(script, space)
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert space["digest"](7, 8, 9) == run.stdout.strip()
    assert run.stderr == ""  # nothing from the renderer at exit


def test_splits_share_nothing():
    drawn = {}
    for split in ("train", "eval"):
        env = skills.PrimitiveSkill(split=split, **SMALL)
        env._table = lambda task: SimpleNamespace(
            load=lambda layout: None, held=lambda: None, frame=lambda: None,
            positions=lambda: {n: np.array([*at, 20.0]) for n, at in env._layout.items()})
        drawn[split] = {env.reset(seed=seed)[1]["level"] for seed in range(300)}
    assert min(len(levels) for levels in drawn.values()) > 290
    assert not drawn["train"] & drawn["eval"]
    aligned = [level for level in drawn["train"] if level.startswith("align")]
    columns = [[abs(int(x)) for x in re.findall(r"(-?\d+) -?\d+", level)] for level in aligned]
    assert all(max(xs) and not any(0 < x < 20 for x in xs) for xs in columns)  # unsolved, and clear
    assert any(0 in xs for xs in columns)
    tasks = {level.split(":")[0] for level in drawn["eval"]}
    assert tasks == set(skills.TASKS)
    for level in drawn["train"] | drawn["eval"]:
        numbers = [tuple(map(int, pair)) for pair in re.findall(r"(-?\d+) (-?\d+)", level)]
        assert all(x % 10 == y % 10 == 0 for x, y in numbers)
        assert min(np.hypot(a - c, b - d) for i, (a, b) in enumerate(numbers)
                   for c, d in numbers[:i]) >= skills.APART


def test_the_text_is_true():
    env = start("stack: red 40 -120, green -60 60, blue 100 100", grid=1)
    text = env.step(answer("pick(40,-120,20)|place(-43,61,20)"))[0]["text"]
    red = env._state.positions()["red"]
    assert "red({},{},{})".format(*(round(float(n)) for n in red)) in text
    coarse = start("stack: red 44 -120, green -60 60, blue 100 100")
    text = coarse._observe("")["text"]
    assert "red(40,-120,20) green(-60,60,20) blue(100,100,20) Hand empty." in text
    assert "Hand has red." in coarse.step(answer("pick(44,-120,20)"))[0]["text"]
    bare = start("stack: red 40 -120, green -60 60, blue 100 100", named=False)
    seen = bare._observe("")["text"].removeprefix(skills.TASKS["stack"].says)
    assert sorted(re.findall(r"\S+", seen)) == sorted(
        ["(40,-120,20)", "(-60,60,20)", "(100,100,20)", "Hand", "empty."])
    orders = set()
    for seed in range(8):
        bare.reset(seed=seed, options={"level": "stack: red 40 -120, green -60 60, blue 100 100"})
        orders.add(bare._observe("")["text"])
    assert len(orders) > 2
    assert "Hand full." in bare.step(answer("pick(40,-120,20)"))[0]["text"]


# The expert


@pytest.mark.parametrize("task", skills.TASKS)
def test_expert(task):
    env = skills.PrimitiveSkill(split="eval", tasks=task, **SMALL)
    ends = [skills.play(env, seed, 0.0) for seed in range(12)]
    assert sum(end["success"] for end in ends) == 12
    assert all(end["valid"] and end["moves"] <= 6 for end in ends)
    assert not any(skills.play(env, seed, 1.0)["success"] for seed in range(3))


def test_noise():
    env = skills.PrimitiveSkill(**SMALL)
    plain, noisy = [], []
    for seed in range(40):
        env.reset(seed=seed)
        plan = env._plan(env._state)[:2]
        for noise, chosen in ((0.0, plain), (0.5, noisy)):
            reply = env.expert_reply(noise)
            done = [skills.write_skill(*skill) for skill in skills.parse_skills(reply, 2)]
            chosen.append(done == plan)
            assert done == plan[: len(done)] or done[:-1] == plan[: len(done) - 1]
    assert all(plain) and 3 <= sum(noisy) <= 18  # 1/4 of them
    with pytest.raises(ValueError, match="noise=2"):
        env.expert_reply(2)


def test_expert_mends_what_is_in_the_way():
    """Blue on green, then a wrong cube in the hand: both are put away first, and it ends well."""
    env = start("stack: red 40 -120, green -60 60, blue 100 100", max_skills=20, max_turns=20)
    env.step(answer("pick(100,100,20)|place(-60,60,60)"))
    assert "red not on green, blue in the way" in env.expert_reply()
    for _ in range(5):
        info = env.step(env.expert_reply())[4]
        if info["success"]:
            break
    assert info["success"]
    env = start("stack: red 40 -120, green -60 60, blue 100 100")
    env.step(answer("pick(100,100,20)|place(40,-120,60)"))
    assert "<answer>pick(40,-120,60)" in env.expert_reply()  # blue is on red
    env = start("stack: red 40 -120, green -60 60, blue 100 100")
    env.step(answer("pick(100,100,20)"))
    reply = env.expert_reply()
    assert reply.startswith("<think>hand blue, red not on green") and "<answer>place(" in reply
    for _ in range(4):
        info = env.step(env.expert_reply())[4]
        if info["success"]:
            break
    assert info["success"]


def test_expert_goes_on_with_what_is_held():
    env = start("place: red 40 -120, green -60 100, red target -60 0, green target 100 100")
    env.step(answer("pick(-60,100,20)"))
    assert env.expert_reply() == ("<think>hand green, green off its target</think>"
                                  "<answer>place(100,100,20)|pick(40,-120,20)</answer>")


@pytest.mark.parametrize("task", ["align", "stack"])
def test_expert_with_one_skill_a_reply(task):
    env = skills.PrimitiveSkill(tasks=task, max_actions=1, **SMALL)
    ends = [skills.play(env, seed, 0.0) for seed in range(4)]
    assert all(end["success"] and end["turn"] <= 6 for end in ends)


def test_a_shut_drawer_leaves_no_way():
    env = start("drawer: apple 0 -120, drawer 20 60")
    env.step(answer("push(20,-10,30,20,100,30)"))
    assert env.expert_plan() == [] and "no way" in env.expert_reply()


def test_thoughts_are_lower_case_and_the_vocabulary_is_whole():
    words = re.compile(r" ?[A-Za-z]+| ?[0-9]|, ?|[^A-Za-z0-9]")  # as models.tiny_tokenizer
    for options in ({}, {"named": False}):
        env = skills.PrimitiveSkill(**SMALL | options)
        known = {piece for text in env.texts for piece in words.findall(text)}
        for seed in range(12):
            observation, done = env.reset(seed=seed)[0], False
            while not done:
                reply = env.expert_reply(0.3)
                thought, chosen = reply.removeprefix("<think>").split("</think>")
                assert thought == thought.lower() and len(thought) > 10
                chosen = chosen.removeprefix("<answer>").removesuffix("</answer>")
                for text in (observation["text"], thought, chosen):
                    assert not set(words.findall(text)) - known
                observation, _, ended, truncated, _ = env.step(reply)
                done = ended or truncated
        assert all(str(n) in known or any(str(n) in text for text in env.texts)
                   for n in range(-200, 201, 10))


# ManiSkill, against a fake


class FakePanda:
    """As much of a ManiSkill environment as PandaTable uses: a hand that goes where it is told,
    and takes a cube along that it closes on."""

    def __init__(self, name, side):
        self.name, self.side, self.steps, self.closed = name, side, 0, False
        self.unwrapped, self.holds, self.resets = self, None, 0
        for cube in ("cubeA", "cubeB", "cubeC")[: 3 if "Pyramid" in name else 2]:
            actor = SimpleNamespace(pose=SimpleNamespace(p=torch.zeros(1, 3)))
            actor.set_pose = lambda pose, actor=actor: setattr(
                actor.pose, "p", torch.tensor([list(pose.p)]))
            setattr(self, cube, actor)
        tcp = SimpleNamespace(pose=SimpleNamespace(p=torch.zeros(1, 3)))
        self.agent = SimpleNamespace(
            tcp=tcp, is_grasping=lambda actor: torch.tensor([actor is self.holds]))

    def reset(self, seed):
        assert seed == 0
        self.resets += 1
        self.agent.tcp.pose.p, self.holds = torch.tensor([[0.0, 0.0, 0.17]]), None

    def step(self, action):
        assert action.shape == (4,) and action.dtype == np.float32 and abs(action).max() <= 1
        self.steps += 1
        hand = self.agent.tcp.pose
        hand.p = hand.p + 0.1 * torch.tensor(action[None, :3])
        cubes = [value for key, value in vars(self).items() if key.startswith("cube")]
        near = [cube for cube in cubes if (cube.pose.p - hand.p).abs().max() < 0.015]
        self.holds = (self.holds or (near or [None])[0]) if action[3] < 0 else None
        if self.holds:
            self.holds.pose.p = hand.p.clone()

    def render(self):
        return torch.full((1, self.side, self.side, 3), self.steps % 255, dtype=torch.uint8)

    def close(self):
        self.closed = True


@pytest.fixture
def panda(monkeypatch):
    made = []
    monkeypatch.setitem(sys.modules, "sapien", SimpleNamespace(
        Pose=lambda p: SimpleNamespace(p=p)))

    def factory(name, side, backend):
        assert backend == "cpu"
        made.append(FakePanda(name, side))
        return made[-1]

    return made, factory


def test_maniskill_adapter(panda):
    made, factory = panda
    env = skills.ManiSkill(env_factory=factory, split="eval", **SMALL)
    ends = [skills.play(env, seed, 0.0) for seed in range(12)]
    assert all(end["success"] for end in ends)
    assert {end["task"] for end in ends} == {"align", "place", "stack"}
    assert len(made) == 3  # one for each task, whatever the number of episodes
    assert sum(fake.resets for fake in made) == 12  # where the arm is does not last
    assert env.reset(seed=0)[0]["image"].shape == (32, 32, 3)
    env.close()
    assert all(fake.closed for fake in made)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("")


def test_maniskill_says_what_is_wrong(panda, monkeypatch):
    with pytest.raises(ValueError, match="backend='tpu'"):
        skills.ManiSkill(backend="tpu")
    with pytest.raises(ValueError, match="drawer.*it has all, align, place, stack"):
        skills.ManiSkill(tasks="drawer")
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    with pytest.raises(ImportError, match="pip install mani_skill==3.0.1"):
        skills.ManiSkill().reset(seed=0)


def test_maniskill_gives_a_blocked_motion_up(panda):
    made, factory = panda
    env = skills.ManiSkill(env_factory=factory, tasks="align", **SMALL)
    env.reset(seed=0)
    made[0].agent.tcp = SimpleNamespace(pose=SimpleNamespace(p=torch.zeros(1, 3)))
    before = made[0].steps
    made[0].step = lambda action: setattr(made[0], "steps", made[0].steps + 1)
    env.step(answer("pick(40,-120,20)"))
    assert made[0].steps - before == 3 * skills.PandaTable.patience + 2 * 10 + \
        skills.PandaTable.patience


@pytest.mark.maniskill
def test_maniskill_for_real():
    pytest.importorskip("mani_skill", reason="mani_skill is not installed")
    import sapien

    try:
        sapien.render.RenderSystem(sapien.Device("cpu"))
    except RuntimeError as error:
        pytest.skip(f"no renderer: {error}")
    for task in skills.ManiSkill.known:
        env = skills.ManiSkill(tasks=task, image_size=128)
        assert env.reset(seed=0)[0]["image"].std() > 10
        ends = [skills.play(env, seed, 0.0)["success"] for seed in range(3)]
        assert sum(ends) >= 2
        env.close()
