"""Inputs whose pages come from a directory, where an earlier engine left them. Knows waiting sequences and recalls.

A sequence is looked for once, when it is first and has its lease. Until its pages came it keeps both, and stays first.
"""

from __future__ import annotations

from collections.abc import Iterable

from dagengine_kvstore import OutOfPages
from dagengine_kvstore.recall import Recalls

from .sequence import Sequence


class Recalling:
    """
    Args:
        recalls: of the store; None where there is no directory.
    """

    def __init__(self, recalls: Recalls | None) -> None:
        self._recalls = recalls

    @property
    def is_under_way(self) -> bool:
        """Whether some pages are kept from everybody until a recall has ended, for whomever it was."""
        return self._recalls is not None and self._recalls.num_open > 0

    def start(self, sequence: Sequence) -> bool:
        """Whether the next pages of its input are on their way; if not, they are to be computed."""
        if self._recalls is None or sequence.recall is not None or not sequence.writer.node.has_context:
            return False
        wanted = sequence.tokens[sequence.computed : len(sequence.tokens) - sequence.wants_logits]
        try:
            sequence.recall = bool(wanted) and self._recalls.start(sequence.writer, wanted) > 0
        except OutOfPages:
            sequence.recall = False
        return sequence.recall

    def finish(self, waiting: Iterable[Sequence]) -> None:
        """Take over what came since the last call."""
        finished = [] if self._recalls is None else self._recalls.finish()
        counts = {id(recall.writer): recall.num_tokens for recall in finished}
        for sequence in waiting if counts else ():
            if sequence.recall and id(sequence.writer) in counts:
                sequence.recall, sequence.recalled = False, counts[id(sequence.writer)]
                sequence.computed = sequence.writer.num_tokens
