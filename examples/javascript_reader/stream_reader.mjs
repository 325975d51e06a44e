// What a reader makes of stream entries, by the rules of docs/wire.md ("Reading"): each event once, each token and
// code point once, in order. No connection, no clock: entries go in, events come out.
//
// The stream may be written anew behind a reader's back: a worker lost its lease and another one went on, or a failover
// took back what was read already. So a reader trusts counts of tokens and code points, and reads the whole stream
// again whenever an entry could stand on something that it has not seen.

const EVENT_TYPES = new Set(["queued", "started", "prompt", "delta", "finished", "failed"]);
const TERMINAL_TYPES = new Set(["finished", "failed"]);
const MAX_CHOICES = 128;
const POSITION = /^(\d{1,20}-\d{1,20})(?::(\d{1,10}\.\d{1,10}(?:,\d{1,10}\.\d{1,10})*))?$/;
const START = parseId("0-0");

/** The stream is gone, lacks tokens, or cannot be read. */
export class JobLost extends Error {}

/** Another job has begun under the id. */
export class RequestReplaced extends Error {}

// Either half of an entry id may have 64 bits, more than a number holds exactly.
function parseId(text) {
  const [epoch, number] = text.split("-").map(BigInt);
  return { epoch, number, text };
}

/** Below 0 if `a` comes before `b`, 0 if they are the same, else above 0. */
function compare(a, b) {
  const difference = a.epoch - b.epoch || a.number - b.number;
  return difference < 0n ? -1 : Number(difference > 0n);
}

const isAfter = (a, b) => compare(a, b) > 0;
const isStart = (id) => compare(id, START) === 0;

/** The state of one reader. Read the entries after `cursor`, all of them in one command when `rereading`; feed them. */
export class StreamReader {
  #start; // the entry of the position that it began at
  #furthest; // the largest id that was ever processed
  #trusted = START; // up to here no entry can stand on something that was not seen
  #countingTo = START; // a plain entry id came without counts: what the stream holds up to it is counted, not yielded
  #had; // of each choice: tokens, and code points of its text
  #cursor;
  #generation = null;
  #hasPrompt = false;
  #endedChoices = new Set();
  rereading = false;
  done = false;

