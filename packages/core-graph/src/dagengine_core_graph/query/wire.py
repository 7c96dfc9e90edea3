"""JSON in and out: spnl's externally tagged form, and `dagengine.query/v1`, which can say more.

    spnl    {"g": {"model": "m", "max_tokens": 8, "input": {"cross": [{"system": "S"}, {"plus": […]}]}}}
    ours    {"format": "dagengine.query/v1", "query": {"g": {…}}}

Ours has spnl's tags with the same meaning, and besides: `fragment`, `retrieve`, `chat`; `options` and `closed` of
a `g`; a `model` that may be absent. Every subtree is an object of one member, whose name is its constructor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from .. import fields
from ..errors import QueryError, SchemaError, short
from ..fields import Json, join
from .build import check_params, check_retrieve
from .expressions import (
    MAX_DEPTH,
    MAX_REPEAT,
    Chat,
    Cross,
    Fragment,
    Generate,
    GenerateParams,
    Join,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Print,
    Query,
    Repeat,
    Retrieve,
    Role,
    Seq,
    Zip,
    join_path,
)

FORMAT: Final = "dagengine.query/v1"

ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant")
JOINS: Final[dict[str, type[Join]]] = {"seq": Seq, "par": Par, "plus": Plus, "cross": Cross}
SPNL_TAGS: Final = (*ROLES, *JOINS, "monad", "g", "repeat", "map", "zip", "print", "augment")
OUR_TAGS: Final = (
    *ROLES,
    *JOINS,
    "monad",
    "g",
    "repeat",
    "map",
    "zip",
    "print",
    "fragment",
    "retrieve",
    "chat",
)
PARAMS: Final = ("model", "max_tokens", "temperature")
READ_AS_SPNL: Final = (
    "without a format a query is read in spnl's form; "
    f"send it as {{'format': {FORMAT!r}, 'query': …}} where that is not meant"
)


def load_query(document: object) -> Query:
    """Read what `json.loads` gave: a `dagengine.query/v1` document, or a query in spnl's form.

    Raises:
        SchemaError: and nothing else, whatever the value; `field` is the path of the subtree or of its member,
            such as `g.input.cross[1].plus[0]`. `invalid_request`, or `capacity` where it is too deep.
    """
    if isinstance(document, Mapping) and ("format" in document or "query" in document):
        found = fields.members(document, "", ("format", "query"))
        if found.get("format") != FORMAT:
            raise SchemaError(
                "invalid_request", f"{FORMAT!r} is needed, not {short(found.get('format'))}", "format"
            )
        return _Loader(OUR_TAGS, ours=True).query(found.get("query"), "query", 1)
    return load_spnl(document)


def load_spnl(document: object) -> Query:
    """Read a query in spnl's form, bare or bulk (`g`, `repeat`, `map` or any other). Raises as `load_query`."""
    return _Loader(SPNL_TAGS, ours=False).query(document, "", 1)


def dump_query(query: Query) -> dict[str, Json]:
    """The `dagengine.query/v1` document that `load_query` reads as this query."""
    return {"format": FORMAT, "query": _dump(query)}


def dump_spnl(query: Query) -> dict[str, Json]:
    """The query in spnl's form. A fragment is a user's message there, a chat a `g` over a `cross`; `closed`, which
    changes no meaning, is left out.

    Raises:
        QueryError: `invalid_request` for what spnl cannot say, with the path of the subtree.
    """
    return _dump_spnl(query, "")


