"""`dagengine generate`: an engine in this process, prompts in, answers out; a context is computed once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .console import CommandError, new_app, print_json, read_text, say
from .threads import choose_threads

if TYPE_CHECKING:
    from dagengine import LLM, Result, SamplingParams, State

app = new_app("Generate from prompts, with an engine in this process.")


@app.command(context_settings=options.SETTINGS)
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="- reads standard input")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompt-file", "-f", help="a file that is one prompt; repeatable; - reads standard input"
        ),
    ] = None,
    context_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--context-file", "-c", help="a text that every prompt reads, in the order given; repeatable"
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="prompts are messages of a user")] = False,
    system: Annotated[str | None, typer.Option(help="system message; with --chat")] = None,
    model: options.Model = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens to sample")] = 128,
    min_tokens: Annotated[int, typer.Option(help="sample at least so many")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    presence_penalty: Annotated[float, typer.Option()] = 0.0,
    frequency_penalty: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the sampler  [default: drawn, and reported]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="a string that ends the output; repeatable")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    logprobs: Annotated[int | None, typer.Option(help="alternatives to report beside each token")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="answers per prompt")] = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = 64,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    enforce_eager: options.EnforceEager = False,
    overlap: options.Overlap = None,
    batch_invariant: options.BatchInvariant = False,
    attention_backend: options.AttentionBackend = "auto",
    position_policy: options.PositionPolicy = "linear",
    load_format: options.LoadFormat = "auto",
    chat_template: Annotated[Path | None, typer.Option(help="a file; replaces the model's")] = None,
    threads: options.Threads = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Generate from prompts, with an engine in this process. With --json: one answer a line."""
    texts = _prompts(prompts or [], prompt_file or [])
    if system is not None and not chat:
        raise CommandError("a system message needs --chat", "system")
    folder = options.require_model(model)
    chosen = choose_threads(threads)
    say(str(chosen))

    from dagengine import LLM, SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
    )
    template = read_text(chat_template) if chat_template is not None else None
    documents = [read_text(path) for path in context_file or ()]
    with LLM(
        folder,
        position=position_policy,
        chat_template=template,
        threads=chosen.count,
        **options.engine_options(context),
    ) as llm:
        states = llm.prefill(documents) if documents else []
        inputs: list[Any] = [_messages(text, system) for text in texts] if chat else list(texts)
        if as_json:
            _print_answers(llm, inputs, sampling, states)
        elif len(inputs) == 1 and n == 1:
            _stream(llm, inputs[0], sampling, states)
        else:
            _print_texts(llm, inputs, sampling, states)


def _prompts(given: list[str], files: list[Path]) -> list[str]:
    if given == ["-"]:
        given, files = [], [Path("-"), *files]
    texts = [*given, *(read_text(path) for path in files)]
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    if not texts or not all(texts):
        raise CommandError("give one: as an argument, with --prompt-file, or on standard input", "prompt")
    return texts


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _stream(llm: LLM, prompt: Any, sampling: SamplingParams, states: list[State]) -> None:
    """One answer, as it comes."""
    from dagengine.request import Event, TokenEvent

    def show(event: Event) -> None:
        if isinstance(event, TokenEvent):
            print(event.text, end="", flush=True)

    finished = llm.run([llm.request(prompt, sampling, context=states)], show)[0]
    print()
    if finished.error is not None:
        raise finished.error


def _print_texts(llm: LLM, inputs: list[Any], sampling: SamplingParams, states: list[State]) -> None:
    for index, answers in enumerate(_run(llm, inputs, sampling, states)):
        for number, answer in enumerate(answers):
            name = f"prompt {index + 1}" + (f", answer {number + 1}" if len(answers) > 1 else "")
            print(f"── {name}\n{answer.text}")


def _print_answers(llm: LLM, inputs: list[Any], sampling: SamplingParams, states: list[State]) -> None:
    for index, answers in enumerate(_run(llm, inputs, sampling, states)):
        for number, answer in enumerate(answers):
            dag = answer.choice.dag
            print_json(
                {
                    "prompt": index,
                    "index": number,
                    "text": answer.text,
                    "token_ids": list(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                    "logprobs": None
                    if answer.logprobs is None
                    else [{"token": t.token_id, "logprob": t.logprob, "top": t.top} for t in answer.logprobs],
                    "usage": {
                        "prompt_tokens": answer.usage.prompt_tokens,
                        "cached_tokens": answer.usage.cached_tokens,
                        "completion_tokens": answer.usage.completion_tokens,
                    },
                    "position": {"policy": dag.policy, "own_start": dag.own_start},
                    "record": dict(dag.record),
                },
                indent=None,
            )


def _run(llm: LLM, inputs: list[Any], sampling: SamplingParams, states: list[State]) -> list[list[Result]]:
    """The answers to every prompt; all prompts run at once."""
    answers = llm.generate(inputs, sampling, context=states, keep=False)
    return [answer if isinstance(answer, list) else [answer] for answer in answers]
