"""A run of distill from the target's answers to the drafter's card; every stage is done once."""

import gc
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from minedraft.bench.provenance import provenance
from minedraft.bench.systems import Pair
from minedraft.bench.workloads import Conversation
from minedraft.cache import make_once
from minedraft.config import ConfigError
from minedraft.distill import answers, card, checkpoint, checks, evaluation, slicing
from minedraft.distill.answers import GREEDY, Answer
from minedraft.distill.asking import ask
from minedraft.distill.messages import Job
from minedraft.distill.questions import Question, digest, questions
from minedraft.distill.recipe import TOP, Recipe, RunFolder

BYTES_PER_TOKEN = 8 * TOP + 8
"""Of an answer."""
CHECKPOINTS = 8
"""So many times the trained weights' bytes: two checkpoints with the optimizer's two moments each,
and the drafter."""
SAY_S = 30.0
"""Between two lines of progress."""


@dataclass(frozen=True)
class Limits:
    """What a run may take; 0: no limit."""

    minutes: float = 0.0
    """Of training."""
    tokens: int = 0
    """Of answers that the target writes."""


class Session:
    """A run; ``run`` begins or continues it."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        limits: Limits,
        engine: dict[str, Any],
        drafter_engine: dict[str, Any],
        pair: Callable[[Path, Path], Pair] | None,
        concurrency: int,
        answers_of: RunFolder | None = None,
    ) -> None:
        """``engine`` and ``drafter_engine``: vLLM's options.

        ``pair`` says where target and drafter are run together; None: they are not.
        ``answers_of``: a run whose answers are used.
        """
        self._recipe = recipe
        self._folder = folder
        self._limits = limits
        self._engine = engine
        self._drafter_engine = drafter_engine
        self._pair = pair
        self._concurrency = concurrency
        self._answers_of = answers_of
        self._console = Console()
        self._said = 0.0

    def run(self) -> None:
        """All stages that are not done. Raises ConfigError, and KeyboardInterrupt if stopped."""
        recipe, folder = self._recipe, self._folder
        checks.need_packages(recipe)
        listed = questions(recipe)
        target = checkpoint.local_folder(recipe.target)
        student = checkpoint.local_folder(recipe.student) if recipe.student else target
        checks.check_student(recipe, target, student)
        folder.open(recipe)
        try:
            if not folder.provenance.exists():
                folder.provenance.write_bytes(msgspec.json.encode(provenance()))
            if self._answers_of is not None:
                checks.copy_answers(self._answers_of, folder, recipe)
            if recipe.layers:
                student = self._slice(target)
            self._answer(target, listed)
            if not folder.drafter.exists():
                self._train(student, listed)
                _free_memory()
            self._evaluate(target, listed)
        except OSError as error:
            raise ConfigError(
                f"{folder.path}: {error.strerror or error}; the same command goes on from here"
            ) from error

    # --- the target's answers -----------------------------------------------------------------

    def _answer(self, target: Path, listed: Sequence[Question]) -> None:
        recipe, folder, most = self._recipe, self._folder, self._limits.tokens
        asked = digest(listed)
        if self._is_answered(asked):
            return
        done, tokens = answers.done(folder.answers)
        wanted = [key for key in _wanted(recipe, listed) if key not in done]
        expected = (most or len(wanted) * recipe.answer_tokens) - tokens
        checks.need_space(folder.path, BYTES_PER_TOKEN * max(0, expected))
        job = Job(
            model=str(target),
            engine=self._engine,
            folder=str(folder.answers),
            top=TOP,
            questions=list(listed),
            wanted=wanted,
            max_prompt_tokens=recipe.max_prompt_tokens,
            answer_tokens=recipe.answer_tokens,
            most_tokens=max(1, most - tokens) if most else 0,
            seed=recipe.seed + len(done),  # what is written after a break is not what was before
        )
        whole = len(done) + len(wanted)
        self._say(f"the target answers: {len(done)} answers of {whole} are there")
        if wanted and not (most and tokens >= most):
            for progress in ask(job):
                folder.note(event="answers", **msgspec.to_builtins(progress))
                self._say(
                    f"the target answers: {len(done) + progress.answers} of {whole}, "
                    f"{tokens + progress.tokens:,} tokens, {progress.left_out} left out",
                    often=not progress.ended,
                )
            if not done and not progress.answers:
                raise ConfigError(
                    "all prompts are too long: see --max-prompt-tokens, and --answer-tokens, for "
                    "which --max-model-len has to leave room"
                )
        stamp = {"questions": asked, "tokens": most}
        (folder.answers / checks.STAMP).write_bytes(msgspec.json.encode(stamp))

    def _is_answered(self, known: str) -> bool:
        """Whether no more answers are wanted. Raises ConfigError if there are those of others."""
        folder, most = self._folder, self._limits.tokens
        file = folder.answers / checks.STAMP
        if not file.exists():
            return False
        stamp = msgspec.json.decode(file.read_bytes())
        if stamp["questions"] != known:
            raise ConfigError(f"{folder.path}: the prompts have changed; name a new folder")
        if not stamp["tokens"] or 0 < most <= stamp["tokens"]:
            return True
        if folder.checkpoint.exists() or folder.drafter.exists():
            raise ConfigError(
                f"{folder.path}: training has begun with --tokens {stamp['tokens']}; name a new "
                "folder, with --answers-of this one"
            )
        return False

    # --- the student --------------------------------------------------------------------------

    def _train(self, student: Path, listed: Sequence[Question]) -> None:
        import torch

        from minedraft.distill.student import Student
        from minedraft.distill.training import Training

        recipe, folder = self._recipe, self._folder
        known = list(answers.read(folder.answers))
        learned = [a for a in known if not listed[a.question].held_out]
        held_out = _held_out(known, listed)
        if not learned or not held_out:
            raise ConfigError(
                "no answers to learn from, or none held out: prompts are longer than "
                f"{recipe.max_prompt_tokens} tokens (--max-prompt-tokens), or --tokens is too small"
            )
        tokens = answers.likely_tokens(learned, recipe.loss_vocabulary)
        torch.manual_seed(recipe.seed)
        vocab_size = 1 + max(int(answer.top_ids.max()) for answer in known)
        pupil = Student(student, recipe, tokens, vocab_size)
        checks.need_space(folder.path, CHECKPOINTS * sum(4 * w.numel() for w in pupil.parameters()))
        training = Training(
            pupil, recipe, self._limits.minutes, learned, held_out, folder.checkpoint,
            self._log_training,
        )  # fmt: skip
        with _stoppable() as is_to_stop:
            if not training.run(is_to_stop):
                self._say("stopped; the same command goes on from here")
                raise KeyboardInterrupt
        trained = {
            "answers": len(learned),
            "distinct": sum(len(a.tokens) for a in learned),
            "held_out": len({answer.question for answer in held_out}),
            "tokens": training.state.tokens,
            "seconds": training.state.seconds,
        }
        make_once(folder.drafter, lambda new: self._finish(pupil, student, new, trained))
        shutil.rmtree(folder.path / "student", ignore_errors=True)
        shutil.rmtree(folder.checkpoint, ignore_errors=True)

    def _slice(self, target: Path) -> Path:
        """The student as it begins; none is needed when the drafter is there."""
        folder, layers = self._folder, self._recipe.layers
        begun = folder.path / "student"
        if folder.drafter.exists():
            return begun
        return make_once(begun, lambda new: slicing.keep_layers(target, new, layers))

    def _finish(self, pupil: Any, student: Path, new: Path, trained: dict[str, Any]) -> None:
        """The drafter's folder, all but its card."""
        from minedraft.distill.quantise import quantise

        whole = self._folder.unquantised if self._recipe.quantise else new
        checkpoint.copy_all_but_weights(student, whole)
        pupil.save(whole, checkpoint.dtype(student))
        if self._recipe.quantise:
            self._say(f"quantising: {self._recipe.quantise}")
            quantise(whole, new, self._recipe.quantise)
        (self._folder.path / "trained.json").write_bytes(msgspec.json.encode(trained))

    def _log_training(self, **event: Any) -> None:
        self._folder.note(**event)
        if event["event"] == "look":
            greedy, sampled = event["agreement"], event["agreement_sampled"]
            both = ("agreement", greedy), ("at temperature 1", sampled)
            agreement = ", ".join(f"{what} {v:.1%}" for what, v in both if v is not None)
            self._say(
                f"training: {event['share']:.0%}, {event['tokens']:,} tokens, "
                f"{event['seconds'] / 60:.1f} minutes; held out: divergence "
                f"{event['divergence']:.3f}, {agreement}"
            )

    # --- how good it is -----------------------------------------------------------------------

    def _evaluate(self, target: Path, listed: Sequence[Question]) -> None:
        folder = self._folder
        if folder.evaluation.exists():
            self._say(f"{folder.drafter} is finished")
            return
        held_out = _held_out(answers.read(folder.answers), listed)
        asked = [listed[answer.question] for answer in held_out if answer.sample == GREEDY]

        def evaluated(drafter: Path) -> evaluation.Evaluation:
            return self._evaluation(drafter, target, held_out, asked)

        found = evaluated(folder.drafter)
        if self._recipe.quantise:
            found.unquantised = evaluated(folder.unquantised)
        card.draw(found, folder.path / "evaluation")
        trained = msgspec.json.decode((folder.path / "trained.json").read_bytes())
        command = msgspec.json.decode(folder.provenance.read_bytes())["command"]
        text = card.model_card(self._recipe, found, trained, command)
        (folder.drafter / "README.md").write_text(text)
        encoded = msgspec.json.format(msgspec.json.encode(found))
        (folder.path / "evaluation.new").write_bytes(encoded)
        (folder.path / "evaluation.new").rename(folder.evaluation)
        for words in (card.table(found), card.summary(found), f"The drafter: {folder.drafter}"):
            self._say(words)

    def _evaluation(
        self, drafter: Path, target: Path, held_out: Sequence[Answer], asked: Sequence[Question]
    ) -> evaluation.Evaluation:
        """Of a drafter; what it judged is kept, for a run that is broken off now."""
        folder = self._folder
        judged = make_once(
            folder.path / f"judged-{drafter.name}",
            lambda new: self._judge(drafter, held_out, new),
        )
        greedy, sampled = evaluation.on_texts(judged)
        machine = None
        if self._pair is not None:
            machine, benchmark = evaluation.run(
                self._pair(target, drafter), _conversations(asked), self._concurrency,
                self._recipe.seed, self._say,
            )  # fmt: skip
            benchmark.write(folder.path / f"run-{drafter.name}.json")
        return evaluation.Evaluation(greedy, sampled, machine)

    def _judge(self, drafter: Path, held_out: Sequence[Answer], new: Path) -> None:
        self._say("the drafter judges the held-out answers")
        for _ in ask(evaluation.judge_job(drafter, held_out, new, self._drafter_engine)):
            pass

    def _say(self, text: str, *, often: bool = False) -> None:
        """``often``: not each is worth a line."""
        now = time.monotonic()
        if often and now - self._said < SAY_S:
            return
        self._said = now
        # Not wrapped: paths are copied, and logs searched.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _wanted(recipe: Recipe, listed: Sequence[Question]) -> Iterator[tuple[int, int]]:
    """The answers, those of held-out questions first; each question's greedy one first of all."""
    for is_held_out in (True, False):
        samples = 1 if is_held_out else recipe.samples
        for sample in range(samples + 1):
            for number, question in enumerate(listed):
                there = question.answer is not None and sample != GREEDY
                if question.held_out == is_held_out and not there:
                    yield number, sample


def _held_out(known: Iterable[Answer], listed: Sequence[Question]) -> list[Answer]:
    """The answers to questions that are held out."""
    return [answer for answer in known if listed[answer.question].held_out]


def _conversations(asked: Sequence[Question]) -> list[Conversation]:
    return [
        Conversation(
            tuple(m.content for m in question.messages if m.role == "user"),
            evaluation.RUN_OUTPUT_TOKENS,
        )
        for question in asked
    ]


def _free_memory() -> None:
    """For the engines that are to come."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, or the process is to end: the first time it is not broken off."""
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