class _Loader:
    def __init__(self, tags: tuple[str, ...], *, ours: bool) -> None:
        self.tags, self.ours = tags, ours

    def query(self, value: object, path: str, depth: int) -> Query:
        if not isinstance(value, Mapping):
            raise SchemaError(
                "invalid_request",
                f"a query is an object such as {{'user': …}}, not {short(value)}",
                path,
            )
        if depth > MAX_DEPTH:
            raise SchemaError("capacity", f"a query nests at most {MAX_DEPTH} constructors", path)
        if len(value) != 1:
            raise SchemaError(
                "invalid_request",
                f"a query is an object of one member, its constructor, not of {len(value)}",
                path,
            )
        ((tag, content),) = value.items()
        if tag not in self.tags:
            raise SchemaError("invalid_request", self._unknown(tag), path)
        here = f"{path}.{tag}" if path else tag
        if tag in ROLES:
            return Message(tag, fields.text(content, here))
        if tag in JOINS:
            return JOINS[tag](self._queries(content, here, depth))
        known: dict[str, Callable[[object, str, int], Query]] = {
            "monad": lambda content, here, depth: Monad(self.query(content, here, depth + 1)),
            "g": self._generate,
            "repeat": self._repeat,
            "map": self._map,
            "zip": self._zip,
            "print": lambda content, here, _: Print(fields.text(content, here)),
            "augment": self._augment,
            "fragment": self._fragment,
            "retrieve": self._retrieve,
            "chat": self._chat,
        }
        return known[tag](content, here, depth)

    def _unknown(self, tag: object) -> str:
        if not isinstance(tag, str):
            return f"names are strings, unlike {short(tag)}"
        if tag in OUR_TAGS:
            return f"spnl has no {tag}: {READ_AS_SPNL}"
        hint = fields.suggest(tag, self.tags) or f"; known are {', '.join(self.tags)}"
        return f"no constructor is called {short(tag)}{hint}"

    def _queries(self, value: object, path: str, depth: int) -> tuple[Query, ...]:
        items = fields.items(value, path)
        if not items:
            raise SchemaError("invalid_request", "at least one part is needed; leave out what is empty", path)
        return tuple([self.query(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)])

    def _members(
        self, value: object, path: str, known: tuple[str, ...], ours: tuple[str, ...]
    ) -> dict[str, object]:
        """Those of a call; `ours` are the ones that spnl's has not."""
        if self.ours:
            return fields.members(value, path, (*known, *ours))
        if isinstance(value, Mapping):
            for name in ours:
                if name in value:
                    raise SchemaError(
                        "invalid_request", f"spnl has no {name}: {READ_AS_SPNL}", join(path, name)
                    )
        return fields.members(value, path, known)

    def _generate(self, value: object, path: str, depth: int) -> Generate:
        found = self._members(value, path, (*PARAMS, "input"), ("options", "closed"))
        params = self._params(found, path)
        if "input" not in found:
            raise SchemaError("invalid_request", "a g needs an input", join(path, "input"))
        closed = fields.boolean(found.get("closed", False), join(path, "closed"))
        return Generate(params, self.query(found["input"], join(path, "input"), depth + 1), closed)

    def _params(self, found: Mapping[str, object], path: str) -> GenerateParams:
        if "model" not in found and not self.ours:
            raise SchemaError("invalid_request", f"a model is needed: {READ_AS_SPNL}", join(path, "model"))
        temperature = found.get("temperature", 0.6)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise SchemaError(
                "invalid_request", f"a number is needed, not {short(temperature)}", join(path, "temperature")
            )
        try:
            temperature = float(temperature)
        except OverflowError:
            temperature = math.inf
        params = GenerateParams(
            fields.name(found["model"], join(path, "model")) if "model" in found else None,
            fields.count(found.get("max_tokens", 0), join(path, "max_tokens")),
            temperature,
            fields.mapping(found.get("options", {}), join(path, "options")),
        )
        try:
            return check_params(params)
        except QueryError as error:
            raise SchemaError(error.code, error.message, error.field).under(path) from None

    def _repeat(self, value: object, path: str, depth: int) -> Repeat:
        found = fields.members(value, path, ("n", "g"))
        for needed in ("n", "g"):
            if needed not in found:
                raise SchemaError("invalid_request", f"a repeat needs {needed}", join(path, needed))
        n = fields.count(found["n"], join(path, "n"))
        if n > MAX_REPEAT:
            raise SchemaError(
                "invalid_request", f"an integer from 0 to 255 is needed, not {n}", join(path, "n")
            )
        if depth == MAX_DEPTH:
            raise SchemaError("capacity", f"a query nests at most {MAX_DEPTH} constructors", join(path, "g"))
        return Repeat(n, self._generate(found["g"], join(path, "g"), depth + 1))

    def _map(self, value: object, path: str, _: int) -> Map:
        found = fields.members(value, path, ("metadata", "inputs"))
        here = join(path, "metadata")
        params = self._params(self._members(found.get("metadata"), here, PARAMS, ("options",)), here)
        inputs = fields.items(found.get("inputs"), join(path, "inputs"))
        if not inputs:
            raise SchemaError("invalid_request", "at least one input is needed", join(path, "inputs"))
        texts = (fields.name(item, f"{path}.inputs[{index}]") for index, item in enumerate(inputs))
        return Map(params, tuple(texts))

    def _zip(self, value: object, path: str, depth: int) -> Zip:
        found = fields.members(value, path, ("first", "second"))
        first, second = (
            self.query(found.get(name), join(path, name), depth + 1) for name in ("first", "second")
        )
        return Zip(first, second)

    def _fragment(self, value: object, path: str, _: int) -> Fragment:
        if isinstance(value, str):
            return Fragment(fields.text(value, path))
        found = fields.members(value, path, ("text", "source"))
        source = fields.text(found["source"], join(path, "source")) if "source" in found else None
        return Fragment(fields.text(found.get("text"), join(path, "text")), source)

    def _chat(self, value: object, path: str, depth: int) -> Chat:
        found = fields.members(value, path, (*PARAMS, "options", "messages"))
        here = join(path, "messages")
        messages = []
        for index, message in enumerate(self._queries(found.get("messages"), here, depth)):
            if not isinstance(message, Message):
                raise SchemaError(
                    "invalid_request", f"a chat holds messages, not {message.tag}", f"{here}[{index}]"
                )
            messages.append(message)
        return Chat(self._params(found, path), tuple(messages))

    def _retrieve(self, value: object, path: str, depth: int) -> Retrieve:
        known = ("corpus", "question", "limit", "document", "embedding_model")
        found = fields.members(value, path, known)

        def text(name: str) -> str | None:
            return fields.text(found[name], join(path, name)) if name in found else None

        retrieval = Retrieve(
            fields.text(found.get("corpus"), join(path, "corpus")),
            self.query(found.get("question"), join(path, "question"), depth + 1),
            fields.count(found["limit"], join(path, "limit")) if "limit" in found else None,
            text("document"),
            text("embedding_model"),
        )
        try:
            return check_retrieve(retrieval)
        except QueryError as error:
            raise SchemaError(error.code, error.message, error.field).under(path) from None

    def _augment(self, value: object, path: str, depth: int) -> Retrieve:
        found = fields.members(value, path, ("embedding_model", "body", "doc"))
        model = fields.text(found.get("embedding_model"), join(path, "embedding_model"))
        question = self.query(found.get("body"), join(path, "body"), depth + 1)
        here = join(path, "doc")
        doc = fields.items(found.get("doc"), here)
        if len(doc) != 2:
            raise SchemaError("invalid_request", "a doc is a name and {'text': …}", here)
        content = fields.members(doc[1], f"{here}[1]", ("text", "binary"))
        if "binary" in content:
            raise SchemaError("invalid_request", "only documents of text can be read", f"{here}[1].binary")
        retrieval = Retrieve(
            fields.text(doc[0], f"{here}[0]"),
            question,
            None,
            fields.text(content.get("text"), f"{here}[1].text"),
            model,
        )
        try:
            return check_retrieve(retrieval)
        except QueryError as error:
            raise SchemaError(error.code, error.message, join(path, "body")) from None


