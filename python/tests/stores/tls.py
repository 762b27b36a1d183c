"""A server's TLS for tests: an authority that signs certificates, and a front that speaks TLS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import pathlib
import select
import socket
import socketserver
import ssl
import threading
import urllib.parse
from typing import ClassVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates.

    Attributes:
        file: its own certificate, in PEM, alone in its directory.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder, self.file = folder, folder / "trusted" / "authority.pem"
        self.file.parent.mkdir(parents=True)
        self._name, self._key = _name("ringstow's tests"), ec.generate_private_key(ec.SECP256R1())
        own = _builder(self._name, self._key, self._name, DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._write(self.file, own.sign(self._key, hashes.SHA256()))

    def certify(self, host: str = "127.0.0.1", valid: datetime.timedelta = DAY) -> pathlib.Path:
        """Return a file with a certificate for a host, and its key."""
        key, file = ec.generate_private_key(ec.SECP256R1()), self._folder / f"{host}.pem"
        builder = _builder(_name(host), key, self._name, valid)
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host)]), critical=False)
        self._write(file, builder.sign(self._key, hashes.SHA256()))
        with file.open("ab") as end:
            end.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
        return file

    @staticmethod
    def _write(file: pathlib.Path, certificate: x509.Certificate) -> None:
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


class Front:
    """Speaks TLS to clients, and passes what they say to a server. Use it as a context.

    Attributes:
        url: where it answers.
    """

    def __init__(self, upstream: str, certificate: pathlib.Path):
        """Start it in front of a server's URL, with a certificate and its key."""
        where = urllib.parse.urlsplit(upstream)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        attributes = {"upstream": (where.hostname, where.port), "context": context}
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Connection,), attributes))
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def connections(self) -> int:
        """Return how many connections came."""
        return self._server.count

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    count = 0

    def process_request(self, *args: object) -> None:
        self.count += 1
        super().process_request(*args)  # type: ignore[arg-type]


class _Connection(socketserver.BaseRequestHandler):
    upstream: ClassVar[tuple[str, int]]
    context: ClassVar[ssl.SSLContext]

    def handle(self) -> None:
        """Pass bytes on in both directions until a side closes."""
        with contextlib.suppress(OSError):
            client = self.context.wrap_socket(self.request, server_side=True)
            with client, socket.create_connection(self.upstream) as server:
                while _pass_on(client, server):
                    pass


def _pass_on(client: ssl.SSLSocket, server: socket.socket) -> bool:
    """Pass on what has come; return whether both sides are open."""
    ready = [client] if client.pending() else select.select([client, server], [], [])[0]
    for source in ready:
        data = source.recv(1 << 16)
        if not data:
            return False
        (server if source is client else client).sendall(data)
    return True


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    """Return a certificate that is valid until this long from now, and not signed yet."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - 10 * DAY).not_valid_after(now + valid)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
