"""Rotary position embedding: which angle a pair of dimensions turns by per position.

Knows the frequencies of every supported kind, in float64, and what two models must share of them for their
keys to be comparable. Knows no tensors: kernels build their tables from `RopeSpec.inv_freq`. No frequency
here depends on the sequence length, so a key stored at one position moves to any other by a rotation.

Formulas:
    default   RoFormer (arXiv 2104.09864), section 3.2.2: theta ** (-2i / d)
    linear    position interpolation (arXiv 2306.15595): default / factor
    llama3    Llama 3.1: long wavelengths divided by factor, short ones kept, linear between
    yarn      YaRN (arXiv 2309.00071), section 3.2 (NTK-by-parts) and 3.4 (temperature, here the multiplier of
              cos and sin)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError, real, shown, suggestion, whole

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Pairing = Literal["half", "interleaved"]

POSITION_LIMIT = 2**30
"""No position reaches this: a position plus a delta then fits an int32."""

_REAL_LIMIT = 1e15
_HEAD_DIM_LIMIT = 2**16

# kind -> (fields it needs, fields it may have); every other field stays None.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"), ()),
    "yarn": (
        ("factor", "original_max_positions"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_OPTIONAL_FIELDS = tuple(dict.fromkeys(name for pair in _FIELDS.values() for part in pair for name in part))


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding.

    Attributes:
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: base of the geometric series of wavelengths, > 1.
        head_dim: width of a head.
        rotary_dim: leading dimensions of the head that turn, even, <= head_dim.
        pairing: ``half`` pairs dimension i with i + rotary_dim / 2, ``interleaved`` pairs 2i with 2i + 1.
        factor: context extension, >= 1 (linear, llama3, yarn).
        low_freq_factor, high_freq_factor: rotations over the original context between which llama3
            interpolates.
        original_max_positions: positions the model was trained on before extension (llama3, yarn).
        beta_fast, beta_slow: rotations between which yarn interpolates; None means 32 and 1.
        attention_factor: multiplier of cos and sin under yarn; None means the one `attention_scaling`
            derives.
        mscale, mscale_all_dim: derive `attention_scaling` as a quotient when both are given and not 0.
        truncate: round the borders of yarn's ramp to whole dimensions; None means True.

    Raises:
        ConfigError: ``unsupported_model`` for an unknown kind, ``invalid_config`` for a value out of range, a
            missing field of the kind, or a field that the kind does not have.
    """

    kind: RopeKind
    theta: float
    head_dim: int
    rotary_dim: int
    pairing: Pairing = "half"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _FIELDS:
            known = ", ".join(_FIELDS)
            message = f"{shown(self.kind)} is not one of {known}{suggestion(self.kind, _FIELDS)}"
            raise ConfigError("unsupported_model", message, "kind")
        if self.pairing not in ("half", "interleaved"):
            raise ConfigError(
                "invalid_config", f"must be 'half' or 'interleaved', not {shown(self.pairing)}", "pairing"
            )
        _real(self.theta, "theta", math.nextafter(1.0, 2.0))
        _whole(self.head_dim, "head_dim", 2, _HEAD_DIM_LIMIT)
        if _whole(self.rotary_dim, "rotary_dim", 2, self.head_dim) % 2:
            raise ConfigError("invalid_config", f"must be even, not {self.rotary_dim}", "rotary_dim")
        self._check_kind()

    def _check_kind(self) -> None:
        needed, allowed = _FIELDS[self.kind]
        for name in _OPTIONAL_FIELDS:
            value = getattr(self, name)
            if value is None:
                if name in needed:
                    raise ConfigError("invalid_config", f"rope kind {self.kind!r} needs it", name)
            elif name not in needed + allowed:
                raise ConfigError("invalid_config", f"rope kind {self.kind!r} does not have it", name)
            elif name == "truncate":
                if not isinstance(value, bool):
                    raise ConfigError("invalid_config", f"must be true or false, not {shown(value)}", name)
            elif name == "original_max_positions":
                _whole(value, name, 1, POSITION_LIMIT)
            elif name in ("mscale", "mscale_all_dim"):
                _real(value, name, 0.0)
            elif name == "factor":
                _real(value, name, 1.0)
            else:
                _real(value, name, 1e-9)
        if self.kind == "llama3" and _given(self.high_freq_factor) <= _given(self.low_freq_factor):
            raise ConfigError("invalid_config", "must be greater than low_freq_factor", "high_freq_factor")
        if self.kind == "yarn" and self._betas[0] < self._betas[1]:
            raise ConfigError("invalid_config", "must not be less than beta_slow", "beta_fast")

    @property
    def _betas(self) -> tuple[float, float]:
        return (
            32.0 if self.beta_fast is None else self.beta_fast,
            1.0 if self.beta_slow is None else self.beta_slow,
        )

    @property
    def attention_scaling(self) -> float:
        """Multiplier of cos and sin when queries and keys are rotated; 1.0 unless yarn.

        A stored key already contains it, so moving a stored key is a rotation without it.
        """
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        factor = _given(self.factor)
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(factor, self.mscale) / _yarn_mscale(factor, self.mscale_all_dim)
        return _yarn_mscale(factor, 1.0)

    def inv_freq(self) -> tuple[float, ...]:
        """Angle per position of each pair, radians, float64, shape [rotary_dim / 2]."""
        base = tuple(float(self.theta) ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2))
        if self.kind == "default":
            return base
        if self.kind == "linear":
            return tuple(freq / _given(self.factor) for freq in base)
        if self.kind == "llama3":
            return self._llama3(base)
        return self._yarn(base)

    def _llama3(self, base: tuple[float, ...]) -> tuple[float, ...]:
        low, high = _given(self.low_freq_factor), _given(self.high_freq_factor)
        factor, original = _given(self.factor), _given(self.original_max_positions)
        freqs = []
        for freq in base:
            rotations = original * freq / (2 * math.pi)
            kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
            freqs.append((1 - kept) * freq / factor + kept * freq)
        return tuple(freqs)

    def _yarn(self, base: tuple[float, ...]) -> tuple[float, ...]:
        factor = _given(self.factor)
        low, high = (self._yarn_border(beta) for beta in self._betas)
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        freqs = []
        for i, freq in enumerate(base):
            interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
            freqs.append(interpolated * freq / factor + (1 - interpolated) * freq)
        return tuple(freqs)

    def _yarn_border(self, rotations: float) -> float:
        """The pair that makes `rotations` turns over the original context, as a real number of pairs."""
        turns = _given(self.original_max_positions) / (rotations * 2 * math.pi)
        return self.rotary_dim * math.log(turns) / (2 * math.log(self.theta))

    def signature(self) -> str:
        """Stable text of everything that decides the rotation: equal signatures rotate alike.

        Optional values appear as what they resolve to, so spelling out a default changes nothing.
        """
        fields: list[tuple[str, object]] = [
            ("theta", float(self.theta)),
            ("head_dim", self.head_dim),
            ("rotary_dim", self.rotary_dim),
            ("pairing", self.pairing),
        ]
        if self.factor is not None:
            fields.append(("factor", float(self.factor)))
        if self.kind == "llama3":
            fields.append(("low_freq_factor", float(_given(self.low_freq_factor))))
            fields.append(("high_freq_factor", float(_given(self.high_freq_factor))))
        if self.original_max_positions is not None:
            fields.append(("original_max_positions", self.original_max_positions))
        if self.kind == "yarn":
            fields.append(("beta_fast", float(self._betas[0])))
            fields.append(("beta_slow", float(self._betas[1])))
            fields.append(("truncate", self.truncate is not False))
            fields.append(("attention_scaling", self.attention_scaling))
        return f"rope/{self.kind}(" + ",".join(f"{name}={value!r}" for name, value in fields) + ")"


def _given(value: float | None) -> float:
    assert value is not None, "checked when the spec was made"
    return value


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _whole(value: object, field: str, low: int, high: int) -> int:
    return whole(ConfigError, "invalid_config", value, field, low, high)


def _real(value: object, field: str, low: float) -> float:
    return real(ConfigError, "invalid_config", value, field, low, _REAL_LIMIT)
