"""Which questions read which fragments: a generator in the manner of multi-hop and open-domain question answering.

Every question reads `width` fragments. The first reads new ones. Each later question takes one of those before it as a
neighbour, all equally likely, reads some fragments of it again, and otherwise new ones. How many again is `overlap` of
its reads, rounded so that the part of all later reads is `overlap` as nearly as whole reads allow. So questions come in
families that share some of their evidence, and a few fragments are read often, most once or twice. Neither the order of
the questions nor that of one's fragments says anything: both are shuffled.

`NQ_LIKE` and `WIKI_LIKE` are the least overlaps at which reading again alone could give what was published for bulks of
a whole corpus, 1 - 1/1.13 and 1 - 1/1.59; the paper does not tell the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NQ_LIKE, WIKI_LIKE = 0.12, 0.37
OVERLAPS = (0.0, NQ_LIKE, WIKI_LIKE, 0.6, 0.9)


@dataclass(frozen=True)
class Workload:
    """Questions over fragments.

    Attributes:
        fragments, questions: their texts.
        reads: of each question, the indices of its fragments, in the order in which they stand.
        made_with: the overlap that the generator was given; None where the reads are somebody's own.
    """

    fragments: Sequence[str]
    questions: Sequence[str]
    reads: Sequence[tuple[int, ...]]
    made_with: float | None = None

    @property
    def overlap(self) -> float:
        """The part of all reads that reads a fragment which another question reads before."""
        reads = sum(len(found) for found in self.reads)
        return 1 - len({index for found in self.reads for index in found}) / reads


def neighbours(questions: int, width: int, overlap: float, seed: int) -> list[tuple[int, ...]]:
    """The reads of so many questions, as indices from 0 without gaps."""
    source = random.Random(seed)
    reads = [tuple(range(width))]
    new, shared = width, 0
    for number in range(1, questions):
        again = round(overlap * width * number) - shared
        shared += again
        found = [*source.sample(source.choice(reads), again), *range(new, new + width - again)]
        new += width - again
        source.shuffle(found)
        reads.append(tuple(found))
    source.shuffle(reads)
    return reads
