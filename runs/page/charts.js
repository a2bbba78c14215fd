"use strict";
// Draws the charts that Python has described (runs/page/charts.py) with plotly, in the page's colours.

const data = JSON.parse(document.getElementById("data").textContent);

const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};

// A custom property as a colour that plotly understands.
const colour = (name) => {
  const probe = make("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const computed = getComputedStyle(probe).color;
  probe.remove();
  return computed;
};

const trace = (series) => {
  const tint = data.palette[series.color % data.palette.length];
  const hovertemplate = "%{x}: %{y:,.4~g}<extra>%{fullData.name}</extra>";
  const common = { name: escaped(series.name), x: series.x, y: series.y, hovertemplate };
  const few = series.x.length < 30;
  const line = { type: "scatter", mode: few ? "lines+markers" : "lines", cliponaxis: false, line: { color: tint, width: 2, dash: series.style }, marker: { size: 5, color: tint } };
  if (series.style !== "block") return { ...common, ...line };
  return { ...common, type: "bar", width: series.width, offset: 0, marker: { color: tint, line: { width: 0 } } };
};

// plotly reads a few tags in the names that it shows; a run's name is text.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

const mouse = matchMedia("(pointer: fine)"); // a finger that drags over a chart scrolls the page

const blocks = (chart) => chart.series[0].style === "block";

const layout = (chart) => {
  const [text, quiet, line] = ["--text", "--quiet", "--line"].map(colour);
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickfont: { color: quiet, size: 12 }, automargin: true };
  const title = (words) => ({ text: words, font: { color: quiet, size: 12 }, standoff: 8 });
  const places = blocks(chart) ? [] : chart.series.flatMap((series) => series.x);
  const range = places.length && [places.reduce((a, b) => Math.min(a, b)), places.reduce((a, b) => Math.max(a, b))];
  return {
    font: { family: "system-ui, sans-serif", color: text, size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 14, t: 10, b: 40 }, dragmode: mouse.matches && "zoom", hovermode: "closest", bargap: 0.35,
    barmode: "overlay",
    showlegend: chart.series.length > 1, legend: { orientation: "h", traceorder: "normal", y: -0.22, yanchor: "top", font: { color: quiet, size: 12 } },
    xaxis: { ...axis, title: title("iteration"), showgrid: false, ...(range && range[0] < range[1] ? { range } : {}) },
    yaxis: { ...axis, title: title(chart.unit), rangemode: "tozero", fixedrange: true },
  };
};

const draw = (chart) =>
  Plotly.react(chart.plot, chart.series.map(trace), layout(chart), { displayModeBar: false, responsive: true });

for (const chart of data.charts) {
  const card = make("figure", blocks(chart) ? "chart full-width" : "chart");
  card.style.margin = 0;
  chart.plot = make("div", "plot");
  chart.plot.setAttribute("role", "img");
  chart.plot.setAttribute("aria-label", `${chart.title}; the table at the end has the figures`);
  card.append(make("h3", "", chart.title), chart.plot);
  document.querySelector(`.charts[data-section="${chart.section}"]`).append(card);
}

// Light or dark is the system's choice. The page answers between two charts.
const paint = () => data.charts.forEach((chart) => setTimeout(draw, 0, chart));

// plotly's 5 MB stand in the page as text. They become a script once the rest has been painted.
const { nonce } = document.currentScript;
const start = () => {
  const script = Object.assign(make("script"), { nonce, text: document.getElementById("plotly").textContent });
  document.head.append(script);
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
};
addEventListener("DOMContentLoaded", () => requestAnimationFrame(() => setTimeout(start)));