def _dump(query: Query) -> dict[str, Json]:
    content: Json
    match query:
        case Message(text=text) | Print(text=text):
            content = text
        case Fragment(text, source):
            content = {"text": text, **_given(source=source)}
        case Join(children):
            content = [_dump(child) for child in children]
        case Monad(hidden):
            content = _dump(hidden)
        case Generate(params, prompt, closed):
            content = {**_dump_params(params), "input": _dump(prompt), **({"closed": True} if closed else {})}
        case Chat(params, messages):
            content = {**_dump_params(params), "messages": [_dump(message) for message in messages]}
        case Repeat(n, generate):
            content = {"n": n, **_dump(generate)}
        case Map(params, inputs):
            content = {"metadata": _dump_params(params), "inputs": list(inputs)}
        case Zip(first, second):
            content = {"first": _dump(first), "second": _dump(second)}
        case Retrieve(corpus, question, limit, document, model):
            content = {
                "corpus": corpus,
                "question": _dump(question),
                **_given(limit=limit, document=document, embedding_model=model),
            }
        case _:
            raise TypeError(f"{query!r} is no query")
    return {query.tag: content}


def _given(**members: Json) -> dict[str, Json]:
    return {name: value for name, value in members.items() if value is not None}


def _dump_params(params: GenerateParams) -> dict[str, Json]:
    dumped = _given(model=params.model)
    dumped |= {"max_tokens": params.max_tokens, "temperature": params.temperature}
    if params.options:
        dumped["options"] = fields.mapping(params.options, "options")
    return dumped


def _dump_spnl(query: Query, path: str) -> dict[str, Json]:
    def below(index: int) -> dict[str, Json]:
        return _dump_spnl(query.subqueries[index], join_path(path, query.step(index)))

    def params(found: GenerateParams) -> dict[str, Json]:
        if found.model is None or found.options:
            raise QueryError("invalid_request", "spnl needs a model and has no options", path or query.tag)
        return _dump_params(found)

    match query:
        case Message() | Print():
            return _dump(query)
        case Fragment(text):
            return {"user": text}
        case Join(children):
            return {query.tag: [below(index) for index in range(len(children))]}
        case Monad():
            return {"monad": below(0)}
        case Generate(found):
            return {"g": {**params(found), "input": below(0)}}
        case Chat(found, messages):
            return {"g": {**params(found), "input": {"cross": [_dump(message) for message in messages]}}}
        case Repeat(n):
            return {"repeat": {"n": n, **below(0)}}
        case Map(found):
            return {"map": {"metadata": params(found), "inputs": list(query.inputs)}}
        case Zip():
            return {"zip": {"first": below(0), "second": below(1)}}
        case Retrieve(corpus, _, None, str() as document, str() as model):
            return {
                "augment": {"embedding_model": model, "body": below(0), "doc": [corpus, {"text": document}]}
            }
    raise QueryError(
        "invalid_request",
        "spnl retrieves from a document sent along, with an embedding model and without a limit",
        path or query.tag,
    )
