"""Gymnasium environments played by text: a picture and a short text in, a text reply out.

An episode is a few turns. In each turn the model sees {"image": uint8 [H, W, 3], "text": str} and
answers `<think>...</think><answer>Right, Down</answer>`; the actions in the answer are executed one
after the other. `TurnEnv` is that protocol: it parses, counts turns, pays the format bonus, builds
observations and plays the scripted expert. A world (FrozenLake, Sokoban) adds its levels, moves and
picture. Rules and rewards are those of HyGAE (arXiv:2607.23605), which took them from VAGEN.
`python envs.py` prints what the expert and random valid replies reach in each world.

Differs from the paper:
- a level depends on the seed alone (the paper's lake maps ignore it), and no evaluation level is
  ever a training level (the paper's test seeds lie inside its training seeds);
- a reply in the wrong format executes nothing (the paper's code executes what it can find in it);
- by default 5 turns of 3 actions (the paper: 3 of 3) and, on the lake, fixed corners for start and
  goal (the paper: anywhere; see random_corners);
- Sokoban's rooms are drawn here, not by gym-sokoban; solutions of 1 to 5 moves, as in the paper.
"""

import hashlib
import importlib
import re
import string
import time
from collections import deque
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path

import gymnasium
import numpy as np
from einops import rearrange
from gymnasium.envs.toy_text import frozen_lake
from gymnasium.spaces import Box, Dict, Text
from PIL import Image, ImageDraw

CELL = 28  # px a side: one visual token of Qwen2-VL (2 x 2 patches of 14 px) and of the tiny model
MAX_DRAWS = 1000  # levels drawn in one reset before it gives up
MAX_SEARCH = 100_000  # states the planner looks at before it gives up
SIDES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}  # row, column
REPLY = re.compile(  # a thought may hold any text but a tag; written to take linear time
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>([^<]*)</answer>\s*",
    re.DOTALL | re.ASCII,
)


def parse_reply(reply: str, actions: tuple[str, ...], max_actions: int) -> list[str] | None:
    """The actions of a reply, or None where it breaks the format in any way.

    The whole reply must be one think block and one answer block, with nothing but whitespace around
    and between; the answer holds 1..max_actions known actions (case counts) with commas between.
    An empty think block passes; a tag inside a block does not. TypeError where reply is not a str.
    """
    if not isinstance(reply, str):
        raise TypeError(f"a reply must be a str, not {type(reply).__name__}")
    match = REPLY.fullmatch(reply)
    if match is None:
        return None
    chosen = [action.strip(string.whitespace) for action in match[1].split(",")]
    if len(chosen) > max_actions or any(action not in actions for action in chosen):
        return None
    return chosen


def check_option(name: str, value, low, high):
    """ValueError unless low <= value <= high and value is of low's kind (bool, int or float)."""
    kind = {bool: bool, int: Integral, float: Real}[type(low)]
    fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(low, bool)
    if not fits or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be of type {type(low).__name__}, {low} to {high}")


