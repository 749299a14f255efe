"""Tests of envs.py: levels and their split, the reply protocol, rewards by hand, frames, expert.

Levels are checked by a second, independent reading of their letters (`lake_moves`, `push`), the
lake also against Gymnasium's own environment.
"""

import copy
import pickle
import random
import subprocess
import sys
import warnings
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils.env_checker import check_env

import envs
from envs import WORLDS, make_env, parse_reply

ACTIONS = ("Left", "Down", "Right", "Up")
DELTA = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
VARIANTS = [
    ("FrozenLake", {}),
    ("FrozenLake", {"split": "eval", "text_state": True}),
    ("FrozenLake", {"slippery": True, "success_rate": 0.8}),
    ("FrozenLake", {"random_corners": True, "size": 5, "image_size": 84}),
    ("FrozenLake", {"size": 8, "max_turns": 8, "render_mode": "rgb_array"}),
    ("Sokoban", {}),
    ("Sokoban", {"split": "eval", "text_state": True, "image_size": 300}),
    ("Sokoban", {"boxes": 2, "size": 7, "max_moves": 12, "render_mode": "rgb_array"}),
]
PLAIN = [("FrozenLake", {}), ("FrozenLake", {"random_corners": True}), ("Sokoban", {})]


def names(variant):
    return f"{variant[0]} {variant[1]}"


def say(*actions):
    return f"<think>so</think><answer>{', '.join(actions)}</answer>"


# An independent reading of levels


def cells_of(level):
    return {(r, c): glyph for r, row in enumerate(level.split("\n")) for c, glyph in enumerate(row)}


def lake_moves(level):
    """Moves of the shortest walk from S to G on ice, None where there is none."""
    cells = cells_of(level)
    start = next(at for at, letter in cells.items() if letter == "S")
    distance, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        if cells[at] == "G":
            return distance[at]
        for y, x in DELTA.values():
            to = (at[0] + y, at[1] + x)
            if cells.get(to, "H") != "H" and to not in distance:
                distance[to] = distance[at] + 1
                queue.append(to)
    return None


def sokoban_state(level):
    cells = cells_of(level)
    walls, targets, players, boxes = (
        frozenset(at for at, glyph in cells.items() if glyph in kind)
        for kind in ("#", ".*+", "@+", "$*")
    )
    (player,) = players
    return walls, targets, player, boxes


def push(walls, player, boxes, action):
    """The player and the boxes after one move."""
    y, x = DELTA[action]
    to, beyond = (player[0] + y, player[1] + x), (player[0] + 2 * y, player[1] + 2 * x)
    if to in walls or to in boxes and (beyond in walls or beyond in boxes):
        return player, boxes
    return to, boxes - {to} | {beyond} if to in boxes else boxes


def sokoban_moves(level):
    """Moves of the shortest solution, by brute force; None where there is none."""
    walls, targets, player, boxes = sokoban_state(level)
    distance, queue = {(player, boxes): 0}, deque([(player, boxes)])
    while queue:
        state = queue.popleft()
        if state[1] == targets:
            return distance[state]
        for action in ACTIONS:
            after = push(walls, *state, action)
            if after not in distance:
                distance[after] = distance[state] + 1
                queue.append(after)
    return None


# Gymnasium's contract


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_check_env(variant):
    name, options = variant
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make_env(name, **options), skip_render_check=True)
        # With a spec Gymnasium also compares what equal seeds bring and tries each render mode.
        gymnasium.register("Checked-v0", entry_point=WORLDS[name])
        try:
            made = gymnasium.make("Checked-v0", disable_env_checker=True, **options)
            check_env(made.unwrapped)
        finally:
            del gymnasium.registry["Checked-v0"]


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_same_seed_same_episode(variant):
    """Reset and the moves repeat, whatever was played before, and for the reset that follows."""
    name, options = variant
    traces = []
    for warm_up in (0, 3):
        env = make_env(name, **options)
        for _ in range(warm_up):
            env.reset()
        trace = []
        for seed in (5, None):
            observation, info = env.reset(seed=seed)
            trace += [info["level"], observation["text"], observation["image"].tobytes()]
            ended = truncated = False
            while not (ended or truncated):
                reply = env.expert_reply(noise=0.5)
                observation, reward, ended, truncated, info = env.step(reply)
                trace += [reply, observation["image"].tobytes(), observation["text"], reward, info]
        traces.append(trace)
    assert traces[0] == traces[1]


