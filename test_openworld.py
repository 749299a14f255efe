"""Tests of openworld.py and sims.py: chance, rules, pictures, tasks, experts, replies.

Pictures are compared with Crafter's own renderer, recipes with a list written down here.
"""

import hashlib
import subprocess
import sys
import warnings
from pathlib import Path

import crafter
import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs
import openworld
import sims
from envs import make_env
from openworld import TASKS, Crafter, CraftingGrid
from sims import BAG, CRAFT, HAND, HERE, OUT, SIDES, Bench, Sim

FEW = {"worlds": 4}  # maps take .2 s each
OUTDOOR = [name for name, task in TASKS.items() if task.kind != "gui"]
INDOOR = [name for name, task in TASKS.items() if task.kind == "gui"]
VARIANTS = [
    ("Crafter", FEW),
    ("Crafter", FEW | {"tasks": "all", "split": "eval", "image_size": 63, "paraphrase": True}),
    ("Crafter", FEW | {"tasks": "defeat_zombie_night", "chunk": 3, "think": True, "horizon": 30,
                       "render_mode": "rgb_array", "image_size": 100}),
    ("CraftingGrid", {}),
    ("CraftingGrid", {"tasks": "unseen", "distractors": 8, "render_mode": "rgb_array", "chunk": 9}),
]


def world_of(name, **options):
    kind = Crafter if TASKS[name].kind != "gui" else CraftingGrid
    return kind(tasks=name, **options | (FEW if kind is Crafter else {}))


def digest(env):
    """All that the world is: where everything stands, what it holds, what it will draw."""
    if isinstance(env, CraftingGrid):
        return repr(env._state)
    world, player = env._state._world, env._state.player
    objs = [(type(o).__name__, *o.pos.tolist(), o.health) for o in world.objects]
    state = world.random.get_state()[1].tobytes() + world._mat_map.tobytes()
    return hashlib.sha256(state).hexdigest(), objs, player.inventory, player.achievements


def random_play(env, steps, seed=0):
    """Random valid replies; yields each step's result and stops with the episode."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        result = env.step(env.actions[rng.integers(len(env.actions))])
        yield result
        if result[2] or result[3]:
            return


def play(env, noise=0.0):
    """The expert's episode from a fresh reset -> info of the last step, number of steps."""
    steps, done = 0, False
    while not done:
        _, reward, ended, truncated, info = env.step(env.expert_reply(noise))
        steps, done = steps + 1, ended or truncated
        assert reward == (1.0 if info["success"] else 0.0)
    return info, steps


# Gymnasium's contract and the way in


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_check_env(variant):
    name, options = variant
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make_env(name, **options), skip_render_check=True)
        gymnasium.register("Open-v0", entry_point=openworld.WORLDS[name])
        try:
            made = gymnasium.make("Open-v0", disable_env_checker=True, **options)
            check_env(made.unwrapped)
        finally:
            del gymnasium.registry["Open-v0"]


def test_make_env_finds_the_worlds_and_names_the_missing_package(tmp_path):
    assert make_env("Crafter", area=24).area == 24
    assert isinstance(make_env("CraftingGrid"), CraftingGrid)
    with pytest.raises(ValueError, match="'Craft'; there are .*, Crafter, CraftingGrid, Plancraft"):
        make_env("Craft")
    script = ("import sys\nsys.modules['crafter'] = None\nimport envs\n"
              "envs.make_env('FrozenLake').reset(seed=0)\nprint('played')\n"
              "envs.make_env('CraftingGrid')\n")
    run = subprocess.run([sys.executable, "-c", script], cwd=Path(envs.__file__).parent,
                         capture_output=True, text=True)
    assert run.stdout == "played\n" and "pip install crafter==1.8.3" in run.stderr


def test_the_package_is_the_pinned_one():
    pins = (Path(envs.__file__).parent / "requirements.txt").read_text().splitlines()
    assert "crafter==1.8.3" in pins
    assert len(crafter.constants.actions) == 17 == len(Crafter.actions)
    assert set(Crafter.names.values()) == set(crafter.constants.actions)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("Crafter", {"tasks": "craft_table"}, "tasks='craft_table' is not in Crafter; it has seen, "),
    ("CraftingGrid", {"tasks": "eat_cow"}, "it has seen, unseen, all, gui, craft_table"),
    ("Crafter", {"area": 8}, "area=8 must be of type int, 24 to 128"),
    ("Crafter", {"worlds": 0}, "worlds=0 must be"),
    ("Crafter", {"distractors": 1}, "Crafter has no option 'distractors'; it has split,"),
    ("Crafter", {"split": "test"}, "split='test' must be 'train' or 'eval'"),
    ("Crafter", {"horizon": 0}, "horizon=0 must be of type int, 1 to 10000"),
    ("Crafter", {"think": 1}, "think=1 must be of type bool"),
    ("CraftingGrid", {"chunk": 2.0}, "chunk=2.0 must be of type int"),
    ("CraftingGrid", {"distractors": 9}, "distractors=9 must be of type int, 0 to 8"),
    ("CraftingGrid", {"image_size": 44}, "image_size=44 must be of type int, 45 to 2048"),
], ids=str)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError) as error:
        make_env(name, **options)
    assert message in str(error.value)


