"""``python -m mmkv.training.pretrain_tiny``: train the bundled model from scratch on drawn scenes.

Needs the ``train`` extra (accelerate). On two CPU cores it takes about an hour; a GPU is used
when there is one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from mmkv.training.curriculum import ROUNDS, DialogueBatches
from mmkv.training.data.tokenizer import build_tokenizer
from mmkv.training.tiny_model import build_model, save


def only(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the dataset makes whole batches; a collator has nothing left to do."""
    return examples[0]


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
    trainer = Trainer(model=model, args=settings, train_dataset=data, data_collator=only)
    trainer.train(resume_from_checkpoint=last)
    export = args.export or args.output / "final"
    save(model, tokenizer, export)
    print(f"saved {export}")


if __name__ == "__main__":
    main()
