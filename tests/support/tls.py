"""TLS by a server of Redis' own, and before one that speaks none, with a certificate for `localhost` alone.

The key guards nothing: it is published here, and stands for a certificate that only tests trust.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from inferq.engine.lifeline import spawn_bound

from .sentinel import free_port
from .servers import wait_for_server

CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBmDCCAT+gAwIBAgIUKARfgKUJfqlYwKfxrv9RWmIdFz4wCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLaW5mZXJxIHRlc3QwIBcNMjYxMTMwMDM0NDE3WhgPMjEyNjEx
MDYwMzQ0MTdaMBYxFDASBgNVBAMMC2luZmVycSB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEvq1gwD7bxmNWKIVNzH1Fdl5mjLXLU1FwwwJ5Yj9e4KdmNS3G
gshgSvNAk1xev2j9AHcvH6J0adJ8JcM9SYK2vKNpMGcwHQYDVR0OBBYEFGKHpgTN
UccF5+bohC4MoM4U+uQ4MB8GA1UdIwQYMBaAFGKHpgTNUccF5+bohC4MoM4U+uQ4
MBQGA1UdEQQNMAuCCWxvY2FsaG9zdDAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49
BAMCA0cAMEQCIAEn8xbSbaKtB5bMMx/xfTMgo05k2bLJGWisaAKwVkXDAiBj6y90
SZs2ecuonWV7rexqgskxPxMyHrqZ+X1ZVqoYtg==
-----END CERTIFICATE-----
"""

_KEY: Final = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIDaYa+nkBvE+S5mokpSkjAkftL0cHg/ER0Zz5hbA5Am4oAoGCCqGSM49
AwEHoUQDQgAEvq1gwD7bxmNWKIVNzH1Fdl5mjLXLU1FwwwJ5Yj9e4KdmNS3Ggshg
SvNAk1xev2j9AHcvH6J0adJ8JcM9SYK2vA==
-----END EC PRIVATE KEY-----
"""


@asynccontextmanager
async def encrypted(socket: Path, folder: Path, *, ask_client: bool = False) -> AsyncIterator[int]:
    """A port of this host where TLS leads to a unix socket; with `ask_client` only for who shows the certificate.

    In the folder are `cert.pem`, which clients may trust and show, and `key.pem`.
    """
    _write_files(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "cert.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    if ask_client:
        context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def speaks_tls(binary: str | None = shutil.which("redis-server")) -> bool:
    """Whether Redis is installed, and built with TLS."""
    if binary is None:
        return False
    tried = subprocess.run([binary, "--port", "0", "--tls-port", "0"], capture_output=True, check=False, timeout=20)
    return b"not listen anywhere" in tried.stdout


@contextmanager
def tls_server(folder: Path, *options: str) -> Iterator[int]:
    """The port of a Redis that listens by TLS alone, and to those only who show the certificate. Files as above."""
    _write_files(folder)
    port, certificate = free_port(), str(folder / "cert.pem")
    command = ["redis-server", "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--tls-cert-file", certificate, "--tls-key-file", str(folder / "key.pem")]
    command += ["--tls-ca-cert-file", certificate, "--save", "", "--unixsocket", str(folder / "s.sock"), *options]
    process = spawn_bound(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_server(f"unix://{folder}/s.sock", process)
        yield port
    finally:
        process.kill()
        process.wait()


def _write_files(folder: Path) -> None:
    (folder / "cert.pem").write_text(CERTIFICATE, encoding="utf-8")
    (folder / "key.pem").write_text(_KEY, encoding="utf-8")


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
    finally:
        target.close()
