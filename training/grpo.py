"""Reinforcement learning under compression: TRL's GRPOTrainer with this engine as its generator.

Replies are drawn on the bounded cache, and what each of their tokens could see is recorded; the
policy gradient runs under that mask. So the policy that is trained is the one that drew (G-KV,
section 6): no KL term, advantages normalised in each group, and 0 for replies that were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset as Table
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.prompt.loading import load_processor
from mmkv.training.adapt_run import REWARDS, AdaptSettings, CheckablePrompt, question_of
from mmkv.training.compressed import (
    CompressedModel,
    Visible,
    budget_of,
    read_as_decoded,
    replies,
)
from mmkv.training.run import arguments_of


@dataclass(frozen=True)
class Rollout:
    """A reply that was drawn.

    Attributes:
        question: what was asked. ids: the reply, its end included.
        visible: of prompt and reply. complete: whether it has an end. reward: 1 or 0.
    """

    question: CheckablePrompt
    ids: list[int]
    visible: Visible
    complete: bool
    reward: float


def draw_replies(
    compressed: CompressedModel,
    question: CheckablePrompt,
    seeds: Sequence[int],
    settings: AdaptSettings,
    decode: Any,
) -> list[Rollout]:
    """Draw a reply for each of ``seeds``, on the bounded cache and with the weights as they are.

    Args:
        decode: makes text of ids.
    """
    budget, made = budget_of(settings.budget, question.tokens), []
    answer, right = decode(question.answer), REWARDS[settings.reward]
    longest = question.start + settings.max_reply
    with compressed.decoding() as engine:
        turn = compressed.turn(question.inputs).part(0, question.start)
        with compressed.recorded(engine, budget, longest) as first:
            logits = read_as_decoded(first, turn, question.labels)[-1]
            sessions = [first.fork() for _ in seeds]
            draws = [Draw(temperature=settings.temperature, seed=seed) for seed in seeds]
            rows = logits.expand(len(seeds), -1)
            drawn = replies(engine, sessions, rows, settings.max_reply, question.ends, draws)
            for session, ids in zip(sessions, drawn, strict=True):
                complete = ids[-1] in question.ends
                said = decode(ids[:-1] if complete else ids)
                visible = compressed.visible(session, question.start + len(ids))
                reward = float(complete and right(said, answer))
                made.append(Rollout(question, ids, visible, complete, reward))
                session.close()
    return made


def reply_logits(
    compressed: CompressedModel, model: Any, rollout: Rollout, never: Tensor
) -> Tensor:
    """Return logits ``[n, vocab]`` before each token of a reply, under its mask.

    Args:
        never: ids that are never drawn.
    """
    question, start = rollout.question, rollout.question.start
    # The document with this reply in place of its own; a token's logits stand at the one before.
    inputs = compressed.up_to(question.inputs, start, question.stop, rollout.ids)
    where = torch.arange(start - 1, start - 1 + len(rollout.ids))
    found = compressed.logits(model, inputs, where, rollout.visible)
    return found.index_fill(1, never.to(found.device), -torch.inf)


class CompressedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, whose replies and masks come from the engine."""

    def __init__(
        self,
        compressed: CompressedModel,
        settings: AdaptSettings,
        questions: Dataset[Any],
        tokenizer: Any,
        **kwargs: Any,
    ) -> None:
        self._compressed, self._settings, self._questions = compressed, settings, questions
        self._rollouts: list[Rollout] = []
        self.draw = draw_replies
        super().__init__(
            model=compressed.model,
            reward_funcs=_reward,
            processing_class=tokenizer,
            rollout_func=self._roll_out,
            **kwargs,
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the run writes its own card."""

    def _roll_out(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        settings, tokenizer = self._settings, self.processing_class
        base = (self.state.global_step * self.accelerator.num_processes) + (
            self.accelerator.process_index
        )
        made: list[Rollout] = []
        for text in dict.fromkeys(prompts):  # replies to one prompt stand together
            index, count = int(text), prompts.count(text)
            eos = tuple(self._compressed.teacher.family.eos_token_ids)
            question = question_of(self._questions[index], settings.seed + index, eos)
            first = base * len(prompts) + len(made)
            seeds = [(settings.seed << 40) + first + i for i in range(count)]

            def decode(ids: Sequence[int]) -> str:
                return str(tokenizer.decode(ids, skip_special_tokens=True))

            made += self.draw(self._compressed, question, seeds, settings, decode)
        self._rollouts = made
        held = [float(one.visible.nbytes) for one in made]
        self._metrics["train"]["mask_bytes"].append(sum(held) / len(held))
        cut = [float(not one.complete) for one in made]
        self._metrics["train"]["cut_off"].append(sum(cut) / len(cut))
        return {
            "prompt_ids": [
                one.question.inputs["input_ids"][0, : one.question.start].tolist() for one in made
            ],
            "completion_ids": [one.ids for one in made],
            "logprobs": None,
            "right": [one.reward for one in made],
        }

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rows = range(len(self._rollouts))
        advantages = made["advantages"]
        cut = torch.tensor([not one.complete for one in self._rollouts], device=advantages.device)
        made["advantages"] = advantages.masked_fill(cut, 0.0)
        made["rollout"] = torch.tensor(rows, device=advantages.device)
        return made

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._now = [self._rollouts[row] for row in inputs["rollout"].tolist()]
        # Nothing is learned of the others; several processes wait for each other's gradients.
        alone = self.accelerator.num_processes == 1
        self._teach = [a != 0 or not alone for a in inputs["advantages"].tolist()]
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Return log-probabilities and entropies ``[B, logits_to_keep]``, reply by reply.

        Of a reply whose advantage is 0 there is no pass: zeros, and entropies that are no numbers,
        which TRL leaves out of its log lines.
        """
        never, found = self._compressed.teacher.never_chosen, []
        for rollout, teaches in zip(self._now, self._teach, strict=True):
            if not teaches:
                nothing = torch.zeros(logits_to_keep, device=input_ids.device, requires_grad=True)
                found.append((nothing, torch.full_like(nothing, torch.nan, requires_grad=False)))
                continue
            logits = reply_logits(self._compressed, model, rollout, never)
            log_p = F.log_softmax(logits / self.temperature, -1)
            ids = torch.tensor(rollout.ids, device=log_p.device)
            chosen = log_p.gather(1, ids[:, None])[:, 0]
            entropy = torch.special.entr(log_p.detach().exp()).sum(-1)
            pad = (0, logits_to_keep - len(ids))
            found.append((F.pad(chosen, pad), F.pad(entropy, pad)))
        chosen, entropy = (torch.stack(part) for part in zip(*found, strict=True))
        return chosen, entropy, None


def _reward(right: list[float], **_: Any) -> list[float]:
    return right


def grpo_trainer(
    compressed: CompressedModel,
    settings: AdaptSettings,
    train: Dataset[Any],
    callbacks: list[TrainerCallback],
) -> CompressedGRPOTrainer:
    """Return the trainer of a run, of which TRL computes advantages and loss.

    Args:
        train: documents; one reply of each is asked for.
    """
    args = arguments_of(
        settings,
        Path(settings.output),
        1,
        settings.passes,
        GRPOConfig,
        num_generations=settings.group,
        max_completion_length=settings.max_reply,
        temperature=settings.temperature,
        epsilon=settings.epsilon,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
    )
    rows = [str(index) for index in range(settings.steps * settings.documents)]
    return CompressedGRPOTrainer(
        compressed,
        settings,
        train,
        load_processor(settings.model).tokenizer,
        args=args,
        train_dataset=Table.from_dict({"prompt": rows}),
        callbacks=callbacks,
    )
