// Reads the answer of one request, from its start or from a position, as lines of JSON:
//
//     node read.mjs redis://localhost:6379 ID [POSITION]
//
// Zero exit: the request has ended, however. It only reads: any number of readers may be there, and each may begin
// anywhere. Needs Node 18 or newer and no package.

import { realpathSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { Connection, ConnectionLost, RedisError } from "./resp.mjs";
import { JobLost, StreamReader } from "./stream_reader.mjs";

const BLOCK_MS = 5000; // about a lease: when nothing came for so long, something may have happened to the job
const ENTRIES_PER_READ = 500;
const PATIENCE_MS = 60_000; // a server that cannot be reached for so long is given up
const PAUSES_MS = [50, 1000]; // between attempts to reach it: the first, the longest
const PASSING = new Set(["LOADING", "MASTERDOWN", "TRYAGAIN"]); // what a server says that will be there soon

/** Nothing is known under the id. */
export class UnknownRequest extends Error {}

/** The events of a request behind a position, each with the position right after it; ends after the terminal one. */
export async function* read(url, requestId, position = "0", prefix = "inferq") {
  const reader = new StreamReader(position);
  const source = new Source(url, requestId, prefix);
  try {
    while (!reader.done) yield* reader.feed(await source.next(reader));
  } finally {
    source.close();
  }
}

class Source {
  #connection = null;
  #hasLooked = false; // at the stream's end, since the last time that nothing came
  #wasSeen = false; // whether the stream was ever there
  #isWaiting = false; // whether a job without a stream was there

  constructor(url, requestId, prefix) {
    this.url = url;
    this.events = `${prefix}:${requestId}:events`;
    this.payload = `arq:job:${requestId}`;
  }

  /** The next entries for the reader; none when it is done, or when it is to be asked again. */
  async next(reader) {
    const end = Date.now() + PATIENCE_MS;
    for (let pause = PAUSES_MS[0]; ; pause = Math.min(2 * pause, PAUSES_MS[1])) {
      try {
        this.#connection ??= await Connection.open(this.url);
        return await this.#read(reader);
      } catch (error) {
        const mayPass = error instanceof ConnectionLost || (error instanceof RedisError && PASSING.has(error.code));
        this.close();
        if (!mayPass || Date.now() > end) throw error;
        await sleep(pause * (0.5 + Math.random() / 2));
      }
    }
  }

  close() {
    this.#connection?.close();
    this.#connection = null;
    this.#hasLooked = false;
  }

  async #read(reader) {
    if (!this.#hasLooked) {
      await this.#look(reader);
      if (reader.done) return [];
      this.#hasLooked = true;
    }
    const count = reader.rereading ? [] : ["COUNT", ENTRIES_PER_READ]; // one command must read the whole stream again
    const block = ["BLOCK", BLOCK_MS, "STREAMS", this.events, reader.cursor];
    const answer = await this.#connection.command("XREAD", ...count, ...block);
    this.#hasLooked = answer !== null;
    this.#wasSeen ||= answer !== null;
    return answer ? answer[0][1] : [];
  }

  async #look(reader) {
    const [last] = await this.#connection.command("XREVRANGE", this.events, "+", "-", "COUNT", 1);
    if (last || this.#wasSeen) {
      reader.tail(last);
      this.#wasSeen = true;
    } else if (await this.#connection.command("EXISTS", this.payload)) {
      this.#isWaiting = true; // a plain arq producer's job has no stream before a worker takes it
    } else if (this.#isWaiting) {
      throw new JobLost("the job was gone before a worker took it");
    } else {
      throw new UnknownRequest("nothing is known under this id");
    }
  }
}

async function main([url, requestId, position]) {
  if (!requestId) {
    console.error("usage: node read.mjs URL ID [POSITION]");
    return 2;
  }
  try {
    for await (const event of read(url, requestId, position)) console.log(JSON.stringify(event));
    return 0;
  } catch (error) {
    console.error(`${error.constructor.name}: ${error.message}`);
    return 1;
  }
}

const [, program] = process.argv;
if (program && import.meta.url === pathToFileURL(realpathSync(program)).href) process.exitCode = await main(process.argv.slice(2));
