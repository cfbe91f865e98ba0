// What needs no document: events of a stream, and acceptance out of tokens.

// Data of server-sent events, which may be cut anywhere, in the middle of a character too.
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) yield event.slice("data: ".length);
  }
  if (held) throw new Error("the connection broke off");
}

// A cycle ends with the target's own token. The first token of an answer belongs to no cycle.
export class Acceptance {
  tokens = 0;
  cycles = 0;
  drafted = 0;
  kept = [];
  #run = 0;

  add(pieces) {
    for (const piece of pieces) {
      this.tokens += 1;
      if (piece.drafted) {
        this.drafted += 1;
        this.#run += 1;
      } else if (this.tokens > 1) {
        this.cycles += 1;
        for (let position = 0; position < this.#run; position += 1) {
          this.kept[position] = (this.kept[position] ?? 0) + 1;
        }
        this.#run = 0;
      }
    }
  }

  get byPosition() { return this.kept.map((count) => count / this.cycles); }
  get perCycle() { return this.cycles ? (this.tokens - 1 - this.#run) / this.cycles : null; }
  get share() { return this.tokens ? this.drafted / this.tokens : 0; }
}