  /** `position` is 0, an entry id, or a position that a reader in any language gave. */
  constructor(position = "0") {
    const match = POSITION.exec(position === "0" ? "0-0:0.0" : position);
    if (!match) throw new TypeError(`not a position: ${position}`);
    const [, entry, counts] = match;
    this.#start = this.#furthest = this.#cursor = parseId(entry);
    this.#had = (counts ?? "0.0").split(",").map((each) => {
      const [tokens, points] = each.split(".").map(Number);
      return { tokens, points };
    });
    if (counts === undefined) {
      this.#countingTo = this.#start;
      this.#readAgain();
    }
  }

  get cursor() {
    return this.#cursor.text;
  }

  /** Yields { position, type, ... } for what is new among entries as XREAD answers them: [id, [field, value, ...]]. */
  *feed(entries) {
    const isWhole = isStart(this.#cursor);
    if (entries.length) {
      this.rereading = false;
      // One command read it, so that nothing can have changed between two of its entries.
      if (isWhole) this.#trusted = parseId(entries.at(-1)[0]);
    }
    for (const [text, fields] of entries) {
      const id = parseId(text);
      const event = readEvent(text, fields);
      if (event?.type === "queued") this.#checkGeneration(id, event);
      if (this.#mayStandOnSomethingUnseen(id, event)) {
        if (isWhole && !isAfter(id, this.#trusted)) throw new JobLost(`the stream lacks tokens before entry ${text}`);
        this.#readAgain();
        return;
      }
      const fresh = event && this.#newPart(id, event);
      this.#cursor = id;
      if (isAfter(id, this.#furthest)) this.#furthest = id;
      this.done = TERMINAL_TYPES.has(event?.type);
      if (fresh) yield { position: this.#position(), ...fresh };
      if (this.done) return;
    }
  }

  /** Look at the stream's last entry: at the beginning, after a lost connection, and when nothing came for a while. */
  tail(last) {
    if (!last) throw new JobLost("the stream is gone: it has expired, or Redis lost it");
    const order = compare(parseId(last[0]), this.#cursor);
    if (order < 0) this.#readAgain();
    else if (order === 0) this.done = TERMINAL_TYPES.has(fieldsOf(last[1]).t);
  }

  #position() {
    return `${this.cursor}:${this.#had.map(({ tokens, points }) => `${tokens}.${points}`).join(",")}`;
  }

  #readAgain() {
    this.#cursor = START;
    this.rereading = true;
  }

  /** A second `queued`: another job has taken the id. Reading again brings the first one again. */
  #checkGeneration(id, event) {
    if (this.#generation === null && (!isAfter(id, this.#start) || isStart(this.#start))) {
      this.#generation = event.generation;
    }
    if (this.#generation !== event.generation) throw new RequestReplaced("another job has begun under the id");
  }

  /** Another epoch means another owner, who may have gone on from a shorter stream; a gap means it outright. */
  #mayStandOnSomethingUnseen(id, event) {
    if (!isStart(this.#cursor) && id.epoch !== this.#cursor.epoch && isAfter(id, this.#trusted)) return true;
    if (event?.type !== "delta") return false;
    const had = this.#of(event.choice);
    return event.index > had.tokens || event.at > had.points;
  }

  /** What of the event the reader does not have yet, which it then has. */
  #newPart(id, event) {
    const isKnown = !isAfter(id, this.#countingTo);
    switch (event.type) {
      case "delta": {
        const rest = this.#rest(id, event);
        return isKnown ? null : rest;
      }
      case "prompt": {
        const isFirst = !this.#hasPrompt;
        this.#hasPrompt = true;
        return isFirst && isAfter(id, this.#start) ? event : null;
      }
      case "queued":
      case "started":
        return isAfter(id, this.#furthest) ? event : null;
      default:
        return isKnown ? null : event;
    }
  }

  #rest(id, delta) {
    const had = this.#of(delta.choice);
    const numTokens = had.tokens - delta.index;
    const points = [...delta.text].slice(had.points - delta.at); // a string's own index counts UTF-16 units
    const rest = {
      ...delta,
      index: had.tokens,
      at: had.points,
      text: points.join(""),
      token_ids: delta.token_ids.slice(numTokens),
    };
    if (delta.logprobs) rest.logprobs = delta.logprobs.slice(numTokens);
    if (this.#endedChoices.has(delta.choice)) delete rest.finish_reason;
    if (rest.finish_reason) this.#endedChoices.add(delta.choice);
    const isEnd = rest.finish_reason && isAfter(id, this.#start);
    if (!rest.token_ids.length && !points.length && !isEnd) return null;
    this.#had[delta.choice] = { tokens: had.tokens + rest.token_ids.length, points: had.points + points.length };
    return rest;
  }

  #of(choice) {
    while (this.#had.length <= choice) this.#had.push({ tokens: 0, points: 0 });
    return this.#had[choice];
  }
}

function fieldsOf(list) {
  return Object.fromEntries(Array.from({ length: list.length / 2 }, (_, n) => [list[2 * n], list[2 * n + 1]]));
}

/** The event of an entry; null for a type that is not known here. What is wrong with one is not repeated: it is text. */
function readEvent(id, list) {
  const { t: type, d: data } = fieldsOf(list);
  if (!EVENT_TYPES.has(type)) return null;
  try {
    const event = { choice: type === "delta" ? 0 : undefined, ...JSON.parse(data), type };
    if (type !== "delta" || isDelta(event)) return event;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  throw new JobLost(`entry ${id} cannot be read`);
}

function isDelta({ choice, index, at, text, token_ids: tokenIds }) {
  const areCounts = [choice, index, at].every((count) => Number.isSafeInteger(count) && count >= 0);
  return areCounts && choice < MAX_CHOICES && typeof text === "string" && Array.isArray(tokenIds);
}
