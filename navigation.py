"""Navigation in first person, played by text: "Go to the duck." in drawn rooms or in AI2-THOR.

`Navigation` draws rooms with the optional package miniworld (2.1.0, Apache-2.0; its OpenGL runs
without a display). `Thor` puts the same actions, rewards and texts before ai2thor's controller.

Both count positions in metres, x to the right and z ahead of who looks along yaw 0; yaw grows
clockwise, tilt downwards, in degrees, as in AI2-THOR. A state is (x, z, yaw, tilt).

Differs from the paper:
- the rooms are MiniWorld's, not AI2-THOR's, unless `Thor` is asked for;
- no evaluation room (or scene) is ever one of training (the paper tests on training scenes);
- reworded instructions name the object in other sentences, not by a common-sense description;
- an action that the limit of actions leaves no room for is not executed;
- 84 px frames by default (the paper: 255), small enough for the tiny model.
"""

import json
import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from numbers import Real
from pathlib import Path

import gymnasium
import numpy as np

from envs import TurnEnv, check_option, parse_reply

STEP, TURN, TILT = 0.5, 90, 30  # m, degrees, degrees
HIGHEST, LOWEST = -30, 60  # degrees: how far up and down the head tilts, AI2-THOR's limits
REACH = 1.5  # m, on the floor: success
NEAR = 3.0  # m: what the expert calls near
AHEAD = 15  # degrees to either side: what the expert calls ahead
WAYS = {"moveahead": 0, "moveback": 180, "moveright": 90, "moveleft": -90}  # degrees off the yaw
SIDEWAYS_FIRST = ("moveleft", "moveright", "moveahead", "moveback")  # of equally short ways
VIEWS = {"rotateright": (TURN, 0), "rotateleft": (-TURN, 0),  # yaw, tilt
         "lookup": (0, -TILT), "lookdown": (0, TILT)}
SAYS = {True: "Last action succeeded. ", False: "Last action failed. ", None: ""}


def moved(state: tuple, action: str) -> tuple:
    """Where an action leads if nothing is in the way: (x, z, yaw, tilt)."""
    x, z, yaw, tilt = state
    if action in VIEWS:
        turn, nod = VIEWS[action]
        return x, z, (yaw + turn) % 360, tilt + nod
    angle = math.radians(yaw + WAYS[action])
    return (round(x + STEP * math.sin(angle), 3) + 0.0, round(z + STEP * math.cos(angle), 3) + 0.0,
            yaw, tilt)  # + 0.0: no -0.0


def bearing(state: tuple, place: tuple) -> float:
    """Degrees from the line of sight to a place (x, z), -180 to 180; positive is right."""
    angle = math.degrees(math.atan2(place[0] - state[0], place[1] - state[1])) - state[2]
    return (angle + 180) % 360 - 180


def distance(state: tuple, place: tuple) -> float:
    """Metres on the floor from a state to a place (x, z)."""
    return math.hypot(place[0] - state[0], place[1] - state[1])


