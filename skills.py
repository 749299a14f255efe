"""Tabletop robot skills played by text, in real physics: pick, place and push with a gripper.

`PrimitiveSkill` is our own table in MuJoCo: cubes, targets, a drawer and a gantry gripper whose
skills are slow interpolated motions. `ManiSkill` plays its three cube tasks on a Panda arm in
ManiSkill 3, the papers' simulator. A reply is
`<think>...</think><answer>pick(40,-120,20)|place(0,-120,20)</answer>`, in mm; numbers outside the
workspace are clipped to it. TASKS says what there is to do.

Needs mujoco, which is not in requirements.txt; ManiSkill also needs mani_skill and a Vulkan driver.
`python skills.py` prints what expert and random valid replies reach in each task.

Differs from the paper:
- PrimitiveSkill's scene is drawn here; its drawer is small and stands in the cubes' workspace (the
  paper: a cabinet in a workspace of its own), and the third cube is blue, not purple;
- stages give credit in every task (the paper's code: in one; the others misspell its keys);
- the text names the objects (named=False: the paper's bare list) and says if the hand is full;
- a reply in the wrong format executes nothing (the paper's code executes what it finds in it);
- no evaluation layout is ever a training layout (the paper's test seeds are training seeds).
"""

import os
import re
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

import gymnasium
import numpy as np

from envs import REPLY, TurnEnv, check_option

os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported; without it no picture
try:
    import mujoco
except ImportError as error:
    raise ImportError("PrimitiveSkill needs: pip install mujoco==4.0.0") from error

LOW, HIGH = np.array([-100, -200, 10]), np.array([150, 200, 200])  # the workspace in mm
HOME = (-100, 0, 200)  # where the hand waits, and drops what it holds when it picks anew
CUBE, APART = 40, 80  # mm: side of a cube; objects with less between their centres hinder the hand
SHUT, OPEN = 150, 100  # mm: y of the shut drawer's centre; how far it slides out
SKILLS = {"pick": 3, "place": 3, "push": 6}  # how many numbers each takes
NUMBER = r"\s*-?\d{1,4}\s*"
SKILL = re.compile(rf"\s*(pick|place|push)\(({NUMBER}(?:,{NUMBER}){{2}}(?:,{NUMBER}){{0,3}})\)\s*",
                   re.ASCII)


# --------------------------------------------------------------------------------------- the tasks


@dataclass(frozen=True)
class Task:
    """says: the instruction. moves: what can be carried. fixed: what else the text gives. parts:
    what the expert's thought says while each part is undone."""

    says: str
    moves: tuple[str, ...]
    fixed: tuple[str, ...]
    parts: tuple[str, ...]


TASKS = {
    "align": Task("Put both cubes on the line x 0.", ("red", "green"), (),
                  ("red off the line", "green off the line")),
    "place": Task("Put each cube on the target of its colour.", ("red", "green"),
                  ("red target", "green target"), ("red off its target", "green off its target")),
    "stack": Task("Put red on green, then blue on red.", ("red", "green", "blue"), (),
                  ("red not on green", "blue not on red")),
    "drawer": Task("Put the apple into the drawer, then push it shut to y 150.", ("apple",),
                   ("drawer",), ("apple not in the drawer", "apple in the drawer, drawer open")),
}


def done_parts(task: str, at: dict[str, np.ndarray]) -> tuple[bool, bool]:
    """Which of the two parts of a task are done, with each thing at [3] mm. All: success, once the
    hand is empty."""

    def on(top, base):
        gap = at[top] - at[base]
        return bool(np.hypot(*gap[:2]) < 20 and gap[2] > 20)

    if task == "align":
        return tuple(bool(abs(at[c][0]) <= 10 and abs(at[c][2]) <= 50) for c in ("red", "green"))
    if task == "place":
        return tuple(bool(np.linalg.norm(at[c] - at[f"{c} target"]) <= 50)
                     for c in ("red", "green"))
    if task == "stack":
        first = on("red", "green")
        return first, first and on("blue", "red")
    inside = np.abs(at["apple"] - at["drawer"]) <= (48, 36, 20)
    return bool(inside.all()), bool(inside.all() and SHUT - at["drawer"][1] <= 10)


