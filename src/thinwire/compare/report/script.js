(() => {
  const tables = [...document.querySelectorAll(".wide")];
  const hint = () => tables.forEach(table => table.previousElementSibling.hidden = table.scrollWidth <= table.clientWidth);
  hint();
  addEventListener("resize", hint);
  document.querySelectorAll("details").forEach(fold => fold.addEventListener("toggle", hint));
})();
if (document.getElementById("drawn")) (() => {
  const {look, figures} = JSON.parse(document.getElementById("drawn").textContent);
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")], folds = [...document.querySelectorAll("details")];
  const font = getComputedStyle(document.body).fontFamily, clear = "rgba(0,0,0,0)", hidden = new Set();
  const config = {responsive: true, displaylogo: false, displayModeBar: "hover",
                  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]};
  let printing = false, closed = [];

  const dress = ({data, layout}, colours, width, height) => {
    Object.assign(layout, {width, height, paper_bgcolor: clear, plot_bgcolor: clear,
      font: {family: font, size: 12, color: colours.text},
      hoverlabel: {bgcolor: colours.panel, bordercolor: colours.muted, align: "left", font: {color: colours.text}},
      modebar: {bgcolor: clear, color: colours.muted, activecolor: colours.text}});
    for (const name of Object.keys(layout).filter(key => /^[xy]axis/.test(key)))
      Object.assign(layout[name], {gridcolor: colours.line, linecolor: colours.line, tickcolor: colours.line});
    for (const trace of data) {
      if (trace.marker?.symbol === "circle") trace.marker.color = colours.page;
      if ("meta" in trace) trace.visible = !hidden.has(trace.meta);
    }
  };
  const draw = plot => {
    if (plot.closest("details:not([open])")) return;
    const figure = figures[plot.id], half = plot.closest(".pair");
    figure.height ??= figure.layout.height;
    const colours = dark.matches && !printing ? look.dark : look.light;
    const size = printing ? [half ? 320 : 670, half ? 230 : figure.height] : [undefined, figure.height];
    dress(figure, colours, ...size);
    plot.style.height = `${size[1]}px`;
    Plotly.react(plot, figure.data, figure.layout, config);
  };
  const drawAll = () => plots.forEach(draw);

  drawAll();
  dark.addEventListener("change", drawAll);
  folds.forEach(fold => fold.addEventListener("toggle", () => fold.querySelectorAll(".plot").forEach(draw)));
  addEventListener("beforeprint", () => {
    printing = true;
    closed = folds.filter(fold => !fold.open);
    closed.forEach(fold => fold.open = true);
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
    closed.forEach(fold => fold.open = false);
  });
  addEventListener("click", event => {
    const button = event.target.closest("button[data-strategy]");
    if (!button) return;
    const strategy = Number(button.dataset.strategy), shown = hidden.delete(strategy);
    if (!shown) hidden.add(strategy);
    for (const same of document.querySelectorAll(`button[data-strategy="${strategy}"]`))
      same.setAttribute("aria-pressed", shown);
    drawAll();
  });
})();
