"""`jpaged bench kernels`: no time without a right answer, and work counted as it is."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.bench import kernels
from jpaged.bench.kernel_cases import CPU_WORKLOADS, Case, draw_inputs, select_cases
from jpaged.bench.kernel_contenders import CONTENDERS, Contender, as_numpy, dense_attention
from jpaged.bench.kernel_timing import Ceilings
from jpaged.cli.main import main
from jpaged.errors import ConfigError
from pallas_kernels.testing import AttentionShape

FLOAT32 = jnp.dtype("float32")
TINY = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, softcap=3.0, has_sinks=True)
ROWS = ((1, 5), (1, 70), (9, 40), (17, 17))
CEILINGS = Ceilings(copy_gb_per_s=10.0, matmul_tflop_per_s=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(CPU_WORKLOADS, "decode", ((1, 20), (1, 20)))
    monkeypatch.setattr(kernels, "ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "MAX_POOLS", 2)
    monkeypatch.setattr("jpaged.bench.kernel_timing.COPY_BYTES", 1 << 20)


def case_of(shape=TINY, rows=ROWS, pool_dtype="float32"):
    return Case("tiny", "mixed", shape, rows, FLOAT32, jnp.dtype(pool_dtype))


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
    assert list(results) == list(CONTENDERS)
    assert {each["case"] for each in results.values()} == {"smollm2-135m/decode"}
    for name in ("triton", "jax-paged-attention"):
        assert results[name]["microseconds"] is None
        assert results[name]["reason"].startswith("left out: ")
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
def test_the_reference_agrees_with_paged_attention(pool_dtype):
    """In a batch with everything; the pool that is checked has NaN where nothing may be read."""
    case = case_of(pool_dtype=pool_dtype)
    inputs = draw_inputs(case, num_pools=1)
    if pool_dtype == "float32":
        assert np.isnan(inputs.poisoned).any() and not np.isnan(inputs.pools[0]).any()
    contender = CONTENDERS["xla"](case, inputs)
    assert contender.run_poisoned is not None
    got = as_numpy(contender.run_poisoned(), case)
    expected = dense_attention(
        case, inputs, inputs.query, inputs.pools[0], dtype=FLOAT32, num_rows_at_once=1
    )
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_wrong_answers_have_no_times(monkeypatch):
    def wrong(case, inputs):
        return Contender("xla", lambda: [inputs.query], run_poisoned=None)

    def failing(case, inputs):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(CONTENDERS, "xla", wrong)
    monkeypatch.setitem(CONTENDERS, "torch-sdpa", failing)
    results = {
        each.contender: each for each in kernels.bench_case(case_of(), CEILINGS, seconds=0.01)
    }
    assert results["xla"].microseconds is None and "wrong by" in results["xla"].reason
    assert results["torch-sdpa"].reason == "failed: RuntimeError: no such kernel"
    assert results["gather-dense"].microseconds > 0
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
        cases = select_cases(pattern, is_cpu=True, dtype=FLOAT32, pool_dtype=FLOAT32)
        return [case.name for case in cases]

    assert names("llama-3-8b/decode*") == [
        f"llama-3-8b/{name}" for name in ("decode", "decode-ragged", "decode-one")
    ]
    with pytest.raises(ConfigError, match="--shapes 'llama-9' matches none. Models: smollm2-135m"):
        names("llama-9")
