"""Tests of virl.py and city.py. They walk the two made-up cities and data sets of a few routes."""

import json
import math
import multiprocessing
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from PIL import Image

import city
import envs
import virl
from virl import ViRL, difference, directions, four_views, metres, perspective, rail, read_city

HOME = Path(envs.__file__).parent
LAT, LNG = 40.7, -74.0
EAST = LNG + 60 / (city.METRES * math.cos(math.radians(LAT)))  # 60 m to the east
NORTH = LAT + 60 / city.METRES


def say(*actions):
    return f"<think>x</think><answer>{', '.join(actions)}</answer>"


def turn(word):
    return f"turn_direction({word})"


def entry(**changes):
    """A route of two legs, 60 m east and 60 m north, in the published layout."""
    blocks = [{"intersection_idx": 0, "landmarks": "CAFE on your left", "distance": "60 meters",
               "human_heading": "0 (north)", "to_next_intersection_heading": "88 (east)"},
              {"intersection_idx": 1, "landmarks": "", "distance": "60 meters",
               "human_heading": "88 (east)", "to_next_intersection_heading": "2 (north)"}]
    return {"start_place": {"relocated_geocode": [LAT, LNG]}, "dest_place": {"name": "BANK"},
            "init_heading": 350, "milestone_info": "\n".join(map(json.dumps, blocks)),
            "route_results": {"geocode_list": [[LAT, EAST], [NORTH, EAST]],
                              "landmark_list": ["CAFE", ""]}} | changes


def data_set(folder, *routes, mapping=None, rotation=0.0, picture=None):
    """Write a data set; by default with panoramas at the three places of `entry`."""
    (folder / "street_views").mkdir(parents=True, exist_ok=True)
    (folder / "route_infos.json").write_text(json.dumps([routes, len(routes)]))
    if mapping is None:
        mapping = {(LAT, LNG): "a", (LAT, EAST): "b", (NORTH, EAST): "c"}
    (folder / "gps_pano_mapping.pkl").write_bytes(pickle.dumps(mapping))
    for pano in mapping.values():
        Image.fromarray(np.full((64, 128, 3), 99, np.uint8) if picture is None else picture).save(
            folder / "street_views" / f"{pano}.jpg", quality=95)
        (folder / "street_views" / f"{pano}.metadata.json").write_text(
            json.dumps({"rotation": rotation}))
    return str(folder)


def one_route(tmp_path, **changes):
    """The environment of a data set with `entry` for both splits."""
    folder = data_set(tmp_path / "data", entry())
    other = data_set(tmp_path / "other", entry(start_place={"relocated_geocode": [LAT, LNG + 1]}))
    return ViRL(split="eval", folder=other, eval_folder=folder, **changes)


# ------------------------------------------------------------------------------------- the maths


def test_distances_and_angles_by_hand():
    assert metres((0.0, 0.0), (1.0, 0.0)) == pytest.approx(111_195, abs=1)  # a degree of a meridian
    assert metres((60.0, 10.0), (60.0, 11.0)) == pytest.approx(111_195 / 2, rel=1e-3)
    assert metres((0.0, 179.0), (0.0, -179.0)) == pytest.approx(2 * 111_195, abs=2)
    assert metres((LAT, LNG), (LAT, EAST)) == pytest.approx(60, rel=2e-3)
    assert list(metres((0.0, 0.0), np.array([[0.0, 0.0], [0.0, 1.0]]))) == pytest.approx(
        [0, 111_195], abs=1)
    for a, b, wanted in ((350, 10, 20), (10, 350, -20), (90, 0, -90), (0, 180, -180), (315, 0, 45)):
        assert difference(a, b) == wanted


