"""The two simulators of the open world and their pictures: Crafter's map and a crafting window.

Nothing here knows of replies, episodes or instructions: that is openworld.py. Cells are (x, y), as
Crafter has them: x to the right, y down. Frames are [y, x, rgb].

What Crafter 1.8.3 does by itself and does not do here:
- iterate over sets of objects in the order of their addresses: the same seed then plays differently
  in each process. Here the sets keep the order in which their objects came;
- draw the noise of the night from the world's generator: looking then changes the future. Here it
  is drawn from numbers that the caller gives, and looking changes nothing;
- look around a cell at the left or upper edge of the map through an empty window, so that nothing
  can be made at a table there. Here the window ends at the edge.
"""

import hashlib
import pickle
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
from PIL import Image, ImageDraw

try:
    import crafter
    from crafter import constants, engine, objects, worldgen
except ImportError as error:
    raise ImportError("the open worlds need Crafter: pip install crafter==1.8.3") from error

WIDE, HIGH, ROWS = 9, 7, 9  # cells of the frame: WIDE x HIGH of the world, ROWS with the inventory
HERE = (WIDE // 2, HIGH // 2)  # where the player stands in the view
SIDES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NIGHT = 180  # the step of Crafter's 300-step day at which a task by night starts
SAFE = 6  # steps around the start without zombies and skeletons but those that a task summons


def draw(*parts) -> int:
    """63 bits that depend on the parts and nothing else: neither process nor machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def flood(sources, free: set, limit: int = 1000) -> dict:
    """Cells -> steps to the nearest source, over free cells alone; sources themselves have 0."""
    steps = dict.fromkeys(sources, 0)
    queue = deque(steps)
    while queue:
        x, y = at = queue.popleft()
        if steps[at] < limit:
            for dx, dy in SIDES.values():
                to = (x + dx, y + dy)
                if to in free and to not in steps:
                    steps[to] = steps[at] + 1
                    queue.append(to)
    return steps


def touch(a, b) -> bool:
    """Whether two cells are the same or neighbours, corners included."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 1


# ------------------------------------------------------------------------------------ Crafter's map


class Ordered(dict):
    """A set that iterates in the order of arrival."""

    def add(self, item):
        self[item] = None

    def remove(self, item):
        del self[item]


class World(engine.World):
    """Crafter's world with the order and the edges that the module's text promises."""

    def reset(self, seed=None):
        super().reset(seed)
        self._chunks = defaultdict(Ordered)

    def nearby(self, pos, distance):
        x, y = (slice(max(at - distance, 0), at + distance + 1) for at in pos)
        names = tuple(self._mat_names[i] for i in sorted(set(self._mat_map[x, y].flat)))
        return names, {self._objects[i] for i in self._obj_map[x, y].flat if i}


class Sim(crafter.Env):
    """A Crafter world without its renderer: the rules are inherited, the rest is left out."""

    def __init__(self, area: int, seed: int):
        self.born = seed
        self._view, self._length, self._reward = (WIDE, ROWS), None, False
        self._world = World((area, area), constants.materials, (12, 12))
        self._world.reset(seed=seed)
        self._step, self._unlocked = 0, set()
        self._update_time()
        self._player = objects.Player(self._world, (area // 2, area // 2))
        self._last_health = self._player.health
        self._world.add(self._player)
        worldgen.generate_world(self._world, self._player)

    def _obs(self):  # crafter.Env.step calls it
        return None

    def _sem_view(self):  # this one too: the whole map, which nobody needs
        return None

    @property
    def player(self):
        return self._player

    def free(self) -> set:
        """The cells that can be walked and hold no object."""
        ids = [self._world._mat_ids[name] for name in constants.walkable]
        walkable = np.isin(self._world._mat_map, ids) & (self._world._obj_map == 0)
        return set(map(tuple, np.argwhere(walkable).tolist()))

    def look(self) -> tuple[list, list]:
        """What the map part of the frame shows: ground and things, both [WIDE][HIGH].

        ground: material, None beyond the edge of the world. things: the texture of the object that
        stands there, or None.
        """
        world, (px, py) = self._world, self._player.pos.tolist()
        left, top = px - HERE[0], py - HERE[1]
        x, y = max(left, 0), max(top, 0)
        ground = [[None] * HIGH for _ in range(WIDE)]
        things = [[None] * HIGH for _ in range(WIDE)]
        window = slice(x, left + WIDE), slice(y, top + HIGH)
        rows = zip(world._mat_map[window].tolist(), world._obj_map[window].tolist())
        for i, (materials, indices) in enumerate(rows, x - left):
            for j, (material, index) in enumerate(zip(materials, indices), y - top):
                ground[i][j] = world._mat_names[material]
                if index:
                    things[i][j] = world._objects[index].texture
        return ground, things

    def frame(self, seen, unit: int, side: int, key: int) -> np.ndarray:
        """uint8 [side, side, 3] of what `look` saw, cells of `unit` px; key: of night's noise."""
        (ground, things), asleep, light = seen, self._player.sleeping, float(self._world.daylight)
        dark = light < 0.5  # only then there is noise: before, shading can be done tile by tile
        shade = None if dark else light
        tiles = [[map_tile(ground[x][y], things[x][y], unit, shade, asleep) for x in range(WIDE)]
                 for y in range(HIGH)]
        items = [item_tile(*item, unit) for item in self._player.inventory.items()]
        items += [item_tile(None, 0, unit)] * (2 * WIDE - len(items))
        frame = mosaic([*tiles, items[:WIDE], items[WIDE:]])
        if dark:
            noise = np.random.default_rng((key, self._step))
            frame[: HIGH * unit] = night(frame[: HIGH * unit], light, asleep, noise)
        return framed(frame, side)

    # Where an episode starts

    def begin(self, task, rng) -> bool:
        """Put the player, and what is summoned, where the task says; False: there is no place."""
        free, (low, high) = self.free(), task.distance
        starts = free
        if task.target and not task.summon:
            there = self._world._mat_map == self._world._mat_ids[task.target]
            steps = flood(map(tuple, np.argwhere(there).tolist()), free, high)
            starts = {at for at, n in steps.items() if low <= n and at in free}
        for start in rng.permutation(sorted(starts))[:50].tolist():
            places = self._places(task, tuple(start), free, rng)
            if places is not None:
                break
        else:
            return False
        player, world = self._player, self._world
        world.move(player, start)
        player.facing = list(SIDES.values())[rng.integers(4)]
        player.inventory.update(task.inventory)
        for mob in world.objects:
            hunts = isinstance(mob, (objects.Zombie, objects.Skeleton))
            if hunts and player.distance(mob) <= SAFE:
                world.remove(mob)
        for name, at in zip(task.summon, places):
            self._summon(name, at)
        self._step = NIGHT if task.night else 0
        self._update_time()
        return True

    def _places(self, task, start, free, rng):
        """Cells for what is summoned: the first in view and as far as the task says, others next to
        it. None: there are none, or the start is a nook."""
        view = {at for at in free if abs(at[0] - start[0]) <= HERE[0]
                and abs(at[1] - start[1]) <= HERE[1]}
        steps, chosen = flood([start], view), []
        if len(steps) < 12:
            return None
        for _ in task.summon:
            fits = sorted(
                at for at, n in steps.items() if n and at not in chosen
                and (touch(at, chosen[0]) if chosen else task.distance[0] <= n <= task.distance[1])
            )
            if not fits:
                return None
            chosen.append(fits[rng.integers(len(fits))])
        if len(chosen) > 1:  # there must be a cell from where to use them all
            reached = flood([start], view.difference(chosen))
            if not any(all(touch(at, place) for place in chosen) for at in reached):
                return None
        return chosen

    def _summon(self, name, at):
        world = self._world
        if name in constants.materials:
            world[at] = name
        elif name == "plant-ripe":
            world[at] = "grass"
            world.add(objects.Plant(world, at))
            world[at][1].grown = 301  # ripe above 300
        elif name == "cow":
            world.add(objects.Cow(world, at))
        else:
            mob = {"zombie": objects.Zombie, "skeleton": objects.Skeleton}[name]
            world.add(mob(world, at, self._player))

    def teleport(self, away, rng) -> bool:
        """Move the player 6 to 10 steps, to a cell where `away()` is true; False: there is none."""
        start, free = tuple(self._player.pos.tolist()), self.free()
        steps = flood([start], free, 10)
        for at in rng.permutation(sorted(at for at, n in steps.items() if n >= 6)).tolist():
            self._world.move(self._player, at)
            if away():
                return True
        if tuple(self._player.pos.tolist()) != start:
            self._world.move(self._player, start)
        return False


@lru_cache(maxsize=1024)  # 13 kB each at area 32, 40 kB at 64
def generated(area: int, seed: int) -> bytes:
    """A pickled Sim: a world takes .2 s (area 32) to .8 s (64) to make, and 1 ms to unpickle."""
    return pickle.dumps(Sim(area, seed), pickle.HIGHEST_PROTOCOL)


# --------------------------------------------------------------------------------------- pictures


@lru_cache
def textures() -> engine.Textures:
    """Crafter's, and a stick."""
    found = engine.Textures(constants.root / "assets")
    stick = Image.new("RGBA", (16, 16))
    ImageDraw.Draw(stick).line((3, 12, 12, 3), "#5a3d1e", 4)
    ImageDraw.Draw(stick).line((3, 12, 12, 3), "#a5773f", 2)
    found._originals["stick"] = np.array(stick).transpose(1, 0, 2)
    return found


@lru_cache
def shading() -> engine.LocalView:
    """Crafter's own, without a world to draw noise from."""
    return engine.LocalView(SimpleNamespace(area=(1, 1)), None, (WIDE, HIGH))


@lru_cache(maxsize=8192)  # 19 MB at 252 px; a day has 300 shades of each tile
def map_tile(ground, thing, unit: int, daylight, asleep: bool) -> np.ndarray:
    """A cell of the map, uint8 [unit, unit, 3]; daylight None: not shaded yet."""
    tile = np.full((unit, unit, 3), 127, np.uint8)
    if ground is not None:
        engine._draw(tile, (0, 0), textures().get(ground, (unit, unit)))
    if thing is not None:
        engine._draw_alpha(tile, (0, 0), textures().get(thing, (unit, unit)))
    if daylight is not None:
        tile = shading()._light(tile, daylight)
        tile = (shading()._sleep(tile) if asleep else tile).astype(np.uint8)
    return np.ascontiguousarray(tile.transpose(1, 0, 2))


def night(part, daylight: float, asleep: bool, rng) -> np.ndarray:
    """Crafter's night on uint8 [h, w, 3], in float32 and so within 2 levels of it for equal noise.

    Grey noise, the stronger the darker and the further from the player; then pale and blue.
    """
    height, width = part.shape[:2]
    noise = 32 + 95 * rng.random((height, width), np.float32)
    strength = np.float32(2 * (0.5 - daylight)) * vignette(height, width)
    day = part.astype(np.float32)
    pale = day + strength[..., None] * (noise[..., None] - day)
    grey = pale @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = 0.2 * pale + (0.3 * grey)[..., None] + np.array([0, 8, 32], np.float32)
    pale = np.float32(daylight) * day + np.float32(1 - daylight) * pale
    if asleep:
        return shading()._sleep(pale).astype(np.uint8)
    return pale.astype(np.uint8)


@lru_cache
def vignette(height: int, width: int) -> np.ndarray:
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)
    return (1 - np.exp(-2 * (x**2 + y**2))).astype(np.float32)


@lru_cache(maxsize=4096)
def item_tile(item, amount: int, unit: int, ground=(0, 0, 0)) -> np.ndarray:
    """A cell of the inventory: the item and how many, uint8 [unit, unit, 3]."""
    tile = np.full((unit, unit, 3), ground, np.uint8)
    if amount > 0:
        number = str(amount) if amount < 10 else "unknown"
        for name, start, size in ((item, 0.1, 0.8), (number, 0.4, 0.6)):
            picture = textures().get(name, (size * unit, size * unit))
            engine._draw_alpha(tile, (int(start * unit), int(start * unit)), picture)
    return np.ascontiguousarray(tile.transpose(1, 0, 2))


def mosaic(rows) -> np.ndarray:
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def marked(frame, unit: int) -> np.ndarray:
    """A copy where the upper edge of each cell shows where it is: nine places, one of them white,
    in the first line for the column, in the second for the row."""
    edges, white = marks(len(frame), unit)
    frame = frame.copy()
    frame[edges] = white
    return frame


@lru_cache(maxsize=8)
def marks(side: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Which px of a frame are marks, bool [side, side], and their colour, uint8 [marks, 1]."""
    edges, white = np.zeros((2, side, side), bool)
    border, width = (side - ROWS * unit) // 2, max(unit // WIDE, 1)  # px a mark
    for row in range(ROWS):
        for column in range(WIDE):
            y, x = border + row * unit, border + column * unit
            for line, at in ((0, column), (1, row)):
                upper = y + line * width
                edges[upper : upper + width, x : x + unit] = True
                right = x + min((at + 1) * width, unit)  # small cells have no room for all nine
                white[upper : upper + width, x + at * width : right] = True
    return edges, 255 * white[edges][:, None].astype(np.uint8)


def framed(picture, side: int) -> np.ndarray:
    """Centred in a black square, where side is no multiple of the cells."""
    border = side - len(picture)
    if border == 0:
        return picture
    frame = np.zeros((side, side, 3), np.uint8)
    start = border // 2
    frame[start : start + len(picture), start : start + len(picture)] = picture
    return frame


# -------------------------------------------------------------------------------- crafting window


SHAPES = {  # rows of a recipe: M the material, / a stick
    "sword": ("M", "M", "/"),
    "pickaxe": ("MMM", " / ", " / "),
    "table": ("MM", "MM"),
    "furnace": ("MM", "MM"),
    "fence": ("M/M", "M/M"),
}
RECIPES = {"table": ("table", "wood"), "furnace": ("furnace", "stone"), "fence": ("fence", "wood")}
RECIPES |= {f"{material}_{shape}": (shape, material)  # what comes out: (shape, material)
            for shape in ("sword", "pickaxe") for material in ("wood", "stone", "iron")}
ITEMS = ("wood", "stone", "iron", "stick", "coal", "diamond", "sapling", "leaves", "food", "drink")
CRAFT = [(x, y) for y in (4, 5, 6) for x in (3, 4, 5)]  # the 3 x 3 slots
BAG = [(x, y) for y in (7, 8) for x in range(WIDE)]  # the inventory, where Crafter draws its own
HAND, OUT, TOP = (1, 5), (7, 5), 4  # what is held; what would come out; the cursor's highest row


@lru_cache(maxsize=None)
def pattern(product: str) -> dict:
    """A recipe as {(column, row): item}, from the top left."""
    shape, material = RECIPES[product]
    return {(x, y): material if mark == "M" else "stick"
            for y, row in enumerate(SHAPES[shape]) for x, mark in enumerate(row) if mark != " "}


@dataclass
class Bench:
    """The window: slots {(x, y): (item, amount)}, the cursor, what the hand holds, what was made.

    A slot of the 3 x 3 holds one item at most.
    """

    slots: dict
    cursor: tuple[int, int]
    hand: tuple[str, int] | None = None
    made: dict = field(default_factory=lambda: defaultdict(int))

    def product(self) -> str | None:
        """What the 3 x 3 slots make, wherever in them the recipe lies."""
        filled = [at for at in CRAFT if at in self.slots]
        if not filled:
            return None
        left, top = (min(at[axis] for at in filled) for axis in (0, 1))
        laid = {(x - left, y - top): self.slots[x, y][0] for x, y in filled}
        return next((product for product in RECIPES if pattern(product) == laid), None)

    def act(self, action: str):
        """Execute left, right, up, down, take, put or craft; what cannot be done does nothing."""
        at, slots, hand = self.cursor, self.slots, self.hand
        if action in SIDES:
            dx, dy = SIDES[action]
            self.cursor = (min(max(at[0] + dx, 0), WIDE - 1), min(max(at[1] + dy, TOP), ROWS - 1))
        elif action == "take" and hand is None:
            self.hand = slots.pop(at, None)
        elif action == "put" and hand is not None:
            item, amount = hand
            if at in CRAFT and at not in slots:
                slots[at] = (item, 1)
                self.hand = (item, amount - 1) if amount > 1 else None
            elif at in BAG and slots.get(at, hand)[0] == item:
                slots[at] = (item, amount + (slots[at][1] if at in slots else 0))
                self.hand = None
        elif action == "craft" and at == OUT and (product := self.product()):
            for used in CRAFT:
                slots.pop(used, None)
            self.made[f"craft_{product}"] += 1
            slots[next(place for place in BAG if place not in slots)] = (product, 1)

    def frame(self, unit: int, side: int) -> np.ndarray:
        """uint8 [side, side, 3], in cells of `unit` px."""
        product = self.product()
        shown = self.slots | {HAND: self.hand or (None, 0), OUT: (product, int(bool(product)))}
        kinds = dict.fromkeys(CRAFT + BAG, "slot") | {HAND: "hand", OUT: "out"}
        return framed(mosaic(
            [slot_tile(kinds.get((x, y), "window"), *shown.get((x, y), (None, 0)),
                       (x, y) == self.cursor, unit) for x in range(WIDE)] for y in range(ROWS)
        ), side)


@lru_cache(maxsize=4096)
def slot_tile(kind: str, item, amount: int, cursor: bool, unit: int) -> np.ndarray:
    """A cell of the window, uint8 [unit, unit, 3]: empty or filled slot, or the window itself."""
    ground = {"window": (46, 46, 52), "slot": (92, 92, 100), "hand": (60, 70, 120),
              "out": (60, 110, 60)}[kind]
    tile = item_tile(item, amount, unit, ground).copy()
    line = max(1, unit // 14)
    if cursor or kind != "window":
        edge = (255, 220, 0) if cursor else (24, 24, 28)
        tile[:line] = tile[-line:] = tile[:, :line] = tile[:, -line:] = edge
    return tile
