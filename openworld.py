"""Two open worlds played by text: long horizons, and success that a counter proves.

`Crafter` (the package of that name) is the embodied one: a map of which the frame shows 9 x 7 tiles
and the inventory. `CraftingGrid` is a crafting window with a cursor, drawn in the same cells,
because Crafter crafts in one action. A step is a reply: by default one bare action word ("up"), as
episodes have a hundred of them. The observation is the frame as it is now and the instruction:
nothing in it grows with the episode. TASKS says what there is to do; a task is done when the
counter of its event rises. Reward: 1 in the step that does it, else 0. Death ends the episode.
`python openworld.py` prints what random actions and the scripted expert reach in each task.

Chance: the map and the start depend on split, seed and task (and on the options), and on nothing
else; so does every later draw of the world. The members of a group, which reset with one seed or
are clones, therefore start identical and differ by what they do alone. How often or in which size
they are looked at changes nothing.
"""

import copy
import pickle
import string
import time
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Annotated

import gymnasium
import numpy as np
import tyro

import sims
from envs import TurnEnv, check_option, parse_reply
from sims import BAG, CRAFT, HERE, HIGH, OUT, ROWS, SIDES, TOP, WIDE, draw, flood

KEEP_ON = 0.93  # with which probability the exploring expert keeps its heading


# --------------------------------------------------------------------------------------- the tasks


@dataclass(frozen=True)
class Task:
    """What to do: `event` must rise. The rest says how the episode starts.

    kind: the paper's class. says: the instruction, then paraphrases. seen: reinforcement learning
    trains on it. target: what the diagnostics look for ("": nothing), `distance` (lowest, highest)
    steps from the start; it is put there if it is in `summon`, else the start is chosen so.
    """

    name: str
    kind: str  # embodied, craft, combat: Crafter; gui: CraftingGrid
    event: str
    seen: bool
    says: tuple[str, ...]
    target: str = ""
    distance: tuple[int, int] = (3, 10)
    inventory: dict[str, int] = field(default_factory=dict)
    summon: tuple[str, ...] = ()
    night: bool = False