class Walk(TurnEnv):
    """What both worlds share: eight actions, feedback in words, 10 for reaching the target.

    max_moves: actions an episode. Reward: format_reward a valid reply, 10 once when the target is
    within 1.5 m after any action, which ends the episode; no other cost.
    A world sets `_goal` (x, z), `_state`, `_name` (of the target), `_succeeded` (did the last
    action; None: there was none) and instruction when an episode starts, and has `_act`, `_next`,
    `_plan`, `_where` (what the expert sees of the target) and `_frame`.
    """

    actions = (*WAYS, *VIEWS)
    example = ("rotateright", "moveahead", "moveahead", "moveleft", "moveahead")
    rules = "You walk through a room. Go to the object that you are told."
    options = {name: TurnEnv.options[name] for name in ("max_turns", "max_actions", "image_size",
                                                        "format_reward")}
    options |= {"max_turns": (10, 1, 100), "max_actions": (5, 1, 100), "max_moves": (30, 1, 1000)}
    text_state = False
    _succeeded = None

    def step(self, reply: str):
        """Play one turn -> observation, reward, terminated, truncated, info.

        info: as TurnEnv.step's, and last_action_success (None: none yet) and distance, in m.
        Truncated at max_turns replies or max_moves actions, whichever comes first.
        """
        self._check_running()
        chosen = parse_reply(reply, self.actions, self.max_actions)
        bonus = 0.0 if chosen is None else self.format_reward
        reward, terminated, done = bonus, False, []
        for action in (chosen or [])[: self.max_moves - self._moves]:
            gain, terminated = self._act(action)
            reward += gain
            done.append(action)
            if terminated:
                break
        self._turn += 1
        self._moves += len(done)
        spent = self._turn >= self.max_turns or self._moves >= self.max_moves
        truncated = spent and not terminated
        self._over = terminated or truncated
        info = {"success": terminated, "valid": chosen is not None, "actions": done,
                "format_reward": bonus, "turn": self._turn, "moves": self._moves,
                "last_action_success": self._succeeded,
                "distance": distance(self._state, self._goal)}
        notice = "Invalid reply. " if chosen is None else ""
        return self._observe(notice), float(reward), terminated, truncated, info

    def _observe(self, notice):
        says = f"{notice}{SAYS[self._succeeded]}Turn {self._turn + 1}. {self.instruction}"
        return {"image": self._frame(), "text": says}

    def _result(self, state):
        return True if distance(state, self._goal) <= REACH else None

    def _side(self):
        """Where the target is, from the line of sight."""
        angle = bearing(self._state, self._goal)
        if abs(angle) > 135:
            return "behind"
        return "ahead" if abs(angle) <= AHEAD else "left" if angle < 0 else "right"

    def _range(self):
        """How far off it is, in one word."""
        return "near" if distance(self._state, self._goal) <= NEAR else "far"

    def _think(self):
        """The target, where it is, whether the head is tilted, and the next steps of the plan:
        "duck left far go moveleft moveahead", "duck not in view go rotateright"."""
        words = [self._name, *self._where()]
        if self._state[3]:
            words += ["head", "up" if self._state[3] < 0 else "down"]
        return " ".join([*words, "go", *self._plan(self._state)[: self._decided()]])

    def _decided(self):
        """For how many actions the observation tells what to do: the length of expert replies."""
        return self.max_actions

    def expert_reply(self, noise: float = 0.0) -> str:
        """A valid reply: what is seen, then the next actions of the plan, as many as `_decided`.

        With probability `noise` the reply has 1..max_actions actions instead, those beyond
        `_decided` random; and each action is with that probability a random one, the next planned
        from where it leads. Random actions where there is no plan.
        """
        self._check_running()
        check_option("noise", noise, 0.0, 1.0)
        rng, state, chosen = self.np_random, self._state, []
        plan, decided = self._plan(state), self._decided()
        odd = rng.random() < noise
        for n in range(rng.integers(1, self.max_actions + 1) if odd else decided):
            if plan and n < decided and rng.random() >= noise:
                chosen.append(plan.pop(0))
                state = self._next(state, chosen[-1])
            else:
                chosen.append(self.actions[rng.integers(len(self.actions))])
                state = self._next(state, chosen[-1])
                plan = self._plan(state)
            if self._result(state):
                break
        return f"<think>{self._think()}</think><answer>{', '.join(chosen)}</answer>"

    def _words(self, names, says):
        """All that the world and its expert can say: the vocabulary of a model made for it."""
        turns = [f"Turn {n + 1}." for n in range(self.max_turns + 1)]
        thought = "left ahead right behind near far not in view head up down go"
        reply = f"<think>{thought}</think><answer>{', '.join(self.actions)}</answer>"
        return [self.system_prompt, "Invalid reply. ", *(line for line in SAYS.values() if line),
                *turns, *names, *says, thought, " ".join(self.actions), reply]

    def _level_head(self, tilt):
        """The actions that bring the head back to level."""
        return ["lookdown" if tilt < 0 else "lookup"] * round(abs(tilt) / TILT)


# -------------------------------------------------------------------------------------- MiniWorld

BODY = 0.3  # m, radius of who walks
EYE = 1.5  # m, height of the camera
KINDS = {  # name: (radius, height) in m
    "ball": (0.5, 1.0), "box": (0.6, 0.8), "duck": (0.5, 1.0), "cone": (0.4, 1.1),
    "tree": (0.5, 1.8), "barrel": (0.4, 1.1),
}
WALLS = ("white", "brick_wall", "stucco", "cinder_blocks")
FLOORS = ("floor_tiles_bw", "concrete", "wood", "cardboard")
SAYINGS = ("Go to the {}.",)
REWORDED = ("Find the {} and walk up to it.", "Please stand next to the {}.",
            "Where is the {}? Move close to it.", "Your target is the {}.")
