// The book's only script: language switch, theme button's focus, long tracebacks, what is too wide, printing.

// The switch goes to the section that is read: both languages give a heading the same label.
function sectionInView() {
  const top = (section) => section.getBoundingClientRect().top;
  const sections = [...document.querySelectorAll("article.bd-article section[id]")];
  const named = sections.find((section) => "#" + section.id === decodeURI(location.hash));
  if (named && top(named) >= 0 && top(named) < innerHeight) return named;
  if (scrollY < 40) return null;
  // At the end of the page the last sections cannot come up to the top.
  const atEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
  if (atEnd) return sections.at(-1);
  // A heading in the upper half begins what is read; else it began further up.
  const begins = sections.find((section) => top(section) >= 0 && top(section) < innerHeight / 2);
  return begins ?? sections.filter((section) => top(section) < 0).at(-1);
}

for (const link of document.querySelectorAll(".language-switch__link")) {
  const page = link.getAttribute("href");
  link.addEventListener("click", () => {
    const section = sectionInView();
    link.href = page + location.search + (section ? "#" + section.id : "");
    try {
      localStorage.setItem("book-language", link.dataset.language);
    } catch { /* storage is blocked: the front page will ask the browser again */ }
  });
}

// The theme calls blur() on these buttons when they are pressed, and a keyboard would be lost.
const blurred = ".theme-switch-button, .search-button, .sidebar-toggle";
for (const button of document.querySelectorAll(blurred)) button.blur = () => {};

// A long traceback is whole on a page without scripts.
for (const frames of document.querySelectorAll("details.frames")) frames.open = false;

// In a narrow table a long name may break after _ and dots (book.css says where: on a phone).
for (const name of document.querySelectorAll(".bd-article td code .pre")) {
  if (name.textContent.length > 16) name.innerHTML = name.innerHTML.replace(/[_.]+(?=\w)/g, "$&<wbr>");
}

// A formula in the text that is wider than the text scrolls. All formulas cannot: in CSS, what
// scrolls stands on the line with its lower edge.
function scrollWideFormulas() {
  const formulas = document.querySelectorAll("mjx-container:not([display])");
  const wide = [...formulas].filter((formula) => {
    const block = formula.closest("p, li, td, dd, figcaption, h1, h2, h3");
    return block && formula.firstElementChild.getBoundingClientRect().width > block.clientWidth;
  });
  for (const formula of formulas) {
    const scrolls = wide.includes(formula);
    if (scrolls === formula.classList.contains("scrolled-formula")) continue;
    formula.classList.toggle("scrolled-formula", scrolls);
    if (scrolls) formula.tabIndex = 0;
    else formula.removeAttribute("tabindex");
  }
}

// A picture or a table that is wider than its box can be scrolled by keyboard, too, and says so.
function scrollWideBoxes() {
  for (const box of document.querySelectorAll(".picture, .pst-scrollable-table-container")) {
    const scrolls = box.scrollWidth > box.clientWidth + 1;
    box.classList.toggle("scrolls", scrolls);
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

addEventListener("load", scrollWideBoxes);
addEventListener("resize", scrollWideBoxes);
addEventListener("toggle", scrollWideBoxes, true);

addEventListener("load", () => window.MathJax?.startup?.promise?.then(() => {
  scrollWideFormulas();
  addEventListener("resize", scrollWideFormulas);
  addEventListener("toggle", scrollWideFormulas, true); // what was folded had no width
}));

// Paper is light and nothing can be unfolded on it. Evidence stays folded: its result is outside.
let before = null;

addEventListener("beforeprint", () => {
  const folded = "article.bd-article details:not([open])";
  before = {
    theme: document.documentElement.dataset.theme,
    folded: [...document.querySelectorAll(folded)].filter((one) => !one.closest(".tag_evidence")),
  };
  document.documentElement.dataset.theme = "light";
  before.folded.forEach((one) => { one.open = true; });
});

addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = before.theme;
  before.folded.forEach((one) => { one.open = false; });
});
