"""``penstock completion`` in bash, zsh and fish, as a user's shell runs it."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from penstock.clients.cli import main as cli
from penstock.clients.cli.commands import COMMANDS
from penstock.clients.cli.completion import SHELLS
from penstock.service.config.serve_config import ServeConfig

PENSTOCK = Path(sys.executable).with_name("penstock")
MAIN = "import sys; from penstock.clients.cli.main import main; sys.exit(main())"
PATIENCE_S = 60
"""A shell that hangs fails a test after this time."""


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed (Debian: {shell})")


def in_shell(shell):
    return pytest.param(shell, marks=needs(shell))


@pytest.fixture
def environment(tmp_path):
    """The variables of a user whose shell reads no configuration."""
    path = os.pathsep.join([str(PENSTOCK.parent), os.environ["PATH"]])
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "LC_ALL": "C.UTF-8"}


FORKS = """
import json, os, sys
from importlib import import_module
from penstock.clients.cli.commands import COMMANDS
from penstock.clients.cli.main import main
for command in COMMANDS.values():
    import_module(command.parser_entry.partition(":")[0])
for line in sys.stdin:
    directory, variables = json.loads(line)
    if not (child := os.fork()):
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported everything, and forks for each line: that takes a fortieth of the time."""


@pytest.fixture(scope="module")
def forks():
    command = [sys.executable, "-P", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate()


class Completions:
    """Calls ``penstock`` as the shells' scripts do; returns the completions of a line."""

    def __init__(self, environment, directory, forks):
        self._forks = forks
        self._output = directory / ".completions"
        variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(self._output)}
        self._options = {"cwd": directory, "capture_output": True, "text": True, "timeout": PATIENCE_S}
        self._environment = environment | variables
        self.stderr = ""

    def __call__(self, line):
        self._output.unlink(missing_ok=True)
        print(json.dumps([str(self._options["cwd"]), self._variables(line)]), file=self._forks.stdin, flush=True)
        assert self._forks.stdout.readline() == "0\n"
        return self._completions()

    def in_new_process(self, line, *python, code=MAIN):
        self._output.unlink(missing_ok=True)
        command = [sys.executable, "-P", *python, "-c", code]
        done = subprocess.run(command, env=self._variables(line), check=False, **self._options)
        assert done.returncode == 0, done.stderr
        self.stderr = done.stderr
        return self._completions()

    def _variables(self, line):
        return self._environment | {"COMP_LINE": line, "COMP_POINT": str(len(line))}

    def _completions(self):
        return [each.strip() for each in self._output.read_text().splitlines()]


@pytest.fixture
def completions(environment, tmp_path, forks):
    return Completions(environment, tmp_path, forks)


# The lines -----------------------------------------------------------------------------------------------------------


def test_commands(completions):
    assert completions("penstock ") == list(COMMANDS)
    assert completions("penstock d") == ["drain", "doctor"]
    assert completions("penstock serve") == ["serve"]
    assert completions("penstock -") == ["-h", "--help", "-V", "--version"]
    assert completions("penstock bake --") == ["--help", "--version"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("serve", {"--model", "--http-port", "--no-enable-prefix-caching", "--config"}),
        ("gateway", {"--host", "--tenant-header", "--tls-ca"}),
        ("status-page", {"--admin", "--port", "--allowed-hosts"}),
        ("chat", {"--once", "--json-schema", "--target"}),
        ("generate", {"--input", "--retry-failed"}),
        ("bench", {"--slo", "--plot"}),
        ("settings", {"--policy", "--max-num-seqs", "--admin"}),
        ("drain", {"--wait", "--resume"}),
        ("requests", {"--tenant", "--state", "--min-age", "--json"}),
        ("cancel", {"--tenant", "--all", "--yes"}),
    ],
)
def test_flags(completions, command, flags):
    assert flags < set(completions(f"penstock {command} "))
    assert flags < set(completions(f"penstock {command} --"))


def test_every_command_has_a_parser_of_its_own():
    for name, command in COMMANDS.items():
        module, _, function = command.parser_entry.partition(":")
        assert getattr(import_module(module), function)().prog == f"penstock {name}"


def test_part_of_a_flag(completions):
    assert completions("penstock serve --max-num") == ["--max-num-seqs", "--max-num-batched-tokens"]
    assert completions("penstock serve demo --dtype float32 --kv-cache-d") == ["--kv-cache-dtype"]


