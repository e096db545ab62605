"""`jpaged bench kernels --tune`, with a clock that goes by the sizes of what runs."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jpaged.bench.kernels import tuning
from jpaged.bench.kernels.cases import Case
from jpaged.bench.kernels.contenders import Contender, NotApplicable
from jpaged.bench.kernels.reference import reference
from jpaged.bench.kernels.tuning import tune_kernels
from jpaged.cli.main import main
from jpaged.errors import ConfigError
from jpaged.execution.attention_choice import make_backend, with_measured_sizes
from jpaged.target import described_target
from pallas_kernels.testing import AttentionShape

FLOAT32 = jnp.dtype("float32")
SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16)
DECODES = Case("tiny", "decode", SHAPE, ((1, 20), (1, 40)), FLOAT32, FLOAT32, 16)
MIXED = replace(DECODES, workload="mixed", rows=((1, 20), (5, 20)))
V5E = described_target("v5e")
MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("jpaged.bench.kernels.timing.time", clock)
    return clock


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Tunes a backend, interpreted, and returns the entries of the file afterwards."""
    monkeypatch.setattr("jpaged.bench.kernels.cases.ROTATED_BYTES", 1 << 10)

    def run(backend, *cases):
        def backend_for(name, case):
            if name != backend:
                raise NotApplicable("not in this test")
            return make_backend(name, case.shape, V5E, interpret=True)

        monkeypatch.setattr(tuning, "backend_for", backend_for)
        tune_kernels(cases, run.path, seconds=0.01)
        return json.loads(run.path.read_text())

    run.path = tmp_path / "sizes.json"
    return run


@pytest.fixture
def costs(monkeypatch, clock):
    """Instead of kernels, right answers that take `costs.of(sizes, case)` seconds."""
    costs = SimpleNamespace(of=lambda sizes, case: 1.0)
    answers = {}

    def remembered(case, inputs):
        answers[case.name] = reference(case, inputs)
        return answers[case.name]

    def contender(attention, case, inputs):
        def run():
            clock.now += costs.of(attention.measured, case)
            return [jnp.array(answers[case.name])]

        return Contender(attention.name, run)

    monkeypatch.setattr(tuning, "attention_contender", contender)
    monkeypatch.setattr(tuning, "reference", remembered)
    monkeypatch.setattr(tuning, "in_layout_of", lambda _, inputs: inputs)
    return costs


def test_real_kernels(monkeypatch, clock, tune, capsys):
    """What helps is combined. What fails or answers wrong is left out, however fast it is."""
    choices = {"decode_tile": (64, 128), "decode_warps": (2, 4), "decode_stages": (2, 3, 4)}
    monkeypatch.setattr(tuning, "choices_of", lambda sizes: choices)
    real = tuning.attention_contender

    def contender(attention, case, inputs):
        made, sizes = real(attention, case, inputs), attention.measured
        if sizes.decode_stages == 2:
            raise RuntimeError("out of shared memory\nand more")
        cost = (0.9 if sizes.decode_tile == 64 else 1) * (0.9 if sizes.decode_warps == 2 else 1)

        def run():
            clock.now += cost if sizes.decode_stages == 3 else 0.01
            return [answer + float(sizes.decode_stages == 4) for answer in made.run()]

        return replace(made, run=run)

    monkeypatch.setattr(tuning, "attention_contender", contender)
    [entry] = tune("triton", DECODES)
    sizes = entry.pop("sizes")
    assert sizes["decode_tile"] == 64 and sizes["decode_warps"] == 2 and sizes["decode_stages"] == 3
    assert entry == {
        "device": "cpu",
        "backend": "triton",
        "num_kv_heads": 1,
        "group": 2,
        "head_dim": 16,
        "pool_dtype": "float32",
        "block_size": 16,
    }
    printed = capsys.readouterr().out
    for line in (
        r"as chosen +500000.0 µs +1.00 x",
        r"decode_tile 64 +450000.0 µs +0.90 x",
        r"decode_stages 2 +failed: RuntimeError: out of shared memory\n",
        r"decode_stages 4 +left out: wrong by 1, so not timed",
        r"decode_tile 64, decode_warps 2 +405000.0 µs +0.81 x",
    ):
        assert re.search(line, printed), printed


def test_cases_of_one_shape_are_judged_together(costs, tune):
    """Larger fetches help decodes more than they harm prefills; more queries do not pay."""

    def cost(sizes, case):
        if case.decode_only:
            return 0.8 if sizes.fetch_bytes == 8 * MIB else 1.0
        return 1.1 if sizes.fetch_bytes == 8 * MIB else 1.0 - (sizes.prefill_queries == 256) / 100

    costs.of = cost
    [entry] = tune("pallas-tpu", DECODES, MIXED)
    assert entry["sizes"]["fetch_bytes"] == 8 * MIB
    costs.of = lambda sizes, case: 1.2 if case.decode_only else cost(sizes, case)
    assert tune("pallas-tpu", DECODES, MIXED) == [], "an entry that does not pay is removed"


def test_tuning_goes_on_from_the_entry(costs, tune):
    costs.of = lambda sizes, case: 4 * MIB / sizes.fetch_bytes
    assert tune("pallas-tpu", DECODES)[0]["sizes"]["fetch_bytes"] == 8 * MIB
    attention = make_backend("pallas-tpu", SHAPE, V5E, interpret=True)
    cpu = described_target("cpu")
    measured = with_measured_sizes(attention, tune.path, SHAPE, cpu, FLOAT32, 16)
    assert measured.sizes(FLOAT32).fetch_bytes == 8 * MIB
    other = with_measured_sizes(attention, tune.path, SHAPE, cpu, FLOAT32, 32)
    assert other == attention
    costs.of = lambda sizes, case: (sizes.chunk_tokens != 256) + sizes.fetch_bytes / (64 * MIB)
    [entry] = tune("pallas-tpu", DECODES)
    assert entry["sizes"]["fetch_bytes"] == 4 * MIB and entry["sizes"]["chunk_tokens"] == 256


@pytest.mark.parametrize("share,is_kept", [(0.98, False), (0.96, True)])
def test_small_gains_are_noise(costs, tune, share, is_kept):
    costs.of = lambda sizes, case: share if sizes.decode_warps == 8 else 1.0
    assert bool(tune("triton", DECODES)) == is_kept


def test_sizes_that_no_case_depends_on_are_not_tried(costs, tune, capsys):
    tune("triton", DECODES)
    assert "decode_tile" in (printed := capsys.readouterr().out) and "prefill_" not in printed
    tune("triton", MIXED)
    assert "decode_tile" in (printed := capsys.readouterr().out) and "prefill_tile" in printed


def test_a_cpu_has_nothing_to_tune(capsys):
    assert main(["bench", "kernels", "--tune"]) == 2
    message = capsys.readouterr().err
    assert "--tune: there is nothing to tune on this device (cpu)" in message
    assert "triton: its kernels run on NVIDIA cards only" in message


def test_files_that_cannot_be_written(costs, tune, tmp_path, capsys):
    tune.path = tmp_path / "no" / "sizes.json"
    with pytest.raises(ConfigError, match="no/sizes.json cannot be written: .*--tuning-file"):
        tune("triton", DECODES)
    assert capsys.readouterr().out == "", "nothing was measured in vain"
    tune.path = tmp_path / "sizes.json"
    (tmp_path / "sizes.json.new").mkdir()
    with pytest.raises(ConfigError, match="sizes.json cannot be written: Is a dir.*--tuning-file"):
        tune("triton", DECODES)
