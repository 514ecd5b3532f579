// Draws the figures of a run's page from the data beside it. All text that a run has said goes through textContent,
// or onto a canvas: none becomes markup.
(() => {
  "use strict";
  const began = performance.now();
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const one = runs.length === 1 ? runs[0] : null;
  // As the reader chose: a browser keeps that when a page is loaded again.
  const state = { over: document.querySelector('input[name="over"]:checked').value, log: document.getElementById("log").checked };
  const SPEEDS = ["steps per second", "examples per second"];
  const STATES = {
    training: "training", running: "running", serving: "serving", starting: "starting", closed: "closed",
    silent: "silent", away: "away", "given up": "given-up", "on another release": "other", stopped: "stopped",
  };
  const OVER_BOTH = ["overview", "curve", "saves"]; // the others are over time alone
  const MAX_LINES = 60;
  const MANY = 300; // marks that are drawn as one shape

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
  const faded = (hex, part) => hex + Math.round(part * 255).toString(16).padStart(2, "0");
  const text = (value) => (value === null || value === undefined ? "–" : String(value));
  const digits = (value) => {
    if (typeof value !== "number") return text(value);
    if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en");
    if (value && Math.abs(value) < 0.001) return Number(value.toPrecision(4)).toExponential();
    return String(Number(value.toPrecision(4)));
  };
  const duration = (seconds) => {
    if (seconds < 10) return `${Number(seconds.toPrecision(3))} s`;
    if (seconds < 120) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 120) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  // Hours, minutes and seconds, as an axis has them.
  const elapsed = (seconds) => {
    const whole = Math.round(seconds);
    const two = (value) => String(value).padStart(2, "0");
    const rest = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
    return whole < 3600 ? rest : `${Math.floor(whole / 3600)}:${rest}`;
  };
  const bytes = (count) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (count < 1024) return `${Number(count.toPrecision(3))} ${unit}`;
      count /= 1024;
    }
    return `${Number(count.toPrecision(3))} TiB`;
  };
  // An axis of bytes has round numbers in its own unit.
  const unitOf = (most) => {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, most)) / 10)));
    return { by: 2 ** (10 * power), name: ["B", "KiB", "MiB", "GiB", "TiB"][power] };
  };
  const moment = (milliseconds) => {
    const date = new Date(milliseconds);
    const two = (value) => String(value).padStart(2, "0");
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
      `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  };

  // Of one run the axis has times, of several the time since each began.
  const place = (run, t) => (one ? t * 1000 : t - run.began);
  const overTime = () => state.over === "time";
  const points = (run, part, name) => {
    const { t, step, values } = run[part];
    const found = values[name] || [];
    const gap = longGap(t);
    const made = [];
    found.forEach((value, at) => {
      // Where nothing was reported for long, or the training went back, the line is broken.
      if (part === "series" && at && (t[at] - t[at - 1] > gap || step[at] < step[at - 1])) made.push([null, null]);
      made.push([overTime() ? place(run, t[at]) : step[at], value]);
    });
    return made;
  };
  const gapsOf = new Map(); // so that 20,000 times are sorted once
  const longGap = (t) => {
    if (!gapsOf.has(t)) gapsOf.set(t, longGapOf(t));
    return gapsOf.get(t);
  };
  const longGapOf = (t) => {
    const gaps = t.slice(1).map((at, number) => at - t[number]).sort((a, b) => a - b);
    return Math.max(3, 8 * (gaps[Math.floor(gaps.length / 2)] || 0));
  };
  const limits = () => {
    if (overTime()) {
      if (one) return { min: one.began * 1000, max: Math.max(one.until, one.began + 1) * 1000 };
      return { min: 0, max: Math.max(1, ...runs.map((run) => (run.until || 0) - (run.began || 0))) };
    }
    let most = 1;
    for (const run of runs) for (const part of ["series", "evaluations"]) for (const step of run[part].step) if (step > most) most = step;
    return { min: 0, max: most };
  };
  const axisOfX = (more) => {
    const label = { color: colour("muted"), fontSize: 11, hideOverlap: true, alignMinLabel: "left", alignMaxLabel: "right" };
    if (overTime()) {
      label.formatter = one
        ? { year: "{yyyy}", month: "{MMM}", day: "{MMM} {d}", hour: "{HH}:{mm}", minute: "{HH}:{mm}", second: "{HH}:{mm}:{ss}" }
        : elapsed;
    }
    return {
      type: overTime() && one ? "time" : "value", ...limits(), axisLine: { lineStyle: { color: colour("line") } },
      axisLabel: label, axisTick: { show: false }, splitLine: { show: false }, ...more,
    };
  };
  // Above the values there is room for the marks, which hide no curve.
  const withMarks = (log) => (!one || !one.marks.length ? {} : {
    max: ({ min, max }) => (log ? max * (max / min || 1) ** 0.18 : max + 0.18 * (max - min || Math.abs(max) || 1)),
    axisLabel: { color: colour("muted"), fontSize: 11, formatter: digits, showMaxLabel: false },
  });
  const axisOfY = (more) => ({
    type: "value", scale: true, axisLabel: { color: colour("muted"), fontSize: 11, formatter: digits },
    splitLine: { lineStyle: { color: colour("grid") } }, ...more,
  });
  const zoom = () => [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, filterMode: "none", throttle: 40 }];

  const element = (tag, words, kind) => {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    if (kind) made.className = kind;
    return made;
  };
  const tip = (title, lines) => {
    const made = element("div", undefined, "tip");
    made.append(element("b", title));
    for (const line of lines) made.append(typeof line === "string" ? element("p", line) : line);
    return made;
  };
  const ofMark = (mark) => {
    const made = element("p", undefined, `of-mark ${mark.kind}`);
    made.append(element("b", mark.what));
    const where = [mark.task, mark.host].filter(Boolean).join(" at ");
    const details = [];
    if (mark.step !== null) details.push(`at step ${mark.step.toLocaleString("en")}`);
    if (mark.seconds !== null) details.push(mark.kind === "fault" ? `lasted ${duration(mark.seconds)}` : `after ${duration(mark.seconds)}`);
    if (mark.lost) details.push(`${mark.lost.toLocaleString("en")} steps lost`);
    made.append(`${where ? `: ${where}` : ""}${details.length ? `, ${details.join(", ")}` : ""}${mark.message ? `. ${mark.message}` : ""}`);
    return made;
  };
  const heading = (x) => (!overTime() ? `step ${Math.round(x).toLocaleString("en")}` : one ? moment(x) : `${duration(x)} after the beginning`);
  const tooltip = (more) => ({
    confine: true, backgroundColor: colour("card"), borderColor: colour("line"), padding: [7, 10],
    textStyle: { color: colour("text"), fontSize: 12 }, extraCssText: "", ...more,
  });

  const xOfMark = (mark) => (overTime() ? place(one, mark.t) : mark.step);
  // The marks that stand near a place of a figure, as it is zoomed; faults first.
  const near = (chart, x) => {
    const pixel = chart.convertToPixel({ xAxisIndex: 0 }, x);
    const found = one.marks.filter((mark) => {
      const at = xOfMark(mark);
      return at !== null && Math.abs(chart.convertToPixel({ xAxisIndex: 0 }, at) - pixel) < 7;
    });
    return found.sort((a, b) => (b.kind === "fault") - (a.kind === "fault") || a.t - b.t);
  };
  const KINDS_OF_MARK = { fault: ["triangle", 180], recovery: ["circle", 0], other: ["diamond", 0] };
  const markSeries = () => {
    if (!one) return [];
    const many = one.marks.length > MANY;
    const made = Object.entries(KINDS_OF_MARK).map(([kind, [symbol, rotate]]) => ({
      large: many, largeThreshold: 1, silent: many, name: `marks ${kind}`, type: "scatter", yAxisIndex: 1, z: 5,
      symbol: many ? "rect" : symbol, symbolRotate: many ? 0 : rotate, symbolSize: many ? [1, 8] : kind === "fault" ? 10 : 8,
      itemStyle: { color: colour(kind === "other" ? "muted" : kind), borderColor: colour("card"), borderWidth: many ? 0 : 1, opacity: 1 },
      data: one.marks.filter((mark) => mark.kind === kind && xOfMark(mark) !== null).map((mark) => [xOfMark(mark), kind === "fault" ? 0.97 : 0.91]),
    }));
    const faults = one.marks.filter((mark) => mark.kind === "fault" && xOfMark(mark) !== null);
    if (faults.length <= MAX_LINES) {
      made[0].markLine = {
        silent: true, symbol: "none", animation: false, label: { show: false },
        lineStyle: { color: colour("fault"), width: 1, type: [3, 3], opacity: 0.6 }, data: faults.map((mark) => ({ xAxis: xOfMark(mark) })),
      };
    }
    return made;
  };
  // What took most of a stretch in which little was productive.
  const bands = () => {
    if (!one || !overTime() || !one.time) return [];
    const { edges, kinds } = one.time;
    const found = [];
    for (let at = 0; at + 1 < edges.length; at += 1) {
      let most = null;
      for (const kind of Object.keys(kinds)) if (kinds[kind][at] > (most ? kinds[most][at] : 0)) most = kind;
      if (!most || most === "productive") continue;
      const last = found[found.length - 1];
      if (last && last.kind === most && last.to === edges[at]) last.to = edges[at + 1];
      else found.push({ kind: most, from: edges[at], to: edges[at + 1] });
    }
    return found;
  };
  const markArea = () => ({
    silent: true, animation: false,
    data: bands().map((band) => [{ xAxis: band.from * 1000, itemStyle: { color: faded(colour(band.kind), 0.2) } }, { xAxis: band.to * 1000 }]),
  });

  const drawCurve = (name) => {
    const lines = [];
    runs.forEach((run, number) => {
      for (const part of ["series", "evaluations"]) {
        const data = points(run, part, name);
        if (!data.length) continue;
        const evaluates = part === "evaluations";
        const which = evaluates ? "evaluation" : SPEEDS.includes(name) ? name : "training";
        lines.push({
          name: one ? which : `${run.run}${SPEEDS.includes(name) ? "" : `, ${which}`}`, type: "line", data, sampling: "lttb", animation: false,
          showSymbol: evaluates && data.length <= 60 || data.length === 1, symbol: evaluates ? "emptyCircle" : "circle", symbolSize: 6,
          connectNulls: false, z: evaluates ? 4 : 3,
          lineStyle: { width: 1.7, type: evaluates && !one ? "dashed" : "solid" }, color: colour(`run-${one ? Number(evaluates) : number % 8}`),
        });
      }
    });
    if (lines.length) lines[0].markArea = markArea();
    const marks = markSeries();
    // A logarithm has no place for what is 0 or less: such values are left out, and of a curve without others all stay.
    const log = state.log && name.endsWith("loss") && lines.some((line) => line.data.some(([, value]) => value > 0));
    if (log) for (const line of lines) line.data = line.data.map(([x, value]) => [x, value > 0 ? value : null]);
    return (chart) => ({
      animation: false, textStyle: { fontFamily: "system-ui, sans-serif" },
      aria: { enabled: false }, grid: { left: 8, right: 28, top: lines.length > 1 ? 32 : 14, bottom: 6, containLabel: true },
      legend: { show: lines.length > 1, type: "scroll", top: 0, left: 0, itemWidth: 18, itemHeight: 13, textStyle: { color: colour("muted"), fontSize: 11 }, data: lines.map((line) => line.name) },
      xAxis: axisOfX(), yAxis: [axisOfY({ ...withMarks(log), ...(log ? { type: "log" } : {}) }), { show: false, axisLabel: { show: false }, min: 0, max: 1 }],
      tooltip: tooltip({
        trigger: "axis", axisPointer: { type: "line", lineStyle: { color: colour("muted") }, snap: false },
        formatter: (found) => {
          const list = Array.isArray(found) ? found : [found];
          if (!list.length) return "";
          const x = list[0].axisValue;
          const values = list.filter((item) => item.seriesType === "line").map((item) => `${item.seriesName}: ${digits(item.value[1])}`);
          return tip(heading(x), [...values, ...(one ? near(chart, x).slice(0, 6).map(ofMark) : [])]);
        },
      }),
      dataZoom: zoom(), series: [...lines, ...marks],
    });
  };

  const drawTime = () => () => {
    const { edges, kinds } = one.time;
    const share = (kind, at) => Math.min(100, (100 * kinds[kind][at]) / (edges[at + 1] - edges[at]));
    return {
      animation: false, grid: { left: 8, right: 28, top: 32, bottom: 10, containLabel: true },
      legend: { type: "scroll", top: 0, left: 0, itemWidth: 11, itemHeight: 11, textStyle: { color: colour("muted"), fontSize: 11 } },
      xAxis: { ...axisOfX(), type: "time", min: one.began * 1000, max: one.until * 1000 },
      yAxis: axisOfY({ min: 0, max: 100, axisLabel: { color: colour("muted"), fontSize: 11, formatter: "{value} %" } }),
      tooltip: tooltip({
        trigger: "axis",
        formatter: (found) => tip(moment(found[0].axisValue), found.filter((item) => item.value[1] > 0.05).map((item) => `${item.seriesName}: ${digits(item.value[1])} %`)),
      }),
      dataZoom: overTime() ? zoom() : [],
      series: Object.keys(kinds).map((kind) => ({
        name: kind, type: "line", stack: "time", step: "end", symbol: "none", lineStyle: { width: 0 }, color: colour(kind), areaStyle: { color: colour(kind), opacity: 0.9 },
        data: edges.map((edge, at) => [edge * 1000, share(kind, Math.min(at, edges.length - 2))]),
      })),
    };
  };

  const drawLanes = (box) => {
    const tasks = one.lanes.map((lane) => lane.task);
    const height = tasks.length > 40 ? 14 : 24;
    box.style.height = `${tasks.length * height + 58}px`;
    const states = [...new Set(one.lanes.flatMap((lane) => lane.spans.map((span) => span[2])))];
    const spans = one.lanes.flatMap((lane, at) => lane.spans.map(([from, to, what]) => [at, from * 1000, to * 1000, what]));
    const faults = one.marks.filter((mark) => mark.task && tasks.includes(mark.task));
    return () => ({
      animation: false, grid: { left: 8, right: 28, top: 30, bottom: 4, containLabel: true },
      legend: { type: "scroll", top: 0, left: 0, itemWidth: 11, itemHeight: 11, selectedMode: false, textStyle: { color: colour("muted"), fontSize: 11 }, data: states },
      xAxis: { ...axisOfX(), type: "time", min: one.began * 1000, max: one.until * 1000 },
      yAxis: { type: "category", inverse: true, data: tasks, axisTick: { show: false }, axisLine: { show: false }, axisLabel: { color: colour("text"), fontSize: 11, interval: 0 } },
      tooltip: tooltip({
        trigger: "item",
        formatter: (item) => {
          if (item.seriesType === "scatter") return tip(moment(item.value[0]), [ofMark(item.data.mark)]);
          const [lane, from, to, what] = item.value;
          return tip(`${tasks[lane]}: ${what}`, [`from ${moment(from)}`, `to ${moment(to)}`, duration((to - from) / 1000)]);
        },
      }),
      dataZoom: overTime() ? zoom() : [],
      series: [
        ...states.map((what) => ({
          name: what, type: "custom", color: colour(STATES[what] || "other"), encode: { x: [1, 2], y: 0 }, clip: true, data: spans.filter((span) => span[3] === what),
          renderItem: (params, api) => {
            const from = api.coord([api.value(1), api.value(0)]);
            const to = api.coord([api.value(2), api.value(0)]);
            const tall = api.size([0, 1])[1] * 0.62;
            const shape = echarts.graphic.clipRectByRect(
              { x: from[0], y: from[1] - tall / 2, width: Math.max(1.5, to[0] - from[0]), height: tall },
              { x: params.coordSys.x, y: params.coordSys.y, width: params.coordSys.width, height: params.coordSys.height },
            );
            return shape && { type: "rect", shape, style: { fill: api.visual("color") } };
          },
        })),
        {
          name: "faults", type: "scatter", symbol: "triangle", symbolRotate: 180, symbolSize: 9, z: 5,
          itemStyle: { color: colour("fault"), borderColor: colour("card"), borderWidth: 1 },
          data: faults.filter((mark) => mark.kind === "fault").map((mark) => ({ value: [mark.t * 1000, tasks.indexOf(mark.task)], mark })),
        },
      ],
    });
  };

  const drawSaves = () => () => {
    const at = (save) => (overTime() ? save[0] * 1000 : save[1]);
    const unit = unitOf(one.saves.reduce((most, save) => Math.max(most, save[3] || 0), 0));
    const drawn = (index, by) => one.saves.filter((save) => save[index] !== null && at(save) !== null).map((save) => [at(save), save[index] / by]);
    return {
      animation: false, grid: { left: 8, right: 8, top: 32, bottom: 8, containLabel: true },
      legend: { top: 0, left: 0, itemWidth: 14, itemHeight: 13, textStyle: { color: colour("muted"), fontSize: 11 } },
      xAxis: axisOfX(),
      yAxis: [
        axisOfY({ min: 0, axisLabel: { color: colour("muted"), fontSize: 11, formatter: (value) => `${digits(value)} s` } }),
        axisOfY({ min: 0, splitLine: { show: false }, axisLabel: { color: colour("muted"), fontSize: 11, formatter: (value) => `${digits(value)} ${unit.name}` } }),
      ],
      tooltip: tooltip({
        trigger: "axis",
        formatter: (found) => tip(heading(found[0].axisValue), found.map((item) => `${item.seriesName}: ${item.seriesIndex ? bytes(item.value[1] * unit.by) : duration(item.value[1])}`)),
      }),
      dataZoom: zoom(),
      series: [
        { name: "time it took", type: "line", symbolSize: 5, showSymbol: one.saves.length <= 120, lineStyle: { width: 1 }, color: colour("run-0"), data: drawn(2, 1) },
        { name: "size", type: "line", step: "end", symbol: "none", yAxisIndex: 1, lineStyle: { width: 1.4, type: "dashed" }, color: colour("run-1"), data: drawn(3, unit.by) },
      ],
    };
  };

  const drawTasks = (what) => () => {
    const unit = what === "gpu" ? { by: 0.01, name: "%" } : what === "processor" ? { by: 1, name: "cores" }
      : unitOf(Object.values(one.tasks).flatMap((usage) => usage[what] || []).reduce((most, each) => Math.max(most, each || 0), 0));
    const tasks = Object.entries(one.tasks);
    const format = (value) => `${digits(value)} ${unit.name}`;
    return {
      animation: false, grid: { left: 8, right: 28, top: 32, bottom: 8, containLabel: true },
      legend: { type: "scroll", top: 0, left: 0, itemWidth: 14, itemHeight: 13, textStyle: { color: colour("muted"), fontSize: 11 } },
      xAxis: { ...axisOfX(), type: "time", min: one.began * 1000, max: one.until * 1000 },
      yAxis: axisOfY({ min: 0, axisLabel: { color: colour("muted"), fontSize: 11, formatter: format } }),
      tooltip: tooltip({ trigger: "axis", formatter: (found) => tip(moment(found[0].axisValue), found.map((item) => `${item.seriesName}: ${format(item.value[1])}`)) }),
      dataZoom: overTime() ? zoom() : [],
      series: tasks.map(([task, usage], number) => [task, usage, number]).filter(([, usage]) => usage[what]).map(([task, usage, number]) => ({
        name: task, type: "line", sampling: "lttb", symbolSize: 4, showSymbol: usage.t.length <= 30, lineStyle: { width: 1.5 }, color: colour(`run-${number % 8}`),
        data: usage.t.map((t, at) => [t * 1000, usage[what][at] === null ? null : usage[what][at] / unit.by]),
      })),
    };
  };

  // The whole run, above the figures, with the part of it that they show.
  const drawOverview = () => () => {
    const name = "loss" in runs[0].series.values ? "loss" : Object.keys(runs[0].series.values)[0];
    const marks = markSeries();
    if (marks.length) marks.forEach((each) => { each.yAxisIndex = 1; each.symbolSize = 6; each.silent = true; delete each.markLine; });
    return {
      animation: false, grid: { left: 10, right: 10, top: 3, bottom: 3 }, xAxis: { ...axisOfX(), show: false }, tooltip: { show: false },
      yAxis: [{ show: false, type: "value", scale: true }, { show: false, min: 0, max: 1 }],
      dataZoom: [{
        type: "slider", left: 10, right: 10, top: 3, bottom: 3, filterMode: "none", showDetail: false, brushSelect: true, showDataShadow: false,
        borderColor: colour("line"), borderRadius: 4, backgroundColor: "transparent", fillerColor: faded(colour("accent"), 0.1), moveHandleSize: 0,
        handleSize: "80%", handleStyle: { color: colour("card"), borderColor: colour("muted") },
      }],
      series: [
        ...runs.map((run, number) => ({
          type: "line", data: name ? points(run, "series", name) : [], sampling: "lttb", symbol: "none", silent: true,
          lineStyle: { width: 1, opacity: 0.7 }, color: colour(`run-${number % 8}`), ...(number ? {} : { markArea: markArea() }),
        })), ...marks,
      ],
    };
  };

  const makers = {
    overview: drawOverview,
    curve: (box) => drawCurve(box.dataset.name), time: drawTime, lanes: drawLanes, saves: drawSaves,
    memory: () => drawTasks("memory"), processor: () => drawTasks("processor"), gpu: () => drawTasks("gpu"), gpu_memory: () => drawTasks("gpu_memory"),
  };
  const draw = (figure) => {
    if (!figure.chart) {
      figure.chart = echarts.init(figure.box, null, { renderer: "canvas" });
      figure.chart.setOption(makers[figure.kind](figure.box)(figure.chart));
    } else {
      figure.chart.setOption(makers[figure.kind](figure.box)(figure.chart), { notMerge: true });
    }
    figure.chart.resize(); // whose box may have grown meanwhile
    // All figures over one axis are zoomed together, and show the same moment.
    figure.chart.group = overTime() || OVER_BOTH.includes(figure.kind) ? "run" : undefined;
    echarts.connect("run");
    if (figures[0] !== figure && figures[0].chart) {
      const { start, end } = figures[0].chart.getOption().dataZoom[0];
      if (figure.chart.group && (start > 0 || end < 100)) figure.chart.dispatchAction({ type: "dataZoom", start, end }, { silent: true });
    }
  };
  const figures = [...document.querySelectorAll(".chart")].map((box) => ({ box, kind: box.dataset.figure, chart: null }));
  const drawAll = () => figures.forEach((figure) => { if (figure.chart) draw(figure); });
  const drawRest = () => figures.forEach((figure) => { if (!figure.chart) draw(figure); });
  // What can be seen is drawn at once, the rest when there is time.
  for (const figure of figures) if (figure.box.getBoundingClientRect().top < innerHeight) draw(figure);
  const whenIdle = window.requestIdleCallback || ((call) => setTimeout(call, 50));
  const drawNext = () => {
    const next = figures.find((figure) => !figure.chart);
    if (next) { draw(next); whenIdle(drawNext); }
  };
  whenIdle(drawNext);
  const watcher = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const figure = figures.find(({ box }) => box === target);
      if (isIntersecting && !figure.chart) draw(figure);
    }
  }, { rootMargin: "400px" });
  figures.forEach(({ box }) => watcher.observe(box));

  for (const input of document.querySelectorAll('input[name="over"]')) {
    input.addEventListener("change", () => { state.over = input.value; drawAll(); });
  }
  const log = document.getElementById("log");
  log.addEventListener("change", () => { state.log = log.checked; drawAll(); });
  document.getElementById("whole").addEventListener("click", () => {
    for (const { chart } of figures) if (chart) chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
  });
  for (const time of document.querySelectorAll("time")) {
    time.title = time.textContent;
    time.textContent = moment(Date.parse(time.getAttribute("datetime")));
  }
  let waits = 0;
  window.addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(() => figures.forEach(({ chart }) => chart && chart.resize()), 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // A sheet is laid out after the last script has run: the figures are drawn for its width before.
  const forSheet = (prints) => {
    document.documentElement.classList.toggle("sheet", prints);
    drawRest();
    drawAll();
    for (const { chart } of figures) chart.getZr().flush();
  };
  window.addEventListener("beforeprint", () => forSheet(true));
  window.addEventListener("afterprint", () => forSheet(false));
  matchMedia("print").addEventListener("change", ({ matches }) => forSheet(matches));
  // For tests: what is drawn, and how long that took.
  window.psfleet = { runs, figures, milliseconds: performance.now() - began };
})();
