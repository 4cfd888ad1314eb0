"""HTTPS: a renewed certificate is served without a restart, a broken one is not."""

import asyncio
import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from penstock.clients.gateway.certificate import Certificate


def issue(folder, name):
    """A certificate that vouches for itself, and its key, in the two files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    end = begin + datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), begin, end)
    chain = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (folder / "chain.pem").write_bytes(chain)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(secret)
    return chain, secret


@pytest.fixture
async def listening(tmp_path):
    """A TLS listener with a certificate that is watched, and how to see who it says it is."""
    issue(tmp_path, "first")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    certificate = Certificate(context, tmp_path / "chain.pem", tmp_path / "key.pem")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def name():
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        shown = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.close()
        return shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value

    yield tmp_path, certificate, name
    server.close()
    await server.wait_closed()


async def test_a_renewed_certificate_is_served(listening):
    folder, certificate, name = listening
    assert await name() == "first"
    issue(folder, "second")
    assert await name() == "first"
    certificate.look()
    assert await name() == "first"  # another look tells whether all is written
    certificate.look()
    assert await name() == "second"


@pytest.mark.parametrize("broken", ["no PEM", "another's key", "gone"])
async def test_a_broken_one_is_told_once_and_the_last_good_one_stays(listening, broken, caplog):
    folder, certificate, name = listening
    _, first_key = issue(folder, "first")
    certificate.look()
    certificate.look()
    issue(folder, "second")
    if broken == "no PEM":
        (folder / "chain.pem").write_text("nothing")
    elif broken == "gone":
        (folder / "key.pem").unlink()
    else:
        (folder / "key.pem").write_bytes(first_key)
    certificate.look()
    certificate.look()
    certificate.look()
    certificate.look()
    assert await name() == "first"
    assert caplog.text.count("the certificate from before stays in use") == 1
    issue(folder, "third")
    certificate.look()
    certificate.look()
    assert await name() == "third"
