"""The policy, generation and the training script: parity, invariance, resume, a run that learns.

Everything here runs on a CPU without network; the models are small but of the real classes.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers import Qwen2_5_VLConfig, Qwen2VLImageProcessorPil, Qwen3VLConfig

import bench
import envs
import models
import train_hygae
from envs import FrozenLake
from models import Dialogue, collate, load_policy, make_tiny, save_policy, take
from train_hygae import Args

ROOT = Path(__file__).parent
TEXTS = ["Walk over the ice. Turn 1. Turn 2.",
         "<think>goal down</think><answer>Right, Down</answer>"]
torch.set_num_threads(1)


# ----------------------------------------------------------------------------------- the model
def other_class(kind: str, tokenizer, folder: Path) -> None:
    """A small random model of another supported class, with the tokenizer of the tiny one."""
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in models.SPECIAL}
    common = dict(
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )
    text = dict(
        vocab_size=len(tokenizer) + 9,  # ids above the vocabulary, as the real models have them
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.2,
        rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=100.0),
        bos_token_id=None, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"],
    )
    if kind == "qwen2_5_vl":
        vision = dict(depth=2, hidden_size=32, out_hidden_size=32, intermediate_size=48,
                      num_heads=2, patch_size=14, window_size=56, fullatt_block_indexes=[1])
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common)
    else:
        vision = dict(depth=2, hidden_size=32, out_hidden_size=32, intermediate_size=48,
                      num_heads=2, patch_size=14, deepstack_visual_indexes=[0],
                      num_position_embeddings=64)
        config = Qwen3VLConfig(text_config=text, vision_config=vision, **common)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    sizes = dict(shortest_edge=28**2, longest_edge=10**6)
    Qwen2VLImageProcessorPil(size=sizes).save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Model folders by class name."""
    out = {kind: tmp_path_factory.mktemp(kind) for kind in models.SUPPORTED}
    make_tiny(out["qwen2_vl"], TEXTS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(out["qwen2_vl"])
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        shutil.copytree(out["qwen2_vl"], out[kind], dirs_exist_ok=True)
        other_class(kind, tokenizer, out[kind])
    return out


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def policy(folders):
    return load_policy(str(folders["qwen2_vl"]))


def wander(policy, rows=4, turns=3, limit=6, temperature=1.0, seed=0):
    """A ragged dialogue: rows of different length, image size and number of turns."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(rows, turns, limit, generator=generator).double()
    dialogue, texts = Dialogue(policy, rows, "Walk over the ice."), []
    for turn in range(turns):
        live = [row for row in range(rows) if row % turns >= turn]  # row 0 ends first
        sizes = [(56, 84) if (row + turn) % 2 else (112, 56) for row in live]
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        dialogue.observe(live, [f"Turn {turn}." + " ice" * (row % 3) for row in live], images)
        texts.append(dialogue.reply(limit, uniforms[live, turn], temperature))
    return dialogue, texts


def prefer_stopping(policy, by: float) -> None:
    """Make the end-of-turn token likelier, so that replies differ in length."""
    head, eos = policy.lm.get_output_embeddings(), policy.eos
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[eos] = by


@pytest.mark.parametrize("kind", models.SUPPORTED)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_generation_equals_training(folders, kind, temperature):
    """Log-probs and values seen in sampling are those of the training forward (float32, 1e-4)."""
    policy = load_policy(str(folders[kind]))
    policy.value_head.weight.data.normal_()
    prefer_stopping(policy, by=3.0)
    dialogue, _ = wander(policy, rows=7, temperature=temperature)
    lengths = {len(ids) for script in dialogue.transcripts for ids in script.ids}
    assert len(lengths) > 3, "the rows are not ragged enough to test anything"
    batch = collate(dialogue.transcripts)
    with torch.no_grad():
        out = policy(batch, temperature)
    assert batch["mask"].sum() > 20 and batch["values"].abs().max() > 0.1
    torch.testing.assert_close(out["logprobs"], batch["logprobs"], atol=1e-4, rtol=0)
    torch.testing.assert_close(out["values"], batch["values"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", models.SUPPORTED)
def test_positions_are_those_of_transformers(folders, kind):
    policy = load_policy(str(folders[kind]))
    dialogue, _ = wander(policy)
    for script in dialogue.transcripts:
        batch = collate([script])
        is_image = (batch["ids"] == policy.lm.config.image_token_id).int()
        expected, _ = policy.lm.model.get_rope_index(
            batch["ids"], mm_token_type_ids=is_image, image_grid_thw=torch.cat(batch["grids"])
        )
        assert torch.equal(batch["positions"], expected)


def test_pieces_equal_the_template_at_once(policy):
    """Turn by turn the chat is templated to the same ids as in one go, outside what was sampled."""
    dialogue, texts = wander(policy, rows=3, turns=3)
    script = dialogue.transcripts[2]
    messages = [{"role": "system", "content": "Walk over the ice."}]
    replies = [reply[-1] for reply in texts]  # the last row is live in all turns
    for turn, reply in enumerate(replies):
        text = f"Turn {turn}. ice ice"
        content = [{"type": "image"}, {"type": "text", "text": text}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "%"}]
    rendered = policy.tokenizer.apply_chat_template(messages, tokenize=False)
    pieces = rendered.removesuffix("\n").split("%<|im_end|>")
    patches = policy.processor.merge_size**2  # in a token
    for grid in script.grids:
        pads = "<|pad|>" * (int(grid.prod()) // patches)
        pieces = "@".join(pieces).replace("<|image_pad|>", pads, 1).split("@")
    pieces = [piece.replace("<|pad|>", "<|image_pad|>") for piece in pieces]
    expected = [policy.tokenizer(piece)["input_ids"] for piece in pieces]
    generated = [ids.tolist() for ids, mask in zip(script.ids, script.mask) if mask.any()]
    context = []
    for ids, mask in zip(script.ids, script.mask):
        if not mask.any() and ids.tolist() != [policy.eos]:
            context.append(ids.tolist())
    assert context == [piece for piece in expected if piece]
    assert len(generated) == 3 and sum(ids.count(1) for ids in context) > 0


def test_only_the_policy_decides_what_is_sampled(policy):
    """Uniforms on a fine grid hit every token as often as its probability says; banned: never."""
    state = torch.randn(1, 64)
    scores = policy.all_logprobs(state, 1.0)
    grid = (torch.arange(200_000).double() + 0.5) / 200_000
    drawn = models.sample(scores.expand(4000, -1), grid[::50], 1.0)
    share = torch.bincount(drawn, minlength=scores.shape[1]) / len(drawn)
    assert (share - scores.exp()[0]).abs().max() < 5e-4
    assert (scores[0, policy.banned] == -torch.inf).all() and policy.banned.sum() == 6
    edge = models.sample(scores, torch.tensor([1 - 2**-53], dtype=torch.float64), 1.0)
    assert not policy.banned[edge].any()
    assert models.sample(scores, grid[:1], 0) == scores.argmax()


def test_image_tokens_are_never_sampled(policy):
    """Even a head that wants nothing else; the update then still knows where the images are."""
    head = policy.lm.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[policy.lm.config.image_token_id] = 1e4
    dialogue, _ = wander(policy)
    batch = collate(dialogue.transcripts)
    chosen = batch["ids"][batch["mask"] > 0]
    assert not policy.banned[chosen].any()
    images = (batch["ids"] == policy.lm.config.image_token_id).sum(1)
    patches = policy.processor.merge_size**2  # in a token
    assert images.tolist() == [int(grid.prod(-1).sum()) // patches for grid in batch["grids"]]
    assert torch.isfinite(policy(batch)["logprobs"]).all()


def test_entropy_and_gradient_are_finite_and_right(policy):
    dialogue, _ = wander(policy)
    batch = collate(dialogue.transcripts)
    out = policy(batch)
    (out["entropy"].sum() + out["logprobs"].sum() + out["values"].sum()).backward()
    grads = [p.grad for p in policy.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)
    with torch.no_grad():
        inputs = [batch[k] for k in ("ids", "positions", "pixels", "grids")]
        hidden = policy.hidden(policy.lm.model, *inputs)
        row, column = batch["mask"].nonzero()[3].tolist()
        logits = policy.all_logprobs(hidden[row, column - 1], 1.0)
        p = torch.distributions.Categorical(logits=logits)
    assert out["entropy"][row, column].item() == pytest.approx(p.entropy().item(), abs=1e-5)
    assert out["entropy"][batch["mask"] == 0].eq(0).all()


def test_loss_touches_replies_only(policy):
    """The gradient with respect to the logits lives at the positions before generated tokens."""
    dialogue, _ = wander(policy, rows=3)
    batch = collate(dialogue.transcripts)
    seen = []
    head = policy.lm.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    policy(batch)
    hook.remove()
    assert len(seen[0]) == batch["mask"].sum()  # nothing else even reaches the head
    ends = [script.turn_ends for script in dialogue.transcripts]
    for row, positions in enumerate(ends):
        assert batch["mask"][row, positions].all()
        assert batch["turn_end"][row].nonzero().flatten().tolist() == positions


def test_value_is_read_before_its_token(policy):
    policy.value_head.weight.data.normal_()
    dialogue, _ = wander(policy, rows=3)
    batch = collate(dialogue.transcripts)
    base = policy(batch)["values"]
    column = int(batch["turn_end"][2].nonzero()[0]) - 1
    for changed, same in ((column, True), (column - 1, False)):
        other = dict(batch, ids=batch["ids"].clone())
        other["ids"][2, changed] = (other["ids"][2, changed] + 1) % 7 + 20
        difference = (policy(other)["values"] - base)[2, column].abs()
        assert (difference < 1e-6) == same


def test_images_reach_the_right_rows(policy):
    """Rows of different image counts and sizes give the same alone, shuffled and together; pixels
    count."""
    dialogue, _ = wander(policy, rows=5)
    batch = collate(dialogue.transcripts)
    together = policy(batch)["logprobs"]
    shuffled = policy(take(batch, [3, 0, 4, 2, 1]))["logprobs"]
    for place, row in enumerate([3, 0, 4, 2, 1]):
        alone = policy(take(batch, [row]))["logprobs"][0]
        torch.testing.assert_close(alone, together[row, : len(alone)], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone, shuffled[place, : len(alone)], atol=1e-5, rtol=0)
    blind = dict(batch, pixels=[torch.zeros_like(p) for p in batch["pixels"]])
    assert ((policy(blind)["logprobs"] - together).abs().amax(1) > 1e-3).all()


def test_cut_reply_is_flagged_and_closed(policy):
    prefer_stopping(policy, by=-1e4)
    dialogue, texts = wander(policy, rows=3, turns=3, limit=5)
    eos = policy.eos
    for row, script in enumerate(dialogue.transcripts):
        batch = collate([script])
        turns = len(script.turn_ends)
        assert turns == row + 1 and script.cut == turns and batch["mask"].sum() == 5 * turns
        assert not (batch["ids"][batch["mask"] > 0] == eos).any()
        for end in script.turn_ends:  # closed by a token that is context, not a sample
            assert batch["ids"][0, end + 1] == eos and batch["mask"][0, end + 1] == 0


def test_finished_rows_stop_costing(policy, monkeypatch):
    """Token slots computed: what is fed is the live rows' new tokens, not the whole history."""
    prefer_stopping(policy, by=4.0)
    fed = []
    feed = Dialogue._feed
    monkeypatch.setattr(Dialogue, "_feed",
                        lambda self, ids, *a: fed.append(ids.numel()) or feed(self, ids, *a))
    dialogue, _ = wander(policy, rows=12, turns=3, limit=20)
    needed = sum(script.length for script in dialogue.transcripts)
    assert needed * 0.9 < sum(fed) < needed * 1.35  # padding of ragged rows is the rest


def test_sampled_ids_are_the_trained_ids(policy):
    """The reply's text re-tokenises to other ids; the transcript keeps what was sampled."""
    dialogue, texts = wander(policy, rows=4, turns=2, limit=12)
    sampled = dialogue.transcripts[1].ids[1].tolist()
    assert policy.tokenizer.decode(sampled).removesuffix("<|im_end|>") == texts[0][1]
    assert policy.tokenizer(texts[0][1])["input_ids"] != sampled


def test_frames_are_processed_as_by_the_processor(policy):
    """The short cut for frames that fit the tiny model gives what the processor gives."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 56, 84, 3), dtype=np.uint8)
    out = policy.processor(images=list(frames), return_tensors="pt",
                           input_data_format="channels_last", do_resize=False)
    pixels, grids = zip(*policy.process_images(list(frames)))
    assert torch.equal(torch.stack(grids), out["image_grid_thw"])
    torch.testing.assert_close(torch.cat(pixels), out["pixel_values"], atol=1e-6, rtol=1e-6)
    sizes = [frames[0], frames[1][:28]]  # of two sizes: the long way
    assert [len(p) for p, _ in policy.process_images(sizes)] == [6, 3]


def test_tiny_model_is_small_real_and_lossless(folders, policy):
    assert sum(p.numel() for p in policy.parameters()) < 3e6
    assert type(policy.lm).__name__ == "Qwen2VLForConditionalGeneration"
    for text in ("<think>goal down</think><answer>Right, Down</answer>", "naïve 你好 \n\t x  y", ""):
        ids = policy.tokenizer(text)["input_ids"]
        assert policy.tokenizer.decode(ids) == text
    assert len(policy.tokenizer(TEXTS[1])["input_ids"]) == 9


def test_saved_policy_opens_plainly(policy, tmp_path):
    policy.value_head.weight.data.normal_()
    for p in policy.parameters():
        p.data += 0.01
    save_policy(policy, tmp_path)
    plain, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    AutoTokenizer.from_pretrained(tmp_path)
    AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for (name, a), b in zip(policy.lm.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(a, b), name
    again = load_policy(str(tmp_path))
    assert torch.equal(again.value_head.weight, policy.value_head.weight)
    with pytest.raises(ValueError, match="critic.safetensors was saved with another --critic"):
        load_policy(str(tmp_path), critic="separate")


def test_separate_critic_has_its_own_trunk(folders, tmp_path):
    policy = load_policy(str(folders["qwen2_vl"]), critic="separate")
    dialogue, _ = wander(policy, rows=3)
    batch = collate(dialogue.transcripts)
    policy(batch)["values"].sum().backward()
    assert all(p.grad is None for p in policy.lm.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.critic.parameters())
    save_policy(policy, tmp_path)
    again = load_policy(str(tmp_path), critic="separate")(batch)
    torch.testing.assert_close(again, policy(batch), rtol=0, atol=0)


@pytest.mark.parametrize("name, message", [
    ("nobody/no-such-model", "hf download nobody/no-such-model"),
    ("/no/such/folder", "no such local folder"),
    ("runs/nosuch/step_000003", "no such local folder"),
])
def test_missing_model_says_what_to_do(name, message):
    with pytest.raises(ValueError, match=message):
        load_policy(name)


def test_other_architectures_are_refused(folders, tmp_path):
    config = json.loads((folders["qwen2_vl"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="is of type 'llama'; supported: qwen2_vl"):
        load_policy(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="incomplete"):
        load_policy(str(tmp_path))


# -------------------------------------------------------------------------------- the arguments
@pytest.mark.parametrize("flags, message", [
    ("--alpha 1.5", "--alpha 1.5 is outside [0, 1]"),
    ("--gamma nan", "--gamma nan is outside [0, 1]"),
    ("--num-envs 10 --minibatches 4", "use a multiple of 4"),
    ("--num-envs 0", "--num-envs 0 must be at least 1"),
    ("--dual-clip 0.5", "--dual-clip 0.5 must be above 1"),
    ("--lr inf", "--lr inf must be above 0 and finite"),
    ("--anchor middle", "--anchor 'middle' is neither 'last' nor 'first'"),
    ("--env Chess", "no environment 'Chess'; there are FrozenLake, Sokoban"),
    ("--env-options max_turns=3", "--env-options max_turns is not set there: see --max-turns"),
    ("--env-options size=99", "size"),
    ("--env-options slippery", "name=value"),
    ("--env-options colour=1", "--env-options 'colour' is no option of FrozenLake; it"),
    ("--alhpa 0.5", "--alpha"),
])
def test_wrong_flags_are_refused_with_a_sentence(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        train_hygae.parse_args(flags.split())
    text = capsys.readouterr()
    assert stop.value.code == 2
    said = (text.out + text.err).replace("│", "").replace("\n", "").replace(" ", "")
    assert message.replace(" ", "") in said


def test_table_of_worlds(capsys, monkeypatch):
    """A world whose package is missing is named, and the others go on."""
    monkeypatch.setitem(envs.OPEN_WORLDS, "Absent", "no_such_module")
    rows = (("Absent", {}, "", "", ""), ("FrozenLake", {}, "gymnasium", "MIT", "yes"))
    monkeypatch.setattr(bench, "WORLDS", rows)
    assert bench.worlds(bench.Worlds(seeds=3)) == [
        {"name": "FrozenLake", "expert": 1.0, "random": pytest.approx(1 / 6, abs=0.17)}]
    said = capsys.readouterr()
    assert "Absent left out: No module named 'no_such_module'" in said.err
    assert re.search(r"\| FrozenLake \| gymnasium [\d.]+ \| 100% \|", said.out)


def test_every_flag_has_help(capsys):
    with pytest.raises(SystemExit):
        train_hygae.parse_args(["--help"])
    text = capsys.readouterr().out
    for name in Args.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text


# ------------------------------------------------------------------------------------- training
def small(run: Path, **changes) -> Args:
    """Seconds, not minutes: nothing is learned, everything is executed."""
    base = dict(num_envs=8, minibatches=1, cold_start=2, iterations=1, eval_episodes=4,
                save_every=1, max_turns=2, max_tokens=12, run_dir=str(run), lr=1e-3)
    return Args(**(base | changes))


def first_gradient(run: Path) -> dict:
    """AdamW's first moment after one update: 0.1 times the (clipped) gradient."""
    moments = load_file(run / "step_000001" / "optimizer.safetensors")
    return {name: tensor for name, tensor in moments.items() if name.endswith(".exp_avg")}


def assert_same_gradient(a: dict, b: dict, tolerance=1e-5):
    assert a.keys() == b.keys() and len(a) > 30
    scale = math.sqrt(sum(float((x**2).sum()) for x in a.values()))
    assert scale > 1e-4
    for name in a:
        assert (a[name] - b[name]).abs().max() / scale < tolerance, name


def torchrun(processes: int, args: Args, *more: str) -> subprocess.Popen:
    flags = []
    for name, value in args.__dict__.items():
        if isinstance(value, bool):
            flags += [f"--{name.replace('_', '-')}"] if value else []
        elif value != Args.__dataclass_fields__[name].default:
            values = value if isinstance(value, tuple) else [str(value)]
            flags += [f"--{name.replace('_', '-')}", *values]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--standalone", str(ROOT / "train_hygae.py"), *flags, *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def finish(run: subprocess.Popen, seconds: float) -> str:
    """Wait for a run and return what it printed; a run that hangs or fails fails the test."""
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun then ends its processes
        output, _ = run.communicate(timeout=60)
        pytest.fail(f"no end after {seconds} s:\n{output}")
    assert run.returncode == 0, output
    return output


def test_gradient_does_not_depend_on_micro_batches(tmp_path):
    for name, size in (("one", 8), ("three", 3)):
        # no cold start: Adam's first steps would blow up the rounding that differs
        train_hygae.main(small(tmp_path / name, micro_batch=size, kl_coef=0.1, cold_start=0,
                               bootstrap_truncated=True))
    assert_same_gradient(first_gradient(tmp_path / "one"), first_gradient(tmp_path / "three"))


def test_two_processes_are_one(tmp_path):
    """Same seed, same global batch: 1 and 2 gloo processes have the same first-update gradient, and
    log the same, its norm before clipping included."""
    for processes in (1, 2):
        run = torchrun(processes, small(tmp_path / str(processes), cold_start=0))  # as above
        finish(run, 120)
    assert_same_gradient(first_gradient(tmp_path / "1"), first_gradient(tmp_path / "2"))
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("1", "2")]
    records = [[json.loads(line) for line in log.splitlines()] for log in logs]
    for one, two in zip(*records):
        for name, value in one.items():
            if "/" in name and not name.startswith(("time/", "memory/")):
                assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def same_end(a: Path, b: Path, step: int):
    for file in ("model", "critic", "optimizer"):
        x, y = (load_file(run / f"step_{step:06d}" / f"{file}.safetensors") for run in (a, b))
        assert x.keys() == y.keys()
        for name in x:
            assert torch.equal(x[name], y[name]), name
    lines = [[{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))}
              for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (a, b)]
    assert lines[0] == lines[1]


