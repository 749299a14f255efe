"""Frozen parts, adapters, checkpointing, low memory, random weights: what large.py adds, in one
process. Shards and lost processes are in test_distributed.py."""

import json
import math
import re

import numpy as np
import pytest
import torch
import tyro
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

import bench
import hygrow
import large
import models
import train_hygae
from large import AdapterReference, adapter_state, halving, lighten, load_adapter
from models import Dialogue, collate, load_policy, save_policy, take
from test_training import assert_same_gradient, first_gradient, folders, same_end, small, wander

__all__ = ["folders"]  # a fixture
torch.set_num_threads(1)
KINDS = models.SUPPORTED


def load(folders, kind="qwen2_vl", **how):
    return load_policy(str(folders[kind]), **how)


def gradients(policy, batch) -> dict:
    policy.zero_grad(set_to_none=True)
    out = policy(batch)
    (out["logprobs"].sum() + out["entropy"].sum() + out["values"].sum()).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------- frozen vision
@pytest.mark.parametrize("kind", KINDS)
def test_features_take_the_place_of_pixels(folders, kind):
    """A frozen tower encodes each frame once; log-probs, values and the other gradients are those
    of the whole model, and nothing runs the tower in the update."""
    plain, frozen = load(folders, kind), load(folders, kind)
    plain.value_head.weight.data.normal_()
    frozen.value_head.weight.data.copy_(plain.value_head.weight)
    lighten(frozen, freeze_vision=True)
    batches = [collate(wander(policy)[0].transcripts) for policy in (plain, frozen)]
    assert torch.equal(batches[0]["ids"], batches[1]["ids"])
    assert frozen.encode_once and batches[1]["pixels"][0].shape != batches[0]["pixels"][0].shape
    ran = []
    frozen.lm.model.visual.register_forward_pre_hook(lambda *_: ran.append(1))
    expected, grads = gradients(plain, batches[0]), gradients(frozen, batches[1])
    assert not ran
    assert all(n in grads or ".visual." in n for n in expected) and len(grads) > 15
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    frozen.process_images([np.zeros((56, 56, 3), dtype=np.uint8)] * 3)
    assert len(ran) == 1  # one call for all frames


def test_frozen_run_trains_the_rest(tmp_path):
    train_hygae.main(small(tmp_path / "run", freeze_vision=True))
    before = load_file(tmp_path / "run/step_000000/model.safetensors")
    after = load_file(tmp_path / "run/step_000001/model.safetensors")
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    assert not any(moved[name] for name in moved if ".visual." in name or "visual." in name)
    assert all(moved[name] for name in moved if "visual." not in name and "layers" in name)


# ------------------------------------------------------------------------------------- adapters
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_alone_and_are_merged_on_save(folders, kind, tmp_path):
    """Every trainable tensor gets a gradient, also with checkpointing; the saved folder opens with
    plain from_pretrained and says the same; the adapters go on bit for bit on their base."""
    policy = load(folders, kind)
    policy.value_head.weight.data.normal_()
    lighten(policy, lora_rank=2, grad_checkpointing=True, seed=3)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or name.startswith("value_head") for name in trained)
    assert len(trained) == 2 + 2 * 7 * policy.lm.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1)
    batch = collate(wander(policy)[0].transcripts)
    assert all(g is not None and g.abs().max() > 0 for g in gradients(policy, batch).values())
    save_policy(policy, tmp_path)
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    merged, base = load_policy(str(tmp_path)), load(folders, kind)
    lighten(merged, freeze_vision=True)  # features for pixels
    with torch.no_grad():
        lighten(base, freeze_vision=True)
        a, b, c = (p(batch)["logprobs"] for p in (policy, merged, base))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert (a - c).abs().max() > 1e-2
    again = load(folders, kind)
    lighten(again, lora_rank=2, seed=4)
    load_adapter(again, load_file(tmp_path / "adapter.safetensors"), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(batch)["logprobs"], a)
    other = load(folders, kind)
    lighten(other, lora_rank=3)
    with pytest.raises(ValueError, match="another --lora-rank"):
        load_adapter(other, load_file(tmp_path / "adapter.safetensors"), "it")


