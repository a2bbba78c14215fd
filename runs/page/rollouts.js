"use strict";
// The browser of completions: groups of an iteration, sorted by reward. Only the rows in view are in the document.
// Whatever a model wrote goes through textContent.

(() => {
  const $ = (id) => document.getElementById(id);
  const [HEIGHT, SPARE, MOST] = [38, 8, 160]; // pixels of a row; rows beyond the view; tokens of a row
  const list = $("list"), space = $("space"), detail = $("detail");
  let items = []; // what the list shows: {group} or {sample}
  let chosen = null; // a sample

  if (!data.rollouts.length) {
    $("browser").hidden = true;
    $("nothing").hidden = false;
    return;
  }

  const current = () => data.rollouts[$("run").value];
  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const prepare = (run) => {
    run.iterations = [...new Set(run.samples.map((sample) => sample.iter))].sort((a, b) => a - b);
    run.groups = new Map(); // "iteration group" -> its samples, the best first
    for (const sample of run.samples) {
      sample.prompt = asText(sample.prompt);
      sample.text = `${sample.prompt}\n${sample.completion}`.toLowerCase();
      const key = `${sample.iter} ${sample.group ?? sample.prompt}`;
      if (!run.groups.has(key)) run.groups.set(key, { iter: sample.iter, question: asText(sample.question ?? sample.prompt), samples: [] });
      run.groups.get(key).samples.push(sample);
    }
    const order = (sample) => sample.reward ?? -Infinity; // not scored: last
    for (const group of run.groups.values()) {
      group.samples.sort((a, b) => order(b) - order(a) || 0);
      const scored = group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
      group.mean = scored.length ? scored.reduce((sum, reward) => sum + reward, 0) / scored.length : null;
      group.varied = new Set(scored).size > 1;
      for (const sample of group.samples) Object.assign(sample, { mean: group.mean, varied: group.varied });
    }
    run.written = run.samples.some((sample) => sample.mask);
  };

  const FILTERS = {
    all: () => true,
    above: (sample) => sample.reward > sample.mean,
    below: (sample) => sample.reward !== null && sample.reward < sample.mean,
    cut: (sample) => !sample.stopped,
    varied: (sample) => sample.varied,
  };

  const update = () => {
    const run = current(), everywhere = $("all").checked, wanted = $("search").value.toLowerCase();
    const iteration = run.iterations[$("step").value], passes = FILTERS[$("filter").value];
    $("iteration").textContent = everywhere ? "all" : iteration;
    $("step").disabled = everywhere;
    items = [];
    let count = 0;
    for (const group of run.groups.values()) {
      if (!everywhere && group.iter !== iteration) continue;
      const samples = group.samples.filter((sample) => passes(sample) && sample.text.includes(wanted));
      if (samples.length) items.push({ group }, ...samples.map((sample) => ({ sample })));
      count += samples.length;
    }
    const thinned = run.every > 1 ? `; 1 iteration of ${run.every}, samples.jsonl has all` : "";
    $("count").textContent = `${count.toLocaleString("en")} of ${run.samples.length.toLocaleString("en")} completions${thinned}`;
    space.style.height = `${items.length * HEIGHT}px`;
    const first = items.findIndex((item) => item.sample), place = items.findIndex((item) => item.sample && item.sample === chosen);
    if (place < 0) list.scrollTop = 0;
    choose(place < 0 ? first : place);
    legend();
  };

  // --------------------------------------------------------------------------------------------------------------------
  // Colours: strength in [-1, 1] of a token; negative ones are the accent's opposite.

  const SCALES = {
    logprobs: { low: "certain", high: "log-prob −4 or less", of: (sample, i) => -sample.logprobs?.[i] / 4 },
    entropies: { low: "entropy 0", high: "2 nats or more", of: (sample, i) => sample.entropies?.[i] / 2 },
    advantage: { low: "advantage −2", high: "+2", both: true, of: (sample) => sample.advantage / 2 },
    change: { low: "−2 nats from the reference", high: "+2", both: true, of: (sample, i) => (sample.logprobs?.[i] - sample.ref_logprobs?.[i]) / 2 },
    teacher: { low: "the teacher likes it 2 nats less", high: "2 nats more", both: true, of: (sample, i) => (sample.teacher_logprobs?.[i] - sample.logprobs?.[i]) / 2 },
  };
  const tint = (strength, both) => {
    const share = Math.round(50 * Math.min(1, Math.abs(strength)));
    return share ? `color-mix(in srgb, var(${both ? (strength < 0 ? "--bad" : "--good") : "--accent"}) ${share}%, transparent)` : "";
  };
  const legend = () => {
    const scale = SCALES[$("colour").value], steps = scale.both ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1];
    [$("low").textContent, $("high").textContent] = [scale.low, scale.high];
    $("scale").style.background = `linear-gradient(90deg, ${steps.map((s) => tint(s, scale.both) || "transparent").join(", ")})`;
    $("written").hidden = !current().written;
  };

  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
  // A completion has parts: turns of the model, and between them what tools or an environment replied.
  const isWritten = (sample, i) => sample.mask?.[i] === 0; // by them, so the token has no figures
  const labels = (messages) => {
    const texts = [];
    let turns = 0, before;
    for (const { role, name = "", tool_calls = [] } of messages) {
      const called = tool_calls.map((call) => call.function.name || "?").join(", "); // "": a call that nobody can read
      const text = role === "assistant" ? `Turn ${++turns}${called && ` calls ${called}`}` : `${role} ${name}`.trim();
      if (role === "assistant" || before === "assistant") texts.push(text);
      else texts.push(`${texts.pop()}, ${text}`);
      before = role;
    }
    return texts;
  };
  const tokens = (sample, most, oneLine) => {
    const box = make("div", "tokens"), scale = SCALES[$("colour").value], titles = labels(sample.messages ?? []);
    const texts = sample.tokens ?? [sample.completion];
    let part;
    texts.slice(0, most).forEach((text, i) => {
      const written = isWritten(sample, i), last = i === texts.length - 1;
      if (!i || written !== isWritten(sample, i - 1)) {
        part = make("div", written ? "written" : "");
        part.dataset.label = titles[box.childElementCount] ?? "";
        box.append(part);
      }
      const isEnd = !text && (last ? sample.stopped : !written && isWritten(sample, i + 1));
      const span = make("span", "", text.replaceAll("\n", oneLine ? "↵" : "↵\n") || (isEnd ? "■" : "◦"));
      if (sample.tokens && !written) span.style.background = tint(scale.of(sample, i) || 0, scale.both);
      span.dataset.token = i;
      part.append(span);
    });
    return box;
  };

  // --------------------------------------------------------------------------------------------------------------------
  // The list and the chosen completion

  const row = (item, index) => {
    const element = make("div", item.group ? "row group" : "row");
    element.style.top = `${index * HEIGHT}px`;
    if (item.group) {
      element.append(make("b", "", item.group.question.replaceAll("\n", "↵")));
      element.append(make("span", "right", `iteration ${item.group.iter} · mean ${number(item.group.mean)}`));
      return element;
    }
    const sample = item.sample, advantage = make("span", "advantage", number(sample.advantage));
    if (sample.advantage) advantage.classList.add(sample.advantage > 0 ? "above" : "below");
    element.id = `row-${index}`;
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", sample === chosen);
    if (sample === chosen) element.classList.add("chosen");
    element.append(make("span", "reward", number(sample.reward)), advantage, tokens(sample, MOST, true));
    element.addEventListener("click", () => choose(index));
    return element;
  };

  const render = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - SPARE);
    const last = Math.min(items.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + SPARE);
    space.replaceChildren(...items.slice(first, last).map((item, i) => row(item, first + i)));
    if (!items.length) space.append(make("p", "quiet", "No completion matches."));
    list.setAttribute("aria-activedescendant", space.querySelector(".chosen")?.id ?? "");
  };

  const named = (values, className) => {
    const list = make("dl", className);
    for (const [name, value] of Object.entries(values)) {
      const box = make("div");
      box.append(make("dt", "", name), make("dd", "", asText(value)));
      list.append(box);
    }
    return list;
  };

  // The completion of a place in the list, which is brought into view.
  const choose = (place) => {
    const sample = chosen = items[place]?.sample ?? null, top = place * HEIGHT;
    if (top < list.scrollTop + HEIGHT) list.scrollTop = top - HEIGHT;
    if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
    render();
    detail.replaceChildren();
    if (!sample) return;
    const length = sample.tokens ? `${sample.tokens.length} tokens` : `${sample.completion.length} characters`;
    const shown = { reward: number(sample.reward, 3), advantage: number(sample.advantage, 3), length, end: sample.stopped ? "stopped" : "cut off" };
    if (sample.mask) shown.replies = `${sample.mask.filter((sampled) => !sampled).length} tokens`;
    const about = ["Completion"];
    if (sample.messages) about.push(`turns: ${sample.messages.filter(({ role }) => role === "assistant").length}`);
    if (sample.tool_errors !== undefined) about.push(`tool errors: ${sample.tool_errors}`);
    const completion = tokens(sample, Infinity, false), line = make("p", "", sample.tokens ? "Point at a token for its figures. ■ is a stop token." : "");
    line.id = "token";
    completion.addEventListener("pointerover", (event) => point(event.target));
    detail.append(make("h3", "", `Prompt, iteration ${sample.iter}`), make("p", "text", sample.prompt), make("h3", "", about.join(" · ")));
    detail.append(completion, line, make("h3", "", "Figures"), named(shown));
    const rewards = Object.entries(sample.rewards ?? {}).map(([name, value]) => [name, number(value, 3)]);
    if (rewards.length) detail.append(make("h3", "", "Rewards before weights"), named(Object.fromEntries(rewards)));
    if (Object.keys(sample.columns ?? {}).length) detail.append(make("h3", "", "Columns"), named(sample.columns, "columns"));
    detail.scrollTop = 0;
  };

  // The figures of a token, an element of the detail.
  const point = (element) => {
    const i = element?.dataset.token;
    if (i === undefined || typeof chosen.logprobs?.[i] !== "number") return;
    detail.querySelector(".at")?.classList.remove("at");
    element.classList.add("at");
    if (isWritten(chosen, i)) {
      $("token").textContent = `token ${+i + 1}: not written by the model`;
      return;
    }
    const logprob = chosen.logprobs[i], figures = [`token ${+i + 1}: log-prob ${number(logprob, 3)}, probability ${number(Math.exp(logprob), 3)}`];
    if (chosen.entropies) figures.push(`entropy ${number(chosen.entropies[i], 3)}`);
    if (chosen.ref_logprobs) figures.push(`reference's log-prob ${number(chosen.ref_logprobs[i], 3)}`);
    if (chosen.teacher_logprobs) figures.push(`teacher's log-prob ${number(chosen.teacher_logprobs[i], 3)}`);
    $("token").textContent = figures.join(", ");
  };

  const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -Infinity, End: Infinity };
  list.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in STEPS)) return;
    event.preventDefault();
    const places = items.flatMap((item, i) => (item.sample ? [i] : []));
    if (!places.length) return;
    const now = places.findIndex((i) => items[i].sample === chosen);
    choose(places[Math.max(0, Math.min(places.length - 1, now + STEPS[event.key]))]);
  });
  list.addEventListener("scroll", () => requestAnimationFrame(render));
  addEventListener("resize", render);
  data.rollouts.forEach((run, i) => {
    prepare(run);
    const option = make("option", "", run.run);
    option.value = i;
    $("run").append(option);
  });
  $("which-run").hidden = data.rollouts.length < 2;
  const newest = () => { $("step").value = $("step").max = current().iterations.length - 1; };
  newest();
  $("run").addEventListener("input", newest);
  for (const name of ["run", "filter", "colour", "search", "step", "all"]) $(name).addEventListener("input", update);
  update();
})();
