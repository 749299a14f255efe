"""Street view (ViRL), played by text: follow written directions through photographed streets.

`ViRL` reads the published layout of `tianzhechu/SFTvsRL_Data` (a folder with `route_infos.json`,
`gps_pano_mapping.pkl`, `street_views/ID.jpg` and `ID.metadata.json`); without a folder it walks two
made-up cities in the same layout (city.py), one to train and one to evaluate. That data set could
not be had here: the reader is written from what is known of its layout.

An observation is four views (front, right / back, left) and a checklist of directions:
"Turn 2. You face east. [x] turn right to face east [ ] go forward to the next intersection, CAFE on
your left ...". As in the papers, the walk runs on rails: an action is executed only if it is the
next one of the route, and the directions tell which. So the text is enough to play it.

    python virl.py FOLDER     # reads every file of a data set, and writes the pickle as JSON

Differs from the paper:
- success is the right stop(), and pays 10 once (the paper's code: at every turn from 10 to 20 m
  before the end, and an episode that never stops is a success);
- "turn left to face north" is right at north too (the paper's code does not wrap angles around);
- the pickle may hold data only: one that asks for code is refused;
- no route of evaluation is one of training;
- 112 px by default (the paper: 645), drawn bilinearly at twice the size (the paper: bicubic).
"""

import ast
import json
import math
import pickle
import re
import string
import sys
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tyro
from einops import reduce
from gymnasium.spaces import Box, Dict, Text
from PIL import Image

from city import COMPASS, default_city
from envs import TurnEnv, check_option, parse_reply

TURNS = {f"turn_direction({word})": 45 * index for index, word in enumerate(COMPASS)}
SIDES = ("straight", "slightly right", "right", "sharp right", "around", "sharp left", "left",
         "slightly left")  # in steps of 45 degrees
NEAR, GOAL_NEAR, OFF = 10.0, 20.0, 45.0  # m, m at the destination, degrees: a keypoint is reached
SHORT = 5.0  # m: a leg no longer than this has no forward() on the rail
FAR = 50.0  # m: how far off the panorama of a place may be
CORRECT, KEYPOINT, SUCCESS = 0.8, 3.0, 10.0  # the papers' rewards
WRONG = "{} was wrong: it and what followed were not done. "


# ------------------------------------------------------------------------------------- the files


def metres(a, b) -> np.ndarray:
    """Great-circle distance between (latitude, longitude) in degrees; [..., 2] each -> [...]."""
    (north, east), (north_b, east_b) = (np.moveaxis(np.radians(p), -1, 0) for p in (a, b))
    chord = (np.sin((north_b - north) / 2) ** 2
             + np.cos(north) * np.cos(north_b) * np.sin((east_b - east) / 2) ** 2)
    return 2 * 6_371_000.0 * np.arcsin(np.sqrt(chord))


@dataclass(frozen=True)
class Route:
    """nodes: (latitude, longitude) of start, crossings, destination. headings: degrees, where each
    leg goes. landmarks: what is at the end of each leg, or "". first: degrees, or None: any."""

    nodes: tuple[tuple[float, float], ...]
    headings: tuple[int, ...]
    landmarks: tuple[str, ...]
    first: float | None


@dataclass(frozen=True)
class City:
    """routes: in the order of the file. codes: [n, 2] latitude and longitude of panoramas `panos`.
    """

    folder: Path
    routes: tuple[Route, ...]
    codes: np.ndarray
    panos: tuple[str, ...]

    def pano(self, place: tuple[float, float]) -> str:
        """The panorama nearest to a place. ValueError where none is within FAR."""
        gaps = metres(place, self.codes)
        if not gaps.min() <= FAR:
            raise ValueError(f"{self.folder} has no panorama within {FAR:.0f} m of {place}: the "
                             f"nearest is {gaps.min():.0f} m off")
        return self.panos[int(gaps.argmin())]