def _crafter_tasks():  # two of each kind are seen: more would share out what one laptop can play
    wood, pick, sword = {"wood": 3}, {"wood_pickaxe": 1}, {"wood_sword": 1}
    near, bench = (2, 4), ("table",)
    yield Task("collect_wood", "embodied", "collect_wood", True,
               ("Collect wood.", "Chop a tree.", "Get some wood."), "tree")
    yield Task("collect_drink", "embodied", "collect_drink", False,
               ("Drink water.", "Find water and drink.", "Quench your thirst."), "water")
    yield Task("collect_sapling", "embodied", "collect_sapling", False,
               ("Collect a sapling.", "Search the grass for a sapling.", "Get a sapling."),
               "grass", (1, 3))
    yield Task("collect_stone", "embodied", "collect_stone", True,
               ("Collect stone.", "Mine a stone.", "Get some stone."), "stone", inventory=pick)
    yield Task("collect_coal", "embodied", "collect_coal", False,
               ("Collect coal.", "Mine coal.", "Get some coal."), "coal", inventory=pick)
    yield Task("collect_iron", "embodied", "collect_iron", False,
               ("Collect iron.", "Mine iron.", "Get some iron."), "iron",
               inventory={"stone_pickaxe": 1, "wood_pickaxe": 1})
    yield Task("eat_plant", "embodied", "eat_plant", False,
               ("Eat the ripe plant.", "Find the ripe plant and eat it.", "Have a ripe fruit."),
               "plant-ripe", (3, 5), summon=("plant-ripe",))
    yield Task("place_table", "craft", "place_table", False,
               ("Place a table.", "Collect wood and build a table.", "Set up a workbench."), "tree")
    yield Task("make_wood_pickaxe", "craft", "make_wood_pickaxe", False,
               ("Make a wood pickaxe.", "Place a table and make a wooden pickaxe."),
               inventory=wood)
    yield Task("make_wood_sword", "craft", "make_wood_sword", False,
               ("Make a wood sword.", "Place a table and make a wooden sword."), inventory=wood)
    yield Task("make_stone_pickaxe", "craft", "make_stone_pickaxe", True,
               ("Make a stone pickaxe.", "Make a stone pickaxe at the table."),
               "table", (2, 5), {"wood": 1, "stone": 1}, bench)
    yield Task("make_stone_sword", "craft", "make_stone_sword", False,
               ("Make a stone sword.", "Make a stone sword at the table."),
               "table", (2, 5), {"wood": 1, "stone": 1}, bench)
    yield Task("make_iron_pickaxe", "craft", "make_iron_pickaxe", False,
               ("Make an iron pickaxe.", "Make an iron pickaxe at table and furnace."),
               "table", (2, 5), {"wood": 1, "coal": 1, "iron": 1}, ("table", "furnace"))
    yield Task("place_furnace", "craft", "place_furnace", True,
               ("Place a furnace.", "Collect stone and build a furnace."),
               "stone", (2, 6), {"stone": 3, "wood_pickaxe": 1})
    yield Task("eat_cow", "combat", "eat_cow", True,
               ("Eat a cow.", "Hunt a cow and eat it.", "Get meat from a cow."),
               "cow", near, summon=("cow",))
    yield Task("defeat_zombie", "combat", "defeat_zombie", True,
               ("Defeat a zombie.", "Fight the zombie.", "Kill the zombie."),
               "zombie", near, sword, ("zombie",))
    yield Task("defeat_zombie_unarmed", "combat", "defeat_zombie", False,
               ("Defeat a zombie without a sword.", "Fight the zombie with your hands."),
               "zombie", near, {}, ("zombie",))
    yield Task("defeat_zombie_night", "combat", "defeat_zombie", False,
               ("Defeat a zombie by night.", "Fight the zombie in the dark."),
               "zombie", near, sword, ("zombie",), night=True)
    yield Task("defeat_skeleton", "combat", "defeat_skeleton", False,
               ("Defeat a skeleton.", "Fight the skeleton.", "Kill the skeleton."),
               "skeleton", near, {"stone_sword": 1}, ("skeleton",))


UNSEEN_RECIPES = ("stone_sword", "iron_pickaxe", "furnace")  # shape and material are seen, not both


def _grid_tasks():
    for item in sims.RECIPES:
        words = item.replace("_", " ")
        says = (f"Craft: {words}.", f"Put together one {words}.")
        yield Task(f"craft_{item}", "gui", f"craft_{item}", item not in UNSEEN_RECIPES, says,
                   target=item)


TASKS = {task.name: task for make in (_crafter_tasks, _grid_tasks) for task in make()}


# -------------------------------------------------------------------------------------- the basics


def descend(at: tuple, steps: dict, first: str = "") -> list[str]:
    """The moves from a flooded cell until the next one would enter a source; `first` wins ties."""
    moves = []
    while steps[at] > 1:
        side = min((side for side, (dx, dy) in SIDES.items()
                    if steps.get((at[0] + dx, at[1] + dy), 9999) == steps[at] - 1),
                   key=lambda side: side != first)
        at = (at[0] + SIDES[side][0], at[1] + SIDES[side][1])
        moves.append(first := side)
    return moves


def is_eval(*parts) -> bool:
    """A quarter of all worlds are evaluation worlds, by a hash as in envs.py."""
    return draw("split", *parts) % 4 == 0


