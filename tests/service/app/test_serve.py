"""``penstock serve`` as a process: what it prints works when pasted, and what is wrong is one line."""

import hashlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from serve_process import PENSTOCK, SHARD_B, serving, target_of, write_shard, write_small_model

import penstock.v1 as pb
from penstock.kernels.cpu.bindings import find_kernels
from penstock.service.app import serve
from penstock.service.app.usage_examples import Purpose, Transport, UsageExamples
from penstock.service.config.addresses import Address
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

BUF = Path(__file__).parents[3] / "node_modules/.bin/buf"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def greeting(small_model):
    """What a service on any port printed; it ends with status 0 on SIGTERM."""
    with serving(small_model, "--port", "0", "--kv-cache-memory-bytes=64M") as (process, greeting):
        yield greeting
        process.terminate()
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def line_of(greeting, program):
    (line,) = (line.strip() for line in greeting.splitlines() if line.strip().startswith(program))
    return line


def paste(line):
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_greeting_describes_what_runs(cpu_library):
    flags = ("--threads=1", "--quantization=int8", "--kv-cache-dtype=int8", "--kv-cache-memory-bytes=64M")
    kernels = find_kernels()
    assert kernels is not None
    with serving("--port", "0", *flags, "--backend=cpu") as (_, greeting):
        assert re.search(
            r"^Qwen3ForCausalLM, bfloat16, weights in int8 of [56] MiB, context 16,384$", greeting, re.MULTILINE
        )
        level = kernels.name.decode()
        assert f"\nbackend cpu on cpu ({level}, 1 thread), steps of at most 256 sequences and 256 tokens\n" in greeting
        assert re.search(r"^KV cache of [\d,]+ tokens in int8, 6[34] MiB$", greeting, re.MULTILINE)


def test_the_printed_python_call_works(greeting):
    paste(line_of(greeting, shlex.quote(sys.executable)))


def test_the_printed_terminal_chat_works(greeting):
    (line,) = (line.strip() for line in greeting.splitlines() if "penstock chat" in line)
    paste(f"{line} --once hello")


def as_buf(line):
    """The same call, as buf has it: grpcurl takes the address and the method apart, and is told of plain text."""
    program, *arguments = shlex.split(line)
    if program == "grpcurl":
        *options, address, method = arguments
        options.remove("-plaintext")
        return [*options, f"http://{address}/{method}"]
    assert arguments[:3] == ["curl", "--protocol", "grpc"]
    return arguments[3:]


@pytest.mark.parametrize("program", ["buf", "grpcurl"])
def test_the_printed_calls_by_reflection_work(greeting, program):
    line = line_of(greeting, program)
    arguments = as_buf(line)
    if shutil.which(program):
        answer = paste(line)
    elif BUF.exists():
        answer = paste(shlex.join([str(BUF), "curl", "--protocol", "grpc", *arguments]))
    else:
        answer = call_as_buf_would(arguments)
    assert '"finished"' in answer
    assert '"promptTokens"' in answer


def call_as_buf_would(arguments):
    (flag, data, url) = arguments
    assert flag == "-d"
    _, _, address, service, method = url.split("/")
    assert f"{service}/{method}" == "penstock.v1.GenerationService/GenerateOne"
    with grpc.insecure_channel(address) as channel:
        answers = GenerationServiceStub(channel).GenerateOne(json_format.Parse(data, pb.GenerateOneRequest()))
        return "".join(json_format.MessageToJson(answer) for answer in answers)


def test_a_call_fits_where_the_service_listens():
    plain = UsageExamples("m", takes_chat=False, wants_key=False)
    everywhere = Address.parse("0.0.0.0:80")
    assert 'Client("127.0.0.1:80")' in plain.python(everywhere)
    assert plain.buf(everywhere).endswith(" http://127.0.0.1:80/penstock.v1.GenerationService/GenerateOne")
    assert plain.grpcurl(everywhere).endswith(" 127.0.0.1:80 penstock.v1.GenerationService/GenerateOne")
    assert "'http://[::1]:80/" in plain.buf(Address.parse("[::]:80"))
    with_key, private = UsageExamples("m", takes_chat=False, wants_key=True), Address.parse("unix:/run/a b/socket")
    assert "--unix-socket '/run/a b/socket' -H 'authorization: Bearer YOUR_KEY'" in with_key.buf(private)
    assert " http://localhost/penstock.v1." in with_key.buf(private)
    assert "-unix '/run/a b/socket' penstock.v1.GenerationService/GenerateOne" in with_key.grpcurl(private)
    assert 'api_key="YOUR_KEY"' in with_key.python(private)
    assert "penstock chat" not in with_key.grpc(private)
    assert "penstock chat" in UsageExamples("m", takes_chat=True, wants_key=False).grpc(private)