def test_bad_resets_and_steps():
    env = Crafter(**FEW)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("up")
    with pytest.raises(ValueError, match="no task 'craft_table' in Crafter; it has collect_wood"):
        env.reset(options={"task": "craft_table"})
    with pytest.raises(ValueError, match="no option level; it has task, member"):
        env.reset(options={"level": "S"})
    with pytest.raises(ValueError, match="member=-1"):
        env.reset(options={"member": -1})
    with pytest.raises(RuntimeError, match="call reset"):  # no start, no episode
        env.expert_reply()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="noise=2"):
        env.expert_reply(2.0)
    with pytest.raises(TypeError, match="not NoneType"):
        env.step(None)


def test_no_world_can_hold_the_task(monkeypatch):
    monkeypatch.setattr(Sim, "begin", lambda *_: False)
    with pytest.raises(RuntimeError, match="none of 4 worlds of area 32 can hold eat_cow; raise"):
        Crafter(**FEW).reset(options={"task": "eat_cow"})


# Chance


SCRIPT = """
import hashlib, sys
import numpy as np
import openworld
junk = [bytearray(n * 37 % 5000) for n in range(int(sys.argv[1]))]; del junk[::3]
for name in ("defeat_zombie_night", "collect_coal"):
    env = openworld.Crafter(worlds=4, tasks=name, horizon=400, image_size=63)
    for seed in range(3):
        rng, marks = np.random.default_rng(seed), hashlib.sha256()
        marks.update(env.reset(seed=seed)[0]["image"].tobytes())
        for _ in range(400):
            env._state.player.health = 9  # or else the episodes are short
            action = env.actions[rng.integers(len(env.actions))]
            observation, _, ended, truncated, info = env.step(action)
            marks.update(observation["image"].tobytes() + repr(info).encode())
            junk.append([object() for _ in range(rng.integers(9))])
            if ended or truncated: break
        print(seed, info["moves"], marks.hexdigest())
env = openworld.CraftingGrid()
print(*(hashlib.sha256(env.reset(seed=s)[0]["image"].tobytes()).hexdigest() for s in range(4)))
"""


def test_fresh_processes_play_the_same():
    runs = [subprocess.run([sys.executable, "-c", SCRIPT, junk], cwd=Path(envs.__file__).parent,
                           capture_output=True, text=True) for junk in ("0", "100000")]
    assert runs[0].stdout.count("\n") == 7, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout


def test_despawning_does_not_depend_on_addresses():
    """Crafter picks whom to remove from a set: here the same mobs go, wherever they lie."""
    def lives(junk):
        env = Crafter(**FEW)
        env.reset(seed=0, options={"task": "collect_sapling"})
        world, player = env._state._world, env._state.player
        for at in sorted(env._state.free())[:60]:
            junk.append([object() for _ in range(len(junk) % 7)])
            world.add(crafter.objects.Zombie(world, at, player))
        for _ in range(60):
            player.health = 9
            env._state.step(0)
        return [obj.pos.tolist() for obj in world.objects]

    assert lives([]) == lives([[]] * 3) == lives([[]] * 5)


@pytest.mark.parametrize("name", ["collect_drink", "defeat_zombie_night", "craft_table"])
def test_looking_disturbs_nothing(name):
    """Frames of any size, many or none, by night too: the world goes on the same."""
    sizes = [{}, {"image_size": 63}, {"image_size": 126}]
    ends = []
    for number, size in enumerate(sizes):
        env = world_of(name, horizon=250, **size)
        env.reset(seed=1)
        if number == 1:
            env._frame = lambda: None
        trail = []
        for _ in random_play(env, 250):
            if number == 2:
                for _ in range(3):
                    env._frame()
            trail.append(digest(env))
        ends.append(trail)
    assert len(ends[0]) > 5 and ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("name", ["collect_wood", "defeat_zombie_night", "craft_fence"])
def test_members_start_identical_and_share_chance(name):
    env = world_of(name)
    first = [env.reset(seed=7, options={"task": name, "member": m})[0] for m in range(3)]
    first.append(world_of(name).reset(seed=7)[0])
    first.append(env.clone()._observe(""))
    assert len({o["image"].tobytes() for o in first}) == 1 and len({o["text"] for o in first}) == 1
    trails = []
    for member in range(2):  # same actions: the same for both
        env.reset(seed=7, options={"task": name, "member": member})
        trails.append([digest(env) for _ in random_play(env, 40)])
    assert trails[0] == trails[1]
    assert env.reset(seed=8)[0]["image"].tobytes() != first[0]["image"].tobytes()


def test_member_changes_the_expert_and_nothing_else():
    env, replies = Crafter(**FEW), []
    for member in (0, 1, 0):
        env.reset(seed=3, options={"task": "collect_coal", "member": member})
        before = digest(env)
        replies.append([env.expert_reply(1.0) for _ in range(20)])
        assert digest(env) == before
    assert replies[0] == replies[2] != replies[1]


