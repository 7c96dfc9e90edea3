"""Text from token ids, as they come: never half a character, never part of a stop string.

ids      [ shown ............ | window ........ | new ]
                              ^ prefix          ^ read
decode(ids[prefix:]) minus decode(ids[prefix:read]) is the new text; while it ends in a replacement
character some character's bytes are still missing and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns sampled ids into text deltas, and finds stop strings across token borders.

    Args:
        decode: token ids to text, special tokens left out.
        stop: strings that end the text and are not part of it.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._prefix = self._read = 0
        self._taken = 0  # characters of decode(ids[prefix:]) that the text holds
        self._text = ""
        self._shown = 0
        self._settled = 0
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text so far, cut before the stop string if one was found."""
        return self._text

    def push(self, token_id: int, *, check_stop: bool = True) -> None:
        """Add one sampled id. Afterwards `stopped_by` names the stop string that the text now holds, if any."""
        assert self.stopped_by is None
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix :])
        whole = text.rstrip(REPLACEMENT)
        if len(whole) > self._taken:
            self._add(whole[self._taken :], check_stop)
            self._taken = len(whole)
            if whole == text:
                self._prefix, self._read = self._read, len(self._ids)
                self._taken = len(self._decode(self._ids[self._prefix : self._read]))
        self._ends.append(len(self._text))

    def flush(self, *, check_stop: bool = True) -> None:
        """The end: bytes that never became a character are shown as they decode."""
        if self.stopped_by is not None or self._read == len(self._ids):
            return
        self._add(self._decode(self._ids[self._prefix :])[self._taken :], check_stop)
        self._prefix = self._read = len(self._ids)
        self._taken = 0
        if self._ends:
            self._ends[-1] = max(self._ends[-1], len(self._text))

    def take(self, *, finished: bool) -> str:
        """Text not yet handed out; what may be the beginning of a stop string is kept back until `finished`."""
        end = len(self._text) if finished else max(self._shown, len(self._text) - self._held())
        delta, self._shown = self._text[self._shown : end], max(self._shown, end)
        return delta

    def num_kept(self) -> int:
        """Ids that have a part in the text: all but those wholly inside the stop string."""
        if self.stopped_by is None:
            return len(self._ids)
        return sum(self._begin(index) < len(self._text) for index in range(len(self._ids)))

    def num_settled(self) -> int:
        """Ids that no stop string can take back any more: with stop strings, those whose text was handed out."""
        if not self._stop:
            return len(self._ids)
        while self._settled < len(self._ends):
            if not (self._begin(self._settled) < self._shown and self._ends[self._settled] <= self._shown):
                break
            self._settled += 1
        return self._settled

    def _begin(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _add(self, delta: str, check_stop: bool) -> None:
        before = len(self._text)
        self._text += delta
        if not check_stop or not self._stop:
            return
        found = [(at, s) for s in self._stop if (at := self._text.find(s, max(0, before - len(s) + 1))) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._text = self._text[:at]

    def _held(self) -> int:
        """Longest suffix of the text that begins some stop string."""
        for size in range(min(self._hold, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-size:]) for s in self._stop):
                return size
        return 0
