(() => {
  "use strict";
  const all = (query, from = document) => Array.from(from.querySelectorAll(query));
  const one = (query) => document.querySelector(query);
  all("[data-script]").forEach((part) => { part.hidden = false; });

  // --- decisions: what is shown
  const form = one("#filter"), more = one("#more"), texts = new WeakMap(), step = 50;
  let limit = step;
  const filter = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = form.elements.kind.value, only = form.elements.only.checked;
    const rows = all("#decision-rows > tr");
    let fitting = 0;
    for (const row of rows) {
      if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
      const text = texts.get(row);
      const fits = ((!kind || row.dataset.kind === kind) && (!only || row.dataset.quiet !== "1")
        && words.every((word) => text.includes(word)));
      fitting += fits ? 1 : 0;
      row.hidden = !fits || fitting > limit;
    }
    one("#shown").textContent = rows.length ? `${fitting} of ${rows.length}` : "";
    more.hidden = fitting <= limit;
    more.textContent = `Show more: ${Math.min(limit, fitting)} of ${fitting} are shown`;
  };
  if (form) {
    form.addEventListener("submit", (event) => event.preventDefault());
    const anew = () => { limit = step; filter(); };
    form.addEventListener("input", anew);
    form.addEventListener("reset", () => setTimeout(anew));
    more.addEventListener("click", () => { limit += 4 * step; filter(); });
    addEventListener("beforeprint", () => { const was = limit; limit = Infinity; filter(); limit = was; });
    addEventListener("afterprint", filter);
    filter();
  }

  // --- timeline: zoom
  const pane = one("#timeline-pane");
  let zoom = 1;
  const inner = () => pane.querySelector(".tl-in");
  const detail = () => {
    const axis = pane.querySelector(".axis");
    if (!axis) return;
    pane.style.setProperty("--room", pane.clientWidth - 4 + "px");
    const counts = (axis.dataset.counts || "").split(",").map(Number);
    let level = 0;
    counts.forEach((count, index) => { if (count * 70 <= inner().clientWidth) level = index; });
    pane.dataset.level = level;
  };
  const stretch = (factor, at = 0.5) => {
    const before = zoom, spot = pane.scrollLeft + pane.clientWidth * at;
    zoom = factor ? Math.min(64, Math.max(1, zoom * factor)) : 1;
    pane.style.setProperty("--zoom", zoom);
    pane.scrollLeft = spot * zoom / before - pane.clientWidth * at;
    one("#zoom").textContent = zoom === 1 ? "all" : `×${zoom}`;
    detail();
  };
  if (pane) {
    all("[data-zoom]").forEach((button) => button.addEventListener("click", () => stretch(Number(button.dataset.zoom))));
    pane.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "=") stretch(2);
      else if (event.key === "-") stretch(0.5);
      else if (event.key === "0") stretch(0);
      else return;
      event.preventDefault();
    });
    pane.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      stretch(event.deltaY < 0 ? 2 : 0.5, (event.clientX - pane.getBoundingClientRect().left) / pane.clientWidth);
    }, { passive: false });
    addEventListener("resize", detail);
    detail();
  }

  // --- live: parts that have changed are put in place of the old ones
  const live = one("#live");
  if (!live) return;
  const swap = (name, digest, html) => {
    const part = one(`[data-part="${name}"]`);
    if (!part) return;
    const open = new Map(all("details[data-key]", part).map((item) => [item.dataset.key, item.open]));
    const focus = part.contains(document.activeElement) ? document.activeElement.closest("[data-key]") : null;
    const key = focus && focus.dataset.key, left = pane ? pane.scrollLeft : 0;
    part.innerHTML = html;
    part.dataset.digest = digest;
    for (const item of all("details[data-key]", part)) if (open.has(item.dataset.key)) item.open = open.get(item.dataset.key);
    if (key) {
      const again = all("[data-key]", part).find((item) => item.dataset.key === key);
      const target = again && (again.querySelector("summary") || again);
      if (target) target.focus({ preventScroll: true });
    }
    if (name === "timeline" && pane) { detail(); pane.scrollLeft = left; }
    if (name === "decisions" && form) filter();
  };
  const poll = async () => {
    let wait = 2000;
    try {
      const have = new URLSearchParams(all("[data-part]").map((part) => [part.dataset.part, part.dataset.digest]));
      const stop = new AbortController(), timer = setTimeout(() => stop.abort(), 20000);
      const reply = await fetch("live.json?" + have, { cache: "no-store", signal: stop.signal });
      clearTimeout(timer);
      if (!reply.ok) throw new Error(reply.status);
      const said = await reply.json();
      for (const [name, digest, html] of said.parts) swap(name, digest, html);
      live.textContent = said.problem || `Live, as of ${said.at}`;
      live.classList.toggle("off", Boolean(said.problem));
      wait = said.wait * 1000;
    } catch (error) {
      live.textContent = "The report is not served any more; this is the last that was seen.";
      live.classList.add("off");
      wait = 5000;
    }
    setTimeout(poll, document.hidden ? Math.max(wait, 10000) : wait);
  };
  setTimeout(poll, 1000);
})();
