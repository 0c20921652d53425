"""``python -m mmkv.training.pretrain_tiny``: train the bundled model from scratch on drawn scenes.

Needs the ``train`` extra (accelerate). On two CPU cores it takes about an hour; a GPU is used
when there is one. The curriculum goes from easy dialogues to hard ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from mmkv.training.data.dialogues import clip, dense, grid, sparse, stream
from mmkv.training.data.labels import IGNORED
from mmkv.training.data.scene_encoding import SPECIAL, build_tokenizer, collate, encode
from mmkv.training.data.scenes import SceneTurn, dialogue, make_scene, questions
from mmkv.training.run import StepTrainer

# (largest grid side, share of the run) from easy to hard: straight on 4 x 4 grids nothing is
# learned for a long time.
CURRICULUM = ((1, 0.06), (2, 0.12), (3, 0.17), (4, 0.65))


def largest_grid(progress: float) -> int:
    """Return largest grid side at ``progress`` (0 .. 1) of the run."""
    passed = 0.0
    for side, share in CURRICULUM:
        passed += share
        if progress < passed:
            return side
    return CURRICULUM[-1][0]


def lesson(seed: int, pictures: int, side: int) -> list[SceneTurn]:
    """Return a training dialogue.

    On the small grids of the curriculum, naming every cell comes first: that answer alone holds
    a target per cell, and without it the same run learns nothing for hundreds of steps. On full
    grids it mostly stays away, for a list in the text is easier to read than the picture: a
    model that always has one never learns to answer from the picture.
    """
    rng = random.Random(seed)
    if pictures > 1:
        return dialogue(seed, "train", pictures, 2 * pictures, side)
    scene = make_scene(rng, "train", side)
    asked = questions(scene, rng)
    named = [q for q in asked if q.kind == "list"]
    others = [q for q in asked if q.kind != "list"]
    if side < CURRICULUM[-1][0] or (named and rng.random() < 0.15):
        asked = [*named, *others[:3]]
    elif named:
        pool = [q for _ in range(5) for q in questions(scene, rng) if q.kind != "list"]
        asked = rng.choices(pool, k=7)
    return [SceneTurn((scene,) if i == 0 else (), question) for i, question in enumerate(asked)]


def _round(lessons: str) -> tuple[tuple[str, int], ...]:
    """Parse ``KIND:DIALOGUES ...`` into pairs."""
    pairs = (lesson.split(":") for lesson in lessons.split())
    return tuple((kind, int(dialogues)) for kind, dialogues in pairs)


# The lessons that the batches of a round take in turn, as KIND:DIALOGUES of a batch (fewer of long
# ones). "curriculum" is the first round; the others continue from a model that reads full grids.
ROUNDS: dict[str, tuple[tuple[str, int], ...]] = {
    "curriculum": (),
    "dialogues": _round(
        "single:16 dense:8 drill:16 long:5 single:16 sparse:5 single:16 clip:12 single:16 long:5"
    ),
    "far": _round(
        "pictures:1 single:16 distractors:1 stream:1 pictures:1 long:5 "
        "pictures:1 sparse:5 stream:1 pictures:1 clip:12 dense:8"
    ),
    "mixed": _round(
        "single:16 pictures:1 single:16 long:5 stream:1 single:16 "
        "distractors:1 single:16 sparse:5 pictures:1 clip:12 dense:8"
    ),
}


# The seed of a dialogue holds the name that its kind had when the bundled model was trained. A new
# word would draw other dialogues.
_SEED_WORDS = {"distractors": "crowd", "pictures": "gallery"}


def long_lesson(kind: str, seed: int) -> list[SceneTurn]:
    """Draw a training dialogue of the later rounds (:mod:`mmkv.training.data.dialogues`).

    Three kinds are 0.7k to 4k tokens long: *distractors* has up to 256 pictures, few of which
    matter; *pictures* has up to 40, which all matter; *stream* has up to 48 clips.
    """
    rng = random.Random(f"{_SEED_WORDS.get(kind, kind)}-{seed}")
    if kind == "single":
        return lesson(seed, 1, 4)
    if kind == "drill":
        return drill(rng)
    if kind == "dense":
        pictures = rng.randint(2, 4)
        return dense(seed, "train", pictures, rng.randint(pictures, 8))
    if kind == "long":
        return dense(seed, "train", rng.randint(5, 8), 12)
    if kind == "sparse":
        pictures = rng.choice([12, 16, 24, 32])
        return sparse(seed, "train", pictures, rng.randint(1, 4), 8, rng.randint(1, 4))
    if kind == "distractors":
        pictures = rng.choice([48, 96, 144, 192, 256])
        return sparse(seed, "train", pictures, rng.randint(2, 8), 16, rng.randint(1, 6), False)
    if kind == "pictures":
        pictures = rng.randint(12, 40)
        return dense(seed, "train", pictures, 2 * pictures, search=False)
    if kind == "stream":
        return stream(seed, "train", rng.choice([12, 24, 48]))
    return clip(seed, "train", 6)


def drill(rng: random.Random) -> list[SceneTurn]:
    """Search questions only, on grids of all sizes: finding a name is what comes last."""
    scene = grid(rng, "train", rng.choice([2, 3, 4, 4]))
    pool = [q for _ in range(8) for q in questions(scene, rng) if q.kind in ("exists", "locate")]
    asked = pool[:8]
    return [SceneTurn((scene,) if i == 0 else (), question) for i, question in enumerate(asked)]


class DialogueBatches(IterableDataset[dict[str, Tensor]]):
    """Whole batches of training dialogues, a function of (seed, step) alone.

    Args:
        start: first step, so that a resumed run continues where it stopped.
        lessons: one of :data:`ROUNDS`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        steps: int,
        batch: int,
        seed: int = 0,
        start: int = 0,
        lessons: str = "curriculum",
    ) -> None:
        self.tokenizer, self.steps, self.batch = tokenizer, steps, batch
        self.seed, self.start, self.round = seed, start, ROUNDS[lessons]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.start, self.steps):
            yield self.make(step)

    def make(self, step: int) -> dict[str, Tensor]:
        """Return the batch of one step, right-padded."""
        if not self.round:
            side = largest_grid(step / self.steps)
            # One count of pictures a batch, so that little of it is padding.
            pictures = (1, 1, 1, 2, 1, 1, 3)[step % 7] if side == CURRICULUM[-1][0] else 1
            dialogues = [lesson(seed, pictures, side) for seed in self._seeds(step, self.batch)]
        else:
            kind, rows = self.round[step % len(self.round)]
            rows = max(1, rows * self.batch // 16)
            dialogues = [long_lesson(kind, seed) for seed in self._seeds(step, rows)]
        return collate([encode(turns, self.tokenizer) for turns in dialogues], self.tokenizer)

    def _seeds(self, step: int, rows: int) -> range:
        first = (self.seed * self.steps + step) * self.batch
        return range(first, first + rows)


IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    # One 32-pixel cell up to 16 x 16 of them: 1 to 256 visual tokens a picture.
    "min_pixels": 32 * 32,
    "max_pixels": 512 * 512,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
}
VIDEO_PROCESSOR = {
    **IMAGE_PROCESSOR,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512 * 4},
}
del VIDEO_PROCESSOR["image_processor_type"]


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return a freshly initialised model, float32, about 4 M parameters."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 192,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.do_sample = False  # there is one right answer
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model


