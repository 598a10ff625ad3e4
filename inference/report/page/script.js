/* What the page does beyond being read: theme, choice of the measurement, and the answers token by token. Text is only ever set as
   text (textContent), never as markup. */
"use strict";
(() => {
  const root = document.documentElement;
  const make = (name, className, words) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (words !== undefined) element.textContent = words;
    return element;
  };

  /* ---- theme: system, light, dark; remembered where the browser lets a file do so ---- */
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("headstart-theme"); } catch { return null; } };
  const keep = (value) => { try { localStorage.setItem("headstart-theme", value); } catch { /* then it is not remembered */ } };
  const wear = (theme) => {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = themes.includes(stored()) ? stored() : "system";
  wear(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    keep(theme);
    wear(theme);
  });

  /* ---- several measurements: one is shown at a time ---- */
  const articles = [...document.querySelectorAll("article[data-run]")];
  const which = document.getElementById("run");
  const show = (place) => {
    for (const article of articles) article.hidden = article.dataset.run !== place;
    for (const link of document.querySelectorAll("nav a[data-section]")) link.setAttribute("href", `#${link.dataset.section}-${place}`);
  };
  const follow = () => {
    const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const article = found && found.closest("article[data-run]");
    if (article && which) { which.value = article.dataset.run; show(article.dataset.run); found.scrollIntoView(); }
  };
  if (which) {
    which.closest("label").hidden = false;
    which.addEventListener("change", () => show(which.value));
    show(which.value || "0");
    addEventListener("hashchange", follow);
    if (location.hash) follow();
  }

  /* ---- answers, token by token ---- */
  const SOURCES = ["first", "drafted", "corrected", "bonus"];
  const WORDS = ["read with the prompt", "drafted", "corrected by the target", "added by the target"];
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const visible = (words) => words.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
  const percent = (share) => (share >= 0.9995 ? "100%" : share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);
  const who = (token) => (token[1] === 1 ? `drafted at depth ${token[2]}` : WORDS[token[1]]);

  const bar = (share) => {
    const svg = document.createElementNS(NAMESPACE, "svg");
    svg.setAttribute("viewBox", "0 0 84 8");
    svg.setAttribute("aria-hidden", "true");
    const box = document.createElementNS(NAMESPACE, "rect");
    box.setAttribute("width", String(Math.max(0.5, 84 * share)));
    box.setAttribute("height", "8");
    svg.append(box);
    return svg;
  };

  const list = (title, candidates, chosen, none) => {
    const parts = [make("h3", "", title)];
    if (!candidates.length) return [...parts, make("p", "note", none)];
    const items = make("ol");
    for (const [words, share] of candidates) {
      const item = make("li", words === chosen ? "same" : "");
      item.append(make("span", "", visible(words) + (words === chosen ? " ✓" : "")), bar(share), make("em", "", percent(share)));
      items.append(item);
    }
    return [...parts, items];
  };

  const view = (viewer) => {
    const answers = JSON.parse(viewer.querySelector("script[type='application/json']").textContent);
    const [arm, prompt, marks] = [".arm", ".prompt", ".marks"].map((name) => viewer.querySelector(name));
    const [box, panel, passes] = [".answer", ".candidates", ".passes"].map((name) => viewer.querySelector(name));
    let tokens = [];
    let spans = [];
    let at = 0;
    viewer.classList.add("ready");

    const tell = (place) => {
      const token = tokens[place];
      const [words, by, depth, number, target, draft] = token;
      const what = make("p", "what");
      what.append(make("b", "", visible(words)), ` ${who(token)}`);
      const where = make("p", "note", `Token ${place + 1} of ${tokens.length}` + (number ? `, verification ${number}.` : "."));
      panel.replaceChildren(
        what, where,
        ...list("The target's candidates", target, words, by === 0 ? "Not kept for the first token." : "Not kept."),
        ...list("The drafter's candidates", draft, words, by === 0 ? "It had drafted nothing yet." : "It drafted nothing here."),
      );
      for (const span of spans) span.classList.toggle("chosen", span === spans[place]);
    };

    const move = (place, focus) => {
      spans[at].tabIndex = -1;
      spans[at].setAttribute("aria-selected", "false");
      at = Math.min(tokens.length - 1, Math.max(0, place));
      spans[at].tabIndex = 0;
      spans[at].setAttribute("aria-selected", "true");
      if (focus) spans[at].focus();
      tell(at);
    };

    const draw = () => {
      const answer = answers.find((one) => one.arm === arm.value && one.prompt === prompt.value);
      box.replaceChildren();
      passes.replaceChildren();
      if (!answer) {
        tokens = []; spans = [];
        viewer.querySelector(".counts").textContent = "This drafter's answer to this prompt was not kept.";
        panel.replaceChildren();
        return;
      }
      tokens = answer.tokens;
      viewer.querySelector(".question").textContent = answer.question;
      const counted = [0, 0, 0, 0];
      for (const token of tokens) counted[token[1]] += 1;
      const verified = tokens.length ? tokens[tokens.length - 1][3] : 0;
      viewer.querySelector(".counts").textContent =
        `${answer.domain}: ${tokens.length} tokens from ${verified} verifications; ${counted[1]} drafted, ${counted[2]} corrected, ${counted[3]} added.`;
      spans = [];
      const rows = [];
      let group = null;
      tokens.forEach((token, place) => {
        const [words, by, depth, number] = token;
        if (!group || group.number !== number) {
          group = { number, span: make("span", "pass"), words: [], kept: 0, by };
          group.span.setAttribute("role", "presentation");
          box.append(group.span);
          rows.push(group);
        }
        const span = make("span", `token ${SOURCES[by]}` + (by === 1 ? ` depth${Math.min(depth, 4)}` : ""));
        const digit = make("span", "digit", by === 1 ? String(depth) : by === 2 ? "×" : by === 3 ? "+" : "");
        for (const piece of words.split(/(\n)/)) {
          if (piece !== "\n") { if (piece) span.append(piece); continue; }
          span.append(make("span", "blank", "↵"), digit.parentNode ? "" : digit, "\n");
        }
        if (!words) span.append(make("span", "blank", "∅"));
        if (!digit.parentNode) span.append(digit);
        span.tabIndex = -1;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", "false");
        span.setAttribute("aria-label", `${visible(words)}, ${who(token)}`);
        span.addEventListener("pointerenter", () => tell(place));
        span.addEventListener("focus", () => { if (at !== place) move(place, false); });
        span.addEventListener("click", () => move(place, true));
        group.span.append(span);
        group.words.push(visible(words));
        group.kept += by === 1 ? 1 : 0;
        group.by = by;
        spans.push(span);
      });
      const grid = make("table");
      const head = make("tr");
      for (const words of ["Verification", "Accepted", "Ended by", "Tokens"]) head.append(make("th", "", words));
      grid.append(make("thead"), make("tbody"));
      grid.tHead.append(head);
      for (const row of rows) {
        const line = make("tr");
        const first = make("th", "", row.number ? String(row.number) : "prompt");
        first.scope = "row";
        line.append(first, make("td", "n", String(row.kept)), make("td", "n", ["the prompt", "the end", "a correction", "an added token"][row.by]));
        line.append(make("td", "", row.words.join(" | ")));
        grid.tBodies[0].append(line);
      }
      passes.append(grid);
      at = 0;
      if (spans.length) move(Math.min(1, spans.length - 1), false);
    };

    const keys = { ArrowRight: 1, ArrowLeft: -1 };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const number = tokens[at] ? tokens[at][3] : 0;
      let next = at;
      if (event.key in keys) next = at + keys[event.key];
      else if (event.key === "Home") next = 0;
      else if (event.key === "End") next = tokens.length - 1;
      else if (event.key === "ArrowDown") next = tokens.findIndex((token) => token[3] === number + 1);
      else if (event.key === "ArrowUp") next = tokens.findIndex((token) => token[3] === number - 1);
      else return;
      event.preventDefault();
      if (next >= 0) move(next, true);
    });
    box.addEventListener("pointerleave", () => { if (tokens.length) tell(at); });
    marks.addEventListener("change", () => box.classList.toggle("numbered", marks.checked));
    box.classList.toggle("numbered", marks.checked);
    arm.addEventListener("change", draw);
    prompt.addEventListener("change", draw);
    draw();
  };
  for (const viewer of document.querySelectorAll(".viewer")) view(viewer);
})();
