"""Whether a request fits below the model's largest position. Knows counts, not tokens."""

from __future__ import annotations

from .errors import PositionError, whole
from .rope import POSITION_LIMIT


def check_room(own_start: int, num_input: int, max_tokens: int | None, max_positions: int) -> int:
    """The number of tokens that may be sampled.

        0        own_start                                      max_positions
        | visible | input (num_input) | sampled (max_tokens) |   |

    Args:
        own_start: position of the first input token, from the layout.
        num_input: number of input tokens.
        max_tokens: largest number of tokens to sample; None means as many as fit, which may be none.
        max_positions: positions run from 0 to ``max_positions - 1``.

    Raises:
        PositionError: ``position_overflow`` where the input, or input and `max_tokens`, do not fit;
            ``invalid_request`` for an argument that is not a count.
    """
    whole(PositionError, "invalid_request", max_positions, "max_positions", 1, POSITION_LIMIT)
    for name, value in (("own_start", own_start), ("num_input", num_input), ("max_tokens", max_tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise PositionError("invalid_request", "must be an integer from 0", name)
    room = max_positions - own_start - num_input
    if room < 0:
        message = (
            f"{num_input} input tokens from position {own_start} do not fit below position {max_positions}; "
            f"at most {max(max_positions - own_start, 0)} do"
        )
        raise PositionError("position_overflow", message, "input")
    if max_tokens is None:
        return room
    if max_tokens > room:
        message = f"after position {own_start} and {num_input} input tokens, at most {room} can be sampled"
        raise PositionError("position_overflow", message, "max_tokens")
    return max_tokens