def test_reference_of_adapters_needs_no_second_model(folders):
    """It answers as the policy did when it was taken, and leaves the policy as it found it, also
    between a forward and its backward pass."""
    policy = load(folders)
    lighten(policy, lora_rank=2)
    batch = collate(wander(policy)[0].transcripts)
    state = {name: p.clone() for name, p in adapter_state(policy).items()}
    with torch.no_grad():
        before = policy(batch)["logprobs"]
        for p in policy.parameters():
            if p.requires_grad:
                p.normal_(std=0.1)
        now = policy(batch)["logprobs"]
    expected = gradients(policy, batch)
    reference = AdapterReference(policy, state)
    policy.zero_grad(set_to_none=True)
    out = policy(batch)
    assert torch.equal(reference(batch)["logprobs"], before)
    (out["logprobs"].sum() + out["entropy"].sum() + out["values"].sum()).backward()
    for name, p in policy.named_parameters():
        if p.requires_grad:
            assert torch.equal(p.grad, expected[name]), name
    with torch.no_grad():
        assert torch.equal(policy(batch)["logprobs"], now) and not torch.equal(now, before)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_adapted_run_resumes_bit_for_bit(tmp_path, critic):
    settings = dict(lora_rank=2, kl_coef=0.1, iterations=2, critic=critic)
    train_hygae.main(small(tmp_path / "whole", **settings))
    train_hygae.main(small(tmp_path / "parts", **settings | dict(iterations=1)))
    train_hygae.main(train_hygae.parse_args(
        ["--resume", str(tmp_path / "parts"), "--iterations", "2"]))
    for file in ("model", "critic", "adapter"):
        a, b = (load_file(tmp_path / run / "step_000002" / f"{file}.safetensors")
                for run in ("whole", "parts"))
        # --iterations anneals the first update otherwise: a small difference, not another run
        assert a.keys() == b.keys() and all((a[n] - b[n]).abs().max() < 3e-3 for n in a)
    records = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").open()]
    assert records[-2]["policy/reference_kl"] != 0  # of the second iteration


def test_killed_adapted_run_goes_on_as_if_nothing_had_been(tmp_path):
    import shutil

    settings = dict(lora_rank=2, iterations=3, kl_coef=0.1)
    train_hygae.main(small(tmp_path / "whole", **settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "step_000003")
    train_hygae.main(train_hygae.parse_args(["--resume", str(tmp_path / "killed")]))
    same_end(tmp_path / "whole", tmp_path / "killed", 3)


# ---------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_recomputed_layers_have_the_same_gradient(folders, kind, critic):
    plain, saving = (load(folders, kind, critic=critic) for _ in range(2))
    lighten(saving, grad_checkpointing=True)
    batch = collate(wander(plain)[0].transcripts)
    expected, grads = gradients(plain, batch), gradients(saving, batch)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    calls = []
    layer = saving.lm.model.language_model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(saving, batch)
    assert len(calls) == 2  # once forward, once again
    assert not layer.training  # dropout, if there were any, would stay off
    dialogue, _ = wander(saving)  # generation has its cache
    with torch.no_grad():
        out = saving(collate(dialogue.transcripts))
    torch.testing.assert_close(out["logprobs"], collate(dialogue.transcripts)["logprobs"],
                               atol=1e-4, rtol=0)


def test_critic_has_its_own_learning_rate(tmp_path):
    """The first Adam step moves each weight by its learning rate (betas are corrected)."""
    run = tmp_path / "run"
    train_hygae.main(small(run, critic="separate", critic_lr=1e-2, lr=1e-3, cold_start=0))
    move = {}
    for file in ("model", "critic"):
        a, b = (load_file(run / f"step_00000{i}" / f"{file}.safetensors") for i in (0, 1))
        updates = [u for name in a for u in [(b[name] - a[name]).abs().max()] if u > 0]
        assert len(updates) > 2
        move[file] = torch.stack(updates).median().item()
    # two epochs, one minibatch: two steps of about the learning rate each
    assert 1e-3 < move["model"] < 2.2e-3 and 1e-2 < move["critic"] < 2.2e-2


# -------------------------------------------------------------------------------- out of memory
def starve(monkeypatch, most: int) -> list:
    """Forward passes of more than `most` rows run out of memory, after some gradient was left."""
    sizes, forward = [], models.Policy.forward

    def limited(self, batch, temperature=1.0):
        rows = len(batch["mask"])
        if torch.is_grad_enabled():
            sizes.append(rows)
        out = forward(self, batch, temperature)
        if torch.is_grad_enabled() and rows > most:
            out["logprobs"].sum().backward()
            raise torch.OutOfMemoryError("a made-up shortage")
        return out

    monkeypatch.setattr(models.Policy, "forward", limited)
    return sizes


def test_out_of_memory_is_halved_counted_and_changes_nothing(tmp_path, monkeypatch):
    train_hygae.main(small(tmp_path / "rich", cold_start=0, micro_batch=8))
    with monkeypatch.context() as patch:
        sizes = starve(patch, most=2)
        train_hygae.main(small(tmp_path / "poor", cold_start=0, micro_batch=8))
    assert sizes[:3] == [8, 4, 2] and set(sizes[2:]) == {2}  # found once, then kept
    assert_same_gradient(first_gradient(tmp_path / "rich"), first_gradient(tmp_path / "poor"))
    record = [json.loads(line) for line in (tmp_path / "poor/metrics.jsonl").open()]
    assert [r["optim/oom_retries"] for r in record if "optim/oom_retries" in r] == [2]


def test_out_of_memory_at_one_row_says_what_helps(tmp_path, monkeypatch):
    starve(monkeypatch, most=0)
    with pytest.raises(RuntimeError, match="out of memory with --micro-batch 1: --grad-check"):
        train_hygae.main(small(tmp_path, cold_start=0))
    with pytest.raises(RuntimeError, match="with --shard it cannot be halved"):
        halving(lambda size: (_ for _ in ()).throw(torch.OutOfMemoryError()), 8, [], True)


# ------------------------------------------------------------------------------- random weights
@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_need_a_shape_only(folders, kind, tmp_path):
    import shutil

    shutil.copytree(folders[kind], tmp_path / "shape")
    for file in (tmp_path / "shape").glob("*.safetensors"):
        file.unlink()
    policy = load_policy(str(tmp_path / "shape"), random_init=True, seed=1)
    again = load_policy(str(tmp_path / "shape"), random_init=True, seed=1)
    real = load(folders, kind)
    state = real.state_dict()
    assert {k: v.shape for k, v in policy.state_dict().items()} == {
        k: v.shape for k, v in state.items()}
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in policy.state_dict().items())
    assert any(not torch.equal(v, state[k]) for k, v in policy.state_dict().items())
    with pytest.raises(ValueError, match="incomplete or damaged"):
        load_policy(str(tmp_path / "shape"))