def save(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write a complete Hugging Face directory, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
    del state["lm_head.weight"]  # tied to the embedding
    model.config.dtype = torch.bfloat16
    # The Trainer turns it off; the saved model must decode with a cache.
    model.config.use_cache = model.config.text_config.use_cache = True
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(VIDEO_PROCESSOR, indent=2) + "\n"
    )


def only(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the batch, which the dataset makes whole, and how many tokens it predicts."""
    (batch,) = examples
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    return {**batch, "units": targets.double()[None]}


def carry_over(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> Qwen3VLForConditionalGeneration:
    """Load the trained weights of ``folder`` into ``model``.

    Embeddings of tokens that they lack stay as they are.
    """
    old = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    words = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    kept = {word: index for word, index in tokenizer.get_vocab().items() if word in words}
    state = old.state_dict()
    name = "model.language_model.embed_tokens.weight"
    fresh = model.state_dict()[name].clone()
    fresh[list(kept.values())] = state[name][[words[word] for word in kept]]
    state[name] = state["lm_head.weight"] = fresh
    model.load_state_dict(state)
    return model


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/tiny"), help="folder of checkpoints"
    )
    parser.add_argument("--export", type=Path, help="folder of the finished model")
    parser.add_argument("--init", type=Path, help="a saved model to continue from")
    parser.add_argument(
        "--lessons",
        choices=list(ROUNDS),
        help="lessons: by default curriculum, with --init dialogues (of up to 600 tokens);"
        " far: most of them up to 4k tokens; mixed: fewer of those, more single pictures",
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for its default")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser.parse_args()


def main() -> None:
    """Run the program."""
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    if args.init:
        model = carry_over(model, tokenizer, args.init)
    last = get_last_checkpoint(str(args.output)) if args.resume else None
    start = 0
    if last:
        start = json.loads((Path(last) / "trainer_state.json").read_text())["global_step"]
    lessons = args.lessons or ("dialogues" if args.init else "curriculum")
    data = DialogueBatches(tokenizer, args.steps, args.batch_size, args.seed, start, lessons)
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=1,  # one whole batch, see `only`
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, args.steps // 10),
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=50,
        save_steps=args.save_every,
        save_total_limit=2,
        seed=args.seed,
        bf16=args.bf16,
        ignore_data_skip=True,  # the dataset itself starts at the resumed step
        remove_unused_columns=False,
        dataloader_num_workers=1,
        # Accelerate would cut every tensor to the batch's rows; patches are not rows.
        accelerator_config={"dispatch_batches": False},
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = StepTrainer(model=model, args=settings, train_dataset=data, data_collator=only)
    trainer.train(resume_from_checkpoint=last)
    export = args.export or args.output / "final"
    save(model, tokenizer, export)
    print(f"saved {export}")


if __name__ == "__main__":
    main()