def stage_value(parts: tuple[bool, bool], held: str | None) -> float:
    """10 on success, else 2 (highest stage + 1). Stage 0: something is held; 1: a part is done."""
    if all(parts) and held is None:
        return 10.0
    return 4.0 if any(parts) else 2.0 * (held is not None)


def parse_skills(reply: str, max_skills: int) -> list[tuple[str, list[int]]] | None:
    """The skills of a reply, or None where it breaks the format in any way.

    The whole reply must be one think and one answer block (see envs.parse_reply); the answer has
    1..max_skills skills with "|" between. TypeError where reply is not a str.
    """
    if not isinstance(reply, str):
        raise TypeError(f"a reply must be a str, not {type(reply).__name__}")
    match = REPLY.fullmatch(reply)
    calls = [SKILL.fullmatch(part) for part in match[1].split("|")] if match else [None]
    if None in calls or len(calls) > max_skills:
        return None
    skills = [(call[1], [int(number) for number in call[2].split(",")]) for call in calls]
    return skills if all(len(n) == SKILLS[name] for name, n in skills) else None


def write_skill(name: str, numbers) -> str:
    """("pick", [40, -120, 20]) -> "pick(40,-120,20)"."""
    return f"{name}({','.join(str(int(n)) for n in numbers)})"


# ------------------------------------------------------------------------------------- the physics

COLOURS = {"red": ".85 .1 .1", "green": ".1 .65 .2", "blue": ".15 .25 .9", "apple": ".8 .1 .15"}

SCENE = """
<mujoco>
  <option timestep=".004" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <visual><global offwidth="{side}" offheight="{side}"/>
    <headlight ambient=".35 .35 .35" diffuse=".25 .25 .25"/>
    <quality shadowsize="512" offsamples="4"/></visual>
  <default><geom friction="1.2 .01 .0005"/></default>
  <worldbody>
    <light pos=".2 -.2 1" dir="-.2 .2 -1" directional="true" diffuse=".5 .5 .5"/>
    <camera name="front" pos=".6 0 .5" xyaxes="0 1 0 -.6 0 .8" fovy="41"/>
    <geom type="plane" size="3 3 .1" rgba=".72 .66 .58 1"/>
    {rim}
    {bodies}
    <body name="hand" gravcomp="1">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="y" type="slide" axis="0 1 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom type="box" size=".042 .012 .008" pos="0 0 .06" mass=".4" rgba=".3 .3 .35 1"/>
      <body name="left" gravcomp="1">
        <joint name="l" type="slide" axis="-1 0 0" range="0 .034"/>
        <geom name="left" type="box" size=".004 .01 .03" pos="-.004 0 .022" mass=".05" condim="6"
          friction="2 .05 .005" rgba=".2 .2 .2 1"/>
      </body>
      <body name="right" gravcomp="1">
        <joint name="r" type="slide" axis="1 0 0" range="0 .034"/>
        <geom name="right" type="box" size=".004 .01 .03" pos=".004 0 .022" mass=".05" condim="6"
          friction="2 .05 .005" rgba=".2 .2 .2 1"/>
      </body>
    </body>
  </worldbody>
  <contact><exclude body1="left" body2="right"/></contact>
  <actuator>
    <position joint="x" kp="2000" kv="70" forcerange="-40 40"/>
    <position joint="y" kp="2000" kv="70" forcerange="-40 40"/>
    <position joint="z" kp="2000" kv="70" forcerange="-40 40"/>
    <position joint="l" kp="400" kv="15" forcerange="-8 8"/>
    <position joint="r" kp="400" kv="15" forcerange="-8 8"/>
  </actuator>
</mujoco>"""

