(() => {
  "use strict";
  const holder = document.getElementById("figures");
  const figures = holder ? JSON.parse(holder.textContent) : [];
  for (const figure of figures) {
    for (const trace of figure.data) {
      for (const key of ["x", "width"]) if (!(key in trace) && key + "_of" in trace) trace[key] = figure.data[trace[key + "_of"]][key];
    }
  }

  // What a filter leaves of a figure: lines, points and bars of the configurations ("cases") and runs whose rows it leaves.
  let left = null;
  function filtered(figure) {
    if (!left) return figure;
    const data = figure.data.map(trace => {
      const meta = trace.meta || {};
      if (meta.of_all) return Object.assign({}, trace, {visible: false});
      if ("case" in meta) return Object.assign({}, trace, {visible: left.cases.has(meta.case)});
      if (!meta.cases && !meta.runs || !trace.x) return trace;
      const stays = meta.cases ? meta.cases.map(each => left.cases.has(each)) : meta.runs.map(each => left.runs.has(each));
      const kept = values => Array.isArray(values) && values.length === stays.length ? values.filter((_, number) => stays[number]) : values;
      const shown = Object.assign({}, trace, {visible: stays.includes(true)});
      for (const key of ["x", "y", "text", "hovertext", "textposition"]) if (key in trace) shown[key] = kept(trace[key]);
      for (const key of ["error_x", "error_y"]) if (key in trace) shown[key] = Object.assign({}, trace[key], {array: kept(trace[key].array)});
      return shown;
    });
    const shown = {data: data, layout: figure.layout};
    const lists = figure.data.map((trace, number) => (trace.y || []).length - (data[number].y || []).length);
    if ((figure.layout.yaxis || {}).type === "category") {  // a line of text for each row, of which there are fewer now
      shown.layout = Object.assign({}, figure.layout, {height: figure.layout.height - 24 * Math.max(0, ...lists)});
    }
    return shown;
  }

  // A legend below the picture needs as many rows as its names take at this width.
  function legendRows(figure, width) {
    const names = figure.data.filter(trace => trace.showlegend !== false && trace.visible !== false && trace.name).map(trace => trace.name);
    const longest = Math.max(0, ...names.map(name => name.length));
    const columns = Math.max(1, Math.floor((width - 60) / (longest * 7.2 + 50)));
    return figure.layout.showlegend && names.length > 1 ? Math.ceil(names.length / columns) : 0;
  }

  // Of ticks with texts of their own, those stay that have room at this size.
  function thinned(axis, length, isHeight) {
    if (!axis || !axis.ticktext || axis.ticktext.length < 2) return axis;
    const at = axis.tickvals.map(value => axis.type === "log" ? Math.log10(value) : value);
    const [low, high] = axis.range || [Math.min(...at), Math.max(...at)];
    const need = isHeight ? 18 : 8 * Math.max(...axis.ticktext.map(text => text.length)) + 8;
    let last = -Infinity;
    const stays = at.map(place => {
      const pixels = (place - low) / (high - low) * length;
      if (pixels - last < need) return false;
      last = pixels;
      return true;
    });
    const kept = values => values.filter((_, number) => stays[number]);
    return Object.assign({}, axis, {tickvals: kept(axis.tickvals), ticktext: kept(axis.ticktext)});
  }

  const plain = {displaylogo: false, displayModeBar: false};
  function redraw(div, figure) {
    const shown = filtered(figure);
    Plotly.react(div, shown.data, fitted(shown, div.clientWidth || 600), plain);
  }

  function fitted(figure, width) {
    const rows = legendRows(figure, width), narrow = width < 600;
    const layout = Object.assign({}, figure.layout);
    layout.height = figure.layout.height + (rows ? 16 + 19 * rows : 0);
    layout.font = Object.assign({}, layout.font, narrow ? {size: 11} : {});
    layout.margin = Object.assign({}, layout.margin, {b: 50 + (layout.margin.b || 0) + (rows ? 16 + 19 * rows : 0)});
    if (rows) layout.legend = Object.assign({}, layout.legend, {y: -(58 + (figure.layout.margin.b || 0)) / (layout.height - layout.margin.b - layout.margin.t), yanchor: "top"});
    layout.xaxis = thinned(layout.xaxis, width - layout.margin.l - layout.margin.r, false);
    layout.yaxis = thinned(layout.yaxis, layout.height - layout.margin.b - layout.margin.t, true);
    return layout;
  }

  // Lines that are hidden at first have a button each below the picture, so that the legend holds what is drawn.
  function choose(div, figure) {
    const hidden = figure.data.map((trace, number) => number).filter(number => figure.data[number].visible === false);
    if (!hidden.length) return;
    const chooser = document.createElement("details");
    chooser.className = "chooser";
    chooser.append(Object.assign(document.createElement("summary"), {textContent: hidden.length + " more lines"}));
    for (const number of hidden) {
      const trace = figure.data[number], button = document.createElement("button");
      button.type = "button";
      button.innerHTML = trace.name;  // plotly's text, in which no name is markup
      button.style.borderColor = trace.line.color;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        trace.visible = !trace.visible;
        button.setAttribute("aria-pressed", String(trace.visible));
        redraw(div, figure);
      });
      chooser.append(button);
    }
    div.after(chooser);
  }

  const drawn = [];
  function draw() {
    for (const div of document.querySelectorAll(".plotly-graph-div")) {
      const figure = figures[Number(div.dataset.figure)];
      if (!window.Plotly) {
        div.textContent = "This picture needs plotly.min.js, which belongs to the folder of the sweep: copy it along with this page.";
        div.style.minHeight = "0";
        continue;
      }
      const width = div.clientWidth || 600;
      const shown = filtered(figure);
      Plotly.newPlot(div, shown.data, fitted(shown, width), plain);
      drawn.push([div, figure, width]);
      choose(div, figure);
    }
  }

  function resize() {
    for (const entry of drawn) {
      const [div, figure, before] = entry, width = div.clientWidth;
      if (!width || width === before) continue;
      entry[2] = width;
      Plotly.relayout(div, Object.assign(fitted(filtered(figure), width), {width: width}));
    }
  }

  // Click a heading to sort by its column: numbers by value, the largest first, texts by alphabet.
  function sortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const isNumber = head.classList.contains("number");
        const falls = head.ariaSort ? head.ariaSort === "ascending" : isNumber;
        const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...body.rows].sort((one, other) => {
          const a = value(one), b = value(other);
          if (a === "" || b === "") return (a === "") - (b === "");
          const order = isNumber ? a - b : a.localeCompare(b, "en", {numeric: true});
          return falls ? -order : order;
        });
        body.append(...rows);
        heads.forEach(each => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      });
    });
  }

  // Type words to keep the rows that have all of them, at the beginning of a word: "fifo" finds s3_fifo, "lru" does not find slru.
  // A word after a "-" keeps rows without it. Rows of bounds stay where a row that stays has the same settings.
  function filterable(box) {
    const input = box.querySelector("input"), said = box.querySelector("[role=status]");
    const table = box.nextElementSibling.querySelector("table");
    const names = [...table.tHead.rows[0].cells].map((head, column) => column).filter(column => !table.tHead.rows[0].cells[column].classList.contains("number"));
    const textOf = row => names.map(column => row.cells[column].textContent.toLowerCase());
    const rows = [...table.querySelectorAll("tr[data-case]")], others = [...table.querySelectorAll("tbody tr:not([data-case])")];
    const has = (text, word) => text.split(word).slice(0, -1).some((_, number, parts) => {
      const before = parts.slice(0, number + 1).join(word).slice(-1);
      return !before || !/[a-z0-9.]/.test(before) || !/[a-z0-9]/.test(word[0]);
    });
    function apply() {
      const words = input.value.toLowerCase().split(/\s+/).filter(word => word && word !== "-");
      const fits = row => {
        const text = textOf(row).join(" ");
        return words.every(word => word[0] === "-" ? !has(text, word.slice(1)) : has(text, word));
      };
      const kept = rows.filter(row => { row.hidden = !fits(row); return !row.hidden; });
      const texts = kept.map(textOf);
      for (const row of others) row.hidden = words.length > 0 && !textOf(row).slice(1).every((text, column) => !text || texts.some(other => other[column + 1] === text));
      said.textContent = words.length ? kept.length + " of " + rows.length + " rows, and what pictures show of them" : "";
      left = words.length ? {
        cases: new Set(kept.map(row => Number(row.dataset.case))),
        runs: new Set(kept.flatMap(row => row.dataset.runs.split(" ").map(Number))),
      } : null;
      document.querySelectorAll(".chooser").forEach(chooser => { chooser.hidden = left !== null; });
      for (const [div, figure] of drawn) redraw(div, figure);
    }
    let soon = 0;
    const remember = () => {
      try { history.replaceState(null, "", input.value ? "#filter=" + encodeURIComponent(input.value) : location.pathname + location.search); } catch { /* the address stays */ }
    };
    input.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(() => { apply(); remember(); }, 150); });
    box.hidden = false;
    try { input.value = decodeURIComponent((/^#filter=(.*)/.exec(location.hash) || ["", ""])[1]); } catch { input.value = ""; }
    if (input.value) apply();
  }

  // Without the clipboard, which some browsers keep from pages that are files, the command is selected and copied as by hand.
  function copyable(button) {
    const command = button.parentElement.querySelector("pre");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.textContent);
      } catch {
        getSelection().selectAllChildren(command);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  draw();
  document.querySelectorAll(".copy").forEach(copyable);
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".filter").forEach(filterable);
  addEventListener("resize", resize);
  addEventListener("beforeprint", resize);
})();
