"""A proxy before a server that breaks connections: who has sent a command does not learn whether it was executed.

It may have been, and a whole reply is lost or the end of one; or it may not have come that far. Where it breaks is
drawn from a seed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


@dataclass
class CuttingProxy:
    """Passes everything on to the unix socket `behind`.

    While it is `armed` one in `one_in` commands is lost, and of the others one in `one_in` replies.
    """

    url: str
    behind: Path
    one_in: int
    draws: random.Random
    armed: bool = False
    lost_commands: Counter[str] = field(default_factory=Counter)  #: by name
    lost_replies: Counter[str] = field(default_factory=Counter)  #: by the name of the command that came last
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self.connections[connection] = writer
        connection.add_done_callback(self.connections.pop)

    async def close(self) -> None:
        """Returns when no connection is left. None is cancelled: each closes what it has opened."""
        for writer in self.connections.values():
            writer.close()
        await asyncio.gather(*self.connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(self.behind)
        commands: list[str] = []
        ways = [
            asyncio.create_task(self._pass_commands(reader, to_server, commands)),
            asyncio.create_task(self._pass_replies(from_server, writer, commands)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)  # each may have met an end that was closed
        for end in (writer, to_server):
            end.close()
            with suppress(OSError):
                await end.wait_closed()

    async def _pass_replies(
        self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: list[str]
    ) -> None:
        while replies := await from_server.read(_CHUNK_BYTES):
            if self._breaks():
                self.lost_replies[commands[-1]] += 1
                writer.write(replies[: self.draws.choice([0, self.draws.randrange(len(replies))])])
                return  # what was written still goes out when the connection is closed
            writer.write(replies)
            await writer.drain()

    async def _pass_commands(
        self, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter, commands: list[str]
    ) -> None:
        """Note the name of each command, or of the first of several; the rest of a long one has none."""
        while sent := await reader.read(_CHUNK_BYTES):
            if sent.startswith(b"*"):
                commands.append(sent.split(b"\r\n", 3)[2].decode().lower())
            if self._breaks():
                self.lost_commands[commands[-1]] += 1
                return
            to_server.write(sent)
            await to_server.drain()

    def _breaks(self) -> bool:
        return self.armed and self.draws.randrange(self.one_in) == 0


@asynccontextmanager
async def cutting_proxy(behind: str, *, one_in: int, seed: object) -> AsyncIterator[CuttingProxy]:
    """A proxy before the server of the URL `behind`, a unix socket's."""
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        socket = Path(folder) / "proxy.sock"
        proxy = CuttingProxy(f"unix://{socket}", Path(behind.removeprefix("unix://")), one_in, random.Random(str(seed)))
        server = await asyncio.start_unix_server(proxy.accept, socket)
        try:
            yield proxy
        finally:
            server.close()
            await proxy.close()
            await server.wait_closed()
