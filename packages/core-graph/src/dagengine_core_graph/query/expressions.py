"""The expression tree of a span query: immutable, compared by what it says.

    C chat · R retrieve · F fragment · S U A messages · G generate · + plus · ⋈ cross
    seq · par · repeat · map · zip · monad · print

It knows shapes, not meaning: `definition` says what a tree means. Trees are made by `build` and `wire`, which
check what they are given; the classes take their fields as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from ..fields import Json

Role: TypeAlias = Literal["system", "user", "assistant"]

TEXT, EMPTY, GENERATE, PLUS, CROSS, SEQ, PAR = (1 << bit for bit in range(7))
CHAT, RETRIEVE, REPEAT, MAP, ZIP, MONAD, PRINT = (1 << bit for bit in range(7, 14))
CALLS = GENERATE | CHAT | REPEAT | MAP
MAX_DEPTH = 64
MAX_INT32 = 2**31 - 1
MAX_REPEAT = 255


class Query:
    """A subtree.

    Attributes:
        tag: its name in JSON.
        kinds: which constructors it holds, as bits (`TEXT`, `EMPTY`, `GENERATE`, …).
        size: leaves and calls that it stands for once everything is unrolled; never too small.
        depth: nested constructors.
    """

    tag: ClassVar[str]
    kind: ClassVar[int]
    kinds: int
    size: int
    depth: int

    @property
    def retrieves(self) -> bool:
        """Whether it holds a retrieval, and so takes as long to plan as the retriever does."""
        return bool(self.kinds & RETRIEVE)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        """The subtrees, in order."""
        return ()

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        """The same constructor over other subtrees, as many as before."""
        return self

    def step(self, index: int) -> str:
        """What the path of a subtree adds to this one's."""
        return f"{self.tag}[{index}]"

    def _measure(self, kinds: int, size: int) -> None:
        depth = 0
        for child in self.subqueries:
            kinds |= child.kinds
            size += child.size
            if child.depth > depth:
                depth = child.depth
        known = self.__dict__
        known["kinds"], known["size"], known["depth"] = kinds, size, depth + 1


@dataclass(frozen=True)
class GenerateParams:
    """How a call generates.

    Attributes:
        model: None leaves it to the engine.
        max_tokens: 0 leaves it to whoever runs the query; at most 2^31 - 1.
        options: further parameters by the engine's names, for it to judge.
    """

    model: str | None = None
    max_tokens: int = 0
    temperature: float = 0.6
    options: Mapping[str, Json] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Message(Query):
    """S, U or A: what a role says. Without text it shows nothing."""

    kind: ClassVar[int] = TEXT
    role: Role
    text: str

    def __post_init__(self) -> None:
        known = self.__dict__
        known["kinds"], known["size"], known["depth"] = TEXT if self.text else EMPTY, 1, 1

    @property
    def tag(self) -> str:  # type: ignore[override]
        return self.role


@dataclass(frozen=True)
class Fragment(Query):
    """F: a piece of a corpus, read as a user's message; `source` names where it is from."""

    tag: ClassVar[str] = "fragment"
    kind: ClassVar[int] = TEXT
    text: str
    source: str | None = None

    def __post_init__(self) -> None:
        known = self.__dict__
        known["kinds"], known["size"], known["depth"] = TEXT if self.text else EMPTY, 1, 1

    @property
    def role(self) -> Role:
        return "user"


Leaf: TypeAlias = Message | Fragment


@dataclass(frozen=True)
class Print(Query):
    """A note to whoever runs the query. It shows nothing."""

    tag: ClassVar[str] = "print"
    kind: ClassVar[int] = PRINT
    text: str

    def __post_init__(self) -> None:
        self._measure(PRINT | EMPTY, 1)


@dataclass(frozen=True)
class Join(Query):
    """Several subtrees: plus, cross, seq or par."""

    children: tuple[Query, ...]

    def __post_init__(self) -> None:
        self._measure(self.kind if self.children else self.kind | EMPTY, 0)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return self.children

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        return type(self)(subqueries)


@dataclass(frozen=True)
class Plus(Join):
    """+ : each child stands alone, and their order means nothing."""

    tag: ClassVar[str] = "plus"
    kind: ClassVar[int] = PLUS


@dataclass(frozen=True)
class Cross(Join):
    """⋈ : each child sees those before it."""

    tag: ClassVar[str] = "cross"
    kind: ClassVar[int] = CROSS


@dataclass(frozen=True)
class Seq(Join):
    """One after another; what is seen is that of ⋈."""

    tag: ClassVar[str] = "seq"
    kind: ClassVar[int] = SEQ


@dataclass(frozen=True)
class Par(Join):
    """At once, the order of the parts kept; what is seen is that of ⋈."""

    tag: ClassVar[str] = "par"
    kind: ClassVar[int] = PAR


