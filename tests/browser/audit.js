// What can be wrong with a page for those who read or use it: each function returns sentences. An expression: `(…).contrast()`.
(() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parsed = {};
  const rgba = text => parsed[text] ||= (() => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  })();
  const over = (top, below) => top.slice(0, 3).map((part, at) => part * top[3] + below[at] * (1 - top[3]));
  const light = colour => {
    const [r, g, b] = colour.map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const chain = element => element ? [...chain(element.parentElement), element] : [];

  /** The colour behind an element of HTML: all that its ancestors paint, and itself. */
  const painted = element => chain(element).reduce((below, one) => over(rgba(getComputedStyle(one).backgroundColor), below), [255, 255, 255]);

  /** The same behind a text of SVG: the shapes that were drawn before it, below its middle, and its own halo. */
  function behind(text, box) {
    const svg = text.ownerSVGElement, x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    let below = painted(svg.parentElement);
    for (const shape of svg.querySelectorAll("rect, path, circle, polygon")) {
      if (shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_PRECEDING) break;
      const style = getComputedStyle(shape), around = shape.getBoundingClientRect();
      if (style.fill === "none" || style.visibility === "hidden") continue;
      if (x < around.left || x > around.right || y < around.top || y > around.bottom) continue;
      const place = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
      if (!shape.isPointInFill(place)) continue;  // a path of many marks has gaps
      const [r, g, b, a] = rgba(style.fill);
      below = over([r, g, b, a * style.opacity * style.fillOpacity], below);
    }
    const own = getComputedStyle(text);
    return own.paintOrder.startsWith("stroke") && parseFloat(own.strokeWidth) >= 3 ? over(rgba(own.stroke), below) : below;
  }

  const seen = element => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const told = element => `<${element.tagName.toLowerCase()} ${element.getAttribute("data-testid") || element.getAttribute("class") || ""}>`;

  return {
    /** Text against what is behind it, by WCAG's AA: 4.5 to 1, of large text 3 to 1. Disabled controls are exempt. */
    contrast() {
      const wrong = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement, text = node.textContent.trim();
        if (!text || element.closest('script, style, noscript, :disabled, [aria-hidden="true"]') || !seen(element)) continue;
        const box = element.getBoundingClientRect();
        if (!box.width || !box.height || box.right < 0) continue;
        const style = getComputedStyle(element), drawn = element instanceof SVGElement;
        const opacity = chain(element).reduce((product, one) => product * getComputedStyle(one).opacity, 1);
        const ground = drawn ? behind(element, box) : painted(element);
        const [r, g, b, a] = rgba(drawn ? style.fill : style.color);
        const found = ratio(over([r, g, b, a * opacity], ground), ground);
        const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (found < (large ? 3 : 4.5) - 0.01) wrong.add(`${found.toFixed(2)} to 1: "${text.slice(0, 40)}" in ${told(element)}`);
      }
      return [...wrong];
    },

    /** What a keyboard or a screen reader meets has a name, pictures too; nothing jumps the order of the page. */
    names() {
      const wrong = [];
      const named = one => (one.getAttribute("aria-label") || "").trim() || one.getAttribute("aria-labelledby")
        || [...(one.labels || [])].map(label => label.textContent).join("").trim() || one.textContent.trim();
      for (const one of document.querySelectorAll('a, button, input, select, textarea, [tabindex], [role="button"], [role="slider"]')) {
        if (one.id === "main" || !seen(one)) continue;
        if (!named(one)) wrong.push(`no name: ${told(one)}`);
        if (one.tabIndex > 0) wrong.push(`jumps the order: ${told(one)}`);
      }
      for (const one of document.querySelectorAll("svg, canvas")) {
        const said = (one.getAttribute("aria-label") || "").trim() || one.closest('[aria-hidden="true"], [role="img"][aria-label]');
        if (seen(one) && !said) wrong.push(`a picture without a name: ${told(one)}`);
      }
      for (const one of document.querySelectorAll("img:not([alt])")) wrong.push(`an image without alt: ${told(one)}`);
      const ids = [...document.querySelectorAll("[id]")].map(one => one.id);
      for (const id of ids.filter((one, at) => ids.indexOf(one) !== at)) wrong.push(`the id ${id} is there twice`);
      if (document.documentElement.lang !== "en") wrong.push("the page does not say its language");
      return wrong;
    },

    /** What is wider than the window, and in no box that scrolls by itself. */
    wide() {
      const root = document.documentElement, room = root.clientWidth, wrong = [];
      if (document.scrollingElement.scrollWidth > room) wrong.push(`the page is ${document.scrollingElement.scrollWidth} wide`);
      const boxed = one => chain(one.parentElement).some(at => at !== root && at !== document.body && getComputedStyle(at).overflowX !== "visible");
      for (const one of document.querySelectorAll("body *")) {
        const box = one.getBoundingClientRect();
        if (box.width && box.right > room + 1 && !one.closest(".tooltip, svg") && !boxed(one)) wrong.push(`${told(one)} ends at ${Math.round(box.right)}`);
      }
      return wrong.slice(0, 5);
    },

    /** What is there and cannot be seen: text beyond the edge of its box or picture, tables that scroll sideways, choices longer than their box. */
    clipped() {
      const wrong = [], canvas = document.createElement("canvas").getContext("2d");
      for (const one of document.querySelectorAll("body *")) {
        if (!seen(one) || one instanceof SVGElement || one.closest(".hidden-text, .skip, pre")) continue;
        const { overflowX, overflowY } = getComputedStyle(one), across = one.scrollWidth > one.clientWidth + 1, down = one.scrollHeight > one.clientHeight + 1;
        if (one.clientWidth && overflowX !== "visible" && across) wrong.push(`${told(one)} shows ${one.clientWidth} of ${one.scrollWidth} across`);
        if (one.clientHeight && overflowY !== "visible" && down && !one.matches("html, body, input, select")) wrong.push(`${told(one)} shows ${one.clientHeight} of ${one.scrollHeight} down`);
      }
      for (const one of document.querySelectorAll("select")) {
        const style = getComputedStyle(one), text = one.selectedOptions[0]?.textContent || "";
        canvas.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        if (seen(one) && canvas.measureText(text).width > one.clientWidth - parseFloat(style.paddingLeft)) wrong.push(`${told(one)} cuts "${text}"`);
      }
      for (const text of document.querySelectorAll("svg text")) {
        const mine = text.getBoundingClientRect(), whole = text.ownerSVGElement.getBoundingClientRect();
        if (mine.width && (mine.left < whole.left - 1 || mine.right > whole.right + 1 || mine.top < whole.top - 1 || mine.bottom > whole.bottom + 1)) wrong.push(`"${text.textContent}" leaves its picture`);
      }
      return wrong.slice(0, 8);
    },

    /** Text of a picture over other text of it. */
    overlapping() {
      const wrong = [];
      for (const picture of document.querySelectorAll("svg")) {
        const texts = [...picture.querySelectorAll("text")].filter(seen).map(one => [one.textContent, one.getBoundingClientRect()]).filter(([, box]) => box.width);
        texts.forEach(([one, a], at) => {
          for (const [other, b] of texts.slice(at + 1)) {  // a line of text has some pixels of its height to spare
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4) wrong.push(`"${one}" meets "${other}"`);
          }
        });
      }
      return wrong.slice(0, 8);
    },

    /** Options of the command line in a sentence of the page; a command stands in backticks. */
    flags() {
      const said = [...document.querySelectorAll("main, header, .tooltip")].map(one => one.innerText).join(" ").replace(/`[^`]*`/g, "");  // a report's foot has its command
      return [...new Set(said.match(/(?<![\w-])--[a-z][\w-]*/g) || [])];
    },

    /** What moves, or would. */
    moving() {
      const running = document.getAnimations().filter(one => one.playState === "running" && one.effect.getComputedTiming().duration > 0);
      const would = [...document.querySelectorAll("body *")].filter(one => getComputedStyle(one).transitionDuration.split(", ").some(time => parseFloat(time) > 0));
      return [...running.map(one => told(one.effect.target)), ...would.map(told)];
    },
  };
})()
