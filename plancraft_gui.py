"""Minecraft's crafting window, through the optional package plancraft (0.4.9, MIT).

The same kind of work as openworld.CraftingGrid, with Minecraft's own recipes, items and pictures: a
reply moves or smelts a stack, success is the wanted item in the inventory. Not in requirements.txt:
the package brings 600 MB of others. `make_env("Plancraft")` finds it where it is installed.

What plancraft does by itself and does not do here: it plays on the example's own dicts, so that a
second episode starts where the first one ended; it executes what it finds anywhere in a reply.
"""

import copy
import re
import string

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text

from envs import TurnEnv, check_option

try:
    from plancraft.environment.actions import MoveAction, SmeltAction
    from plancraft.environment.env import PlancraftEnvironment
    from plancraft.environment.planner import get_subplans
    from plancraft.simple import get_plancraft_examples
except ImportError as error:
    raise ImportError("Plancraft's window needs: pip install plancraft==0.4.9") from error

SLOT = r"\[(0|[ABC][123]|I(?:[1-9]|[12]\d|3[0-6]))\]"
REPLY = re.compile(
    rf"\s*(move|smelt): from {SLOT} to {SLOT} with quantity (\d{{1,2}})\s*", re.ASCII
)


class Plancraft(TurnEnv):
    """Craft a given item. Reply: "move: from [I17] to [A1] with quantity 1", or smelt.

    split: "train", or "eval" (plancraft's val examples). tasks: "seen", or "unseen" for recipes
    that no train example wants (eval only), or "all". difficulty: "easy", "medium", "hard", "all".
    horizon: replies an episode. large: 24 x 26 visual tokens, else 6 x 7. text_state: the text also
    lists the inventory. Impossible examples are left out. Reward: 1 on success, else 0.
    """

    actions = ("move", "smelt")
    options = {"horizon": (30, 1, 1000), "large": (False, False, True),
               "text_state": (False, False, True)}
    image_size, side = None, 196  # the frame is not square: see observation_space

    def __init__(self, *, tasks: str = "seen", difficulty: str = "easy", **options):
        super().__init__(**options)
        self._examples = [
            example for example in get_plancraft_examples({"eval": "val"}.get(self.split, "train"))
            if not example.impossible
            and tasks in ("all", "unseen" if example.unseen_in_train else "seen")
            and difficulty in ("all", example.complexity_split)
        ]
        if not self._examples:
            raise ValueError(
                f"tasks={tasks!r}, difficulty={difficulty!r} leave no example of split "
                f"{self.split!r}; tasks: seen, unseen (eval only), all; difficulty: easy, medium, "
                "hard, all"
            )
        self._game = PlancraftEnvironment(resolution="high" if self.large else "low")
        size = (672, 728, 3) if self.large else (168, 196, 3)
        self.observation_space = Dict(
            image=Box(0, 255, size, np.uint8),
            text=Text(4000, min_length=0, charset=string.printable),
        )

    @property
    def system_prompt(self) -> str:
        return ("You craft in Minecraft's window. Slots: [0] is the output, [A1] to [C3] the grid, "
                "rows A to C, [I1] to [I36] the inventory. Reply: move: from [I17] to [A1] with "
                "quantity 1, or smelt: from [I17] to [I20] with quantity 1")

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an example drawn from the seed -> observation, info as of `step`."""
        gymnasium.Env.reset(self, seed=seed)
        index = int(self.np_random.integers(len(self._examples)))
        self.example = copy.deepcopy(self._examples[index])  # the game writes into its dicts
        self._game.reset(self.example.slotted_inventory)
        self._state, self._turn, self._over = self._game.state, 0, False
        return self._observe(""), self._info(True)

    def step(self, reply: str):
        """Play one reply -> observation, reward, terminated, truncated, info.

        info: success, valid (a reply of the format, within 1 to 64 items and into another slot than
        [0] or its own), turn, target, distractors, difficulty. Moves that the rules do not allow do
        nothing.
        """
        self._check_running()
        action = self._read(reply)
        if action is not None:
            self._game.step(action)
        self._turn += 1
        info = self._info(action is not None)
        truncated = not info["success"] and self._turn >= self.horizon
        self._over = info["success"] or truncated
        observation = self._observe("" if info["valid"] else "Invalid reply. ")
        return observation, float(info["success"]), info["success"], truncated, info

    def _read(self, reply):
        if not isinstance(reply, str):
            raise TypeError(f"a reply must be a str, not {type(reply).__name__}")
        match = REPLY.fullmatch(reply)
        if match is None:
            return None
        verb, start, end, quantity = match.groups()
        if end in ("0", start) or not 1 <= int(quantity) <= 64 or (verb, start) == ("smelt", "0"):
            return None
        kind = MoveAction if verb == "move" else SmeltAction
        start, end = (0 if slot == "0" else f"[{slot}]" for slot in (start, end))
        return kind(slot_from=start, slot_to=end, quantity=int(quantity))

    def _info(self, valid):
        held = {item["type"] for slot, item in self._game.state.items() if slot != 0}
        return {"success": self.example.target in held, "valid": valid, "turn": self._turn,
                "target": self.example.target, "distractors": self.example.num_distractors,
                "difficulty": self.example.complexity_split}

    def _observe(self, notice):
        text = f"{notice}Craft: {self.example.target.replace('_', ' ')}."
        if self.text_state:
            for slot, item in sorted(self._game.state.items()):
                text += f"\n{slot_name(slot)} {item['quantity']} {item['type'].replace('_', ' ')}"
        return {"image": self._frame(), "text": text}

    def _frame(self):
        """Plancraft's picture, black below and right of it up to whole visual tokens."""
        picture, frame = self._game.step()["image"], np.zeros(
            self.observation_space["image"].shape, np.uint8)
        frame[: picture.shape[0], : picture.shape[1]] = picture
        return frame

    def _plan(self, state):
        """Plancraft's planner, from here: replies, [] where nothing leads there."""
        seen = {"inventory": copy.deepcopy(self._game.state), "target": self.example.target}
        plan = [reply for part in get_subplans(seen)[0] for reply in part]
        return plan if all(map(REPLY.fullmatch, plan)) else []

    def expert_reply(self, noise: float = 0.0) -> str:
        """The planner's next reply; with probability `noise`, or without a plan, a random move of a
        stack that is there."""
        self._check_running()
        check_option("noise", noise, 0.0, 1.0)
        plan = self._plan(self._state) if self.np_random.random() >= noise else []
        if plan:
            return plan[0]
        start = list(self._game.state)[self.np_random.integers(len(self._game.state))]
        ends = [slot for slot in range(1, 46) if slot != start]
        end = ends[self.np_random.integers(len(ends))]
        return f"move: from {slot_name(start)} to {slot_name(end)} with quantity 1"


def slot_name(slot: int) -> str:
    """0 -> [0], 1..9 -> [A1]..[C3], 10..45 -> [I1]..[I36]."""
    if slot == 0:
        return "[0]"
    return f"[{'ABC'[(slot - 1) // 3]}{(slot - 1) % 3 + 1}]" if slot < 10 else f"[I{slot - 9}]"