# OpenGL: all frames of a process are drawn by one thread of its own, whoever asks
RENDER = ThreadPoolExecutor(1, "miniworld")


class Navigation(Walk):
    """Go to one of a few objects in one room. Frame: uint8 [side, side, 3], seen at 1.5 m.

    Width, depth, wall, floor, objects and their places vary; a hash of all that decides the split,
    so that train and eval share no room. fov: degrees, in height and width. objects: their number,
    each of another kind. reworded: instructions that training never says (eval only).
    A level is JSON: {"size": [width, depth], "wall", "floor", "objects": [[kind, x, z, yaw], ...],
    "start": [x, z, yaw], "target": kind}, coordinates from the room's corner.
    ImportError or RuntimeError, where miniworld or its renderer are missing, say what to install.
    """

    options = Walk.options | {
        "image_size": (84, 28, 2048),
        "fov": (100, 30, 120),
        "objects": (4, 1, 6),
        "reworded": (False, False, True),
    }

    side = 84

    def __init__(self, **options):
        super().__init__(**options)
        if self.reworded and self.split == "train":
            raise ValueError("reworded=True is for split='eval': training never says these")
        self._draw = RENDER.submit(renderer).result()

    @property
    def texts(self) -> list[str]:
        """See `_words`."""
        lines = [line.format(kind) for line in SAYINGS + REWORDED for kind in KINDS]
        return self._words(KINDS, lines)

    def _new_level(self):
        rng = self.np_random
        size = (rng.integers(10, 16, 2) / 2).tolist()
        kinds = rng.permutation(list(KINDS))[: self.objects].tolist()
        places = np.stack([rng.integers(3, 4 * side - 2, len(kinds) + 1) / 4 for side in size], 1)
        gaps = np.linalg.norm(places[:, None] - places[None], axis=2)  # the start is the last one
        target = rng.integers(len(kinds))
        if (gaps[np.triu_indices(len(places), 1)] < 1.5).any() or gaps[target, -1] < 2.5:
            return None
        yaws = rng.integers(0, 360, len(kinds)).tolist()
        *places, start = places.tolist()
        return json.dumps({
            "size": size, "wall": WALLS[rng.integers(len(WALLS))],
            "floor": FLOORS[rng.integers(len(FLOORS))],
            "objects": [[kind, *at, yaw] for kind, at, yaw in zip(kinds, places, yaws)],
            "start": [*start, int(rng.integers(4)) * TURN],
            "target": kinds[target],
        })

    def _lasting(self, level):
        room = json.loads(level)
        return json.dumps([room[key] for key in ("size", "wall", "floor", "objects")])

    def _load(self, level):
        try:
            room = json.loads(level)
            (width, depth), (x, z, yaw) = room["size"], room["start"]
            things = {kind: (ox, oz) for kind, ox, oz, _ in room["objects"]}
            target, looks = room["target"], (room["wall"], room["floor"])
            numbers = [width, depth, x, z, yaw, *(n for o in room["objects"] for n in o[1:])]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a level of Navigation ({error!r}): {level!r}") from error
        if not (all(isinstance(n, Real) and math.isfinite(n) for n in numbers)
                and set(things) <= set(KINDS) and len(things) == len(room["objects"])
                and target in things and looks[0] in WALLS and looks[1] in FLOORS
                and yaw % TURN == 0 and 2 <= min(width, depth) and max(width, depth) <= 20):
            raise ValueError(f"not a level of Navigation, see its docstring: {level!r}")
        self._room, self._size, self._things, self._name = room, (width, depth), things, target
        if not self._free((x, z)):
            raise ValueError(f"the start is in a wall or an object: {level!r}")
        self._goal, self._state, self._succeeded = things[target], (x, z, yaw % 360, 0), None
        lines = REWORDED if self.reworded else SAYINGS
        self.instruction = lines[sum(level.encode()) % len(lines)].format(target)

    def _free(self, place):
        """Does the walker fit there, clear of walls and objects?"""
        inside = all(BODY <= at <= side - BODY for at, side in zip(place, self._size))
        return inside and all(distance(place, at) >= BODY + KINDS[kind][0]
                              for kind, at in self._things.items())

    def _act(self, action):
        before, self._state = self._state, self._next(self._state, action)
        self._succeeded = self._state != before
        reached = self._result(self._state) is True
        return 10.0 * reached, reached

    def _next(self, state, action):
        after = moved(state, action)
        fits = self._free(after) if action in WAYS else HIGHEST <= after[3] <= LOWEST
        return after if fits else state

    def _in_view(self, state):
        """Is a quarter of the target's width in the frame, and no other object before its top?

        Geometry, not pixels: objects are taken for upright cylinders.
        """
        radius, height = KINDS[self._name]
        far, angle = distance(state, self._goal), bearing(state, self._goal)
        half = math.tan(math.radians(self.fov / 2))
        depth, rise = far * math.cos(math.radians(angle)), height / 2 - EYE
        aside = far * abs(math.sin(math.radians(angle))) - radius / 2
        if depth <= 0 or aside > half * depth:
            return False
        down = math.degrees(math.atan2(-rise, depth)) - state[3]
        if abs(down) > self.fov / 2:
            return False
        return not any(self._hides(state, kind, at) for kind, at in self._things.items())

    def _hides(self, state, kind, at):
        """Does the line from the eye to the target's top pass through another object?"""
        far, off = distance(state, self._goal), bearing(state, at) - bearing(state, self._goal)
        along = distance(state, at) * math.cos(math.radians(off))
        aside = abs(distance(state, at) * math.sin(math.radians(off)))
        radius, height = KINDS[kind]
        if kind == self._name or not 0 < along < far or aside >= radius:
            return False
        return EYE + (KINDS[self._name][1] - EYE) * along / far < height

    def _where(self):
        seen = self._in_view(self._state)
        return (self._side(), self._range()) if seen else ("not", "in", "view")

    def _decided(self):  # the plan goes on after a turn as if one knew what comes into view
        return self.max_actions if self._in_view(self._state) else 1

    def _plan(self, start):
        """Level the head, turn right until the target is in view, then the shortest way there with
        that heading; [] where there is none. What the frame shows suffices for the first two."""
        if self._result(start):
            return []
        plan, state = self._level_head(start[3]), (*start[:3], 0)
        for _ in range(4):
            if self._in_view(state):
                break
            plan.append("rotateright")
            state = moved(state, "rotateright")
        else:
            plan = plan[:-4]  # hidden behind another object: walk on as one looks
        way = self._way(state)
        return plan + way if way else []

    def _way(self, start):
        """Breadth-first over the places that steps lead to; the heading stays."""
        came_from, queue = {start: None}, deque([start])
        while queue:
            state = queue.popleft()
            if self._result(state):
                way = []
                while came_from[state] is not None:
                    state, action = came_from[state]
                    way.append(action)
                return way[::-1]
            for action in SIDEWAYS_FIRST:
                after = self._next(state, action)
                if after not in came_from:
                    came_from[after] = (state, action)
                    queue.append(after)
        return []

    def _frame(self):
        look = (self.image_size or self.side, self.fov, self._room, self._state)
        return RENDER.submit(self._draw, *look).result()