def test_start_is_a_function_of_seed_and_task():
    """Whatever was played before; without a seed the generator goes on as it was seeded."""
    frames = []
    for warm_up in (0, 2):
        env = Crafter(tasks="all", **FEW)
        for _ in range(warm_up):
            env.reset()
            list(random_play(env, 3))
        frames.append([(o["image"].tobytes(), i["task"], i["position"]) for o, i in
                       (env.reset(seed=5), env.reset(), env.reset(seed=5), env.reset(seed=6))])
    assert frames[0] == frames[1]
    assert frames[0][0] == frames[0][2] != frames[0][3]
    drawn = {env.reset(seed=seed)[1]["task"] for seed in range(120)}
    assert drawn == set(OUTDOOR)


def test_each_seed_has_its_own_chance():
    """Also where two seeds share a map, and although maps come from a cache."""
    env, chances = Crafter(worlds=1), set()
    for seed in range(5):
        env.reset(seed=seed, options={"task": "eat_cow"})
        chances.add(digest(env)[0])
        list(random_play(env, 5))
        env.reset(seed=seed, options={"task": "eat_cow"})
        chances.add(digest(env)[0])
    assert len(chances) == 5
    env.reset(seed=0, options={"task": "collect_wood"})
    draws = [env._state._world.random.random() for _ in range(3)]
    env.reset(seed=1, options={"task": "collect_wood"})
    assert draws != [env._state._world.random.random() for _ in range(3)]


def test_clones_are_independent():
    for name in ("eat_cow", "craft_table"):
        env = world_of(name)
        env.reset(seed=2)
        list(random_play(env, 4))
        before, copy = digest(env), env.clone()
        assert digest(copy) == before
        theirs = [o["image"].tobytes() for o, *_ in random_play(copy, 30, seed=1)]
        assert digest(env) == before
        assert [o["image"].tobytes() for o, *_ in random_play(env, 30, seed=1)] == theirs
        assert digest(env) == digest(copy) != before


def test_splits_are_disjoint():
    train, held = ({openworld.world_seed(split, i) for i in range(300)}
                   for split in ("train", "eval"))
    assert len(train) == len(held) == 300 and not train & held
    maps = [{Sim(24, openworld.world_seed(split, i))._world._mat_map.tobytes() for i in range(4)}
            for split in ("train", "eval")]
    assert len(maps[0] | maps[1]) == 8
    used = {}
    for split in ("train", "eval"):
        env = Crafter(split=split, tasks="collect_sapling", **FEW)
        used[split] = {env.reset(seed=seed) and env._state.born for seed in range(12)}
        assert used[split] <= {openworld.world_seed(split, i) for i in range(4)}
        assert len(used[split]) > 1
    layouts = {}
    for split in ("train", "eval"):
        env = CraftingGrid(split=split, distractors=0, tasks="craft_table")
        layouts[split] = set()
        for seed in range(400):
            env.reset(seed=seed)
            layouts[split].add(repr(sorted(env._state.slots.items())))
    assert len(layouts["train"]) < 60 and len(layouts["eval"]) < 60  # so few that they would meet
    assert not layouts["train"] & layouts["eval"]


# Crafter's rules


def stage(name="collect_wood", ahead=None, facing="right", **options):
    """An episode on bare grass, with `ahead` before the player and nobody else."""
    env = Crafter(tasks=name, **FEW | options)
    env.reset(seed=0)
    sim = env._state
    world, player = sim._world, sim.player
    for obj in world.objects:
        if obj is not player:
            world.remove(obj)
    world._mat_map[:] = world._mat_ids["grass"]
    if tuple(player.pos) != (16, 16):
        world.move(player, (16, 16))
    player.facing = sims.SIDES[facing]
    if ahead in crafter.constants.materials:
        world[16 + player.facing[0], 16 + player.facing[1]] = ahead
    env._look()
    return env


@pytest.mark.parametrize(("name", "ahead", "replies"), [
    ("collect_wood", "tree", ["do"]),
    ("collect_drink", "water", ["up", "down", "right", "right", "do"]),
    ("collect_stone", "stone", ["do"]),
    ("collect_coal", "coal", ["do"]),
    ("collect_iron", "iron", ["do"]),
    ("place_furnace", "stone", ["do", "furnace"]),
    ("make_wood_pickaxe", None, ["table", "woodpickaxe"]),
    ("make_wood_sword", None, ["table", "woodsword"]),
    ("make_stone_sword", "table", ["wait", "stonesword"]),
])
def test_success_by_hand(name, ahead, replies):
    env = stage(name, ahead)
    for reply in replies[:-1]:
        _, reward, ended, truncated, info = env.step(reply)
        assert (reward, ended, truncated) == (0.0, False, False)
        assert not info["success"] and info["count"] == 0 and info["valid"]
    _, reward, ended, truncated, info = env.step(replies[-1])
    assert (reward, ended, truncated) == (1.0, True, False)
    assert info["success"] and info["count"] == 1 and info["moves"] == len(replies)
    with pytest.raises(RuntimeError, match="over"):
        env.step("wait")


