"""The policy: a Qwen vision-language model with a value head; one code for tiny and large.

    make_tiny(folder, texts, seed)  a real Qwen2-VL below 3 M parameters, as a Hugging Face folder
    load_policy(folder_or_hub_id)   Qwen2-VL, Qwen2.5-VL or Qwen3-VL -> Policy
    save_policy(policy, folder)     opens with plain `from_pretrained`; the critic lies beside it
    Transcript, collate, take       a conversation as token ids; many as padded [B, T] tensors
    Dialogue                        generation: B conversations in one KV cache, each token fed once
    Policy.forward                  training: log-probs, entropy, values of the generated tokens

Index convention, everywhere: entry [b, t] of `logprobs` and `values` belongs to token t and was
read at position t - 1, so `values[b, t]` is the value of the state BEFORE token t is sampled.
"""

import copy
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
)
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.logging import disable_progress_bar

from large import adapter_state, full_tensors

disable_progress_bar()  # "Writing model shards" at every checkpoint
END_OF_TURN = "<|im_end|>"
SUPPORTED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---------------------------------------------------------------------------------- tiny model
def tiny_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each word of `texts` is one token; other text falls back to bytes.

    It has Qwen's special tokens and chat template: nothing else needs to know which one is in use.
    """
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+| ?[0-9]|, ?|[^A-Za-z0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,  # an upper bound: merging stops when every word of `texts` is one token
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    chat = ["system", "user", "assistant"]  # role words of the template
    tokenizer.train_from_iterator(chat + sorted(set(texts)), trainer)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny(folder: str | Path, texts: list[str], seed: int, patch: int = 28) -> None:
    """Write a randomly initialised Qwen2-VL (about 0.5 M parameters) as an ordinary model folder.

    texts: whatever the environments say and expect; their words become the vocabulary. patch: px a
    side of a visual token, which should be a cell of the world's grid.
    RoPE is the trap at this size: with the usual theta of 1e6 and a head of 16 the height and width
    phases of neighbouring cells are the same to three digits, and the model cannot see where things
    are. Theta 2.5 (text) and 10 (vision) with a wide initialisation learn to see in some hundred
    steps. A patch is one cell; of 28 px (the large models merge 2 x 2 patches of 14 px into one).
    """
    tokenizer = tiny_tokenizer(texts)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            initializer_range=0.1,
            max_position_embeddings=4096,
            rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=2.5),
            bos_token_id=None,
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
        ),
        vision_config=dict(
            depth=2,
            embed_dim=48,
            num_heads=4,
            mlp_ratio=2,
            hidden_size=64,
            patch_size=patch,
            spatial_merge_size=1,
            temporal_patch_size=1,
            initializer_range=0.1,
            rope_parameters=dict(rope_type="axial", rope_theta=10.0),
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    size = dict(shortest_edge=patch**2, longest_edge=patch**2 * 1280)  # pixels a frame
    processor = Qwen2VLImageProcessorPil(
        size=size, patch_size=patch, merge_size=1, temporal_patch_size=1
    )
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)


# ---------------------------------------------------------------------------- load and save
def load_policy(name: str, *, critic: str = "shared", seed: int = 0, device="cpu",
                random_init: bool = False) -> "Policy":
    """A local folder or hub id of Qwen2-VL, Qwen2.5-VL or Qwen3-VL as a Policy in float32.

    critic "shared": a linear value head on the policy's own trunk; "separate": on a copy of it.
    A folder that `save_policy` wrote brings its critic along. random_init: the config's shape with
    random weights, so that no weights need to be there: for measurements of memory and speed.
    Tokenizer and image processor are loaded by themselves: AutoProcessor would also want a video
    processor, and with it torchvision, for nothing. The folder is the one AutoProcessor reads.
    Raises ValueError when the files are missing, are of another architecture, or do not fit.
    """
    # a hub id is owner/name: what is not one is not looked for on the hub, which takes a while
    local = (name.startswith(("/", ".", "~", "runs/")) or name.count("/") > 1
             or "/" in name and Path(name).parent.is_dir())
    try:
        if local and not Path(name).is_dir():
            raise OSError(f"no folder {name}")
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise ValueError(f"--model {name}: the folder has no readable config.json") from error
        if local:
            raise ValueError(f"--model {name}: no such local folder") from error
        raise ValueError(
            f"--model {name}: no such local folder, and it could not be read from the hub "
            f"({str(error).splitlines()[0]}). Where there is a network, run "
            f"`hf download {name} --local-dir DIR` and pass --model DIR; tiny needs no files"
        ) from error
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"--model {name} is of type {config.model_type!r}; supported: {', '.join(SUPPORTED)}"
        )
    try:
        if random_init:
            torch.manual_seed(seed)
            model, report = AutoModelForImageTextToText.from_config(config, dtype=torch.float32), {}
        else:
            model, report = AutoModelForImageTextToText.from_pretrained(
                name, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(name)
        processor = AutoImageProcessor.from_pretrained(name, backend="pil")
        if report.get("missing_keys"):  # transformers would fill them with random numbers
            raise ValueError(f"weights missing: {sorted(report['missing_keys'])[:3]}")
        if END_OF_TURN not in tokenizer.get_vocab() or not tokenizer.chat_template:
            raise ValueError(f"the tokenizer has no {END_OF_TURN} or no chat template")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"--model {name}: incomplete or damaged, {str(error).splitlines()[0]}. Needed: "
            "config.json, *.safetensors, tokenizer and chat template, preprocessor_config.json"
        ) from error
    model.model.language_model.config._attn_implementation = "hygrow_text"
    model.model.visual.config._attn_implementation = "hygrow_image_flash"
    policy = Policy(model, tokenizer, processor, critic, seed)
    saved = Path(name) / "critic.safetensors"
    if saved.exists() and not random_init:
        try:
            state, own = load_file(saved), policy.critic_state()
        except SafetensorError as error:
            raise ValueError(f"{saved} is damaged: {error}") from error
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in own.items()}:
            raise ValueError(f"{saved} was saved with another --critic than {critic!r}")
        policy.load_state_dict(state, strict=False)
    policy.device = torch.device(device)
    return policy.to(device)


def save_policy(policy: "Policy", folder: str | Path, write: bool = True) -> None:
    """The policy as a plain Hugging Face folder; value head and critic in critic.safetensors.

    A policy with shards is put together for it, so every process must call it; one of them with
    `write`. Adapters are merged, and lie by themselves in adapter.safetensors, to go on with.
    """
    state = full_tensors(policy, write)
    if not write:
        return
    if policy.lm.get_output_embeddings().weight is policy.lm.get_input_embeddings().weight:
        state.pop("lm.lm_head.weight", None)  # the input embedding is the same tensor
    critic = {k: v.contiguous() for k, v in state.items() if not k.startswith("lm.")}
    weights = {k.removeprefix("lm."): v for k, v in state.items() if k.startswith("lm.")}
    policy.lm.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)
    policy.processor.save_pretrained(folder)
    save_file(critic, Path(folder) / "critic.safetensors")
    if any(".lora_" in name for name, _ in policy.named_parameters()):
        adapter = {name: tensor.cpu() for name, tensor in adapter_state(policy).items()}
        save_file(adapter, Path(folder) / "adapter.safetensors")


# -------------------------------------------------------------------------------- attention
def text_attention(module, query, key, value, attention_mask, **options):
    """SDPA, but for single new tokens two matrix products, about twice as fast on a CPU.

    query [B, heads, 1, D], key and value [B, kv_heads, slots, D], mask [B, 1, 1, slots]: 0 or -inf.
    """
    if query.shape[2] > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = rearrange(query, "b (kv g) 1 d -> b kv g d", kv=key.shape[1])
    scores = (grouped @ key.transpose(2, 3)) * options["scaling"]
    weights = (scores + attention_mask).softmax(-1).to(value.dtype)  # float32, as the mask is
    return rearrange(weights @ value, "b kv g d -> b 1 (kv g) d"), None


def image_attention(module, query, key, value, attention_mask, *, cu_seq_lens_q, scaling, **_):
    """Attention within each image (or window), all of one size in one call instead of one by one.

    query, key, value [1, heads, tokens, D]; cu_seq_lens_q [images + 1]: where each image starts.
    """
    starts, lengths = cu_seq_lens_q[:-1], cu_seq_lens_q.diff()
    outputs, places = [], []
    for length in lengths.unique().tolist():
        within = torch.arange(length, device=starts.device)
        where = (starts[lengths == length, None] + within).flatten()
        q, k, v = (rearrange(x[0, :, where], "h (n l) d -> n h l d", l=length)
                   for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        outputs.append(rearrange(out, "n h l d -> (n l) h d"))
        places.append(where)
    return torch.cat(outputs)[torch.cat(places).argsort()][None], None


AttentionInterface.register("hygrow_text", text_attention)
# transformers hands the image boundaries over only to implementations with "flash" in their name.
AttentionInterface.register("hygrow_image_flash", image_attention)


# --------------------------------------------------------------------------- conversations
class Transcript:
    """One conversation as the model sees it: token ids, what was generated, what was paid."""

    def __init__(self):
        self.ids, self.positions, self.mask = [], [], []  # pieces of [n], [3, n], [n]
        self.logprobs, self.values = [], []  # pieces of [n], zero on context
        self.pixels, self.grids = [], []  # one entry an image: [patches, dim], [3]
        self.turn_ends, self.rewards = [], []  # one entry a turn: index, environment units
        self.length, self.next_position = 0, 0
        self.truncated = False  # stopped at the limit, its last observation appended as context
        self.cut = 0  # replies stopped by the length limit

    def context(self, ids: Tensor, positions: Tensor, advance: int) -> None:
        """Append tokens that were not generated; `positions` [3, n] count from 0."""
        self._append(ids, positions + self.next_position, torch.zeros(len(ids)))
        self.next_position += advance

    def reply(self, ids: Tensor, logprobs=None, values=None) -> None:
        """Append one generated turn, ids and (if known) log-probs and values [n], with its end."""
        positions = torch.arange(len(ids)).expand(3, -1) + self.next_position
        self._append(ids, positions, torch.ones(len(ids)), logprobs, values)
        self.next_position += len(ids)
        self.turn_ends.append(self.length - 1)
        self.rewards.append(0.0)

    def _append(self, ids, positions, mask, logprobs=None, values=None):
        zeros = torch.zeros(len(ids))
        self.ids.append(ids)
        self.positions.append(positions)
        self.mask.append(mask)
        self.logprobs.append(zeros if logprobs is None else logprobs)
        self.values.append(zeros if values is None else values)
        self.length += len(ids)


def collate(transcripts: list[Transcript]) -> dict:
    """Pad B transcripts on the right to [B, T]; `pixels` and `grids`, ragged, stay lists."""
    pad = nn.utils.rnn.pad_sequence

    def join(name: str, empty: Tensor) -> Tensor:  # empty: of an environment that failed at once
        return pad([torch.cat([empty, *getattr(t, name)]) for t in transcripts], batch_first=True)

    positions = [torch.cat([torch.zeros(3, 0).long(), *t.positions], 1).T for t in transcripts]
    positions = pad(positions, batch_first=True)
    batch = {name: join(name, torch.zeros(0)) for name in ("mask", "logprobs", "values")}
    batch["ids"] = join("ids", torch.zeros(0).long())
    batch["positions"] = rearrange(positions, "b t xyz -> xyz b t")
    batch["rewards"] = torch.zeros_like(batch["mask"])
    batch["turn_end"] = torch.zeros_like(batch["mask"])
    for row, transcript in enumerate(transcripts):
        batch["rewards"][row, transcript.turn_ends] = torch.tensor(transcript.rewards)
        batch["turn_end"][row, transcript.turn_ends] = 1.0
    batch["length"] = torch.tensor([t.length for t in transcripts])
    batch["truncated"] = torch.tensor([t.truncated for t in transcripts])
    batch["pixels"] = [torch.cat(t.pixels) if t.pixels else None for t in transcripts]
    batch["grids"] = [torch.stack(t.grids) if t.grids else None for t in transcripts]
    return batch


def take(batch: dict, rows: list[int]) -> dict:
    """Rows of a collated batch, cut to their own longest length."""
    steps = int(batch["length"][rows].max())
    out = {}
    for name, value in batch.items():
        if name in ("pixels", "grids"):
            out[name] = [value[row] for row in rows]
        elif name == "positions":
            out[name] = value[:, rows, :steps]
        else:
            out[name] = value[rows, :steps] if value.ndim == 2 else value[rows]
    return out


def blank(policy: "Policy", script: Transcript) -> None:
    """Give a conversation that never began a black frame: every row then passes the vision tower,
    which sharded weights need, whose forward passes are steps that all processes take together."""
    side = 2 * policy.processor.patch_size * policy.processor.merge_size
    frame = np.zeros((side, side, 3), dtype=np.uint8)
    policy.show(script, "", "", *policy.process_images([frame])[0])


def idle(policy: "Policy") -> dict:
    """A batch of one row from which nothing is learned: for a process that has none left."""
    blank(policy, script := Transcript())
    script.reply(torch.tensor([policy.eos]))
    return collate([script])


# ----------------------------------------------------------------------------------- policy
class Policy(nn.Module):
    """A vision-language model and its critic; `forward` is the training pass."""

    def __init__(self, model, tokenizer, processor, critic: str = "shared", seed: int = 0):
        super().__init__()
        if critic not in ("shared", "separate"):
            raise ValueError(f"critic {critic!r}: choose 'shared' or 'separate'")
        self.lm, self.tokenizer, self.processor = model, tokenizer, processor
        hidden = model.config.get_text_config().hidden_size
        self.critic = copy.deepcopy(model.model) if critic == "separate" else None
        self.value_head = nn.Linear(hidden, 1, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.value_head.weight, std=0.002, generator=generator)
        nn.init.zeros_(self.value_head.bias)
        # Special tokens are the chat's skeleton: a sampled <|image_pad|> would ask for an image
        # that is not there. They, and the unused ids above the vocabulary, have probability 0 in
        # sampling and training alike. End-of-turn is the only special token in a reply.
        banned = torch.zeros(model.get_output_embeddings().out_features, dtype=torch.bool)
        banned[len(tokenizer) :] = True
        banned[[i for i, t in tokenizer.added_tokens_decoder.items() if t.special]] = True
        self.eos = tokenizer.convert_tokens_to_ids(END_OF_TURN)  # not eos_token: base models differ
        banned[self.eos] = False
        self.register_buffer("banned", banned, persistent=False)
        self.chunk = lru_cache(maxsize=4096)(self._chunk)
        self.device = torch.device("cpu")  # of the passes; sharded weights may lie elsewhere
        self.encode_once = False  # frames are encoded when first seen: large.lighten
        self.bf16 = False  # autocast of the trunk and head; large.shard has its own

    def critic_state(self) -> dict:
        """What `from_pretrained` would not know: the value head and a separate critic's trunk."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("lm.")}

    def hidden(self, trunk, ids, positions, pixels, grids, mask=None, cache=None) -> Tensor:
        """Last hidden states [B, T, D] of a trunk (the policy's or the critic's)."""
        device, images = self.device, {}
        pixels, grids = ([x for x in xs if x is not None] for xs in (pixels or [], grids or []))
        if pixels and self.encode_once:
            images["mm_encoder_outputs"] = {"image": unpack(torch.cat(pixels).to(device), trunk)}
        elif pixels:
            images["pixel_values"] = torch.cat(pixels).to(device)
            images["image_grid_thw"] = torch.cat(grids).to(device)
        with self.autocast():
            return trunk(
                input_ids=ids.to(device), position_ids=positions.to(device), attention_mask=mask,
                cache=cache, use_cache=cache is not None, **images,
            ).last_hidden_state

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @torch.no_grad()
    def encode(self, pixels: list[Tensor], grids: list[Tensor]) -> list[Tensor]:
        """Features [tokens, D (1 + levels)] of each frame by the frozen vision tower, on the CPU.

        Qwen3-VL hands features of several levels to the text layers; they lie side by side.
        """
        with self.autocast():
            out = self.lm.model.get_image_features(
                torch.cat(pixels).to(self.device), torch.stack(grids).to(self.device))
        levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        return [torch.cat(parts, -1).float().cpu() for parts in zip(*levels)]

    def all_logprobs(self, hidden: Tensor, temperature: float) -> Tensor:
        """log softmax(logits / T) [..., V] in float32, banned tokens at -inf. T = 0 means T = 1."""
        with self.autocast():
            logits = self.lm.get_output_embeddings()(hidden)
        logits = logits.float() / (temperature or 1.0)
        return logits.masked_fill(self.banned, -torch.inf).log_softmax(-1)

    def value(self, hidden: Tensor) -> Tensor:
        return self.value_head(hidden.float()).squeeze(-1)

    def forward(self, batch: dict, temperature: float = 1.0) -> dict:
        """Log-probs, entropy (nats) and values of the generated tokens, from one forward pass.

        batch: what `collate` or `take` returned, mask [B, T] -> three float32 tensors [B, T], zero
        off the mask. Right padding needs no attention mask: no real token looks to its right.
        """
        inputs = (batch["ids"], batch["positions"], batch["pixels"], batch["grids"])
        mask = batch["mask"].to(self.device).bool()
        before = mask[:, 1:]  # the state before token t is the hidden state at t - 1
        hidden = self.hidden(self.lm.model, *inputs)[:, :-1][before]  # [N, D]
        logprobs = self.all_logprobs(hidden, temperature)  # [N, V]
        chosen = batch["ids"].to(self.device)[:, 1:][before]  # [N]
        plogp = logprobs.exp() * logprobs.masked_fill(self.banned, 0.0)  # no 0 * -inf
        if self.critic is not None:
            hidden = self.hidden(self.critic, *inputs)[:, :-1][before]
        zeros = torch.zeros(mask.shape, device=self.device)

        def spread(x: Tensor) -> Tensor:  # [N] -> [B, T]
            return zeros.masked_scatter(mask, x)

        return dict(
            logprobs=spread(logprobs.gather(-1, chosen[:, None]).squeeze(-1)),
            entropy=spread(-plogp.sum(-1)),
            values=spread(self.value(hidden)),
        )

    @torch.no_grad()
    def last_values(self, batch: dict) -> Tensor:
        """Values [B] of the state after the last token of each row, for truncated episodes."""
        trunk = self.lm.model if self.critic is None else self.critic
        inputs = (batch["ids"], batch["positions"], batch["pixels"], batch["grids"])
        hidden = self.hidden(trunk, *inputs)
        return self.value(hidden[torch.arange(len(hidden)), batch["length"] - 1])

    # ------------------------------------------------------------------ text and images to tokens
    def _chunk(self, system: str | None, text: str, grid: tuple) -> tuple[Tensor, Tensor, int]:
        """Token ids [n], positions [3, n] from 0 and their advance for one observation.

        With `system` it opens the conversation; without, it is what follows an end-of-turn token.
        Rendered by the tokenizer's own chat template, so it equals the one-shot rendering.
        """
        user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        render = lambda m: self.tokenizer.apply_chat_template(  # noqa: E731
            m, tokenize=False, add_generation_prompt=True
        )
        if system is not None:
            rendered = render([{"role": "system", "content": system}, user])
        else:
            marker = "REPLY" + END_OF_TURN
            first = {"role": "user", "content": "-"}
            rendered = render([first, {"role": "assistant", "content": "REPLY"}, user])
            rendered = rendered.split(marker, 1)[1]
        merge = self.processor.merge_size
        pad = self.tokenizer.convert_ids_to_tokens(self.lm.config.image_token_id)
        rendered = rendered.replace(pad, pad * (int(np.prod(grid)) // merge**2), 1)
        ids = torch.tensor(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])
        positions, advance = mrope(ids == self.lm.config.image_token_id, grid, merge)
        return ids, positions, advance

    def show(self, script: Transcript, system: str, text: str, pixel: Tensor, grid: Tensor) -> None:
        """Append one observation to a transcript; the first one brings the system prompt along."""
        opening = None if script.length else system
        script.context(*self.chunk(opening, text, tuple(grid.tolist())))
        script.pixels.append(pixel)
        script.grids.append(grid)

    def process_images(self, images: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
        """uint8 [H, W, 3] frames -> (pixel values [patches, dim], grid [3]) each.

        With a frozen vision tower the features of the frames instead of their pixels (`encode`).
        """
        out = self._patches(images)
        if self.encode_once and images:
            pixels, grids = zip(*out)
            return list(zip(self.encode(list(pixels), list(grids)), grids))
        return out

    def _patches(self, images: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
        side, size = self.processor.patch_size * self.processor.merge_size, self.processor.size
        shapes = {image.shape for image in images}
        fits = all(  # frames that need no resizing skip a PIL round trip that would change nothing
            h % side == 0 and w % side == 0 and size.shortest_edge <= h * w <= size.longest_edge
            for h, w, _ in shapes
        )
        one = side == self.processor.patch_size and self.processor.temporal_patch_size == 1
        if fits and one and len(shapes) == 1:  # the tiny model: the same arithmetic, but faster
            mean, std = torch.tensor([self.processor.image_mean, self.processor.image_std])
            frames = torch.from_numpy(np.stack(images))  # bytes, while they are moved about
            rows, columns = frames.shape[1] // side, frames.shape[2] // side
            frames = rearrange(frames, "n (h p) (w q) c -> n (h w) c (p q)", p=side, q=side).float()
            frames.mul_(self.processor.rescale_factor).sub_(mean[:, None]).div_(std[:, None])
            frames = frames.flatten(2)
            return [(pixels, torch.tensor([1, rows, columns])) for pixels in frames]
        out = self.processor(
            images=images, return_tensors="pt", input_data_format="channels_last",
            do_resize=not fits, do_convert_rgb=False,
        )
        sizes = out["image_grid_thw"].prod(-1).tolist()
        return list(zip(out["pixel_values"].split(sizes), out["image_grid_thw"]))


def unpack(features: Tensor, trunk) -> BaseModelOutputWithPooling:
    """What `Policy.encode` packed, as the vision tower would have handed it to the text layers."""
    width = trunk.language_model.config.hidden_size
    first, *levels = features.split(width, -1)
    out = BaseModelOutputWithPooling(pooler_output=(first,))
    out["deepstack_features"] = [(level,) for level in levels]
    return out


def mrope(is_image: Tensor, grid: tuple, merge: int) -> tuple[Tensor, int]:
    """M-RoPE positions [3, n] (time, height, width) of a chunk with one image, and its advance.

    Text steps by one on all three axes; the image spans its grid from where it starts, and what
    follows it goes on behind the grid's longer side. Pinned against transformers' get_rope_index.
    """
    start, count = int(is_image.int().argmax()), int(is_image.sum())
    time, height, width = grid[0], grid[1] // merge, grid[2] // merge
    image = torch.stack(torch.meshgrid(*map(torch.arange, (time, height, width)), indexing="ij"))
    positions = torch.arange(len(is_image)).repeat(3, 1)
    positions[:, start : start + count] = image.flatten(1) + start
    positions[:, start + count :] += max(height, width) - count
    return positions, len(is_image) + max(height, width) - count


# ------------------------------------------------------------------------------- generation
class PackedCache(Cache):
    """Keys and values of B conversations without holes: row b goes on at slot `filled[b]`.

    Buffers [B, heads, slots, head_dim] are written in place and grow by a turn's worth at a time. A
    chunk that is padded on the right leaves rubbish behind a row's end, which the causal mask hides
    and the next chunk overwrites. The rows in use are the first ones: a smaller batch is a view.
    """

    spare = 64  # slots beyond what is needed now: single tokens rarely make the buffers grow

    def __init__(self, rows: int, device):
        super().__init__(layers=[])
        self.keys, self.vals = {}, {}
        self.filled = torch.zeros(rows, dtype=torch.long, device=device)

    def place(self, count: int, width: int) -> Tensor:
        """Say where the next `update`s write: `width` slots for each of the first `count` rows.

        Returns the attention mask [count, 1, width, slots], a token sees all up to itself: bool, or
        for single tokens what `text_attention` adds to the scores.
        """
        self.slots = self.filled[:count, None] + torch.arange(width, device=self.filled.device)
        self.rows = torch.arange(count, device=self.filled.device)[:, None]
        self.end = int(self.slots.max()) + 1
        seen = torch.arange(self.end, device=self.filled.device) <= self.slots[..., None]
        if width == 1:
            return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)[:, None]
        return seen[:, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs):
        out = []
        for store, new in ((self.keys, keys), (self.vals, values)):
            old = store.get(layer_idx)
            if old is None or old.shape[2] < self.end:
                size = (len(self.filled), new.shape[1], self.end + self.spare, new.shape[3])
                store[layer_idx] = new.new_zeros(size)
                if old is not None:
                    store[layer_idx][:, :, : old.shape[2]] = old
            store[layer_idx][self.rows, :, self.slots] = new.transpose(1, 2)
            out.append(store[layer_idx][: len(new), :, : self.end])
        return out

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.filled.max())

    def keep(self, rows: list[int]) -> None:
        """Reorder (or drop) rows; they need not all be kept."""
        index = torch.tensor(rows, device=self.filled.device)
        self.filled = self.filled[index]
        used = self.get_seq_length()
        for store in (self.keys, self.vals):
            for layer, tensor in store.items():
                store[layer] = tensor.new_zeros(len(rows), *tensor.shape[1:])  # masked is not NaN
                store[layer][:, :, :used] = tensor[index, :, :used]


class Dialogue:
    """B conversations with one policy, generated together; only new tokens are ever fed.

    Alternate `observe(rows, texts, images)` and `reply(rows, ...)`; rows left out of `observe` are
    finished for good and stop costing. What was sampled is what the transcripts hold, never
    re-tokenised text.
    """

    def __init__(self, policy: Policy, count: int, system: str):
        self.policy, self.system = policy, system
        self.transcripts = [Transcript() for _ in range(count)]
        self.pending = [torch.zeros(0, dtype=torch.long) for _ in range(count)]  # sampled, not fed
        self.cache = PackedCache(count, policy.device)
        self.order = list(range(count))  # cache row -> conversation

    @torch.no_grad()
    def observe(self, rows: list[int], texts: list[str], images: list[np.ndarray]) -> None:
        """Append one user message (image and text) to each of the conversations `rows`, feed it."""
        policy = self.policy
        if rows != self.order:
            place = {conversation: i for i, conversation in enumerate(self.order)}
            self.cache.keep([place[row] for row in rows])
            self.order = list(rows)
        ids, positions, pixels, grids = [], [], [], []
        for row, text, (pixel, grid) in zip(rows, texts, policy.process_images(images)):
            script, sampled = self.transcripts[row], self.pending[row]
            start = script.length - len(sampled)  # the last sampled token is fed with the chunk
            policy.show(script, self.system, text, pixel, grid)
            ids.append(torch.cat([sampled, script.ids[-1]]))
            positions.append(torch.cat(script.positions, 1)[:, start:].T)
            pixels.append(pixel)
            grids.append(grid[None])
        lengths = torch.tensor([len(i) for i in ids], device=policy.device)
        pad = nn.utils.rnn.pad_sequence
        positions = rearrange(pad(positions, batch_first=True), "b t xyz -> xyz b t")
        hidden = self._feed(pad(ids, batch_first=True), positions, lengths, pixels, grids)
        self.state = hidden[torch.arange(len(rows)), lengths - 1]  # [rows, D], before a token

    def _feed(self, ids, positions, lengths, pixels=None, grids=None) -> Tensor:
        mask = self.cache.place(len(ids), ids.shape[1])
        model = self.policy.lm.model
        hidden = self.policy.hidden(model, ids, positions, pixels, grids, mask, self.cache)
        self.cache.filled[: len(ids)] += lengths
        return hidden

    @torch.no_grad()
    def resume(self, scripts: list[Transcript]) -> None:
        """Take over conversations that end with an observation, and feed all of each at once."""
        self.transcripts = scripts
        ids = [torch.cat(script.ids) for script in scripts]
        positions = [torch.cat(script.positions, 1).T for script in scripts]
        lengths = torch.tensor([len(i) for i in ids], device=self.policy.device)
        pad = nn.utils.rnn.pad_sequence
        positions = rearrange(pad(positions, batch_first=True), "b t xyz -> xyz b t")
        pixels = [pixel for script in scripts for pixel in script.pixels]
        grids = [grid[None] for script in scripts for grid in script.grids]
        hidden = self._feed(pad(ids, batch_first=True), positions, lengths, pixels, grids)
        self.state = hidden[torch.arange(len(scripts)), lengths - 1]

    @torch.no_grad()
    def reply(self, limit: int, uniforms: Tensor, temperature: float = 1.0) -> list[str]:
        """Sample one turn, at most `limit` tokens, for every conversation of the last `observe`.

        uniforms [rows, limit] in [0, 1): the randomness, one number a token, so that sampling in a
        conversation does not depend on its neighbours. temperature 0 is greedy. Returns the texts
        without the end-of-turn token. A turn that reaches the limit is counted in `cut`.
        """
        policy, eos = self.policy, self.policy.eos
        order, state = list(self.order), self.state
        tokens = torch.full((len(order), limit), eos)
        logprobs, values = torch.zeros(len(order), limit), torch.zeros(len(order), limit)
        lengths = torch.zeros(len(order), dtype=torch.long)
        base = torch.tensor([self.transcripts[row].next_position for row in order])
        index = torch.arange(len(order))  # cache row -> row of this turn's buffers
        going = torch.ones(len(order), dtype=torch.bool)  # cache rows whose turn has not ended
        for step in range(limit):
            scores = policy.all_logprobs(state, temperature)  # [n, V]
            token = sample(scores, uniforms[index, step].to(policy.device), temperature)
            rows = index[going]
            tokens[rows, step] = token[going].cpu()
            logprobs[rows, step] = scores.gather(-1, token[:, None])[going, 0].cpu()
            if policy.critic is None:
                values[rows, step] = policy.value(state[going]).cpu()
            lengths[rows] += 1
            going = going & (token != eos).cpu()
            if step + 1 == limit or not going.any():
                break
            if going.sum() < 0.6 * len(index):  # unfinished rows first: the rest stop costing
                front = torch.cat([going.nonzero(), (~going).nonzero()]).flatten()
                moved = front.tolist() + list(range(len(front), len(order)))
                self.cache.keep(moved)
                self.order = [self.order[i] for i in moved]
                front = front[: int(going.sum())]
                index, token, going = index[front], token[front], going[front]
            positions = (base[index] + step).expand(3, -1)[..., None]
            # A row that ended since the last move is fed along, but its slot does not advance.
            state = self._feed(token[:, None], positions, going.to(policy.device).long())[:, 0]
        return self._finish(order, tokens, logprobs, values, lengths)

    def _finish(self, order, tokens, logprobs, values, lengths) -> list[str]:
        eos, replies = self.policy.eos, []
        for i, row in enumerate(order):
            script, n = self.transcripts[row], int(lengths[i])
            script.reply(tokens[i, :n], logprobs[i, :n], values[i, :n])
            ended = bool(tokens[i, n - 1] == eos)
            self.pending[row] = tokens[i, n - 1 : n]
            if not ended:  # keep the chat well-formed; this end-of-turn was not sampled: no mask
                script.cut += 1
                script.context(torch.tensor([eos]), torch.zeros(3, 1, dtype=torch.long), 1)
                self.pending[row] = torch.cat([tokens[i, n - 1 : n], torch.tensor([eos])])
            replies.append(tokens[i, : n - 1] if ended else tokens[i, :n])
        return self.policy.tokenizer.batch_decode(replies)


def sample(logprobs: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Draw from softmax(logits / T) by inverting its cumulative sum: no top-p, no top-k.

    logprobs [n, V], uniforms [n] in [0, 1) -> ids [n]. Temperature 0 takes the most likely token.
    """
    if temperature == 0:
        return logprobs.argmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    if not torch.isfinite(cumulative[:, -1]).all():
        bad = (~torch.isfinite(cumulative[:, -1])).nonzero().flatten().tolist()
        raise FloatingPointError(f"the policy's logits are not finite in rows {bad}")
    target = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