def test_fresh_process_draws_the_same_levels():
    script = (
        "import envs\n"
        "for name, options in (('FrozenLake', {'random_corners': True}), ('Sokoban', {})):\n"
        "    for split in ('train', 'eval'):\n"
        "        env = envs.make_env(name, split=split, **options)\n"
        "        for seed in range(5): print(env.reset(seed=seed)[1]['level'])\n"
    )
    here = [
        env.reset(seed=seed)[1]["level"]
        for name, options in PLAIN[1:]
        for split in ("train", "eval")
        for env in [make_env(name, split=split, **options)]
        for seed in range(5)
    ]
    for salt in ("1", "2"):  # of Python's str hash
        out = subprocess.run(
            [sys.executable, "-c", script], cwd=Path(envs.__file__).parent, check=True, text=True,
            capture_output=True, env={"PYTHONHASHSEED": salt, "PATH": ""},
        ).stdout
        assert out == "\n".join(here) + "\n"


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_a_copy_and_a_pickle_go_on_alike(variant):
    name, options = variant
    env = make_env(name, **options)
    env.reset(seed=3)
    twins = [env, copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    traces = []
    for twin in twins:
        trace = [twin.step(say(twin.actions[0]))[1:]]
        trace += [twin.reset()[1]["level"] for _ in range(3)]
        traces.append(trace)
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("Frozenlake", {}, "'Frozenlake'; there are FrozenLake, Sokoban"),
        ("FrozenLake", {"boxes": 1}, "no option 'boxes'; it has split, render_mode, max_turns"),
        ("FrozenLake", {"size": 9}, "size=9 must be of type int, 4 to 8"),
        ("Sokoban", {"boxes": True}, "boxes=True must be"),
        ("FrozenLake", {"slippery": "no"}, "slippery='no' must be"),
        ("FrozenLake", {"slippery": 1}, "slippery=1 must be"),
        ("FrozenLake", {"frozen_probability": float("nan")}, "frozen_probability=nan must be"),
        ("FrozenLake", {"split": "test"}, "split='test' must be 'train' or 'eval'"),
        ("FrozenLake", {"render_mode": "human"}, "render_mode='human' must be"),
        ("FrozenLake", {"image_size": 0}, "image_size=0 must be of type int, 16 to 2048"),
        ("FrozenLake", {"max_turns": 0}, "max_turns=0 must be"),
        ("FrozenLake", {"max_actions": 2.0}, "max_actions=2.0 must be"),
        ("FrozenLake", {"format_reward": -1}, "format_reward=-1 must be"),
        ("Sokoban", {"min_moves": 9}, "max_moves=5 must be of type int, 9 to 40"),
        ("Sokoban", {"boxes": 0}, "boxes=0 must be of type int, 1 to 4"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(name, options, words):
    with pytest.raises(ValueError) as error:
        make_env(name, **options)
    assert words in str(error.value)


def test_no_level_ends_in_a_sentence():
    env = make_env("FrozenLake", frozen_probability=0.0)
    with pytest.raises(RuntimeError, match="no train level in 1000 draws of FrozenLake.*=0.0"):
        env.reset(seed=0)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(say("Up"))


# Levels


def test_lakes_can_be_crossed_and_differ():
    for options in ({}, {"random_corners": True}, {"size": 8, "frozen_probability": 0.6}):
        env = make_env("FrozenLake", **options)
        levels = []
        for seed in range(300):
            level = env.reset(seed=seed)[1]["level"]
            moves = lake_moves(level)
            levels.append(level)
            assert moves is not None and moves == len(env.expert_plan()), level
            at = {letter: np.array(place) for place, letter in cells_of(level).items()}
            if options.get("random_corners"):
                assert abs(at["S"] - at["G"]).sum() >= 3, level
            else:
                assert level[0] == "S" and level[-1] == "G", level
        assert len(set(levels)) > (100 if not options else 280)
        holes = np.mean([level.count("H") for level in levels])
        assert 1.5 < holes if env.size == 4 else 15 < holes < 25  # 62 cells at 0.6, if passable


@pytest.mark.parametrize(
    "options",
    [{}, {"min_moves": 5, "max_moves": 6}, {"size": 5, "boxes": 2, "max_moves": 9}],
    ids=str,
)
def test_rooms_can_be_solved_in_the_stated_moves(options):
    env = make_env("Sokoban", **options)
    levels, lengths = [], []
    for seed in range(300 if not options else 100):
        level = env.reset(seed=seed)[1]["level"]
        walls, targets, player, boxes = sokoban_state(level)
        assert len(boxes) == len(targets) == env.boxes and boxes != targets
        assert player not in boxes | walls and not walls & (boxes | targets)
        rim = [at for at in cells_of(level) if {0, env.size - 1} & set(at)]
        assert walls.issuperset(rim)
        lengths.append(sokoban_moves(level))
        assert lengths[-1] == len(env.expert_plan()), level
        levels.append(level)
    assert set(lengths) <= set(range(env.min_moves, env.max_moves + 1))
    assert len(set(levels)) > 0.85 * len(levels)
    if not options:  # each length 1..5 is wanted alike
        share = np.bincount(lengths, minlength=6)[1:] / len(lengths)
        assert share.min() > 0.12 and share.max() < 0.3, share


@pytest.mark.parametrize("variant", PLAIN, ids=names)
def test_train_and_eval_levels_are_disjoint(variant):
    """Not only the levels: no holes with goal, and no walls with targets, are in both splits."""
    name, options = variant
    seen = {}
    for split in ("train", "eval"):
        env = make_env(name, split=split, **options)
        assert env.reset(seed=0)[1]["split"] == split
        seen[split] = {env.reset(seed=seed)[1]["level"] for seed in range(2000)}
    blank = str.maketrans("S", "F") if name == "FrozenLake" else str.maketrans("$*@+", "-.-.")
    worlds = {split: {level.translate(blank) for level in seen[split]} for split in seen}
    assert not worlds["train"] & worlds["eval"]
    fewest = {"train": 400, "eval": 120} if not options and name == "FrozenLake" else {
        "train": 1500, "eval": 1000}
    assert all(len(seen[split]) > fewest[split] for split in seen), {k: len(seen[k]) for k in seen}


def test_eval_lakes_are_no_easier_than_training_lakes():
    holes = {}
    for split in ("train", "eval"):
        env = make_env("FrozenLake", split=split)
        holes[split] = np.mean([env.reset(seed=s)[1]["level"].count("H") for s in range(1000)])
    assert abs(holes["train"] - holes["eval"]) < 0.4, holes


@pytest.mark.parametrize(
    "name, level",
    [
        ("FrozenLake", "SFFF\nFFFF\nFFFF"),
        ("FrozenLake", "SFFF\nFFFF\nFFFF\nFFFGF"),
        ("FrozenLake", "SFFF\nFFFF\nFFFF\nFFFF"),
        ("FrozenLake", "SFFS\nFFFF\nFFFF\nFFFG"),
        ("FrozenLake", "SFFx\nFFFF\nFFFF\nFFFG"),
        ("Sokoban", "######\n#@$.-#\n#----#\n#----#\n#----#\n#####-"),
        ("Sokoban", "######\n#-$.-#\n#----#\n#----#\n#----#\n######"),
        ("Sokoban", "######\n#@@$.#\n#----#\n#----#\n#----#\n######"),
        ("Sokoban", "######\n#@$--#\n#----#\n#----#\n#----#\n######"),
        ("Sokoban", "######\n#@*--#\n#----#\n#----#\n#----#\n######"),
        ("Sokoban", "hello"),
    ],
)
def test_given_levels_are_checked(name, level):
    with pytest.raises(ValueError, match="level|lake|player"):
        make_env(name).reset(options={"level": level})


# Replies

REPLIES = [  # reply, its actions (None: invalid)
    ("<think>go</think><answer>Right</answer>", ["Right"]),
    ("<think>go</think><answer>Right, Down</answer>", ["Right", "Down"]),
    ("<think>go</think><answer>Right,Down,Left</answer>", ["Right", "Down", "Left"]),
    ("<think>go</think>\n<answer>Right,\nDown </answer>", ["Right", "Down"]),
    (" \n<think>go\non</think> \t <answer> Up </answer>\n", ["Up"]),
    ("<think></think><answer>Up</answer>", ["Up"]),
    ("<think>2 < 3 é 🐧</think><answer>Up</answer>", ["Up"]),
    ("", None),
    ("Right", None),
    ("<answer>Right</answer>", None),
    ("<think>go</think>", None),
    ("<think>go</think><answer></answer>", None),
    ("<think>go</think><answer>Right,</answer>", None),
    ("<think>go</think><answer>Right Down</answer>", None),
    ("<think>go</think><answer>Right, Down, Left, Up</answer>", None),
    ("<think>go</think><answer>right</answer>", None),
    ("<think>go</think><answer>Jump</answer>", None),
    ("<think>go</think><answer>Right, Jump</answer>", None),
    ("<think>go</think><answer>Right</answer>!", None),
    ("I say <think>go</think><answer>Right</answer>", None),
    ("<think>go</think> so <answer>Right</answer>", None),
    ("<answer>Right</answer><think>go</think>", None),
    ("<think><think>go</think></think><answer>Right</answer>", None),
    ("<think>go</think><think>on</think><answer>Right</answer>", None),
    ("<think>go</think><answer>Right</answer><answer>Down</answer>", None),
    ("<think>go</think><answer>Right</answer><think>go</think><answer>Right</answer>", None),
    ("<think>go</think><answer><answer>Right</answer></answer>", None),
    ("<think>go<answer>Up</answer></think><answer>Right</answer>", None),
    ("<think>go</answer></think><answer>Right</answer>", None),
    ("<Think>go</Think><Answer>Right</Answer>", None),
    ("<think >go</think ><answer>Right</answer>", None),
    ("<think>go</think><answer>Right", None),
    ("<think>go</think><answer>Ｒight</answer>", None),
    ("<think>go</think>\u00a0<answer>Right</answer>", None),
    ("<think>go</think><answer>Right\u00a0</answer>", None),
    ("<think>go</think><answer>Right\u200b</answer>", None),
]


@pytest.mark.parametrize("reply, actions", REPLIES)
def test_replies(reply, actions):
    """The parse, and what the environment then does: the bonus, the moves, the turn."""
    assert parse_reply(reply, ACTIONS, 3) == actions
    env = make_env("FrozenLake", text_state=True)
    before, _ = env.reset(seed=0, options={"level": "FFFF\nFSFF\nFFFF\nFFFG"})
    after, reward, ended, truncated, info = env.step(reply)
    assert (info["valid"], info["actions"]) == (actions is not None, actions or [])
    assert reward == info["format_reward"] == (0.0 if actions is None else 0.5)
    assert (info["turn"], info["moves"], ended, truncated) == (1, len(actions or []), False, False)
    start = "Turn 2.\n" if actions else "Invalid reply. Turn 2.\n"
    assert after["text"].startswith(start)
    if actions is None:
        assert np.array_equal(before["image"], after["image"])
        assert after["text"].split("\n")[1:] == before["text"].split("\n")[1:]
    assert after in env.observation_space


@pytest.mark.parametrize("reply", [None, 3, b"<think>a</think><answer>Up</answer>", ["Up"]])
def test_a_reply_that_is_no_str_is_a_type_error(reply):
    env = make_env("Sokoban")
    env.reset(seed=0)
    with pytest.raises(TypeError, match=f"must be a str, not {type(reply).__name__}"):
        env.step(reply)
    assert env.step(say("Up"))[4]["turn"] == 1  # the refused call spent nothing


def test_any_text_is_survived():
    """Random unicode, lone surrogates, bytes read as text, 100,000 characters in linear time."""
    chance = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", "Up", ",", " ", "\n", "é", "\x00", "<"]
    replies = ["".join(chance.choices(parts, k=chance.randrange(12))) for _ in range(300)]
    replies += ["".join(chr(chance.randrange(0x110000)) for _ in range(40)) for _ in range(100)]
    replies += [chance.randbytes(60).decode("latin-1") for _ in range(100)]
    replies += [part * 100_000 for part in ("x", " ", "<", "Up,", "<think>", "</think><answer>")]
    replies += ["<think>" + "</think> <answer>" * 20_000, "<think>" + "a" * 100_000]
    replies += ["<think>a</think>" + " " * 100_000, say(*["Up"] * 50_000)]
    env = make_env("Sokoban", max_turns=100)
    spent, turns = 0, 0
    for reply in replies:
        if turns % 100 == 0:
            env.reset(seed=turns)
        observation, _, ended, truncated, info = env.step(reply)
        turns = turns + 1 if not ended else 0
        assert info["valid"] == (parse_reply(reply, env.actions, 3) is not None)
        assert observation["text"].isprintable() and not isinstance(ended, np.bool_)
        spent += not info["valid"]
    assert spent > 400
    long = "<think>" + "so " * 40_000 + "</think><answer>Up</answer>"
    assert parse_reply(long, ACTIONS, 1) == ["Up"]


# Turns and rewards

LAKE = "SFFH\nFHFF\nFFFF\nHFFG"
ROOM = "######\n#----#\n#@$.-#\n#----#\n#----#\n######"


def played(name, level, *replies, **options):
    """Rewards, ends and infos of the turns of one episode."""
    env = make_env(name, **options)
    assert env.reset(seed=0, options={"level": level})[1] == {
        "success": False, "split": "given", "level": level}
    turns = [env.step(reply)[1:] for reply in replies]
    with pytest.raises(RuntimeError, match="reset"):
        env.step(say("Up"))
    return turns


def test_lake_rewards_by_hand():
    first, second = played("FrozenLake", LAKE, say("Right", "Right", "Down"),
                           say("Down", "Down", "Right"))
    assert first[:3] == (0.5, False, False) and not first[3]["success"]
    assert second[:3] == (10.5, True, False)
    assert second[3] == {"success": True, "valid": True, "actions": ["Down", "Down", "Right"],
                         "format_reward": 0.5, "turn": 2, "moves": 6}
    (fall,) = played("FrozenLake", LAKE, say("Right", "Down", "Left"))  # the third is not executed
    assert fall[:3] == (0.5, True, False)
    assert fall[3]["actions"] == ["Right", "Down"] and not fall[3]["success"]


def test_sokoban_rewards_by_hand():
    (won,) = played("Sokoban", ROOM, say("Right", "Up"))
    assert won[:3] == (pytest.approx(0.5 - 0.1 + 1 + 10), True, False)
    assert won[3]["actions"] == ["Right"] and won[3]["success"]
    two = "######\n#----#\n#@$.-#\n#--$.#\n#----#\n######"
    turns = played("Sokoban", two, say("Right"), say("Right"), say("Left", "Left", "Up"),
                   say("Jump"), say("Right"), format_reward=0.25)
    rewards = [turn[0] for turn in turns]
    assert rewards == pytest.approx([0.15 + 1, 0.15 - 1, 0.25 - 0.3, 0.0, 0.15])
    assert [turn[3]["moves"] for turn in turns] == [1, 2, 5, 5, 6]
    assert [turn[1:3] for turn in turns] == [(False, False)] * 4 + [(False, True)]


def test_sokoban_pushes():
    """Walls and second boxes block a push; a box is never pulled; a box moves off its target."""
    steps = [  # level row before, action, row after
        ("#@$.-#", "Right", "#-@*-#"), ("#-@$.#", "Left", "#@-$.#"), ("#.@$$#", "Right", "#.@$$#"),
        ("#.-@$#", "Right", "#.-@$#"), ("#$@*-#", "Right", "#$-+$#"), ("#@.-$#", "Right", "#-+-$#"),
    ]
    for before, action, after in steps:
        spare = "#.---#" if before.count("$") + before.count("*") > 1 else "#----#"
        level = "\n".join(["######", spare, "#----#", before, "#----#", "######"])
        env = make_env("Sokoban", text_state=True)
        env.reset(options={"level": level})
        text = env.step(say(action))[0]["text"]
        assert text.split("\n")[4].replace(" ", "") == after, (before, action)


def test_terminated_and_truncated_are_kept_apart():
    """Solved in the last turn: terminated only. Turns over: truncated only. Invalid turns count."""
    (late,) = played("Sokoban", ROOM, say("Right"), max_turns=1)
    assert late[1:3] == (True, False) and late[3]["success"]
    (out,) = played("Sokoban", ROOM, say("Up"), max_turns=1)
    assert out[1:3] == (False, True) and not out[3]["success"]
    turns = played("FrozenLake", LAKE, *["what?"] * 5)
    assert [turn[:3] for turn in turns] == [(0.0, False, False)] * 4 + [(0.0, False, True)]
    assert turns[-1][3]["turn"] == 5 and turns[-1][3]["moves"] == 0
    env = make_env("FrozenLake")
    for call in (lambda: env.step(say("Up")), env.expert_reply, env.expert_plan):
        with pytest.raises(RuntimeError, match="reset"):
            call()


@pytest.mark.parametrize("slippery", [False, True])
def test_lake_moves_are_gymnasiums(slippery):
    """300 random moves on 60 lakes: the same cells, rewards and ends as Gymnasium's environment."""
    env = make_env("FrozenLake", size=5, slippery=slippery, max_turns=100, format_reward=0.0)
    chance, moves = random.Random(0), 0
    for seed in range(60):
        level = env.reset(seed=seed)[1]["level"]
        theirs = FrozenLakeEnv(desc=level.split("\n"), is_slippery=slippery)
        theirs.reset(seed=0)
        theirs.np_random = copy.deepcopy(env.np_random)
        over = False
        while not over:
            action = chance.randrange(4)
            _, reward, ended, truncated, info = env.step(say(ACTIONS[action]))
            cell, their_reward, their_end, _, _ = theirs.step(action)
            assert env._state == cell and ended == their_end and reward == 10 * their_reward
            assert info["success"] == (their_reward == 1)
            over, moves = ended or truncated, moves + 1
    assert moves > 300


def test_slippery_steps_go_astray_as_often_as_stated():
    env = make_env("FrozenLake", slippery=True, success_rate=0.6)
    went = []
    for seed in range(1000):
        env.reset(seed=seed, options={"level": "FFFF\nFSFF\nFFFF\nFFFG"})
        env.step(say("Right"))
        went.append(env._state)
    share = {cell: went.count(cell) / len(went) for cell in set(went)}
    assert share.keys() == {6, 9, 1}  # right, down, up of cell 5
    assert abs(share[6] - 0.6) < 0.07 and abs(share[9] - 0.2) < 0.06  # 4.5 sigma


# What the model sees


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_frames(variant):
    name, options = variant
    env = make_env(name, **options)
    observation, _ = env.reset(seed=1)
    side = options.get("image_size", 28 * env.size)
    assert observation["image"].shape == (side, side, 3) and observation["image"].dtype == np.uint8
    assert observation["image"].flags.writeable
    frame = env.render()
    if options.get("render_mode"):
        assert np.array_equal(frame, observation["image"])
    else:
        assert frame is None


@pytest.mark.parametrize("name", WORLDS)
def test_each_cell_is_one_tile_and_tiles_differ(name):
    env = make_env(name, text_state=True)
    tiles, looks = env._tiles(), {}
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        over = after_end = False
        while not after_end:
            rows = [row.split() for row in observation["text"].split("\n")[1:]]
            for r, row in enumerate(rows):
                for c, glyph in enumerate(row):
                    tile = observation["image"][28 * r : 28 * r + 28, 28 * c : 28 * c + 28]
                    looks.setdefault(glyph, set()).add(tile.tobytes())
            after_end = over
            if not over:
                observation, _, ended, truncated, _ = env.step(env.expert_reply(noise=0.3))
                over = ended or truncated
    assert set(looks) == set(env.glyphs)
    ours = set().union(*looks.values())
    assert ours <= {tile.tobytes() for tile in tiles}
    assert all(len(look) == 1 for glyph, look in looks.items() if glyph != "P")  # P: start or ice
    flat = tiles.reshape(len(tiles), -1).astype(float)
    apart = np.abs(flat[:, None] - flat).mean(-1) + 99 * np.eye(len(tiles))
    assert apart.min() > 8  # of 255, mean over the tile: no two look alike
    if name == "FrozenLake":
        mean = {glyph: tile.mean() for glyph, tile in zip(env.glyphs[:4], tiles)}
        assert mean["H"] < mean["F"] - 60  # a hole is much darker than ice


@pytest.mark.parametrize("name", WORLDS)
def test_prompts_are_short_and_say_what_counts(name):
    for options in ({}, {"max_actions": 1, "max_turns": 7, "text_state": True}):
        env = make_env(name, **options)
        prompt = env.system_prompt
        assert len(prompt.split()) <= (60 if env.text_state else 40)
        for part in (*env.actions, f"Up to {env.max_actions} action", f"{env.max_turns} replies"):
            assert part in prompt
        example = prompt[prompt.index("<think>") :]
        assert parse_reply(example, env.actions, env.max_actions)
        assert env.reset(seed=0)[0]["text"].startswith("Turn 1.")
    assert "slippery" in make_env("FrozenLake", slippery=True).system_prompt
    assert "slippery" not in make_env("FrozenLake").system_prompt


# The expert


@pytest.mark.parametrize(
    "variant",
    [*PLAIN, ("Sokoban", {"max_moves": 15}), ("FrozenLake", {"size": 8, "max_turns": 10}),
     ("Sokoban", {"boxes": 2, "max_moves": 6, "max_turns": 2})],
    ids=names,
)
def test_expert_solves_every_level_in_time(variant):
    name, options = variant
    for split in ("train", "eval"):
        env = make_env(name, split=split, **options)
        lengths = []
        for seed in range(100):
            env.reset(seed=seed)
            plan, over = env.expert_plan(), False
            while not over:
                reply = env.expert_reply()
                _, _, ended, truncated, info = env.step(reply)
                assert info["valid"], reply
                lengths.append(len(info["actions"]))
                over = ended or truncated
            assert info["success"] and ended, (seed, env.max_turns)
            assert info["moves"] == len(plan)  # never a move too many
        assert set(lengths) == {1, 2, 3}


def test_expert_on_slippery_ice_aims_where_it_would_without_slips():
    plans = []
    for slippery in (False, True):
        env = make_env("FrozenLake", slippery=slippery)
        env.reset(seed=0, options={"level": LAKE})
        plans.append(env.expert_plan())
    assert plans[0] == plans[1] and len(plans[0]) == 6


def test_expert_without_hope_plays_on():
    stuck = "######\n#$---#\n#@-.-#\n#----#\n#----#\n######"
    env = make_env("Sokoban", max_turns=20)
    env.reset(seed=0, options={"level": stuck})
    assert env.expert_plan() == []
    said = [env.step(env.expert_reply())[4]["actions"] for _ in range(20)]
    assert {action for actions in said for action in actions} == set(env.actions)
    env.reset(seed=0, options={"level": ROOM})
    assert env.expert_plan() == ["Right"]
    env.step(say("Right"))
    assert env.expert_plan() == []  # solved
    with pytest.raises(RuntimeError):
        env.expert_reply()


@pytest.mark.parametrize("name", WORLDS)
def test_noise_replaces_that_share_of_actions_and_is_planned_around(name):
    """Actions off a shortest way: noise times those of the four that are off it, at each place."""
    env = make_env(name, max_turns=100)
    off, expected, after_slip = [], [], []
    for seed in range(500):
        env.reset(seed=seed)
        state, slipped = env._state, False
        for action in parse_reply(env.expert_reply(noise=0.4), env.actions, 3):
            assert env._result(state) is None, "an action after the end"
            left = len(env._plan(state))
            if not left:  # hopeless: only random actions are left
                break
            after = {to: env._next(state, to) for to in env.actions}
            nearer = {to for to in after if env._result(after[to]) or
                      len(env._plan(after[to])) == left - 1 > 0}
            off.append(action not in nearer)
            expected.append(0.4 * (1 - len(nearer) / 4))
            if slipped:
                after_slip.append(off[-1] - expected[-1])
            slipped, state = slipped or off[-1], after[action]
    assert abs(np.mean(off) - np.mean(expected)) < 0.06
    assert len(after_slip) > 100 and abs(np.mean(after_slip)) < 0.13  # planned again: no worse
    assert parse_reply(env.expert_reply(noise=1.0), env.actions, 3)
    with pytest.raises(ValueError, match="noise=2.0 must be"):
        env.expert_reply(noise=2.0)


def test_lake_thoughts_are_true():
    env = make_env("FrozenLake", random_corners=True, size=5)
    said = set()
    for seed in range(200):
        level = env.reset(seed=seed)[1]["level"]
        cells = cells_of(level)
        at, flag = ([k for k, v in cells.items() if v == letter][0] for letter in "SG")
        y, x = flag[0] - at[0], flag[1] - at[1]
        want = ["flag"] + ["up"] * (y < 0) + ["down"] * (y > 0) + ["left"] * (x < 0)
        want += ["right"] * (x > 0)
        names = {"H": "hole", "F": "ice", "G": "flag", None: "edge"}
        for side in ("up", "down", "left", "right"):
            dy, dx = DELTA[side.capitalize()]
            want += [side, names[cells.get((at[0] + dy, at[1] + dx))]]
        want += ["go", *(action.lower() for action in env.expert_plan()[:3])]
        thought = env.expert_reply().split("<think>")[1].split("</think>")[0]
        assert thought.split() == want, level
        said.add(thought)
    assert len(said) > 20
    plain = make_env("FrozenLake")
    plain.reset(options={"level": "SFFF\nHFFF\nFFFF\nFFFG"})
    thought = plain._think()  # no need for the flag
    assert thought == "up edge down hole left edge right ice go right down down"


def test_sokoban_thoughts_are_true():
    env = make_env("Sokoban", max_moves=15, max_turns=5)
    signs = {-1: ("up", "left"), 1: ("down", "right"), 0: (None, None)}
    for seed in range(200):
        env.reset(seed=seed)
        env.step(env.expert_reply(noise=0.5))
        if env._over:
            continue
        player, boxes = env._state
        places = [divmod(cell, 6) for cell in (player, boxes[0], env._targets[0])]
        want = []
        for name, (row, col) in zip(("you", "box", "target"), places):
            want += [name, str(row), str(col)]
        for name, here, there in (("box", *places[:2]), ("target", *places[1:])):
            way = [signs[np.sign(there[axis] - here[axis])][axis] for axis in (0, 1)]
            want += [name, *filter(None, way)]
        want += ["go", *(action.lower() for action in env.expert_plan()[:3])]
        words = env.expert_reply().split("<think>")[1].split("</think>")[0].split()
        assert words == want


def test_sokoban_thought_of_two_boxes_names_open_ones():
    env = make_env("Sokoban", boxes=2)
    env.reset(options={"level": "######\n#@*--#\n#----#\n#-$--#\n#--.-#\n######"})
    places, plan = env._think().split(" box down right target down right go ")
    assert places == "you 1 1 box 3 2 target 4 3"
    assert plan.split() == [action.lower() for action in env.expert_plan()[:3]]
