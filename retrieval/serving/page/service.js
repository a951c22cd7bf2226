// The service beside this page. A busy service is asked again, later each time; a newer question drops the older one.

const TRIES = 6;
const PATIENCE = 30_000; // milliseconds for one answer

let retrievers = [];
let limits = {};

class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

class Unreachable extends Error {}

const pause = (duration, signal) => new Promise((then, otherwise) => {
  const timer = setTimeout(then, duration);
  signal?.addEventListener("abort", () => { clearTimeout(timer); otherwise(signal.reason); }, { once: true });
});

async function ask(path, { body = null, signal = null } = {}) {
  for (let turn = 1; ; turn += 1) {
    const answer = await once(path, body, signal);
    if (answer.ok) return answer.json();
    if ((answer.status === 429 || answer.status === 503) && turn < TRIES) {
      const wanted = Number(answer.headers.get("Retry-After"));
      await pause((wanted > 0 ? Math.min(wanted * 1000, 5000) : 150 * 2 ** turn) * (1 + Math.random() / 4), signal);
      continue;
    }
    throw await refusal(answer);
  }
}

let tokenHere = null; // the token, where the browser stores nothing

function token() {
  try {
    return sessionStorage.getItem("quiver-token") ?? tokenHere;
  } catch {
    return tokenHere;
  }
}

function keepToken(given) {
  tokenHere = given;
  try {
    sessionStorage.setItem("quiver-token", given);
  } catch {
    // Storage is turned off: the token holds until the page is closed.
  }
}

async function once(path, body, signal) {
  const limit = AbortSignal.timeout(PATIENCE);
  const asked = { signal: signal ? AbortSignal.any([signal, limit]) : limit, headers: { Accept: "application/json" }, cache: "no-store" };
  if (token()) asked.headers.Authorization = `Bearer ${token()}`;
  if (body !== null) Object.assign(asked, { method: "POST", body: JSON.stringify(body) }).headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, asked);
  } catch (fault) {
    if (signal?.aborted) throw fault;
    throw new Unreachable(fault.name === "TimeoutError" ? "the service has not answered" : "the service cannot be reached");
  }
}

async function refusal(answer) {
  let said = null;
  try {
    said = (await answer.json()).error;
  } catch {
    // Not the service but something between it and this page has answered, with no JSON: the status says what there is to say.
  }
  const words = answer.status === 429 || answer.status === 503 ? "the service is busy" : `the service answered ${answer.status}`;
  return new Refusal(answer.status, said?.code ?? "unknown", said?.message ?? words);
}

async function learn(signal = null) {
  const info = await ask("v1/info", { signal });
  retrievers = info.retrievers;
  limits = info.limits ?? {};
}

const named = (name) => retrievers.find((each) => each.name === name) ?? retrievers[0];

const KINDS = { dense: "dense", colbert: "ColBERT", bm25: "BM25", fused: "fused", reranked: "re-ranked" };
const WAYS = { dense: "One vector per text", colbert: "One vector per token", bm25: "Words", fused: "Several rankings, fused", reranked: "Candidates, re-ranked" };

const kindOf = (retriever) => KINDS[retriever.kind] ?? retriever.kind;

// The field that hits are grouped by: passages name the file, or the row of a table, that they were cut from. Side by side nothing is grouped.
const GROUPS = ["file", "document"];
const groupField = (retriever) => (state.together ? null : GROUPS.find((field) => retriever?.fields?.[field]) ?? null);

const groupedBy = (retriever) => (state.grouped ? groupField(retriever) : null);

// A few answers are kept, for letters that are taken back; not for long, because an index changes.
const KEPT = 60;
const FRESH = 30_000;
const answers = new Map();

async function search(retriever, k, { explain = false, facets = false, signal = null } = {}) {
  const body = { query: state.query, k, retriever: retriever.name, filter: state.filters.length ? state.filters : null, explain };
  if (!state.together) body.offset = state.from;
  if (groupedBy(retriever)) body.group_by = groupedBy(retriever);
  if (facets) body.facets = facetFields(retriever);
  if (state.effort !== null && retriever.efforts?.includes(state.effort)) body.effort = state.effort;
  const key = JSON.stringify(body);
  const kept = answers.get(key);
  if (kept && performance.now() - kept.at < FRESH) return kept.answer;
  const begun = performance.now();
  const answer = await ask("v1/search", { body, signal });
  answer.roundTrip = performance.now() - begun;
  answers.set(key, { answer, at: performance.now() });
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return answer;
}
