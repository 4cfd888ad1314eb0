"""The flags of several hosts, and the files that they name."""

import os
import stat

import pytest

from penstock.clients.host.reloaded_files import FileError
from penstock.models.checkpoint.digest import CheckpointDigest
from penstock.service.app.prepare import prepare
from penstock.service.config.addresses import Address, ListenError
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.hosts.command import WorkerCommand, make_parser, run_worker
from penstock.service.hosts.credentials import JoinCredentials
from penstock.service.hosts.host_model import HostChoices
from penstock.service.hosts.leader import new_leader, open_leader

TWO = ("--nnodes=2", "--tensor-parallel-size=2")

WRONG = {
    ("--nnodes=0",): "--nnodes: must be 1 to 64; it is 0",
    ("--nnodes=2",): "--nnodes 2: must divide the number of ranks, which is 1: --tensor-parallel-size 1 times",
    ("--nnodes=2", "--tensor-parallel-size=3"): "--nnodes 2: must divide the number of ranks, which is 3",
    ("--nnodes=4", "--tensor-parallel-size=2"): "--nnodes 4: must divide the number of ranks, which is 2",
    ("--node-rank=1",): "--node-rank: is for several hosts; give --nnodes 2 or more, or leave --node-rank out",
    ("--join-token-file=token",): "--join-token-file: is for several hosts",
    ("--master-port=1",): "--master-port: is for several hosts",
    (*TWO, "--node-rank=2"): "--node-rank: must be below --nnodes, which is 2; it is 2",
    (*TWO, "--node-rank=1", "--join-allow=10.0.0.0/8"): "--join-allow: is the leader's; leave it out with",
    (*TWO, "--node-rank=1", "--join-timeout=5"): "--join-timeout: is the leader's",
    (*TWO, "--node-rank=1", "--master-port=0"): "--master-port: 0 is any free port, for the leader only",
    (*TWO, "--master-addr="): "--master-addr: is empty",
    (*TWO, "--join-allow=10.0.0.1/8"): "--join-allow: '10.0.0.1/8' is not a network (10.0.0.1/8 has host bits set)",
    (*TWO, "--join-allow=,"): "--join-allow: names no network",
    (*TWO, "--join-tls-ca=ca"): "--join-tls-ca: needs --join-tls-cert and --join-tls-key as well: set all",
    (*TWO, "--join-tls-key=key", "--join-tls-cert=cert"): "--join-tls-cert: needs --join-tls-ca as well",
    (*TWO, "--collective-interface=eth77"): "--collective-interface: this machine has no network interface 'eth77'",
    (*TWO, "--join-timeout=0"): "--join-timeout: must be 1 to 86,400; it is 0",
}  # fmt: skip


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
def test_wrong_flags_are_named(flags):
    with pytest.raises(ConfigError) as caught:
        parse_config(flags)
    assert str(caught.value).startswith(WRONG[flags])


def test_ranks_are_divided_among_the_hosts():
    assert parse_config([]).ranks_per_node == 1
    config = parse_config(["--nnodes=2", "--tensor-parallel-size=2", "--pipeline-parallel-size=2"])
    assert config.ranks_per_node == 2


def config_with(tmp_path, content=b"x" * 32, mode=0o600, *flags):
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(mode)
    return parse_config([*TWO, f"--join-token-file={tmp_path / 'token'}", *flags])


def test_a_token_is_the_files_content_without_white_space(tmp_path, caplog):
    assert JoinCredentials.load(config_with(tmp_path, b" " + b"x" * 32 + b"\n")).token == b"x" * 32
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"x" * 31 + b"\n", "must have at least 32 bytes, and has 31; make one with: openssl rand -hex 32"),
        (b"", "must have at least 32 bytes, and has 0"),
        (b"x" * 4097, "has more than 4096 bytes; is it the right file?"),
    ],
)
def test_a_file_that_is_no_token_is_named(tmp_path, content, problem):
    with pytest.raises(FileError) as caught:
        JoinCredentials.load(config_with(tmp_path, content))
    assert str(caught.value).startswith(f"--join-token-file {tmp_path / 'token'}: {problem}")


def test_a_missing_token_is_named(tmp_path):
    config = parse_config([*TWO, f"--join-token-file={tmp_path / 'none'}"])
    with pytest.raises(FileError, match=r"--join-token-file .*none: cannot be read \(No such file or directory\)"):
        JoinCredentials.load(config)


