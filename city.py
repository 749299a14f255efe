"""A small made-up city in the published layout of the street-view routes, for virl.py.

    python city.py FOLDER --seed 1     # what virl.ViRL draws for itself on first use

A folder has `route_infos.json`, `gps_pano_mapping.pkl` and `street_views/`, the layout of the data
set `tianzhechu/SFTvsRL_Data` (VIRL_routes/...), and is read like it. Streets form two square grids
half a kilometre apart, one along the compass and one turned by 45 degrees, so that all eight words
of the compass are in use. Houses with windows stand along them; at three of four crossings a board
with a name hangs on both sides of a corner. Panoramas are equirectangular, cast ray by ray.
"""

import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont

COMPASS = ("north", "northeast", "east", "southeast", "south", "southwest", "west", "northwest")
METRES = 111_320.0  # a degree of latitude
ORIGIN = (40.7, -74.0)  # latitude and longitude of the city of seed 0
CROSSINGS, SPACING, STREET = 4, 60.0, 14.0  # a side of a grid; metres between them; metres wide
DISTRICTS = ((0.0, 0), (500.0, 45))  # metres to the east, degrees clockwise
ROUTES = 300
HEIGHT, WIDTH = 512, 1024  # px of a panorama
EYE = 2.5  # m above the street
BOARD = (3.2, 6.4, 9.0, 1.0)  # m: lower and upper edge, length, distance from the corner
NAMES = ("ART", "BAKERY", "BANK", "BIKES", "BOOKS", "CAFE", "CINEMA", "CLOCKS", "FISH", "FLOWERS",
         "GARAGE", "GYM", "HATS", "HOTEL", "LIBRARY", "MARKET", "MUSIC", "PIZZA", "POST", "SCHOOL",
         "SHOES", "SUSHI", "TEA", "TOYS")


def geocode(origin: tuple[float, float], x: float, y: float) -> tuple[float, float]:
    """(latitude, longitude) of metres to the east and north of an origin, to a centimetre."""
    return (round(origin[0] + y / METRES, 7),
            round(origin[1] + x / METRES / math.cos(math.radians(origin[0])), 7))


def turned(x, y, degrees: float):
    """The point, or the arrays of points, turned clockwise around the origin."""
    angle = math.radians(degrees)
    return (x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle))


@lru_cache
def board(name: str) -> np.ndarray:
    """uint8 [h, w, 3]: the name in white on a colour of its own."""
    hue = NAMES.index(name) * 255 // len(NAMES)
    colour = Image.new("HSV", (1, 1), (hue, 220, 150)).convert("RGB").getpixel((0, 0))
    image = Image.new("RGB", (288, 102), colour)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=88)
    font = ImageFont.load_default(size=88 * min(1, 264 / draw.textlength(name, font)))
    draw.rectangle((0, 0, 287, 101), None, "white", 5)
    draw.text((144, 51), name, "white", font, anchor="mm")
    return np.array(image)


