// Lists what was decided lately, by whom and why, the newest first.

import { $, ago, element } from "./dom.js";

export function showDeeds(deeds, now) {
  const shown = deeds.map((deed) => {
    const how = `${deed.by}${deed.acted ? "" : ", advice only"}${deed.times > 1 ? `, ${deed.times} times` : ""}`;
    return element("li", {},
      element("span", { className: "when", textContent: `${ago(now - deed.at_s)} ago` }),
      element("span", {}, element("b", { textContent: deed.what }), ` (${how})`, element("small", { textContent: deed.reason })));
  });
  $("deeds").replaceChildren(...(shown.length ? shown : [element("li", { textContent: "nothing yet, or it is for operators" })]));
}