def test_a_token_that_others_may_read_is_warned_of(tmp_path, caplog, monkeypatch):
    config = config_with(tmp_path, mode=0o640)
    JoinCredentials.load(config)
    assert caplog.text == "", "the group is that of the process"
    monkeypatch.setattr(os, "getegid", lambda: (tmp_path / "token").stat().st_gid + 1)
    JoinCredentials.load(config)
    assert "token: other users of this machine may read it; run: chmod 600 " in caplog.text
    assert "xxx" not in caplog.text


def test_certificates_that_cannot_be_used_are_named(tmp_path, new_authority):
    authority = new_authority("ours")
    chain, key = authority.issue()
    _, another = authority.issue()
    for name, content in (("ca", authority.pem), ("crt", chain), ("key", key), ("another", another), ("bad", b"x")):
        (tmp_path / name).write_bytes(content)
    for files, problem in (
        (("bad", "crt", "key"), "--join-tls-ca .*bad: cannot be used"),
        (("none", "crt", "key"), "--join-tls-ca .*none: cannot be read"),
        (
            ("ca", "crt", "another"),
            "--join-tls-cert .*crt with --join-tls-key .*another: cannot be used .key values mism",
        ),
        (("ca", "crt", "none"), "--join-tls-key .*none: cannot be read"),
    ):
        with pytest.raises(FileError, match=problem):
            JoinCredentials.read(None, *(tmp_path / name for name in files), is_leader=True)


def test_a_leader_that_others_can_reach_needs_a_token_or_tls(tmp_path):
    with pytest.raises(ListenError, match=r"--master-addr 0.0.0.0: anyone who can reach this address could join"):
        prepare(parse_config([*TWO, "--master-addr=0.0.0.0"]))
    assert JoinCredentials.load(config_with(tmp_path, b"x" * 32, 0o600, "--master-addr=0.0.0.0")).token
    assert JoinCredentials.load(parse_config([*TWO])).token is None  # only this machine
    follower = parse_config([*TWO, "--node-rank=1", "--master-addr=10.0.0.1"])
    assert JoinCredentials.load(follower).token is None  # it does not listen


async def test_the_leader_prints_what_the_other_hosts_run(tmp_path):
    config = config_with(tmp_path, b"x" * 32, 0o600, "--master-port=0")
    leader = new_leader(config, JoinCredentials.load(config), CheckpointDigest())
    line = await open_leader(leader, config)
    try:
        assert line == (
            f"waits for other hosts on 127.0.0.1:{leader.port}; on the other host run: penstock worker --join "
            f"127.0.0.1:{leader.port} --join-token-file FILE"
        )
        taken = parse_config([*TWO, f"--master-port={leader.port}"])
        second = new_leader(taken, JoinCredentials.load(taken), CheckpointDigest())
        with pytest.raises(ListenError, match=r"--master-addr and --master-port .*: cannot listen there \(.*in use\)"):
            await open_leader(second, taken)
    finally:
        await leader.close()


def test_a_workers_flags_are_named(capsys):
    for flags, problem in (
        ([], "the following arguments are required: --join"),
        (["--join", "leader"], "--join: must be HOST:PORT with a port of 1 to 65535; it is 'leader'"),
        (["--join", "leader:0"], "--join: must be HOST:PORT"),
        (["--join", "unix:/a"], "--join: must be HOST:PORT"),
        (["--join", "leader:1", "--node-rank", "0"], "--node-rank: expected a number above 0, got 0"),
        (["--join", "leader:1", "--tokenfile", "a"], "unrecognized arguments: --tokenfile"),
    ):
        with pytest.raises(SystemExit) as caught:
            make_parser().parse_args(flags)
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err


def test_a_worker_joins_no_other_machine_without_a_token_or_tls(capsys):
    choices = HostChoices()
    command = WorkerCommand(Address("10.0.0.1", 29501), -1, None, (None, None, None), {}, choices)
    assert run_worker(command) == 1
    assert capsys.readouterr().err.startswith(
        "penstock worker: the leader 10.0.0.1:29501: whatever answers there could"
    )


def test_a_token_file_is_made_as_the_help_says(tmp_path):
    line = next(line for line in make_parser().format_help().splitlines() if "openssl" in line)
    assert os.system(f"cd {tmp_path} && {line}") == 0
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    token = JoinCredentials.read(tmp_path / "token", None, None, None, is_leader=False).token
    assert token is not None
    assert len(token) == 64
