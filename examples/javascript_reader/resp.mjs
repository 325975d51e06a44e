// A connection to Redis in a few lines: commands go out as arrays, RESP2 comes back. It knows nothing of inferq.

import net from "node:net";

const SILENCE_MS = 15_000; // longer than any command here may block: a server that says nothing for so long is lost

/** What the server answered instead of a result; `code` is its first word, such as NOPERM. */
export class RedisError extends Error {
  constructor(message) {
    super(message);
    this.code = message.split(" ", 1)[0];
  }
}

/** The connection is gone, or was never there. Whether a command that met this was carried out is unknown. */
export class ConnectionLost extends Error {}

export class Connection {
  #socket;
  #received = Buffer.alloc(0);
  #waiting = [];
  #lost = null;

  /** `url` is redis://[user:password@]host[:port][/db] or unix://[user:password@]/path[?db=N]. */
  static async open(url) {
    const { hostname, port, pathname, username, password, protocol, searchParams } = new URL(url);
    const isUnix = protocol === "unix:";
    if (!isUnix && protocol !== "redis:") throw new TypeError(`no redis:// or unix:// address: ${protocol}//`);
    const host = hostname.replace(/^\[|\]$/g, "");
    const path = decodeURIComponent(pathname);
    const connection = new Connection(isUnix ? { path } : { host: host || "localhost", port: Number(port || 6379) });
    const user = username ? [decodeURIComponent(username)] : [];
    const db = searchParams.get("db") ?? (isUnix ? "" : path.slice(1));
    try {
      if (password) await connection.command("AUTH", ...user, decodeURIComponent(password));
      if (db) await connection.command("SELECT", db);
    } catch (error) {
      connection.close();
      throw error;
    }
    return connection;
  }

  constructor(address) {
    this.#socket = net.connect(address);
    this.#socket.setTimeout(SILENCE_MS, () => this.#socket.destroy(new Error("the server does not answer")));
    this.#socket.on("data", (chunk) => this.#receive(chunk));
    this.#socket.on("error", (error) => this.#lose(error.message));
    this.#socket.on("close", () => this.#lose("the connection was closed"));
  }

  /** The answer: a string, a number, null or an array of them. Throws RedisError or ConnectionLost. */
  command(...words) {
    return new Promise((resolve, reject) => {
      if (this.#lost) return reject(this.#lost);
      this.#waiting.push({ resolve, reject });
      const parts = words.map((word) => `$${Buffer.byteLength(String(word))}\r\n${word}\r\n`);
      this.#socket.write(`*${words.length}\r\n${parts.join("")}`);
    });
  }

  close() {
    this.#socket.destroy();
  }

  #lose(why) {
    this.#lost ??= new ConnectionLost(why);
    for (const { reject } of this.#waiting.splice(0)) reject(this.#lost);
  }

  #receive(chunk) {
    this.#received = Buffer.concat([this.#received, chunk]);
    try {
      let parsed;
      while ((parsed = parse(this.#received, 0))) {
        this.#received = this.#received.subarray(parsed.end);
        const { resolve, reject } = this.#waiting.shift();
        if (parsed.value instanceof RedisError) reject(parsed.value);
        else resolve(parsed.value);
      }
    } catch (error) {
      this.#socket.destroy(error);
    }
  }
}

/** The value that begins at `start` and where it ends; null while it has not come as a whole. */
function parse(bytes, start) {
  const lineEnd = bytes.indexOf("\r\n", start);
  if (lineEnd < 0) return null;
  const line = bytes.toString("utf8", start + 1, lineEnd);
  const end = lineEnd + 2;
  switch (String.fromCharCode(bytes[start])) {
    case "+":
      return { value: line, end };
    case "-":
      return { value: new RedisError(line), end };
    case ":":
      return { value: Number(line), end };
    case "$": {
      const size = Number(line);
      if (size < 0) return { value: null, end };
      if (bytes.length < end + size + 2) return null;
      return { value: bytes.toString("utf8", end, end + size), end: end + size + 2 };
    }
    case "*":
      return parseArray(bytes, end, Number(line));
    default:
      throw new TypeError("the server does not speak RESP2");
  }
}

function parseArray(bytes, start, count) {
  if (count < 0) return { value: null, end: start };
  const value = [];
  let end = start;
  for (let number = 0; number < count; number++) {
    const item = parse(bytes, end);
    if (!item) return null;
    value.push(item.value);
    end = item.end;
  }
  return { value, end };
}