def test_a_call_fits_what_the_model_is_for():
    address = Address.parse("0.0.0.0:80")
    for purpose, message, call, route in (
        (Purpose.SCORING, pb.ScoreRequest, "client.score(", "/v1/rerank"),
        (Purpose.CLASSIFICATION, pb.ClassifyRequest, "client.classify(", "/v1/classify"),
    ):
        examples = UsageExamples("m", takes_chat=True, wants_key=False, purpose=purpose)
        assert call in examples.python(address)
        assert "complete" not in examples.grpc(address)
        *_, data, url = shlex.split(examples.buf(address))
        assert url == f"http://127.0.0.1:80/{purpose.value}"
        assert json_format.Parse(data, message()).ListFields()
        assert route in examples.http(address)


def test_a_call_has_what_tls_asks_for():
    address = Address.parse("10.0.0.5:80")
    one_way, mutual = (UsageExamples("m", True, False, kind) for kind in (Transport.TLS, Transport.MUTUAL_TLS))
    assert 'import Client, Tls; client = Client("10.0.0.5:80", tls=Tls(ca="CA.pem"))' in one_way.python(address)
    assert "curl --protocol grpc --cacert CA.pem -d " in one_way.buf(address)
    assert " https://10.0.0.5:80/" in one_way.buf(address)
    assert one_way.grpcurl(address).startswith("grpcurl -cacert CA.pem -d ")
    assert one_way.chat(address).endswith("penstock chat --tls-ca CA.pem --target 10.0.0.5:80")
    assert 'tls=Tls(ca="CA.pem", certificate="CLIENT.pem", key="CLIENT.key")' in mutual.python(address)
    assert " --cacert CA.pem --cert CLIENT.pem --key CLIENT.key -d " in mutual.buf(address)
    assert mutual.grpcurl(address).startswith("grpcurl -cacert CA.pem -cert CLIENT.pem -key CLIENT.key -d ")
    admin = one_way.admin(Address.parse("10.0.0.5:81"))
    assert "penstock top --tls-ca CA.pem --admin 10.0.0.5:81" in admin


def test_with_tls_and_keys_the_printed_call_works_and_sighup_reads_files_again(small_model, tmp_path, new_authority):
    authority = new_authority("ours")
    chain, private_key = authority.issue()
    for name, content in (("CA.pem", authority.pem), ("server.pem", chain), ("server.key", private_key)):
        (tmp_path / name).write_bytes(content)

    def write_key(key):
        (tmp_path / "keys").write_text(f"sha256:{hashlib.sha256(key.encode()).hexdigest()} acme\n")

    write_key("first")
    files = (
        f"--tls-cert={tmp_path}/server.pem",
        f"--tls-key={tmp_path}/server.key",
        f"--api-keys-file={tmp_path}/keys",
    )
    flags = ("--port=0", "--admin-listen=off", "--kv-cache-memory-bytes=64M", *files)
    with serving(small_model, *flags, stdin=subprocess.DEVNULL) as (process, greeting):
        line = line_of(greeting, shlex.quote(sys.executable))
        assert "tls=Tls(" in line
        paste(f"cd {tmp_path}; {line.replace('YOUR_KEY', 'first')}")
        write_key("second")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        assert any("changed, and in use from now on" in logged for logged in process.stderr)
        paste(f"cd {tmp_path}; {line.replace('YOUR_KEY', 'second')}")
        process.terminate()
        assert process.wait(120) == 0


def test_without_files_and_terminal_sighup_ends_nothing(small_model):
    """`systemctl reload` sends it, also while the model loads."""
    flags = ("--port=0", "--admin-listen=off", "--kv-cache-memory-bytes=64M")
    with serving(small_model, *flags, stdin=subprocess.DEVNULL) as (process, greeting):
        process.send_signal(signal.SIGHUP)
        paste(line_of(greeting, shlex.quote(sys.executable)))
        process.terminate()
        assert process.wait(120) == 0


def test_sighup_while_the_model_loads_ends_nothing(small_model):
    flags = ("--port=0", "--admin-listen=off", "--kv-cache-memory-bytes=64M")
    pipe = subprocess.PIPE
    command = [PENSTOCK, "serve", small_model, *flags]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(": loading " in line for line in process.stderr)
        process.send_signal(signal.SIGHUP)
        assert " serves " in process.stdout.readline()
        process.terminate()
        process.communicate()
    assert process.returncode == 0