def test_counts_start_at_the_reset():
    """What was there before the episode is not success: the counter has to rise."""
    env = stage("collect_wood", "tree")
    env._state.player.achievements["collect_wood"] = env._base = 5
    assert not env.step("wait")[4]["success"]
    assert env.step("do")[4]["count"] == 1


def test_table_works_at_the_edge():
    for at, ahead in (((0, 16), (1, 16)), ((16, 0), (16, 1)), ((31, 31), (30, 31))):
        env = stage("make_stone_pickaxe")
        env._state._world.move(env._state.player, at)
        env._state._world[ahead] = "table"
        assert env.step("stonepickaxe")[4]["success"], at


def test_death_ends():
    env = stage("collect_wood", "lava")
    _, reward, ended, truncated, info = env.step("right")
    assert (reward, ended, truncated) == (0.0, True, False)
    assert info["dead"] and not info["success"]
    env = stage("collect_wood")
    env._state.player.inventory["health"] = 1
    env._state._summon("zombie", (17, 16))
    assert any(ended and info["dead"] for _, _, ended, _, info in random_play(env, 20))


def test_horizon_truncates_and_counts_actions():
    env = stage("collect_wood", horizon=5)
    results = [env.step("wait") for _ in range(5)]
    assert [r[3] for r in results] == [False] * 4 + [True] and not any(r[2] for r in results)
    env = stage("collect_wood", horizon=5, chunk=3)
    env.step("up, up, up")
    _, _, ended, truncated, info = env.step("up,down,left")
    assert (ended, truncated) == (False, True)
    assert info["actions"] == ["up", "down"] and info["moves"] == 5 and info["turn"] == 2
    env = stage("collect_wood", "tree", horizon=1)  # success in the last step is no truncation
    assert env.step("do")[2:4] == (True, False)
    env = stage("collect_wood", "tree", chunk=3)  # and nothing is executed after it
    assert env.step("do, up, up")[4]["actions"] == ["do"]


@pytest.mark.parametrize(("reply", "options", "actions", "notice"), [
    ("up", {}, ["up"], ""),
    (" up\n", {}, ["up"], ""),
    ("", {}, None, "Unknown action. "),
    ("Up", {}, None, "Unknown action. "),
    ("up!", {}, None, "Unknown action. "),
    ("go up", {}, None, "Unknown action. "),
    ("move_up", {}, None, "Unknown action. "),
    ("up, up", {}, None, "Too many actions. "),
    ("up,", {}, None, "Unknown action. "),
    ("\u00a0up", {}, None, "Unknown action. "),
    ("<think>a</think><answer>up</answer>", {}, None, "Unknown action. "),
    ("up, left", {"chunk": 2}, ["up", "left"], ""),
    ("up,left,up", {"chunk": 2}, None, "Too many actions. "),
    ("up, jump", {"chunk": 2}, None, "Unknown action. "),
    ("up", {"think": True}, None, "Invalid reply. "),
    ("<think>a</think><answer>up</answer>", {"think": True}, ["up"], ""),
    ("<think>a</think><answer>up, up</answer>", {"think": True}, None, "Invalid reply. "),
    ("<answer>up</answer>", {"think": True}, None, "Invalid reply. "),
], ids=repr)
def test_replies(reply, options, actions, notice):
    """An invalid one executes nothing, takes a move of time and is told in the next text."""
    env = stage("collect_wood", facing="down", **options)
    observation, reward, ended, _, info = env.step(reply)
    assert info["valid"] == (actions is not None) and info["actions"] == (actions or [])
    assert observation["text"] == notice + "Collect wood." and (reward, ended) == (0.0, False)
    assert info["moves"] == len(actions or [0]) and info["turn"] == 1
    x = 16 - (actions or []).count("left")
    assert info["position"] == (x, 16 - (actions or []).count("up"))
    assert env._state._step == info["moves"]  # the world went on


def test_text_is_the_instruction():
    env = Crafter(tasks="collect_wood", **FEW)
    assert {env.reset(seed=s)[0]["text"] for s in range(9)} == {"Collect wood."}
    env = Crafter(tasks="collect_wood", paraphrase=True, **FEW)
    assert {env.reset(seed=s)[0]["text"] for s in range(40)} == set(TASKS["collect_wood"].says)
    lines = [line for task in TASKS.values() for line in task.says]
    assert len(set(lines)) == len(lines) and all(len(task.says) >= 2 for task in TASKS.values())
    for kind in (Crafter, CraftingGrid):
        texts = kind().texts
        assert kind().system_prompt in texts and set(openworld.NOTICES) <= set(texts)
        assert all(word.isalpha() and word.islower() for word in kind.actions)
    assert "<think>" in Crafter(think=True).system_prompt
    assert "<think>" not in Crafter().system_prompt
    assert "Up to 2 actions a reply. Reply: up, do" in Crafter(chunk=2).system_prompt


# Pictures