def scene_class():
    """MiniWorld's environment with `room`, a level of Navigation, in it."""
    if find_spec("miniworld") is None:
        raise ImportError("Navigation needs: pip install miniworld==2.1.0")
    os.environ.setdefault("PYGLET_HEADLESS", "1")  # pyglet reads it when it is imported
    try:
        from miniworld.entity import Ball, Box, MeshEnt
        from miniworld.miniworld import MiniWorldEnv
    except Exception as error:  # pyglet raises many kinds: no library, no display
        raise RuntimeError(f"miniworld finds no renderer ({error!r}): apt-get install libegl1 "
                           "libgl1-mesa-dri libglu1-mesa, and import nothing of pyglet before "
                           "PYGLET_HEADLESS=1 is set") from error
    makers = {"ball": lambda: Ball("red", 1.0), "box": lambda: Box("purple", 0.8)}
    makers |= {kind: lambda mesh=mesh, kind=kind: MeshEnt(mesh, KINDS[kind][1])
               for kind, mesh in (("duck", "duckie"), ("cone", "cone"), ("tree", "tree"),
                                  ("barrel", "barrel"))}
    class Scene(MiniWorldEnv):
        room = {"size": [5, 5], "wall": WALLS[0], "floor": FLOORS[0], "objects": []}

        def _gen_world(self):
            width, depth = self.room["size"]
            self.add_rect_room(0, width, -depth, 0, wall_tex=self.room["wall"],
                               floor_tex=self.room["floor"], no_ceiling=True)
            for kind, x, z, yaw in self.room["objects"]:
                self.place_entity(makers[kind](), pos=np.array([x, 0.0, -z]), dir=math.radians(yaw))
            self.place_agent(pos=np.zeros(3), dir=0.0)

    return Scene