def load_json(path: Path):
    """ValueError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error


def number(value, low=-math.inf, high=math.inf) -> bool:
    """Is it a finite number, and within the bounds?"""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    return fits and math.isfinite(value) and low <= value <= high


def is_code(value) -> bool:
    """Is it [latitude, longitude]?"""
    return (isinstance(value, (list, tuple)) and len(value) == 2
            and number(value[0], -90, 90) and number(value[1], -180, 180))


def field(entry, name: str, fits, need: str, where: str):
    """entry["a"]["b"] for the name "a.b". ValueError says where, which field and what it must be.
    """
    value = entry
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not fits(value):
        raise ValueError(f"{where}: {name} must be {need}, not {value!r:.80}")
    return value


def read_route(entry, where: str) -> Route:
    """An entry of route_infos.json -> Route; ValueError as `field`.

    A leg is named by one {...} of milestone_info: its `to_next_intersection_heading` is where the
    leg goes and its `landmarks` what its end looks like; one more {...}, of the destination, may
    follow. Where `landmarks` is missing, route_results.landmark_list is used.
    """
    code = "[latitude, longitude]"
    start = field(entry, "start_place.relocated_geocode", is_code, code, where)
    first = field(entry, "init_heading", number, "a number of degrees", where)
    ends = field(entry, "route_results.geocode_list",
                 lambda v: isinstance(v, list) and len(v) > 0 and all(map(is_code, v)),
                 f"a list of {code}", where)
    names = field(entry, "route_results.landmark_list", lambda v: v is None or isinstance(v, list),
                  "a list", where) or []
    text = field(entry, "milestone_info", lambda v: isinstance(v, str), "a string", where)
    blocks = [read_block(block, f"{where}: milestone_info, {{...}} {index}")
              for index, block in enumerate(re.findall(r"\{[^{}]*\}", text))]
    if not len(ends) <= len(blocks) <= len(ends) + 1:
        raise ValueError(f"{where}: milestone_info has {len(blocks)} {{...}}; geocode_list has "
                         f"{len(ends)} places, each the end of a leg")
    headings, landmarks = [], []
    for index, block in enumerate(blocks[: len(ends)]):
        says = field(block, "to_next_intersection_heading", lambda v: isinstance(v, str) and (
            re.fullmatch(r"\s*-?\d+(\.\d+)?\s*\(([a-zA-Z -]+)\)\s*", v) is not None
        ), 'like "177 (south)"', f"{where}: milestone_info, {{...}} {index}")
        word = re.sub(r"[ -]", "", says[says.index("(") + 1 : says.index(")")]).lower()
        if word not in COMPASS:
            raise ValueError(f"{where}: milestone_info, {{...}} {index}: {word!r} in "
                             f"to_next_intersection_heading is none of {', '.join(COMPASS)}")
        headings.append(45 * COMPASS.index(word))
        landmark = block.get("landmarks") or (names[index] if index < len(names) else "")
        landmarks.append(plain(landmark))
    nodes = tuple(tuple(map(float, place)) for place in (start, *ends))
    return Route(nodes, tuple(headings), tuple(landmarks), float(first) % 360 if first else None)


def read_block(text: str, where: str) -> dict:
    """A {...} of milestone_info, written as JSON or as Python."""
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)  # literals alone: it runs nothing
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"{where} is neither JSON nor Python: {text!r:.80}") from error


def plain(landmark) -> str:
    """A name in ASCII and on one line, without brackets, which mark the checklist."""
    if isinstance(landmark, (list, tuple)):
        landmark = ", ".join(map(str, landmark))
    letters = unicodedata.normalize("NFKD", str(landmark or "")).encode("ascii", "ignore").decode()
    return " ".join(re.sub(r"[\[\]]", " ", letters).split())


class DataUnpickler(pickle.Unpickler):
    """Reads numbers, strings, tuples, lists and dicts. What else a pickle can name is code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and data needs none")