def columns(width=360):
    """A panorama whose red says the degrees from its left edge (two degrees a level)."""
    picture = np.zeros((width // 2, width, 3), np.uint8)
    picture[..., 0] = np.arange(width) * 180 // width
    picture[..., 1] = (np.arange(width // 2) * 180 // (width // 2))[:, None]
    return picture


def test_perspective_by_hand():
    """The middle of a view is the middle of the panorama plus yaw; its edges 45 degrees aside."""
    picture = columns()
    for yaw in (0, 30, -90, 100, 179, 540, 181):
        view = perspective(picture, yaw, 45)
        assert view.shape == (45, 45, 3) and view.dtype == np.uint8
        middle = (180 + yaw) % 360
        if 60 < middle < 300:  # away from the seam, where the numbers jump
            row = view[22, :, 0] * 2.0
            assert row[22] == pytest.approx(middle, abs=2)
            assert row[[0, -1]] == pytest.approx([middle - 45, middle + 45], abs=3)
            assert (np.diff(row) >= 0).all()
            # x px of the middle: atan(x / 22.5)
            assert row[33] == pytest.approx(middle + math.degrees(math.atan(11 / 22.5)), abs=2)
        assert view[22, 22, 1] == pytest.approx(90, abs=1)  # the horizon
        assert view[0, 22, 1] == pytest.approx(45, abs=2)
        assert view[-1, 22, 1] == pytest.approx(135, abs=2)


def test_perspective_is_linear_between_pixels():
    """A ramp of 25 a column of 45 degrees: the one pixel of a view has the mean of its four
    samples, which is the ramp's value at yaw."""
    picture = np.broadcast_to((25 * np.arange(8))[None, :, None], (4, 8, 3)).astype(np.uint8)
    for yaw in (-40, 0, 10, 33):
        wanted = 25 * ((yaw / 360 + 0.5) * 8 - 0.5)
        assert perspective(picture, yaw, 1)[0, 0, 0] == pytest.approx(wanted, abs=0.51)
    upright = np.broadcast_to((50 * np.arange(4))[:, None, None], (4, 8, 3)).astype(np.uint8)
    assert perspective(upright, 77, 1)[0, 0, 0] == pytest.approx(75, abs=0.51)
    lower = perspective(upright, 77, 2)[1, 0, 0]  # down by 10 to 34 degrees
    assert 75 + 50 * 10 / 45 < lower < 75 + 50 * 34 / 45


def test_perspective_goes_on_at_the_seam():
    """Turning panorama and yaw together changes nothing, wherever the seam then is."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (90, 180, 3), dtype=np.uint8)
    wanted = perspective(picture, 0, 20)
    for shift in (1, 45, 90, 135):
        rolled = np.roll(picture, shift, axis=1)
        assert (perspective(rolled, shift * 2, 20) == wanted).all()
        assert (perspective(rolled, shift * 2 - 360, 20) == wanted).all()


def test_four_views_where_and_which(tmp_path):
    """Red north, green east, blue south, white west; north is `rotation` right of the left edge."""
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [200, 200, 200]], np.uint8)
    quarter = (np.arange(720) + 90) // 180 % 4
    picture = np.broadcast_to(colours[quarter], (360, 720, 3))
    for rotation in (0, 40, 250):
        folder = tmp_path / str(rotation)
        data_set(folder, entry(), mapping={(LAT, LNG): "a"}, rotation=float(rotation),
                 picture=np.roll(picture, 2 * rotation, axis=1))
        for heading in (0, 90, 180, 270, 360):
            frame = four_views(folder, "a", heading, 129)  # tiles of 64 px, a gap of 1
            for place, (y, x) in enumerate(((32, 32), (32, 97), (97, 32), (97, 97))):
                seen = frame[y, x].astype(int)
                assert np.abs(seen - colours[(heading // 90 + place) % 4]).max() < 25
            assert (frame[64] == 255).all() and (frame[:, 64] == 255).all()
    for side, gap in ((645, 5), (112, 2), (56, 2), (129, 1), (224, 2)):
        frame = four_views(folder, "a", 45, side)
        white = (frame[:, 3] == 255).all(-1)  # a column, in view of two colours
        assert frame.shape == (side, side, 3)
        assert white.sum() == gap and white[(side - gap) // 2 : (side + gap) // 2].all()


def test_the_frame_turns_with_who_walks(tmp_path):
    """Front is red in the north, green in the east."""
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [200, 200, 200]], np.uint8)
    picture = np.broadcast_to(colours[(np.arange(720) + 90) // 180 % 4], (360, 720, 3))
    env = one_route(tmp_path, max_turns=20)
    data_set(tmp_path / "data", entry(), picture=picture)
    seen = [env.reset(seed=0)[0]] + [env.step(say(action))[0] for action in
                                     [action for action, _ in env._rail]]
    fronts = [int(np.abs(colours.astype(int) - o["image"][27, 27]).sum(1).argmin()) for o in seen]
    assert fronts == [0, 1, 1, 1, 0, 0, 0, 0]


# ----------------------------------------------------------------------------------- the reader


def test_a_route_is_read(tmp_path):
    read = read_city(Path(data_set(tmp_path, entry(), entry(init_heading=0))))
    first, second = read.routes
    assert first.nodes == ((LAT, LNG), (LAT, EAST), (NORTH, EAST))
    assert first.headings == (90, 0) and first.landmarks == ("CAFE on your left", "")
    assert first.first == 350.0 and second.first is None
    assert read.pano((LAT, LNG)) == "a" and read.pano((LAT + 1e-5, EAST)) == "b"
    with pytest.raises(ValueError, match="no panorama within 50 m"):
        read.pano((LAT + 0.001, LNG))


def test_other_ways_to_write_a_milestone(tmp_path):
    text = ("0: {'landmarks': ['Café', 'Bank'], 'to_next_intersection_heading': '177 (South)'},"
            "1: {'landmarks': None, 'to_next_intersection_heading': '-3.5 (north-east)'}"
            "2: {'intersection_idx': 2}")  # of the destination
    changed = entry(milestone_info=text)
    changed["route_results"]["landmark_list"] = ["x", "H[x]\nM"]
    route = read_city(Path(data_set(tmp_path, changed))).routes[0]
    assert route.headings == (180, 45) and route.landmarks == ("Cafe, Bank", "H x M")


BAD = (
    ({"start_place": {}}, "route 1: start_place.relocated_geocode"),
    ({"start_place": None}, "route 1: start_place.relocated_geocode"),
    ({"start_place": {"relocated_geocode": [91, 0]}}, "start_place.relocated_geocode.*91"),
    ({"start_place": {"relocated_geocode": ["40", "74"]}}, "start_place.relocated_geocode"),
    ({"start_place": {"relocated_geocode": [float("nan"), 0]}}, "relocated_geocode.*nan"),
    ({"init_heading": "north"}, "route 1: init_heading must be a number of degrees, not 'north'"),
    ({"init_heading": True}, "init_heading"),
    ({"route_results": {}}, "route_results.geocode_list"),
    ({"route_results": {"geocode_list": []}}, "route_results.geocode_list"),
    ({"route_results": {"geocode_list": [[1, 2, 3]]}}, "route_results.geocode_list"),
    ({"route_results": {"geocode_list": [[1, 2]], "landmark_list": "x"}}, "landmark_list"),
    ({"milestone_info": None}, "route 1: milestone_info must be a string"),
    ({"milestone_info": ""}, "milestone_info has 0 .* geocode_list has 2"),
    ({"milestone_info": "{}" * 4}, "milestone_info has 4"),
    ({"milestone_info": "{1}{2}"}, r"milestone_info, \{...\} 0: to_next_intersection_heading"),
    ({"milestone_info": "{x: y}{}"}, r"milestone_info, \{...\} 0 is neither JSON nor Python"),
    ({"milestone_info": "{__import__('os')}{}"}, "neither JSON nor Python"),
    ({"milestone_info": '{"to_next_intersection_heading": "177"}' * 2}, "must be like"),
    ({"milestone_info": '{"to_next_intersection_heading": "9 (up)"}' * 2}, "'up' in to_next"),
)


@pytest.mark.parametrize("changes,words", BAD)
def test_a_wrong_field_is_named(tmp_path, changes, words):
    folder = data_set(tmp_path, entry(), entry(**changes))
    with pytest.raises(ValueError, match=words) as error:
        ViRL(folder=folder)
    assert "route_infos.json" in str(error.value)


@pytest.mark.parametrize("content,words", (
    ("", "is no JSON"), ("[" * 100_000, "is no JSON"), ("{}", "must be"), ("[]", "must be"),
    ("[[], 0]", "at least one route"), ("[[{}], 2]", "number of routes"),
    ("[[7], 1]", "route 0: start_place"), ("\xff", "route 0|is no JSON"),
))
def test_a_wrong_list_of_routes_is_named(tmp_path, content, words):
    data_set(tmp_path, entry())
    (tmp_path / "route_infos.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=words) as error:
        read_city(tmp_path)
    assert "route_infos.json" in str(error.value)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "ran"))


class Evil2(Evil):
    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w')",))


@pytest.mark.parametrize("evil", (Evil, Evil2))
def test_no_code_of_a_pickle_runs(tmp_path, evil):
    trace, folder = tmp_path / "trace", tmp_path / "data"
    data_set(folder, entry())
    path = folder / "gps_pano_mapping.pkl"
    path.write_bytes(pickle.dumps({(LAT, LNG): evil(trace)}))
    with pytest.raises(ValueError, match=r"gps_pano_mapping.pkl .*it asks for \w+"):
        read_city(folder)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # it would have


@pytest.mark.parametrize("content", (
    b"", b"x", b"\x80\x04", pickle.dumps({(LAT, LNG): "a"})[:-3], pickle.dumps([1]),
    pickle.dumps({}), pickle.dumps({"40,-74": "a"}), pickle.dumps({(LAT, LNG): 5}),
    pickle.dumps({(LAT, LNG): "../../etc/x"}), pickle.dumps({(LAT, 400.0): "a"}),
    pickle.dumps({(np.float64(LAT), LNG): "a"}),
))
def test_a_wrong_mapping_is_named(tmp_path, content):
    data_set(tmp_path, entry())
    (tmp_path / "gps_pano_mapping.pkl").write_bytes(content)
    with pytest.raises(ValueError, match="gps_pano_mapping.pkl"):
        read_city(tmp_path)


def test_the_mapping_as_json(tmp_path):
    """What `python virl.py FOLDER` writes is read, and is the pickle's content."""
    folder = Path(data_set(tmp_path / "a", entry()))
    result = subprocess.run([sys.executable, HOME / "virl.py", folder], capture_output=True,
                            text=True)
    assert result.returncode == 0 and "1 routes, 3 panoramas, 0 faults" in result.stdout
    wanted = virl.read_mapping(Path(data_set(tmp_path / "b", entry())))
    (folder / "gps_pano_mapping.pkl").unlink()
    assert virl.read_mapping(folder) == wanted
    for content in ("{}", "[]", "[[1, 2]]", '[[1, 2, 3]]', '["a"]', "7"):
        (folder / "gps_pano_mapping.json").write_text(content)
        with pytest.raises(ValueError, match="gps_pano_mapping.json"):
            virl.read_mapping(folder)


def test_the_command_tells_all_faults(tmp_path):
    folder = Path(data_set(tmp_path, entry(), entry(
        start_place={"relocated_geocode": [LAT, LNG + 0.1]})))
    (folder / "street_views" / "a.jpg").write_bytes(b"x")
    (folder / "street_views" / "b.metadata.json").unlink()
    result = subprocess.run([sys.executable, HOME / "virl.py", folder], capture_output=True,
                            text=True)
    assert result.returncode == 1 and "3 faults" in result.stdout
    for words in ("a.jpg is no picture", "b.metadata.json is no JSON", "route 1:"):
        assert words in result.stdout


@pytest.mark.parametrize("name,content,words", (
    ("a.metadata.json", b"{}", "a.metadata.json: rotation must be"),
    ("a.metadata.json", b'{"rotation": "x"}', "rotation must be a number of degrees, not 'x'"),
    ("a.metadata.json", b'{"rotation": NaN}', "rotation must be a number of degrees, not nan"),
    ("a.metadata.json", b"[]", "rotation"), ("a.metadata.json", b"", "is no JSON"),
    ("a.jpg", b"", "a.jpg is no picture"), ("a.jpg", b"\xff\xd8\xff", "a.jpg is no picture"),
    ("a.jpg", None, "a.jpg is no picture"), ("a.jpg", "cut", "a.jpg is no picture"),
    ("a.jpg", "square", "a.jpg is 64 x 64 px"),
))
def test_a_wrong_picture_is_named(tmp_path, name, content, words):
    env = one_route(tmp_path)
    path = tmp_path / "data" / "street_views" / name
    if content == "square":
        Image.new("RGB", (64, 64)).save(path)
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        env.reset(seed=0)


def test_a_route_without_panoramas_is_refused(tmp_path):
    folder = data_set(tmp_path / "data", entry(), mapping={(LAT, LNG): "a"})
    other = data_set(tmp_path / "other", entry(init_heading=0, start_place={
        "relocated_geocode": [LAT, LNG + 1]}))
    env = ViRL(split="eval", folder=other, eval_folder=folder)
    with pytest.raises(ValueError, match="data has no panorama within 50 m of .*nearest is 60 m"):
        env.reset(seed=0)


# -------------------------------------------------------------------------------------- the walk


def test_rail_by_hand(tmp_path):
    route = read_city(Path(data_set(tmp_path, entry()))).routes[0]
    middle = ((LAT + LAT) / 2, (LNG + EAST) / 2), ((LAT + NORTH) / 2, EAST)
    assert rail(route) == [
        (turn("east"), (LAT, LNG)), ("forward()", middle[0]), ("forward()", (LAT, EAST)),
        (turn("north"), (LAT, EAST)), ("forward()", middle[1]), ("forward()", (NORTH, EAST)),
        ("stop()", (NORTH, EAST))]


def test_a_short_leg_has_no_forward(tmp_path):
    def legs(metre):
        short = entry(route_results={"landmark_list": [], "geocode_list": [
            [LAT, LNG + metre / 60 * (EAST - LNG)], [NORTH, EAST]]})
        return [action for action, _ in rail(read_city(
            Path(data_set(tmp_path / str(metre), short))).routes[0])]

    assert legs(4.9) == [turn("east"), turn("north"), "forward()", "forward()", "stop()"]
    assert legs(5.1)[:3] == [turn("east"), "forward()", "forward()"]


def test_directions_at_all_angles():
    """Also across north, where the papers' code names the wrong side."""
    for before, word, after in ((350, "right", 90), (10, "left", 270), (315, "slightly right", 0),
                                (0, "slightly left", 315), (45, "left", 315), (270, "right", 0),
                                (180, "around", 0), (0, "around", 180), (135, "sharp left", 0),
                                (225, "sharp right", 0), (337, "right", 45),
                                (330, "slightly right", 0)):
        route = virl.Route(((0.0, 0.0), (0.1, 0.1)), (after,), ("",), None)
        says = directions(route, before)[0][0]
        assert says == f"turn {word} to face {virl.facing(after)}"
    for heading in (0, 10, 350, 22):
        route = virl.Route(((0.0, 0.0), (0.1, 0.1)), (0,), ("",), None)
        assert directions(route, heading)[0][0] == "keep facing north"
    assert virl.facing(338) == "north" and virl.facing(337) == "northwest"
    assert virl.facing(-90) == "west" and virl.facing(360) == "north"


def test_an_episode_by_hand(tmp_path):
    env = one_route(tmp_path)
    observation, info = env.reset(seed=0)
    assert info == {"success": False, "split": "eval", "level": "0"}
    list_of = ("[{}] turn right to face east [{}] go forward to the next intersection, CAFE on "
               "your left [{}] turn left to face north [{}] go forward to the destination [{}] "
               "stop")
    assert observation["text"] == f"Turn 1. You face north. {list_of.format(*'     ')}. Done: -."
    assert observation["image"].shape == (112, 112, 3)

    observation, reward, ended, truncated, info = env.step(say(turn("east")))
    assert (reward, ended, truncated) == (pytest.approx(0.5 + 0.8 + 3), False, False)
    assert observation["text"] == (f"Turn 2. You face east. {list_of.format(*'x    ')}. "
                                   "Done: turn_direction(east).")
    assert info == {"success": False, "valid": True, "actions": [turn("east")], "turn": 1,
                    "format_reward": 0.5, "moves": 1, "keypoints": 1, "wrong": None}

    assert env.step(say("forward()"))[1] == pytest.approx(0.5 + 0.8)  # half way is 30 m off
    observation, reward, ended, _, info = env.step(say("forward()", "stop()", turn("north")))
    assert reward == pytest.approx(0.5 + 0.8 + 3) and not ended
    assert info["actions"] == ["forward()"] and info["wrong"] == "stop()"
    assert info["moves"] == 3 and info["keypoints"] == 2 and not info["success"]
    assert observation["text"].startswith(
        "stop() was wrong: it and what followed were not done. Turn 4. You face east. [x] turn")

    before = env._state
    for reply in ("forward()", say("fly()"), say("Forward()"), say(), say(*["forward()"] * 11)):
        env._turn = 2
        observation, reward, *_, info = env.step(reply)
        assert (reward, info["valid"], info["actions"], info["wrong"]) == (0.0, False, [], None)
        assert env._state == before and observation["text"].startswith("Invalid reply. Turn 4.")

    _, reward, ended, _, info = env.step(say(turn("north"), "forward()", "forward()"))
    assert reward == pytest.approx(0.5 + 3 * 0.8 + 2 * 3)
    assert not ended and info["keypoints"] == 4 and not info["success"]  # all but stop()
    observation, reward, ended, truncated, info = env.step(say("stop()", "stop()"))
    assert reward == pytest.approx(0.5 + 0.8 + 10) and ended and not truncated
    assert info["success"] and info["actions"] == ["stop()"] and info["moves"] == 7
    assert f"{list_of.format(*'xxxxx')}. Done" in observation["text"]
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(say("stop()"))


def test_who_does_not_stop_has_not_arrived(tmp_path):
    """The papers' code pays 10 a turn for standing at the end, and calls it a success."""
    env = one_route(tmp_path, max_turns=4)
    env.reset(seed=0)
    way = [action for action, _ in env._rail[:-1]]
    assert env.step(say(*way))[1] == pytest.approx(0.5 + 6 * 0.8 + 4 * 3)
    for last in (False, False, True):
        _, reward, ended, truncated, info = env.step(say("forward()"))
        assert (reward, ended, truncated) == (0.5, False, last) and not info["success"]


def test_keypoints_near_the_end_and_with_the_right_heading(tmp_path):
    """Within 20 m of the destination, 10 m elsewhere; heading off by less than 45 degrees."""
    changed = entry()
    changed["route_results"]["geocode_list"][1] = [LAT + 38 / city.METRES, EAST]
    data_set(tmp_path / "near", changed)
    env = ViRL(split="eval", folder=data_set(tmp_path / "x", entry()),
               eval_folder=str(tmp_path / "near"))
    env.reset(seed=0)
    info = env.step(say(turn("east"), "forward()", "forward()", turn("north"), "forward()"))[4]
    assert info["keypoints"] == 4  # 19 m before it
    assert env.step(say("forward()"))[1] == pytest.approx(0.5 + 0.8)  # there: not yet stopped
    assert env.step(say("stop()"))[1] == pytest.approx(0.5 + 0.8 + 10)
    env.reset(seed=0)
    env._keypoints = [(says, place, near, ahead + 45) for says, place, near, ahead in
                      env._keypoints]
    assert env.step(say(turn("east")))[4]["keypoints"] == 0
    env.reset(seed=0)
    env._keypoints = [(says, place, near, ahead - 44) for says, place, near, ahead in
                      env._keypoints]
    assert env.step(say(turn("east")))[4]["keypoints"] == 1
    env._keypoints[2] = (*env._keypoints[2][:3], 316)  # 44 degrees from north, across it
    assert env.step(say("forward()", "forward()", turn("north")))[4]["keypoints"] == 3


def test_an_unset_heading_is_drawn(tmp_path):
    folder = data_set(tmp_path / "data", entry(init_heading=0))
    env = ViRL(split="eval", folder=data_set(tmp_path / "x", entry(init_heading=90, start_place={
        "relocated_geocode": [LAT, LNG + 1]})), eval_folder=folder)
    firsts = {env.reset(seed=seed)[0]["text"].split(". ")[1] for seed in range(60)}
    assert firsts == {f"You face {word}" for word in city.COMPASS}
    assert env.reset(seed=7)[0]["text"] == env.reset(seed=7)[0]["text"]


def test_bad_options(tmp_path):
    for options, words in (({"size": 3}, "no option 'size'"), ({"image_size": 4}, "image_size=4"),
                           ({"folder": 3}, "folder=3"), ({"eval_folder": "x"}, "needs folder="),
                           ({"folder": "/no/such"}, "/no/such has no route_infos.json"),
                           ({"max_actions": 0}, "max_actions=0"), ({"split": "test"}, "'test'"),
                           ({"text_state": True}, "no option 'text_state'")):
        with pytest.raises(ValueError, match=words):
            ViRL(**options)
    env = one_route(tmp_path)
    for level in ("1", "-1", "x", "", "00000000000", "1.0"):
        with pytest.raises(ValueError, match="must be a route's number, 0 to 0"):
            env.reset(options={"level": level})
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(say("stop()"))
    assert env.reset(options={"level": 0})[1]["split"] == "given"


# --------------------------------------------------------------------------------------- splits


def nodes(env):
    return {env._city.routes[n].nodes for n in env._mine}


def test_splits_share_no_route(tmp_path):
    """Two cities; a hash within one folder; another folder whose routes leave training."""
    train, held_out = ViRL(), ViRL(split="eval")
    assert train._city.folder != held_out._city.folder
    assert len(train._mine) == len(held_out._mine) == 300 == len(nodes(train))
    assert not nodes(train) & nodes(held_out)
    for env in (train, held_out):
        assert {env.reset(seed=seed)[1]["level"] for seed in range(300)} <= set(map(str, env._mine))

    one, other = str(train._city.folder), str(held_out._city.folder)
    parts = [ViRL(folder=one, split=split) for split in ("train", "eval")]
    assert nodes(parts[0]) | nodes(parts[1]) == nodes(train)
    assert not nodes(parts[0]) & nodes(parts[1]) and 50 < len(parts[1]._mine) < 100
    routes, _ = json.loads((Path(other) / "route_infos.json").read_text())
    mixed = tmp_path / "mixed"
    data_set(mixed, entry(), *routes[:10])
    env = ViRL(folder=str(mixed), eval_folder=other)
    assert nodes(env) == {((LAT, LNG), (LAT, EAST), (NORTH, EAST))}
    assert nodes(ViRL(folder=str(mixed), eval_folder=other, split="eval")) == nodes(held_out)
    with pytest.raises(ValueError, match="no route of split 'train'"):
        ViRL(folder=other, eval_folder=other)


# ------------------------------------------------------------------------- the made-up cities


@pytest.mark.parametrize("split", ("train", "eval"))
def test_contract(split):
    env = envs.make_env("ViRL", split=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    assert (env.max_turns, env.max_actions, len(env.actions)) == (10, 10, 10)
    shown = ViRL(split=split, render_mode="rgb_array", image_size=64)
    assert (shown.reset(seed=1)[0]["image"] == shown.render()).all()
    observation = shown.step(shown.expert_reply())[0]
    assert (observation["image"] == shown.render()).all() and shown.render().shape == (64, 64, 3)


def test_expert_and_chance():
    """The way of the rail on 50 held-out routes: all rewards, in the least number of turns."""
    env = ViRL(split="eval")
    for seed in range(50):
        env.reset(seed=seed)
        total, turns, plan = 0.0, 0, env.expert_plan()
        assert plan[-1] == "stop()" and len(plan) == 3 * len(env._route.headings) + 1
        while True:
            reply = env.expert_reply()
            _, reward, ended, truncated, info = env.step(reply)
            assert info["valid"] and info["wrong"] is None
            total, turns = total + reward, turns + 1
            if ended or truncated:
                break
        legs = len(env._route.headings)
        assert info["success"] and 2 <= legs <= 4 and turns <= 10
        assert total == pytest.approx(0.5 * turns + 0.8 * len(plan) + 3 * 2 * legs + 10)
    assert not any(envs.play(env, seed, 1.0)["success"] for seed in range(50))


def test_thoughts_are_true_and_the_vocabulary_is_whole():
    for options in ({}, {"max_actions": 4, "max_turns": 8}):
        env, texts = ViRL(split="eval", **options), ViRL(**options).texts  # as training has them
        words = set(re.findall(r"[A-Za-z]+|[0-9]|[^A-Za-z0-9 ]", " ".join(texts)))
        for seed in range(30):
            observation, done = env.reset(seed=seed)[0], False
            while not done:
                reply = env.expert_reply(0.3)
                said = observation["text"] + reply + env.system_prompt
                assert set(re.findall(r"[A-Za-z]+|[0-9]|[^A-Za-z0-9 ]", said)) <= words
                thought = re.search("<think>facing (.*) go (.*)</think>", reply)
                assert f"You face {thought[1]}." in observation["text"]
                plan = [f"turn_direction({w})" if w in city.COMPASS else f"{w}()"
                        for w in thought[2].split()]
                assert plan == env.expert_plan()[: env.max_actions]
                observation, _, ended, truncated, _ = env.step(reply)
                done = ended or truncated


def test_boards_hang_where_the_directions_say():
    """From each crossing with a board: its colour is in the half of the panorama that is named."""
    for number, (east, faces) in enumerate(city.DISTRICTS):
        district = city.District(np.random.default_rng(number), city.ORIGIN, east, faces)
        named = [(i, j) for i in range(4) for j in range(4) if district.names[i, j]]
        assert 6 <= len(named) <= 15 and len({district.names[at] for at in named}) == len(named)
        for i, j in named:
            picture = district.panorama(60.0 * i, 60.0 * j, rotation=17.0).astype(int)
            colour = city.board(str(district.names[i, j]))[20, 20]
            rows, found = np.nonzero(np.abs(picture - colour).max(-1) <= 3)
            assert len(found) > 300, district.names[i, j]
            headings = (found + 0.5) / city.WIDTH * 360 - 17  # of the compass
            for heading in (0, 90, 180, 270):
                right = [difference(heading + faces, h) > 0 for h in headings]
                side = district.side_of(i, j, heading)
                assert np.mean(right) == (side == "right"), (i, j, heading)
            assert (rows < city.HEIGHT / 2).all()  # above the eye


def test_boards_can_be_read():
    """Across the street from each board one sees it, and not its mirror image."""
    district = city.District(np.random.default_rng(0), city.ORIGIN, 0.0, 0)
    walls = 0
    for i, j in np.argwhere(district.names != ""):
        x, y = 2 * district.corners[i, j] - 1
        for place, heading in (((0, 12.5 * y), 90 * x), ((12.5 * x, 0), 90 - 90 * y)):
            at = 60.0 * i + place[0], 60.0 * j + place[1]
            view = perspective(district.panorama(*at, rotation=0.0), heading - 180, 300)
            crop = view[66:135, 54:246]  # 7 m off: 4.5 m to each side, 0.7 to 3.9 m above the eye
            board = Image.fromarray(city.board(str(district.names[i, j]))).resize((192, 69))
            error = np.abs(crop - np.array(board, int)).mean()
            mirrored = np.abs(crop - np.array(board, int)[:, ::-1]).mean()
            assert error < 15 and error < 0.5 * mirrored, (i, j, heading, error, mirrored)
            walls += 1
    assert walls > 12


def test_a_street_lies_ahead():
    """Looking along a street one sees the street; between, the corner of a house."""
    district = city.District(np.random.default_rng(0), city.ORIGIN, 0.0, 45)
    picture = district.panorama(60.0, 60.0, rotation=100.0).astype(int)
    middle = picture[city.HEIGHT // 2 + 8]  # just below the horizon: 2.5 m down, 50 m off
    grey = np.ptp(middle, axis=1) == 0
    for heading in (45, 135, 225, 315):
        column = int((heading + 100) % 360 / 360 * city.WIDTH)
        assert grey[column - 5 : column + 5].all()
    for heading in (0, 90, 180, 270):
        column = int((heading + 100) % 360 / 360 * city.WIDTH)
        assert not grey[column - 5 : column + 5].any()


def digest(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def small(monkeypatch):
    monkeypatch.setattr(city, "CROSSINGS", 3)
    monkeypatch.setattr(city, "ROUTES", 20)
    monkeypatch.setattr(city, "HEIGHT", 32)
    monkeypatch.setattr(city, "WIDTH", 64)


def test_a_city_is_its_seed_and_has_the_published_layout(tmp_path, monkeypatch):
    small(monkeypatch)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        city.write_city(tmp_path / name, seed)
    first, again, other = (digest(tmp_path / name) for name in "abc")
    assert first == again and first != other
    assert len(first) == 2 + 2 * 42  # 9 crossings and 12 middles in each of two districts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    routes, count = json.loads((tmp_path / "a" / "route_infos.json").read_text())
    assert len(routes) == count == 20
    mapping = pickle.loads((tmp_path / "a" / "gps_pano_mapping.pkl").read_bytes())
    assert type(mapping) is dict and len(mapping) == 42
    codes, words = np.array(list(mapping)), set()
    for route, raw in zip(read_city(tmp_path / "a").routes, routes):
        assert {*raw["start_place"], *raw["dest_place"], "init_heading", "milestone_info"} <= {
            "name", "relocated_geocode", "geocode", *raw}
        for (_, place), ahead in zip(rail(route)[1::3], route.headings):  # half way of each leg
            assert metres(place, codes).min() < 0.1
        for start, end, ahead in zip(route.nodes, route.nodes[1:], route.headings):
            assert metres(start, end) == pytest.approx(60, rel=2e-3)
            y, x = end[0] - start[0], (end[1] - start[1]) * math.cos(math.radians(end[0]))
            assert difference(math.degrees(math.atan2(x, y)), ahead) == pytest.approx(0, abs=0.1)
            words.add(ahead)
        assert route.first % 45 == 0
    assert words == set(range(0, 360, 45))


def race(folder, pipe):
    small(pytest.MonkeyPatch())
    city.write_city(folder, 3)
    pipe.send(virl.read_city(folder).routes[0].nodes)


def test_two_processes_may_write_the_same_city(tmp_path):
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    crowd = [context.Process(target=race, args=(tmp_path / "a", send)) for _, send in pipes]
    for process in crowd:
        process.start()
    results = {receive.recv() for receive, _ in pipes}
    for process in crowd:
        process.join()
    assert len(results) == 1 and [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not any(process.exitcode for process in crowd)


def test_the_cache(tmp_path, monkeypatch):
    small(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = city.default_city(1)
    assert folder.parent == tmp_path / "hygrow" and folder != city.default_city(2)
    stamp = (folder / "route_infos.json").stat().st_mtime_ns
    assert city.default_city(1) == folder
    assert (folder / "route_infos.json").stat().st_mtime_ns == stamp
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME"):
        city.default_city(1)


SCRIPT = """
import hashlib, virl
env, digest = virl.ViRL(), hashlib.sha256()
for seed in (5, 6):
    observation, info = env.reset(seed=seed)
    for _ in range(2):
        reply = env.expert_reply(0.3)
        digest.update(observation["image"].tobytes() + observation["text"].encode()
                      + reply.encode() + info.get("level", "").encode())
        observation, _, ended, truncated, info = env.step(reply)
        if ended or truncated:
            break
print("digest", digest.hexdigest())
"""


def test_same_seed_same_episode_in_any_process():
    runs = [subprocess.run([sys.executable, "-c", SCRIPT], cwd=HOME, capture_output=True,
                           text=True) for _ in range(2)]
    lines = [re.search(r"digest \w+", run.stdout) for run in runs]
    assert all(lines) and lines[0][0] == lines[1][0], runs[0].stderr + runs[1].stderr


# -------------------------------------------------------------------------------------- training


def test_training_survives_a_broken_picture(tmp_path, capfd):
    """A route with a picture that cannot be read is dropped, and counted; the others train."""
    import train_hygae

    lost = entry(start_place={"relocated_geocode": [LAT, LNG + 1]}, init_heading=180)
    lost["route_results"]["geocode_list"] = [[LAT, EAST + 1], [NORTH, EAST + 1]]
    mapping = {(LAT, LNG): "a", (LAT, EAST): "b", (NORTH, EAST): "c",
               (LAT, LNG + 1): "d", (LAT, EAST + 1): "e", (NORTH, EAST + 1): "f"}
    folder = data_set(tmp_path / "data", entry(), lost, mapping=mapping)
    (tmp_path / "data" / "street_views" / "d.jpg").write_bytes(b"broken")
    start = {"relocated_geocode": [LAT, LNG - 1e-4]}
    other = data_set(tmp_path / "other", entry(start_place=start))
    train_hygae.main(train_hygae.Args(
        env="ViRL", env_options=(f"folder={folder}", f"eval_folder={other}", "image_size=28"),
        max_turns=2, num_envs=8, minibatches=1, micro_batch=8, iterations=2, cold_start=0,
        eval_episodes=2, eval_every=10, max_tokens=8, run_dir=str(tmp_path / "run")))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text()
            .splitlines()]
    faults = [row["rollout/env_faults"] for row in rows if "rollout/env_faults" in row]
    assert len(faults) == 2 and 0 < sum(faults) < 16
    assert "d.jpg is no picture" in capfd.readouterr().err
