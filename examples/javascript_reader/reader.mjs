// Reads one request's stream as docs/wire.md says, in JavaScript without a package: an example for other languages.
//
//     node reader.mjs REDIS_URL REQUEST_ID [--position POSITION] [--json] [--prefix inferq]
//
// The text goes to standard output as it comes; with --json one event a line, each with its position. At the end, and
// at an interruption, the position stands on standard error: with --position another process goes on from there.

import net from "node:net";
import process from "node:process";

const BLOCK_MS = 5000;
const PER_READ = 500;
const TERMINAL = new Set(["finished", "failed"]);

/** A connection that speaks RESP2: commands in order, one reply each. */
class Redis {
  static async connect(url) {
    const { protocol, hostname, port, pathname, searchParams, username, password } = new URL(url);
    const address = protocol === "unix:" ? { path: decodeURIComponent(pathname) } : { host: hostname || "localhost", port: Number(port || 6379) };
    const socket = net.connect(address);
    await new Promise((resolve, reject) => socket.once("connect", resolve).once("error", reject));
    const redis = new Redis(socket);
    if (password) await redis.call("AUTH", ...(username ? [decodeURIComponent(username)] : []), decodeURIComponent(password));
    const database = protocol === "unix:" ? searchParams.get("db") : pathname.slice(1) || searchParams.get("db");
    if (database) await redis.call("SELECT", database);
    return redis;
  }

  constructor(socket) {
    this.socket = socket;
    this.waiting = [];
    this.bytes = Buffer.alloc(0);
    socket.on("data", (chunk) => this.#receive(chunk));
    socket.on("error", (error) => this.#fail(error));
    socket.on("close", () => this.#fail(new Error("the connection was closed")));
  }

  call(...words) {
    const parts = words.map((word) => `$${Buffer.byteLength(String(word))}\r\n${word}\r\n`);
    this.socket.write(`*${parts.length}\r\n${parts.join("")}`);
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  close() {
    this.socket.destroy();
  }

  #receive(chunk) {
    this.bytes = Buffer.concat([this.bytes, chunk]);
    for (let reply; (reply = parse(this.bytes, 0)) !== null; ) {
      this.bytes = this.bytes.subarray(reply.end);
      const { resolve, reject } = this.waiting.shift();
      reply.value instanceof Error ? reject(reply.value) : resolve(reply.value);
    }
  }

  #fail(error) {
    for (const { reject } of this.waiting.splice(0)) reject(error);
  }
}

/** The reply that begins at `at`, and where it ends; null while it is not all there. */
function parse(bytes, at) {
  const line = bytes.indexOf("\r\n", at);
  if (line < 0) return null;
  const kind = String.fromCharCode(bytes[at]);
  const rest = bytes.toString("utf8", at + 1, line);
  const end = line + 2;
  if (kind === "+") return { value: rest, end };
  if (kind === "-") return { value: new Error(rest), end };
  if (kind === ":") return { value: Number(rest), end };
  const length = Number(rest);
  if (length < 0) return { value: null, end };
  if (kind === "$") {
    if (bytes.length < end + length + 2) return null;
    return { value: bytes.toString("utf8", end, end + length), end: end + length + 2 };
  }
  const values = [];
  let next = end;
  for (let i = 0; i < length; i++) {
    const item = parse(bytes, next);
    if (item === null) return null;
    values.push(item.value);
    next = item.end;
  }
  return { value: values, end: next };
}

/** Entry ids are `epoch-n`, both larger than JavaScript's exact numbers may be. */
function compare(a, b) {
  const [x, y] = [a, b].map((id) => id.split("-").map(BigInt));
  return x[0] !== y[0] ? (x[0] < y[0] ? -1 : 1) : x[1] === y[1] ? 0 : x[1] < y[1] ? -1 : 1;
}

const epochOf = (id) => id.split("-")[0];

/** What a reader has of a request: the last entry, and for each choice the tokens and the code points. */
class Reader {
  constructor(redis, key, position) {
    const [entry, counts] = position.split(":");
    this.redis = redis;
    this.key = key;
    this.cursor = entry === "0" ? "0-0" : entry;
    this.latest = this.cursor; // the largest id that was read, also while the stream is read again
    this.had = (counts?.split(",") ?? []).map((each) => each.split(".").map(Number));
    this.counted = counts !== undefined || entry === "0"; // a plain entry id stands for what the stream holds up to it
    this.generation = null;
    this.ended = false;
  }

  get position() {
    const counts = this.had.map(([tokens, points]) => `${tokens}.${points}`).join(",");
    return counts ? `${this.cursor}:${counts}` : this.cursor;
  }

  async *events() {
    if (!this.counted) await this.#count();
    // A reader that comes back looks at everything: the stream behind its position may have been written anew.
    yield* this.#readAgain();
    while (!this.ended) {
      const reply = await this.redis.call("XREAD", "COUNT", PER_READ, "BLOCK", BLOCK_MS, "STREAMS", this.key, this.cursor);
      if (reply === null) {
        // Nothing came: did a failover take away what this reader has seen, or the job altogether?
        const [last] = await this.redis.call("XREVRANGE", this.key, "+", "-", "COUNT", 1);
        if (last === undefined) throw new Error("the request is not there any more");
        if (compare(last[0], this.cursor) < 0) yield* this.#readAgain();
        continue;
      }
      for (const [id, fields] of reply[0][1]) {
        const changed = epochOf(id) !== epochOf(this.cursor);
        const event = changed ? null : this.#take(id, fields, true);
        if (event === null) {
          yield* this.#readAgain();
          break;
        }
        if (event) yield event;
        if (this.ended) return;
      }
    }
  }

  /** After a gap, in another epoch, or behind its own position: the whole stream, of which it has a part already. */
  async *#readAgain() {
    const entries = await this.redis.call("XRANGE", this.key, "-", "+");
    if (entries.length === 0) throw new Error("the request is unknown, or not there any more");
    for (const [id, fields] of entries) {
      const event = this.#take(id, fields, false);
      if (event) yield event;
      if (this.ended) return;
    }
  }

  async #count() {
    for (const [, fields] of await this.redis.call("XRANGE", this.key, "-", this.cursor)) {
      const [, type, , data] = fields;
      if (type !== "delta") continue;
      const { choice = 0, index, at, text, token_ids } = JSON.parse(data);
      this.had[choice] = [index + token_ids.length, at + [...text].length];
    }
  }