class TurnEnv(gymnasium.Env):
    """A world played in text replies over a few turns; all chance comes from self.np_random.

    split: "train" or "eval". max_turns, max_actions: turns an episode, actions a turn.
    image_size: side of the frame in px (None: `side`). text_state: the observed text also draws the
    state, for models without eyes. format_reward: paid for each valid reply.

    A world adds its own `options`, and sets:
    actions, rules, example   words for the prompt: what can be done, how to win, an answer
    _new_level() -> str|None  a level drawn from np_random, rows of glyphs; None: nothing came of it
    _load(level)              set `_state` to the start of the level; ValueError: not a level
    _lasting(level) -> str    what decides the split: at most what no action can change
    _act(action)              execute it -> (reward, terminated)
    _next(state, action)      where it leads, chance left out: the planner's model. States hash.
    _result(state)            True: solved, False: lost, None: the episode goes on
    _think() -> str           what the expert says that it sees now: true, in lower-case words
    _grid(), _tiles()         [rows, columns] int kinds; uint8 [kinds, CELL, CELL, 3], their looks
    glyphs, symbols           a character for each kind, and their meaning for the prompt
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    options = {  # name: (default, lowest, highest)
        "max_turns": (5, 1, 100),
        "max_actions": (3, 1, 100),
        "image_size": (None, 16, 2048),
        "text_state": (False, False, True),
        "format_reward": (0.5, 0.0, 10.0),
    }

    def __init__(self, *, split="train", render_mode=None, **options):
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r} must be 'train' or 'eval'")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r} must be None or 'rgb_array'")
        for name in options:
            if name not in self.options:
                known = ", ".join(["split", "render_mode", *self.options])
                raise ValueError(f"{type(self).__name__} has no option {name!r}; it has {known}")
        for name, (default, low, high) in self.options.items():
            value = options.get(name, default)
            if value is not default:
                check_option(name, value, low, high)
            setattr(self, name, value)
        self.split, self.render_mode = split, render_mode
        side = self.image_size or self.side
        self.observation_space = Dict(
            image=Box(0, 255, (side, side, 3), np.uint8),
            text=Text(1000, min_length=0, charset=string.printable),
        )
        self.action_space = Text(1000, min_length=0, charset=string.printable)
        self._state, self._over = None, True  # no level yet

    @property
    def side(self) -> int:
        """Side of the frame in px where image_size does not set it."""
        return self.size * CELL

    # The protocol

    @property
    def system_prompt(self) -> str:
        """The rules and the reply format, the same for every model: each word costs tokens."""
        symbols = f" {self.symbols}" if self.text_state else ""
        return (f"{self.rules}{symbols} Actions: {', '.join(self.actions)}. "
                f"Up to {self.max_actions} actions a reply, {self.max_turns} replies. Reply: "
                f"<think>...</think><answer>{', '.join(self.example[:self.max_actions])}</answer>")

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start a new level of the split, or the one in options={"level": rows of glyphs}.

        -> observation, {"success": False, "split": "train", "eval" or "given", "level": str}.
        RuntimeError where MAX_DRAWS draws bring no solvable level of the split.
        """
        super().reset(seed=seed)
        self._over = True  # should there be no level
        given = (options or {}).get("level")
        level = self._draw_level() if given is None else str(given).strip("\n")
        self._load(level)
        self._turn, self._moves, self._over = 0, 0, False
        split = self.split if given is None else "given"
        return self._observe(""), {"success": False, "split": split, "level": level}

    def _draw_level(self) -> str:
        for _ in range(MAX_DRAWS):
            level = self._new_level()
            if level is not None and self._split_of(level) == self.split:
                self._load(level)
                if self._plan(self._state):  # solvable, and not yet solved
                    return level
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.options)
        raise RuntimeError(
            f"no {self.split} level in {MAX_DRAWS} draws of {type(self).__name__}({options})"
        )

    def _split_of(self, level: str) -> str:
        """A hash of what lasts in the level makes a quarter of all worlds evaluation worlds.

        Not crc32: its low bits are parities of the cells, so a split by them is a linear rule.
        """
        digest = hashlib.sha256(self._lasting(level).encode()).digest()
        return "eval" if digest[0] % 4 == 0 else "train"

    def step(self, reply: str):
        """Play one turn -> observation, reward, terminated, truncated, info.

        info: success, valid (the reply kept the format), actions (those executed), format_reward
        (its part of the reward), turn (turns used), moves (actions executed in the episode).
        An invalid reply moves nothing, earns nothing and spends the turn.
        """
        self._check_running()
        chosen = parse_reply(reply, self.actions, self.max_actions)
        bonus = 0.0 if chosen is None else self.format_reward
        reward, terminated, done = bonus, False, []
        for action in chosen or []:
            gain, terminated = self._act(action)
            reward += gain
            done.append(action)
            if terminated:
                break
        self._turn += 1
        self._moves += len(done)
        truncated = not terminated and self._turn >= self.max_turns
        self._over = terminated or truncated
        info = {"success": self._result(self._state) is True, "valid": chosen is not None,
                "actions": done, "format_reward": bonus, "turn": self._turn, "moves": self._moves}
        notice = "Invalid reply. " if chosen is None else ""
        return self._observe(notice), float(reward), terminated, truncated, info

    def _check_running(self):
        if self._over:
            raise RuntimeError("the episode is over or has not begun; call reset() first")

    def _observe(self, notice: str) -> dict:
        text = f"{notice}Turn {self._turn + 1}."
        if self.text_state:
            text += "".join("\n" + " ".join(self.glyphs[k] for k in row) for row in self._grid())
        return {"image": self._frame(), "text": text}

    def _frame(self) -> np.ndarray:
        """uint8 [H, W, 3]: CELL px for each cell, or image_size px in all."""
        tiles = self._tiles()[self._grid()]  # [rows, columns, CELL, CELL, 3]
        frame = rearrange(tiles, "row col y x rgb -> (row y) (col x) rgb")
        if self.image_size is None:
            return frame
        size = (self.image_size, self.image_size)
        return np.array(Image.fromarray(frame).resize(size, Image.Resampling.BOX))

    def render(self) -> np.ndarray | None:
        """The frame that the model sees."""
        return self._frame() if self.render_mode == "rgb_array" else None

    # The scripted expert

    def expert_plan(self) -> list[str]:
        """The shortest way from here to success; [] where none leads there or none is needed."""
        if self._state is None:
            raise RuntimeError("there is no level to plan on yet; call reset() first")
        return self._plan(self._state)

    def _plan(self, start) -> list[str]:
        """Breadth-first search over `_next`; gives up after MAX_SEARCH states."""
        came_from, queue = {start: None}, deque([start])
        while queue and len(came_from) < MAX_SEARCH:
            state = queue.popleft()
            result = self._result(state)
            if result is True:
                plan = []
                while came_from[state] is not None:
                    state, action = came_from[state]
                    plan.append(action)
                return plan[::-1]
            for action in self.actions if result is None else ():
                after = self._next(state, action)
                if after not in came_from:
                    came_from[after] = (state, action)
                    queue.append(after)
        return []

    def _next_steps(self) -> list[str]:
        """For a thought: "go" and what the plan does in this turn."""
        steps = self._plan(self._state)[: self.max_actions]
        return ["go", *(action.lower() for action in steps)]

    def expert_reply(self, noise: float = 0.0) -> str:
        """A valid reply for the state as it is: what is seen, then the next actions of the plan.

        The number of actions is uniform in 1..max_actions, leaving out numbers too low to bring the
        plan to its end in the turns left. Each action is with probability `noise` a random one, and
        the next is planned from where that leads. Random actions where there is no plan.
        """
        self._check_running()
        check_option("noise", noise, 0.0, 1.0)
        rng, state, chosen = self.np_random, self._state, []
        plan = self._plan(state)
        fewest = min(max(-(-len(plan) // (self.max_turns - self._turn)), 1), self.max_actions)
        for _ in range(rng.integers(fewest, self.max_actions + 1)):
            if plan and rng.random() >= noise:
                chosen.append(plan.pop(0))
                state = self._next(state, chosen[-1])
            else:
                chosen.append(self.actions[rng.integers(len(self.actions))])
                state = self._next(state, chosen[-1])
                plan = self._plan(state)
            if self._result(state) is not None:
                break
        return f"<think>{self._think()}</think><answer>{', '.join(chosen)}</answer>"


def read_grid(level: str, glyphs: str, size: int) -> np.ndarray:
    """A level in rows of glyphs -> [size, size] int places in `glyphs`; ValueError if it is not."""
    rows = level.split("\n")
    if len(rows) != size or any(len(row) != size for row in rows):
        raise ValueError(f"a level of this environment has {size} rows of {size}, not {rows}")
    if set(level) - set(glyphs + "\n"):
        raise ValueError(f"a level is written in {glyphs!r}, not {rows}")
    return np.array([[glyphs.index(glyph) for glyph in row] for row in rows])


def compass(start: int, end: int, size: int) -> list[str]:
    """The directions in which a cell lies from another: ["up", "left"]; [] for the same cell."""
    down, right = (b - a for a, b in zip(divmod(start, size), divmod(end, size)))
    vertical = ["up"] * (down < 0) + ["down"] * (down > 0)
    return vertical + ["left"] * (right < 0) + ["right"] * (right > 0)


class FrozenLake(TurnEnv):
    """Walk over the ice to the flag; a hole ends the walk. The moves are Gymnasium's FrozenLake's.

    size: cells a side. slippery: a step goes where it aims with probability success_rate, else
    to its left or right (Gymnasium's default is 1/3: even the best play then rarely arrives).
    random_corners: start and goal anywhere at least 3 steps apart, not top left and bottom right.
    frozen_probability: of each other cell; the rest are holes. Reward: 10 at the goal (the papers'
    1 + 9), 0 in a hole, no cost of a step. State: the cell's number, row * size + column.
    The expert plans as if no step slipped.
    """

    actions = ("Left", "Down", "Right", "Up")  # Gymnasium's 0..3
    example = ("Right", "Down")
    letters = "SFHG"  # start, frozen, hole, goal
    glyphs = "SFHGPPX*"  # the same, then with the elf in the cell
    symbols = "P elf, S start, F ice, H hole, G flag."

    options = TurnEnv.options | {
        "size": (4, 4, 8),
        "slippery": (False, False, True),
        "success_rate": (1 / 3, 0.0, 1.0),
        "random_corners": (False, False, True),
        "frozen_probability": (0.8, 0.0, 1.0),
    }

    @property
    def rules(self):
        slips = " The ice is slippery: a step may go sideways." if self.slippery else ""
        return f"Walk the elf over the ice to the flag. A hole ends the walk.{slips}"

    def _new_level(self):
        size, rng = self.size, self.np_random
        cells = np.where(rng.random(size * size) < self.frozen_probability, "F", "H")
        start, goal = 0, size * size - 1
        if self.random_corners:
            start, goal = rng.choice(size * size, 2, replace=False)
            if abs(start // size - goal // size) + abs(start % size - goal % size) < 3:
                return None
        cells[start], cells[goal] = "S", "G"
        return "\n".join("".join(row) for row in rearrange(cells, "(r c) -> r c", r=size))

    def _lasting(self, level):
        return level.replace("S", "F")  # holes and goal; a walk may pass where another one starts

    def _load(self, level):
        grid = read_grid(level, self.letters, self.size)
        if level.count("S") != 1 or level.count("G") != 1:
            raise ValueError(f"a lake has one S and one G, unlike {level!r}")
        self._lake = frozen_lake.FrozenLakeEnv(
            desc=level.split("\n"), is_slippery=self.slippery, success_rate=self.success_rate
        )
        self._lake.np_random = self.np_random
        self._ground, self._state = grid, self._lake.reset()[0]

    def _act(self, action):
        self._state, reward, terminated, _, _ = self._lake.step(self.actions.index(action))
        return 10.0 * reward, terminated

    def _next(self, state, action):
        outcomes = self._lake.P[state][self.actions.index(action)]
        return outcomes[len(outcomes) // 2][1]  # where it may slip: three, aimed at the middle one

    def _result(self, state):
        return {"G": True, "H": False}.get(self.letters[self._ground.flat[state]])

    def _think(self):
        """What lies on each side and the next steps of the plan: "up edge down hole left edge right
        ice go right down down"; where the corners are random, first the way to the flag."""
        words = []
        if self.random_corners:
            flag = int(np.flatnonzero(self._ground == self.letters.index("G"))[0])
            words += ["flag", *compass(self._state, flag, self.size)]
        looks = {True: "flag", False: "hole", None: "ice"}
        for side in SIDES:
            there = self._next(self._state, side)
            seen = "edge" if there == self._state else looks[self._result(there)]
            words += [side.lower(), seen]
        return " ".join(words + self._next_steps())

    def _grid(self):
        grid = self._ground.copy()
        grid.flat[self._state] += len(self.letters)
        return grid

    @staticmethod
    @lru_cache
    def _tiles():
        """Gymnasium's own pictures, cut out and put together without pygame; the hole deepened."""
        folder = Path(frozen_lake.__file__).parent / "img"

        def picture(name, width, height):
            image = Image.open(folder / f"{name}.png").convert("RGBA")
            return image.crop(image.getbbox()).resize((width, height), Image.Resampling.LANCZOS)

        ice, hole = picture("tile_ice", CELL, CELL), picture("tile_hole", CELL, CELL)
        hole = Image.eval(hole, lambda level: max(0, 2 * level - 255))
        letter, flag = (picture("letter_s", 6, 10), 20, 16), (picture("goal_flag", 22, 24), 4, 3)
        elf = (picture("elf_down", 19, 24), 4, 2)

        def tile(ground, *things):
            image = ground.copy()
            for thing, x, y in things:
                image.alpha_composite(thing, (x, y))
            return np.array(image.convert("RGB"))

        grounds = (ice, letter), (ice,), (hole,), (ice, flag)
        return np.stack([tile(*g) for g in grounds] + [tile(*g, elf) for g in grounds])


class Sokoban(TurnEnv):
    """Push every box onto a target; one box at a time, no pulling.

    size: cells a side, outer walls included. boxes: their number. min_moves, max_moves: the length
    of the shortest solution is drawn from this range. Reward: -0.1 an action, 1 for a box onto a
    target, -1 for a box off it, 10 when solved (the papers'). A box that is stuck for good does not
    end the episode. State: (player, boxes); cells are numbered row * size + column, boxes sorted.
    Differs from the paper: rooms and lengths are drawn here, not by gym-sokoban (1..5 moves).
    """

    actions = ("Up", "Down", "Left", "Right")
    example = ("Up", "Right")
    glyphs = "#-.$*@+"  # the usual Sokoban letters
    symbols = "# wall, - floor, . target, $ box, * box on target, @ you, + you on target."

    options = TurnEnv.options | {
        "size": (6, 5, 10),
        "boxes": (1, 1, 4),
        "min_moves": (1, 1, 40),
        "max_moves": (5, 1, 40),
    }

    def __init__(self, **options):
        super().__init__(**options)
        check_option("max_moves", self.max_moves, self.min_moves, 40)
        self._steps = {name: row * self.size + col for name, (row, col) in SIDES.items()}

    @property
    def rules(self):
        each = "the brown box onto the red" if self.boxes == 1 else "each brown box onto a red"
        return f"You are blue. Push {each} target. You cannot pull."

    def _new_level(self):
        """Carve a room, place targets, play in reverse from the solved states, pick one state."""
        self._floor = self._carve()
        if len(self._floor) <= self.boxes:
            return None
        targets = self.np_random.choice(sorted(self._floor), self.boxes, replace=False)
        self._targets = tuple(sorted(map(int, targets)))
        states = self._states_at(self.np_random.integers(self.min_moves, self.max_moves + 1))
        if not states:
            return None
        self._state = states[self.np_random.integers(len(states))]
        return "\n".join("".join(self.glyphs[kind] for kind in row) for row in self._grid())

    def _carve(self):
        """The cells that a random walk frees in solid rock: half to all of the inside."""
        inside, rng = self.size - 2, self.np_random
        wanted = rng.integers(inside**2 // 2, inside**2 + 1)
        row, col = rng.integers(inside, size=2)
        freed = set()
        for y, x in np.array(list(SIDES.values()))[rng.integers(4, size=8 * inside**2)]:
            freed.add(int(row + 1) * self.size + int(col + 1))
            if len(freed) >= wanted:
                break
            row, col = min(max(row + y, 0), inside - 1), min(max(col + x, 0), inside - 1)
        return frozenset(freed)

    def _states_at(self, moves):
        """All states with a shortest solution of `moves` moves, searched back from the solved."""
        ring = [(player, self._targets) for player in sorted(self._floor.difference(self._targets))]
        seen = set(ring)
        for _ in range(moves):
            if len(seen) > MAX_SEARCH:
                return []
            last, ring = ring, []
            for player, boxes in last:
                for step in self._steps.values():  # the step that led from `back` to `player`
                    back, pushed = player - step, player + step
                    if back not in self._floor or back in boxes:
                        continue
                    pulled = tuple(sorted(player if box == pushed else box for box in boxes))
                    for state in ((back, boxes), (back, pulled)):  # one and the same without a box
                        if state not in seen:
                            seen.add(state)
                            ring.append(state)
        return ring

    def _lasting(self, level):
        return level.translate(str.maketrans("$*@+", "-.-."))  # walls and targets

    def _load(self, level):
        grid = read_grid(level, self.glyphs, self.size)
        if grid[[0, -1]].any() or grid[:, [0, -1]].any():
            raise ValueError(f"a level has walls all around, unlike {level!r}")

        def cells(glyphs):
            kinds = [self.glyphs.index(glyph) for glyph in glyphs]
            return tuple(np.flatnonzero(np.isin(grid, kinds)).tolist())

        players, boxes, targets = cells("@+"), cells("$*"), cells(".*+")
        if len(players) != 1 or len(boxes) != len(targets) or boxes == targets:
            raise ValueError(f"one player, as many boxes as targets, not solved: unlike {level!r}")
        self._floor, self._targets = frozenset(cells("-.$*@+")), targets
        self._state = (players[0], boxes)

    def _act(self, action):
        before = len(set(self._state[1]).intersection(self._targets))
        self._state = self._next(self._state, action)
        after = len(set(self._state[1]).intersection(self._targets))
        solved = self._result(self._state) is True
        return -0.1 + (after - before) + 10.0 * solved, solved

    def _next(self, state, action):
        player, boxes = state
        step = self._steps[action]
        ahead, beyond = player + step, player + 2 * step
        if ahead in boxes:
            if beyond not in self._floor or beyond in boxes:
                return state
            boxes = tuple(sorted(beyond if box == ahead else box for box in boxes))
        return (ahead, boxes) if ahead in self._floor else state

    def _result(self, state):
        return True if state[1] == self._targets else None

    def _think(self):
        """Row and column of the player, of the nearest open box and of the nearest open target from
        there, the ways from each to the next, and the next steps of the plan:
        "you 2 3 box 3 3 target 4 2 box down target down left go right down left"."""
        player, boxes = self._state
        here, words, ways = player, ["you", *divmod(player, self.size)], []
        for name, cells in (("box", set(boxes).difference(self._targets)),
                            ("target", set(self._targets).difference(boxes))):
            there = min(sorted(cells), key=lambda cell: self._distance(here, cell), default=here)
            words += [name, *divmod(there, self.size)]
            ways += [name, *compass(here, there, self.size)]
            here = there
        return " ".join(map(str, words + ways + self._next_steps()))

    def _distance(self, start, end):
        return sum(abs(a - b) for a, b in zip(divmod(start, self.size), divmod(end, self.size)))

    def _grid(self):
        player, boxes = self._state
        grid = np.zeros(self.size**2, dtype=np.int64)
        grid[list(self._floor)] = 1
        grid[list(self._targets)] = 2
        grid[list(boxes)] += 2
        grid[player] += 4
        return rearrange(grid, "(row col) -> row col", row=self.size)

    @staticmethod
    @lru_cache
    def _tiles():
        def tile(*shapes):
            image = Image.new("RGB", (CELL, CELL), "#e8dcc4")
            ImageDraw.Draw(image).rectangle((0, 0, 27, 27), None, "#dccfb3")
            for kind, corners, *colours in shapes:
                getattr(ImageDraw.Draw(image), kind)(corners, *colours)
            return np.array(image)

        bricks = [("rectangle", (x, y, x + 12, y + 5), "#4a5163")
                  for x, y in ((0, 0), (14, 0), (-7, 7), (7, 7), (21, 7),
                               (0, 14), (14, 14), (-7, 21), (7, 21), (21, 21))]
        wall = [("rectangle", (0, 0, 27, 27), "#2b303c"), *bricks]
        ring = [("ellipse", (4, 4, 23, 23), "#d7263d"), ("ellipse", (9, 9, 18, 18), "#e8dcc4")]
        cross = [("line", (6, 6, 21, 21)), ("line", (6, 21, 21, 6))]
        box, stored = (
            [("rectangle", (4, 4, 23, 23), fill, edge, 2)] + [(*line, edge, 2) for line in cross]
            for fill, edge in (("#c98a3d", "#7a4c17"), ("#3faa54", "#1c6b2d"))
        )
        player = [("ellipse", (7, 11, 20, 26), "#1769c2"),
                  ("ellipse", (8, 2, 19, 13), "#f2c9a1", "#5a3b22"),
                  ("rectangle", (11, 7, 12, 8), "#20140c"),
                  ("rectangle", (15, 7, 16, 8), "#20140c")]
        return np.stack([tile(*wall), tile(), tile(*ring), tile(*box), tile(*ring, *stored),
                         tile(*player), tile(*ring, *player)])


WORLDS = {"FrozenLake": FrozenLake, "Sokoban": Sokoban}
OPEN_WORLDS = {  # name: the file it is in, imported when asked for: it needs another package
    "Crafter": "openworld", "CraftingGrid": "openworld", "Plancraft": "plancraft_gui",
    "Navigation": "navigation", "Thor": "navigation", "PrimitiveSkill": "skills",
    "ManiSkill": "skills", "ViRL": "virl",
}


def env_class(name: str) -> type:
    """The class of that name. ValueError names what exists."""
    if name in OPEN_WORLDS:
        return getattr(importlib.import_module(OPEN_WORLDS[name]), name)
    if name not in WORLDS:
        raise ValueError(f"no environment {name!r}; there are {', '.join((*WORLDS, *OPEN_WORLDS))}")
    return WORLDS[name]


def make_env(name: str, **options) -> TurnEnv:
    """The environment of that name; its class tells the options. ValueError names what exists."""
    return env_class(name)(**options)


def play(env: TurnEnv, seed: int, noise: float) -> dict:
    """One episode of the expert (noise 1: of random valid replies) -> the last turn's info."""
    env.reset(seed=seed)
    while True:
        _, _, terminated, truncated, info = env.step(env.expert_reply(noise))
        if terminated or truncated:
            return info


def main():
    """Print what the expert and random valid replies reach on 100 evaluation levels."""
    print("success of: expert  random | shortest plan: mean  max | episodes/s")
    for name, options in (
        ("FrozenLake", {}),
        ("FrozenLake", {"random_corners": True}),
        ("FrozenLake", {"slippery": True}),
        ("FrozenLake", {"slippery": True, "success_rate": 0.8}),
        ("FrozenLake", {"size": 8}),
        ("Sokoban", {}),
        ("Sokoban", {"min_moves": 2, "max_turns": 3}),
        ("Sokoban", {"size": 7, "boxes": 2, "max_moves": 15}),
    ):
        env = make_env(name, split="eval", **options)
        plans = [len(env.expert_plan()) for seed in range(100) if env.reset(seed=seed)]
        began = time.perf_counter()
        expert = np.mean([play(env, seed, 0.0)["success"] for seed in range(100)])
        chance = np.mean([play(env, seed, 1.0)["success"] for seed in range(100)])
        speed = 200 / (time.perf_counter() - began)
        print(f"{expert:18.2f} {chance:7.2f} {np.mean(plans):21.1f} {max(plans):4d}"
              f" {speed:12.0f}   {name} {options}")


if __name__ == "__main__":
    main()
