// Searching: a little after the last letter, the latest question only, again when the service is back.

const REST = 110; // milliseconds from the last letter to the question
const LOOK = 220; // and on to the question which tokens met

let timer = 0;
let running = null;
let looking = 0;
let away = 0; // how often the service could not be reached

// Whatever changes but the page leads to the first page.
function changed({ entry = false, wait = 0, page = false } = {}) {
  if (!page) state.from = 0;
  writeAddress({ entry });
  drawControls();
  clearTimeout(timer);
  timer = setTimeout(run, wait);
}

async function run() {
  clearTimeout(timer);
  clearTimeout(looking);
  running?.abort();
  if (!state.query.trim() || !retrievers.length) {
    running = null;
    busy(false);
    rest();
    return;
  }
  const own = running = new AbortController();
  busy(true);
  const asked = shownRetrievers();
  const most = Math.min(limits.k ?? Infinity, ...asked.map((each) => each.depth ?? Infinity));
  const k = Math.min(state.together ? DEPTH : FIRST, most);
  state.from = Math.min(state.from, Math.max(0, most - k));
  const found = await Promise.allSettled(asked.map((each) => search(each, k, { signal: own.signal, facets: !state.together })));
  if (own !== running) return;
  busy(false);
  shown.clear();
  found.forEach((each, place) => { if (each.status === "fulfilled") shown.set(asked[place].name, each.value); });
  const faults = found.filter((each) => each.status === "rejected").map((each) => each.reason);
  drawFound(faults);
  if (!faults.some((fault) => fault instanceof Unreachable)) away = 0;
  explainSoon(LOOK);
}

function drawFound(faults) {
  drawNotices(faults);
  drawResults();
  drawFacets();
  drawFigures();
  if (state.open !== null) drawReader();
  markOpen();
  const [first] = shown.values();
  if (shown.size === 1 && !state.together) say(`${plural(first.hits.length, "result")} in ${milliseconds(first.milliseconds.total)}`);
  else if (shown.size) say([...shown].map(([name, each]) => `${visible(name)}: ${plural(each.hits.length, "result")}`).join(", "));
  if ([...shown].some(([name, each]) => each.generation !== named(name).generation)) learnAgain();
}

// A new generation of the index: other documents, perhaps other fields.
async function learnAgain() {
  answers.clear();
  try {
    await learn();
    drawControls();
  } catch (fault) {
    if (!(fault instanceof Unreachable || fault instanceof Refusal)) throw fault;
  }
}

function explainSoon(wait) {
  clearTimeout(looking);
  looking = setTimeout(() => explainShown(running), wait);
}

// Which tokens met, for the lists in shades and for the document that is read.
async function explainShown(own) {
  const read = state.open === null ? null : named(state.retriever);
  const wanted = shownRetrievers().filter((each) => each.explains && shown.has(each.name) && (each.parts?.length || (state.heat && each.kind === "colbert") || each === read));
  for (const retriever of wanted) {
    const answer = shown.get(retriever.name);
    const depth = Math.min(answer.hits.length, limits.explained ?? Infinity, state.together ? Math.max(FIRST, read ? DEPTH : 0) : Infinity);
    if (!depth || answer.hits.slice(0, depth).every((hit) => hit.explanation)) continue;
    try {
      const explained = await search(retriever, depth, { explain: true, signal: own?.signal });
      if (own !== running || shown.get(retriever.name) !== answer) return;
      const reasons = new Map(explained.hits.map((hit) => [hit.id, hit.explanation]));
      for (const hit of answer.hits) hit.explanation ??= reasons.get(hit.id) ?? null;
      drawResults({ glides: false });
      if (state.open !== null) drawReader();
      markOpen();
    } catch (fault) {
      if (own?.signal.aborted) return;
      drawNotices([fault]);
    }
  }
}

function busy(on) {
  byId("busy").classList.toggle("on", on);
  byId("results").setAttribute("aria-busy", String(on));
}

function drawFigures() {
  const [answer] = shown.values();
  byId("figures").replaceChildren();
  if (!answer || (!answer.hits.length && !state.together)) return;
  if (state.together) {
    const deepest = Math.max(...[...shown.values()].map((each) => each.hits.length));
    byId("figures").append(`First ${plural(Math.min(deepest, FIRST), "result")} of ${plural(shown.size, "ranking")}, compared over the first ${number(deepest)}`);
    return;
  }
  const { encode, search: searched, total } = answer.milliseconds;
  const [retriever] = shownRetrievers();
  const part = (name, value) => {
    const made = element("i", { class: name });
    made.style.setProperty("--share", `${total > 0 ? (100 * value) / total : 0}%`);
    return made;
  };
  byId("figures").append(element("span", {}, counted(answer, retriever)),
    element("span", { class: "latency" }, element("b", {}, milliseconds(total)), element("span", { class: "split", "aria-hidden": "true" }, part("encode", encode), part("search", searched)),
      element("span", {}, `${encode < 0.05 ? "" : `encode ${milliseconds(encode)}, `}search ${milliseconds(searched)}`)),
    element("span", {}, `${milliseconds(answer.roundTrip)} round trip`));
}