def crafters_view(env, size):
    """Crafter's own renderer on this world."""
    theirs = crafter.Env(area=(32, 32), size=(size, size), seed=0)
    theirs._world = theirs._local_view._world = env._state._world
    theirs._player = env._state.player
    return theirs


@pytest.mark.parametrize("size", [252, 126, 63, 224, 101])
def test_frames_by_day_are_crafters(size):
    env = Crafter(tasks="all", image_size=size, horizon=140, **FEW)
    shown = set()
    for seed, name in enumerate(("collect_drink", "make_iron_pickaxe", "defeat_skeleton")):
        env.reset(seed=seed, options={"task": name})
        theirs = crafters_view(env, size)
        env._state.player.inventory["wood"] = 9
        for observation, *_ in random_play(env, 45, seed):
            assert (observation["image"] == theirs.render()).all()
            shown |= {thing for column in env._things for thing in column}
    assert shown >= {"player-left", "player-up", "skeleton"}


def test_frames_of_everything():
    """Each thing on each ground, asleep or not, at the corner of the world, full bags."""
    env = stage("collect_wood")
    sim, world = env._state, env._state._world
    things = ["cow", "zombie", "skeleton", "plant-ripe"]
    grounds = [name for name in crafter.constants.materials]
    for i, ground in enumerate(grounds):
        world[12 + i % 9, 13 + i // 9] = ground
    for i, thing in enumerate(things):
        sim._summon(thing, (12 + 2 * i, 18))
    for i, facing in enumerate(((-1, 0), (1, 0), (0, -1), (0, 1))):
        world.add(crafter.objects.Arrow(world, (12 + 2 * i, 19), facing))
    world.add(crafter.objects.Plant(world, (20, 18)))
    for amount in (9, 1, 3):
        sim.player.inventory.update(dict.fromkeys(sim.player.inventory, amount))
        for asleep in (False, True):
            sim.player.sleeping = asleep
            env._look()
            assert (env._frame() == crafters_view(env, 252).render()).all()
    sim.player.sleeping = False
    for at in ((0, 0), (31, 31), (0, 20), (31, 3)):
        world.move(sim.player, at)
        env._look()
        assert (env._frame() == crafters_view(env, 252).render()).all()


def test_frames_by_night():
    """Crafter's for equal noise, within 2 levels; noise from seed and step, none on the bag."""
    env = Crafter(tasks="defeat_zombie_night", **FEW)
    env.reset(seed=0)
    frame = env._frame()
    assert (env._frame() == frame).all() and (env.clone()._frame() == frame).all()
    env.step("wait")
    assert (env._frame()[:196] != frame[:196]).mean() > 0.3
    assert frame[:196, :, 2].mean() > 1.5 * stage()._frame()[:196, :, 2].mean()  # blue

    values = np.random.default_rng(0).random((196, 252), np.float32)
    part = np.random.default_rng(1).integers(0, 256, (196, 252, 3), np.uint8)

    class Ours:
        def random(self, shape, dtype):
            return values

    class Theirs:
        def uniform(self, low, high, shape):
            return low + (high - low) * values.T.astype(np.float64)

    view = crafter.engine.LocalView(env._state._world, None, (9, 7))
    view._world = type("World", (), {"random": Theirs(), "daylight": None})()
    for daylight in (0.49, 0.25, 0.0):
        for asleep in (False, True):
            canvas = view._light(part.transpose(1, 0, 2), daylight)
            canvas = (view._sleep(canvas) if asleep else canvas).astype(np.uint8)
            ours = sims.night(part, daylight, asleep, Ours()).astype(int)
            assert np.abs(ours - canvas.transpose(1, 0, 2)).max() <= 2


def test_night_falls_within_a_long_episode():
    env = stage("collect_iron", horizon=300)
    light = []
    for _ in range(250):
        env._state.player.health = 9
        env.step("wait")
        light.append(env._frame()[:196, :, 1].mean())  # green
    assert light[50] > light[120] > light[160] > light[200] < light[249]


def test_frame_sizes():
    for kind, options in ((Crafter, FEW), (CraftingGrid, {})):
        for size in (45, 63, 224, 252):
            env = kind(image_size=size, **options)
            image = env.reset(seed=0)[0]["image"]
            assert image.shape == (size, size, 3) and image.dtype == np.uint8
            assert env.observation_space.contains({"image": image, "text": "a"})
            border = (size - size // 9 * 9) // 2
            assert not border or not image[:border].any() and not image[:, :border].any()
        assert kind(**options).observation_space["image"].shape == (252, 252, 3)


# Tasks


def test_the_table_of_tasks():
    kinds = {task.kind for task in TASKS.values()}
    assert kinds == {"embodied", "craft", "combat", "gui"}
    for kind in kinds:
        assert {task.seen for task in TASKS.values() if task.kind == kind} == {True, False}
    events = set(crafter.constants.achievements)
    for name, task in TASKS.items():
        assert name == task.name
        assert task.event in events if task.kind != "gui" else task.event == f"craft_{task.target}"
    assert len(OUTDOOR) == 19 and len(INDOOR) == 9
    assert set(Crafter().tasks) | set(Crafter(tasks="unseen").tasks) == set(OUTDOOR)
    assert not set(Crafter().tasks) & set(Crafter(tasks="unseen").tasks)
    assert set(Crafter(tasks="combat").tasks) == {
        "eat_cow", "defeat_zombie", "defeat_zombie_unarmed", "defeat_zombie_night",
        "defeat_skeleton"}


@pytest.mark.parametrize("name", OUTDOOR)
def test_set_up(name):
    """Bag, distance, what is summoned, day or night, nobody dangerous close by."""
    task, env = TASKS[name], world_of(name)
    for seed in range(4):
        info = env.reset(seed=seed)[1]
        sim = env._state
        start = {item: rule["initial"] for item, rule in crafter.constants.items.items()}
        assert sim.player.inventory == start | task.inventory
        assert (sim._world.daylight < 0.5) == task.night
        near = [o for o in sim._world.objects if isinstance(o, crafter.objects.Zombie)
                and sim.player.distance(o) <= sims.SAFE]
        assert len(near) == task.summon.count("zombie")
        assert not info["success"] and info["moves"] == 0
        assert len(sims.flood([sims.HERE], env._free())) >= 10  # no nook
        if task.summon:
            assert info["target_visible"]
            low, high = task.distance
            assert 1 <= info["target_distance"] <= high
        elif task.target:
            there = np.argwhere(sim._world._mat_map == sim._world._mat_ids[task.target])
            steps = sims.flood(map(tuple, there.tolist()), sim.free() | {info["position"]})
            assert task.distance[0] <= steps[info["position"]] <= task.distance[1]


@pytest.mark.parametrize("name", TASKS)
def test_expert_solves_and_idleness_does_not(name):
    env = world_of(name, split="eval")
    solved = 0
    for seed in range(5):
        env.reset(seed=seed)
        info, steps = play(env)
        assert info["turn"] == info["moves"] == steps and info["valid"]
        solved += info["success"]
        env.reset(seed=seed)
        for _ in range(100):
            _, _, ended, truncated, info = env.step("wait")
            if ended or truncated:
                break
        assert not info["success"]
    assert solved >= 4


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"think": True, "chunk": 2}], ids=str)
def test_expert_replies_are_valid(options):
    for kind in (Crafter, CraftingGrid):
        env = kind(tasks="all", **options | (FEW if kind is Crafter else {}))
        most = 0
        for seed in range(12):
            env.reset(seed=seed)
            for _ in range(30):
                _, _, ended, truncated, info = env.step(env.expert_reply(0.3))
                assert info["valid"]
                most = max(most, len(info["actions"]))
                if ended or truncated:
                    break
        assert most == options.get("chunk", 1)


