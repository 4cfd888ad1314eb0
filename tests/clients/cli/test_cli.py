"""The command ``penstock``: what it offers, and what it says where the server is not installed."""

import re

import pytest

from penstock.clients.cli import commands, main as cli
from penstock.clients.host.distribution import installed_version

HEAVY = {"grpc", "tqdm", "torch", "msgspec", "tokenizers"}


def test_help_has_a_line_for_each_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert len(commands.COMMANDS) == 20
    for name in commands.COMMANDS:
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)
    assert "examples:" in out


def test_without_a_command_help_goes_to_stderr(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: penstock COMMAND")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {installed_version()}\n"


def test_an_unknown_command(capsys):
    assert cli.main(["chatt"]) == 2
    assert capsys.readouterr().err == "penstock: unknown command chatt; did you mean chat?\n"
    assert cli.main(["bake"]) == 2
    assert (
        "the commands are serve, worker, gateway, status-page, chat, generate, bench, simulate, profile, top, explain, "
        "requests, cancel, drain, flush-cache, adapters, settings, models, doctor, completion"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "command",
    ["chat", "generate", "bench", "top", "explain", "requests", "cancel", "drain", "flush-cache", "settings"],
)
def test_every_command_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out
    assert cli.main([command, "--no-such-flag"]) == 2


def test_help_imports_nothing_heavy(tool):
    tool.command[-1] = (
        "import sys; from penstock.clients.cli.main import main; status = main(['--help']); "
        f"sys.exit(status or ' '.join({HEAVY!r} & set(sys.modules)) or 0)"
    )
    done = tool.run()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def bare(tool):
    """The bare install: what the extra brings cannot be imported."""
    tool.command[-1] = (
        "import sys; sys.modules.update(dict.fromkeys(['msgspec', 'tokenizers', 'torch', 'numpy', 'jinja2', 'uvloop', "
        "'yaml', 'psutil', 'huggingface_hub', 'grpc_health', 'grpc_reflection', 'opentelemetry'])); "
        "from penstock.clients.cli.main import main; sys.exit(main())"
    )
    return tool


def test_the_bare_install_names_the_extra(bare, tmp_path):
    done = bare.run("serve")
    assert done.returncode == 1
    assert re.fullmatch(
        r"penstock serve: this needs \w+, which is not installed; install it: pip install 'penstock-llm\[cpu\]'\n",
        done.stderr,
    )
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "hi"}\n')
    done = bare.run("generate", "demo", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "pip install 'penstock-llm[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_bare_install_chats_and_generates(bare, threaded_service, tmp_path):
    assert bare.run("chat", "--target", threaded_service.target, "--once", "hi").stdout == "hi\n"
    arguments = ("--input", "-", "--output", "-", "--target", threaded_service.target)
    assert '"text":"hi"' in bare.run("generate", *arguments, text='{"id": 1, "prompt": "hi"}').stdout


def test_arguments_that_do_not_go_together(capsys):
    assert cli.main(["generate", "--input", "a", "--output", "b"]) == 2
    assert cli.main(["generate", "demo", "--target", "x", "--input", "a", "--output", "b"]) == 2
    assert cli.main(["generate", "--target", "x", "--input", "a", "--output", "b", "--max-model-len", "5"]) == 2
    assert "unrecognized arguments: --max-model-len" in capsys.readouterr().err
    assert cli.main(["generate", "--target", "x", "--input", "a", "--output", "-", "--overwrite"]) == 2


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(commands.COMMANDS, "bench", commands.Command("no_such_package.x:main", "", "bench"))
    assert cli.main(["bench"]) == 1
    assert "needs no_such_package, which is not installed; install it: pip install 'penstock-llm[bench]'" in (
        capsys.readouterr().err
    )


def test_a_missing_module_of_ours_is_a_bug_and_not_a_missing_extra(monkeypatch):
    monkeypatch.setitem(commands.COMMANDS, "chat", commands.Command("penstock.clients.no_such_module:main", ""))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["chat"])


def test_the_clients_import_nothing_else_of_ours(tool):
    tool.command[-1] = (
        "import importlib, pkgutil, sys, penstock.clients as ours\n"
        "for one in pkgutil.iter_modules(ours.__path__): importlib.import_module(f'penstock.clients.{one.name}')\n"
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('penstock.')}))\n"
        "print([name for name in ('torch', 'msgspec', 'tokenizers', 'uvloop', 'numpy') if name in sys.modules])"
    )
    assert tool.run().stdout == "['clients', 'v1']\n[]\n"
