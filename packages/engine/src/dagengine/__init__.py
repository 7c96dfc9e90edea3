"""dagengine: serve language models whose requests read each other's KV state as a graph."""

from .async_llm import AsyncLLM
from .bulk import BulkItem, BulkResult
from .config import EngineConfig
from .errors import DagError, EngineDead
from .explain import Explanation
from .graph import AsyncGraph, Graph, NodeRef
from .llm import LLM
from .query_results import QueryResult
from .request import ContextRef, Keep
from .sampling import SamplingParams
from .state import Reference, Result, State

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncGraph",
    "AsyncLLM",
    "BulkItem",
    "BulkResult",
    "ContextRef",
    "DagError",
    "EngineConfig",
    "EngineDead",
    "Explanation",
    "Graph",
    "Keep",
    "NodeRef",
    "QueryResult",
    "Reference",
    "Result",
    "SamplingParams",
    "State",
]