@pytest.mark.parametrize("kind", [Crafter, CraftingGrid])
def test_thoughts_are_true_and_in_the_vocabulary(kind):
    """The tile ahead and around, and the way to a nearest target, as the frame has them."""
    env = kind(tasks="all", think=True, **(FEW if kind is Crafter else {}))
    words, found = set(" ".join(env.texts).replace(",", " ").replace(".", " ").split()), 0
    for seed in range(30):
        env.reset(seed=seed)
        for _ in range(5):
            reply = env.expert_reply(0.3)
            thought = reply.split("<think>")[1].split("</think>")[0]
            assert set(thought.replace(";", " ").split()) <= words, thought
            if kind is Crafter:
                around, way = thought.split("; ")
                ahead, *four = around.split()
                for (dx, dy), name in zip(SIDES.values(), four):
                    at = HERE[0] + dx, HERE[1] + dy
                    shown = env._things[at[0]][at[1]] or env._ground[at[0]][at[1]] or "void"
                    assert name in shown
                facing = env._things[HERE[0]][HERE[1]].removeprefix("player-")
                assert ahead == (four[list(SIDES).index(facing)] if facing in SIDES else "asleep")
                numbers = [int(word) for word in way.split() if word.isdigit()]
                if numbers:
                    found += 1
                    steps = [word for word in way.split() if word in SIDES]
                    x = HERE[0] + sum(n * SIDES[side][0] for n, side in zip(numbers, steps))
                    y = HERE[1] + sum(n * SIDES[side][1] for n, side in zip(numbers, steps))
                    what = way.split(f" {numbers[0]}")[0].replace(" ", "-")
                    assert what in (env._things[x][y], env._ground[x][y])
            if any(env.step(reply)[2:4]):
                break
    assert kind is CraftingGrid or found > 20


