// Charts, drawn again when the theme or the width changes.
{
  const data = page.data;
  const narrow = () => innerWidth < 560;

  const tooltip = (title, lines) => {
    const box = page.node("div", {}, page.node("b", { textContent: title }));
    lines.forEach((line) => box.append(page.node("div", { textContent: line })));
    return box;
  };

  const axis = (name, more = {}) => ({
    type: "value",
    name,
    nameLocation: "middle",
    nameGap: 28,
    nameTextStyle: { color: page.color("muted"), fontSize: 12 },
    axisLine: { show: true, lineStyle: { color: page.color("line") } },
    axisTick: { show: false },
    axisLabel: { color: page.color("muted"), fontSize: 12, hideOverlap: true },
    splitLine: { lineStyle: { color: page.color("line"), opacity: 0.6 } },
    ...more,
  });

  const base = (more) => ({
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 52, right: 22, top: 42, bottom: 46 },
    legend: {
      top: 0,
      left: 0,
      itemGap: 16,
      itemWidth: 15,
      itemHeight: 10,
      textStyle: { color: page.color("muted"), fontSize: 12 },
      inactiveColor: page.color("line"),
    },
    tooltip: {
      confine: true,
      backgroundColor: page.color("card"),
      borderColor: page.color("line"),
      textStyle: { color: page.color("ink"), fontSize: 12 },
      axisPointer: { lineStyle: { color: page.color("muted"), type: "dashed" } },
    },
    ...more,
  });

  const line = (name, points, color, more = {}) => ({
    name,
    type: "line",
    data: points,
    symbol: "none",
    lineStyle: { width: 2, color },
    itemStyle: { color },
    ...more,
  });

  const zip = (xs, ys) => xs.map((x, index) => [x, ys[index]]);

  const mark = (lines) => ({ silent: true, symbol: "none", data: lines, label: { color: page.color("ink"), fontSize: 12 } });

  const alphaLine = (alpha) => ({
    yAxis: alpha,
    lineStyle: { color: page.color("alpha"), type: "dashed", width: 1.3 },
    label: { formatter: `α ${page.number(alpha)}`, position: "insideStartTop" },
  });

  const stopLine = () => ({
    xAxis: data.stop,
    lineStyle: { color: page.color("good"), width: 1.6 },
    label: { formatter: `stop, step ${data.stop}`, position: "end", color: page.color("good") },
  });

  const marks = () => {
    const lines = [];
    if (data.alpha !== null) lines.push(alphaLine(data.alpha));
    if (data.stop !== null) lines.push(stopLine());
    return mark(lines);
  };

  const violation = () => {
    const { step, violation: batch, looks, measures } = data.course;
    const kinds = { probe: ["probes", "emptyCircle", "before"], confirm: ["confirmations", "diamond", "after"] };
    const series = [
      line("batch in training", zip(step, batch), page.color("before"), { lineStyle: { width: 1.2, color: page.color("before"), opacity: 0.8 } }),
      line("all examples", measures.map((one) => [one.step, one.mean]), page.color("forget"), {
        symbol: "circle",
        symbolSize: 6,
        lineStyle: { width: 2.4, color: page.color("forget") },
        markLine: marks(),
      }),
    ];
    const whiskers = [];
    for (const [stage, [name, symbol, color]] of Object.entries(kinds)) {
      const found = looks.filter((one) => (stage === "probe") === (one.stage === "probe") && one.mean !== null);
      if (!found.length) continue;
      series.push({
        name,
        type: "scatter",
        symbol,
        symbolSize: stage === "probe" ? 9 : 13,
        z: 4,
        itemStyle: { color: page.color(stage === "probe" ? "ink" : color) },
        data: found.map((one) => [one.step, one.mean, one.examples, one.standard_error]),
      });
      for (const one of found) {
        if (one.standard_error === null) continue;
        const half = 1.96 * one.standard_error;
        whiskers.push([one.step, Math.max(0, one.mean - half)], [one.step, Math.min(1, one.mean + half)], [one.step, null]);
      }
    }
    if (whiskers.length) {
      series.push(line("", whiskers, page.color("ink"), { lineStyle: { width: 1, color: page.color("ink"), opacity: 0.55 }, silent: true, tooltip: { show: false } }));
    }
    return base({
      xAxis: axis("update", { min: 0, splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis("", { min: 0, max: 1 }),
      legend: { ...base({}).legend, data: series.map((one) => one.name).filter(Boolean) },
      grid: { left: 40, right: 22, top: narrow() ? 76 : 52, bottom: 46 },
      tooltip: {
        ...base({}).tooltip,
        trigger: "axis",
        formatter: (items) => {
          const lines = items
            .filter((item) => item.seriesName && item.value[1] !== null)
            .map((item) => `${item.seriesName}: ${page.number(item.value[1])}${item.value[2] ? ` on ${item.value[2]} examples` : ""}`);
          return tooltip(`update ${items[0].value[0]}`, lines);
        },
      },
      series,
    });
  };

  const plain = (name, series, colors) => {
    const one = Object.keys(series).length === 1;
    return base({
      legend: { ...base({}).legend, show: !one },
      grid: { left: 58, right: 18, top: one ? 14 : 34, bottom: 42 },
      xAxis: axis("update", { min: 0, splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis("", { scale: name === "more" }),
      tooltip: {
        ...base({}).tooltip,
        trigger: "axis",
        formatter: (items) => tooltip(`update ${items[0].value[0]}`, items.map((item) => `${item.seriesName}: ${page.number(item.value[1], 4)}`)),
      },
      series: Object.entries(series).map(([key, values], index) =>
        line(key, zip(data.course.step, values), page.color(colors[index % colors.length]), {
          showSymbol: values.length === 1,
          symbol: "circle",
          markLine: data.stop === null || index ? undefined : mark([{ ...stopLine(), label: { show: false } }]),
        }),
      ),
    });
  };

  const margins = () => {
    const { edges, before, after, tau, count } = data.margins;
    const share = (values, total) => values.flatMap((value, index) => [[edges[index], value / total], [edges[index + 1], value / total]]);
    const area = (name, values, total, color) =>
      line(name, share(values, total), page.color(color), { areaStyle: { color: page.color(color), opacity: 0.28 } });
    return base({
      grid: { left: 52, right: 22, top: 52, bottom: 46 },
      xAxis: axis("margin of the token", { min: edges[0], max: edges[edges.length - 1], splitLine: { show: false } }),
      yAxis: axis("", { axisLabel: { ...axis("").axisLabel, formatter: (value) => `${(100 * value).toFixed(0)} %` } }),
      tooltip: {
        ...base({}).tooltip,
        trigger: "axis",
        formatter: (items) => {
          const at = items[0].value[0];
          const bin = Math.max(0, Math.min(before.length - 1, edges.findIndex((edge) => edge > at) - 1));
          return tooltip(`${page.number(edges[bin], 1)} to ${page.number(edges[bin + 1], 1)}`, [`before: ${before[bin]} tokens`, `after: ${after[bin]} tokens`]);
        },
      },
      series: [
        area("before", before, count.before, "before"),
        {
          ...area("after", after, count.after, "after"),
          markLine: mark([{ xAxis: tau, lineStyle: { color: page.color("alpha"), type: "dashed", width: 1.3 }, label: { formatter: `τ ${page.number(tau, 2)}`, position: "end" } }]),
        },
      ],
    });
  };

  const trade = (shown = data) => {
    const axes = shown.axes || { forget: "forget probability", utility: "retain probability" };
    const longest = Math.max(...shown.points.map((one) => one.seconds || 0), 1e-9);
    const size = (value) => 12 + 38 * Math.sqrt((value || 0) / longest);
    const palette = ["forget", "after", "retain", "chance", "good", "bad"];
    const label = { show: true, position: "right", distance: 8, color: page.color("ink"), fontSize: 12, formatter: (item) => item.data.name };
    const point = (one, more) => ({ name: one.name, value: [one.forget, one.retain], label, ...more });
    const placed = shown.points.filter((one) => one.forget !== null && one.retain !== null);
    const series = [
      {
        type: "scatter",
        data: placed.map((one, index) =>
          point(one, { seconds: one.seconds, symbolSize: size(one.seconds), itemStyle: { color: page.color(palette[index % palette.length]), opacity: 0.8, borderColor: page.color("card"), borderWidth: 1 } }),
        ),
        labelLayout: { moveOverlap: "shiftY" },
      },
    ];
    const extra = [];
    if (shown.retrained && shown.retrained.forget !== null && shown.retrained.retain !== null) {
      const star = "path://M12 1.5l3.2 6.9 7.5.9-5.5 5.2 1.4 7.4L12 18.2l-6.6 3.7 1.4-7.4L1.3 9.3l7.5-.9z";
      extra.push(point({ name: "retrained", ...shown.retrained }, { symbol: star, symbolSize: 24, label: { ...label, position: "left" }, itemStyle: { color: page.color("good") } }));
    }
    if (shown.original) {
      extra.push(point({ name: "before", ...shown.original }, { symbol: "emptyDiamond", symbolSize: 14, label: { ...label, position: "left" }, itemStyle: { color: page.color("muted") } }));
    }
    series.push({ type: "scatter", data: extra, z: 5 });
    return base({
      grid: { left: 60, right: narrow() ? 70 : 90, top: 24, bottom: 52 },
      xAxis: axis(`${axes.forget}  (left is better)`, { min: 0, max: 1 }),
      yAxis: axis(`${axes.utility}  (up is better)`, { max: 1, min: (range) => Math.max(0, Math.floor(range.min * 20 - 1) / 20), nameGap: 40 }),
      tooltip: {
        ...base({}).tooltip,
        formatter: (item) => {
          const lines = [`forget ${page.number(item.value[0])}`, `retain ${page.number(item.value[1])}`];
          if (item.data.seconds) lines.push(`${page.number(item.data.seconds, 1)} s`);
          return tooltip(item.data.name, lines);
        },
      },
      series,
    });
  };

  const over = () => {
    const palette = ["forget", "after", "retain", "chance", "good", "bad"];
    const alphas = [...new Set(data.courses.map((one) => one.alpha).filter((one) => one !== null))];
    return base({
      grid: { left: 40, right: 22, top: narrow() ? 68 : 42, bottom: 46 },
      xAxis: axis("update", { min: 0, splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis("", { min: 0, max: 1 }),
      tooltip: { ...base({}).tooltip, formatter: (item) => tooltip(item.seriesName, [`update ${item.value[0]}: ${page.number(item.value[1])}`]) },
      series: data.courses.map((one, index) =>
        line(one.name, one.points, page.color(palette[index % palette.length]), {
          symbol: ["circle", "diamond", "triangle", "rect", "pin"][index % 5],
          symbolSize: 7,
          markLine: index || !alphas.length ? undefined : mark(alphas.slice(0, 3).map(alphaLine)),
        }),
      ),
    });
  };

  const option = (kind) => {
    if (kind.startsWith("more:")) return plain("more", data.course.more[Number(kind.slice(5))].series, ["after", "forget", "retain", "chance"]);
    if (kind.startsWith("trade:")) return trade(data.trades[Number(kind.slice(6))]);
    if (kind === "forget_loss") return plain(kind, { "forget loss": data.course.forget_loss }, ["forget"]);
    if (kind === "retain_loss") return plain(kind, { "retain loss": data.course.retain_loss }, ["retain"]);
    return { violation, margins, trade, over }[kind]();
  };

  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = echarts.init(place, null, { renderer: "svg" });
    const draw = () => chart.setOption(option(place.dataset.chart), true);
    draw();
    page.redraw.push(draw);
    new ResizeObserver(() => chart.resize()).observe(place);
  }
}
