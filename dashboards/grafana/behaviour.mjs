// Grafana's own code, run on the dashboards: what it would write into a table, a number, a link, for the versions below.
//
// Law: frames are shaped as Grafana's Prometheus data source shapes them; nothing here decides how they are shown.

import { createRequire } from 'node:module';
import { JSDOM } from 'jsdom';

const page = new JSDOM('<!doctype html>', { url: 'http://localhost/' }).window;
for (const name of ['document', 'localStorage', 'HTMLElement', 'Element', 'Node', 'MutationObserver', 'DOMParser']) globalThis[name] = page[name];
globalThis.window = page;
if (!globalThis.navigator) Object.defineProperty(globalThis, 'navigator', { value: page.navigator, configurable: true });

const require = createRequire(import.meta.url);
export const VERSIONS = { '10.4': require('data-10.4'), '13.2': require('data-13.2') };
const UPSTREAMS = ['payments', 'legacy'];
const AT = 1_700_000_000_000;

/** What the data source gives for an instant query in the form «table»: time, labels, value. */
function asTable(grafana, refId, several, values) {
  return grafana.toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: 'time', values: UPSTREAMS.map(() => AT), config: {} },
      { name: 'upstream', type: 'string', values: UPSTREAMS, config: {} },
      { name: several ? `Value #${refId}` : 'Value', type: 'number', values, config: {} },
    ],
  });
}

/** What it gives for a series: times and values, with the labels on the field and the legend as its name. */
function asSeries(grafana, refId, legend, value) {
  return grafana.toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: 'time', values: [AT], config: {} },
      { name: 'Value', type: 'number', values: [value], labels: { upstream: 'payments' }, config: { displayNameFromDS: legend } },
    ],
  });
}

function replaced(text, scoped) {
  const known = { admin: 'http://admin', traces: 'tempo', __from: 'FROM', __to: 'TO' };
  return text.replace(/\$\{(\w+)(?:[.:][^}]*)?\}/g, (whole, name) => {
    const value = scoped?.__dataContext?.value;
    if (name === '__value' && value) return value.frame.fields.find((each) => each === value.field).values[value.rowIndex ?? 0] ?? whole;
    return known[name] ?? whole;
  });
}

function shownBy(grafana, panel, frames) {
  const theme = grafana.createTheme();
  return grafana.applyFieldOverrides({
    data: frames, fieldConfig: panel.fieldConfig, replaceVariables: replaced, theme, timeZone: 'utc',
    fieldConfigRegistry: grafana.standardFieldConfigEditorRegistry,
  });
}

async function transformed(grafana, panel, frames) {
  return new Promise((done, failed) => {
    grafana.transformDataFrame(panel.transformations, frames).subscribe({ next: done, error: failed });
  });
}

/** The headings that a person would see, left to right, and what is in the line of the first upstream. */
async function tableComplaints(grafana, panel) {
  const several = panel.targets.length > 1;
  const frames = panel.targets.map((target, place) => asTable(grafana, target.refId, several, [0.06 + place, 0.25 + place]));
  const [joined, ...more] = await transformed(grafana, panel, frames);
  const headings = joined.fields.map((field) => grafana.getFieldDisplayName(field, joined));
  const renamed = panel.transformations.find((each) => each.id === 'organize').options.renameByName;
  const wanted = [renamed.upstream, ...panel.targets.map((target) => renamed[several ? `Value #${target.refId}` : 'Value'])];
  if (more.length || JSON.stringify(headings) !== JSON.stringify(wanted)) return [`shows the columns ${headings}, and not ${wanted}`];
  if (joined.length !== UPSTREAMS.length) return [`shows ${joined.length} lines for ${UPSTREAMS.length} upstreams`];
  const [shown] = shownBy(grafana, panel, [joined]);
  const found = [];
  for (const override of panel.fieldConfig.overrides) {
    const field = shown.fields.find((each) => grafana.getFieldDisplayName(each, shown) === override.matcher.options);
    if (!field) found.push(`has an override for ${override.matcher.options}, which is no column`);
    for (const { id, value } of override.properties) {
      if (id === 'unit' && field?.config.unit !== value) found.push(`shows ${field?.name} as ${field?.config.unit}, and not as ${value}`);
      if (id === 'links' && field?.config.links?.length !== value.length) found.push(`has no links on ${field?.name}`);
    }
  }
  return found;
}