@pytest.mark.parametrize("size", [252, 126, 130])
def test_marks_say_where_a_cell_is(size):
    plain, marked = (Crafter(image_size=size, marks=marks, **FEW) for marks in (False, True))
    plain, marked = (env.reset(seed=1)[0]["image"] for env in (plain, marked))
    unit, border = size // 9, (size - size // 9 * 9) // 2
    width = unit // 9
    for row in range(9):
        for column in range(9):
            cell = slice(border + row * unit, border + (row + 1) * unit), slice(
                border + column * unit, border + (column + 1) * unit)
            lines = marked[cell][: 2 * width]
            assert (lines[0] == 255).all(1).nonzero()[0].tolist() == [
                *range(column * width, (column + 1) * width)]
            assert (lines[-1] == 255).all(1).nonzero()[0].tolist() == [
                *range(row * width, (row + 1) * width)]
            assert (marked[cell][2 * width:] == plain[cell][2 * width:]).all()


def test_noise_makes_the_expert_worse():
    scores = []
    for noise in (0.0, 0.7, 1.0):
        env, successes = Crafter(tasks="seen", **FEW), 0
        for seed in range(30):
            env.reset(seed=seed)
            successes += play(env, noise)[0]["success"]
        scores.append(successes)
    assert scores[0] >= 27 and scores[0] > scores[1] + 3 and scores[1] > scores[2] + 3


def test_expert_sees_the_view_alone():
    """The world beyond the frame, hidden counters and the world's chance change no reply."""
    compared = 0
    for seed in range(3):
        for name in OUTDOOR:
            env = world_of(name)
            env.reset(seed=seed)
            list(random_play(env, 5, seed))
            if env._over:
                continue
            other = env.clone()
            sim, world = other._state, other._state._world
            px, py = sim.player.pos
            for obj in world.objects:
                if abs(obj.pos[0] - px) > 4 or abs(obj.pos[1] - py) > 3:
                    world.remove(obj)
            for x in range(32):
                for y in range(32):
                    if abs(x - px) > 4 or abs(y - py) > 3:
                        world[x, y] = ("tree", "water", "table", "coal")[(x + y) % 4]
            sim.player._hunger, sim.player._thirst = 24, 19
            world.random.seed(99)
            other._look()
            assert (other._frame() == env._frame()).all()
            assert [env.expert_reply() for _ in range(3)] == [
                other.expert_reply() for _ in range(3)]
            compared += 1
    assert compared > 40


# Diagnostics


def test_target_in_view_and_its_distance():
    env = stage("collect_wood")
    assert env._info(True, [])["target_visible"] is False
    assert env._info(True, [])["target_distance"] is None
    world = env._state._world
    world[20, 16] = "tree"  # the view reaches 4 to the right
    assert (env.step("wait")[4]["target_visible"], env._info(True, [])["target_distance"]) == (
        True, 4)
    assert env.step("right")[4]["target_distance"] == 3
    for y in range(13, 20):
        world[18, y] = "water"  # a wall right through the view
    info = env.step("wait")[4]
    assert info["target_visible"] and info["target_distance"] is None
    env = stage("collect_drink", "water")
    assert env.step("wait")[4]["target_visible"]
    env._state._world.add(crafter.objects.Arrow(env._state._world, (17, 16), (0, 1)))
    env._look()
    assert not env._info(True, [])["target_visible"]  # what lies under a thing is not seen


@pytest.mark.parametrize("name", ["collect_wood", "eat_cow", "collect_stone", "eat_plant"])
def test_teleport_away(name):
    moved = 0
    for seed in range(8):
        env = world_of(name)
        start = env.reset(seed=seed)[1]["position"]
        chance, copy = digest(env)[0], env.clone()
        free = env._state.free()
        if not env.teleport_away():
            assert env._position() == start
            continue
        moved += 1
        steps = sims.flood([start], free)
        assert 6 <= steps[env._position()] <= 10 and digest(env)[0] == chance
        assert env._info(True, [])["target_visible"] is False
        assert copy.teleport_away() and copy._position() == env._position()
        env.step("wait")
    assert moved >= 3
    with pytest.raises(RuntimeError, match="reset"):
        Crafter(**FEW).teleport_away()


# CraftingGrid


COOKBOOK = {  # written down apart from the code
    "wood_sword": [".w.", ".w.", "./."],
    "stone_sword": ["s..", "s..", "/.."],
    "iron_sword": ["..i", "..i", "../"],
    "wood_pickaxe": ["www", "./.", "./."],
    "stone_pickaxe": ["sss", "./.", "./."],
    "iron_pickaxe": ["iii", "./.", "./."],
    "table": ["...", "ww.", "ww."],
    "furnace": [".ss", ".ss", "..."],
    "fence": ["...", "w/w", "w/w"],
}
NOT_IN_IT = [["...", "...", "..."], ["w..", "w..", "..."], ["w..", "/..", "w.."],
             ["www", "./.", "..."], ["wws", "./.", "./."], ["ww.", "w..", "..."],
             ["www", "./.", "./w"], ["/..", "w..", "w.."], ["w.w", "...", "w.w"]]


def lay(rows):
    item = {"w": "wood", "s": "stone", "i": "iron", "/": "stick"}
    return {CRAFT[3 * y + x]: (item[mark], 1)
            for y, row in enumerate(rows) for x, mark in enumerate(row) if mark != "."}


