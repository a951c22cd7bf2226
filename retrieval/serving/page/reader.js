// The document that is read: beside its list where there is room, over the page where there is none.

let reading = null; // what is fetched for it
let returnTo = null; // the card it was opened from

const roomy = matchMedia("(min-width: 64rem)");

const overPage = () => state.together || !roomy.matches;

function openDocument(id, retriever, { entry = true } = {}) {
  const first = state.open === null;
  state.open = id;
  state.retriever = retriever;
  returnTo = { id, retriever };
  writeAddress({ entry: entry && first });
  drawControls();
  drawReader({ focus: true });
  markOpen();
  explainSoon(0);
}

function closeDocument() {
  if (state.open === null) return;
  state.open = null;
  reading?.abort();
  writeAddress({ entry: true });
  drawReader();
  markOpen();
  const card = returnTo && cardOf(returnTo.id, returnTo.retriever);
  (card?.querySelector(".title") ?? byId("query")).focus({ preventScroll: true });
}

function markOpen() {
  for (const each of cards()) {
    const open = each.dataset.document === state.open && each.dataset.retriever === (state.retriever ?? retrievers[0]?.name);
    each.classList.toggle("open", open);
    if (open) each.querySelector(".title").setAttribute("aria-current", "true");
    else each.querySelector(".title").removeAttribute("aria-current");
  }
}

function drawReader({ focus = false } = {}) {
  const [pane, sheet] = [byId("pane"), byId("sheet")];
  const over = overPage();
  const host = over ? sheet : pane;
  (over ? pane : sheet).replaceChildren();
  pane.hidden = over || state.open === null;
  byId("layout").classList.toggle("reads", !pane.hidden);
  if ((!over || state.open === null) && sheet.open) sheet.close();
  if (state.open === null) {
    host.replaceChildren();
    return;
  }
  const had = host.contains(document.activeElement) ? document.activeElement.dataset.control : null;
  fillReader(host);
  const opened = over && !sheet.open;
  if (opened) sheet.showModal();
  if (focus || opened) {
    host.scrollTop = 0;
    host.querySelector("h2")?.focus({ preventScroll: true });
  } else if (had) host.querySelector(`[data-control="${had}"]`)?.focus({ preventScroll: true });
}

function fillReader(host) {
  const retriever = named(state.retriever);
  const answer = shown.get(retriever.name);
  const hit = answer?.hits.find((each) => each.id === state.open);
  if (hit) host.replaceChildren(...readerOf(hit, retriever, answer));
  else fetchDocument(host, retriever);
}

// A document that the list does not have: the address names it.
async function fetchDocument(host, retriever) {
  reading?.abort();
  const own = reading = new AbortController();
  const id = state.open;
  host.replaceChildren(readerBar(null, retriever), element("p", { class: "none" }, "One moment\u2026"));
  try {
    const path = `v1/documents/${encodeURIComponent(id)}?retriever=${encodeURIComponent(retriever.name)}`;
    const hit = await ask(path, { signal: own.signal });
    if (state.open === id) host.replaceChildren(...readerOf({ ...hit, score: null, explanation: null }, retriever, null));
  } catch (fault) {
    if (own.signal.aborted) return;
    host.replaceChildren(readerBar(null, retriever), element("p", { class: "none" }, fault.status === 404 ? "There is no such document." : `${visible(fault.message)}.`));
  }
}

function readerBar(rank, retriever) {
  const place = rank === null ? others(retriever.name) : element("span", {}, `Rank ${rank} in `, others(retriever.name));
  const hits = shown.get(retriever.name)?.hits ?? [];
  const neighbour = (way) => hits[hits.findIndex((hit) => hit.id === state.open) + way];
  const step = (way, name, path) => element("button", { type: "button", class: "tool icon", "data-control": name, "aria-label": name, disabled: !neighbour(way), onclick: () => stepDocument(way) }, drawing(path));
  return element("div", { class: "reader-bar" }, element("p", { "data-kind": retriever.kind }, element("span", { class: "dot", "aria-hidden": "true" }), place),
    rank === null ? null : [step(-1, "Previous result", "m6 15 6-6 6 6"), step(1, "Next result", "m6 9 6 6 6-6")],
    element("button", { type: "button", class: "tool icon", "data-control": "Close", "aria-label": "Close", onclick: closeDocument }, drawing("M6 6l12 12M18 6 6 18")));
}