@lru_cache
def renderer():
    """draw(side, fov, room, state) -> uint8 [side, side, 3]; to be called in RENDER's thread alone.

    One scene a process and size: a room is built anew whenever another one was drawn before.
    """
    make, scenes = scene_class(), {}
    shown = [None, None]  # scene and room: the scenes share OpenGL's list of what stands in it

    def draw(side, fov, room, state):
        if side not in scenes:
            scenes[side] = make(obs_width=side, obs_height=side, window_width=16, window_height=16)
        scene = scenes[side]
        if shown[0] is not scene or shown[1] is not room:
            scene.room = room
            scene.reset()
            shown[:] = scene, room
        x, z, yaw, tilt = state
        scene.agent.pos, scene.agent.dir = np.array([x, 0.0, -z]), math.radians(90 - yaw)
        scene.agent.cam_pitch, scene.agent.cam_fov_y = -tilt, fov
        return np.array(scene.render_obs())

    return draw


# ---------------------------------------------------------------------------------------- AI2-THOR


def thor_controller(scene: str, side: int, fov: float):
    """AI2-THOR's controller as the papers set it up; ImportError says what to install."""
    try:
        from ai2thor.controller import Controller
        from ai2thor.platform import CloudRendering
    except ImportError as error:
        raise ImportError(f"{error}. Thor needs: pip install ai2thor==5.0.0, and its engine, which "
                          "it downloads at the first start") from error
    return Controller(agentMode="default", scene=scene, width=side, height=side, fieldOfView=fov,
                      gridSize=0.1, visibilityDistance=10, platform=CloudRendering)


CALLS = {"moveahead": "MoveAhead", "moveback": "MoveBack", "moveright": "MoveRight",
         "moveleft": "MoveLeft", "rotateright": "RotateRight", "rotateleft": "RotateLeft",
         "lookup": "LookUp", "lookdown": "LookDown"}
FIELDS = {"scene": str, "agentPose.position.x": Real, "agentPose.position.y": Real,
          "agentPose.position.z": Real, "agentPose.rotation": Real, "agentPose.horizon": Real,
          "target_position.x": Real, "target_position.z": Real, "targetObjectType": str,
          "instruction": str}


