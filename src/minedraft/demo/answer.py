"""One run of the demo, in a process of its own: says in JSON lines what it does.

Events: ``ready``, ``text`` (of one prompt, so far) and ``done`` (with the result).
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from minedraft import lifeline
from minedraft.llm import LLM
from minedraft.offline import PromptLine, engine_prompt

WARM_UP_TOKENS = 8
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
}


def say(**event: Any) -> None:
    """One event, at once."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def answer(llm: LLM, prompts: list[Any], max_tokens: int, *, quiet: bool = False) -> list[Any]:
    """Greedy answers to all prompts together; says the texts as they grow."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), prompt, params)
    finished: dict[int, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
            if not quiet:
                say(event="text", prompt=int(output.request_id), text=output.outputs[0].text)
    return [finished[index] for index in range(len(prompts))]


def main() -> None:
    """Runs as the job on standard input says."""
    lifeline.exit_with_parent()
    job = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        llm = LLM(job["target"], stats=stats, **job["options"], **ENGINE)
        tokenizer = llm.get_tokenizer()
        lines = [PromptLine(messages=messages) for messages in job["messages"]]
        prompts = [engine_prompt(line, tokenizer) for line in lines]
        answer(llm, prompts, WARM_UP_TOKENS, quiet=True)
        warm = json.loads(stats.read_text()) if stats.exists() else {}
        say(event="ready")
        started = time.perf_counter()
        outputs = answer(llm, prompts, job["max_tokens"])
        seconds = time.perf_counter() - started
        measured = json.loads(stats.read_text()) if stats.exists() else {}
    say(
        event="done",
        seconds=seconds,
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        before=warm,
        after=measured,
    )


if __name__ == "__main__":
    main()
