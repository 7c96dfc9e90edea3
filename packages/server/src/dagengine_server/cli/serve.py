"""`dagengine serve`: loads a model and serves it, and says which options it runs with, and from where."""

from __future__ import annotations

import logging
import logging.config
from contextlib import closing
from errno import EADDRINUSE
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .console import CommandError, new_app, read_text
from .logs import FORMATS, LEVELS, log_config
from .queries import Corpus, RetrieverName, corpora_of
from .threads import choose_threads

LEAST_OPEN_REQUESTS = 1024
HANGING_ENGINE_S = 5.0

log = logging.getLogger("dagengine.server")

app = new_app("Serve a model over HTTP: OpenAI's API, states and graphs.")


@app.command(context_settings=options.SETTINGS)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="a Hugging Face folder, or a Hub id", envvar="DAGENGINE_MODEL"),
    ] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="the id clients ask for  [default: the model's last path part]")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="repeatable; each key is a tenant of its own")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="an origin for CORS; repeatable  [default: CORS is off]")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    page_size: options.PageSize = 64,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    cpu_kv_gib: options.CpuKvGib = 0.0,
    kv_directory: options.KvDirectory = None,
    kv_directory_gib: options.KvDirectoryGib = None,
    eviction: options.Eviction = "lru",
    enforce_eager: options.EnforceEager = False,
    overlap: options.Overlap = None,
    batch_invariant: options.BatchInvariant = False,
    attention_backend: options.AttentionBackend = "auto",
    position_policy: options.PositionPolicy = "linear",
    seed: Annotated[
        int | None, typer.Option(help="of requests that name none, and of dummy weights  [default: drawn]")
    ] = None,
    load_format: options.LoadFormat = "auto",
    chat_template: Annotated[Path | None, typer.Option(help="a file; replaces the model's")] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(min=1, help="then 429  [default: unbounded]")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="seconds until a request ends with 504  [default: none]")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="seconds that requests may take to end once told to stop")
    ] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(help="larger request bodies get 413")] = 16 * 2**20,
    corpus: Corpus = None,
    retriever: RetrieverName = "fts5",
    max_fragments: Annotated[
        int, typer.Option(min=0, help="fragments of span queries that are kept to be read again")
    ] = 4096,
    fragment_ttl: Annotated[
        float, typer.Option(help="seconds after its last use until a fragment is let go of")
    ] = 600.0,
    threads: options.Threads = None,
    log_level: Annotated[str, typer.Option(metavar=f"{{{','.join(LEVELS)}}}")] = "info",
    log_format: Annotated[str, typer.Option(metavar=f"{{{','.join(FORMATS)}}}")] = "text",
    config: options.Config = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, states and graphs."""
    folder = options.require_model(model)
    for name, value, allowed in (("log_level", log_level, LEVELS), ("log_format", log_format, FORMATS)):
        if value not in allowed:
            raise CommandError(f"one of {', '.join(allowed)}, not {value!r}", name)
    logging_config = log_config(log_level, log_format)
    logging.config.dictConfig(logging_config)
    for option in options.resolved(context):
        log.info("option %s = %s (%s)", option.name.replace("_", "-"), option.shown, option.source)
    chosen = choose_threads(threads)
    log.info("%s", chosen)

    from dagengine import EngineConfig
    from dagengine.async_engine import EngineThread
    from dagengine.build import build_core
    from dagengine.config import DEFAULT_MAX_NUM_SEQS

    from ..app import create_app
    from ..garbage import seldom_collected
    from ..serving import check_address
    from ..serving import serve as run
    from ..settings import ServerSettings

    try:
        check_address(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(
            f"cannot listen on {host}, port {port}: {reason}", "port" if error.errno == EADDRINUSE else "host"
        ) from None
    at_once = max_num_seqs or max(DEFAULT_MAX_NUM_SEQS.values())
    settings = ServerSettings(
        served_model_name=Path(folder).name if served_model_name is None else served_model_name,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allowed_origins or ()),
        max_body_bytes=max_body_bytes,
        max_open_requests=max(LEAST_OPEN_REQUESTS, at_once + (max_queued_requests or 0)),
        request_timeout_s=request_timeout,
        max_fragments=max_fragments,
        fragment_ttl_s=fragment_ttl,
    )
    engine_config = EngineConfig(
        position_policy=position_policy,
        seed=seed,
        max_waiting=max_queued_requests,
        threads=chosen.count,
        **options.engine_options(context),
    )
    with closing(corpora_of(corpus, retriever)) as corpora:
        template = read_text(chat_template) if chat_template is not None else None
        core = build_core(folder, engine_config, chat_template=template)
        log.info("position policy %s", position_policy)
        engine = EngineThread(core)
        try:
            with seldom_collected():
                status = run(
                    create_app(engine, settings, retriever=corpora),
                    host=host,
                    port=port,
                    shutdown_timeout_s=shutdown_timeout,
                    log_level=log_level,
                    log_config=logging_config,
                )
        finally:
            engine.close(wait_s=HANGING_ENGINE_S)
    raise typer.Exit(status)
