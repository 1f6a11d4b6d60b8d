  // ---- mnist.center, step by step ----

  function even(value) { // Python's round: a half goes to the even neighbor
    const low = Math.floor(value);
    return value - low === 0.5 ? low + (low & 1) : Math.round(value);
  }

  function taps(size, count) { // bilinear with antialiasing: output k mixes inputs from..from+n
    const scale = size / count, reach = Math.max(scale, 1);
    return Array.from({ length: count }, (_, k) => {
      const middle = scale * (k + 0.5);
      const from = Math.max(Math.floor(middle - reach + 0.5), 0);
      const to = Math.min(Math.floor(middle + reach + 0.5), size);
      const mix = Array.from({ length: to - from }, (_, i) =>
        Math.max(0, 1 - Math.abs(from + i + 0.5 - middle) / reach));
      const sum = mix.reduce((a, b) => a + b);
      return { from, mix: mix.map((m) => m / sum) };
    });
  }

  function box(ink, width) { // [top, left, height, width] of the ink, or null
    let top = Infinity, left = Infinity, bottom = -1, right = -1;
    ink.forEach((v, i) => {
      if (!v) return;
      const y = Math.floor(i / width), x = i % width;
      top = Math.min(top, y); bottom = Math.max(bottom, y);
      left = Math.min(left, x); right = Math.max(right, x);
    });
    return bottom < 0 ? null : [top, left, bottom - top + 1, right - left + 1];
  }

  function center(ink, width) { // gray values, white on black -> 784 gray values, or null
    const found = box(ink, width);
    if (!found) return null;
    const [top, left, h, w] = found, scale = 20 / Math.max(h, w);
    const rows = taps(h, Math.max(1, even(scale * h))), columns = taps(w, Math.max(1, even(scale * w)));
    let mass = 0, down = 0, along = 0;
    const small = rows.map((row, r) => columns.map((column, c) => {
      let value = 0;
      row.mix.forEach((a, i) => column.mix.forEach((b, j) => {
        value += a * b * ink[(top + row.from + i) * width + left + column.from + j];
      }));
      mass += value; down += value * r; along += value * c;
      return value;
    }));
    // a symmetric stroke lies on a half: three decimals keep the last float bit out of it
    const start = (sum, size) =>
      Math.min(Math.max(even(Math.round((13.5 - sum / mass) * 1e3) / 1e3), 0), 28 - size);
    const y = start(down, rows.length), x = start(along, columns.length);
    const out = new Uint8Array(784);
    small.forEach((line, r) => line.forEach((v, c) => { out[(y + r) * 28 + x + c] = Math.round(v); }));
    return out;
  }