def test_recipes():
    assert set(COOKBOOK) == set(sims.RECIPES)
    for product, rows in COOKBOOK.items():
        bench = Bench(lay(rows), OUT)
        assert bench.product() == product
        bench.act("craft")
        assert dict(bench.made) == {f"craft_{product}": 1}
        assert bench.slots == {BAG[0]: (product, 1)} and bench.product() is None
        bench = Bench(lay(rows), CRAFT[0])  # the cursor is not on the output
        bench.act("craft")
        assert not bench.made and bench.slots == lay(rows)
    for rows in NOT_IN_IT:
        bench = Bench(lay(rows), OUT)
        bench.act("craft")
        assert bench.product() is None and not bench.made and bench.slots == lay(rows)


def test_hand_by_hand():
    bag, slot = BAG[0], CRAFT[0]
    bench = Bench({bag: ("wood", 3), BAG[1]: ("stone", 1), BAG[2]: ("wood", 1)}, bag)
    bench.act("take")
    assert bench.hand == ("wood", 3) and bag not in bench.slots
    bench.cursor = BAG[1]
    bench.act("take"), bench.act("put")  # a full hand takes nothing, wood does not go on stone
    assert bench.hand == ("wood", 3) and bench.slots[BAG[1]] == ("stone", 1)
    bench.cursor = slot
    bench.act("put"), bench.act("put")  # one item a slot
    assert bench.slots[slot] == ("wood", 1) and bench.hand == ("wood", 2)
    bench.cursor = BAG[2]
    bench.act("put")
    assert bench.slots[BAG[2]] == ("wood", 3) and bench.hand is None
    bench.act("put")
    bench.cursor = HAND  # neither slot nor bag: nothing to take or to put on
    bench.act("take"), bench.act("put")
    assert bench.hand is None and HAND not in bench.slots
    bench.cursor = slot
    bench.act("take")
    assert bench.hand == ("wood", 1) and slot not in bench.slots
    bench.cursor = (0, 4)
    bench.act("put")
    assert bench.hand == ("wood", 1) and (0, 4) not in bench.slots
    for side, end in (("left", (0, 4)), ("up", (0, 4)), ("right", (8, 4)), ("down", (8, 8))):
        for _ in range(9):
            bench.act(side)
        assert bench.cursor == end


def test_items_are_kept():
    """Random play makes nothing from nothing and loses nothing, but by a recipe."""
    env = CraftingGrid(tasks="all", horizon=3000, distractors=6)
    env.reset(seed=0, options={"task": "craft_iron_pickaxe"})

    def stock():
        total = {}
        for item, amount in [*env._state.slots.values(), env._state.hand or ("", 0)]:
            total[item] = total.get(item, 0) + amount
        return {item: amount for item, amount in total.items() if amount}

    before, held = stock(), False
    for _ in random_play(env, 3000):
        held = held or any(at in env._state.slots for at in CRAFT)
        if not env._state.made:
            assert stock() == before
    assert held


@pytest.mark.parametrize("distractors", [0, 3, 8])
def test_layouts(distractors):
    for name in INDOOR:
        env = CraftingGrid(tasks=name, distractors=distractors)
        needed = list(sims.pattern(TASKS[name].target).values())
        for seed in range(5):
            env.reset(seed=seed)
            stacks = dict(env._state.slots.values())
            assert set(env._state.slots) <= set(BAG)
            assert len(stacks) == len(env._state.slots) == len(set(needed)) + distractors
            assert all(stacks[item] >= needed.count(item) for item in needed)
            info, steps = play(env)
            assert info["success"] and steps < 60
            assert env._state.made == {f"craft_{TASKS[name].target}": 1}


def test_expert_recovers_from_mess():
    """Wrong items in the slots, something else in the hand."""
    solved = 0
    for seed in range(20):
        env = CraftingGrid(tasks="craft_wood_pickaxe", horizon=400)
        env.reset(seed=seed)
        for _ in random_play(env, 200, seed):
            pass
        solved += play(env)[0]["success"]
    assert solved >= 19


def test_frames_of_the_window():
    """All that counts is in the frame: items, amounts, hand, cursor, product."""
    bench = Bench({BAG[0]: ("wood", 2)}, (0, 4))
    frames = [bench.frame(28, 252)]
    for change in ({"cursor": (1, 4)}, {"hand": ("stick", 1)}, {"hand": ("stick", 2)},
                   {"slots": {BAG[0]: ("wood", 3)}}, {"slots": {BAG[1]: ("wood", 3)}},
                   {"slots": {BAG[1]: ("stone", 3)}}, {"slots": lay(COOKBOOK["table"])}):
        for name, value in change.items():
            setattr(bench, name, value)
        frames.append(bench.frame(28, 252))
    assert len({frame.tobytes() for frame in frames}) == len(frames)
    x, y = OUT
    assert (frames[-1] != frames[-2])[y * 28 : y * 28 + 28, x * 28 : x * 28 + 28].any()
    tiles = {sims.item_tile(item, 1, 28).tobytes() for item in (*sims.ITEMS, *sims.RECIPES)}
    assert len(tiles) == len(sims.ITEMS) + len(sims.RECIPES)
