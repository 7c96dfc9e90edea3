"""Where the tokens of a context graph stand: RoPE kinds, model geometry, policies, adapters."""

from .adapter import (
    DefaultAdapter,
    ModelAdapter,
    Refusal,
    adapter_for,
    model_adapters,
)
from .config import geometry_from_config
from .errors import ConfigError, PositionError
from .geometry import LayerGroup, ModelGeometry
from .layout import (
    Layout,
    PositionPolicy,
    Segment,
    StoredStart,
    check_layout,
    lay_out,
    position_policies,
)
from .policies import ExplicitPolicy, LinearPolicy, NativePolicy
from .registry import Plugin, Registry
from .room import check_room
from .rope import POSITION_LIMIT, RopeSpec

__all__ = [
    "POSITION_LIMIT",
    "ConfigError",
    "DefaultAdapter",
    "ExplicitPolicy",
    "LayerGroup",
    "Layout",
    "LinearPolicy",
    "ModelAdapter",
    "ModelGeometry",
    "NativePolicy",
    "Plugin",
    "PositionError",
    "PositionPolicy",
    "Refusal",
    "Registry",
    "RopeSpec",
    "Segment",
    "StoredStart",
    "adapter_for",
    "check_layout",
    "check_room",
    "geometry_from_config",
    "lay_out",
    "model_adapters",
    "position_policies",
]