DRAWER = """
<body name="drawer" mocap="true">
  <geom type="box" size=".062 .048 .003" pos="0 .152 .065" rgba=".5 .35 .2 1"/>
  <geom type="box" size=".003 .048 .034" pos="-.059 .152 .034" rgba=".5 .35 .2 1"/>
  <geom type="box" size=".003 .048 .034" pos=".059 .152 .034" rgba=".5 .35 .2 1"/>
  <geom type="box" size=".062 .003 .034" pos="0 .197 .034" rgba=".5 .35 .2 1"/>
  <body name="tray" pos="0 .15 0" gravcomp="1">
    <joint name="slide" type="slide" axis="0 -1 0" range="0 .1" damping="3" frictionloss=".3"/>
    <geom type="box" size=".05 .04 .003" pos="0 0 .006" rgba=".8 .65 .4 1"/>
    <geom type="box" size=".052 .003 .02" pos="0 -.037 .026" rgba=".8 .65 .4 1"/>
    <geom type="box" size=".052 .003 .02" pos="0 .037 .026" rgba=".8 .65 .4 1"/>
    <geom type="box" size=".003 .04 .02" pos="-.051 0 .026" rgba=".8 .65 .4 1"/>
    <geom type="box" size=".003 .04 .02" pos=".051 0 .026" rgba=".8 .65 .4 1"/>
  </body>
</body>"""


def scene(task: str, side: int) -> str:
    """The MJCF of a task's table, in metres; side: of its frames in px. Above the rim there are
    walls that stop things, not the hand: nothing can be pushed to where the hand cannot go."""
    bodies = ""
    for name in TASKS[task].moves:
        shape = ('type="sphere" size=".02" friction="1.5 .01 .003"' if name == "apple"
                 else 'type="box" size=".02 .02 .02"')
        bodies += (f'<body name="{name}" pos="0 0 .02"><freejoint/>'
                   f'<geom {shape} mass=".05" condim="6" contype="3" conaffinity="3" '
                   f'rgba="{COLOURS[name]} 1"/></body>')
    for name in TASKS[task].fixed:
        bodies += DRAWER if name == "drawer" else (
            f'<body name="{name}" mocap="true"><geom type="cylinder" size=".035 .0005" contype="0" '
            f'conaffinity="0" rgba="{COLOURS[name.split()[0]]} .5"/></body>')
    if task == "align":
        bodies += ('<geom type="box" size=".01 .22 .0004" contype="0" conaffinity="0" '
                   'rgba="1 1 1 1"/>')
    rim = ""
    for x, y, long, wide in ((.025, .225, .126, .003), (.025, -.225, .126, .003),
                             (-.125, 0, .003, .228), (.175, 0, .003, .228)):
        rim += (f'<geom type="box" size="{long} {wide} .004" pos="{x} {y} .004" '
                f'rgba=".4 .35 .3 1"/><geom type="box" size="{long} {wide} .3" pos="{x} {y} .3" '
                'contype="2" conaffinity="2" rgba="0 0 0 0"/>')
    return SCENE.format(side=side, rim=rim, bodies=bodies)


@lru_cache(maxsize=None)
def compiled(task: str, side: int) -> mujoco.MjModel:
    """The model of a task; shared and never written to, all that varies is in the MjData."""
    return mujoco.MjModel.from_xml_string(scene(task, side))


@lru_cache(maxsize=32)
def renderer(task: str, side: int, thread: int) -> mujoco.Renderer:
    """One for all tables of a thread: a GL context belongs to a thread, and is dear."""
    try:
        return mujoco.Renderer(compiled(task, side), side, side)
    except Exception as error:  # whatever the GL library of the day raises
        raise RuntimeError(
            f"MuJoCo cannot draw with MUJOCO_GL={os.environ['MUJOCO_GL']}: {error!r}; install "
            "libegl1 and libgl1-mesa-dri, or libosmesa6 and set MUJOCO_GL=osmesa") from error


class Hand:
    """What the skills do with a gripper; where it is and things are, a simulator says: Table,
    PandaTable. All in mm; speeds in m/s."""

    def act(self, name: str, numbers: np.ndarray):
        """Execute a skill, its points within the workspace, and go home."""
        start = numbers[:3]
        if name != "place":
            self._grip(name == "pick")
        self._go((*start[:2], HOME[2]), 0.6)
        self._go(start, 0.25)
        if name == "push":
            self._go(numbers[3:], 0.15)
        else:
            self._grip(name == "place")
        self._go((*self._tip()[:2], HOME[2]), 0.25)
        self._go(HOME, 0.6)


