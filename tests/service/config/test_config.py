"""The flags of ``penstock serve``: named as they should be, checked once, from the command line, the environment, a
file or Python."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.scheduler.policy import Policy
from penstock.service.config.command_line import PREFIX, parse_config
from penstock.service.config.flags import ConfigError, read_environment
from penstock.service.config.serve_config import ServeConfig

AS_IN_VLLM = [
    *("--block-size", "--chat-template", "--config", "--dtype", "--enable-prefix-caching", "--gpu-memory-utilization"),
    *("--host", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--load-format", "--max-model-len"),
    *("--max-num-batched-tokens", "--max-num-seqs", "--model", "--no-enable-prefix-caching", "--port"),
    *("--quantization", "--scheduling-policy", "--tensor-parallel-size"),
    *("--revision", "--served-model-name"),
]


def test_without_arguments_it_is_the_demo_model_on_loopback():
    config = parse_config([])
    assert config == ServeConfig()
    assert (config.model, config.address, config.model_name) == ("demo", "127.0.0.1:50051", "demo")


def test_flags_become_fields():
    line = (
        "org/model --host :: --port=8033 --max-num-seqs 7 --no-enable-prefix-caching --kv-cache-memory-bytes 512M "
        "--dtype float32 --chat-template ~/t.jinja --scheduling-policy priority --shutdown-grace 1.5"
    )
    config = parse_config(line.split())
    assert config.model == config.model_name == "org/model"
    assert config.address == "[::]:8033"
    assert config.max_num_seqs == 7
    assert config.enable_prefix_caching is False
    assert config.kv_cache_memory_bytes == 512 << 20
    assert config.chat_template == Path("~/t.jinja").expanduser()
    assert config.shutdown_grace == 1.5


def test_the_help_has_every_flag_its_default_and_examples(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_config(["--help"])
    assert leaving.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    start = text.index("the model:")
    for field in dataclasses.fields(ServeConfig):
        flag = "MODEL" if field.name == "model" else f"--{field.name.replace('_', '-')}"
        described = text[next(re.finditer(rf"{flag}[ ,]", text[start:])).start() + start :]
        assert "(default:" in described[:300], flag
    assert "penstock serve Qwen/Qwen3-0.6B" in text
    assert "one line per key: sha256:HEX TENANT" in text
    assert 'echo "sha256:$(printf %s "$KEY" | sha256sum | cut -c-64) some-tenant" >> keys' in text
    for flag in AS_IN_VLLM:
        assert flag in text


BAD = {
    "--port x": "--port: must be a whole number; it is 'x'",
    "--port 65536": "--port: must be 0 to 65,535; it is 65,536",
    "--port": "--port: expected one argument",
    "--dtype int8": "--dtype: must be auto, float32, bfloat16, float16 or float64; it is 'int8'",
    "--block-size 32": "--block-size: must be 16; it is 32",
    "--quantization fp4": (
        "--quantization: must be none, int8, int4, fp8, gptq, awq, compressed-tensors, mxfp4 or modelopt; it is 'fp4'"
    ),
    "--kv-cache-dtype fp4": "--kv-cache-dtype: must be auto, float32, bfloat16, float16, int8 or fp8; it is 'fp4'",
    "--max-num-seqs 0": "--max-num-seqs: must be 1 to 4,096; it is 0",
    "--max-model-len 1": "--max-model-len: must be 2 to 16,777,216; it is 1",
    "--gpu-memory-utilization nan": "--gpu-memory-utilization: must be 0.01 to 1.0; it is nan",
    "--gpu-memory-utilization 90": "--gpu-memory-utilization: must be 0.01 to 1.0; it is 90",
    "--kv-cache-memory-bytes 1.5G": "--kv-cache-memory-bytes: must be a number of bytes, such as 512M; it is '1.5G'",
    "--scheduling-policy lifo": "--scheduling-policy: must be fcfs, priority, deadline or fair; it is 'lifo'",
    "--target-itl nan": "--target-itl: must be 0 to 60,000; it is nan",
    "--explain-requests -1": "--explain-requests: must be 0 to 100,000; it is -1",
    "--shutdown-grace -1": "--shutdown-grace: must be 0 to 86,400; it is -1",
    "--listen unix:/x --port 1": "--listen: already sets the host and the port; leave --host and --port out",
    "--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1G": "--kv-cache-memory-bytes: already sets the KV",
    "--host-kv-cache-bytes 1.5G": "--host-kv-cache-bytes: must be a number of bytes, such as 512M; it is '1.5G'",
    "--host-kv-cache-bytes 1G --no-enable-prefix-caching": "--host-kv-cache-bytes: needs prefix caching; leave",
    "--model a b": "--model: the model is given twice, as 'b' too; leave one",
    "--max-num-seq 5": "no such flag or argument: --max-num-seq; did you mean --max-num-seqs?; penstock serve",
    "--device tpu": "--device: must be auto, cpu, cuda or cuda:N; it is 'tpu'",
    "--device cuda:1 --tensor-parallel-size 2": "--device: cuda:1 is one GPU, but --tensor-parallel-size 2 needs 2",
    "--device cuda:1 --pipeline-parallel-size 3": "--device: cuda:1 is one GPU, but --pipeline-parallel-size 3 needs 3",
    "--tensor-parallel-size 65": "--tensor-parallel-size: must be 1 to 64; it is 65",
    "--device cuda:": "--device: must be auto, cpu, cuda or cuda:N; it is 'cuda:'",
    "demo more --max-num-seq 5": "no such flag or argument: more --max-num-seq 5; did you mean --max-num-seqs?",
    "--host 0.0.0.0:80": "--host: must be a host name or an IP address, and --port the port; it is '0.0.0.0:80'",
    "--host=": "--host: must be a host name or an IP address, and --port the port; it is ''",
    "--host unix:/x": "--host: must be a host; for a Unix socket, give --listen unix:/x instead",
    "--http-host [::1]:80": "--http-host: must be a host name or an IP address, and --http-port the port; it is",
    "--config /nowhere/x.yaml": "--config /nowhere/x.yaml: cannot be read (No such file or directory)",
}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tls-cert=c"], "--tls-cert: needs --tls-key as well: set both or neither"),
        (["--tls-key=k"], "--tls-key: needs --tls-cert as well: set both or neither"),
        (["--tls-client-ca=a"], "--tls-client-ca: needs --tls-cert and --tls-key as well"),
        (["--tls-cert=c", "--tls-key=k", "--listen=unix:/run/s"], "--tls-cert: a Unix socket has no TLS"),
        (["--jwt-jwks-file=j", "--jwt-issuer=i"], "--jwt-jwks-file: needs --jwt-audience as well"),
        (["--jwt-jwks-file=j"], "--jwt-jwks-file: needs --jwt-issuer and --jwt-audience as well"),
        (["--jwt-issuer=i"], "--jwt-issuer: needs --jwt-jwks-file or --jwt-jwks-url as well"),
        (["--jwt-jwks-file=j", "--jwt-jwks-url=https://id"], "--jwt-jwks-url: the keys come from --jwt-jwks-file"),
        (["--jwt-jwks-url=http://id/j"], "--jwt-jwks-url: must be a URL such as https://id.example/jwks.json"),
        (["--jwt-jwks-url=https://u:p@id/j"], "--jwt-jwks-url: must be a URL such as https://id.example/jwks.json"),
        (["--jwt-jwks-url=https://id/j"], "--jwt-jwks-url: needs --jwt-issuer and --jwt-audience as well"),
        (["--jwt-audience=a"], "--jwt-audience: needs --jwt-jwks-file or --jwt-jwks-url as well"),
        (["--http-host=::"], "--http-host: needs --http-port as well"),
        (["--jwt-leeway=301"], "--jwt-leeway: must be 0 to 300; it is 301"),
    ],
)
def test_flags_of_tls_and_tokens_go_together(flags, problem):
    with pytest.raises(ConfigError) as error:
        parse_config(flags)
    assert str(error.value).startswith(problem)


def test_an_ipv6_host_may_be_in_brackets():
    assert parse_config(["--host", "[::1]"]).address == parse_config(["--host", "::1"]).address == "[::1]:50051"


@pytest.mark.parametrize("arguments", [["--" + "a" * 100_000], ["--port", "a" * 100_000], ["x"] * 50_000])
def test_an_endless_argument_is_not_echoed(arguments):
    with pytest.raises(ConfigError) as error:
        parse_config(arguments)
    assert len(str(error.value)) < 2500


@pytest.mark.parametrize("arguments", BAD)
def test_a_bad_flag_is_named_with_what_would_be_right(arguments):
    with pytest.raises(ConfigError) as caught:
        parse_config(arguments.split())
    assert str(caught.value).startswith(BAD[arguments])
    assert "\n" not in str(caught.value)


def test_python_is_checked_as_the_command_line_is():
    with pytest.raises(ConfigError, match="--max-num-seqs: must be 1 to 4,096; it is 0"):
        ServeConfig(max_num_seqs=0)
    with pytest.raises(ConfigError, match="--port: must be a whole number; it is '80'"):
        ServeConfig(port="80")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MODEL: is empty"):
        ServeConfig(model="")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"

    def write(text):
        path.write_text(text)
        return ["--config", str(path)]

    return write


def test_a_file_has_the_flags_as_keys_and_the_command_line_wins(file):
    arguments = file(
        "model: mine\nmax-num-seqs: 64\nmax_num_batched_tokens: 512\nenable-prefix-caching: false\n"
        "kv-cache-memory-bytes: 2G\nshutdown-grace: 3\nport: 1\n"
    )
    config = parse_config([*arguments, "--port", "2"])
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == ("mine", 64, 512)
    assert (config.enable_prefix_caching, config.kv_cache_memory_bytes, config.shutdown_grace) == (False, 2 << 30, 3.0)
    assert config.port == 2
    assert parse_config([*arguments, "theirs", "--listen", "unix:/x"]).address == "unix:/x"
    assert parse_config([*file("listen: unix:/x\n"), "--port", "7"]).address == "127.0.0.1:7"
    assert parse_config(file("")) == ServeConfig()


def test_the_command_line_overrides_equivalent_settings_from_elsewhere(file):
    share, size = ("--gpu-memory-utilization", "0.5"), ("--kv-cache-memory-bytes", "1G")
    config = parse_config([*file("gpu-memory-utilization: 0.7\n"), *size])
    assert (config.gpu_memory_utilization, config.kv_cache_memory_bytes) == (None, 1 << 30)
    config = parse_config([*file("kv-cache-memory-bytes: 2G\n"), *share])
    assert (config.gpu_memory_utilization, config.kv_cache_memory_bytes) == (0.5, None)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: already sets the KV cache's size"):
        parse_config([*file("kv-cache-memory-bytes: 2G\n"), *share, *size])
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: already sets the KV cache's size"):
        parse_config(file("kv-cache-memory-bytes: 2G\ngpu-memory-utilization: 0.7\n"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "max-num-sequences: 5",
            "max-num-sequences is not a flag; did you mean max-num-seqs?; penstock serve --help lists them",
        ),
        ("max_num_seq: 5", "max_num_seq is not a flag; did you mean max-num-seqs?; penstock serve --help lists them"),
        ("1: 5", "1 is not a flag; penstock serve --help lists them"),
        ("port: many", "port: must be a whole number; it is 'many'"),
        ("port: 1.5", "port: must be a whole number; it is '1.5'"),
        ("port: true", "port: must be a whole number; it is True"),
        ("dtype: [float32]", "dtype: must be auto, float32, bfloat16, float16 or float64; it is ['float32']"),
        ("enable-prefix-caching: 1", "enable-prefix-caching: must be true or false; it is 1"),
        ("- port", "must contain keys and values"),
        ("a: b: c", "is not valid YAML"),
        ("config: other.yaml", "config is not a flag"),
    ],
)
def test_a_bad_file_is_named_with_its_key(file, text, problem):
    with pytest.raises(ConfigError) as caught:
        parse_config(file(text))
    assert problem in str(caught.value)
    assert "serve.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def value_of(field):
    """A value of a flag, as text and as Python has it; not the default, if there are others."""
    kinds = get_args(field.type) or (field.type,)
    low, choices = field.metadata["low"], field.metadata["choices"]
    if bool in kinds:
        return str(not field.default).upper(), not field.default
    if choices is not None:
        return str(choices[-1]), choices[-1]
    for kind in (int, float):
        if kind in kinds:
            value = kind((low or 0) + 1)
            return str(value), value
    return ("/x", Path("/x")) if Path in kinds else ("text", "text")


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda field: field.name)
def test_the_environment_sets_every_flag(field):
    text, value = value_of(field)
    name = f"PENSTOCK_SERVE_{field.name.upper()}"
    assert read_environment({name: text, "PENSTOCK_SERVED": "x"}, PREFIX, ServeConfig, "") == (
        {field.name: value},
        None,
    )
    assert read_environment({name: ""}, PREFIX, ServeConfig, "") == ({}, None)


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(file):
    [_, path] = file("port: 1\nmax-num-seqs: 1\nmax-num-batched-tokens: 512\n")
    environment = {
        "PENSTOCK_SERVE_CONFIG": path,
        "PENSTOCK_SERVE_PORT": "2",
        "PENSTOCK_SERVE_MAX_NUM_SEQS": "2",
        "PENSTOCK_SERVE_ENABLE_PREFIX_CACHING": "off",
    }
    config = parse_config(["--port=3"], environment)
    assert (config.port, config.max_num_seqs, config.max_num_batched_tokens) == (3, 2, 512)
    assert config.enable_prefix_caching is False
    assert parse_config(file("port: 1"), {"PENSTOCK_SERVE_LISTEN": "unix:/x"}).address == "unix:/x"
    assert parse_config(["--port=3"], {"PENSTOCK_SERVE_LISTEN": "unix:/x"}).address == "127.0.0.1:3"
    other = file("port: 4\n")
    assert parse_config(other, {"PENSTOCK_SERVE_CONFIG": "/nowhere.yaml"}).port == 4


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("MAX_NUM_SEQ", "5", "PENSTOCK_SERVE_MAX_NUM_SEQ in the environment is not a flag"),
        ("MAX_NUM_SEQ", "5", "; did you mean PENSTOCK_SERVE_MAX_NUM_SEQS?; penstock serve --help lists them"),
        ("PORT", "many", "PENSTOCK_SERVE_PORT in the environment: must be a whole number; it is 'many'"),
        ("PORT", "tcp://10.0.0.1:50051", "set enableServiceLinks: false in the pod's spec"),
        ("PORT", "70000", "--port: must be 0 to 65,535; it is 70,000"),
        ("TRACE_ALL", "1", "is not a flag"),
        ("ENABLE_PREFIX_CACHING", "maybe", "must be true, false, 1, 0, on, off, yes or no; it is 'maybe'"),
    ],
)
def test_a_bad_variable_is_named(name, text, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_config([], {f"PENSTOCK_SERVE_{name}": text})


def test_a_bound_holds_in_a_file_too(file):
    with pytest.raises(ConfigError, match="--port: must be 0 to 65,535; it is 70,000"):
        parse_config(file("port: 70000"))


def test_a_models_name_for_clients(tmp_path):
    (tmp_path / "tiny").mkdir()
    assert parse_config([str(tmp_path / "tiny")]).model_name == "tiny"
    assert parse_config(["Qwen/Qwen3-0.6B"]).model_name == "Qwen/Qwen3-0.6B"
    assert parse_config(["demo", "--served-model-name", "x"]).model_name == "x"


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ([], Policy.FCFS),
        (["--api-keys-file=keys"], Policy.FAIR),
        (["--tenants-file=tenants.yaml"], Policy.FAIR),
        (["--jwt-jwks-file=keys.json", "--jwt-issuer=i", "--jwt-audience=a"], Policy.FAIR),
        (["--api-keys-file=keys", "--scheduling-policy=fcfs"], Policy.FCFS),
        (["--scheduling-policy=deadline"], Policy.DEADLINE),
    ],
)
def test_tenants_take_turns_by_default_where_there_are_any(arguments, policy):
    assert parse_config(arguments).policy is policy
