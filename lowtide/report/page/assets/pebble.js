// The pebble game: watch it, or play it.

function amount(game, number) { return game.folded ? bytes(number) : String(number); }
function spent(game, number) { return game.folded ? seconds(number) : `${Math.round(number)}`; }

class Board {  // the nodes and edges of a game
  constructor(game, click) {
    this.game = game;
    const rows = [...new Set(game.rows)], wide = Math.max(...game.columns) + 1, placed = new Map();
    const gap = game.folded ? 74 : 64, tall = rows.length > 1 ? 150 : 0;
    this.at = game.needs.map((_, node) => {
      const column = game.columns[node], key = `${game.rows[node]} ${column}`, same = placed.get(key) ?? 0;
      placed.set(key, same + 1);
      const together = game.rows.filter((row, other) => row === game.rows[node] && game.columns[other] === column).length;
      const spread = rows.length > 1 ? 0 : (same - (together - 1) / 2) * 58;
      return { x: 46 + column * gap, y: 60 + (rows.length > 1 ? rows.indexOf(game.rows[node]) * tall : 0) + spread };
    });
    const top = Math.min(...this.at.map(one => one.y)) - 58, bottom = Math.max(...this.at.map(one => one.y)) + 56;
    this.width = 46 * 2 + (wide - 1) * gap;
    this.svg = drawn("svg", { class: "plot board", viewBox: `0 ${top} ${this.width} ${bottom - top}`, role: "group", "aria-label": game.name });
    this.svg.style.maxHeight = "46vh";
    game.needs.forEach((row, node) => row.forEach(other => this.svg.append(this.edge(other, node))));
    this.nodes = game.needs.map((_, node) => this.node(node, click));
    this.svg.append(...this.nodes.map(node => node.group));
    rows.length > 1 && rows.forEach((row, number) => this.svg.append(drawn("text", { x: 6, y: 60 + number * tall - 40, "font-size": 11 }, document.createTextNode(row))));
  }
  edge(from, to) {
    const a = this.at[from], b = this.at[to], far = Math.abs(b.x - a.x), level = a.y === b.y;
    const lift = level && far > 80 ? (a.y < 100 ? -1 : 1) * Math.min(84, 30 + far / 5) : 0;
    return drawn("path", { d: `M${a.x} ${a.y}Q${(a.x + b.x) / 2} ${(a.y + b.y) / 2 + lift} ${b.x} ${b.y}`, fill: "none", stroke: "var(--line)", "stroke-width": 2 });
  }
  node(node, click) {
    const { x, y } = this.at[node], group = drawn("g", { tabindex: 0, role: "button", "data-node": node, transform: `translate(${x} ${y})` });
    const ring = drawn("circle", { r: 21, fill: "var(--card)", stroke: "var(--faint)", "stroke-width": 2 });
    const stone = drawn("circle", { r: 15, fill: "var(--accent)", class: "stone" });
    stone.style.transition = "transform .16s ease-out, opacity .16s";
    const text = this.game.labels[node], short = text.length > 9 ? `\u2026${text.slice(-8)}` : text;
    const label = drawn("text", { "text-anchor": "middle", y: this.game.folded ? 37 : 5, "font-size": this.game.folded ? 10 : 13, style: "pointer-events: none" }, document.createTextNode(short));
    group.append(ring, stone, label);
    group.style.cursor = "pointer";
    group.addEventListener("click", () => click(node));
    group.addEventListener("keydown", event => { if (event.key === "Enter") click(node); });
    group.addEventListener("pointermove", event => tip.show(event.clientX, event.clientY, make("div", { class: "head" }, text),
      make("div", { class: "where" }, this.game.needs[node].length ? `needs ${this.game.needs[node].map(one => this.game.labels[one]).join(", ")}` : "needs nothing"),
      this.game.folded ? make("div", { class: "where" }, `${bytes(this.game.weights[node])}, ${seconds(this.game.seconds[node])}`) : null));
    group.addEventListener("pointerleave", () => tip.hide());
    return { group, ring, stone, label };
  }
  show(position) {
    this.nodes.forEach(({ group, ring, stone, label }, node) => {
      const here = position.pebbles.has(node), times = position.times[node] ?? 0;
      stone.style.opacity = here ? 1 : 0;
      stone.style.transform = here ? "scale(1)" : "scale(.3)";
      label.style.fill = here && !this.game.folded ? "#fff" : "var(--soft)";
      ring.setAttribute("stroke", node === position.last ? "var(--activations)" : times ? "var(--accent)" : "var(--faint)");
      ring.setAttribute("stroke-width", node === position.last ? 4 : 2);
      ring.setAttribute("stroke-dasharray", !here && times ? "4 3" : "none");
      group.setAttribute("aria-label", `${this.game.labels[node]}: ${here ? "has a pebble" : times ? "had a pebble" : "no pebble"}`);
      group.dataset.pebble = String(here);
    });
  }
}