def read_episodes(path: str) -> list[dict]:
    """The entries of a JSON list, or of the list "tasks" in an object, with all of FIELDS.

    ValueError names file, entry and field.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error
    entries = entries.get("tasks") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} must hold a list of episodes, or an object with it as 'tasks'")
    for number, entry in enumerate(entries):
        for name, kind in FIELDS.items():
            value = entry
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if not fits or (kind is Real and not math.isfinite(value)):
                need = "a number" if kind is Real else "a string"
                raise ValueError(f"{path}, entry {number}: {name} must be {need}, not {value!r}")
    return entries


class Thor(Walk):
    """Go to an object in AI2-THOR. Frame: uint8 [side, side, 3], 255 px.

    It has NOT been run against the engine, which has to be downloaded: it is tested with a fake
    controller that has the recorded fields (lastActionSuccess, errorMessage, agent.position,
    frame). episodes: a JSON file, see FIELDS. A hash of the scene decides the split, a quarter of
    all scenes is for evaluation. reset(options={"entry": n}) plays that entry of the file.
    controller_factory(scene, side, fov): builds the controller, at the first reset and after one
    that raised. info also has error_message, the engine's own words.
    The expert knows no obstacles: it walks straight on and sidesteps where that fails.
    """

    side = 255
    options = Walk.options | {
        "image_size": (255, 28, 2048),
        "fov": (100, 30, 120),
        "episodes": ("", "", ""),  # a path, which has no bounds to check
    }

    def __init__(self, *, episodes: str = "", controller_factory=thor_controller, **options):
        super().__init__(**options)
        if not episodes:
            raise ValueError("Thor needs episodes=, the path of a JSON list of episodes")
        self.episodes = episodes
        self._entries, self._factory = read_episodes(episodes), controller_factory
        self._controller, self._error = None, ""
        self._mine = [n for n, entry in enumerate(self._entries)
                      if self._split_of(entry["scene"]) == self.split]
        if not self._mine:
            scenes = sorted({entry["scene"] for entry in self._entries})
            raise ValueError(f"{episodes} has no scene of split {self.split!r}: {scenes}")

    def _lasting(self, level):
        return level

    @property
    def texts(self) -> list[str]:
        """See `_words`."""
        names = sorted({entry["targetObjectType"].lower() for entry in self._entries})
        return self._words(names, sorted({entry["instruction"] for entry in self._entries}))

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode of the split, drawn from the seed -> observation, {"success", "split",
        "level": its number in the file}. RuntimeError where the start pose cannot be taken."""
        gymnasium.Env.reset(self, seed=seed)
        self._over = True  # should there be no start
        number = (options or {}).get("entry")
        if number is None:
            number = self._mine[self.np_random.integers(len(self._mine))]
        check_option("entry", number, 0, len(self._entries) - 1)
        entry = self._entries[number]
        pose, goal = entry["agentPose"], entry["target_position"]
        side = self.image_size or self.side
        if self._controller is None:
            self._controller = self._factory(entry["scene"], side, self.fov)
        self._call("reset", scene=entry["scene"])
        event = self._call("step", action="Teleport", position=pose["position"], standing=True,
                           rotation={"x": 0, "y": pose["rotation"], "z": 0},
                           horizon=pose["horizon"])
        if not event.metadata["lastActionSuccess"]:
            raise RuntimeError(f"entry {number}: the start pose was refused: {self._error}")
        self._goal, self._name = (goal["x"], goal["z"]), entry["targetObjectType"].lower()
        self.instruction, self._succeeded = entry["instruction"], None
        self._see(event, pose["rotation"] % 360, pose["horizon"])
        self._turn, self._moves, self._over = 0, 0, False
        split = self._split_of(entry["scene"])
        return self._observe(""), {"success": False, "split": split, "level": str(number)}

    def step(self, reply: str):
        """As Walk.step."""
        *result, info = super().step(reply)
        return *result, info | {"error_message": self._error}

    def _call(self, method, **arguments):
        """A call of the controller; one that raises is given up, the next reset starts another."""
        try:
            event = getattr(self._controller, method)(**arguments)
        except Exception:
            self._controller, self._over = None, True
            raise
        self._error = event.metadata.get("errorMessage", "")
        return event

    def _see(self, event, yaw, tilt):
        position = event.metadata["agent"]["position"]
        self._state = (position["x"], position["z"], yaw, tilt)
        self._picture = np.array(event.frame, np.uint8)

    def _act(self, action):
        size = {"moveMagnitude": STEP} if action in WAYS else {
            "degrees": TURN if action.startswith("rotate") else TILT}
        event = self._call("step", action=CALLS[action], **size)
        self._succeeded = bool(event.metadata["lastActionSuccess"])
        after = moved(self._state, action) if self._succeeded else self._state
        self._see(event, *after[2:])
        reached = self._result(self._state) is True
        return 10.0 * reached, reached

    def _frame(self):
        return self._picture.copy()

    def _next(self, state, action):
        return moved(state, action)

    def _where(self):
        return self._side(), self._range()

    def _plan(self, start):
        """Level the head, turn to the target, walk straight; first aside if the last action failed.
        """
        plan, state = self._level_head(start[3]), (*start[:3], 0)
        if self._succeeded is False:
            plan += [("moveleft", "moveright")[self._turn % 2]] * (1 + self._turn % 3)
        while abs(bearing(state, self._goal)) > 45 and not self._result(state):
            side = "rotateright" if bearing(state, self._goal) > 0 else "rotateleft"
            plan.append(side)
            state = moved(state, side)
        while not self._result(state):
            plan.append(min(WAYS, key=lambda way: distance(moved(state, way), self._goal)))
            state = moved(state, plan[-1])
        return plan

    def close(self):
        """Stop the engine."""
        if self._controller is not None:
            self._controller.stop()
        self._controller, self._over = None, True
