"""``minedraft generate``: a file of prompts in, a file of answers out."""

import argparse
import os
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from minedraft import json_lines
from minedraft.config import ConfigError
from minedraft.drafter.child import DrafterError
from minedraft.engine_options import one_line, parse_flags
from minedraft.llm import CONFIG_FIELDS, LLM
from minedraft.protocol import TokenId

OWN_OPTIONS = {
    "draft_model",
    "drafter",
    "key_file",
    "mode",
    "num_speculative_tokens",
    "drafter_args",
    "drafter_cores",
    "target_cores",
    "drafter_gpu",
    "stats",
}
"""Keywords of LLM that are flags of the command."""


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompts file: exactly one of prompt, messages and prompt_token_ids."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[TokenId] | None = None
    sampling: dict[str, Any] = {}
    """Fields of vLLM's SamplingParams; the model's own defaults hold for the others."""
    id: str | int | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a JSONL file; empty lines are skipped. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path}: {error}") from error
    lines = []
    # JSON may hold other line ends as they are.
    for place, line in json_lines.read(text.split("\n"), PromptLine, str(path)):
        _check_line(line, place)
        lines.append(line)
    if not lines:
        raise ConfigError(f"prompts file {path}: no prompts in it")
    return lines


def _check_line(line: PromptLine, where: str) -> None:
    kinds = (line.prompt, line.messages, line.prompt_token_ids)
    given = [kind for kind in kinds if kind is not None]
    if len(given) != 1:
        raise ConfigError(f"{where}: give one of prompt, messages and prompt_token_ids")
    if not given[0]:
        raise ConfigError(f"{where}: the prompt is empty")
    sampling_params(line, {}, where)


def sampling_params(line: PromptLine, defaults: dict[str, Any], where: str) -> SamplingParams:
    """vLLM's sampling parameters for a line. Raises ConfigError, which names the line."""
    fields = defaults | line.sampling
    structured = fields.get("structured_outputs")
    unknown = fields.keys() - signature(SamplingParams).parameters
    if isinstance(structured, dict):
        unknown |= structured.keys() - signature(StructuredOutputsParams).parameters
    if unknown:
        raise ConfigError(f"{where}: sampling: unknown field {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(fields, SamplingParams, str_keys=True)
    except Exception as error:  # vLLM's own are no ValueErrors
        raise ConfigError(f"{where}: sampling: {one_line(error)}") from error


def engine_prompt(line: PromptLine, tokenizer: Any) -> Any:
    """The line as vLLM takes it; messages go through the chat template."""
    if line.prompt is not None:
        return {"prompt": line.prompt}
    if line.prompt_token_ids is not None:
        return {"prompt_token_ids": line.prompt_token_ids}
    return {
        "prompt_token_ids": tokenizer.apply_chat_template(
            line.messages, add_generation_prompt=True, return_dict=False
        )
    }


def records(lines: Sequence[PromptLine], outputs: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The lines of an answers file, in the order of the prompts."""
    for index, (line, output) in enumerate(zip(lines, outputs, strict=True)):
        yield {
            "id": index if line.id is None else line.id,
            "prompt_tokens": len(output.prompt_token_ids),
            "outputs": [_completion(completion) for completion in output.outputs],
        }


def _completion(completion: Any) -> dict[str, Any]:
    record = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs
        ]
    return record


def generate(options: argparse.Namespace) -> int:
    """Runs the command; ``options`` as cli.py parses them."""
    lines = read_prompts(options.prompts)
    for path in filter(None, (options.output, options.stats)):
        _check_writable(path)
    if current_platform.is_cpu():
        # One process for the engine: with few cores, its workers' busy waiting costs more than
        # they bring.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = _engine(options)
    defaults = llm.llm_engine.model_config.get_diff_sampling_param()
    params = [
        sampling_params(line, defaults, f"{options.prompts}, prompt {number}")
        for number, line in enumerate(lines, 1)
    ]
    tokenizer = llm.get_tokenizer() if any(line.messages for line in lines) else None
    try:
        outputs = llm.generate([engine_prompt(line, tokenizer) for line in lines], params)
    except VLLMClientError as error:  # a prompt longer than the model's context, for one
        raise ConfigError(f"{options.prompts}: {one_line(error)}") from error
    encoder = msgspec.json.Encoder()
    with options.output.open("wb") as file:
        for record in records(lines, outputs):
            file.write(encoder.encode(record) + b"\n")
    return 0


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _engine(options: argparse.Namespace) -> LLM:
    flags = parse_flags(options.engine_flags, program="minedraft generate")
    settings = {name: getattr(options, name) for name in CONFIG_FIELDS | OWN_OPTIONS}
    try:
        return LLM(options.target, **settings, **flags)
    except (ConfigError, DrafterError):
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{options.target}: {one_line(error)}") from error
