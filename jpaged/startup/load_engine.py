"""From engine options to an engine that is ready: files, weights, memory, programs."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from jpaged.config import NO_GENERATION_CONFIG, EngineConfig
from jpaged.engine import Engine
from jpaged.execution.executor import Executor
from jpaged.execution.kv_scales import with_kv_scales
from jpaged.execution.programs import compile_programs
from jpaged.execution.runner import Runner
from jpaged.inputs import InputProcessor
from jpaged.metrics import Metrics
from jpaged.models.loading import load_model
from jpaged.models.sharding import split_config
from jpaged.models.tied_head import with_stored_head
from jpaged.progress import Progress
from jpaged.startup.device_memory import reserve_gpu_memory
from jpaged.startup.engine_plan import plan_engine
from jpaged.startup.generation import answer_end_ids, sampling_defaults
from jpaged.startup.memory_plan import wanted_model_len
from jpaged.startup.model_files import (
    load_generation_config,
    load_model_config,
    load_tokenizer,
    open_weights,
    resolve_model,
)
from jpaged.startup.program_cache import ProgramCache
from jpaged.startup.unused_accelerator import unused_accelerator
from jpaged.target import detect_target
from jpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, and what its front doors need to know of the model.

    sampling_defaults: arguments of `SamplingParams` for requests that do not give them.
    """

    engine: Engine
    inputs: InputProcessor
    model_name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    sampling_defaults: dict[str, Any]


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LoadedEngine:
    """Load a model and compile its programs. What needs no weights is checked before any is read.

    progress: through which another thread may cancel this. Raises `JpagedError`.
    """
    progress = progress or Progress()
    files = resolve_model(config.model)
    model_config = load_model_config(files)
    model_name = config.served_model_name or files.name
    wanted_model_len(config, model_config)  # refuses what the model cannot do
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files)
    generation = load_generation_config(files, config.generation_config)
    end_ids = answer_end_ids(model_config, generation, tokenizer)
    defaults = sampling_defaults(
        generation, is_used=config.generation_config != NO_GENERATION_CONFIG
    )
    reserve_gpu_memory(config.gpu_memory_utilization)
    target = detect_target(config.tensor_parallel_size)
    if message := unused_accelerator(target):
        logger.warning("%s", message)
    cache = ProgramCache.open(config.compilation_cache_dir, target)
    split_config(model_config, target.num_devices)  # refuses what cannot be split
    source = open_weights(files)
    model_config = with_stored_head(model_config, source)
    plan = plan_engine(config, model_config, target, compile_program=cache.compile)
    model = load_model(plan.spec.model, source, progress=progress)
    spec = replace(plan.spec, model=with_kv_scales(model, plan.kv_dtype))
    with progress.bar(spec.num_programs, "compiling", unit="") as advance:
        programs = compile_programs(spec, cache.compile, advance=advance)
    inputs = InputProcessor(
        tokenizer,
        vocab_size=model_config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=end_ids,
    )
    engine = Engine(
        Runner(spec, Executor(spec, programs)),
        Metrics(model_name=model_name, max_model_len=plan.max_model_len),
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_mode=config.preemption_mode,
        check_invariants=config.check_invariants,
    )
    return LoadedEngine(engine, inputs, model_name, tokenizer, plan.max_model_len, defaults)
