"""Hosts that join with certificates of the cluster's own authority."""

import ssl

import pytest
from hosts.agents import joining, leading, new_agent
from waiting import until

from penstock.models.executor.join.refusal import JoinRefused
from penstock.service.hosts.credentials import JoinCredentials


@pytest.fixture
def contexts(tmp_path, new_authority):
    """A leader's and an agent's, and those of another authority."""
    made = []
    for name in ("ours", "theirs"):
        authority = new_authority(name)
        chain, key = authority.issue()
        paths = [tmp_path / f"{name}.{kind}" for kind in ("ca", "crt", "key")]
        for path, content in zip(paths, (authority.pem, chain, key), strict=True):
            path.write_bytes(content)
        made += [JoinCredentials.read(None, *paths, is_leader=is_leader).tls for is_leader in (True, False)]
    return made


async def test_both_sides_show_certificates(contexts):
    ours, agents, *_ = contexts
    async with leading(tls=ours, token=None) as leader, joining(new_agent(leader.port, tls=agents, token=None)):
        await leader.gather()


async def test_a_token_and_certificates_go_together(contexts, caplog):
    ours, agents, *_ = contexts
    async with leading(tls=ours) as leader:
        with pytest.raises(JoinRefused, match="wrong token"):
            await new_agent(leader.port, tls=agents, token=b"x" * 32).run()
        await until(lambda: "127.0.0.1: wrong token" in caplog.text)


async def test_a_leader_with_a_strangers_certificate_is_named_on_both_sides(contexts, caplog):
    ours, _, _, strangers = contexts
    async with leading(tls=ours) as leader:
        with pytest.raises(
            JoinRefused, match=r"no TLS connection: self.signed certificate in certificate chain; check"
        ):
            await new_agent(leader.port, tls=strangers).run()
        await until(lambda: "127.0.0.1: no TLS connection: the other side ended it; its log has" in caplog.text)


@pytest.mark.parametrize("shown", ["theirs", None])
async def test_an_agent_without_our_certificate_is_named_on_both_sides(contexts, tmp_path, caplog, shown):
    ours, *_ = contexts
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(tmp_path / "ours.ca")
    if shown is not None:
        tls.load_cert_chain(tmp_path / f"{shown}.crt", tmp_path / f"{shown}.key")
    why = "unable to get local issuer certificate" if shown else "peer did not return a certificate"
    async with leading(tls=ours) as leader, joining(new_agent(leader.port, tls=tls)):
        await until(lambda: f"127.0.0.1: no TLS connection: {why}" in caplog.text)
        await until(lambda: "perhaps it refuses the certificate of --join-tls-cert; its log has the" in caplog.text)


async def test_a_certificate_with_another_name_is_refused(contexts):
    ours, agents, *_ = contexts
    async with leading(tls=ours, host="127.0.0.2") as leader:
        with pytest.raises(JoinRefused, match=r"no TLS connection: .*127.0.0.2.*leader's certificate has this name"):
            await new_agent(leader.port, tls=agents, host="127.0.0.2").run()


async def test_tls_to_a_plain_port_is_named_on_both_sides(contexts, caplog):
    _, agents, *_ = contexts
    async with leading() as leader:
        with pytest.raises(
            JoinRefused, match="the leader does not use TLS: give --join-tls-ca, -cert and -key to both"
        ):
            await new_agent(leader.port, tls=agents).run()
        await until(lambda: "the agent uses TLS, and the leader does not: give --join-tls-ca, " in caplog.text)


async def test_no_tls_to_a_port_with_tls_is_named_on_both_sides(contexts, caplog):
    ours, *_ = contexts
    async with leading(tls=ours) as leader:
        with pytest.raises(JoinRefused, match="the agent uses no TLS, and the leader does: give --join-tls-ca"):
            await new_agent(leader.port).run()
        await until(lambda: "127.0.0.1: the agent uses no TLS, and the leader does" in caplog.text)