def read_mapping(folder: Path) -> dict:
    """{(latitude, longitude): panorama's id} from gps_pano_mapping.json if there, else .pkl.

    JSON: a list of [latitude, longitude, id]. No code of a pickle is run. ValueError names the
    file, and the entry.
    """
    path = folder / "gps_pano_mapping.json"
    if path.exists():
        content = load_json(path)
        pairs = content if isinstance(content, list) else [content]
        pairs = [(pair[:2], pair[2]) if isinstance(pair, list) and len(pair) == 3 else (None, pair)
                 for pair in pairs]
    else:
        path = folder / "gps_pano_mapping.pkl"
        try:
            with path.open("rb") as file:
                content = DataUnpickler(file).load()
        except Exception as error:  # whatever broken bytes make the unpickler raise
            raise ValueError(f"{path} is no pickle of plain data: {error!r}") from error
        pairs = list(content.items()) if isinstance(content, dict) else [(None, content)]
    if not pairs:
        raise ValueError(f"{path} names no panorama")
    for code, pano in pairs:
        if not is_code(code) or not isinstance(pano, str) or not re.fullmatch(r"[\w.-]+", pano):
            raise ValueError(f"{path}: each entry has a latitude, a longitude and the name of a "
                             f"file in street_views, unlike {code!r:.60}: {pano!r:.60}")
    return {tuple(map(float, code)): pano for code, pano in pairs}


@lru_cache(maxsize=8)
def read_city(folder: Path) -> City:
    """A data set; its pictures are read when they are needed. ValueError names file and field."""
    path = folder / "route_infos.json"
    if not path.exists():
        raise ValueError(f"{folder} has no route_infos.json; a data set is a folder with it, "
                         "gps_pano_mapping.pkl and street_views/")
    content = load_json(path)
    if (not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], list)
            or not content[0] or content[1] != len(content[0])):
        raise ValueError(f"{path} must be [[route, ...], number of routes], with at least one "
                         "route")
    routes = tuple(read_route(entry, f"{path}, route {index}")
                   for index, entry in enumerate(content[0]))
    mapping = read_mapping(folder)
    return City(folder, routes, np.array(list(mapping)), tuple(mapping.values()))


# -------------------------------------------------------------------------------------- the views


