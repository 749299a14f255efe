"""What billions of parameters need and the tiny model does without: shards, adapters, frozen parts.

    lighten(policy, ...)     --freeze-vision, --lora-rank, --grad-checkpointing
    shard(policy, ...)       --shard, --bf16, --offload: FSDP2, a piece of each tensor on each GPU
    gathered(policy)         all weights of a sharded policy in one place, while it generates
    full_tensors(policy)     the plain model's tensors, whole and merged: what is saved
    AdapterReference         the KL's reference without a second model, for --lora-rank
    passes(count, sharded)   as many passes on every process, so that none waits for ever
    explained(script, run)   what a process says when another one is lost
    halving(run, ...)        an update that ran out of memory, again with a smaller micro-batch
    update_flops, peak_memory   for the log

Both train scripts call the same functions; with none of the flags each of them changes nothing.
"""

import resource
import signal
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

# ------------------------------------------------------------------------ frozen parts, adapters
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def trunks(policy) -> list:
    """The policy's trunk and, with --critic separate, the critic's."""
    return [policy.lm.model] + ([policy.critic] if policy.critic is not None else [])


def blocks(module: nn.Module) -> list:
    """Its transformer layers, of text and vision."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def lighten(policy, *, freeze_vision=False, lora_rank=0, grad_checkpointing=False, seed=0) -> None:
    """Freeze and adapt in place, before an optimiser sees the parameters.

    freeze_vision: the vision towers are not trained; each frame is then encoded once, when it is
    first seen, and its features take the place of its pixels. lora_rank: the text layers get LoRA
    adapters of this rank (arXiv 2106.09685; scale 2), all else but the value head is frozen, the
    vision tower too. grad_checkpointing: layers are recomputed in the backward pass.
    """
    if lora_rank:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ValueError("--lora-rank needs a package: pip install -r requirements-large.txt"
                             ) from error
        names = f".*language_model.*({'|'.join(ADAPTED)})"
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=names)
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of the first factor; the second is 0
            inject_adapter_in_model(config, policy)  # freezes everything else
        policy.value_head.requires_grad_(True)
    if freeze_vision or lora_rank:
        for trunk in trunks(policy):
            trunk.visual.requires_grad_(False)
        policy.encode_once = True
    if grad_checkpointing:
        for trunk in trunks(policy):
            trunk.activation_checkpointing_enable({"use_reentrant": False})
        for block in blocks(policy):  # the flag of the layer alone: dropout, if any, stays off
            block.training = True


def adapter_state(policy) -> dict:
    """All that is trained beside frozen weights: adapters and value head, by name."""
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


def load_adapter(policy, state: dict, source) -> None:
    """Copy `adapter_state` back; raises ValueError where it is of another rank or critic."""
    own = adapter_state(policy)
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in own.items()}:
        raise ValueError(f"{source} was saved with another --lora-rank or --critic")
    for name, tensor in own.items():
        tensor.copy_(state[name])


class AdapterReference:
    """An earlier state of an adapted policy: its adapters are put in place for each forward pass.

    Both policies share the frozen weights, so the reference costs only its adapters' memory.
    """

    def __init__(self, policy, state: dict):
        self.policy = policy
        self.state = {name: tensor.to(policy.device) for name, tensor in state.items()}

    @torch.no_grad()
    def __call__(self, batch: dict, temperature: float = 1.0) -> dict:
        parameters = dict(self.policy.named_parameters())
        own = {name: parameters[name].data for name in self.state}
        try:
            for name, tensor in self.state.items():
                parameters[name].data = tensor
            return self.policy(batch, temperature)
        finally:
            for name, tensor in own.items():
                parameters[name].data = tensor


# ------------------------------------------------------------------------------------ sharding
def shard(policy, *, bf16: bool = False, offload: bool = False) -> None:
    """FSDP2 over all processes, in place: each holds a piece of every weight, gradient and moment.

    bf16: layers compute in bfloat16; what the optimiser updates, gradient sums, log-softmax, value
    head and losses stay float32. offload: weights, gradients and moments lie in CPU memory. A
    frozen vision tower stays whole on each process, as it runs outside of the update.
    """
    cuda = torch.cuda.is_available()
    options = dict(
        mesh=init_device_mesh(policy.device.type, (dist.get_world_size(),)),
        offload_policy=CPUOffloadPolicy(pin_memory=cuda) if offload else OffloadPolicy(),
    )
    whole = MixedPrecisionPolicy()
    half = whole
    if bf16:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    towers = [trunk.visual for trunk in trunks(policy) if policy.encode_once]
    left = {p for tower in towers for p in tower.parameters()}
    for tower in towers:
        tower.to(policy.device)
    apart = {id(block) for tower in towers for block in blocks(tower)}
    for block in blocks(policy):
        if id(block) not in apart:
            fully_shard(block, mp_policy=half, **options)
    fully_shard(policy.value_head, mp_policy=whole, **options)
    root = half if not bf16 else MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(policy, mp_policy=root, ignored_params=left, **options)
    for unit in units(policy):
        unit.set_gradient_divide_factor(1.0)  # a sum: every loss is divided by a count of all ranks
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # generation calls inner modules first, and the first module called would become FSDP's root
    fully_shard.state(policy)._lazy_init()


def units(module) -> list:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


@contextmanager
def gathered(policy):
    """Within it, every process has all weights of a sharded policy: no forward pass communicates.

    So processes may make as many passes as they like. Nothing is to be trained inside.
    """
    sharded = units(policy)
    for unit in sharded:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in sharded:
            unit.set_reshard_after_forward(unit is not policy, recurse=False)
            unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together (every process must call it); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, placed and cut as the parameter is."""
    if isinstance(parameter, DTensor):
        tensor = tensor.to(parameter.device_mesh.device_type)
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device)


