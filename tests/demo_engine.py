"""Options of all engines with the demo model, which share their compiled programs."""

from typing import Any

MAX_MODEL_LEN = 512
DEMO_OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
    "bucket_growth": 64,
}
