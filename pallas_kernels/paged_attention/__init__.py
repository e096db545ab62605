"""Attention of a ragged batch over a paged KV pool."""

from pallas_kernels.paged_attention.api import NO_WINDOW as NO_WINDOW
from pallas_kernels.paged_attention.api import AttentionMetadata as AttentionMetadata
from pallas_kernels.paged_attention.api import PagedAttention as PagedAttention
from pallas_kernels.paged_attention.api import kv_slots as kv_slots
from pallas_kernels.paged_attention.mosaic import MosaicPagedAttention as MosaicPagedAttention
from pallas_kernels.paged_attention.sharded import (
    ShardedPagedAttention as ShardedPagedAttention,
)
from pallas_kernels.paged_attention.triton import TritonPagedAttention as TritonPagedAttention
from pallas_kernels.paged_attention.xla import XlaPagedAttention as XlaPagedAttention