class District:
    """A grid of streets in its own metres (x, y), the crossing (0, 0) at its corner.

    Around the crossing (i, j) stand the houses [i, j] (south-west) to [i + 1, j + 1] (north-east).
    `names` [i][j]: what hangs there, or ""; `corners` [i][j]: at which corner, (0 or 1, 0 or 1).
    """

    def __init__(self, rng: np.random.Generator, origin, east: float, turn: int):
        self.origin, self.east, self.turn = origin, east, turn
        cells = (CROSSINGS, CROSSINGS)
        names = np.array(rng.permutation(NAMES)[: CROSSINGS**2]).reshape(cells)
        self.names = np.where(rng.random(cells) < 0.75, names, "")
        self.corners = rng.integers(0, 2, (*cells, 2))
        houses = (CROSSINGS + 1,) * 2
        self.heights = rng.uniform(9, 24, houses)
        self.colours = rng.uniform(90, 215, (*houses, 1)) + rng.uniform(-35, 35, (*houses, 3))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Its point -> (latitude, longitude)."""
        x, y = turned(x, y, self.turn)
        return geocode(self.origin, self.east + x, y)

    def side_of(self, i: int, j: int, heading: int) -> str:
        """On which side of who arrives with a heading (degrees from the district's north) the board
        of a crossing hangs."""
        x, y = 2 * self.corners[i, j] - 1
        return "right" if turned(x, y, -heading)[0] > 0 else "left"

    def panorama(self, x: float, y: float, rotation: float) -> np.ndarray:
        """uint8 [HEIGHT, WIDTH, 3] from (x, y); north is `rotation` degrees right of the left edge.
        """
        headings = (np.arange(WIDTH) + 0.5) / WIDTH * 360 - rotation - self.turn
        rise = np.tan(np.radians(90 - (np.arange(HEIGHT) + 0.5) / HEIGHT * 180))[:, None]  # [H, 1]
        ray = np.sin(np.radians(headings)), np.cos(np.radians(headings))  # [W] each
        picture = self._ground(x, y, rise, ray)
        nearest = np.full((HEIGHT, WIDTH), np.inf)
        houses = [(i, j) for i in range(CROSSINGS + 1) for j in range(CROSSINGS + 1)]
        for house in sorted(houses, key=lambda h: math.dist(((h[0] - 0.5) * SPACING,
                                                            (h[1] - 0.5) * SPACING), (x, y))):
            self._house(picture, nearest, house, (x, y), rise, ray)  # the near ones hide the rest
        return picture.clip(0, 255).astype(np.uint8)

    def _ground(self, x, y, rise, ray):
        """float [H, W, 3]: sky above, below the street with its pavements and its middle line."""
        above = rise > 0
        sky = np.array([120, 165, 225]) + np.minimum(rise.clip(0), 1)[..., None] * [-40, -30, -10]
        far = np.minimum(-EYE / np.where(above, -1, rise), 400.0)  # metres to where a ray lands
        across = [at + far * way for at, way in zip((x, y), ray)]  # [H, W] each
        off = [np.abs((at + SPACING / 2) % SPACING - SPACING / 2) for at in across]  # of the middle
        inside = np.minimum(*off)
        grey = np.where(inside < STREET / 2 - 2.5, 85.0, 150.0)
        dashed = (inside < 0.2) & (np.maximum(*off) % 6 < 3) & (np.maximum(*off) > STREET / 2)
        return np.where(above[..., None], sky, np.where(dashed, 230.0, grey)[..., None])

    def _house(self, picture, nearest, house, eye, rise, ray):
        """Draw one over what is farther off; `nearest` [H, W]: metres to what is there so far."""
        spans = [((n - 1) * SPACING + STREET / 2, n * SPACING - STREET / 2) for n in house]
        with np.errstate(divide="ignore"):
            walls = [[(edge - at) / way for edge in span]
                     for span, at, way in zip(spans, eye, ray)]  # metres to each wall's line, [W]
        near = np.stack([np.minimum(*pair) for pair in walls])
        enter, leave = near.max(0), np.min([np.maximum(*pair) for pair in walls], 0)
        columns = np.flatnonzero((enter > 0) & (enter < leave))
        z = EYE + enter[columns] * rise  # metres above the street, [H, columns]
        hit = (z >= 0) & (z < self.heights[house]) & (enter[columns] < nearest[:, columns])
        rows, which = np.nonzero(hit)  # from here on [N], a pixel of the house each
        z, columns = z[rows, which], columns[which]
        far, axis = enter[columns], near[:, columns].argmax(0)  # axis 0: a west or east wall
        along = np.where(axis == 0, eye[1] + far * ray[1][columns], eye[0] + far * ray[0][columns])
        low = np.where(axis == 0, ray[0][columns] > 0, ray[1][columns] > 0)  # west, or south?
        colour = self._wall(house, z, along - np.where(axis == 0, spans[1][0], spans[0][0]), axis)
        for at, name, start, first in self._boards(house, spans):
            face = (axis == at) & (low == first)
            self._hang(colour, board(name), z, np.where(face, along - start, -1.0),
                       backwards=(at == 0) == first)
        picture[rows, columns], nearest[rows, columns] = colour, far

    def _wall(self, house, z, along, axis):
        """float [N, 3]: rows of windows above a plain ground floor."""
        window = ((z > 7) & (z % 3.5 > 1) & (z % 3.5 < 2.8)
                  & (along % 4 > 1.2) & (along % 4 < 2.8))
        wall = np.where(z[:, None] < 0.6, 70.0, self.colours[house])
        shade = np.where(axis == 0, 0.8, 1.0)[:, None]
        return np.where(window[:, None], [60.0, 75.0, 95.0], wall) * shade

    def _boards(self, house, spans):
        """(axis of the wall, name, where the board starts along it, is it the west or south wall?)
        of each board of a house: two for each of its corners that has a name."""
        _, _, length, gap = BOARD
        for east in (0, 1):
            for north in (0, 1):
                i, j = house[0] - 1 + east, house[1] - 1 + north  # the crossing at that corner
                if not (0 <= i < CROSSINGS and 0 <= j < CROSSINGS) or not self.names[i, j]:
                    continue
                if tuple(self.corners[i, j]) != (1 - east, 1 - north):
                    continue
                starts = [span[1] - gap - length if end else span[0] + gap
                          for span, end in zip(spans, (east, north))]
                yield 0, str(self.names[i, j]), starts[1], not east
                yield 1, str(self.names[i, j]), starts[0], not north

    def _hang(self, colour, picture, z, along, backwards):
        """Paint a board into the colours [N, 3]; along: metres from its start, [N]. backwards: who
        looks at that wall sees the start on the right."""
        bottom, top, length, _ = BOARD
        there = np.flatnonzero((z > bottom) & (z < top) & (along > 0) & (along < length))
        u, v = along[there] / length, (top - z[there]) / (top - bottom)
        u = 1 - u if backwards else u
        height, width, _ = picture.shape
        colour[there] = picture[(v * height).astype(int), (u * width).astype(int)]


def draw_route(rng: np.random.Generator, district: District) -> dict | None:
    """A walk of 2 to 4 blocks that crosses no crossing twice, as `route_infos.json` has it."""
    at = tuple(rng.integers(0, CROSSINGS, 2).tolist())
    nodes, headings = [at], []
    for _ in range(rng.integers(2, 5)):
        ways = [(heading, (at[0] + x, at[1] + y)) for heading, x, y in
                ((0, 0, 1), (90, 1, 0), (180, 0, -1), (270, -1, 0))]
        ways = [way for way in ways
                if way[1] not in nodes and all(0 <= n < CROSSINGS for n in way[1])]
        if not ways:
            return None
        heading, at = ways[rng.integers(len(ways))]
        nodes.append(at)
        headings.append(heading)
    codes = [district.place(*(SPACING * n for n in node)) for node in nodes]
    names = [str(district.names[node]) for node in nodes]
    first, before, blocks = 45 * int(rng.integers(1, 9)), None, []
    for index, (heading, node, name) in enumerate(zip(headings, nodes[1:], names[1:])):
        faces = (heading + district.turn) % 360
        blocks.append({
            "intersection_idx": index,
            "landmarks": f"{name} on your {district.side_of(*node, heading)}" if name else "",
            "distance": f"{SPACING:.0f} meters",
            "human_heading": spoken(first % 360 if before is None else before),
            "to_next_intersection_heading": spoken(faces),
        })
        before = faces
    return {
        "start_place": {"name": names[0], "relocated_geocode": codes[0]},
        "dest_place": {"name": names[-1], "geocode": codes[-1]},
        "init_heading": first,  # 360 for north: 0 stands for a random one
        "route_results": {"geocode_list": codes[1:], "landmark_list": names[1:]},
        "milestone_info": "\n".join(map(json.dumps, blocks)),
    }


def spoken(heading: int) -> str:
    """177 -> "177 (south)"."""
    return f"{heading} ({COMPASS[round(heading / 45) % 8]})"


def write_city(folder: Path, seed: int) -> None:
    """Draw a city and its routes. It appears under its name when it is whole; if another process
    was first, that one's stays: it is the same. OSError where it cannot be written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(aside, seed)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not (folder / "route_infos.json").exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def fill(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    origin = (ORIGIN[0] + seed % 100 / 10, ORIGIN[1])  # another city is another place
    districts = [District(rng, origin, *where) for where in DISTRICTS]
    mapping, views = {}, folder / "street_views"
    views.mkdir()
    half = SPACING / 2
    for number, district in enumerate(districts):
        for i in range(2 * CROSSINGS - 1):
            for j in range(2 * CROSSINGS - 1):
                if i % 2 and j % 2:
                    continue  # the middle of a block of houses
                pano, rotation = f"pano_{number}_{i}_{j}", float(rng.integers(0, 360))
                mapping[district.place(half * i, half * j)] = pano
                picture = Image.fromarray(district.panorama(half * i, half * j, rotation))
                picture.save(views / f"{pano}.jpg", quality=85)
                (views / f"{pano}.metadata.json").write_text(json.dumps({"rotation": rotation}))
    routes, known = [], set()
    while len(routes) < ROUTES:
        route = draw_route(rng, districts[rng.integers(len(districts))])
        if route is None:
            continue
        way = (*route["start_place"]["relocated_geocode"],
               *map(tuple, route["route_results"]["geocode_list"]))
        if way not in known:
            known.add(way)
            routes.append(route)
    (folder / "route_infos.json").write_text(json.dumps([routes, len(routes)]))
    (folder / "gps_pano_mapping.pkl").write_bytes(pickle.dumps(mapping))


def default_city(seed: int) -> Path:
    """The folder of a made-up city in the user's cache; drawn, in some seconds, where it is not."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:10]  # of what draws it
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "hygrow" / f"city-{seed}-{key}"
    if not folder.exists():
        print(f"drawing a city into {folder}, once", file=sys.stderr, flush=True)
        try:
            write_city(folder, seed)
        except OSError as error:
            raise RuntimeError(f"the made-up city cannot be written ({error}); set XDG_CACHE_HOME "
                               "to a folder that can, or folder= to a city") from error
    return folder


def main(folder: tyro.conf.Positional[Path], seed: int = 1) -> None:
    """Write a made-up city in the published layout of the street-view routes.

    Args:
        folder: where to write it; must not exist
        seed: another seed, another city
    """
    if folder.exists():
        sys.exit(f"city.py: {folder} exists; name a folder that does not")
    write_city(folder, seed)
    print(f"{ROUTES} routes in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
