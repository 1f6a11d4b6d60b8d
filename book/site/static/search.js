// The search page: finds sections, not pages. `bookPages` comes from search-sections.js:
// [[path, title, [[anchor, title, text, terms that the section explains], …]], …].

const CJK = "\\u3400-\\u9fff\\uf900-\\ufaff";
const CHINESE = new RegExp(`[${CJK}]`);
const SHOWN = 30;

const sections = bookPages.flatMap(([path, page, all]) =>
  all.map(([anchor, title, text, terms], number) => ({
    // the top of a page, not its first section, which has the same title
    href: number ? `${path}#${anchor}` : path,
    title,
    page,
    chapterItself: !number,
    text,
    terms,
    // where a word is explained comes before where it is listed or practised
    rank: !path.startsWith("notebooks/") ? 0.6 : /-(exercises|reading|takeaways)$/.test(anchor) ? 0.7 : 1,
  })),
);
const meanLength = sections.reduce((sum, one) => sum + one.text.length, 0) / sections.length;

const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const pairs = (run) => [...run].slice(1).map((letter, i) => run[i] + letter);

const count = (text, word) => text.match(word.test)?.length || 0;

// A word to look for: a run of Chinese, or a Latin word, of which a long one may go on (broadcast…).
function word(run) {
  const stem = run.length > 3 ? run.replace(/s$/, "") : run;
  const end = run.length > 3 ? "[\\p{L}\\p{N}_]*" : "(?![\\p{L}\\p{N}_])";
  const source = CHINESE.test(run) ? run : `(?<![\\p{L}\\p{N}_])${escaped(stem)}${end}`;
  const test = new RegExp(source, "giu");
  const found = sections.filter((one) => count(one.text, { test }) || count(one.title, { test }));
  return { run, test, found: found.length, rarity: Math.log(1 + sections.length / (1 + found.length)) };
}

// A query as words. A run that stands nowhere in the book is cut into pairs: 广播机制 finds 广播.
function words(query) {
  const latin = `[^\\s${CJK}\\p{P}]+`;
  const runs = query.match(new RegExp(`[${CJK}]+|${latin}(?:[._-]+${latin})*`, "gu")) || [];
  return runs.map(word).flatMap((one) => {
    if (one.found || !CHINESE.test(one.run)) return [one];
    return pairs(one.run).map(word).filter((pair) => pair.found);
  });
}

// Okapi BM25 for the text; a word in a title, or one that the section explains, counts for more.
function weight(section, word) {
  const hits = count(section.text, word);
  const usual = 0.4 + 0.6 * (section.text.length / meanLength);
  let sum = (2 * hits) / (hits + 1.5 * usual);
  if (count(section.title, word)) sum += 1.5 + word.run.length / (word.run.length + section.title.length);
  if (section.title.toLowerCase() === word.run.toLowerCase()) sum += 2;
  if (section.terms.some((term) => count(term, word) && term.length - word.run.length < 4)) sum += 3;
  if (sum && count(section.page, word)) sum += 0.5;
  return sum * word.rarity;
}

function find(query) {
  const wanted = words(query);
  const scored = sections.map((section) => {
    const weights = wanted.map((word) => weight(section, word));
    const share = weights.filter(Boolean).length / wanted.length;
    const sum = weights.reduce((a, b) => a + b, 0) * share ** 2 * section.rank;
    return { section, sum };
  });
  const found = scored.filter(({ sum }) => sum > 0).sort((a, b) => b.sum - a.sum);
  return { wanted, found: found.map(({ section }) => section) };
}

// Some text around the first word found, with every word marked.
function excerpt(section, wanted) {
  const all = new RegExp(wanted.map((word) => word.test.source).join("|"), "giu");
  const at = Math.max(section.text.search(all), 0);
  const [before, length] = bookLanguage === "zh" ? [30, 110] : [70, 220];
  const from = at > before ? at - before : 0;
  let text = section.text.slice(from, from + length);
  if (from) text = "… " + text.replace(/^[\w.]*\s/, "");
  if (from + length < section.text.length) text = text.replace(/\s[\w.]*$/, "") + " …";
  const paragraph = document.createElement("p");
  let last = 0;
  for (const match of text.matchAll(all)) {
    const mark = document.createElement("mark");
    mark.textContent = match[0];
    paragraph.append(text.slice(last, match.index), mark);
    last = match.index + match[0].length;
  }
  paragraph.append(text.slice(last));
  return paragraph;
}

function item(section, wanted) {
  const link = document.createElement("a");
  link.href = section.href;
  link.textContent = section.title;
  const page = document.createElement("span");
  page.className = "search-page";
  page.textContent = section.chapterItself ? "" : section.page;
  const line = document.createElement("li");
  line.append(link, page, excerpt(section, wanted));
  return line;
}

const field = document.querySelector(".bd-search-container input[type=search]");
const results = document.getElementById("search-results");
const summary = document.getElementById("search-summary");

function show(query) {
  const { wanted, found } = find(query);
  results.replaceChildren(...found.slice(0, SHOWN).map((section) => item(section, wanted)));
  const phrase = found.length ? summary.dataset.found : summary.dataset.none;
  summary.textContent = query.trim() ? phrase.replace("%s", found.length) : "";
}

field.value = new URLSearchParams(location.search).get("q") || "";
show(field.value);
field.focus();
field.addEventListener("input", () => {
  show(field.value);
  history.replaceState(null, "", "?" + new URLSearchParams({ q: field.value }));
});
