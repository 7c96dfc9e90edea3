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
    NOTHING,
    Chat,
    Cross,
    FindFragments,
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
    Seq,
    Zip,
    join_path,
)
from .lower import lower
from .lowered import MAX_TOKENS, Commuting, LoweredQuery, QueryNode
from .plan import Plan, Step, plan
from .pretty import pretty
from .reduce import Reduction
from .rules import shuffled
from .wire import FORMAT, OUR_TAGS, SPNL_TAGS, dump_query, dump_spnl, load_query, load_spnl

__all__ = [
    "FORMAT",
    "MAX_TOKENS",
    "NOTHING",
    "OUR_TAGS",
    "SPNL_TAGS",
    "Chat",
    "Commuting",
    "Cross",
    "Evaluation",
    "Explanation",
    "Fragment",
    "Generate",
    "GenerateParams",
    "Join",
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
    "FindFragments",
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
    "join_path",
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
