// The page: asks /v1 for a stream and shows each token, shaded if it came from a draft.
import { Acceptance, eventsOf } from "./reading.js";

const at = (id) => document.getElementById(id);
const WORDS = { eos: "end token", stop: "stop text", length: "limit", cancelled: "stopped", timeout: "time limit" };
let model = null;
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    at("key-label").hidden = false;
    at("status").textContent = "the server asks for a key";
    return;
  }
  model = (await response.json()).data[0];
  at("model").textContent = model.id;
  at("status").textContent = "ready";
  const choices = [...Array(model.max_draft_tokens + 1).keys()].map(String).concat(["auto"]);
  const select = at("draft-tokens");
  select.replaceChildren(new Option("default", ""), ...choices.map((value) => new Option(value, value)));
}

function bodyOf() {
  const chosen = at("draft-tokens").value;
  const body = {
    model: model.id,
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    stream: true,
    speculative_stats: true,
  };
  if (chosen) body.draft_tokens = chosen === "auto" ? chosen : Number(chosen);
  const text = at("prompt").value;
  return at("chat").checked ? { ...body, messages: [{ role: "user", content: text }] } : { ...body, prompt: text };
}

function showPieces(pieces) {
  for (const piece of pieces) {
    const span = document.createElement("span");
    // Never as markup: what a model says is text.
    span.textContent = piece.text;
    if (piece.drafted) span.className = "drafted";
    at("answer").append(span);
  }
}

function showFigures(seen) {
  at("tokens").textContent = seen.acceptance.tokens;
  if (seen.first === null) return;
  at("first").textContent = `${(seen.first - seen.sent).toFixed(0)} ms`;
  const seconds = (seen.newest - seen.first) / 1000;
  if (seconds > 0) at("speed").textContent = ((seen.acceptance.tokens - seen.firstCount) / seconds).toFixed(1);
  at("per-cycle").textContent = seen.acceptance.perCycle?.toFixed(2) ?? "–";
  at("share").textContent = `${(100 * seen.acceptance.share).toFixed(0)} %`;
  showPositions("Drafts kept, by position, of all cycles so far", seen.acceptance.byPosition);
}

function showPositions(title, rates) {
  at("positions-title").textContent = title;
  const rows = rates.map((rate, position) => {
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = position + 1;
    const bar = document.createElement("meter");
    bar.value = rate ?? 0;
    const value = document.createElement("td");
    value.textContent = rate === null ? "–" : rate.toFixed(3);
    row.append(name, document.createElement("td"), value);
    row.children[1].append(bar);
    return row;
  });
  at("positions").replaceChildren(...rows);
}

function showChunk(chunk, seen) {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const choice of chunk.choices) {
    const pieces = choice.pieces ?? [];
    if (pieces.length) {
      seen.newest = performance.now();
      if (seen.first === null) [seen.first, seen.firstCount] = [seen.newest, pieces.length];
      seen.acceptance.add(pieces);
      showPieces(pieces);
    }
    if (choice.finish_reason) at("reason").textContent = WORDS[choice.stop_reason] ?? choice.finish_reason;
  }
  showFigures(seen);
  if (chunk.speculative_stats) {
    showPositions("Drafts kept, by position, of those proposed", chunk.speculative_stats.acceptance_by_position);
    at("per-cycle").textContent = chunk.speculative_stats.emitted_per_cycle?.toFixed(2) ?? "–";
  }
}

async function generate() {
  running = new AbortController();
  const seen = { sent: performance.now(), first: null, firstCount: 0, newest: null, acceptance: new Acceptance() };
  const path = at("chat").checked ? "v1/chat/completions" : "v1/completions";
  const options = { method: "POST", headers: headers(), body: JSON.stringify(bodyOf()), signal: running.signal };
  const response = await fetch(path, options);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const data of eventsOf(response.body)) {
    if (data !== "[DONE]") showChunk(JSON.parse(data), seen);
  }
}

function begin() {
  for (const id of ["answer", "positions"]) at(id).replaceChildren();
  for (const id of ["speed", "first", "per-cycle", "share", "reason"]) at(id).textContent = "–";
  at("tokens").textContent = "0";
  at("error").hidden = true;
  at("send").disabled = true;
  at("stop").disabled = false;
  at("status").textContent = "generating";
}

async function submit(event) {
  event.preventDefault();
  if (running) return;
  begin();
  try {
    if (!model) await connect();
    if (model) await generate();
    at("status").textContent = model ? "ready" : "the server asks for a key";
  } catch (error) {
    if (error.name === "AbortError") {
      at("reason").textContent = WORDS.cancelled;
      at("status").textContent = "ready";
    } else {
      at("error").textContent = error.message;
      at("error").hidden = false;
      at("status").textContent = "the request failed";
    }
  } finally {
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

at("form").addEventListener("submit", submit);
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", () => connect().catch(() => {}));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
connect().catch(() => { at("status").textContent = "the server does not answer"; });
