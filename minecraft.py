"""Minecraft through MineStudio's simulator, as one more environment that speaks text or tokens.

`Minecraft` is a thin adapter: it builds the simulator with the set-up of a `Task`, translates
replies to its actions, sees success in its event counters and ends the episode. Two codecs:
"tokens", the reserved vocabulary of JARVIS-VLA (in Qwen2-VL's ids), and "text", lines such as
"Action: move(12, -4) press(w, space) click(left)" as in OpenHA.

It has NOT been run against the engine, which wants Java 8 and a download: it is written against
the source of MineStudio 1.1.6 and tested with a fake simulator that keeps its contract:
- step() empties the action dict it is given and fills it anew, so it gets a copy;
- counters in info (mine_block, kill_entity, craft_item, pickup, ...) run on for ever, in dicts that
  are written in place, so what counts is the difference to the numbers at the reset;
- the end of the engine's episode sets both terminated and truncated; a reward, a horizon or success
  of a task it does not know. Nothing but the world is fixed by the seed.

Not recorded in our sources, so chosen here: the names of keys in the text codec; that the camera's
flag is written as a token. The tokens codec writes the inventory token, which theirs only reads.
"""

import copy
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text
from PIL import Image

INSTALL = (
    "Minecraft needs MineStudio in a virtual environment of its own (it pins old numpy and torch): "
    "pip install minestudio==1.1.6, a Java 8 JDK, xvfb, and once its engine: "
    "python -m minestudio.simulator.entry -y"
)


# ---------------------------------------------------------------------------------------- actions

# An action is two codes, (buttons, camera): one of 8641 and one of 441.
BEGIN, END, INVENTORY_TOKEN = 151835, 151836, 151834
GROUPS = (  # (token of "none", what the tokens after it press), the most significant first
    (151837, tuple(f"hotbar.{n}" for n in range(1, 10))),
    (151847, ("forward", "back")),
    (151850, ("left", "right")),
    (151853, ("sprint", "sneak")),
    (151856, ("use",)),
    (151858, ("drop",)),
    (151860, ("attack",)),
    (151862, ("jump",)),
    (151864, ("camera",)),  # not a key: the camera moves
)
SIZES = tuple(1 + len(keys) for _, keys in GROUPS)  # 10 3 3 3 2 2 2 2 2
INVENTORY = int(np.prod(SIZES))  # 8640, beyond all combinations: opens it and excludes the rest
KEYS = tuple(key for _, keys in GROUPS[:-1] for key in keys) + ("inventory",)
BINS, MU, MAX_DEGREES = 21, 20.0, 10.0  # MineStudio's default has 11 bins and mu 10
PITCH, YAW = 151866, 151887  # tokens of the first bin of each axis
CENTRE = BINS * BINS // 2  # 220: the camera stands still
NOOP = (0, CENTRE)


