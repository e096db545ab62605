"""`jpaged bench kernels --tune`: the fastest sizes of our kernels on this machine.

Cases of the same heads and pool share one entry of a tuning file, so they are judged together: by
the geometric mean of a candidate's times, each as a share of the time with the sizes that are
chosen unmeasured. Candidates change one size at a time, to the next smaller or larger one; then
comes what helped, all at once. Tuning again goes on from the entry that is there.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jpaged.bench.kernels.backends import attention_contender, backend_for, in_layout_of
from jpaged.bench.kernels.cases import Case, draw_inputs
from jpaged.bench.kernels.contenders import NotApplicable, describe_failure
from jpaged.bench.kernels.reference import WrongAnswer, checked_seconds, reference
from jpaged.errors import ConfigError
from jpaged.execution.attention_choice import read_tuning_file, reason_against, tuning_key
from jpaged.target import detect_target
from pallas_kernels.paged_attention import MosaicPagedAttention, TritonPagedAttention
from pallas_kernels.paged_attention.sizes import choices_of
from pallas_kernels.paged_attention.tuning import (
    SIZES,
    Sizes,
    TuningKey,
    write_sizes,
)

MAX_SHARE = 0.97  # of the time with chosen sizes; what gains less may be noise


def tune_kernels(cases: Sequence[Case], tuning_file: Path, *, seconds: float) -> None:
    """Print all measurements, and keep faster sizes in the file.

    Raises `ConfigError` if there is nothing to tune or the file cannot be written.
    """
    groups = _group_by_key(cases)
    entries = _read_for_writing(tuning_file)
    for key, group in groups.items():
        print(f"\n{key}", flush=True)
        older = entries.pop(key, None)
        best = find_sizes(key.backend, group, older, seconds=seconds)
        if best is not None:
            entries[key] = best
        _write(tuning_file, entries)
        print(_conclusion(best, older, tuning_file), flush=True)


def find_sizes(
    backend: str, cases: Sequence[Case], older: Sizes | None, *, seconds: float
) -> Sizes | None:
    """Find sizes that beat the unmeasured ones by more than noise, or None.

    older: sizes found before, which are tried as well.
    """
    attention = backend_for(backend, cases[0])
    assert isinstance(attention, MosaicPagedAttention | TritonPagedAttention)
    chosen = attention.sizes(cases[0].pool_dtype)
    origin = older or chosen
    candidates = list(dict.fromkeys([chosen, origin, *_neighbours(origin, cases)]))
    shares = _measure(attention, cases, candidates, seconds=seconds)
    combined = _combine_best(origin, shares)
    if combined not in candidates:
        shares |= _measure(attention, cases, [chosen, combined], seconds=seconds)
    best = min(shares, key=lambda sizes: shares[sizes], default=chosen)
    return best if shares.get(best, 1) <= MAX_SHARE else None


def _measure(
    attention: MosaicPagedAttention | TritonPagedAttention,
    cases: Sequence[Case],
    candidates: Sequence[Sizes],
    *,
    seconds: float,
) -> dict[Sizes, float]:
    """Mean share of the first candidate's time, for each candidate that does every case right."""
    left, times = list(candidates), []
    for case in cases:
        times.append(_time_case(attention, case, left, seconds=seconds))
        left = [sizes for sizes in left if sizes in times[-1]]
        if candidates[0] not in left:
            return {}
    first = candidates[0]
    return {
        sizes: statistics.geometric_mean([taken[sizes] / taken[first] for taken in times])
        for sizes in left
    }


