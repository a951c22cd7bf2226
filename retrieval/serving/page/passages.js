// What is shown of a passage: a heading, the part in which most words of the query stand, and these words marked.

const PASSAGE = 300; // characters in a list
const COMPACT = 150; // side by side
const HEADING = 120;

const LITTLE = new Set(("a an and are as at be by can do does for from has have how in into is it its of on or that the their this to was were "
  + "what when where which who why will with").split(" "));

// The words that BM25 leaves out.
const STOP_WORDS = new Set(("a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to "
  + "was will with").split(" "));

// A run of letters with their marks, as BM25 takes it for a word; it may have characters without a shape, such as joiners and soft hyphens.
const RUN = /[\p{L}\p{N}_][\p{L}\p{N}\p{Mn}\p{Mc}_\u00ad\u200c-\u200f\u2060-\u2064\ufeff]*/gu;
const INVISIBLE = /[\u00ad\u034f\u200c-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\u{e0100}-\u{e01ef}]/gu;
const SHAPED = /[\ufb00-\ufdff\ufe70-\ufefc\uff01-\uffee]+/gu;

// A word without case and in one form, as BM25 compares it.
function folded(word) {
  const plain = word.replace(INVISIBLE, "").replace(SHAPED, (shaped) => shaped.normalize("NFKC")).normalize("NFC").toLowerCase();
  return plain.replaceAll("i\u0307", "i").replaceAll("\u00df", "ss").replaceAll("\u03c2", "\u03c3").normalize("NFC");
}

// What to mark of a query in the hits of a retriever, for String.matchAll; null where there is nothing. BM25 matches whole words, and these
// are marked. No other retriever matches by words: there the marks help to find the words of the query, with their endings, so that
// "infections" marks "infection".
function wordsOf(query, { kind }) {
  if (kind === "bm25") {
    const counts = (word) => [...word].length > 1 && !STOP_WORDS.has(word);
    const matched = new Set((query.match(RUN) ?? []).map(folded).filter(counts).slice(0, 64));
    return matched.size ? { [Symbol.matchAll]: (text) => [...text.matchAll(RUN)].filter((match) => matched.has(folded(match[0]))) } : null;
  }
  const words = [...new Set(query.normalize("NFC").toLowerCase().match(/[\p{L}\p{N}][\p{L}\p{N}\p{M}]+/gu) ?? [])].filter((word) => !LITTLE.has(word)).slice(0, 64);
  if (!words.length) return null;
  const stems = words.map((word) => (word.length > 5 ? word.replace(/(?:ies|ing|es|ed|s|y)$/, "") : word));
  return new RegExp(`(?<![\\p{L}\\p{N}\\p{M}])(?:${stems.sort((a, b) => b.length - a.length).join("|")})[\\p{L}\\p{N}\\p{M}]{0,4}(?![\\p{L}\\p{N}\\p{M}])`, "giu");
}

function marked(text, words) {
  if (words === null) return [visible(text)];
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(words)) {
    parts.push(visible(text.slice(last, match.index)), element("mark", {}, visible(match[0])));
    last = match.index + match[0].length;
  }
  return [...parts, visible(text.slice(last))];
}

// The end of a word at or before a place, not inside a pair of code units.
function wordEnd(text, place) {
  if (place >= text.length) return text.length;
  const space = text.lastIndexOf(" ", place);
  const end = space > place - 40 && space > 0 ? space : place;
  const code = text.charCodeAt(end - 1);
  return code >= 0xd800 && code < 0xdc00 ? end - 1 : end;
}

// Where the heading of a text without a title ends: with its first sentence, or where there is no more room.
function headingEnd(text) {
  const sentence = text.slice(0, HEADING + 60).match(/^.{12,}?[.!?](?=\s)/su);
  return sentence ? sentence[0].length : wordEnd(text, HEADING);
}

// The part of a text, from a place on, of a length, around the most of the given places.
function windowAround(text, places, { from = 0, length = PASSAGE } = {}) {
  const rest = text.slice(from);
  if (rest.length <= length) return [from, text.length];
  const starts = [from, ...places.filter((place) => place >= from).map((place) => Math.min(Math.max(from, place - 40), text.length - length))];
  const gain = (start) => places.filter((place) => place >= start && place < start + length - 10).length;
  let best = from;
  for (const start of starts) if (gain(start) > gain(best)) best = start;
  const begin = best === from ? from : Math.max(from, wordEnd(text, best) + 1);
  return [begin, wordEnd(text, begin + length)];
}

// Code keeps its line breaks and indentation.
const isCode = (text) => (text.match(/^(?: {2,}|\t+)\S/gm) ?? []).length > 1;

// Heading, text, and from where of the text it is new to who has read the heading.
function parts(hit) {
  const text = hit.text ?? "";
  if (hit.title) {
    const repeated = text.startsWith(hit.title);
    return { heading: hit.title, text, from: repeated ? hit.title.length : 0, continues: false };
  }
  if (!text.trim()) return { heading: hit.id, text: "", from: 0, continues: false };
  const end = isCode(text) ? Math.min(text.trimEnd().indexOf("\n", text.search(/\S/)), HEADING) : headingEnd(text);
  return { heading: text.slice(0, end).trim(), text, from: end, continues: !/[.!?]$/u.test(text.slice(0, end)) && end < text.length };
}

// Offsets in characters, as the service counts them, to offsets in the code units of a JavaScript text.
function unitsOf(text) {
  if (!/[\ud800-\udfff]/.test(text)) return (place) => place;
  const units = [0];
  for (const character of text) units.push(units[units.length - 1] + character.length);
  return (place) => units[Math.min(place, units.length - 1)];
}

// Code begins with a whole line, unless the line is so long that the place would be out of sight.
function codeStart(text, from, begin, length) {
  const line = text.lastIndexOf("\n", begin) + 1;
  const start = Math.max(from, begin - line > length / 2 ? begin : line);
  return start + text.slice(start).match(/^(?:\s*\n)?/)[0].length;
}

// Lines without the indentation that all of them have.
function dedented(text) {
  const least = Math.min(...text.split("\n").filter((line) => line.trim()).map((line) => line.search(/\S/)));
  return text.replace(new RegExp(`^[ \\t]{0,${least}}`, "gm"), "");
}

function excerpt(hit, words, length) {
  const { text, from } = parts(hit);
  const places = words === null ? [] : [...text.matchAll(words)].map((match) => match.index);
  const [begin, end] = windowAround(text, places, { from, length });
  if (isCode(text)) {
    const start = codeStart(text, from, begin, length);
    const lines = text.slice(start, end).trimEnd();
    return lines ? [text.slice(from, start).trim() ? "…\n" : "", ...marked(dedented(lines), words), end < text.length ? "\u00a0…" : ""] : [];
  }
  const shown = text.slice(begin, end).trim();
  if (!shown) return [];
  return [begin > from ? "…\u00a0" : "", ...marked(shown, words), end < text.length ? "\u00a0…" : ""];
}