def degrees_of(bins) -> np.ndarray:
    """Centres of camera bins 0..20, mu-law: 10 sign(v) (21^|v| - 1) / 20 with v = bin / 10 - 1."""
    v = np.asarray(bins) / (BINS // 2) - 1
    return MAX_DEGREES * np.sign(v) * ((1 + MU) ** np.abs(v) - 1) / MU


def bin_of(degrees) -> np.ndarray:
    """The inverse, rounded; beyond 10 degrees is 10."""
    x = np.clip(np.asarray(degrees) / MAX_DEGREES, -1, 1)
    v = np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU)
    return np.round((v + 1) * (BINS // 2)).astype(int)


def keys_to_codes(keys: dict) -> tuple[int, int]:
    """{key: 0 or 1, "camera": (pitch, yaw) in degrees} -> (buttons, camera).

    Of keys that exclude each other, both of forward and back or of left and right cancel out, else
    the later one counts; inventory excludes all.
    """
    if keys.get("inventory"):
        return INVENTORY, CENTRE
    pitch, yaw = bin_of(keys.get("camera", (0.0, 0.0))).tolist()
    camera = pitch * BINS + yaw
    choices = []
    for _, names in GROUPS[:-1]:
        pressed = [i for i, name in enumerate(names, 1) if keys.get(name)]
        cancel = len(pressed) == 2 and names[0] in ("forward", "left")
        choices.append(pressed[-1] if pressed and not cancel else 0)
    return int(np.ravel_multi_index((*choices, int(camera != CENTRE)), SIZES)), camera


def codes_to_keys(buttons: int, camera: int) -> dict:
    """The inverse: all KEYS with 0 or 1, and camera, which moves if its flag is set."""
    keys = dict.fromkeys(KEYS, 0) | {"camera": np.zeros(2)}
    if buttons == INVENTORY:
        return keys | {"inventory": 1}
    *choices, moves = np.unravel_index(buttons, SIZES)
    for choice, (_, names) in zip(choices, GROUPS):
        if choice:
            keys[names[choice - 1]] = 1
    if moves:
        keys["camera"] = degrees_of(divmod(camera, BINS))
    return keys


def encode_tokens(buttons: int, camera: int) -> list[int]:
    """BEGIN, a token for each group that is not none, both axes of the camera, END."""
    if not (0 <= buttons <= INVENTORY and 0 <= camera < BINS**2):
        raise ValueError(f"action ({buttons}, {camera}) is not in 0..{INVENTORY}, 0..{BINS**2 - 1}")
    if buttons == INVENTORY:
        pressed = [INVENTORY_TOKEN]
    else:
        pressed = [first + int(choice) for choice, (first, _)
                   in zip(np.unravel_index(buttons, SIZES), GROUPS) if choice]
    pitch, yaw = divmod(camera, BINS)
    return [BEGIN, *pressed, PITCH + pitch, YAW + yaw, END]


def decode_tokens(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Every BEGIN..END is an action (buttons, camera); what is not known in it is skipped.

    Of one group the last token counts. The camera's flag is what the camera says. [] without one.
    """
    actions, span = [], None
    for token in ids:
        if token == BEGIN:
            span = []
        elif token == END and span is not None:
            actions.append(_decode(span))
            span = None
        elif span is not None:
            span.append(int(token))
    return actions


def _decode(span):
    choices, pitch, yaw = [0] * len(GROUPS), BINS // 2, BINS // 2
    for token in span:
        if token == INVENTORY_TOKEN:
            return INVENTORY, CENTRE
        for i, (first, names) in enumerate(GROUPS):
            if first <= token <= first + len(names):
                choices[i] = token - first
        if PITCH <= token < PITCH + BINS:
            pitch = token - PITCH
        if YAW <= token < YAW + BINS:
            yaw = token - YAW
    camera = pitch * BINS + yaw
    choices[-1] = int(camera != CENTRE)
    return int(np.ravel_multi_index(choices, SIZES)), camera


DEGREES_A_PIXEL = 360 / 2400
KEYBOARD = {"w": "forward", "s": "back", "a": "left", "d": "right", "space": "jump", "q": "drop",
            "shift": "sneak", "ctrl": "sprint", "e": "inventory"}
KEYBOARD |= {str(n): f"hotbar.{n}" for n in range(1, 10)}
CALL = re.compile(r"\s*(?:(move)\(\s*(-?\d{1,4})\s*,\s*(-?\d{1,4})\s*\)|(press)\(([a-z0-9, ]*)\)"
                  r"|(click)\((left|right)\)|(no_op)(?:\(\))?)(?:\s+and\b|\s*,)?", re.ASCII)


def decode_text(reply: str) -> dict | None:
    """The line after "Action:" -> keys as of codes_to_keys; None where it is not understood."""
    line = re.search(r"Action:([^\n]*)", reply)
    rest, keys = line[1].strip() if line else "", dict.fromkeys(KEYS, 0) | {"camera": np.zeros(2)}
    if not rest:
        return None
    while rest:
        call = CALL.match(rest)
        if call is None:
            return None
        if call[1]:  # dx turns (yaw), dy tilts (pitch)
            keys["camera"] = DEGREES_A_PIXEL * np.array([int(call[3]), int(call[2])])
        for name in call[5].split(",") if call[4] else ():
            if name.strip() not in KEYBOARD:
                return None
            keys[KEYBOARD[name.strip()]] = 1
        if call[6]:
            keys["attack" if call[7] == "left" else "use"] = 1
        rest = rest[call.end() :]
    return keys


def encode_text(keys: dict) -> str:
    """The line that means these keys; the camera to the nearest pixel."""
    dy, dx = np.round(np.asarray(keys["camera"]) / DEGREES_A_PIXEL).astype(int).tolist()
    pressed = [name for name, key in KEYBOARD.items() if keys.get(key)]
    calls = [f"move({dx}, {dy})"] if dx or dy else []
    calls += [f"press({', '.join(pressed)})"] if pressed else []
    calls += [f"click({side})" for side, key in (("left", "attack"), ("right", "use"))
              if keys.get(key)]
    return "Action: " + (" ".join(calls) or "no_op")


# ------------------------------------------------------------------------------------ environment


@dataclass(frozen=True)
class Task:
    """What to do, and how the episode starts: the fields that OpenHA's tasks have.

    Done when the counter `event` has risen by `times` over all `objects` together. commands: chat
    lines such as a teleport. inventory: {"slot", "type", "quantity"}; distraction: MineStudio's
    level (zero, one, easy, middle, hard, normal). mobs: {"name", "number", "range_x", "range_z"}.
    init_actions: lines of the text codec, played before the policy's turn.
    """

    name: str
    event: str
    objects: tuple[str, ...]
    times: int = 1
    description: str = ""
    seed: int = 0
    max_steps: int = 600
    biome: str | None = None
    commands: tuple[str, ...] = ()
    inventory: tuple[dict, ...] = ()
    distraction: str = "zero"
    mobs: tuple[dict, ...] = ()
    init_actions: tuple[str, ...] = ()


def minestudio_sim(task: Task, seed: int, action_type: str):
    """MineStudio's simulator with the task's set-up; ImportError or RuntimeError say what to do."""
    try:
        from minestudio.simulator import MinecraftSim, callbacks
        from minestudio.simulator.entry import CameraConfig
        from minestudio.utils import get_mine_studio_dir
    except ImportError as error:
        raise ImportError(f"{error}. {INSTALL}") from error
    jar = Path(get_mine_studio_dir()) / "engine" / "build" / "libs" / "mcprec-6.13.jar"
    if not jar.exists():  # it would ask on the terminal
        raise RuntimeError(f"the engine {jar} is missing. {INSTALL}")
    hooks = [callbacks.CommandsCallback(list(task.commands))] if task.commands else []
    if task.inventory or task.distraction != "zero":
        hooks.append(callbacks.InitInventoryCallback(list(task.inventory), task.distraction))
    if task.mobs:
        hooks.append(callbacks.SummonMobsCallback(list(task.mobs)))
    camera = CameraConfig(camera_binsize=1, camera_maxval=10, camera_mu=MU)
    return MinecraftSim(action_type=action_type, seed=seed, preferred_spawn_biome=task.biome,
                        callbacks=hooks, camera_config=camera)


class Minecraft(gymnasium.Env):
    """One task in one engine. Observation {"image": uint8 [364, 644, 3], "text": str}, the frame
    with 23 x 13 visual tokens and the instruction. Reward: 1 in the step that does the task.

    codec: "tokens", replies are lists of token ids; "text", they are strings. What is not
    understood is a step in which nothing is pressed. chunk: actions a reply, the rest is dropped.
    sim_factory(task, seed, action_type): builds the simulator, at the first reset and for each new
    seed; action_type is "agent" (codes) for tokens, "env" (keys) for text.
    """

    size = (364, 644)  # of 360 x 640, to multiples of 28 px

    def __init__(self, task: Task, *, codec: str = "tokens", chunk: int = 1,
                 sim_factory: Callable = minestudio_sim):
        if codec not in ("tokens", "text"):
            raise ValueError(f"codec={codec!r} must be 'tokens' or 'text'")
        if not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk={chunk!r} must be an int of 1 or more")
        if not task.objects or task.max_steps < 1 or task.times < 1:
            raise ValueError(f"{task} needs objects, and max_steps and times of 1 or more")
        self.task, self.codec, self.chunk = task, codec, chunk
        self._factory, self._sim, self._sim_seed, self._over = sim_factory, None, None, True
        self.observation_space = Dict(image=Box(0, 255, (*self.size, 3), np.uint8),
                                      text=Text(1000, min_length=0, charset=string.printable))
        self.action_space = (Text(4000, min_length=0, charset=string.printable) if codec == "text"
                             else Sequence(Discrete(YAW + BINS)))  # of token ids

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start anew -> observation, info as of `step`. seed: of the world (None: the task's); the
        engine is restarted for a new one, and draws positions of its own all the same."""
        super().reset(seed=seed)
        seed = self.task.seed if seed is None else seed
        if self._sim is None or seed != self._sim_seed:
            self.close()
            action_type = "agent" if self.codec == "tokens" else "env"
            self._sim, self._sim_seed = self._factory(self.task, seed, action_type), seed
        self._info = self._sim.reset()[1]
        for line in self.task.init_actions:
            keys = decode_text(line)
            if keys is None:
                raise ValueError(f"init_actions: {line!r} is not understood, see decode_text")
            self._info = self._sim.step(self._action(keys))[4]
        self._base, self._steps, self._over = self._counted(), 0, False
        return self._observe(), self._told(True, False)

    def _action(self, action) -> dict:
        """A dict of the simulator's, new each time: it is not the same after the step."""
        if self.codec == "text":
            return {key: np.array(value) for key, value in action.items()}
        buttons, camera = keys_to_codes(action) if isinstance(action, dict) else action
        return {"buttons": np.array([buttons]), "camera": np.array([camera])}

    def step(self, reply: str | Iterable[int]):
        """Play a reply -> observation, reward, terminated, truncated, info.

        info: a copy of the simulator's without pov, and success, valid (understood), count (of the
        event since the reset), steps, engine_done. terminated: success, or the engine's end;
        truncated: max_steps.
        """
        if self._over:
            raise RuntimeError("the episode is over or has not begun; call reset() first")
        if self.codec == "text":
            keys = decode_text(reply)
            actions = [] if keys is None else [keys]
        else:
            actions = decode_tokens(reply)
        noop = dict.fromkeys(KEYS, 0) | {"camera": np.zeros(2)} if self.codec == "text" else NOOP
        for action in actions[: self.chunk] or [noop]:
            _, _, ended, truncated, self._info = self._sim.step(self._action(action))
            self._steps += 1
            success, ended = self._counted() - self._base >= self.task.times, ended or truncated
            if success or ended or self._steps >= self.task.max_steps:
                break
        terminated = bool(success or ended)
        truncated = not terminated and self._steps >= self.task.max_steps
        self._over = terminated or truncated
        told = self._told(bool(actions), bool(ended))
        return self._observe(), float(success), terminated, truncated, told

    def _counted(self) -> float:
        counters = self._info.get(self.task.event) or {}
        return sum(float(np.asarray(counters.get(name, 0)).item()) for name in self.task.objects)

    def _told(self, valid, engine_done):
        count = self._counted() - self._base
        kept = {name: value for name, value in self._info.items() if name != "pov"}
        return copy.deepcopy(kept) | {"success": count >= self.task.times, "valid": valid,
                                      "count": count, "steps": self._steps,
                                      "engine_done": engine_done}

    def _observe(self):
        frame = Image.fromarray(np.asarray(self._info["pov"], np.uint8))
        image = np.array(frame.resize(self.size[::-1], Image.Resampling.BICUBIC))
        says = self.task.description or re.sub("[_:]", " ", self.task.name)
        return {"image": image, "text": f"{says}\nobservation:"}

    def close(self):
        if self._sim is not None:
            self._sim.close()
        self._sim, self._over = None, True
