// Sorting, filtering, copying. Without it the page shows the same numbers in the documents' order.
(() => {
  "use strict";
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const root = document.documentElement;
  root.classList.add("js");
  const commands = JSON.parse(one("#commands").textContent);
  const tables = all("table.data");
  const collator = new Intl.Collator("en", { numeric: true });
  const state = { q: "", status: new Set(), own: false, sort: new Map(), at: "" };

  // ---- state in the address, so that a link shows what its sender saw

  function readHash() {
    const hash = location.hash.slice(1);
    const plain = hash && !hash.includes("=");
    const read = new URLSearchParams(plain ? "" : hash);
    state.q = read.get("q") || "";
    state.status = new Set((read.get("status") || "").split(".").filter((name) => one(`.chip[data-status="${CSS.escape(name)}"]`)));
    state.own = read.get("own") === "1";
    state.sort = new Map();
    for (const part of (read.get("sort") || "").split(",")) {
      const found = /^([\w-]+)\.(\d+)\.([ad])$/.exec(part);
      if (found) state.sort.set(found[1], { column: Number(found[2]), down: found[3] === "d" });
    }
    state.at = plain ? hash : read.get("at") || "";
  }

  function writeHash() {
    const parts = [];
    if (state.q) parts.push(`q=${encodeURIComponent(state.q)}`);
    if (state.status.size) parts.push(`status=${[...state.status].join(".")}`);
    if (state.own) parts.push("own=1");
    const sorts = [...state.sort].map(([id, how]) => `${id}.${how.column}.${how.down ? "d" : "a"}`);
    if (sorts.length) parts.push(`sort=${sorts.join(",")}`);
    if (state.at) parts.push(`at=${encodeURIComponent(state.at)}`);
    const hash = parts.length ? `#${parts.join("&")}` : "";
    if (hash === location.hash) return;
    try {
      history.replaceState(null, "", hash || location.pathname + location.search);
    } catch {
      location.replace(hash || "#");
    }
  }

  function goTo(id) {
    const target = id && document.getElementById(id);
    if (!target) return;
    target.scrollIntoView();
    const heading = one("h2", target) || target;
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }

  // ---- filter

  // As the terminal and the README write them.
  const SHORT = { forward: "fwd", backward: "bwd" };
  const shortOf = (texts) => texts.map((text) => SHORT[text]).filter(Boolean).join(" ");
  const rowText = new WeakMap();
  function textOf(row) {
    if (!rowText.has(row)) {
      const caption = row.closest("table").caption.textContent;
      const cells = [...row.cells].map((cell) => cell.textContent);
      rowText.set(row, `${caption} ${row.dataset.n || ""} ${cells.join(" ")} ${shortOf(cells)}`.toLowerCase());
    }
    return rowText.get(row);
  }

  function filter() {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = words.filter((word) => !(word.startsWith("-") && word.length > 1));
    const unwanted = words.filter((word) => word.startsWith("-") && word.length > 1).map((word) => word.slice(1));
    const has = (text) => wanted.every((word) => text.includes(word)) && !unwanted.some((word) => text.includes(word));
    const rowFits = (row) => (!state.status.size || state.status.has(row.dataset.s)) && (!state.own || row.dataset.r === "subject");
    let shown = 0;
    let total = 0;
    for (const table of tables) {
      const counted = table.id.match(/^(results|measured|claim|scaling|ablation|quality|throughput|train)-\d+$/);
      for (const row of table.tBodies[0].rows) {
        const judged = row.dataset.s !== undefined;
        const fits = has(textOf(row)) && (!judged || rowFits(row));
        if (row.hidden === fits) row.hidden = !fits;
        if (counted) {
          total += 1;
          shown += fits ? 1 : 0;
        }
      }
      rove(table);
    }
    for (const card of all(".card")) {
      const rows = all("tbody tr[data-k]", card);
      const words = `${card.dataset.f} ${card.textContent}`.toLowerCase();
      const text = `${words} ${shortOf(Object.keys(SHORT).filter((word) => words.includes(word)))}`;
      const judged = rows.filter((row) => row.dataset.s !== undefined);
      const fits = has(text) && (!judged.length || !state.status.size || judged.some((row) => state.status.has(row.dataset.s)));
      card.hidden = !fits;
    }
    for (const heading of all("main section > h3")) hideEmpty(heading);
    const active = words.length || state.status.size || state.own;
    one("#found").textContent = active ? `${shown.toLocaleString("en")} of ${total.toLocaleString("en")} lines` : "";
    one("#nothing").hidden = !active || shown > 0;
  }

  // A heading under which nothing is left goes with it.
  function hideEmpty(heading) {
    let judged = false;
    let alive = false;
    for (let next = heading.nextElementSibling; next && next.tagName !== "H3"; next = next.nextElementSibling) {
      const parts = next.matches(".cards") ? [...next.children] : next.matches(".box") ? all("tbody tr", next) : [];
      if (!parts.length) continue;
      judged = true;
      next.hidden = parts.every((part) => part.hidden);
      alive = alive || !next.hidden;
    }
    heading.hidden = judged && !alive;
  }

  // ---- sort

  const original = new Map();
  function sort(table) {
    const how = state.sort.get(table.id);
    const body = table.tBodies[0];
    if (!original.has(table)) original.set(table, [...body.rows]);
    let rows = original.get(table);
    all("thead th", table).forEach((head, index) => {
      const own = how && how.column === index;
      if (head.hasAttribute("aria-sort")) head.setAttribute("aria-sort", own ? (how.down ? "descending" : "ascending") : "none");
    });
    const head = how && table.tHead.rows[0].cells[how.column];
    if (head && head.hasAttribute("aria-sort")) {
      const numeric = head.classList.contains("number");
      const key = (row) => {
        const cell = row.cells[how.column];
        if (!numeric) return cell.textContent || null;
        return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
      };
      const sign = how.down ? -1 : 1;
      const compare = numeric ? (a, b) => a - b : (a, b) => collator.compare(a, b);
      rows = rows
        .map((row) => [key(row), row])
        .sort(([a], [b]) => (a === null ? (b === null ? 0 : 1) : b === null ? -1 : sign * compare(a, b)))
        .map(([, row]) => row);
    }
    body.append(...rows);
    rove(table);
  }

  function addSorting(table) {
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      if (head.classList.contains("notes") || head.classList.contains("bar")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const how = state.sort.get(table.id);
        const first = head.dataset.f === "descending";
        // The best on top, then the other way round, then the document's order.
        if (!how || how.column !== index) state.sort.set(table.id, { column: index, down: first });
        else if (how.down === first) state.sort.set(table.id, { column: index, down: !first });
        else state.sort.delete(table.id);
        sort(table);
        writeHash();
      });
    });
  }

  // ---- keys: one stop a table, arrows from number to number, Enter copies

  const isStop = (cell) => (cell.classList.contains("n") && cell.textContent !== "") || cell.dataset.t !== undefined;
  const stopsOf = (row) => (row.hidden ? [] : [...row.cells].filter(isStop));

  function rove(table) {
    const old = one("tbody [tabindex='0']", table);
    if (old && !old.parentElement.hidden) return;
    if (old) old.tabIndex = -1;
    for (const row of table.tBodies[0].rows) {
      const [first] = stopsOf(row);
      if (first) {
        first.tabIndex = 0;
        return;
      }
    }
  }

  function step(cell, key) {
    const row = cell.parentElement;
    const across = stopsOf(row);
    const at = across.indexOf(cell);
    if (key === "ArrowLeft") return across[at - 1];
    if (key === "ArrowRight") return across[at + 1];
    if (key === "Home") return across[0];
    if (key === "End") return across[across.length - 1];
    const side = key === "ArrowDown" ? "nextElementSibling" : key === "ArrowUp" ? "previousElementSibling" : "";
    for (let next = side && row[side]; next; next = next[side]) {
      const same = next.cells[cell.cellIndex];
      if (!next.hidden && same && isStop(same)) return same;
    }
    return undefined;
  }

  document.addEventListener("keydown", (event) => {
    const cell = event.target instanceof Element && event.target.matches("tbody td") ? event.target : null;
    if (event.key === "Escape") hideToast();
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act(cell);
      return;
    }
    const next = step(cell, event.key);
    if (next) {
      event.preventDefault();
      const old = one("tbody [tabindex='0']", cell.closest("table"));
      if (old) old.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  });

  // A click is for the cell that it began on: what is drawn only now, further up, may move another one beneath a pointer
  // that stays where it is, between press and release, and the browser then names the two cells' table.
  const cellAt = (event) => (event.target instanceof Element ? event.target.closest("tbody td") : null);
  let pressed = { cell: null, x: 0, y: 0 };
  document.addEventListener("pointerdown", (event) => {
    pressed = { cell: cellAt(event), x: event.clientX, y: event.clientY };
  });

  document.addEventListener("click", (event) => {
    const stays = Math.abs(event.clientX - pressed.x) < 4 && Math.abs(event.clientY - pressed.y) < 4;
    const cell = event.detail && stays ? pressed.cell : cellAt(event);
    if (cell && isStop(cell) && !(cell.dataset.t && String(getSelection()))) act(cell);
  });

  function act(cell) {
    if (cell.dataset.t !== undefined) cell.classList.toggle("open");
    else copy(cell);
  }

  // ---- copy: the number, whose it is, and the command that makes it again

  function sentence(cell) {
    const row = cell.parentElement;
    const head = cell.closest("table").tHead.rows[0].cells[cell.cellIndex];
    const [called, command] = commands[row.dataset.k];
    const shown = cell.textContent.replace("✕ ", "");
    let number = `${head.dataset.b}${shown}${head.dataset.a}${cell.dataset.m || ""}`;
    if (cell.classList.contains("few")) number = shown; // too few runs for an interval
    if (shown === "–") number = `${head.textContent.replace(/\s+/g, " ").trim()}: not measured${row.dataset.s ? ` (${row.dataset.s})` : ""}`;
    return [`${called} ${row.dataset.n} ${number}`.replace(/ {2,}/g, " "), command].filter(Boolean).join(" — ");
  }

  async function copy(cell) {
    const text = sentence(cell);
    const done = await toClipboard(text);
    for (const old of all("td.copied")) old.classList.remove("copied");
    cell.classList.add("copied");
    if (done) {
      cell.focus({ preventScroll: true });
      toast(`Copied: ${text}`);
    } else offer(text);
  }

  async function toClipboard(text) {
    try {
      await navigator.clipboard.writeText(text); // absent where the page is not trusted
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.style.cssText = "position:fixed;top:0;left:0;opacity:0";
      document.body.append(area);
      area.select();
      let done = false;
      try {
        done = document.execCommand("copy");
      } catch {
        done = false;
      }
      area.remove();
      return done;
    }
  }

  let timer = 0;
  function toast(text) {
    const place = one("#toast");
    place.textContent = text;
    place.classList.add("shown");
    clearTimeout(timer);
    timer = setTimeout(hideToast, 4000);
  }
  function hideToast() {
    one("#toast").classList.remove("shown");
  }
  function offer(text) {
    toast("The browser lets no script copy. Press Ctrl+C:");
    clearTimeout(timer);
    const area = document.createElement("textarea");
    area.readOnly = true;
    area.rows = 3;
    area.value = text;
    one("#toast").append(area);
    area.select();
  }

  // ---- theme: the system's until the reader says otherwise, on this page alone

  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function nameTheme() {
    one("#theme").textContent = isDark() ? "Light" : "Dark";
    one("#theme").setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  }

  // ---- begin

  function restore() {
    readHash();
    one("#filter").value = state.q;
    for (const chip of all(".chip[data-status]")) chip.setAttribute("aria-pressed", String(state.status.has(chip.dataset.status)));
    one("#own").setAttribute("aria-pressed", String(state.own));
    for (const table of tables) if (original.has(table) || state.sort.has(table.id)) sort(table);
    filter();
    goTo(state.at);
  }

  for (const table of tables) addSorting(table);
  for (const table of all("table")) {
    table.setAttribute("role", "grid");
    table.setAttribute("aria-readonly", "true");
    for (const cell of all("tbody td", table)) if (isStop(cell)) cell.tabIndex = -1;
    rove(table);
  }
  one("#filter").addEventListener("input", (event) => {
    state.q = event.target.value.trim();
    filter();
    writeHash();
  });
  for (const chip of all(".chip")) {
    chip.addEventListener("click", () => {
      if (chip.id === "own") state.own = !state.own;
      else if (!state.status.delete(chip.dataset.status)) state.status.add(chip.dataset.status);
      chip.setAttribute("aria-pressed", String(chip.id === "own" ? state.own : state.status.has(chip.dataset.status)));
      filter();
      writeHash();
    });
  }
  for (const link of all("nav a")) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      state.at = link.getAttribute("href").slice(1);
      writeHash();
      goTo(state.at);
    });
  }
  one("#theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  addEventListener("hashchange", restore);
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of opened) fold.open = false;
  });
  one("#theme").hidden = false;
  one("#tools").hidden = false;
  nameTheme();
  restore();
  root.dataset.ready = "1";
})();