def test_a_port_in_use_is_reported_before_anything_is_loaded(greeting, capsys):
    port = target_of(greeting).rpartition(":")[2]
    assert serve.serve(["--port", port]) == 1
    said = capsys.readouterr().err
    assert said == f"penstock serve: --port 127.0.0.1:{port}: the port is in use; stop what uses it or choose another\n"


def test_the_printed_administration_answers(greeting):
    assert "PENSTOCK_API_KEY" not in greeting
    (top,) = (line.strip() for line in greeting.splitlines() if "penstock top" in line)
    assert json.loads(paste(f"{top} --once --json"))["state"] == "serving"


# What is wrong with a model -------------------------------------------------------------------------------------------


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


BAD_MODELS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "no directory": (shutil.rmtree, (), "no such directory"),
    "no config": (lambda d: (d / "config.json").unlink(), (), "config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), (), "config.json"),
    "unknown architecture": (
        lambda d: edit(d / "config.json", architectures=["Mamba"], model_type="mamba"),
        (),
        "Mamba",
    ),
    "missing shard": (lambda d: (d / SHARD_B).unlink(), (), SHARD_B),
    "truncated shard": (lambda d: truncate(d / SHARD_B), (), SHARD_B),
    "wrong dtype": (lambda d: write_shard(d / SHARD_B, {"model.norm.weight": [16]}, "I64", 8), (), SHARD_B),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), (), "tokenizer.json"),
    "no template": (lambda d: None, ("--chat-template", "/nowhere.jinja"), "/nowhere.jinja"),
    "no keys": (lambda d: None, ("--api-keys-file", "/nowhere"), "/nowhere"),
    "bad address": (lambda d: None, ("--host", "nowhere.invalid"), "--host nowhere.invalid:0"),
    "bad administration": (lambda d: None, ("--admin-listen", "50052"), "--admin-listen 50052: must be HOST:PORT"),
    "open administration": (
        lambda d: None,
        ("--admin-listen", "0.0.0.0:0"),
        "--admin-listen 0.0.0.0:0: anyone who reaches it could administer the service; give --api-keys-file",
    ),
    "a local model of a revision": (lambda d: None, ("--revision", "v1"), "--revision v1: "),
    "a name for a terminal": (
        lambda d: (d / "config.json").write_text(json.dumps({"architectures": ["\x1b]0;x\x07" + "y" * 10_000]})),
        (),
        "architectures",
    ),
    "a template without end": (
        lambda d: (d / "chat_template.jinja").write_text("{{ 'x' * 10**10 }}"),
        ("--kv-cache-memory-bytes=64M",),
        "chat_template.jinja: the chat template takes more than",
    ),
    "no tenants": (lambda d: None, ("--tenants-file", "/nowhere"), "--tenants-file /nowhere: cannot be read"),
    "bad flag": (lambda d: None, ("--max-num-seqs", "no"), "--max-num-seqs"),
    "unknown flag": (lambda d: None, ("--speed", "high"), "--speed"),
}
BAD_STARTS = {
    "too little memory": (("--kv-cache-memory-bytes", "1K"), "--kv-cache-memory-bytes"),
    "a device that is not there": (("--device", "cuda:77"), "--device"),
}


def one_line(said):
    """The only line besides those of the log: on one core, for instance, the backend reports how it uses it."""
    lines = [line for line in said.splitlines() if not any(word in line for word in ("loading", "SLOW", " INFO "))]
    assert len(lines) == 1, said
    assert lines[0].startswith("penstock serve: ")
    return lines[0]


@pytest.mark.parametrize("what", BAD_MODELS)
def test_what_is_wrong_is_one_line_that_names_it(what, small_model, tmp_path, capsys):
    damage, flags, named = BAD_MODELS[what]
    model = shutil.copytree(small_model, tmp_path / "model")
    damage(model)
    assert serve.serve([str(model), "--port", "0", *flags]) != 0
    said = capsys.readouterr()
    assert said.out == ""
    assert named in one_line(said.err)
    assert one_line(said.err).isprintable()
    assert len(one_line(said.err)) < 3000


@pytest.mark.parametrize("what", BAD_STARTS)
def test_what_the_worker_finds_wrong_is_one_line_too(what, small_model):
    flags, named = BAD_STARTS[what]
    done = subprocess.run(
        [PENSTOCK, "serve", small_model, "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert named in one_line(done.stderr)