class Table(Hand):
    """The scene of one task in MuJoCo."""

    def __init__(self, task: str, side: int):
        self.task, self.side = task, side
        self.model = compiled(task, side)
        self.data = mujoco.MjData(self.model)

    def load(self, layout: dict[str, tuple[int, int]]):
        """Put everything where the layout says and let it come to rest."""
        for name, (x, y) in layout.items():
            if name == "drawer":
                self.data.mocap_pos[0] = x / 1000, 0, 0
                self.data.joint("slide").qpos = (SHUT - y) / 1000
            elif name in TASKS[self.task].fixed:
                index = self.model.body(name).mocapid[0]
                self.data.mocap_pos[index] = x / 1000, y / 1000, 0.002
            else:
                start = self.model.jnt_qposadr[self.model.body(name).jntadr[0]]
                self.data.qpos[start : start + 3] = x / 1000, y / 1000, CUBE / 2000
        hand = np.array(HOME) / 1000
        for axis, value in zip("xyz", hand):
            self.data.joint(axis).qpos = value
        self.data.ctrl[:] = *hand, 0, 0
        self._wait(0.1)

    def positions(self) -> dict[str, np.ndarray]:
        """[3] mm of everything in the text; a target's is that of a cube on it."""
        task, at = TASKS[self.task], {}
        for name in (*task.moves, *task.fixed):
            at[name] = 1000 * self.data.body("tray" if name == "drawer" else name).xpos
            if name in task.fixed:
                at[name][2] = 30 if name == "drawer" else CUBE / 2
        return at

    def held(self) -> str | None:
        """What both fingers touch."""
        touching = {"left": set(), "right": set()}
        for pair in self.data.contact.geom:
            names = [self.model.geom(geom).name for geom in pair]
            bodies = [self.model.body(self.model.geom_bodyid[geom]).name for geom in pair]
            for finger, body in zip(names, bodies[::-1]):
                if finger in touching:
                    touching[finger].add(body)
        both = touching["left"] & touching["right"]
        return next((name for name in TASKS[self.task].moves if name in both), None)

    def act(self, name, numbers):
        super().act(name, numbers)
        self._wait(0.1)
        # MuJoCo itself would start the scene anew and go on
        if any(warning.number for warning in self.data.warning[-4:]):
            raise RuntimeError(f"the physics of {write_skill(name, numbers)} has broken down")

    def _tip(self):
        return 1000 * self.data.body("hand").xpos

    def _go(self, point, speed):
        """Lead the hand on a line to a point in mm, at most at `speed` m/s: faster, cubes fly."""
        start, end = self.data.ctrl[:3].copy(), np.array(point) / 1000
        steps = int(np.ceil(np.abs(end - start).max() / speed / 0.012)) + 1
        for step in range(1, steps + 1):
            self.data.ctrl[:3] = start + (end - start) * (step / steps)
            self._wait(0.012)
        self._wait(0.04)

    def _grip(self, wide):
        self.data.ctrl[3:] = 0.03 if wide else 0  # m of each finger from the middle
        self._wait(0.2)

    def _wait(self, seconds):
        steps = round(seconds / self.model.opt.timestep)
        mujoco.mj_step(self.model, self.data, steps)

    def frame(self) -> np.ndarray:
        """uint8 [side, side, 3], seen from the front: y to the right, x towards the eye."""
        view = renderer(self.task, self.side, threading.get_ident())
        view.update_scene(self.data, "front")
        return view.render().copy()


# --------------------------------------------------------------------------------- the environment

NOTICE = "Invalid reply. "


