"""Span queries: what is asked, what may change places, planned and lowered to a context graph.

    query  →  plan: exact rules to a fixed point  →  lower: nodes, references, parameters  →  an engine

`definition` says what every constructor means.
"""

from .build import (
    assistant,
    chat,
    cross,
    fragment,
    g,
    map_inputs,
    monad,
    note,
    par,
    plus,
    prepare,
    repeat,
    retrieve,
    seq,
    system,
    user,
    zipped,
)
from .definition import Evaluation, evaluate
from .explain import Explanation, explain
from .expressions import (
    Chat,
    Cross,
    Fragment,
    Generate,
    GenerateParams,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Print,
    Query,
    Repeat,
    Retrieve,
    Retriever,
    Seq,
    Zip,
)
from .lower import lower
from .lowered import Commuting, LoweredQuery, QueryNode
from .plan import Plan, Step, plan
from .pretty import pretty
from .reduce import Reduction
from .rules import shuffled
from .wire import FORMAT, dump_query, dump_spnl, load_query, load_spnl

__all__ = [
    "FORMAT",
    "Chat",
    "Commuting",
    "Cross",
    "Evaluation",
    "Explanation",
    "Fragment",
    "Generate",
    "GenerateParams",
    "LoweredQuery",
    "Map",
    "Message",
    "Monad",
    "Par",
    "Plan",
    "Plus",
    "Print",
    "Query",
    "QueryNode",
    "Reduction",
    "Repeat",
    "Retrieve",
    "Retriever",
    "Seq",
    "Step",
    "Zip",
    "assistant",
    "chat",
    "cross",
    "dump_query",
    "dump_spnl",
    "evaluate",
    "explain",
    "fragment",
    "g",
    "load_query",
    "load_spnl",
    "lower",
    "map_inputs",
    "monad",
    "note",
    "par",
    "plan",
    "plus",
    "prepare",
    "pretty",
    "repeat",
    "retrieve",
    "seq",
    "shuffled",
    "system",
    "user",
    "zipped",
]
