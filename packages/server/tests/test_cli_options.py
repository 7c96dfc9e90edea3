"""Where options come from, and what the command line says about it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dagengine import EngineConfig
from dagengine_server.cli import options
from dagengine_server.cli.console import new_app

probe = new_app("Shows its options.")


@probe.command(context_settings=options.SETTINGS)
def show(
    context: typer.Context,
    model: options.Model = None,
    port: Annotated[int, typer.Option()] = 8000,
    page_size: options.PageSize = 64,
    api_key: Annotated[list[str] | None, typer.Option()] = None,
    device: options.Device = "auto",
    kv_pages: options.KvPages = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    enforce_eager: options.EnforceEager = False,
    overlap: options.Overlap = None,
    batch_invariant: options.BatchInvariant = False,
    config: options.Config = None,
) -> None:
    for option in options.resolved(context):
        print(f"{option.name}={option.shown} from {option.source}")
    print(options.engine_options(context))


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(probe, list(arguments), env=environment)
    return result.exit_code, result.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text('port = 1\npage-size = 16\napi-key = ["a", "b"]\n')
    return path


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(file: Path) -> None:
    given = ["--config", str(file)]
    assert "port=8000 from default" in run()[1]
    assert f"port=1 from {file}" in run(*given)[1]
    assert "port=2 from environment DAGENGINE_PORT" in run(*given, DAGENGINE_PORT="2")[1]
    assert "port=3 from command line" in run(*given, "--port", "3", DAGENGINE_PORT="2")[1]


def test_the_environment_can_name_the_file_and_the_model(file: Path) -> None:
    status, text = run(DAGENGINE_CONFIG=str(file), DAGENGINE_MODEL="m")
    assert status == 0
    assert "model=m from environment DAGENGINE_MODEL" in text
    assert f"page_size=16 from {file}" in text
    assert "'page_size': 16" in text


def test_an_option_that_a_file_spells_in_both_ways_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    for lines in ("kv-pages = 16\nkv_pages = 32\n", "kv_pages = 16\nkv-pages = 16\n"):
        file.write_text(lines)
        status, text = run("--config", str(file))
        assert status == 2 and "twice" in text and "kv" in text


def test_the_engines_device_and_memory_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    file.write_text('device = "cuda:1"\ngpu-memory-utilization = 0.5\nenforce-eager = true\n')
    status, text = run("--config", str(file), DAGENGINE_DEVICE="cuda", DAGENGINE_BATCH_INVARIANT="1")
    assert status == 0
    assert "device=cuda from environment DAGENGINE_DEVICE" in text
    engine = ast.literal_eval(text.splitlines()[-1])
    assert engine == {
        "device": "cuda",
        "page_size": 64,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "batch_invariant": True,
    }
    text = run("--config", str(file), "--device", "cpu", DAGENGINE_DEVICE="cuda")[1]
    assert "device=cpu from command line" in text


def test_overlap_is_on_off_or_the_devices(tmp_path: Path) -> None:
    def overlap(*arguments: str, **environment: str) -> object:
        status, text = run(*arguments, **environment)
        assert status == 0, text
        return ast.literal_eval(text.splitlines()[-1]).get("overlap")

    file = tmp_path / "overlap.toml"
    file.write_text("overlap = false\n")
    assert overlap() is None
    assert overlap("--config", str(file)) is False
    assert overlap("--config", str(file), DAGENGINE_OVERLAP="1") is True
    assert overlap("--no-overlap", DAGENGINE_OVERLAP="1") is False


def test_every_field_of_the_engine_that_a_command_takes_is_one() -> None:
    assert set(options.ENGINE_FIELDS) <= {field.name for field in fields(EngineConfig)}


def test_secrets_are_counted_and_not_shown(file: Path) -> None:
    text = run("--config", str(file))[1]
    assert "api_key=(2 given)" in text
    text = run("--api-key", "hunter2")[1]
    assert "hunter2" not in text and "api_key=(1 given) from command line" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "did you mean 'port'?"),
        ("page_sizes = 1", "did you mean 'page-size'?"),
        ("[port]\nx = 1", "not a table"),
        ("port = ", "cannot be read"),
        ('port = "x"', "port"),
    ],
)
def test_a_wrong_file_is_an_error(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    status, output = run("--config", str(path))
    assert status == 2
    assert says in " ".join(output.replace("│", " ").split())


def test_an_unknown_variable_is_an_error_with_a_suggestion() -> None:
    status, output = run(DAGENGINE_PROT="1")
    assert status == 2
    assert "'DAGENGINE_PORT'" in output


def test_variables_of_other_commands_and_tools_are_left_alone() -> None:
    assert run(DAGENGINE_CACHE="/tmp/x", DAGENGINE_HOST="h", DAGENGINE_KV_PAGES="3")[0] == 0


@pytest.mark.parametrize("name", ["CACHE", "CPU_ISA", "NATIVE", "PYTHON", "REQUIRE_NVCC", "REQUIRE_TILELANG"])
def test_variables_of_other_parts_are_theirs(name: str) -> None:
    assert run(**{f"DAGENGINE_{name}": "x"})[0] == 0


def test_a_value_of_the_environment_is_checked_like_any_other() -> None:
    status, output = run(DAGENGINE_PORT="x")
    assert status == 2 and "--port" in output