def test_a_flag_that_excludes_another_is_not_offered_with_it(completions):
    assert "--wait" not in completions("penstock drain --resume --")


def test_choices(completions):
    fields = {field.name: field.metadata["choices"] for field in dataclasses.fields(ServeConfig)}
    for name in ("dtype", "backend", "quantization", "scheduling_policy"):
        assert completions(f"penstock serve --{name.replace('_', '-')} ") == fields[name]
    assert completions("penstock serve --dtype f") == ["float32", "float16", "float64"]
    assert completions("penstock serve --dtype=b") == ["--dtype=bfloat16"]
    assert completions("penstock settings --policy ") == ["fcfs", "priority", "deadline", "fair"]
    assert completions("penstock cancel --state ") == ["waiting", "prefilling", "decoding", "held"]
    assert completions("penstock gateway --unknown-fields ") == ["refuse", "ignore"]
    assert completions("penstock bench --api o") == ["openai"]
    assert completions("penstock completion ")[-3:] == list(SHELLS)


def test_files_where_a_file_is_wanted(completions, tmp_path):
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / ".hidden").touch()
    for name in ("keys", "two words", "models/config.json"):
        (tmp_path / name).touch()
    assert completions("penstock serve --api-keys-file ") == ["keys", "models/", r"two\ words"]
    assert completions("penstock serve --api-keys-file .h") == [".hidden"]
    assert completions("penstock gateway --tls-ca models/c") == ["models/config.json"]
    assert completions("penstock chat --tls-key ~/ke") == ["~/keys"]
    assert completions(f"penstock generate --input {tmp_path}/k") == [f"{tmp_path}/keys"]
    assert completions("penstock serve --generation-config ") == ["auto", "none", "keys", "models/", r"two\ words"]
    assert completions("penstock serve m") == ["models/"]
    assert completions("penstock serve models/") == ["models/small/"]
    assert completions("penstock serve no/such/") == []
    for line in ("serve --port ", "serve --host ", "bench --endpoint ", "chat --once ", "gateway --max-callers "):
        assert completions(f"penstock {line}") == []


# The cost ------------------------------------------------------------------------------------------------------------


def imported(stderr):
    """The modules in the output of ``-X importtime``."""
    return {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}


def test_commands_complete_without_grpc_torch_and_the_service(completions):
    assert "serve" in completions.in_new_process("penstock ", "-X", "importtime")
    modules = imported(completions.stderr)
    assert "penstock.clients.cli.completion" in modules
    assert not {name.partition(".")[0] for name in modules} & {"google", "grpc", "torch", "tqdm", "yaml"}
    assert {name for name in modules if name.startswith("penstock.")} == {
        "penstock.clients", "penstock.clients.cli", "penstock.clients.host", "penstock.clients.host.distribution",
        *(f"penstock.clients.cli.{name}" for name in ("command_parser", "commands", "completion", "main")),
    }  # fmt: skip


@pytest.mark.parametrize("line", ["serve --dtype ", "gateway --unknown-fields ", "generate demo --"])
def test_flags_complete_without_torch_and_a_web_framework(completions, line):
    assert completions.in_new_process(f"penstock {line}", "-X", "importtime") != []
    modules = imported(completions.stderr)
    assert "argparse" in modules
    assert not {name.partition(".")[0] for name in modules} & {"fastapi", "torch", "transformers", "uvicorn"}
    assert not {name for name in modules if name.startswith(("penstock.service.app", "penstock.models.worker"))}


def test_in_the_bare_install_commands_without_their_packages_have_no_flags(completions):
    bare = f"import sys; sys.modules.update(dict.fromkeys(['msgspec', 'yaml'])); {MAIN}"
    assert "serve" in completions.in_new_process("penstock ", code=bare)
    assert completions.in_new_process("penstock serve --", code=bare) == []
    assert completions.stderr == ""
    assert "--once" in completions.in_new_process("penstock chat --", code=bare)


# The shells ----------------------------------------------------------------------------------------------------------