function start(game) { return { pebbles: new Set(), times: {}, spent: 0, last: null, number: 0 }; }

function moved(game, before, move) {
  const place = move >= 0, node = place ? move : -1 - move;
  const pebbles = new Set(before.pebbles), times = { ...before.times };
  if (place) { pebbles.add(node); times[node] = (times[node] ?? 0) + 1; } else pebbles.delete(node);
  return { pebbles, times, spent: before.spent + (place ? game.seconds[node] : 0), last: node, number: before.number + 1 };
}

function weight(game, pebbles) { let sum = 0; for (const node of pebbles) sum += game.weights[node]; return sum; }

// The least time to the end from a position, by Dijkstra over positions; null where there are too many of them.
function remaining(game, position, budget, once, limit = 60000) {
  const count = game.needs.length, goal = game.sinks.reduce((mask, node) => mask | 1n << BigInt(node), 0n);
  const bit = Array.from({ length: count }, (_, node) => 1n << BigInt(node));
  const wants = game.needs.map(row => row.reduce((mask, node) => mask | bit[node], 0n));
  let first = 0n, had = 0n;
  for (const node of position.pebbles) first |= bit[node];
  if (once) for (const node of Object.keys(position.times)) had |= bit[node];
  const key = (now, before) => `${now.toString(36)} ${before.toString(36)}`;
  const best = new Map([[key(first, had), 0]]), heap = [[0, first, had]];
  const push = item => { heap.push(item); let at = heap.length - 1; while (at && heap[(at - 1) >> 1][0] > heap[at][0]) { const up = (at - 1) >> 1; [heap[at], heap[up]] = [heap[up], heap[at]]; at = up; } };
  const pop = () => { const top = heap[0], last = heap.pop(); if (heap.length) { heap[0] = last; let at = 0; for (;;) { let down = 2 * at + 1; if (down >= heap.length) break; if (down + 1 < heap.length && heap[down + 1][0] < heap[down][0]) down++; if (heap[down][0] >= heap[at][0]) break; [heap[at], heap[down]] = [heap[down], heap[at]]; at = down; } } return top; };
  const heavy = mask => { let sum = 0; for (let node = 0; node < count; node++) if (mask & bit[node]) sum += game.weights[node]; return sum; };
  function* without(mask, others, over) {
    if (over <= 0) { yield mask; return; }
    for (let number = 0; number < others.length; number++) if (game.weights[others[number]]) yield* without(mask & ~bit[others[number]], others.slice(number + 1), over - game.weights[others[number]]);
  }
  while (heap.length) {
    const [cost, now, before] = pop();
    if (cost > best.get(key(now, before))) continue;
    if ((now & goal) === goal) return cost;
    if (best.size > limit) return null;
    for (let node = 0; node < count; node++) {
      if (now & bit[node] || before & bit[node] || (now & wants[node]) !== wants[node]) continue;
      const others = [];
      for (let one = 0; one < count; one++) if (now & bit[one] && !(wants[node] & bit[one])) others.push(one);
      for (const next of without(now | bit[node], others, heavy(now | bit[node]) - budget)) {
        const then = once ? before | bit[node] : 0n, name = key(next, then), all = cost + game.seconds[node];
        if (!(all >= (best.get(name) ?? Infinity))) { best.set(name, all); push([all, next, then]); }
      }
    }
  }
  return Infinity;
}