@dataclass(frozen=True)
class Generate(Query):
    """G: one call of a model over `input`.

    Attributes:
        closed: the client's declaration that this is a closed reducer: its answers keep what another call of the
            same kind needs, so that it may judge groups of its candidates first (`reduce`).
    """

    tag: ClassVar[str] = "g"
    kind: ClassVar[int] = GENERATE
    params: GenerateParams
    input: Query
    closed: bool = False

    def __post_init__(self) -> None:
        self._measure(GENERATE, 1)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return (self.input,)

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        return replace(self, input=subqueries[0])

    def step(self, index: int) -> str:
        return "g.input"

    @property
    def prepares(self) -> bool:
        """Whether this is G¹: at most one token, at temperature 0."""
        return self.params.max_tokens == 1 and self.params.temperature == 0


@dataclass(frozen=True)
class Chat(Query):
    """C: one call over messages in order."""

    tag: ClassVar[str] = "chat"
    kind: ClassVar[int] = CHAT
    params: GenerateParams
    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        self._measure(CHAT, 1)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return self.messages

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        assert all(isinstance(message, Message) for message in subqueries)
        return replace(self, messages=subqueries)  # type: ignore[arg-type]

    def step(self, index: int) -> str:
        return f"chat.messages[{index}]"


@dataclass(frozen=True)
class Retrieve(Query):
    """R: the fragments of a corpus that a question finds.

    Attributes:
        corpus: its name; what that means is the retriever's.
        question: holds no call.
        limit: most fragments; None leaves it to the retriever.
        document: the corpus itself where the client sends it along.
        embedding_model: None leaves it to the retriever.
    """

    tag: ClassVar[str] = "retrieve"
    kind: ClassVar[int] = RETRIEVE
    corpus: str
    question: Query
    limit: int | None = None
    document: str | None = None
    embedding_model: str | None = None

    def __post_init__(self) -> None:
        self._measure(RETRIEVE, 1)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return (self.question,)

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        return replace(self, question=subqueries[0])

    def step(self, index: int) -> str:
        return "retrieve.question"

    @property
    def text(self) -> str:
        """What the question says: its texts in order, a line each."""
        return "\n".join(leaf.text for leaf in leaves(self.question))


FindFragments: TypeAlias = Callable[[Retrieve], Sequence[Fragment | str]]
"""The fragments that a retrieval finds, best first; a text is a fragment without a source."""


@dataclass(frozen=True)
class Repeat(Query):
    """`n` samples of one call; 0 stands for 1."""

    tag: ClassVar[str] = "repeat"
    kind: ClassVar[int] = REPEAT
    n: int
    generate: Generate

    def __post_init__(self) -> None:
        self._measure(REPEAT, (self.count - 1) * self.generate.size)

    @property
    def count(self) -> int:
        return max(self.n, 1)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return (self.generate,)

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        (generate,) = subqueries
        assert isinstance(generate, Generate)
        return Repeat(self.n, generate)

    def step(self, index: int) -> str:
        return "repeat"


@dataclass(frozen=True)
class Map(Query):
    """The same call over each of several user messages."""

    tag: ClassVar[str] = "map"
    kind: ClassVar[int] = MAP
    params: GenerateParams
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        self._measure(MAP if self.inputs else MAP | EMPTY, 2 * len(self.inputs))


@dataclass(frozen=True)
class Zip(Query):
    """`first` before each child of `second`."""

    tag: ClassVar[str] = "zip"
    kind: ClassVar[int] = ZIP
    first: Query
    second: Query

    def __post_init__(self) -> None:
        self._measure(ZIP, max(self.second.size - 1, 0) * self.first.size)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return (self.first, self.second)

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        return Zip(*subqueries)

    def step(self, index: int) -> str:
        return f"zip.{('first', 'second')[index]}"


@dataclass(frozen=True)
class Monad(Query):
    """Executed for what it leaves in the cache; it shows nothing."""

    tag: ClassVar[str] = "monad"
    kind: ClassVar[int] = MONAD
    query: Query

    def __post_init__(self) -> None:
        self._measure(MONAD, 0)

    @property
    def subqueries(self) -> tuple[Query, ...]:
        return (self.query,)

    def with_subqueries(self, subqueries: tuple[Query, ...]) -> Query:
        return Monad(subqueries[0])

    def step(self, index: int) -> str:
        return "monad"


NOTHING = Cross(())


def join_path(path: str, step: str) -> str:
    """The path of a subtree, from its parent's path and the parent's step to it."""
    return f"{path}.{step}" if path else step


def walk(query: Query, path: str = "") -> Iterator[tuple[str, Query]]:
    """Every subtree with its path, a parent before its subtrees, otherwise in order."""
    waiting: list[tuple[str, Query]] = [(path, query)]
    while waiting:
        here, found = waiting.pop()
        yield here, found
        below = [(join_path(here, found.step(i)), child) for i, child in enumerate(found.subqueries)]
        waiting += reversed(below)


def leaves(query: Query) -> Iterator[Leaf]:
    """The messages and fragments, in order."""
    for _, found in walk(query):
        if isinstance(found, Message | Fragment):
            yield found