@lru_cache(maxsize=32)
def panorama(folder: Path, pano: str, width: int) -> tuple[np.ndarray, float]:
    """(uint8 [H, 2H, 3], no wider than `width`; how many degrees right of its left edge north is).

    ValueError names the file.
    """
    path = folder / "street_views" / f"{pano}.metadata.json"
    rotation = field(load_json(path), "rotation", number, "a number of degrees", str(path))
    path = folder / "street_views" / f"{pano}.jpg"
    try:
        with Image.open(path) as image:
            image.draft("RGB", (width, width // 2))  # JPEG: decode no more than is needed
            image = image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no picture that can be read: {error}") from error
    if abs(image.width - 2 * image.height) > 2:
        raise ValueError(f"{path} is {image.width} x {image.height} px; a panorama of all around "
                         "is twice as wide as high")
    if image.width > width:
        image = image.resize((width, width // 2), Image.Resampling.LANCZOS)
    return np.array(image), float(rotation)


@lru_cache(maxsize=8)
def rays(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Longitude and latitude in degrees, [side, side], of the pixels of a view 90 degrees wide."""
    at = (np.arange(side) + 0.5) / side * 2 - 1
    right, down = np.meshgrid(at, at)
    return np.degrees(np.arctan(right)), -np.degrees(np.arctan2(down, np.hypot(right, 1)))


def perspective(picture: np.ndarray, yaw: float, side: int) -> np.ndarray:
    """What a camera sees in an equirectangular panorama [H, W, 3]: uint8 [side, side, 3].

    yaw: degrees from the middle of the panorama to the right. 90 degrees wide and high, level; each
    pixel is the mean of 2 x 2 bilinear samples, which wrap around at the edges.
    """
    height, width, _ = picture.shape
    longitude, latitude = rays(2 * side)
    x = ((longitude + yaw) / 360 + 0.5) * width - 0.5
    y = ((0.5 - latitude / 180) * height - 0.5).clip(0, height - 1)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    dx, dy = (x - left)[..., None], (y - top)[..., None]
    columns = left % width, (left + 1) % width
    rows = top, np.minimum(top + 1, height - 1)
    upper, lower = (picture[row, columns[0]] * (1 - dx) + picture[row, columns[1]] * dx
                    for row in rows)
    view = upper * (1 - dy) + lower * dy
    return np.rint(reduce(view, "(y b) (x c) rgb -> y x rgb", "mean", b=2, c=2)).astype(np.uint8)


def four_views(folder: Path, pano: str, heading: float, side: int) -> np.ndarray:
    """Front and right above back and left, with a white gap: uint8 [side, side, 3].

    The gap is 5 px at the papers' 645 px, in proportion at others.
    """
    gap = max(round(5 * side / 645), 1)
    gap += (side - gap) % 2
    tile = (side - gap) // 2
    picture, rotation = panorama(folder, pano, 8 * tile)  # as fine as the samples, where it can be
    frame = np.full((side, side, 3), 255, np.uint8)
    for index, turn in enumerate((0, 90, 180, 270)):
        row, column = divmod(index, 2)
        y, x = row * (tile + gap), column * (tile + gap)
        view = perspective(picture, heading + turn - 180 + rotation, tile)
        frame[y : y + tile, x : x + tile] = view
    return frame


small_views = lru_cache(maxsize=1024)(four_views)


# ------------------------------------------------------------------------------------- the walk


def difference(a: float, b: float) -> float:
    """Degrees from heading a to heading b, -180 to 180; positive is clockwise."""
    return (b - a + 180) % 360 - 180


def facing(heading: float) -> str:
    """The word of the compass that is nearest: 350 -> "north"."""
    return COMPASS[round(heading / 45) % 8]


def directions(route: Route, heading: float) -> list[tuple[str, tuple, float, float]]:
    """(sentence, place, metres, heading) of each keypoint: there, so near and facing so it is done.

    heading: degrees, where one looks at the start.
    """
    steps, last = [], len(route.headings) - 1
    for leg, ahead in enumerate(route.headings):
        side = SIDES[round(difference(heading, ahead) / 45) % 8]
        turn = f"keep facing {facing(ahead)}" if side == "straight" else (
            f"turn {side} to face {facing(ahead)}")
        end = "the destination" if leg == last else "the next intersection"
        mark = f", {route.landmarks[leg]}" if route.landmarks[leg] else ""
        steps += [(turn, route.nodes[leg], NEAR, ahead),
                  (f"go forward to {end}{mark}", route.nodes[leg + 1],
                   GOAL_NEAR if leg == last else NEAR, ahead)]
        heading = ahead
    return steps


def rail(route: Route) -> list[tuple[str, tuple[float, float]]]:
    """(action, where it leads) of the whole way, the last one stop().

    Each leg: a turn, then forward() to its middle and forward() to its end; a leg of at most SHORT
    metres has no forward(), the next turn stands at its end.
    """
    way, actions = [], dict(zip(TURNS.values(), TURNS))
    for start, end, ahead in zip(route.nodes, route.nodes[1:], route.headings):
        way.append((actions[ahead], start))
        if metres(start, end) > SHORT:
            middle = tuple((a + b) / 2 for a, b in zip(start, end))
            way += [("forward()", middle), ("forward()", end)]
    return [*way, ("stop()", route.nodes[-1])]


class ViRL(TurnEnv):
    """Follow the directions of a route and stop at its end.

    folder: a data set in the published layout; "": a made-up city. eval_folder: another one, whose
    routes are all for evaluation (and not for training, should `folder` have them too); "": a
    quarter of folder's routes, by a hash, is for evaluation. A level is a route's number in its
    file. Reward: format_reward for each reply in the format, 0.8 for each action of the route, 3
    for each keypoint, 10 for stop() at the end of the route. A wrong action and those after it in
    the reply are not executed. State: how many actions of the route are done.
    ValueError names the file and the field that is wrong; of pictures when they are to be seen.
    """

    actions = ("forward()", *TURNS, "stop()")
    example = ("turn_direction(east)", "forward()", "forward()", "turn_direction(north)")
    rules = ("You walk through a city. Four views: front, right; below back, left. Do what the "
             "list says, then stop.")
    options = {name: TurnEnv.options[name] for name in ("max_turns", "max_actions", "image_size",
                                                        "format_reward")}
    options |= {"max_turns": (10, 1, 100), "max_actions": (10, 1, 100),
                "image_size": (112, 28, 2048),
                "folder": ("", "", ""), "eval_folder": ("", "", "")}  # paths: no bounds
    text_state = False
    side = 112

    def __init__(self, *, folder: str = "", eval_folder: str = "", **options):
        super().__init__(**options)
        for name, value in (("folder", folder), ("eval_folder", eval_folder)):
            if not isinstance(value, (str, Path)):
                raise ValueError(f"{name}={value!r} must be the path of a data set")
        if eval_folder and not folder:
            raise ValueError(f"eval_folder={eval_folder!r} needs folder=, the routes of training")
        self.folder, self.eval_folder = str(folder), str(eval_folder)
        paths = [folder, eval_folder] if folder else [default_city(1), default_city(2)]
        train, held_out = (read_city(Path(path)) if path else None for path in paths)
        self._cities = [city for city in (train, held_out) if city]
        self._city = held_out if held_out and self.split == "eval" else train
        if held_out is None:
            mine = [n for n, route in enumerate(train.routes)
                    if self._split_of(repr(route.nodes)) == self.split]
        else:
            taken = {route.nodes for route in held_out.routes} if self.split == "train" else ()
            mine = [n for n, r in enumerate(self._city.routes) if r.nodes not in taken]
        if not mine:
            raise ValueError(f"{self._city.folder} has no route of split {self.split!r}: it has "
                             f"{len(self._city.routes)} in all")
        self._mine = mine
        self.observation_space = Dict(
            image=Box(0, 255, (self.image_size,) * 2 + (3,), np.uint8),
            text=Text(20_000, min_length=0, charset=string.printable),
        )

    @property
    def texts(self) -> list[str]:
        """All that the world and its expert can say, in both splits: a model's vocabulary."""
        marks = sorted({mark for city in self._cities for r in city.routes for mark in r.landmarks})
        turns = [f"Turn {n + 1}." for n in range(self.max_turns + 1)]
        return [self.system_prompt, "Invalid reply. ", *map(WRONG.format, self.actions), *turns,
                *marks, *SIDES, *COMPASS, "You face keep facing turn to face [x] [ ] stop Done: -. "
                "go forward to the next intersection, to the destination, forward()",
                "facing " + " ".join(("go", *COMPASS, "forward", "stop"))]

    def _draw_level(self):
        return str(self._mine[self.np_random.integers(len(self._mine))])

    def _lasting(self, level):
        return level

    def _load(self, level):
        routes = self._city.routes
        if not re.fullmatch(r"\d{1,9}", level, re.ASCII) or int(level) >= len(routes):
            raise ValueError(f"level {level!r} must be a route's number, 0 to {len(routes) - 1}")
        route = routes[int(level)]
        self._first = float(self.np_random.integers(8) * 45 if route.first is None else route.first)
        self._rail, self._route = rail(route), route
        self._keypoints = directions(route, self._first)
        self._panos = [self._city.pano(place) for place in
                       (route.nodes[0], *(place for _, place in self._rail))]
        self._state, self._reached = 0, 0

    # The protocol

    def step(self, reply: str):
        """Play one turn -> observation, reward, terminated, truncated, info.

        info: as TurnEnv.step's, and keypoints (how many are reached) and wrong (the action that was
        refused, or None).
        """
        self._check_running()
        chosen = parse_reply(reply, self.actions, self.max_actions)
        bonus, done, wrong = 0.0 if chosen is None else self.format_reward, [], None
        reward, terminated = bonus, False
        for action in chosen or []:
            if action != self._rail[self._state][0]:
                wrong = action
                break
            gain, terminated = self._act(action)
            reward += gain
            done.append(action)
            if terminated:
                break
        self._turn += 1
        self._moves += len(done)
        truncated = not terminated and self._turn >= self.max_turns
        self._over = terminated or truncated
        info = {"success": terminated, "valid": chosen is not None, "actions": done,
                "format_reward": bonus, "turn": self._turn, "moves": self._moves,
                "keypoints": self._reached, "wrong": wrong}
        notice = "Invalid reply. " if chosen is None else WRONG.format(wrong) if wrong else ""
        return self._observe(notice), float(reward), terminated, truncated, info

    def _act(self, action):
        self._state += 1
        place, heading, before = self._rail[self._state - 1][1], self._heading(), self._reached
        while self._reached < len(self._keypoints):
            _, there, near, ahead = self._keypoints[self._reached]
            if metres(place, there) > near or abs(difference(heading, ahead)) >= OFF:
                break
            self._reached += 1
        ended = self._result(self._state) is True
        return CORRECT + KEYPOINT * (self._reached - before) + SUCCESS * ended, ended

    def _heading(self):
        """Degrees: where one looks, after the last turn that was made."""
        turns = [TURNS[action] for action, _ in self._rail[: self._state] if action in TURNS]
        return turns[-1] if turns else self._first

    def _next(self, state, action):
        return state + (state < len(self._rail) and action == self._rail[state][0])

    def _result(self, state):
        return True if state == len(self._rail) else None

    def _plan(self, start):
        return [action for action, _ in self._rail[start:]]

    def _observe(self, notice):
        lines = [f"[{'x' if n < self._reached else ' '}] {says}"
                 for n, (says, *_) in enumerate(self._keypoints)]
        lines.append(f"[{'x' if self._result(self._state) else ' '}] stop")
        done = ", ".join(action for action, _ in self._rail[: self._state])
        text = (f"{notice}Turn {self._turn + 1}. You face {facing(self._heading())}. "
                f"{' '.join(lines)}. Done: {done or '-'}.")
        return {"image": self._frame(), "text": text}

    def _frame(self):
        draw = small_views if self.image_size <= 224 else four_views
        pano = self._panos[self._state]
        return draw(self._city.folder, pano, self._heading(), self.image_size).copy()

    def _think(self):
        """Where one looks and what the plan does in this turn: "facing north go east forward"."""
        steps = self._plan(self._state)[: self.max_actions]
        words = [facing(TURNS[step]) if step in TURNS else step[:-2] for step in steps]
        return " ".join(["facing", facing(self._heading()), "go", *words])


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Read every file of a data set, tell what is wrong, and write gps_pano_mapping.json.

    Args:
        folder: a data set in the published layout
    """
    try:
        city, faults = read_city(folder), []
    except ValueError as error:
        sys.exit(f"virl.py: {error}")
    for pano in city.panos:
        try:
            panorama(folder, pano, 512)
        except ValueError as error:
            faults.append(str(error))
    for index, route in enumerate(city.routes):
        try:
            for _, place in rail(route):
                city.pano(place)
        except ValueError as error:
            faults.append(f"route {index}: {error}")
    rows = [[*code, pano] for code, pano in zip(city.codes.tolist(), city.panos)]
    (folder / "gps_pano_mapping.json").write_text(json.dumps(rows))
    print(*faults, f"{len(city.routes)} routes, {len(city.panos)} panoramas, {len(faults)} faults; "
          f"wrote {folder / 'gps_pano_mapping.json'}", sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    tyro.cli(main)
