"""`jpaged bench kernels`: no time without a right answer, and work counted as it is."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as bundled

from jpaged.bench.kernels import cases, run
from jpaged.bench.kernels.backends import attention_contender, in_layout_of
from jpaged.bench.kernels.cases import CPU_WORKLOADS, Case, draw_inputs, select_cases
from jpaged.bench.kernels.contenders import Contender, NotApplicable, as_numpy
from jpaged.bench.kernels.peers import bundled_for_tpus
from jpaged.bench.kernels.reference import reference
from jpaged.bench.kernels.timing import Ceilings
from jpaged.cli.main import main
from jpaged.errors import ConfigError
from pallas_kernels.paged_attention import MosaicPagedAttention, XlaPagedAttention
from pallas_kernels.paged_attention.tuning import SHIPPED_FILE
from pallas_kernels.testing import AttentionShape

FLOAT32 = jnp.dtype("float32")
TINY = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, softcap=3.0, has_sinks=True)
PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
ROWS = ((1, 5), (1, 70), (9, 40), (17, 17))
CEILINGS = Ceilings(copy_gb_per_s=10.0, matmul_tflop_per_s=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(CPU_WORKLOADS, "decode", ((1, 20), (1, 20)))
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr(cases, "MAX_POOLS", 2)
    monkeypatch.setattr("jpaged.bench.kernels.timing.COPY_BYTES", 1 << 20)


def case_of(shape=TINY, rows=ROWS, pool_dtype="float32"):
    return Case("tiny", "mixed", shape, rows, FLOAT32, jnp.dtype(pool_dtype), 32)


def test_a_run_on_this_machine(tmp_path, capsys):
    """XLA is timed, and kernels are not: a CPU could only interpret them."""
    path = tmp_path / "results.json"
    command = ["bench", "kernels", "--shapes", "smollm2-135m/decode", "--seconds", "0.01"]
    assert main([*command, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["machine"]["platform"] == "cpu"
    assert document["machine"]["dtype"] == document["machine"]["kv_cache_dtype"] == "float32"
    assert document["machine"]["copy_gb_per_s"] > 0 < document["machine"]["matmul_tflop_per_s"]
    results = {each["contender"]: each for each in document["results"]}
    assert list(results) == list(run.contenders(SHIPPED_FILE))
    assert {each["case"] for each in results.values()} == {"smollm2-135m/decode"}
    for name, reason in {
        "triton": "its kernels run on NVIDIA cards only",
        "pallas-tpu": "its kernels run on TPUs only",
        "jax-paged-attention": "runs on GPUs only",
        "jax-ragged-attention": "runs on TPUs only",
    }.items():
        assert results[name]["microseconds"] is None
        assert results[name]["reason"] == f"left out: {reason}"
    assert {each["block_size"] for each in results.values()} == {16}
    ours, peer = results["xla"], results["gather-dense"]
    assert ours["is_ours"] and not peer["is_ours"] and ours["ratio"] == 1
    assert peer["ratio"] == pytest.approx(peer["microseconds"] / ours["microseconds"])
    num_bytes = 2 * 20 * 2 * 3 * 64 * 4 + 2 * 2 * 9 * 64 * 4
    for each in (ours, peer):
        assert each["error"] <= document["machine"]["tolerance"] and each["reason"] is None
        assert each["gb_per_s"] == pytest.approx(num_bytes / each["microseconds"] / 1e3)
        assert each["limit"] in {"copy", "matmul"} and each["percent_of_limit"] > 0
    assert "µs" in capsys.readouterr().out


@pytest.mark.parametrize("pool_dtype", ["float32", "int8"])
def test_backends_answer_as_the_reference(pool_dtype):
    """In a batch with everything; the pool that is checked has NaN where nothing may be read."""
    case = case_of(pool_dtype=pool_dtype)
    inputs = draw_inputs(case)
    if pool_dtype == "float32":
        assert np.isnan(inputs.poisoned).any() and not np.isnan(inputs.pools[0]).any()
    expected = reference(case, inputs)
    heads = {"num_kv_heads": TINY.num_kv_heads, "group": TINY.group, "head_dim": TINY.head_dim}
    for attention in (XlaPagedAttention(), MosaicPagedAttention(**heads, interpret=True)):
        own = in_layout_of(attention, inputs)
        contender = attention_contender(attention, case, own)
        assert contender.run_poisoned is not None
        assert len(own.pools) == 2 and (own.pools[0] != own.pools[1]).any()
        for answer in (contender.run()[0], contender.run_poisoned()):
            np.testing.assert_allclose(as_numpy(answer, case), expected, atol=2e-5)


def test_the_peer_for_tpus_gets_what_it_wants(monkeypatch):
    """Its own reference takes its place, which has the same arguments but for those of the chip."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=80, softcap=3.0, has_window=True)
    monkeypatch.setattr(cases, "WINDOW", 30)
    case = case_of(shape, ((1, 40), (9, 40)))
    inputs = draw_inputs(case)
    expected = reference(case, inputs)
    chip = SimpleNamespace(num_lanes=128, vmem_capacity_bytes=1 << 24)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: chip)

    def standing_in(*arrays, vmem_limit_bytes, **options):
        assert arrays[0].shape[-1] == arrays[1].shape[-1] == 128, "whole registers"
        assert vmem_limit_bytes == 14 << 20
        return bundled.ref_ragged_paged_attention(*arrays, **options)

    monkeypatch.setattr(bundled, "ragged_paged_attention", standing_in)
    with jax.disable_jit(), jax.numpy_rank_promotion("allow"):
        answer = bundled_for_tpus(case, inputs).run()[0]
    np.testing.assert_allclose(as_numpy(answer, case), expected, atol=2e-5)