class PrimitiveSkill(TurnEnv):
    """Move cubes, or an apple into a drawer, by skills with numbers in mm.

    tasks: a name of TASKS, or "all": each reset draws one. max_turns replies of up to max_actions
    skills, max_skills in all. grid: mm to which starts and the text's positions are rounded (1: to
    the mm). named: the text names the objects, else it is a bare list in an order drawn anew.
    image_size: side of the frame in px. A level is "task: thing x y, thing x y".

    Reward: format_reward for each valid reply; in the last turn also the stage_value reached, less
    the one at the start, less 0.1 a skill. Success ends the episode.
    Differs from the paper: stages count in every task; the opening left may be 10 of 100 mm.
    """

    options = {name: TurnEnv.options[name] for name in ("image_size", "format_reward")} | {
        "max_turns": (10, 1, 100),
        "max_actions": (2, 1, 10),
        "max_skills": (10, 1, 100),
        "grid": (10, 1, 20),
        "named": (True, False, True),
        "tasks": ("all", None, None),  # words, not ranges: __init__ checks them
    }
    side = 300
    known = tuple(TASKS)

    def __init__(self, *, tasks: str = "all", **options):
        super().__init__(**options)
        if tasks not in ("all", *self.known):
            raise ValueError(f"tasks={tasks!r} is not in {type(self).__name__}; it has all, "
                             f"{', '.join(self.known)}")
        self.tasks = self.known if tasks == "all" else (tasks,)

    @property
    def system_prompt(self) -> str:
        """The same for every task."""
        limits = ", ".join(f"{axis} {low} to {high}" for axis, low, high in zip("xyz", LOW, HIGH))
        example = "|".join(["pick(40,-120,20)", "place(0,-120,20)"][: self.max_actions])
        return (f"You move a gripper over a table. Positions are (x,y,z) in mm: {limits}. Cubes "
                f"have {CUBE} mm. Skills: pick(x,y,z), place(x,y,z), push(x1,y1,z1,x2,y2,z2). Up "
                f"to {self.max_actions} skills a reply with | between, {self.max_turns} replies, "
                f"{self.max_skills} skills. Reply: <think>...</think><answer>{example}</answer>")

    @property
    def texts(self) -> list[str]:
        """All that the world and its expert say: the vocabulary of a model made for it."""
        numbers = [self.grid * n for n in range(-(240 // self.grid), 240 // self.grid + 1)]
        words = [word for t in TASKS.values() for word in (t.says, *t.parts, *t.moves, *t.fixed)]
        names = [text for word in words for text in (word, f" {word}", f", {word}")]
        return [self.system_prompt, NOTICE, *names, *map(write_skill, SKILLS, [numbers] * 3),
                "hand empty, red in the way, no way", "Hand empty. Hand full. Hand has red.",
                " Hand. red(1,-2,0)|push <think>hand 1 2 3 4 5 6 7 8 9 0"]

    # Levels

    def _draw_level(self):
        """Every layout that is drawn can be solved, so none is loaded to see that."""
        while self._split_of(level := self._new_level()) != self.split:
            pass
        return level

    def _new_level(self):
        """A task and places for its things, drawn until nothing is in the way of the hand."""
        task = self.tasks[self.np_random.integers(len(self.tasks))]
        while True:
            at = {name: self._draw_place(name) for name in (*TASKS[task].moves, *TASKS[task].fixed)}
            places = np.array(list(at.values()))
            gaps = np.linalg.norm(places[:, None] - places, axis=-1)[np.triu_indices(len(at), 1)]
            aside = [abs(x) for x, _ in at.values()]
            if task == "align" and (max(aside) == 0 or any(0 < x < 20 for x in aside)):
                continue  # solved, or in doubt
            if gaps.min() >= APART:
                break
        return f"{task}: " + ", ".join(f"{name} {x} {y}" for name, (x, y) in at.items())

    def _draw_place(self, name):
        x_range, y_range = {"drawer": ((-40, 80), (SHUT - OPEN, SHUT - 80)),
                            "apple": ((-80, 130), (-180, -40))}.get(name, ((-80, 130), (-180, 180)))
        return tuple(self.grid * int(self.np_random.integers(-(-low // self.grid),
                                                             high // self.grid + 1))
                     for low, high in (x_range, y_range))

    def _lasting(self, level):
        return level

    def _load(self, level):
        task, _, rest = level.partition(": ")
        wanted = (*TASKS[task].moves, *TASKS[task].fixed) if task in self.known else ()
        parts = [re.fullmatch(r"([a-z ]+) (-?\d{1,3}) (-?\d{1,3})", p) for p in rest.split(", ")]
        if not wanted or None in parts or tuple(part[1] for part in parts) != wanted:
            raise ValueError(f"{level!r} is not a level such as 'align: red 40 -120, green 0 60', "
                             f"with a task of {', '.join(self.known)}")
        layout = {part[1]: (int(part[2]), int(part[3])) for part in parts}
        for name, (x, y) in layout.items():
            inside = (LOW[:2] <= (x, y)).all() and ((x, y) <= HIGH[:2]).all()
            if not inside or name == "drawer" and not SHUT - OPEN <= y <= SHUT:
                raise ValueError(f"{level!r}: {name} is outside the workspace or its slide")
        self.task, self._layout = task, layout
        self._state = self._table(task)
        self._state.load(layout)
        self._order = self.np_random.permutation(len(wanted))
        self._first = self._value()

    def _table(self, task: str) -> Table:
        return Table(task, self.image_size or self.side)

    # The protocol

    def step(self, reply: str):
        """Play one turn -> observation, reward, terminated, truncated, info (see TurnEnv.step).

        info also has task and stage_value; actions are the executed skills, with their numbers
        clipped to the workspace.
        """
        self._check_running()
        chosen = parse_skills(reply, self.max_actions)
        bonus, done = 0.0 if chosen is None else self.format_reward, []
        success = False
        for name, numbers in (chosen or [])[: self.max_skills - self._moves]:
            clipped = np.clip(np.reshape(numbers, (-1, 3)), LOW, HIGH).ravel()
            self._state.act(name, clipped)
            done.append(write_skill(name, clipped))
            if success := self._result(self._state) is True:
                break
        self._turn += 1
        self._moves += len(done)
        truncated = not success and (
            self._turn >= self.max_turns or self._moves >= self.max_skills)
        self._over, reward, value = success or truncated, bonus, self._value()
        if self._over:
            reward += value - self._first - 0.1 * self._moves
        info = {"success": success, "valid": chosen is not None, "actions": done,
                "format_reward": bonus, "turn": self._turn, "moves": self._moves,
                "task": self.task, "stage_value": value}
        return self._observe("" if info["valid"] else NOTICE), reward, success, truncated, info

    def _value(self):
        return stage_value(done_parts(self.task, self._state.positions()), self._state.held())

    def _result(self, state):
        done = all(done_parts(self.task, state.positions())) and state.held() is None
        return True if done else None

    def _observe(self, notice):
        at, held = self._state.positions(), self._state.held()
        things = [f"{name if self.named else ''}{self._point(at[name])}" for name in at]
        if not self.named:
            things = [things[i] for i in self._order]
        hand = "empty" if held is None else f"has {held}" if self.named else "full"
        text = f"{notice}{TASKS[self.task].says} {' '.join(things)} Hand {hand}."
        return {"image": self._frame(), "text": text}

    def _point(self, place):
        return f"({','.join(str(number) for number in self._rounded(place))})"

    def _rounded(self, place):
        return [self.grid * round(float(number) / self.grid) for number in place]

    def _frame(self):
        return self._state.frame()

    # The scripted expert

    def _goal(self, at, held):
        """(thing to carry, where to [3] mm, why in words); the thing "drawer" is pushed. None:
        there is nothing to do or no way. at, held: as of Table."""
        task, parts = TASKS[self.task], done_parts(self.task, at)
        todo = [i for i, done in enumerate(parts) if not done]
        if not todo:
            return None
        if self.task in ("align", "place"):  # in any order, so what is held comes first
            todo.sort(key=lambda i: task.moves[i] != held)
        part = todo[0]
        thing = {"stack": ("red", "blue"), "drawer": ("apple", "drawer")}.get(
            self.task, task.moves)[part]
        if thing == "drawer":
            return "drawer", at["drawer"], task.parts[part]
        spot = self._spot(part, thing, at)
        if spot is None:
            return None
        if held not in (None, thing):
            return held, self._free(held, at[held], at), f"{task.parts[part]}, {held} in the way"
        for other in task.moves:
            aside, above = np.linalg.norm((at[other] - spot)[:2]), at[other] - at[thing]
            blocks = aside < 60 and at[other][2] > spot[2] - 30
            if other != thing and other != held and (
                    blocks or np.linalg.norm(above[:2]) < 30 and above[2] > 20):
                spot = self._free(other, at[other], at)
                return other, spot, f"{task.parts[part]}, {other} in the way"
        return thing, spot, task.parts[part]

    def _spot(self, part, thing, at):
        """Where the thing of an undone part belongs, [3] mm; None: nowhere any more."""
        if self.task == "align":
            return self._free(thing, (0, at[thing][1]), at, line=True)
        if self.task == "place":
            return at[f"{thing} target"]
        if self.task == "stack":
            return at[("green", "red")[part]] + (0, 0, CUBE)
        return at["drawer"] if SHUT - at["drawer"][1] > 60 else None

    def _free(self, thing, near, at, line=False):
        """The place on the table nearest to one where the hand has room; line: with x 0."""
        others = np.array([at[name][:2] for name in at if name != thing]).reshape(-1, 2)
        x, y = np.meshgrid([0] if line else range(-80, 121, 20), range(-180, 181, 20))
        places = np.stack([x.ravel(), y.ravel()], axis=-1)
        if line and abs(near[1]) <= 180:
            places = np.vstack([self._rounded(near[:2]), places])
        gaps = np.linalg.norm(places[:, None] - others, axis=-1)
        places = places[(gaps >= APART - 10).all(axis=1)]
        if not len(places):
            return None
        best = np.linalg.norm(places - np.array(near[:2]), axis=1).argmin()
        return np.array([*places[best], CUBE / 2])

    def _plan(self, state):
        """The skills from here to success, as if each did what it should."""
        at, held, plan = state.positions(), state.held(), []
        while (goal := self._goal(at, held)) and goal[1] is not None and len(plan) < 12:
            thing, spot, _ = goal
            if thing == "drawer":
                x, y, z = self._rounded(at["drawer"])
                plan.append(write_skill("push", (x, y - 70, z, x, SHUT - 50, z)))
                at["drawer"], at["apple"] = np.array([x, SHUT, z]), np.array([x, SHUT, z])
                continue
            if held != thing:
                plan.append(write_skill("pick", self._rounded(at[thing])))
            plan.append(write_skill("place", self._rounded(spot)))
            at[thing], held = np.array(spot), None
        return plan

    def _think(self):
        """What the hand has and what is undone: "hand empty, red not on green"."""
        held = self._state.held()
        goal = self._goal(self._state.positions(), held)
        return f"hand {held or 'empty'}, {goal[2] if goal else 'no way'}"

    def expert_reply(self, noise: float = 0.0) -> str:
        """A valid reply: what is undone, then the first max_actions skills of the plan.

        Each skill is with probability `noise` a random one, which ends the reply: what it leads to
        is not yet to be seen. A random skill where there is no plan.
        """
        self._check_running()
        check_option("noise", noise, 0.0, 1.0)
        chosen = []
        for skill in self._plan(self._state)[: self.max_actions] or [None]:
            if skill is None or self.np_random.random() < noise:
                chosen.append(self._random_skill())
                break
            chosen.append(skill)
        return f"<think>{self._think()}</think><answer>{'|'.join(chosen)}</answer>"

    def _random_skill(self):
        name = list(SKILLS)[self.np_random.integers(len(SKILLS))]
        points = self.np_random.integers(-(-LOW // self.grid), HIGH // self.grid + 1,
                                         size=(SKILLS[name] // 3, 3))
        return write_skill(name, self.grid * points.ravel())


# --------------------------------------------------------------------------------------- ManiSkill


def maniskill_env(name: str, side: int, backend: str):
    """ManiSkill's environment of that name; ImportError or RuntimeError say what to do."""
    try:
        import mani_skill.envs  # noqa: F401  registers the environments
    except ImportError as error:
        raise ImportError(f"{error}. ManiSkill needs: pip install mani_skill==3.0.1 and torch"
                          ) from error
    try:
        return gymnasium.make(
            name, obs_mode="none", control_mode="pd_ee_delta_pos", sim_backend="physx_cpu",
            render_backend=backend, render_mode="rgb_array", robot_uids="panda",
            human_render_camera_configs={"width": side, "height": side})
    except RuntimeError as error:
        raise RuntimeError(f"ManiSkill finds no renderer with backend={backend!r}: {error}; on a "
                           "CPU it needs Mesa 25 or newer (mesa-vulkan-drivers)") from error


class PandaTable(Hand):
    """The same scene and skills as Table, on ManiSkill's Panda arm; built once for a task."""

    worlds = {"align": "StackCube-v1", "place": "StackCube-v1", "stack": "StackPyramid-v1"}
    actors = {"red": "cubeA", "green": "cubeB", "blue": "cubeC"}
    reach = 0.1  # m: what a full action moves the hand
    patience = 150  # simulated steps before a motion that is blocked is given up

    def __init__(self, task: str, env):
        self.task, self.env, self.world = task, env, env.unwrapped

    def load(self, layout):
        from sapien import Pose

        self._targets = {name: np.array([*at, CUBE / 2]) for name, at in layout.items()
                         if name in TASKS[self.task].fixed}
        self.world.reset(seed=0)  # brings the arm back to the same start
        for name in TASKS[self.task].moves:
            x, y = layout[name]
            self._actor(name).set_pose(Pose([x / 1000, y / 1000, CUBE / 2000]))
        self._fingers = 1.0
        self._go(HOME, 0.6)

    def _actor(self, name):
        return getattr(self.world, self.actors[name])

    @staticmethod
    def _millimetres(pose):
        return 1000 * pose.p[0].cpu().numpy().astype(np.float64)  # of the only one in the batch

    def positions(self):
        at = {name: self._millimetres(self._actor(name).pose) for name in TASKS[self.task].moves}
        return at | {name: place.copy() for name, place in self._targets.items()}

    def held(self):
        return next((name for name in TASKS[self.task].moves
                     if bool(self.world.agent.is_grasping(self._actor(name)))), None)

    def _tip(self):
        return self._millimetres(self.world.agent.tcp.pose)

    def _go(self, point, speed):
        """Step towards a point until within 3 mm of it, or until patience ends."""
        most = speed / 20 / self.reach  # 20 steps a second
        for _ in range(self.patience):
            gap = (np.array(point) - self._tip()) / 1000
            if np.abs(gap).max() < 0.003:
                break
            self._step(np.clip(gap / self.reach, -most, most))

    def _grip(self, wide):
        self._fingers = 1.0 if wide else -1.0
        for _ in range(10):
            self._step(np.zeros(3))

    def _step(self, move):
        self.world.step(np.array([*move, self._fingers], np.float32))

    def frame(self):
        return self.world.render()[0].cpu().numpy()


class ManiSkill(PrimitiveSkill):
    """The three cube tasks in ManiSkill 3, the papers' simulator, with the skills and text above.

    backend: "cpu" or "gpu", what draws. env_factory(name, side, backend): builds the environment.
    The line and the targets are in the text alone, the picture does not show them. Run for real
    with mani_skill 3.0.1 on Mesa 25: some seconds an episode, and a task's first reset is slow.
    Differs from the paper: StackCube's and StackPyramid's scenes; the drawer's task needs downloads
    (YCB, PartNet) and is not here.
    """

    options = PrimitiveSkill.options | {"backend": ("cpu", None, None)}
    known = ("align", "place", "stack")

    def __init__(self, *, backend: str = "cpu", env_factory=maniskill_env, **options):
        if backend not in ("cpu", "gpu"):
            raise ValueError(f"backend={backend!r} must be 'cpu' or 'gpu'")
        super().__init__(**options)
        self.backend, self._factory, self._tables = backend, env_factory, {}

    def _table(self, task):
        if task not in self._tables:
            env = self._factory(PandaTable.worlds[task], self.image_size or self.side, self.backend)
            self._tables[task] = PandaTable(task, env)
        return self._tables[task]

    def close(self):
        for table in self._tables.values():
            table.env.close()
        self._tables, self._over = {}, True


# --------------------------------------------------------------------------------- what is reached


def play(env: PrimitiveSkill, seed: int, noise: float) -> dict:
    """One episode of the expert (noise 1: of random valid replies) -> the last turn's info."""
    env.reset(seed=seed)
    while True:
        _, _, terminated, truncated, info = env.step(env.expert_reply(noise))
        if terminated or truncated:
            return info


def main(seeds: int = 50):
    """Print what the expert, the noisy expert and random replies reach on evaluation layouts."""
    print("success of: expert  noise .5  random | turns of the expert | skills/s with frames")
    for task in TASKS:
        env = PrimitiveSkill(split="eval", tasks=task)
        began = time.perf_counter()
        runs = [[play(env, seed, noise) for seed in range(seeds)] for noise in (0.0, 0.5, 1.0)]
        spent = time.perf_counter() - began
        rates = "".join(f"{np.mean([end['success'] for end in ends]):9.2f}" for ends in runs)
        turns = np.mean([end["turn"] for end in runs[0]])
        moves = sum(end["moves"] for ends in runs for end in ends)
        print(f"{task:9}{rates} {turns:14.1f} {moves / spent:20.0f}", flush=True)


if __name__ == "__main__":
    main()