function drawing(path) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("aria-hidden", "true");
  made.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  made.firstChild.setAttribute("d", path);
  return made;
}

function readerOf(hit, retriever, answer) {
  const { heading, text, from } = parts(hit);
  const rank = answer ? rankOf(answer, hit.id) : null;
  const heat = meetingsOf(hit);
  const body = element("div", { class: "reading" },
    element("h2", { tabindex: "-1", dir: "auto" }, visible(heading)),
    element("p", { class: "facts" }, element("span", { class: "id" }, others(hit.id)),
      hit.score === null ? null : element("span", {}, element("span", { class: "field" }, "score "), scoreText(hit.score, 0))),
    tags(hit), standings(hit), heat ? readerHeat(heat, hit) : readerText(text, from, hit, wordsOf(state.query, retriever)), readerWhy(hit, retriever, rank, heat),
    state.together && answer ? standing(hit.id, retriever) : null);
  return [readerBar(rank, retriever), body];
}

function readerHeat(heat, hit) {
  const { from } = parts({ ...hit, text: heat.text });
  const root = element("div", { class: "heat" }, heatChips(heat), heatLegend(),
    isCode(heat.text) ? element("pre", { class: "text code" }, heatText(heat, 0, heat.text.length))
      : element("p", { class: "text", dir: "auto" }, heatText(heat, firstShown(heat, from), heat.text.length)), heatTable(heat));
  lightUp(root);
  return root;
}

// The heading is in the text that was encoded, and its tokens may have been met: then it is shown again, in shades.
const firstShown = (heat, from) => ([...metTokens(heat).keys()].some((token) => heat.passage[token].span[0] < from) ? 0 : from);

function readerText(text, from, hit, words) {
  if (!text.trim()) return element("p", { class: "none" }, hit.text === "" ? "This document is empty." : "This index keeps no texts.");
  if (isCode(text)) return element("pre", { class: "text code" }, marked(text.replace(/^\s*\n/, "").trimEnd(), words));
  const rest = text.slice(from).trim();
  return rest ? element("p", { class: "text", dir: "auto" }, marked(rest, words)) : null;
}

function readerWhy(hit, retriever, rank, heat) {
  const why = hit.explanation;
  if (why?.kind === "words") return wordsTable(why.words);
  if (why?.kind === "similarity") {
    return element("p", { class: "none" }, `One vector stands for the whole text: ${why.score === null ? "it has none" : `its similarity is ${similarity(why.score)}`}, and no word has a part of its own.`);
  }
  if (heat || !retriever.explains || rank === null) return null;
  if (state.together && rank > (limits.explained ?? Infinity)) return element("p", { class: "none" }, `Only the first ${limits.explained} results are explained.`);
  return why ? null : element("p", { class: "none" }, "Looking at which tokens met\u2026");
}

// What can be filtered by adds a filter when it is pressed.
function tags(hit) {
  const fields = fieldsOf(shownRetrievers());
  const made = Object.entries(hit.metadata ?? {}).map(([field, value]) => {
    const values = (Array.isArray(value) ? value : [value]).map((each) => {
      const shownValue = others(cut(each, 200));
      const type = fields.get(field);
      if (type === undefined || String(each).trim() === "") return shownValue;
      return element("button", { type: "button", class: "tag", "aria-label": `Only where ${visible(field)} is ${visible(each)}`, title: "Filter by this",
        onclick: () => filterBy(condition(field, isListType(type) ? "has" : "=", String(each), type)) }, shownValue);
    });
    return element("div", {}, element("dt", {}, visible(field)), element("dd", {}, values));
  });
  return made.length ? element("dl", { class: "tags" }, made) : null;
}

function filterBy(made) {
  if (!state.filters.includes(made)) state.filters = [...state.filters, made];
  changed({ entry: true });
}

function stepDocument(way) {
  const retriever = named(state.retriever);
  const hits = shown.get(retriever.name)?.hits ?? [];
  const place = hits.findIndex((hit) => hit.id === state.open) + way;
  if (!hits[place]) return;
  openDocument(hits[place].id, retriever.name, { entry: false });
  cardOf(hits[place].id, retriever.name)?.scrollIntoView({ block: "nearest" });
}
