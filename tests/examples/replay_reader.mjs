// Plays transcripts of a reader to the JavaScript one: a line of JSON in for each, a line of JSON out with what it did.

import { createInterface } from "node:readline";
import { StreamReader } from "../../examples/javascript_reader/stream_reader.mjs";

function play({ position, calls }) {
  const reader = new StreamReader(position);
  return calls.map((call) => {
    const items = [];
    try {
      if ("tail" in call) reader.tail(call.tail);
      else {
        const found = reader.feed(call.feed);
        for (let next; items.length !== call.take && !(next = found.next()).done; ) items.push(next.value);
      }
    } catch (error) {
      return { items, error: error.constructor.name };
    }
    return { items, cursor: reader.cursor, rereading: reader.rereading, done: reader.done };
  });
}

for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(play(JSON.parse(line))));