# ------------------------------------------------------------------------------- the real classes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(5, 7), (28, 28), (61, 97), (30, 300), (252, 84)])
def test_frames_of_any_size(folders, kind, size):
    """The tokens a frame gets are the tokens the text holds; generation equals training."""
    policy = load(folders, kind)
    frame = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    dialogue = Dialogue(policy, 2, "Walk over the ice.")
    uniforms = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    for turn in range(3):
        dialogue.observe([0, 1], ["Turn 1."] * 2, [frame, frame.transpose(1, 0, 2)])
        dialogue.reply(4, uniforms[:, turn])
    batch = collate(dialogue.transcripts)
    merge = policy.processor.merge_size**2
    images = (batch["ids"] == policy.lm.config.image_token_id).sum(1)
    assert images.tolist() == [int(g.prod(-1).sum()) // merge for g in batch["grids"]]
    with torch.no_grad():
        out = policy(batch)["logprobs"]
    torch.testing.assert_close(out, batch["logprobs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_keeps_what_is_optimised_in_float32(folders, kind):
    policy = load(folders, kind)
    policy.bf16 = True
    batch = collate(wander(policy)[0].transcripts)
    out = policy(batch)
    assert all(out[name].dtype == torch.float32 for name in out)
    hidden = policy.hidden(policy.lm.model, *(batch[k] for k in ("ids", "positions", "pixels",
                                                               "grids")))
    assert policy.all_logprobs(hidden, 1.0).exp().sum(-1).sub(1).abs().max() < 1e-5
    (out["logprobs"].sum() + out["values"].sum()).backward()
    assert {p.grad.dtype for p in policy.parameters()} == {torch.float32}
    exact = load(folders, kind)(batch)["logprobs"]
    gap = (out["logprobs"] - exact).abs().max()
    assert 1e-4 < gap < 1, "bfloat16 rounds, a little"


def test_bf16_run_starts_from_a_ratio_of_one(tmp_path):
    """Old log-probs are read by the pass that is trained: in the only update nothing has moved."""
    train_hygae.main(small(tmp_path, bf16=True, epochs=1, cold_start=0))
    record = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    kl = [r["policy/approx_kl"] for r in record if "policy/approx_kl" in r]
    assert kl == [pytest.approx(0, abs=1e-6)]


def test_conversation_that_outgrows_the_model_ends_with_a_whole_turn(tmp_path):
    args = small(tmp_path, max_turns=5, max_context=150, cold_start=0)
    run = train_hygae.main(args)
    assert math.isfinite(run["eval/return"]) and run["eval/context_full"] > 0
    policy = load_policy(str(tmp_path / "step_000001"))
    envs = args.make_envs("train", 6)
    uniforms = train_hygae.noise(args, 6, 0)
    batch, stats = train_hygae.collect(policy, envs, list(range(6)), args, 0, uniforms, 1.0)
    assert stats[:, train_hygae.STATS.index("full")].sum() > 0
    assert batch["length"].max() <= 150
    images = (batch["ids"] == policy.lm.config.image_token_id).sum(1)
    assert images.tolist() == [int(g.prod(-1).sum()) for g in batch["grids"]]
    wide = Args5000(args)
    batch, stats = train_hygae.collect(policy, envs, list(range(6)), wide, 0, uniforms, 1.0)
    assert stats[:, train_hygae.STATS.index("full")].sum() == 0 and batch["length"].max() > 150


def Args5000(args):
    return train_hygae.Args(**args.__dict__ | {"max_context": 5000})


@pytest.mark.parametrize("flags, message", [
    ("--offload", "--offload needs --shard"),
    ("--shard --lora-rank 4", "--lora-rank 4 does not go with --shard"),
    ("--random-init", "--random-init needs --model"),
    ("--lora-rank -1", "--lora-rank -1 must be 0 or more"),
])
def test_flags_that_do_not_go_together(flags, message, capsys):
    import train_grow

    for script in (train_hygae, train_grow):
        with pytest.raises(SystemExit):
            script.parse_args(flags.split())
        text = capsys.readouterr()
        said = (text.out + text.err).replace("│", "").replace("\n", "").replace(" ", "")
        assert message.replace(" ", "") in said


def test_shards_need_torchrun(tmp_path):
    with pytest.raises(SystemExit, match="--shard needs torchrun"):
        train_hygae.main(small(tmp_path, shard=True))


# -------------------------------------------------------------------------------- for the log
def test_flops_by_hand(folders):
    """6 a weight and token, 4 where it is frozen; the vision tower counts patches."""
    policy = load(folders)
    batch = collate(wander(policy)[0].transcripts)
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    text, sight = policy.lm.model.language_model.layers, policy.lm.model.visual.blocks
    head, generated = count(policy.lm.lm_head), int(batch["mask"].sum())
    tokens, patches = int(batch["length"].sum()), sum(len(p) for p in batch["pixels"])
    expected = 6 * (count(text) * tokens + count(sight) * patches + head * generated)
    assert large.update_flops(policy, batch) == expected
    lighten(policy, freeze_vision=True)
    assert large.update_flops(policy, batch) == 6 * (count(text) * tokens + head * generated)


def test_micro_batches_of_take_are_the_rows(folders):
    """What bucketing by length leaves out is padding alone."""
    policy = load(folders)
    batch = collate(wander(policy, rows=6)[0].transcripts)
    order = batch["length"].argsort().tolist()
    with torch.no_grad():
        whole = policy(batch)["logprobs"]
        for rows in (order[:2], order[2:4], order[4:]):
            part = policy(take(batch, rows))["logprobs"]
            torch.testing.assert_close(part, whole[rows, : part.shape[1]], atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2_vl"])
    assert len(tokenizer) == len(policy.tokenizer)


TERMS = {  # flags under which one term alone moves the policy
    "policy": dict(value_coef=0.0, entropy_coef=0.0),
    "value": dict(value_coef=1.0, entropy_coef=0.0),
    "KL": dict(value_coef=0.0, entropy_coef=0.0, kl_coef=0.3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("term", TERMS)
def test_gradient_of_each_term_does_not_depend_on_the_cut(folders, kind, term, tmp_path):
    """Micro-batches of any size, packed rows, two processes: the same gradient to 1e-5."""
    policy = load(folders, kind)
    batch = collate(wander(policy, rows=7)[0].transcripts)
    reference = load(folders, kind)
    with torch.no_grad():  # an earlier policy: else the KL is 0
        for name, p in reference.named_parameters():
            p += 0.05 * p.std() if "lm_head" not in name and p.ndim > 1 else 0
    noise = torch.Generator().manual_seed(0)
    rewards = torch.randn(batch["mask"].shape, generator=noise) * batch["turn_end"]

    def gradient(size, pieces=1, layout="bucketed by length"):
        args = small(tmp_path, micro_batch=size, minibatches=1, **TERMS[term])
        own = batch | {"rewards": rewards.clone(), "logprobs": batch["logprobs"].clone()}
        train_hygae.score(policy, reference if args.kl_coef else None, own, args)
        if term == "KL":
            assert (own["rewards"] != rewards).any()
            own["rewards"], own["values"] = own["rewards"] - rewards, torch.zeros_like(rewards)
        own["advantages"], own["returns"] = hygrow.hybrid_gae(
            own["rewards"], own["values"], own["mask"], own["turn_end"], gamma=0.9, lam=0.9,
            alpha=0.5)
        if term == "value":
            own["advantages"] = torch.zeros_like(rewards)
        policy.zero_grad(set_to_none=True)
        if layout == "packed":
            bench.update_once(policy, own, layout, args)
        else:  # each process takes a part of the rows, the count of tokens is of all
            for rows in torch.arange(7).chunk(pieces):
                train_hygae.accumulate(policy, own, rows.tolist(), own["mask"].sum(), args, 1, size)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in policy.named_parameters()}

    whole = gradient(7)
    for cut in (gradient(1), gradient(3), gradient(7, pieces=2), gradient(2, pieces=2),
                gradient(7, layout="packed"), gradient(3, layout="packed")):
        assert_same_gradient(whole, cut)
    head = whole["value_head.weight"].abs().max()
    assert head > 0 if term == "value" else head == 0


def test_speed_measures_rollout_and_every_update(capsys):
    bench.speed(bench.Speed(num_envs=6, max_tokens=4, repeats=1))
    printed = capsys.readouterr().out
    for name in (*("models.Dialogue", "generate afresh every turn"), *bench.UPDATES):
        assert re.search(rf", {name}: [1-9][\d,]* tokens/s", printed), name
    assert printed.count("x\n") == 4, "a ratio is missing"


# ------------------------------------------------------------------------ the large ones' shape
def test_large_shapes_have_the_published_parameter_counts(capsys):
    """Counts that the hub shows for the three; the table's first row by hand."""
    assert bench.size(bench.Size(gpus=(1,))) == {
        "Qwen2-VL-2B": 2_208_985_600, "Qwen2.5-VL-3B": 3_754_622_976, "Qwen2-VL-7B": 8_291_375_616}
    printed = capsys.readouterr().out
    # weights 4 bytes, training 12, copies 2; 128 x 2400 tokens x 28 layers x 2 heads x 128 x 4
    # bytes of cache; 2 x (28 x 2400 x 1536 x 2 + 600 x 151936 x 24) bytes of an update
    assert "| Qwen2-VL-2B | 2,208,985,600 |  | 1 | 8.8 | 26.5 | 4.4 | 8.8 | 4.8 | 48.6 |" in printed
    lora = "| Qwen2.5-VL-3B | 3,754,622,976 | --lora-rank 16 | 1 | 15.0 | 0.0 | 0.0 | 11.3 | 5.1 | "
    assert lora + "26.3 |" in printed


@pytest.mark.parametrize("name", bench.SHAPES)
def test_folder_of_a_large_shape_trains(name, tmp_path, monkeypatch):
    """The folder that `bench.py size --out` writes, here of fewer and narrower layers."""
    kind, tied, text, vision = bench.SHAPES[name]
    text = text | dict(hidden_size=128 * 2, intermediate_size=64, num_hidden_layers=1,
                       num_attention_heads=2, num_key_value_heads=1, vocab_size=1000)
    wide = "out_hidden_size" if "out_hidden_size" in vision else "hidden_size"
    vision = vision | dict(depth=1, num_heads=2) | {wide: 256}
    monkeypatch.setitem(bench.SHAPES, name, (kind, tied, text, vision))
    folder = tmp_path / "shape"
    bench.size(bench.Size(shape=name, out=str(folder), env="FrozenLake"))
    run = tmp_path / "run"
    train_hygae.main(small(run, model=str(folder), random_init=True, cold_start=0, lora_rank=2,
                           max_tokens=3))
    last = [r for r in map(json.loads, (run / "metrics.jsonl").open()) if "loss/total" in r][-1]
    assert last["optim/skipped"] == 0 and last["rollout/all_tokens"] > 100


@pytest.mark.parametrize("flags, message", [
    (["--gpus", "0"], "--gpus (0,) must be at least 1"),
    (["--micro-batch", "0"], "--micro-batch 0 must be at least 1"),
    (["--generated", "9", "--tokens", "8"], "--generated 9 is more than --tokens 8"),
    (["--shape", "Qwen2-VL-2B"], "--shape and --out go together"),
    (["--shape", "GPT", "--out", "x"], "--shape GPT is not known; known: Qwen2-VL-2B"),
])
def test_wrong_flags_of_size(flags, message, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(bench.Size, args=flags)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
