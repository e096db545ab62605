"""Rotary position embeddings: which frequencies a model rotates by. Host side, numpy only."""

import math
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.models.config_reader import ConfigReader
from jpaged.models.windows import LAYER_TYPES

DEFAULT_THETA = 10_000.0


class RopeScaling(Protocol):
    """Changes the frequencies so that a model reads longer texts than it was first trained for."""

    @property
    def attention_factor(self) -> float: ...

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """theta: base of the wavelengths. scaling: None leaves the frequencies as they are."""

    theta: float
    scaling: RopeScaling | None = None

    @classmethod
    def from_hf(cls, config: ConfigReader, *, max_position_embeddings: int) -> Self:
        """Read rope_theta and rope_scaling, or rope_parameters, which newer configs have."""
        config.refuse_unless("partial_rotary_factor", 1)
        key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
        parameters = config.section(key)
        parameters.refuse_unless("partial_rotary_factor", 1)
        for layer_type in LAYER_TYPES:
            parameters.refuse_unless(layer_type)  # other frequencies in such layers
        theta = parameters.number("rope_theta", None) or config.number("rope_theta", DEFAULT_THETA)
        rope_type = parameters.string("rope_type", None) or parameters.string("type", "default")
        if rope_type not in _PARSERS:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} in {parameters.name} is not supported; "
                f"supported: {', '.join(_PARSERS)}"
            )
        original_length = (
            config.integer("original_max_position_embeddings", None)
            or parameters.integer("original_max_position_embeddings", None)
            or max_position_embeddings
        )
        return cls(theta=theta, scaling=_PARSERS[rope_type](parameters, original_length))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each pair of dimensions: float32, shape [head_dim // 2].

    Computed in float32 as transformers does, to rotate by the same angles.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    return unscaled if rope.scaling is None else rope.scaling.scale(unscaled, rope.theta)


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cosines and sines, which scales attention in YaRN."""
    return 1.0 if rope.scaling is None else rope.scaling.attention_factor


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Linear scaling: every wavelength grows by the factor."""

    factor: float
    attention_factor: float = 1.0

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:
        return inverse_frequencies / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths grow by the factor, short ones stay, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:
        factor = np.float32(self.factor)
        wavelengths = np.float32(2 * math.pi) / inverse_frequencies
        turns = np.float32(self.original_max_position_embeddings) / wavelengths
        smooth = (turns - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * inverse_frequencies / factor + smooth * inverse_frequencies
        long_wavelength = self.original_max_position_embeddings / self.low_freq_factor
        short_wavelength = self.original_max_position_embeddings / self.high_freq_factor
        return np.where(
            wavelengths > long_wavelength,
            inverse_frequencies / factor,
            np.where(wavelengths < short_wavelength, inverse_frequencies, blended),
        )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN scaling (Peng et al. 2023).

    Wavelengths that turn fewer than `beta_slow` times in the original context grow by the factor.
    Wavelengths that turn more than `beta_fast` times stay. Between both is a linear ramp.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:
        num_pairs = len(inverse_frequencies)
        low = self._pair_that_turns(self.beta_fast, theta, num_pairs)
        high = self._pair_that_turns(self.beta_slow, theta, num_pairs)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        width = high - low if high != low else 0.001
        pairs = np.arange(num_pairs, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
        interpolated = inverse_frequencies / np.float32(self.factor)
        return interpolated * ramp + inverse_frequencies * (1 - ramp)

    def _pair_that_turns(self, num_turns: float, theta: float, num_pairs: int) -> float:
        """Index of the pair of dimensions that turns so many times in the original context."""
        wavelength = self.original_max_position_embeddings / num_turns
        return num_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """A factor for each wavelength, as GGUF files store the result of other scalings."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:
        if len(self.factors) != len(inverse_frequencies):
            raise CheckpointError(
                f"rope has {len(self.factors)} frequency factors, but heads of "
                f"{2 * len(inverse_frequencies)} dimensions need {len(inverse_frequencies)}"
            )
        return inverse_frequencies / np.asarray(self.factors, np.float32)


def _default(parameters: ConfigReader, original_length: int) -> None:
    return None


def _linear(parameters: ConfigReader, original_length: int) -> LinearScaling:
    return LinearScaling(factor=parameters.number("factor"))


def _llama3(parameters: ConfigReader, original_length: int) -> Llama3Scaling:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor ({low}) in {parameters.name} must be below high_freq_factor ({high})"
        )
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original_length,
    )


def _yarn(parameters: ConfigReader, original_length: int) -> YarnScaling:
    factor = parameters.number("factor")
    attention_factor = parameters.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(parameters, factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original_length,
        attention_factor=attention_factor,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.boolean("truncate", True),
    )


def _yarn_attention_factor(parameters: ConfigReader, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = parameters.number("mscale", None), parameters.number("mscale_all_dim", None)
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _frequency_factors(parameters: ConfigReader, original_length: int) -> FrequencyFactors:
    factors = parameters.numbers("factors")
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise CheckpointError(f"factors in {parameters.name} must all be above 0, got {factors}")
    return FrequencyFactors(factors=factors)


# "dynamic" is missing on purpose: its frequencies depend on the longest sequence seen so far, so
# an answer would depend on what else is being served.
_PARSERS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _frequency_factors,
}