/** Units and words: a unit that Grafana does not know is written behind the number as it is. */
function numberComplaints(grafana, panel) {
  const known = new Set(grafana.getValueFormats().flatMap((group) => group.submenu.map((each) => each.value)));
  const units = [panel.fieldConfig.defaults.unit];
  for (const override of panel.fieldConfig.overrides) units.push(...override.properties.filter((each) => each.id === 'unit').map((each) => each.value));
  const found = units.filter((unit) => !known.has(unit)).map((unit) => `has the unit ${unit}, which is none of Grafana's`);
  for (const mapping of panel.fieldConfig.defaults.mappings) {
    for (const [value, { text }] of Object.entries(mapping.options)) {
      const [frame] = shownBy(grafana, panel, [asSeries(grafana, 'A', 'x', Number(value))]);
      const written = frame.fields[1].display(Number(value)).text;
      if (written !== text) found.push(`shows ${value} as ${written}, and not as ${text}`);
    }
  }
  return found;
}

/** An override for a series by name finds a series called so; thresholds give the colours written down. */
function lookComplaints(grafana, panel) {
  const found = [];
  for (const override of panel.fieldConfig.overrides) {
    if (!grafana.fieldMatchers.getIfExists(override.matcher.id)) found.push(`has an override by ${override.matcher.id}, which is no matcher`);
    const color = override.properties.find((each) => each.id === 'color')?.value.fixedColor;
    if (color === undefined || panel.type === 'table') continue;
    const name = override.matcher.options.replace(/^\/(.*?)\$?\/$/, '$1');
    const [frame] = shownBy(grafana, panel, [asSeries(grafana, 'A', name, 1)]);
    if (frame.fields[1].config.color?.fixedColor !== color) found.push(`does not draw ${name} in ${color}`);
  }
  if (panel.fieldConfig.defaults.color.mode === 'thresholds') {
    for (const { value, color } of panel.fieldConfig.defaults.thresholds.steps) {
      const at = value ?? -1e9;
      const [frame] = shownBy(grafana, panel, [asSeries(grafana, 'A', 'x', at)]);
      const drawn = frame.fields[1].display(at).color;
      const mapped = panel.fieldConfig.defaults.mappings.some((each) => String(at) in each.options);
      if (!mapped && drawn !== grafana.createTheme().visualization.getColorByName(color)) found.push(`draws ${at} in ${drawn}, and not in ${color}`);
    }
  }
  for (const each of panel.transformations ?? []) {
    if (!grafana.standardTransformersRegistry.getIfExists(each.id)) found.push(`is transformed by ${each.id}, which is no transformer`);
  }
  return found;
}

export async function behaved(boards) {
  const complaints = [];
  for (const [version, grafana] of Object.entries(VERSIONS)) {
    grafana.standardFieldConfigEditorRegistry.setInit(() => standardOptions(grafana));
    // One of them is listed under an old name as well.
    const transformers = new Map(Object.values(grafana.standardTransformers).map((each) => [each.id, each]));
    const given = (each) => (version === '10.4' ? each : async () => each); // later ones fetch it when it is needed
    grafana.standardTransformersRegistry.setInit(() => [...transformers.values()].map((each) => (
      { id: each.id, name: each.name, transformation: given(each), description: '' })));
    for (const board of boards) {
      for (const panel of board.panels.filter((each) => each.type !== 'row')) {
        const found = [...numberComplaints(grafana, panel), ...lookComplaints(grafana, panel)];
        if (panel.type === 'table') found.push(...await tableComplaints(grafana, panel));
        complaints.push(...found.map((each) => `Grafana ${version}: ${board.uid}: ${panel.title} ${each}`));
      }
    }
  }
  return complaints;
}

/** The options that Grafana's user interface registers, with what each does to a field; custom ones belong to panels. */
function standardOptions(grafana) {
  return ['unit', 'min', 'max', 'decimals', 'displayName', 'color', 'thresholds', 'mappings', 'links', 'noValue'].map((id) => ({
    id, path: id, name: id, process: grafana.identityOverrideProcessor, shouldApply: () => true, override: grafana.identityOverrideProcessor, settings: {},
    getItemsCount: () => 0, editor: () => null,
  }));
}
