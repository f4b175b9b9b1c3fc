"""The student learns: a loop that can be ended at any time and goes on from its last checkpoint."""

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minedraft.distill import batches
from minedraft.distill.acceptance import agreement
from minedraft.distill.answers import GREEDY, Answer
from minedraft.distill.batches import Batch
from minedraft.distill.checkpoint import saving
from minedraft.distill.loss import divergence
from minedraft.distill.recipe import Recipe
from minedraft.distill.student import Student

CHECKPOINT_S = 300.0
LOOKS = 20
"""Times that held-out answers are looked at, the first included."""
LOOK_TOKENS = 8192
"""So many tokens of theirs, about: a look at all would take longer than what lies between two."""
WARM_UP = 0.03
"""Share of the training in which the learning rate rises; then it falls to 0."""
LARGEST_GRADIENT = 1.0


@dataclass
class State:
    """How far the training is; it goes into the checkpoint."""

    epoch: int = 0
    batch: int = 0
    """Those of this epoch that were learned from."""
    tokens: int = 0
    """Of answers; one that comes again counts again."""
    seconds: float = 0.0
    looks: int = 0

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


class Training:
    """Teaches a student; ``log`` gets what happens."""

    def __init__(
        self,
        student: Student,
        recipe: Recipe,
        minutes: float,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        folder: Path,
        log: Callable[..., None],
    ) -> None:
        """For ``minutes`` at most; 0: for all epochs.

        ``folder`` is that of checkpoints: with one in it the training goes on from there.
        """
        from accelerate import Accelerator

        self._student = student
        self._recipe = recipe
        self._most_s = 60 * minutes
        self._answers = answers
        self._looked_at = _some(held_out, LOOK_TOKENS)
        self._folder = folder
        self._log = log
        self._weights = student.parameters()
        optimizer = torch.optim.AdamW(self._weights, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self._accelerator = Accelerator()
        self._module, self._optimizer = self._accelerator.prepare(student.module, optimizer)
        self.state = State()
        self._accelerator.register_for_checkpointing(self.state)
        self._batches: list[list[int]] = []
        self._steps = 0.0
        """Batches of all epochs together."""
        if checkpoint := _latest(folder):
            self._accelerator.load_state(str(checkpoint))

    def run(self, is_to_stop: Callable[[], bool]) -> bool:
        """Trains to the end; False if it is to stop now. Raises OSError."""
        self._begin_epoch()
        self._module.train()
        if not self.state.looks:
            self._look()
        saved = time.monotonic()
        while self.share() < 1.0 and not is_to_stop():
            self._step()
            if self.share() * (LOOKS - 1) >= self.state.looks:
                self._look()
            if time.monotonic() - saved > CHECKPOINT_S:
                self.save()
                saved = time.monotonic()
        self.save()
        return not is_to_stop()

    def share(self) -> float:
        """Of the training that is behind us."""
        done = (self.state.epoch * len(self._batches) + self.state.batch) / self._steps
        return min(1.0, max(done, self.state.seconds / self._most_s if self._most_s else 0.0))

    def save(self) -> None:
        """A checkpoint, which takes the place of the one before when it is whole."""
        new = self._folder.with_name(f"{self._folder.name}.unfinished")
        shutil.rmtree(new, ignore_errors=True)
        with saving():
            self._accelerator.save_state(str(new))
        old = self._folder.with_name(f"{self._folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():
            os.rename(self._folder, old)
        os.rename(new, self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _begin_epoch(self) -> None:
        rng = random.Random(f"{self._recipe.seed} {self.state.epoch}")
        self._batches = batches.order(self._answers, self._recipe.batch_tokens, rng)
        self._steps = float(self._recipe.epochs * len(self._batches))

    def _step(self) -> None:
        began, state = time.monotonic(), self.state
        batch = batches.make([self._answers[i] for i in self._batches[state.batch]])
        rate = self._recipe.learning_rate * _rate(self.share())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = self._divergence(batch, self._logits(batch)).mean()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._weights, LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.batch += 1
        state.tokens += len(batch.labels)
        if state.batch == len(self._batches):
            state.epoch, state.batch = state.epoch + 1, 0
            self._begin_epoch()
        state.seconds += time.monotonic() - began
        self._log(
            event="step", share=round(self.share(), 4), tokens=state.tokens,
            seconds=round(state.seconds, 1), rate=rate, divergence=round(loss.item(), 4),
        )  # fmt: skip

    def _logits(self, batch: Batch) -> torch.Tensor:
        """float [n, v]."""
        device = self._accelerator.device
        self._student.head.positions = batch.positions.to(device)
        logits: torch.Tensor = self._module(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)
        ).logits
        return logits

    def _divergence(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """float [n]."""
        columns = self._student.columns[batch.top_ids].to(logits.device)
        return divergence(logits, columns, batch.top_logprobs.to(logits.device))

    def _look(self) -> None:
        """At held-out answers: their mean divergence in nats, and the share of their tokens that
        the student finds most likely of those that the loss tells apart.

        That share is given for greedy answers, or those of transcripts, and for the others.
        """
        self._module.eval()
        total = 0.0
        alike: dict[bool, list[list[bool]]] = {True: [], False: []}
        order = batches.order(self._looked_at, self._recipe.batch_tokens, random.Random(0))
        with torch.no_grad():
            for indices in order:
                answers = [self._looked_at[i] for i in indices]
                batch = batches.make(answers)
                logits = self._logits(batch)
                total += self._divergence(batch, logits).sum().item()
                same = logits.argmax(dim=1).cpu() == self._student.columns[batch.labels]
                for answer, each in zip(answers, same.split(batch.lengths), strict=True):
                    alike[answer.sample == GREEDY].append(each.tolist())
        self._module.train()
        self.state.looks += 1
        self._log(
            event="look", share=round(self.share(), 4), tokens=self.state.tokens,
            seconds=round(self.state.seconds, 1),
            divergence=total / sum(len(answer.tokens) for answer in self._looked_at),
            agreement=agreement(alike[True]) if alike[True] else None,
            agreement_sampled=agreement(alike[False]) if alike[False] else None,
        )  # fmt: skip


def _some(answers: Sequence[Answer], most_tokens: int) -> list[Answer]:
    """Every so many-th, of greedy ones as of others, so that they have about as many tokens."""
    tokens = sum(len(answer.tokens) for answer in answers)
    return sorted(answers, key=lambda answer: answer.sample)[:: tokens // most_tokens + 1]


def _rate(share: float) -> float:
    """Of the learning rate, when so much of the training is behind us."""
    return min(1.0, (share + 1e-3) / WARM_UP, (1.0 - share) / (1.0 - WARM_UP))


def _latest(folder: Path) -> Path | None:
    """The checkpoint; whoever was killed between two renames left the one before."""
    for found in (folder, folder.with_name(f"{folder.name}.old")):
        if found.is_dir():
            return found
    return None