function counted(answer, retriever) {
  const all = answer.matching ?? retriever.documents;
  const last = state.from + answer.hits.length;
  const shownHere = answer.hits.length === 1 ? number(last) : `${number(state.from + 1)}\u2013${number(last)}`;
  // A list may end before the documents do: BM25 ranks those that share a word with the query.
  const ends = answer.hits.length < FIRST && last < all ? `${plural(last, "result")} in ` : "";
  const documents = `${plural(all, "document")}${state.filters.length ? ` that ${all === 1 ? "passes" : "pass"} the filters` : ""}`;
  return `${shownHere} of ${ends}${documents}${groupedBy(retriever) ? `, one per ${groupedBy(retriever)}` : ""}`;
}

function notice(kind, words, button = null) {
  return element("div", { class: `notice ${kind}`, role: kind === "fault" ? "alert" : "status" }, element("p", {}, words), button);
}

function drawNotices(faults) {
  const made = [];
  const locked = faults.some((fault) => fault.status === 401);
  if (locked) made.push(tokenForm());
  const lost = faults.find((fault) => fault instanceof Unreachable);
  if (lost) {
    const wait = Math.min(15, 2 ** (away += 1));
    made.push(notice("lost", `No answer: ${lost.message}. This page keeps trying.`, again()));
    clearTimeout(timer);
    timer = setTimeout(comeBack, wait * 1000);
  }
  const refused = new Set(faults.filter((fault) => fault !== lost && fault.status !== 401 && !(fault instanceof Unreachable)).map((fault) => fault.message));
  for (const message of refused) made.push(notice("fault", visible(message), state.filters.length ? unfiltered() : again()));
  if ([...shown.values()].some((answer) => answer.partial)) made.push(notice("part", "A part of the index was not searched: documents may be missing."));
  // Side by side only: one ranking is compared with nothing.
  const [first, ...rest] = state.together ? retrievers.filter((each) => each.warning) : [];
  const same = rest.length ? `; the same holds for ${rest.map(({ name }) => `'${visible(name)}'`).join(" and ")}` : "";
  if (first) made.push(notice("part", `${visible(first.warning)}${same}.`));
  byId("notices").replaceChildren(...made);
  if (locked) byId("token").focus();
}

// A service that asks for a token to read: it is kept until the tab is closed.
function tokenForm() {
  const input = element("input", { id: "token", type: "password", autocomplete: "off" });
  const submit = async (event) => {
    event.preventDefault();
    keepToken(input.value.trim());
    await comeBack();
    if (!input.isConnected && !byId("token")) byId("query").focus();
  };
  return element("form", { class: `notice lock${token() ? " fault" : ""}`, onsubmit: submit },
    element("p", { role: "alert" }, token() ? "The service does not accept this token." : "Reading needs the token of this service."),
    element("label", {}, element("span", {}, "Token"), input), element("button", { type: "submit", class: "tool firm" }, "Open"));
}

const unfiltered = () => element("button", { type: "button", class: "tool", onclick: () => { state.filters = []; changed({ entry: true }); } }, "Without filters");

const again = () => element("button", { type: "button", class: "tool", onclick: comeBack }, "Try again");

async function comeBack() {
  clearTimeout(timer);
  answers.clear();
  await begin();
}

async function begin() {
  try {
    await learn();
  } catch (fault) {
    if (!(fault instanceof Unreachable || fault instanceof Refusal)) throw fault;
    drawNotices([fault]);
    return;
  }
  away = 0;
  drawNotices([]);
  drawControls();
  await run();
}

// Nothing is asked: what there is to search.
function rest() {
  shown.clear();
  byId("figures").replaceChildren();
  byId("notices").replaceChildren();
  byId("facets").hidden = true;
  const list = retrievers.map((each) => element("li", { "data-kind": each.kind }, element("h2", {}, element("span", { class: "dot", "aria-hidden": "true" }), retrieverName(each.name)),
    element("p", {}, `${WAYS[each.kind] ?? visible(each.kind)} \u00b7 ${plural(each.documents, "document")}`), element("p", { class: "model" }, others(each.model))));
  byId("results").replaceChildren(element("div", { class: "welcome" }, element("p", { class: "lead" }, "Results appear as you type."),
    element("ul", {}, list), element("p", { class: "hint" }, element("kbd", {}, "/"), " to type a query, ", element("kbd", {}, "j"), " ", element("kbd", {}, "k"), " to go through the results, ",
      element("kbd", {}, "?"), " for all keys")));
  byId("layout").classList.remove("together");
  if (state.open !== null) drawReader();
}
