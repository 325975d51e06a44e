"""TLS before a server that speaks none: a certificate for `localhost` alone, and who ends the encryption.

The key guards nothing: it is published here, and stands for a certificate that only tests trust.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

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
    (folder / "cert.pem").write_text(CERTIFICATE, encoding="utf-8")
    (folder / "key.pem").write_text(_KEY, encoding="utf-8")
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


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
    finally:
        target.close()
