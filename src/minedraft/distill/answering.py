"""A model answers questions, or is asked what it thinks of answers, in a process of its own.

    python -m minedraft.distill.answering

Standard input has a Job; standard output gets a Progress a line. Answers go into the job's folder
as they are ready: whoever ends this process loses the latest only.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from minedraft import lifeline
from minedraft.distill import answers
from minedraft.distill.answers import GREEDY, Answer
from minedraft.distill.messages import Job, Progress, Text
from minedraft.distill.questions import Question
from minedraft.engine_options import one_line
from minedraft.llm import LLM

WRITTEN_TOGETHER = 32
"""Answers in a file."""
ON_CPU = {"max_num_seqs": 64}
"""More at a time are no faster there, and all of them are lost when the process is killed."""
MOST_OPEN = 512
"""Requests that the engine has at a time; it decides how many of them run."""


class Answering:
    """The engine, and what it has answered so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options: dict[str, Any] = {"enable_prefix_caching": False, "seed": job.seed}
        options |= ON_CPU if current_platform.is_cpu() else {}
        options |= job.engine | {"max_logprobs": job.top}
        llm = LLM(job.model, mode="off", **options)
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        self._max_model_len = llm.llm_engine.model_config.max_model_len
        self._open: dict[str, Text] = {}
        self._ready: list[Answer] = []
        self._progress = Progress(0, 0, 0)

    def run(self) -> Iterator[Progress]:
        """Answers all; says after each file how far it is."""
        wanted = self._wanted()
        more = True
        while (more and not self._is_enough()) or self._open:
            while more and len(self._open) < MOST_OPEN and not self._is_enough():
                more = self._ask(next(wanted, None))
            if self._open:
                for output in self._engine.step():
                    if output.finished:
                        self._take(output)
            if len(self._ready) >= WRITTEN_TOGETHER:
                yield self._write()
        final = self._write()
        final.ended = True
        yield final

    def _wanted(self) -> Iterator[Text]:
        job = self._job
        yield from job.texts
        for number, sample in job.wanted:
            if tokens := self._tokens(job.questions[number]):
                yield Text(number, sample, *tokens)
            else:
                self._progress.left_out += 1

    def _is_enough(self) -> bool:
        """Whether what is under way will be as much as is wanted, if it is as long as the rest."""
        job, done = self._job, self._progress
        mean = done.tokens / done.answers if done.answers else job.answer_tokens
        return bool(job.most_tokens) and done.tokens + mean * len(self._open) >= job.most_tokens

    def _ask(self, text: Text | None) -> bool:
        """Whether there was something to ask."""
        if text is None:
            return False
        job = self._job
        longest = self._max_model_len - max(job.answer_tokens, len(text.answer) + 1)
        if len(text.prompt) > min(longest, job.max_prompt_tokens or longest):
            self._progress.left_out += 1
            return True
        common: dict[str, Any] = {
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        if text.answer:
            params = SamplingParams(max_tokens=1, prompt_logprobs=job.top, **common)
        else:
            # Without a seed of their own: the CPU sampler fails on one beside a prompt in chunks.
            params = SamplingParams(
                temperature=0.0 if text.sample == GREEDY else 1.0,
                max_tokens=job.answer_tokens,
                logprobs=job.top,
                **common,
            )
        name = f"{text.question} {text.sample}"
        self._open[name] = text
        self._engine.add_request(name, {"prompt_token_ids": text.prompt + text.answer}, params)
        return True

    def _tokens(self, question: Question) -> tuple[list[int], list[int]] | None:
        """Of the prompt, and of the answer if there is one; None if its tokens cannot be told."""
        messages = msgspec.to_builtins(question.messages)
        if self._tokenizer.chat_template is None:
            prompt = self._tokenizer.encode("\n".join(m["content"] for m in messages))
            answer = self._tokenizer.encode(question.answer or "", add_special_tokens=False)
        else:
            apply = self._tokenizer.apply_chat_template
            prompt = apply(messages, add_generation_prompt=True, return_dict=False)
            if question.answer is None:
                return prompt, []
            said = {"role": "assistant", "content": question.answer}
            whole = apply([*messages, said], add_generation_prompt=False, return_dict=False)
            if whole[: len(prompt)] != prompt:
                return None  # the template writes what was said before in another way
            answer = whole[len(prompt) :]
            if (end := self._tokenizer.eos_token_id) in answer:
                answer = answer[: answer.index(end) + 1]  # after that the template goes on
        if question.answer is not None and not answer:
            return None
        return prompt, answer[: self._job.answer_tokens]

    def _take(self, output: Any) -> None:
        text = self._open.pop(output.request_id)
        if text.answer:
            tokens, found, first = text.answer, output.prompt_logprobs, len(text.prompt)
        else:
            tokens, found, first = output.outputs[0].token_ids, output.outputs[0].logprobs, 0
        # A position has the token that came, then the most likely ones.
        begins = np.array(found.start_indices[first : first + len(tokens)]) + 1
        places = begins[:, None] + np.arange(self._job.top)
        self._ready.append(
            Answer(
                text.question,
                text.sample,
                np.array(text.prompt, np.int32),
                np.array(tokens, np.int32),
                np.array(found.token_ids, np.int32)[places],
                np.array(found.logprobs, np.float32)[places],
            )
        )
        self._progress.answers += 1
        self._progress.tokens += len(tokens)

    def _write(self) -> Progress:
        if self._ready:
            answers.write(Path(self._job.folder), self._ready)
            self._ready = []
        return self._progress


def main() -> None:
    """Runs until all is answered."""
    lifeline.exit_with_parent()
    # Libraries print to standard output: progress has a file of its own.
    said = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        for progress in Answering(job).run():
            said.write(msgspec.json.encode(progress) + b"\n")
    except (ValueError, OSError) as error:
        sys.exit(one_line(error))


if __name__ == "__main__":
    main()