@pytest.mark.parametrize(
    "case,reason",
    [
        (case_of(), "has no sinks"),
        (case_of(PLAIN, pool_dtype="int8"), "has scales of all heads, not of each"),
    ],
)
def test_what_the_peer_for_tpus_cannot_do(monkeypatch, case, reason):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotApplicable, match=reason):
        bundled_for_tpus(case, draw_inputs(case))


def test_wrong_answers_have_no_times(monkeypatch):
    def wrong(case, inputs):
        return Contender("xla", lambda: [inputs.query], run_poisoned=None)

    def failing(case, inputs):
        raise RuntimeError("no such kernel\nand more")

    makers = run.contenders(SHIPPED_FILE) | {"xla": wrong, "torch-sdpa": failing}
    results = {
        each.contender: each for each in run.bench_case(case_of(), makers, CEILINGS, seconds=0.01)
    }
    assert results["xla"].microseconds is None and "wrong by" in results["xla"].reason
    assert results["torch-sdpa"].reason == "failed: RuntimeError: no such kernel"
    assert results["gather-dense"].microseconds > 0
    monkeypatch.setattr(run, "contenders", lambda _: makers)
    with pytest.raises(SystemExit, match="Wrong or no answer: xla in smollm2-135m/decode"):
        main(["bench", "kernels", "--shapes", "smollm2-135m/decode", "--seconds", "0.01"])


def test_work_is_counted_as_it_is():
    case = case_of()
    assert case.num_operations == 4 * 4 * 16 * (5 + 70 + sum(range(32, 41)) + sum(range(1, 18)))
    kv_bytes = (5 + 70 + 40 + 17) * 2 * 2 * 16 * 4
    assert case.num_bytes == kv_bytes + 2 * 28 * 4 * 16 * 4
    windowed = case_of(AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, has_window=True))
    long = case_of(windowed.shape, ((1, 5000), (3, 3000)))
    assert long.num_operations == 4 * 4 * 16 * 4 * 1024
    assert long.num_bytes == (1024 + 1026) * 2 * 2 * 16 * 4 + 2 * 4 * 4 * 16 * 4
    least, limit = CEILINGS.least_seconds(num_bytes=10**10, num_operations=10**10)
    assert (least, limit) == (1.0, "copy")


def test_cases_are_selected_by_pattern():
    def names(pattern):
        types = {"dtype": FLOAT32, "pool_dtype": FLOAT32}
        cases = select_cases(pattern, is_cpu=True, choose_block_size=lambda _: 32, **types)
        assert all(case.block_size == 32 for case in cases)
        return [case.name for case in cases]

    assert names("llama-3-8b/decode*") == [
        f"llama-3-8b/{name}" for name in ("decode", "decode-ragged", "decode-one")
    ]
    with pytest.raises(ConfigError, match="--shapes 'llama-9' matches none. Models: smollm2-135m"):
        names("llama-9")