def _time_case(
    attention: MosaicPagedAttention | TritonPagedAttention,
    case: Case,
    candidates: Sequence[Sizes],
    *,
    seconds: float,
) -> dict[Sizes, float]:
    """Time each candidate that does the case right, and print all results."""
    print(f"  {case.name}", flush=True)
    inputs = draw_inputs(case)
    expected = reference(case, inputs)
    inputs = in_layout_of(attention, inputs)
    taken: dict[Sizes, float] = {}
    for sizes in candidates:
        try:
            measured = _with_sizes(attention, sizes, case)
            contender = attention_contender(measured, case, inputs)
            _, taken[sizes] = checked_seconds(case, inputs, contender, expected, seconds=seconds)
            share = taken[sizes] / taken[candidates[0]]
            result = f"{1e6 * taken[sizes]:10.1f} µs {share:7.2f} x"
        except (NotApplicable, WrongAnswer) as reason:
            result = f"left out: {reason}"
        # Sizes may be more than a device can do, which compilers say in their own ways.
        except Exception as failure:
            result = describe_failure(failure)
        print(f"    {_difference(sizes, candidates[0]):30} {result}", flush=True)
        if candidates[0] not in taken:
            break
    return taken


def _with_sizes(
    attention: MosaicPagedAttention | TritonPagedAttention, sizes: Sizes, case: Case
) -> MosaicPagedAttention | TritonPagedAttention:
    measured = replace(attention, measured=sizes)
    target = detect_target()
    reason = reason_against(measured, target, case.pool_dtype, case.block_size)
    if reason is not None:
        raise NotApplicable(reason)
    return measured


def _neighbours(sizes: Sizes, cases: Sequence[Case]) -> list[Sizes]:
    """List sizes that differ in one value which some case depends on."""
    unused = "decode_" if all(case.num_decodes == 0 for case in cases) else None
    unused = "prefill_" if all(case.decode_only for case in cases) else unused
    neighbours = []
    for name, choices in choices_of(sizes).items():
        if unused is not None and name.startswith(unused):
            continue
        place = choices.index(getattr(sizes, name))
        beside = choices[max(place - 1, 0) : place] + choices[place + 1 : place + 2]
        neighbours += [replace(sizes, **{name: value}) for value in beside]
    return neighbours


def _combine_best(origin: Sizes, shares: dict[Sizes, float]) -> Sizes:
    """Combine the best value of each size, from candidates that differ in that one."""
    changes = {}
    for name, value in asdict(origin).items():
        others = {
            sizes: share
            for sizes, share in shares.items()
            if replace(sizes, **{name: value}) == origin
        }
        if others:
            changes[name] = getattr(min(others, key=lambda sizes: others[sizes]), name)
    return replace(origin, **changes)


def _difference(sizes: Sizes, chosen: Sizes) -> str:
    values = asdict(chosen)
    changed = {name: value for name, value in asdict(sizes).items() if value != values[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "as chosen"


def _group_by_key(cases: Sequence[Case]) -> dict[TuningKey, list[Case]]:
    target = detect_target()
    groups: dict[TuningKey, list[Case]] = {}
    reasons: dict[str, str] = {}
    for name in SIZES:
        for case in cases:
            try:
                backend_for(name, case)
            except NotApplicable as reason:
                reasons[name] = str(reason)
                continue
            parts = case.shape, target, case.pool_dtype, case.block_size
            groups.setdefault(tuning_key(name, *parts), []).append(case)
    if not groups:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(
            f"--tune: there is nothing to tune on this device ({target.device_kind}). {listed}."
        )
    return groups


def _read_for_writing(path: Path) -> dict[TuningKey, Sizes]:
    """Read the file, and refuse before minutes of measuring if it cannot be written."""
    folder = path.parent
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise _not_written(path, "it is not there or read-only")
    return read_tuning_file(path) if path.exists() else {}


def _write(path: Path, entries: dict[TuningKey, Sizes]) -> None:
    try:
        write_sizes(path, entries)
    except OSError as error:
        raise _not_written(path, str(error.strerror)) from error


def _not_written(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {reason}. Choose another file with --tuning-file, and serve "
        "with the same option."
    )


def _conclusion(best: Sizes | None, older: Sizes | None, path: Path) -> str:
    if best is None:
        removed = " The entry that was there is removed." if older is not None else ""
        return f"  No sizes are faster by 3 % than those chosen unmeasured.{removed}"
    values = ", ".join(f"{name} {value}" for name, value in asdict(best).items())
    return f"  Best: {values}; in {path}"