def full_tensors(policy, keep: bool = True) -> dict:
    """The plain model's state: shards put together, adapters added to their weights, on the CPU.

    Every process must call it; only those with `keep` hold on to what they get.
    """
    adapted = {name: m for name, m in policy.named_modules() if hasattr(m, "get_delta_weight")}
    out = {}
    for name, tensor in policy.state_dict().items():
        tensor = whole(tensor.detach())
        if not keep or ".lora_" in name:
            continue
        owner, inner, leaf = name.partition(".base_layer.")
        if inner and leaf == "weight":
            tensor = tensor + adapted[owner].get_delta_weight("default").detach()
        out[f"{owner}.{leaf}" if inner else name] = tensor.cpu()
    return out


def clip_gradients(parameters: list, limit: float) -> float:
    """Clip to a norm over all processes -> the norm before, inf or nan included."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return float(whole(norm))


def passes(count: int, sharded: bool) -> int:
    """How many passes each process makes over its `count` rows: with shards, where a pass is a step
    that all take together, as many as the one with the most; it makes the missing ones idly."""
    if not sharded:
        return count
    most = torch.tensor(count)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


@contextmanager
def explained(script: str, run: str):
    """Turn what a process sees when another one of the run is lost into a sentence.

    The loss shows as a broken connection in the next exchange, or as torchrun's SIGTERM.
    """
    advice = (f"{script}: another process of this run has ended or was stopped; its own error, if "
              f"any, is above. Nothing before the last checkpoint is lost: go on with --resume "
              f"{run or 'and the folder in runs/'}")

    def stop(*_):
        raise SystemExit(f"{advice} (stopped by SIGTERM)")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except RuntimeError as error:
        lost = ("by peer", "broken pipe", "timed out", "socket closed", "remote process exited")
        if any(words in str(error).lower() for words in lost):
            raise SystemExit(f"{advice} ({str(error).splitlines()[0]})") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


# ----------------------------------------------------------------------------- out of memory
def halving(run, size: int, parameters: list, sharded: bool) -> tuple:
    """run(size), again with half the size as often as it runs out of memory.

    run: forward and backward passes over a minibatch, `size` rows a pass; the gradient does not
    depend on `size`. What a failed try left in the gradients is thrown away.
    Returns (result, size, tries that failed). Raises RuntimeError for sharded weights, where the
    other processes wait inside the pass that failed, and where size is 1 already.
    """
    failed = 0
    while True:
        try:
            return run(size), size, failed
        except torch.OutOfMemoryError as error:
            if size == 1 or sharded:
                raise RuntimeError(
                    f"out of memory with --micro-batch {size}: "
                    + ("with --shard it cannot be halved on the way; resume with a smaller one"
                       if size > 1 else "--grad-checkpointing, --shard on more processes, "
                       "--offload or --lora-rank need less")
                ) from error
        for p in parameters:  # outside of `except`, whose traceback holds on to activations
            p.grad = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size, failed = (size + 1) // 2, failed + 1


# --------------------------------------------------------------------------------- measurement
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16 FLOP/s, dense, of the data sheets


def peak_flops(device) -> float | None:
    """What the GPU can do at most in bfloat16, where it is a known one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for known, flops in PEAKS.items() if known in name), None)


def update_flops(policy, batch: dict) -> float:
    """Floating-point operations of one pass over a collated batch, forward and backward.

    2 a weight and token forward, 2 for the gradient of its input, 2 for its own where it is
    trained; attention scores, recomputation and padding are not counted. A frozen vision tower
    costs nothing here: its frames were encoded before.
    """
    def cost(module: nn.Module, count: float) -> float:
        return count * sum((6 if p.requires_grad else 4) * p.numel() for p in module.parameters())

    total = cost(policy.lm.get_output_embeddings(), float(batch["mask"].sum()))
    for trunk in trunks(policy):
        total += cost(trunk.language_model.layers, float(batch["length"].sum()))
        if not policy.encode_once:
            total += cost(trunk.visual.blocks, sum(len(p) for p in batch["pixels"] if p is not None))
    return total


def peak_memory(device) -> float:
    """MB: on a GPU what torch held at most, else this process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if sys.platform == "darwin" else 1024)  # bytes there, kB elsewhere