  /** What an entry adds to what this reader has: an event, undefined for nothing, null where something is missing. */
  #take(id, fields, mayReadAgain) {
    const [, type, , data] = fields; // t, its value, d, its value; more may follow
    const event = { type, ...JSON.parse(data) };
    const isNew = compare(id, this.latest) > 0;
    if (isNew) this.latest = id;
    if (type === "queued") {
      if (this.generation !== null && this.generation !== event.generation) throw new Error("another request has taken this id");
      this.generation = event.generation;
    }
    if (type === "delta") {
      const { choice = 0, index, at } = event;
      const [tokens, points] = this.had[choice] ?? [0, 0];
      const text = [...event.text]; // by code points, as `at` counts
      if (index > tokens || at > points) {
        if (mayReadAgain) return null;
        throw new Error("the stream has a hole");
      }
      event.token_ids = event.token_ids.slice(tokens - index);
      event.text = text.slice(points - at).join("");
      this.had[choice] = [tokens + event.token_ids.length, Math.max(points, at + text.length)];
      Object.assign(event, { index: tokens, at: points });
      this.cursor = id;
      const adds = event.token_ids.length > 0 || event.text !== "" || (event.finish_reason && isNew);
      return adds ? event : undefined;
    }
    this.cursor = id;
    this.ended = TERMINAL.has(type);
    return isNew || this.ended ? event : undefined;
  }
}

const flags = process.argv.slice(2);
const flag = (name, fallback) => {
  const at = flags.indexOf(name);
  return at < 0 ? fallback : flags.splice(at, 2)[1];
};
const asJson = flags.includes("--json") && flags.splice(flags.indexOf("--json"), 1).length > 0;
const position = flag("--position", "0");
const prefix = flag("--prefix", "inferq");
const [url, requestId] = flags;
if (!url || !requestId) {
  console.error("usage: node reader.mjs REDIS_URL REQUEST_ID [--position POSITION] [--json] [--prefix inferq]");
  process.exit(2);
}

const redis = await Redis.connect(url);
const reader = new Reader(redis, `${prefix}:${requestId}:events`, position);
const farewell = () => console.error(`position ${reader.position}`);
process.on("SIGINT", () => (farewell(), process.exit(130)));
try {
  for await (const event of reader.events()) {
    if (asJson) process.stdout.write(`${JSON.stringify({ position: reader.position, ...event })}\n`);
    else if (event.type === "delta") process.stdout.write(event.text);
    if (event.type === "failed") process.exitCode = 1;
  }
  farewell();
} catch (error) {
  console.error(error.message);
  farewell();
  process.exitCode = 1;
} finally {
  redis.close();
}