def test_killed_run_resumes_bit_for_bit(tmp_path):
    """kill -9 in the middle, then --resume: weights, optimiser, log equal the undisturbed run's."""
    settings = dict(iterations=5, minibatches=2)
    train_hygae.main(small(tmp_path / "whole", **settings))
    killed = torchrun(1, small(tmp_path / "killed", **settings))
    deadline = time.time() + 120
    while not (tmp_path / "killed" / "step_000002" / "state.json").exists():
        assert time.time() < deadline and killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(killed.pid)], capture_output=True, text=True)
    for pid in [*children.stdout.split(), killed.pid]:
        os.kill(int(pid), signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed" / "step_000005").exists(), "killed too late to test anything"
    train_hygae.main(train_hygae.parse_args(["--resume", str(tmp_path / "killed")]))
    same_end(tmp_path / "whole", tmp_path / "killed", 5)


def test_resume_takes_flags_on_top_of_the_runs_own(tmp_path):
    train_hygae.main(small(tmp_path, num_envs=10, minibatches=2))
    flags = ["--resume", str(tmp_path), "--iterations", "2", "--minibatches=5"]
    args = train_hygae.parse_args(flags)
    assert (args.num_envs, args.minibatches, args.iterations, args.max_turns) == (10, 5, 2, 2)
    with pytest.raises(SystemExit, match="already at iteration 1 of 1"):
        train_hygae.main(train_hygae.parse_args(["--resume", str(tmp_path)]))
    assert train_hygae.main(args)["iteration"] == 2
    with pytest.raises(SystemExit, match="--kl-coef needs"):
        train_hygae.main(train_hygae.parse_args(
            ["--resume", str(tmp_path), "--iterations", "3", "--kl-coef", "0.1"]))
    with pytest.raises(SystemExit, match="another --critic"):
        train_hygae.main(train_hygae.parse_args(
            ["--resume", str(tmp_path), "--iterations", "3", "--critic", "separate"]))
    again = train_hygae.parse_args(["--resume", str(tmp_path), "--iterations", "3"])
    assert (again.critic, again.kl_coef) == ("shared", 0)  # a refused start changes nothing


def test_damaged_files_are_named(tmp_path, capsys):
    train_hygae.main(small(tmp_path, iterations=2))
    args = train_hygae.parse_args(["--resume", str(tmp_path), "--iterations", "3"])
    last = tmp_path / "step_000002"
    for name in ("optimizer.safetensors", "critic.safetensors", "model.safetensors"):
        whole = (last / name).read_bytes()
        (last / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SystemExit, match="damaged .*from the one before"):
            train_hygae.main(args)
        (last / name).write_bytes(whole)
    for name, text in (("state.json", b"{}"), ("critic.safetensors", None)):
        whole = (last / name).read_bytes()
        (last / name).write_bytes(text) if text else (last / name).unlink()
        with pytest.raises(SystemExit, match=f"damaged .*{name}.* from the one before"):
            train_hygae.main(args)
        (last / name).write_bytes(whole)
    with pytest.raises(SystemExit, match="cannot change --env from 'FrozenLake'; begin a new run"):
        train_hygae.parse_args(["--resume", str(tmp_path), "--env", "Sokoban"])
    (last / "state.json").rename(last / "state.away")
    train_hygae.setup(args)
    assert f"{last} has no state.json: it is passed over" in capsys.readouterr().err
    (last / "state.away").rename(last / "state.json")
    weights = load_file(last / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, last / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="weights missing: .*lm_head.weight"):
        load_policy(str(last))
    (tmp_path / "args.json").write_text('{"alpha": 0.5, "colour": 1}')
    with pytest.raises(SystemExit, match="args.json does not fit this version"):
        train_hygae.parse_args(["--resume", str(tmp_path)])


def test_resume_of_nothing_says_so(tmp_path):
    with pytest.raises(SystemExit, match="holds no args.json"):
        train_hygae.parse_args(["--resume", str(tmp_path)])


def test_a_run_is_never_overwritten(tmp_path):
    train_hygae.main(small(tmp_path / "run"))
    with pytest.raises(SystemExit, match="holds a run already"):
        train_hygae.main(small(tmp_path / "run"))


def test_half_written_checkpoint_is_ignored(tmp_path):
    train_hygae.main(small(tmp_path / "run", iterations=2))
    (tmp_path / "run" / "step_000003.tmp").mkdir()
    (tmp_path / "run" / "step_000003.tmp" / "state.json").write_text("{}")
    (tmp_path / "run" / "step_000004").mkdir()
    found = [p.name for p in train_hygae.checkpoints(tmp_path / "run")]
    assert found == ["step_000001", "step_000002"]


def test_faulty_environment_is_counted_and_survived(tmp_path, monkeypatch, capfd):
    step, calls = FrozenLake.step, []

    def fail(self, reply):
        calls.append(1)
        if len(calls) % 7 == 0 and not reply.startswith("<think>"):  # spare the expert
            raise OSError("the simulator is gone")
        return step(self, reply)

    reset, starts = FrozenLake.reset, []

    def fail_early(self, **options):
        starts.append(1)
        if self.split == "train" and len(starts) > 200 and len(starts) % 5 == 0:  # spare the words
            raise RuntimeError("no scene")
        return reset(self, **options)

    monkeypatch.setattr(FrozenLake, "reset", fail_early)
    monkeypatch.setattr(FrozenLake, "step", fail)
    train_hygae.main(small(tmp_path, cold_start=0))
    record = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counted = [r["rollout/env_faults"] for r in record if "rollout/env_faults" in r]
    assert counted and counted[0] >= 2
    printed = capfd.readouterr().err
    assert "the simulator is gone" in printed and "no scene" in printed


def test_no_finite_gradient_is_an_error_not_silence(tmp_path, monkeypatch):
    value_loss = train_hygae.hygrow.value_loss
    monkeypatch.setattr(train_hygae.hygrow, "value_loss",
                        lambda *a, **k: value_loss(*a, **k) * float("nan"))
    with pytest.raises(RuntimeError, match="no update of iteration 1 had a finite gradient"):
        train_hygae.main(small(tmp_path))


def test_metric_table_of_the_readme_is_complete(tmp_path):
    train_hygae.main(small(tmp_path))
    names = {name for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
             for name in json.loads(line) if "/" in name}
    readme = (ROOT / "README.md").read_text()
    assert not [name for name in names if f"`{name}`" not in readme]


@pytest.mark.parametrize("changes", [
    dict(env="Sokoban"), dict(critic="separate", kl_coef=0.01), dict(anchor="first", alpha=1.0),
    dict(env_options=("slippery=True", "size=5", "image_size=84")), dict(epochs=2, dual_clip=0.0),
])
def test_variants_run(tmp_path, changes):
    result = train_hygae.main(small(tmp_path, **changes))
    assert result["iteration"] == 1 and math.isfinite(result["eval/return"])


def test_groups_of_seeds_do_not_meet(tmp_path, monkeypatch):
    """Each episode of two iterations has a seed of its own, and no seed of the evaluation gives a
    level of training."""
    reset, seeds = FrozenLake.reset, []

    def note(self, *, seed):
        if self.split == "train":
            seeds.append(seed)
        return reset(self, seed=seed)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenLake, "reset", note)
        train_hygae.main(small(tmp_path, cold_start=0, iterations=2))
    assert len(set(seeds[-16:])) == 16  # 2 x 8 episodes; before them, the tiny model's words
    args = Args()
    train, held_out = args.make_env("train"), args.make_env("eval")
    seen = {train.reset(seed=seed)[1]["level"] for seed in range(500)}
    assert not seen & {held_out.reset(seed=seed)[1]["level"] for seed in range(500)}


@pytest.mark.slow
def test_training_learns(tmp_path):
    """From a cold start to clearly more, on held-out levels, by the README's own settings in short.

    The two evaluations have 256 and 512 episodes, so the standard error of their difference is
    below 0.04 whatever the rates: a run that learns nothing passes with odds below 1 in 1000 (gain
    above 0.2, five of its standard errors at these rates). The README's three seeds gain more than
    0.4 in as many iterations, so a false alarm is about as rare.
    """
    args = Args(iterations=15, eval_every=15, run_dir=str(tmp_path))
    run = torchrun(2, args)
    finish(run, 1000)
    record = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    success = {r["label"]: r["eval/success"] for r in record if "label" in r}
    print(success)
    assert success["untrained"] < 0.02
    assert 0.05 < success["cold start"] < 0.4
    assert success["end"] > success["cold start"] + 0.2