class OpenWorld(TurnEnv):
    """What both worlds share: tasks, bare replies, horizon, counters. Chance: see the module.

    tasks: "seen", "unseen", "all", a kind or a name: which tasks a reset draws from, by the seed.
    horizon: actions an episode; an invalid reply counts as one, in which the world goes on.
    chunk: actions a reply, with commas between. think: the reply has the format of envs.py, think
    and answer; else it is the bare actions. image_size: side of the frame in px, best a multiple of
    9. paraphrase: the instruction is drawn from all that the task has, else it is the first.
    brief: leave rules and the list of actions out of the system prompt, for a model that has them
    from its demonstrations. marks: each cell of the frame carries its column and row in its upper
    edge, for a model without positions of its own (Qwen2-VL has relative ones alone).

    A world sets kinds (of its tasks), actions, rules, example, things (the words of its thoughts),
    `_wait` (what an invalid reply does)
    _start(task, seed)   build the start in `_state`
    _act(action)         execute it
    _count()             of the task's event, since the world began
    _dead()              True where the player has died
    _target()            (is it in view, steps to the nearest in view or None)
    _position()          (x, y) of the player or the cursor
    _think()             what the expert says it sees, true words without tags
    _plan(state)         what the expert would do, as far as it can tell; at least one action
    _frame()             uint8 [side, side, 3]
    """

    options = {
        "horizon": (100, 1, 10_000),
        "chunk": (1, 1, 100),
        "think": (False, False, True),
        "image_size": (None, 45, 2048),
        "paraphrase": (False, False, True),
        "brief": (False, False, True),
        "marks": (False, False, True),
    }
    side = ROWS * 28  # one visual token a cell

    def __init__(self, *, tasks: str = "seen", **options):
        super().__init__(**options)
        mine = [task for task in TASKS.values() if task.kind in self.kinds]
        chosen = [t for t in mine
                  if tasks in ("all", "seen" if t.seen else "unseen", t.kind, t.name)]
        if not chosen:
            known = ", ".join(["seen", "unseen", "all", *self.kinds, *(t.name for t in mine)])
            raise ValueError(f"tasks={tasks!r} is not in {type(self).__name__}; it has {known}")
        self.tasks = tuple(task.name for task in chosen)
        self._unit = (self.image_size or self.side) // ROWS

    @property
    def system_prompt(self) -> str:
        """The rules and the reply format, the same for every task."""
        upto = "One action" if self.chunk == 1 else f"Up to {self.chunk} actions"
        words = ", ".join(self.example[: self.chunk])
        reply = f"<think>...</think><answer>{words}</answer>" if self.think else words
        if self.brief:
            return f"Reply: {reply}"
        return (f"{self.rules} Actions: {', '.join(self.actions)}. "
                f"{upto} a reply. Reply: {reply}")

    @property
    def texts(self) -> list[str]:
        """All that the world says and wants to hear: the vocabulary of a model made for it."""
        says = [line for t in TASKS.values() if t.kind in self.kinds for line in t.says]
        seen = " ".join(["no", *map(str, range(1, 10)), *SIDES, *self.things])
        return [self.system_prompt, *NOTICES, *says, ", ".join(self.actions), seen]

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode -> observation, info as of `step`.

        options: "task", its name (default: drawn from the seed); "member": a number that changes
        the expert's chance and nothing else, so that members of a group can be demonstrated.
        """
        gymnasium.Env.reset(self, seed=seed)
        self._over = True  # should there be no start
        options = dict(options or {})
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        name = options.pop("task", None) or self.tasks[draw("task", seed) % len(self.tasks)]
        member = options.pop("member", 0)
        if options:
            raise ValueError(f"reset has no option {', '.join(options)}; it has task, member")
        if name not in TASKS or TASKS[name].kind not in self.kinds:
            known = ", ".join(t.name for t in TASKS.values() if t.kind in self.kinds)
            raise ValueError(f"no task {name!r} in {type(self).__name__}; it has {known}")
        check_option("member", member, 0, 2**31)
        self.task, self._seed = TASKS[name], seed
        says = self.task.says
        self.instruction = says[draw("says", seed) % len(says) if self.paraphrase else 0]
        self._dice = np.random.default_rng(draw(self.split, seed, name, int(member), "dice"))
        self._start(self.task, seed)
        self._turn, self._moves, self._over = 0, 0, False
        self._base = self._count()
        return self._observe(""), self._info(True, [])

    def step(self, reply: str):
        """Play one reply -> observation, reward, terminated, truncated, info.

        info: task, success, dead, valid (the reply kept the format), actions (those executed),
        count (the event's, since the start), turn (replies), moves (actions, also waited ones),
        target_visible, target_distance (steps to the nearest target in view, or None), position.
        An invalid reply executes nothing and takes one move of time.
        """
        self._check_running()
        chosen, notice = self._read(reply)
        done = []
        for action in chosen or [self._wait]:
            self._act(action)
            self._moves += 1
            done.append(action)
            success = self._count() > self._base
            terminated = success or self._dead()
            if terminated or self._moves >= self.horizon:
                break
        self._turn += 1
        truncated = not terminated and self._moves >= self.horizon
        self._over = terminated or truncated
        info = self._info(chosen is not None, done if chosen else [])
        return self._observe(notice), float(success), terminated, truncated, info

    def _read(self, reply):
        """The actions of a reply and ""; or None and what is wrong with it, one of NOTICES."""
        if self.think:
            chosen = parse_reply(reply, self.actions, self.chunk)
            return chosen, "" if chosen else NOTICES[0]
        if not isinstance(reply, str):
            raise TypeError(f"a reply must be a str, not {type(reply).__name__}")
        chosen = [action.strip(string.whitespace) for action in reply.split(",")]
        if any(action not in self.actions for action in chosen):
            return None, NOTICES[1]
        return (chosen, "") if len(chosen) <= self.chunk else (None, NOTICES[2])

    def _observe(self, notice):
        frame = self._frame()
        if self.marks:
            frame = sims.marked(frame, self._unit)
        return {"image": frame, "text": f"{notice}{self.instruction}"}

    def _info(self, valid, done):
        visible, distance = self._target()
        risen = self._count() - self._base
        return {"task": self.task.name, "success": risen > 0, "dead": self._dead(), "valid": valid,
                "actions": done, "count": risen, "turn": self._turn, "moves": self._moves,
                "target_visible": visible, "target_distance": distance,
                "position": self._position()}

    def clone(self):
        """An independent copy, in the middle of an episode or not; it will draw the same chance."""
        return copy.deepcopy(self)

    def expert_reply(self, noise: float = 0.0) -> str:
        """What the scripted expert does next, seeing no more than the frame shows.

        The first `chunk` actions of its plan; each is with probability `noise` a random one, which
        ends the reply, for what then follows is not yet to be seen.
        """
        self._check_running()
        check_option("noise", noise, 0.0, 1.0)
        chosen, thought = [], self._think() if self.think else ""
        for action in self._plan(self._state)[: self.chunk]:
            if self._dice.random() < noise:
                chosen.append(self.actions[self._dice.integers(len(self.actions))])
                break
            chosen.append(action)
        words = ", ".join(chosen)
        if not self.think:
            return words
        return f"<think>{thought}</think><answer>{words}</answer>"


NOTICES = ("Invalid reply. ", "Unknown action. ", "Too many actions. ")


# ----------------------------------------------------------------------------------------- Crafter


@lru_cache(maxsize=None)
def world_seed(split: str, index: int) -> int:
    """The seed of a split's index-th map: numbers are dealt to the splits by their hash."""
    seeds = (draw("map", index, k) % 2**32 for k in count())
    return next(seed for seed in seeds if is_eval("map", seed) == (split == "eval"))


class Crafter(OpenWorld):
    """Crafter's world with tasks of three kinds: embodied, craft, combat.

    area: cells a side of a map. worlds: how many maps a split has; a seed picks one of them and its
    start there. A map is made when it is first wanted (.2 s at area 32) and kept in memory.
    Zombies and skeletons are in the world as Crafter has it, but none starts close to the player.
    """

    kinds = ("embodied", "craft", "combat")
    names = {  # our word: Crafter's action; make and place actions need what they use
        "wait": "noop", "left": "move_left", "right": "move_right", "up": "move_up",
        "down": "move_down", "do": "do", "sleep": "sleep", "stone": "place_stone",
        "table": "place_table", "furnace": "place_furnace", "plant": "place_plant",
        "woodpickaxe": "make_wood_pickaxe", "stonepickaxe": "make_stone_pickaxe",
        "ironpickaxe": "make_iron_pickaxe", "woodsword": "make_wood_sword",
        "stonesword": "make_stone_sword", "ironsword": "make_iron_sword",
    }
    actions = tuple(names)
    example = ("up", "do")
    rules = ("You live in a world of tiles. Moving into what blocks only turns you. Do uses, "
             "collects or hits what you face; stone, table, furnace, plant are placed there.")
    _wait = "wait"
    things = (*sims.constants.materials, "void", "zombie", "skeleton", "cow", "arrow", "asleep",
              "ripe")  # words of the expert's thoughts

    options = OpenWorld.options | {"area": (32, 24, 128), "worlds": (64, 1, 100_000)}

    def _start(self, task, seed):
        first = draw(self.split, seed, "world") % self.worlds
        for k in range(self.worlds):
            index = (first + k) % self.worlds
            sim = pickle.loads(sims.generated(self.area, world_seed(self.split, index)))
            rng = np.random.default_rng(draw(self.split, seed, task.name))
            if sim.begin(task, rng):
                break
        else:
            raise RuntimeError(
                f"none of {self.worlds} worlds of area {self.area} can hold {task.name}; "
                "raise worlds or area"
            )
        sim._world.random.seed(draw(self.split, seed, task.name, "dynamics") % 2**32)
        self._state, self._key = sim, draw(self.split, seed, "night")
        self._look()

    def _act(self, action):
        self._state.step(sims.constants.actions.index(self.names[action]))
        self._look()

    def _look(self):
        self._ground, self._things = self._state.look()

    def _count(self):
        return self._state.player.achievements[self.task.event]

    def _dead(self):
        return self._state.player.health <= 0

    def _position(self):
        return tuple(self._state.player.pos.tolist())

    def _target(self):
        cells, free = self._find(self.task.target), self._free()
        if not cells:
            return False, None
        return True, flood(cells, free | {HERE}).get(HERE)

    def teleport_away(self) -> dict | None:
        """Move the player 6 to 10 steps away, to where no target is in view -> what is seen from
        there; None: there is no such place, and nothing has changed."""
        self._check_running()

        def away():
            self._look()
            return not self._find(self.task.target)

        rng = np.random.default_rng(draw(self._key, self._moves, "teleport"))
        moved = self._state.teleport(away, rng)
        self._look()
        return self._observe("") if moved else None

    def _frame(self):
        seen = (self._ground, self._things)
        return self._state.frame(seen, self._unit, self.image_size or self.side, self._key)

    # The scripted expert: reads self._ground, self._things and the inventory, all in the frame

    def _think(self):
        """The tile ahead, the four around (left, right, up, down), what is wanted and where the
        nearest one in view is: "tree grass tree water grass; tree 2 left 1 up"."""
        facing = self._things[HERE[0]][HERE[1]].removeprefix("player-")
        around = {side: self._name(HERE[0] + dx, HERE[1] + dy) for side, (dx, dy) in SIDES.items()}
        ahead = around.get(facing, "asleep")
        verb, what = self._aim(self.task.event)
        wanted = what if isinstance(what, str) else what[0]
        cells = self._find(wanted) if verb in ("do", "near") else []
        steps = flood([HERE], self._free() | {HERE} | set(cells))
        if cells:
            x, y = min(cells, key=lambda at: (steps.get(at, 99), at))
            ways = ((HERE[0] - x, "left"), (x - HERE[0], "right"), (HERE[1] - y, "up"),
                    (y - HERE[1], "down"))
            where = "".join(f" {n} {way}" for n, way in ways if n > 0)
        else:
            where = "" if verb in ("act", "place") else " no"
        words = [ahead, *around.values()]
        return f"{' '.join(words)}; {wanted.replace('-', ' ')}{where}"

    def _name(self, x, y):
        """What shows at a cell of the view, in one word."""
        name = self._things[x][y] or self._ground[x][y] or "void"
        return {"plant-ripe": "ripe"}.get(name, name).split("-")[0]

    def _find(self, name):
        """The cells in view where such a material, free of things, or such a thing shows."""
        layer = self._ground if name in sims.constants.materials else self._things
        return [(x, y) for x in range(WIDE) for y in range(HIGH)
                if layer[x][y] == name and (layer is self._things or not self._things[x][y])]

    def _free(self):
        return {(x, y) for x in range(WIDE) for y in range(HIGH)
                if self._ground[x][y] in sims.constants.walkable and not self._things[x][y]}

    def _plan(self, state):
        facing = self._things[HERE[0]][HERE[1]].removeprefix("player-")
        if facing == "sleep":
            return ["wait"]
        verb, what = self._aim(self.task.event)
        if verb == "act":
            return [what]
        free = self._free()
        if verb == "place":
            return self._place(what, facing, free) or self._explore(facing, free)
        if verb == "near":
            goals = sorted(free.intersection(self._beside(what)))
        else:
            goals = self._find(what)
        steps = flood(goals, free | {HERE})
        if HERE not in steps:
            return self._explore(facing, free)
        moves = descend(HERE, steps, facing)
        x = HERE[0] + sum(SIDES[move][0] for move in moves)
        y = HERE[1] + sum(SIDES[move][1] for move in moves)
        last = moves[-1] if moves else facing
        turn = next(side for side in sorted(SIDES, key=lambda side: side != last)
                    if steps.get((x + SIDES[side][0], y + SIDES[side][1])) == 0)
        if verb == "near":
            return [*moves, turn]
        if turn != last and (x + SIDES[turn][0], y + SIDES[turn][1]) in free:
            # What can be walked on cannot be turned to: that steps onto it, and may do so for ever.
            return [*moves, turn] if self._dice.random() < 0.5 else self._explore(facing, free)
        return [*moves, *([turn] if turn != last else []), "do"]

    def _aim(self, event):
        """The next thing to do for an event: ("act", word), ("place", thing), ("near", utilities)
        or ("do", what): walk there and use it. Missing ingredients come first."""
        bag = self._state.player.inventory
        verb, thing = event.split("_", 1)
        if verb in ("eat", "defeat"):
            return "do", {"plant": "plant-ripe"}.get(thing, thing)
        if verb == "collect":
            rules = sims.constants.collect
            material = next(name for name in rules if thing in rules[name]["receive"])
            for tool in rules[material]["require"]:
                if not bag[tool]:
                    return self._aim(f"make_{tool}")
            return "do", material
        rule = (sims.constants.place if verb == "place" else sims.constants.make)[thing]
        for item, amount in rule["uses"].items():
            if bag[item] < amount:
                return self._aim(f"collect_{item}")
        if verb == "place":
            return "place", thing
        if HERE in self._beside(rule["nearby"]):
            return "act", next(word for word, name in self.names.items() if name == event)
        for utility in rule["nearby"]:
            if not self._find(utility):
                return self._aim(f"place_{utility}")
        return "near", rule["nearby"]

    def _beside(self, utilities):
        """The cells whose 3 x 3 surroundings hold all the utilities."""
        around = [{(x + dx, y + dy) for x, y in self._find(name)
                   for dx in (-1, 0, 1) for dy in (-1, 0, 1)} for name in utilities]
        return set.intersection(*around)

    def _place(self, thing, facing, free):
        """Place it ahead, or turn or walk one step to where that can be; [] where it cannot."""
        where = sims.constants.place[thing]["where"]

        def fits(x, y):
            inside = 0 <= x < WIDE and 0 <= y < HIGH
            return inside and self._ground[x][y] in where and not self._things[x][y]

        for side in sorted(SIDES, key=lambda side: side != facing):
            dx, dy = SIDES[side]
            ahead = (HERE[0] + dx, HERE[1] + dy)
            if side == facing and fits(*ahead):
                return [thing]
            if fits(ahead[0] + dx, ahead[1] + dy) if ahead in free else fits(*ahead):
                return [side, thing]
        return []

    def _explore(self, facing, free):
        """Keep the heading through all that can be walked or dug; now and then, and before an
        obstacle, take another one."""
        bag = self._state.player.inventory

        def ahead(side):
            """The actions that lead on to that side as far as it can be seen."""
            (x, y), (dx, dy), actions = HERE, SIDES[side], []
            while True:
                x, y = x + dx, y + dy
                inside = 0 <= x < WIDE and 0 <= y < HIGH
                rule = sims.constants.collect.get(self._ground[x][y]) if inside else None
                if inside and (x, y) in free:
                    actions.append(side)
                elif (rule and rule["leaves"] in sims.constants.walkable and not self._things[x][y]
                        and all(bag[tool] for tool in rule["require"])):
                    turned = actions[-1] == side if actions else facing == side
                    actions += ["do", side] if turned else [side, "do", side]
                else:
                    return actions

        onward = ahead(facing)
        if onward and self._dice.random() < KEEP_ON:
            return onward
        back = {"left": "right", "right": "left", "up": "down", "down": "up"}[facing]
        aside = [way for side in SIDES if side not in (facing, back) and (way := ahead(side))]
        if aside:
            return aside[self._dice.integers(len(aside))]
        return onward or ahead(back) or ["wait"]


# ------------------------------------------------------------------------------------ CraftingGrid


class CraftingGrid(OpenWorld):
    """Craft in a window: move the cursor, take a stack, put single items into the 3 x 3 slots.

    take: the stack under the cursor, into an empty hand. put: one item into an empty slot of the
    3 x 3, or all that is held into an inventory slot that is empty or has the same. craft: on the
    output slot (right), makes what it shows. distractors: stacks that the recipe does not need.
    Where the stacks lie is drawn from the seed; the layout's hash decides the split. Nobody dies.
    """

    kinds = ("gui",)
    actions = ("left", "right", "up", "down", "take", "put", "craft")
    things = tuple(word for item in (*sims.ITEMS, *sims.RECIPES) for word in item.split("_"))
    example = ("up", "take")
    rules = ("You have a window with 3 x 3 crafting slots, an inventory below and a cursor. Take "
             "lifts a stack, put lays down one item, craft works on the output slot.")
    _wait = "wait"

    options = OpenWorld.options | {"distractors": (3, 0, 8)}

    def _start(self, task, seed):
        """Lay out needed items and distractors until the layout belongs to the split."""
        rng = np.random.default_rng(draw(self.split, seed, task.name, "grid"))
        needed = list(sims.pattern(task.target).values())
        others = [item for item in sims.ITEMS if item not in needed]
        while True:
            amounts = {item: needed.count(item) + int(rng.integers(3)) for item in sims.ITEMS[:4]
                       if item in needed}
            for item in rng.permutation(others)[: self.distractors].tolist():
                amounts[item] = int(rng.integers(1, 6))
            places = rng.permutation(BAG)[: len(amounts)].tolist()
            slots = {tuple(at): stack for at, stack in zip(places, amounts.items())}
            if is_eval(sorted(slots.items())) == (self.split == "eval"):
                break
        cursor = (int(rng.integers(WIDE)), int(rng.integers(TOP, ROWS)))
        self._state = sims.Bench(slots, cursor)

    def _act(self, action):
        self._state.act(action)

    def _count(self):
        return self._state.made[self.task.event]

    def _dead(self):
        return False

    def _position(self):
        return self._state.cursor

    def _target(self):
        """Always in view; the steps are the cursor's to the slot that the expert goes for."""
        return True, len(self._plan(self._state)) - 1

    def _frame(self):
        return self._state.frame(self._unit, self.image_size or self.side)

    def _think(self):
        """What the recipe still wants, and how far the cursor must go to the next slot."""
        path = self._plan(self._state)[:-1]
        way = "".join(f" {path.count(side)} {side}" for side in SIDES if side in path)
        return f"{self.task.target.replace('_', ' ')};{way}"

    def _plan(self, bench):
        """The moves to the next slot and what to do there; the whole window is in the frame."""
        if bench.product() == self.task.target:
            return [*self._path([OUT]), "craft"]
        wanted = {(CRAFT[0][0] + x, CRAFT[0][1] + y): item
                  for (x, y), item in sims.pattern(self.task.target).items()}
        missing = {at: item for at, item in wanted.items() if at not in bench.slots}
        if bench.hand:
            item = bench.hand[0]
            goals = [at for at in missing if missing[at] == item] or [
                at for at in BAG if bench.slots.get(at, (item,))[0] == item]
            return [*self._path(goals), "put"]
        goals = [at for at in CRAFT if at in bench.slots and bench.slots[at][0] != wanted.get(at)]
        goals = goals or [at for at in BAG if at in bench.slots
                          and bench.slots[at][0] in missing.values()]
        return [*self._path(goals), "take"] if goals else ["take"]  # used up: nothing helps

    def _path(self, goals):
        """The cursor's way to the nearest of some cells."""
        x, y = self._state.cursor
        gx, gy = min(goals, key=lambda at: (abs(at[0] - x) + abs(at[1] - y), at))
        return (["left"] * (x - gx) + ["right"] * (gx - x)
                + ["up"] * (y - gy) + ["down"] * (gy - y))


# --------------------------------------------------------------------------------- what is reached


WORLDS = {"Crafter": Crafter, "CraftingGrid": CraftingGrid}


def play(env: OpenWorld, seed: int, task: str, noise: float) -> dict:
    """One episode of the expert (noise 1: of random valid replies) -> the last step's info."""
    env.reset(seed=seed, options={"task": task})
    while True:
        _, _, terminated, truncated, info = env.step(env.expert_reply(noise))
        if terminated or truncated:
            return info


def main(
    seeds: Annotated[int, tyro.conf.arg(help="Episodes a task, on evaluation worlds.")] = 50,
    noise: Annotated[float, tyro.conf.arg(help="Random share of the noisy expert.")] = 0.75,
    horizon: Annotated[int, tyro.conf.arg(help="Actions an episode.")] = 50,
):
    """Print what random actions, the expert and the noisy expert reach in each task, and speeds.
    The defaults are those of train_grow.py."""
    print(f"success (mean steps of successes)       random        expert     noise {noise:g}")
    for world in WORLDS.values():
        env = world(split="eval", tasks="all", horizon=horizon)
        for task in map(TASKS.get, env.tasks):
            line = f"{task.name:22} {task.kind:9} {'seen' if task.seen else 'unseen':6}"
            for share in (1.0, 0.0, noise):
                ends = [play(env, seed, task.name, share) for seed in range(seeds)]
                moves = [end["moves"] for end in ends if end["success"]]
                line += f"{len(moves) / seeds:7.2f} ({np.mean(moves) if moves else 0:4.0f})"
            print(line, flush=True)
    speeds()


def speeds(moves: int = 1000):
    """Print seconds to make a map, ms to clone, steps/s of random play with and without frames."""
    for area in (32, 48, 64):
        began = time.perf_counter()
        sims.Sim(area, 0)
        print(f"a map of area {area}: {time.perf_counter() - began:.2f} s")
    for world in WORLDS.values():
        for size in (252, 126, 63, None):
            env = world(image_size=size)
            if size is None:
                env._frame = lambda: None
            for seed in range(4):  # makes the maps, which are timed above
                env.reset(seed=seed)
            began = time.perf_counter()
            for _ in range(moves):
                _, _, terminated, truncated, _ = env.step(env.expert_reply(1.0))
                if terminated or truncated:
                    seed = (seed + 1) % 4
                    env.reset(seed=seed)
            speed = moves / (time.perf_counter() - began)
            print(f"{world.__name__} {f'{size} px' if size else 'no frames'}: {speed:.0f} steps/s")
        began = time.perf_counter()
        for _ in range(100):
            env.clone()
        print(f"{world.__name__} clone: {(time.perf_counter() - began) * 10:.2f} ms")


if __name__ == "__main__":
    tyro.cli(main)