begin((data, main) => {
  const { game, plays } = data;
  let play = plays[0], mode = "watch", at = 0, timer = null, frames = [], hand = start(game), message = "";
  const board = new Board(game, node => click(node));
  const count = make("div", { class: "number", id: "count" }), cost = make("div", { class: "number", id: "cost" }), verdict = make("p", { class: "lead", id: "verdict", role: "status" });
  const pips = make("div", { class: "legend", id: "pips" }), countNote = make("div", { class: "note" }), costNote = make("div", { class: "note" });
  const scrub = make("input", { type: "range", min: "0", value: "0", id: "scrub", "aria-label": "Move", style: { width: "100%", accentColor: "var(--accent)" }, oninput: () => { pause(); go(Number(scrub.value)); } });
  const button = make("button", { type: "button", class: "plain", id: "play", onclick: () => timer ? pause() : resume() }, "\u25b6 play");
  const back = make("button", { type: "button", class: "plain", id: "back", "aria-label": "One move back", onclick: () => { pause(); go(at - 1); } }, "\u25c0 step");
  const next = make("button", { type: "button", class: "plain", id: "step", "aria-label": "One move on", onclick: () => { pause(); go(at + 1); } }, "step \u25b6");
  const again = make("button", { type: "button", class: "plain", id: "again", onclick: () => { hand = start(game); message = ""; draw(); } }, "start again");
  const select = make("select", { class: "plain", id: "plays", "aria-label": "Which game", onchange: () => choose(plays[Number(select.value)]) }, ...plays.map((one, number) => make("option", { value: String(number) }, one.name)));
  const watching = make("div", { class: "tools" }, back, button, next, make("div", { style: { flex: "1", minWidth: "8rem" } }, scrub));
  const playing = make("div", { class: "tools" }, again, make("span", { class: "hint" }, "Click a node to place a pebble, or to take it off."));
  const best = () => `${spent(game, play.seconds)}${game.folded ? "" : " placements"}`;

  function click(node) {
    if (mode !== "hand") { mode = "hand"; modes.querySelector('[data-name="hand"]').click(); }
    const name = game.labels[node], missing = game.needs[node].filter(one => !hand.pebbles.has(one));
    if (hand.pebbles.has(node)) { hand = moved(game, hand, -1 - node); message = ""; }
    else if (missing.length) message = `${name} needs a pebble on ${missing.map(one => game.labels[one]).join(", ")}.`;
    else if (play.once && hand.times[node]) message = `${name} had its pebble; in the one-shot game nothing is computed twice.`;
    else if (weight(game, hand.pebbles) + game.weights[node] > play.budget) message = `No pebble is left for ${name}: take one off first.`;
    else { hand = moved(game, hand, node); message = ""; }
    draw();
  }
  function judge() {
    if (game.sinks.every(node => hand.pebbles.has(node))) {
      const more = hand.spent - play.seconds;
      return more < 1e-9 ? `Done in ${spent(game, hand.spent)}: ${play.proven ? "that is the optimum." : "as good as the best that is known."}` : `Done in ${spent(game, hand.spent)}; the optimum is ${best()}: ${spent(game, more)} more.`;
    }
    const rest = remaining(game, hand, play.budget, play.once);
    if (rest === null) return `How many more are needed is not known; the optimum is ${best()}.`;
    if (rest === Infinity) return "From here it can\u2019t be won: start again, or take the last move back.";
    const lost = hand.spent + rest - play.seconds;
    return `At least ${spent(game, rest)} to go${lost < 1e-9 ? ": you can still reach the optimum." : `: ${spent(game, lost)} more than the optimum.`}`;
  }
  function draw() {
    const position = mode === "watch" ? frames[at] : hand, used = weight(game, position.pebbles);
    board.show(position);
    count.replaceChildren(figure("weight", used, `${amount(game, used)} of ${amount(game, play.budget)}`));
    cost.replaceChildren(figure("spent", position.spent, `${spent(game, position.spent)} of ${spent(game, play.seconds)}`));
    countNote.textContent = game.folded ? "memory in use, of the budget" : "pebbles down, of the budget";
    costNote.textContent = `${game.folded ? "time" : "placements"} so far, of the ${play.proven ? "optimum" : "best that is known"}`;
    pips.replaceChildren();
    if (!game.folded) for (let one = 0; one < play.budget; one++) pips.append(make("span", { class: "swatch", style: { borderRadius: "50%", width: "1rem", height: "1rem", background: one < used ? "var(--accent)" : "transparent", border: "2px solid var(--accent)" } }));
    else pips.append(make("div", { style: { width: "100%" } }, stack({ used, free: Math.max(0, play.budget - used) }, play.budget, { used: "--accent", free: "--gone" })));
    scrub.value = String(at);
    if (mode === "watch") {
      const move = at ? play.moves[at - 1] : null;
      verdict.textContent = move === null ? "Press play: a node takes a pebble while all that it needs have one." : `Move ${at} of ${play.moves.length}: ${move >= 0 ? (position.times[move] > 1 ? "compute again" : "place a pebble on") : "take the pebble off"} ${game.labels[move >= 0 ? move : -1 - move]}.`;
    } else verdict.textContent = message || judge();
  }
  function go(to) { at = Math.min(Math.max(0, to), frames.length - 1); draw(); }
  function resume() { if (at === frames.length - 1) at = 0; button.textContent = "\u275a\u275a pause"; timer = setInterval(() => { if (at >= frames.length - 1) pause(); else go(at + 1); }, 420); }
  function pause() { clearInterval(timer); timer = null; button.textContent = "\u25b6 play"; }
  function choose(one) {
    pause();
    play = one;
    frames = [start(game)];
    for (const move of play.moves) frames.push(moved(game, frames.at(-1), move));
    scrub.max = String(frames.length - 1);
    hand = start(game);
    message = "";
    go(0);
  }
  function stack(parts, most, tones) {
    return make("div", { class: "stack" }, ...Object.entries(parts).map(([name, part]) => make("i", { style: { width: `${100 * part / most}%`, background: `var(${tones[name]})` } })));
  }
  const modes = choice("Watch or play", { watch: "watch", hand: "play by hand" }, "watch", name => { pause(); mode = name; watching.hidden = name !== "watch"; playing.hidden = name === "watch"; watching.style.display = name === "watch" ? "" : "none"; playing.style.display = name === "watch" ? "none" : ""; draw(); });
  playing.style.display = "none";
  const rows = plays.map((one, number) => make("tr", {}, make("td", {}, make("button", { type: "button", class: "plain", onclick: () => { select.value = String(number); choose(one); window.scrollTo({ top: 0 }); } }, one.name)), make("td", { class: "n", "data-value": String(one.budget) }, amount(game, one.budget)), make("td", { class: "n", "data-value": String(one.seconds) }, spent(game, one.seconds)), make("td", { class: "optional" }, one.proven ? "proven" : "not proven")));
  main.append(
    make("div", { class: "hero" }, make("p", { class: "target" }, game.folded ? "A step, folded to its modules" : "The pebble game"), make("h1", {}, game.name),
      make("p", { class: "facts" }, make("span", {}, "Nodes are computations, pebbles are memory. A node takes a pebble while all that it needs have one; what must be there in the end keeps its own."))),
    make("div", { class: "card" }, make("div", { class: "tools" }, modes, select), make("div", { class: "scroll" }, board.svg), watching, playing, verdict, pips,
      make("div", { class: "figures" }, make("div", { class: "figure" }, count, countNote), make("div", { class: "figure" }, cost, costNote))),
    section("ways", "Ways to play", "Ways to play", "With fewer pebbles, more must be computed again. These are the best plays that a search over all positions found.",
      make("div", { class: "card" }, make("table", { class: "rows" }, make("thead", {}, make("tr", {}, make("th", {}, "game"), make("th", { class: "n" }, game.folded ? "budget" : "pebbles"), make("th", { class: "n" }, game.folded ? "time" : "placements"), make("th", { class: "optional" }, ""))), make("tbody", {}, ...rows)))));
  choose(play);
  window.lowtide = { data, remaining, start, moved, go, click };
});