def printed(command, environment, directory):
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def in_bash(environment, tmp_path):
    """The replies of the function that the script registers in bash."""

    def replies(line):
        variables = f"COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}"
        code = f"""
            source <(penstock completion bash)
            function=$(complete -p penstock | sed -E 's/.* -F ([^ ]+) .*/\\1/')
            {variables}
            $function penstock
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        return printed(["bash", "--norc", "-c", code], environment, tmp_path).split()

    return replies


@pytest.fixture
def in_fish(environment, tmp_path):
    """What fish offers for a line, with descriptions."""

    def offered(line):
        code = f"penstock completion fish | source; complete -C {shlex.quote(line)}"
        return dict(
            each.partition("\t")[::2]
            for each in printed(["fish", "--no-config", "-c", code], environment, tmp_path).splitlines()
        )

    return offered


@needs("bash")
def test_bash(in_bash, tmp_path):
    (tmp_path / "keys").touch()
    assert in_bash("penstock ") == list(COMMANDS)
    assert in_bash("penstock expl") == ["explain"]
    assert in_bash("penstock serve --shut") == ["--shutdown-grace"]
    assert in_bash("penstock settings --policy f") == ["fcfs", "fair"]
    assert in_bash("penstock gateway --tls-ca k") == ["keys"]


@needs("fish")
def test_fish(in_fish, tmp_path):
    (tmp_path / "keys").touch()
    assert in_fish("penstock ") == {name: command.summary for name, command in COMMANDS.items()}
    assert in_fish("penstock serve --shut").keys() == {"--shutdown-grace"}
    assert in_fish("penstock settings --policy f").keys() == {"fcfs", "fair"}
    assert in_fish("penstock gateway --tls-ca k").keys() == {"keys"}


BASH, ZSH = ["bash", "--norc", "--noprofile", "-i"], ["zsh", "-f", "-i"]
PROMPT, COMPINIT = "PS1='rea''dy> '", "autoload -Uz compinit && compinit -u -D"
INSTALL = "mkdir ~/.zfunc && penstock completion zsh > ~/.zfunc/_penstock; fpath=(~/.zfunc $fpath)"
SETUPS = {
    "bash": (BASH, f"source <(penstock completion bash); {PROMPT}"),
    "zsh": (ZSH, f"{COMPINIT}; source <(penstock completion zsh); {PROMPT}"),
    "zsh, installed": (ZSH, f"{INSTALL}; {COMPINIT}; {PROMPT}"),
}


@pytest.fixture
def terminal(request, tool, open_terminal, environment, tmp_path):
    """An interactive shell with the script."""
    tool.command, setup = SETUPS[request.param]
    tool.environment = environment
    opened = open_terminal()
    opened.type(f"cd {tmp_path}; {setup}\n")
    opened.wait_for("ready> ")
    return opened


@pytest.mark.parametrize(
    "terminal",
    [in_shell("bash"), in_shell("zsh"), pytest.param("zsh, installed", marks=[needs("zsh"), pytest.mark.soak])],
    indirect=True,
)
@pytest.mark.parametrize(
    ("typed", "rest", "line"),
    [
        ("penstock expl", "ain", "penstock explain"),
        ("penstock serve --dtype bf", "loat16", "penstock serve --dtype bfloat16"),
        ("penstock chat --tls-ca tw", "words", "penstock chat --tls-ca two words"),
        ("penstock serve mod", "els/", "penstock serve models/"),
    ],
    ids=["command", "choice", "blank", "folder"],
)
def test_the_tab_key(terminal, tmp_path, typed, rest, line):
    """The line is completed at the Tab key, and then printed: Ctrl-A goes to its beginning."""
    (tmp_path / "models").mkdir()
    for name in ("keys", "two words"):
        (tmp_path / name).touch()
    terminal.type(f"{typed}\t")
    terminal.wait_for(rest)
    terminal.type("\x01echo $((6 * 7)) \n")
    terminal.wait_for("\n42 ")
    assert terminal.wait_for("\n").rstrip() == line


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_names_no_file_of_this_installation(shell, capsys):
    """It works after an update, and for the penstock that is first in PATH."""
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "penstock" in script
    assert sys.prefix not in script


@pytest.mark.parametrize("shell", [in_shell("bash"), in_shell("zsh"), in_shell("fish")])
def test_the_script_is_valid(shell, capsys, tmp_path):
    assert cli.main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    assert subprocess.run([shell, "-n", tmp_path / "script"], check=False, timeout=PATIENCE_S).returncode == 0


def test_help_shows_how_to_install_it(capsys):
    assert cli.main(["completion", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  penstock completion {shell} > ~/", out, re.MULTILINE) for shell in SHELLS)


def test_an_unknown_shell(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_completion_variables_alone_change_nothing(monkeypatch, capsys):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")
