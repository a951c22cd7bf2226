// Elements of the page. What others wrote goes in as text: no script of this page parses markup.

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Characters that act instead of being seen, or turn the direction of writing: one sign for each, so that spans stay where they are.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

const visible = (text) => String(text).replace(UNSEEN, "\ufffd");

// Others' words beside our own: their direction of writing stays theirs.
const others = (text, properties = {}) => element("bdi", properties, visible(text));

// A name such as dense+bm25>colbert, which goes on in the next line after a sign rather than inside a word.
const retrieverName = (name) => element("bdi", {}, visible(name).split(/(?<=[+>])/).flatMap((part) => [part, element("wbr")]));

const cut = (text, most) => {
  const characters = [...visible(text)];
  return characters.length > most ? `${characters.slice(0, most).join("")}\u2026` : characters.join("");
};

const number = (value) => value.toLocaleString("en");

const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const milliseconds = (value) => (value < 1000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);

const isTyping = (target) => target instanceof HTMLElement && (target.isContentEditable || target.matches("input, select, textarea"));

const calm = matchMedia("(prefers-reduced-motion: reduce)");

// A row that can be scrolled fades at the side where it goes on.
function fade(row) {
  row.classList.toggle("before", row.scrollLeft > 1);
  row.classList.toggle("after", row.scrollLeft + row.clientWidth < row.scrollWidth - 1);
}

// What a screen reader says: the last of several messages, when the hand rests.
let saying = 0;
function say(text) {
  clearTimeout(saying);
  saying = setTimeout(() => { byId("said").textContent = text; }, 600);
}
