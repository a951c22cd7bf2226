// Which tokens of a query met which of a passage: chips of the query, the passage in shades, a legend, and a table that says the same.

const COLDEST = 0.25; // similarities up to here have no shade

const warmth = (score) => Math.round(100 * Math.min(1, Math.max(0, (score - COLDEST) / (1 - COLDEST))));

const similarity = (score) => score.toFixed(3).replace("-", "\u2212");

// What a hit's explanation says, by the places of its tokens. Special tokens stand in no text.
function meetingsOf(hit) {
  const why = hit.explanation;
  if (why?.kind !== "tokens" || !why.matches.length || why.text === null) return null;
  const unit = unitsOf(why.text);
  const spanned = ({ token, span }) => ({ token, span: span === null ? null : [unit(span[0]), unit(span[1])] });
  return { query: why.query.map(({ token, span }) => ({ token, span })), passage: why.passage.map(spanned), matches: why.matches, text: why.text };
}

const inQuery = (heat, match) => heat.query[match.query].span !== null;

// Tokens of the passage that words of the query met: token -> the highest similarity.
function metTokens(heat) {
  const met = new Map();
  for (const match of heat.matches) {
    if (!inQuery(heat, match) || heat.passage[match.passage].span === null) continue;
    met.set(match.passage, Math.max(match.score, met.get(match.passage) ?? -1));
  }
  return met;
}

// A part of the passage with what was met in shades.
function heatText(heat, begin, end) {
  const met = [...metTokens(heat)].map(([token, score]) => ({ token, score, span: heat.passage[token].span }))
    .sort((a, b) => a.span[0] - b.span[0]);
  const shown = [];
  let last = begin;
  for (const { token, score, span } of met) {
    if (span[0] < last || span[1] > end) continue;
    const word = element("span", { class: "met", "data-token": token }, visible(heat.text.slice(...span)));
    word.style.setProperty("--heat", `${warmth(score)}%`);
    shown.push(visible(heat.text.slice(last, span[0])), word);
    last = span[1];
  }
  return [...shown, visible(heat.text.slice(last, end))];
}

function heatExcerpt(hit, heat, length) {
  const { from } = parts({ ...hit, text: heat.text });
  const places = [...metTokens(heat)].filter(([, score]) => score > 0.4).map(([token]) => heat.passage[token].span[0]).sort((a, b) => a - b);
  const [place, end] = windowAround(heat.text, places, { from, length });
  const code = isCode(heat.text);
  const begin = code ? codeStart(heat.text, from, place, length) : place;
  return [heat.text.slice(from, begin).trim() ? (code ? "…\n" : "…\u00a0") : "", ...heatText(heat, begin, end), end < heat.text.length ? "\u00a0…" : ""];
}

// The heading where it begins the text that was encoded, in shades too.
function heatHeading(heading, heat) {
  return heat.text.startsWith(heading) ? heatText(heat, 0, heading.length) : [visible(heading)];
}

const tokenName = (heat, place) => {
  const { token, span } = heat.passage[place];
  return span === null ? token : heat.text.slice(...span).trim() || token;
};

// A chip for each token of the query; it lights up what it met, and what the passage's tokens met lights it up.
function heatChips(heat) {
  const words = heat.matches.filter((match) => inQuery(heat, match));
  const chips = words.map((match) => {
    const { token } = heat.query[match.query];
    const met = ` met ${visible(tokenName(heat, match.passage))}, similarity `;
    const chip = element("button", { type: "button", class: "asked", "aria-pressed": "false", "data-query": match.query, "data-met": match.passage },
      others(token), element("span", { class: "unseen" }, met), element("small", {}, similarity(match.score)));
    chip.style.setProperty("--heat", `${warmth(match.score)}%`);
    return element("li", {}, chip);
  });
  const rest = heat.matches.filter((match) => !inQuery(heat, match));
  if (rest.length) {
    const sum = rest.reduce((total, match) => total + match.score, 0);
    const names = [...new Set(rest.map((match) => heat.query[match.query].token))].join(" ");
    chips.push(element("li", { class: "special" }, others(names), element("small", {}, `+ ${sum.toFixed(3)}`)));
  }
  return element("ul", { class: "asked-list", "aria-label": "Tokens of the query" }, chips);
}

function heatLegend() {
  return element("p", { class: "legend" }, element("span", {}, `similarity ${COLDEST}`), element("span", { class: "scale", "aria-hidden": "true" }),
    element("span", {}, "1"));
}

function heatTable(heat) {
  const rows = heat.matches.map((match) => element("tr", {},
    element("th", { scope: "row" }, others(heat.query[match.query].token)),
    element("td", {}, others(tokenName(heat, match.passage))),
    element("td", { class: "figure" }, similarity(match.score))));
  const sum = heat.matches.reduce((total, match) => total + match.score, 0);
  return figuresTable("As a table", ["query", "met in the passage", "similarity"], rows, ["sum, the score", "", sum.toFixed(3)]);
}

function wordsTable(words) {
  const rows = words.map(({ word, score }) => element("tr", {}, element("th", { scope: "row" }, others(word)),
    element("td", { class: "figure" }, score.toFixed(3))));
  const sum = words.reduce((total, { score }) => total + score, 0);
  const table = figuresTable("Why this score", ["word of the query", "adds"], rows, ["sum, the score", sum.toFixed(3)]);
  table.open = true;
  return table;
}

function figuresTable(title, names, rows, sums) {
  const head = names.map((name, place) => element("th", { scope: "col", class: place === names.length - 1 ? "figure" : null }, name));
  const foot = sums.map((sum, place) => element(place ? "td" : "th", { scope: place ? null : "row", class: place === sums.length - 1 ? "figure" : null }, sum));
  return element("details", { class: "fold" }, element("summary", {}, title), element("table", {}, element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, rows), element("tfoot", {}, element("tr", {}, foot))));
}

// Lighting up: by hand or by keyboard; a chip that is pressed keeps its light.
function lightUp(root) {
  const chips = [...root.querySelectorAll(".asked")];
  const tokens = [...root.querySelectorAll(".met")];
  const light = (wanted) => {
    root.classList.toggle("lit", wanted.length > 0);
    const met = new Set(wanted.map((chip) => chip.dataset.met));
    chips.forEach((chip) => chip.classList.toggle("on", wanted.includes(chip)));
    tokens.forEach((token) => token.classList.toggle("on", met.has(token.dataset.token)));
  };
  const pressed = () => chips.filter((chip) => chip.getAttribute("aria-pressed") === "true");
  const rest = () => light(pressed());
  for (const chip of chips) {
    chip.addEventListener("mouseenter", () => light([chip]));
    chip.addEventListener("focus", () => light([chip]));
    chip.addEventListener("mouseleave", rest);
    chip.addEventListener("blur", rest);
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") === "true";
      chips.forEach((each) => each.setAttribute("aria-pressed", String(each === chip && !on)));
      light(on ? [] : [chip]);
      root.querySelector(`.met[data-token="${chip.dataset.met}"]`)?.scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
    });
  }
  for (const token of tokens) {
    token.addEventListener("mouseenter", () => light(chips.filter((chip) => chip.dataset.met === token.dataset.token)));
    token.addEventListener("mouseleave", rest);
  }
}
